//! Conversion of unmodified Burn models to W4A16 or W8A16 models, and loading and export of
//! checkpoints.

mod attach;
mod entered;
mod examine;
mod export;
mod export_error;
mod load;
mod load_error;
mod load_options;
mod parameters;
mod report;
mod reset;
mod rules;
mod survey;

pub use export_error::ExportError;
pub use load_error::LoadError;
pub use load_options::LoadOptions;
pub use report::{LayerReport, Outcome, Report, SkipReason};
pub use reset::reset_placeholders;

use crate::Error;
pub use crate::error::ConvertError;
use attach::Attach;
use burn::module::{Module, ParamId};
use examine::Examine;
use marlin_format::{PlainWeight, QuantSpec, Sparsity, WeightFormat};
use regex::Regex;
use rules::{Choice, Rules};
use std::collections::{HashMap, HashSet};
use survey::{Candidate, Survey, Types, survey};

/// A builder for the conversion of a model. Every `Linear` that the patterns select gets a
/// quantised weight; the rest of the model is unchanged.
///
/// The spec sets the bits of a weight: 4 with [`QuantSpec::int4`], 8 with [`QuantSpec::int8`],
/// which makes W8A16 layers.
///
/// The model's type does not change. Each converted weight keeps its path and shape, but its tensor
/// is a placeholder: a single NaN, expanded to [K, N]. The quantised weight is attached to the
/// parameter as a reparameterisation. Call [`install`](crate::install) at the start of the program,
/// so that on CubeCL devices matmuls read the packed weight directly.
///
/// Patterns are regular expressions, searched anywhere in a parameter's path
/// (`layers.0.attention.query.weight`).
///
/// - `layer.weight.val()` is the dequantised weight. **Code that reads the parameter without
///   `val()` reads the placeholder**: `weight.to_data()`, `into_value()`, `weight.map(..)` on the
///   parameter itself, visitors and mappers. The placeholder is NaN, so that a result computed from
///   it is visibly wrong.
/// - A record of the converted model holds the quantised weights. To load such a record, first
///   convert a freshly initialised model in the same way, or create a model with
///   [`unloaded`](Self::unloaded). A model that has been used (run, printed, passed to
///   `apply_lora`) must first pass through [`reset_placeholders`]: otherwise Burn refuses the
///   record ("expected [128, 256] but record has [1, 1]").
/// - A float checkpoint that is loaded into a converted model is refused, or rounded if the model
///   has been used.
/// - A cast, or a move to another *backend* (Flex to CUDA, for example) after the first use, turns
///   each placeholder into a full float tensor: [`reset_placeholders`] frees these tensors.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::tensor::Device;
/// use burn_marlin::{GroupSize, QuantSpec, WeightQuantizer};
/// # let model = LinearConfig::new(64, 32).init(&Device::flex());
/// let (model, report) = WeightQuantizer::new(QuantSpec::int4(GroupSize::G64)).exclude("lm_head").quantize(model)?;
/// # assert_eq!(report.quantized(), 1);
/// # Ok::<(), burn_marlin::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct WeightQuantizer {
    spec: QuantSpec,
    include: Vec<String>,
    exclude: Vec<String>,
    /// Specs by pattern: a layer gets the spec of the first pattern that matches its path.
    specs: Vec<(String, QuantSpec)>,
    also: Vec<String>,
    sparsity: Sparsity,
    strict: bool,
}

/// A layer that is selected for conversion.
#[derive(Debug, Clone, PartialEq)]
pub struct SelectedLayer {
    /// The path of the layer's weight in the model, such as `layers.0.attention.query.weight`.
    pub path: String,
    /// The id of the weight's parameter; parameters with the same id may share one tensor.
    pub id: ParamId,
    /// The number of input features, K.
    pub k: usize,
    /// The number of output features, N.
    pub n: usize,
    /// The format of the converted weight.
    pub format: WeightFormat,
}

/// The source of the weights of converted layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weights {
    /// The float values, rounded.
    Rounded,
    /// No values, until a record is loaded.
    Unloaded,
}

impl WeightQuantizer {
    /// Creates a quantiser that converts every `Linear` to `spec`.
    pub fn new(spec: QuantSpec) -> Self {
        Self {
            spec,
            include: Vec::new(),
            exclude: Vec::new(),
            specs: Vec::new(),
            also: Vec::new(),
            sparsity: Sparsity::Dense,
            strict: false,
        }
    }

    /// Restricts the conversion to layers whose path matches `pattern` or another included pattern.
    pub fn include(mut self, pattern: impl Into<String>) -> Self {
        self.include.push(pattern.into());
        self
    }

    /// Skips layers whose path matches `pattern`; takes precedence over [`include`](Self::include).
    pub fn exclude(mut self, pattern: impl Into<String>) -> Self {
        self.exclude.push(pattern.into());
        self
    }

    /// Converts layers whose path matches `pattern` to `spec` instead of the default spec. If
    /// several such patterns match, the first one applies.
    pub fn with_spec(mut self, pattern: impl Into<String>, spec: QuantSpec) -> Self {
        self.specs.push((pattern.into(), spec));
        self
    }

    /// Prunes every converted layer to 2:4 sparsity before it is rounded: in every four input
    /// features of an output feature, the two weights with the largest magnitude are kept. A layer
    /// that is already 2:4 keeps its weights, so a model that was fine-tuned with a fixed mask is
    /// not pruned further.
    ///
    /// On NVIDIA cards the sparse tensor cores multiply the kept values, which are stored in three
    /// quarters of the bytes of a dense weight; other devices hold the weights dense. K must be a
    /// multiple of 4: other layers are skipped.
    pub fn sparse24(mut self) -> Self {
        self.sparsity = Sparsity::TwoFour;
        self
    }

    /// Converts layers of type `T`, too, which must have a field `weight` [K, N] and multiply
    /// activations [.., K] with it, as Burn's `Linear` does. Types are identified only by name,
    /// without their path.
    pub fn also<T: Module>(mut self) -> Self {
        let name = std::any::type_name::<T>();
        let name = name.split('<').next().unwrap_or(name);
        self.also
            .push(name.rsplit("::").next().unwrap_or(name).to_owned());
        self
    }

    /// Makes the conversion fail if a linear layer that the patterns select cannot be converted, or
    /// if a pattern matches no linear layer.
    pub fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    /// Converts a model, and returns it with a report of every layer. The float values of each
    /// layer are freed before the next layer is rounded.
    ///
    /// # Errors
    /// A pattern is not a valid regular expression, or a weight has values that are not finite;
    /// with [`strict`](Self::strict), also the conditions described there. The error contains the
    /// model.
    pub fn quantize<M: Module>(&self, model: M) -> Result<(M, Report), ConvertError<M>> {
        self.convert(model, Weights::Rounded, &mut |_| None)
    }

    /// Converts a model like [`quantize`](Self::quantize), with weights that are already quantised.
    /// `weights` is called with the path of each [selected](Self::select) layer; if it returns
    /// `None`, the layer is rounded.
    ///
    /// # Errors
    /// The errors of [`quantize`](Self::quantize), and [`Error::WeightShape`].
    pub fn quantize_with<M: Module>(
        &self,
        model: M,
        mut weights: impl FnMut(&str) -> Option<PlainWeight>,
    ) -> Result<(M, Report), ConvertError<M>> {
        self.convert(model, Weights::Rounded, &mut weights)
    }

    /// Returns the layers that [`quantize`](Self::quantize) would convert, in the model's order.
    ///
    /// # Errors
    /// The errors of [`quantize`](Self::quantize).
    pub fn select<M: Module>(&self, model: &M) -> Result<Vec<SelectedLayer>, Error> {
        let found = survey(
            model,
            Types {
                also: &self.also,
                initialize: true,
            },
        );
        let choices = self.choose(&Rules::new(self)?, &found, model, Weights::Rounded)?;
        let layers =
            found
                .candidates
                .into_iter()
                .zip(choices.layers)
                .filter_map(|(candidate, choice)| match choice {
                    Choice::Convert(Some(spec)) => {
                        let (
                            Candidate {
                                path, id, shape, ..
                            },
                            format,
                        ) = (
                            candidate,
                            WeightFormat::dense(spec).with_sparsity(self.sparsity),
                        );
                        Some(SelectedLayer {
                            path,
                            id,
                            k: shape[0],
                            n: shape[1],
                            format,
                        })
                    }
                    _ => None,
                });
        Ok(layers.collect())
    }

    /// Converts a model without reading its weights, so that the record of a converted model can be
    /// loaded. The outputs are NaN until then.
    ///
    /// The record determines each layer's format.
    ///
    /// # Errors
    /// The errors of [`quantize`](Self::quantize), except the error for values that are not finite.
    pub fn unloaded<M: Module>(&self, model: M) -> Result<(M, Report), ConvertError<M>> {
        self.convert(model, Weights::Unloaded, &mut |_| None)
    }

    fn convert<M: Module>(
        &self,
        model: M,
        weights: Weights,
        given: &mut dyn FnMut(&str) -> Option<PlainWeight>,
    ) -> Result<(M, Report), ConvertError<M>> {
        let found = survey(
            &model,
            Types {
                also: &self.also,
                initialize: weights == Weights::Rounded,
            },
        );
        let rules = match Rules::new(self) {
            Ok(rules) => rules,
            Err(error) => return Err(ConvertError { model, error }),
        };
        let choices = match self.choose(&rules, &found, &model, weights) {
            Ok(choices) => choices,
            Err(error) => return Err(ConvertError { model, error }),
        };
        let selected = |choice: &Choice| matches!(choice, Choice::Convert(_));
        let mut ids = HashSet::new();
        let selected_ids = found
            .candidates
            .iter()
            .zip(&choices.layers)
            .filter(|(_, choice)| selected(choice))
            .map(|(layer, _)| layer.id);
        let shared = selected_ids.filter(|&id| !ids.insert(id)).collect();
        let mut attach = Attach {
            rules: &rules,
            weights,
            given,
            selected: HashMap::new(),
            shared,
            made: HashMap::new(),
            outcomes: HashMap::new(),
            failed: None,
        };
        let mut layers = Vec::with_capacity(found.candidates.len());
        for (candidate, choice) in found.candidates.into_iter().zip(choices.layers) {
            let Candidate {
                path,
                shape,
                size_bytes,
                ..
            } = candidate;
            let outcome = match choice {
                Choice::Convert(spec) => {
                    attach.selected.insert(path.clone(), spec);
                    None
                }
                Choice::Skipped(reason) => Some(Outcome::Skipped(reason)),
            };
            layers.push((path, shape, size_bytes, outcome));
        }
        let model = model.apply_reparameterization(&mut attach);
        if let Some(error) = attach.failed {
            return Err(ConvertError { model, error });
        }
        let mut outcomes = attach.outcomes;
        let layers = layers
            .into_iter()
            .filter_map(|(path, shape, float_bytes, outcome)| {
                let outcome = outcome.or_else(|| outcomes.remove(&path))?;
                Some(LayerReport {
                    path,
                    shape,
                    float_bytes,
                    outcome,
                })
            });
        let (layers, model_bytes) = (layers.collect(), found.size_bytes);
        let report = Report {
            layers,
            unmatched: choices.unmatched,
            model_bytes,
            ..Report::default()
        };
        match self.strict_error(&report) {
            Some(error) => Err(ConvertError { model, error }),
            None => Ok((model, report)),
        }
    }

    /// Chooses the outcome for each candidate, before the model is changed.
    fn choose<M: Module>(
        &self,
        rules: &Rules,
        found: &Survey,
        model: &M,
        weights: Weights,
    ) -> Result<Choices, Error> {
        // Patterns select among linear layers: a pattern that matches none of them has no effect.
        let linear = |candidate: &&Candidate| candidate.skipped != Some(SkipReason::NotLinear);
        let matches_none = |pattern: &&Regex| {
            !found
                .candidates
                .iter()
                .filter(linear)
                .any(|candidate| pattern.is_match(&candidate.path))
        };
        let unmatched: Vec<String> = rules
            .patterns()
            .filter(matches_none)
            .map(Regex::to_string)
            .collect();
        let layers: Vec<Choice> = found
            .candidates
            .iter()
            .map(|candidate| rules.choice(candidate, weights))
            .collect();
        if weights == Weights::Rounded {
            let choices = found.candidates.iter().zip(&layers);
            let skipped = choices.clone().filter_map(|(layer, choice)| match choice {
                Choice::Skipped(reason) => Some((layer.path.clone(), reason.clone())),
                Choice::Convert(_) => None,
            });
            if let Some(error) = self.refused(skipped, &unmatched) {
                return Err(error);
            }
            let specs = choices.filter_map(|(layer, choice)| match choice {
                Choice::Convert(Some(spec)) => Some((layer.path.as_str(), *spec)),
                _ => None,
            });
            Examine::all(model, specs.collect())?;
        }
        Ok(Choices { layers, unmatched })
    }

    fn strict_error(&self, report: &Report) -> Option<Error> {
        let skipped = report
            .layers
            .iter()
            .filter_map(|layer| match &layer.outcome {
                Outcome::Skipped(reason) => Some((layer.path.clone(), reason.clone())),
                Outcome::Quantized { .. } => None,
            });
        self.refused(skipped, &report.unmatched)
    }

    /// Returns the error of a strict conversion for the skipped layers `left` and the patterns
    /// `unmatched`; `None` if the conversion accepts them.
    fn refused(
        &self,
        skipped: impl Iterator<Item = (String, SkipReason)>,
        unmatched: &[String],
    ) -> Option<Error> {
        let skipped: Vec<_> = skipped.filter(|(_, reason)| !reason.is_wanted()).collect();
        (self.strict && !(skipped.is_empty() && unmatched.is_empty())).then(|| Error::Strict {
            skipped,
            unmatched: unmatched.to_vec(),
        })
    }
}

/// The choices for a model's parameters.
struct Choices {
    /// The choice for each candidate, in the order of the survey.
    layers: Vec<Choice>,
    /// Patterns that match no linear layer.
    unmatched: Vec<String>,
}
