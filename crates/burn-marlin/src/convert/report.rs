use crate::QuantizedWeight;
use crate::device::target;
use marlin_format::{FormatError, WeightFormat, fold_layers};
use marlin_kernels::{ActivationDtype, Plan, plan_converted};
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};
use std::fmt;

/// The outcome of a conversion for every layer.
///
/// `{}` prints a summary: totals, the outcome for linear layers, and the reasons why some were
/// skipped. `{:#}` prints a table of every layer. [`Serialize`] and [`to_json`](Self::to_json) give
/// the full report to programs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// Every float or quantised parameter with two or more dimensions, in the model's order.
    pub layers: Vec<LayerReport>,
    /// The patterns that match no linear layer; for patterns of
    /// [`LoadOptions`](super::LoadOptions), those that match no parameter.
    pub unmatched: Vec<String>,
    /// The size in bytes of all float parameters before the conversion.
    pub model_bytes: usize,
    /// Paths of parameters for which a [loaded](crate::WeightQuantizer::load_with) checkpoint has
    /// no tensor; they keep their values.
    pub missing: Vec<String>,
    /// Tensors and layers of a [loaded](crate::WeightQuantizer::load) checkpoint for which the
    /// model has no parameter, as named in the files.
    pub unused: Vec<String>,
}

impl Report {
    /// Returns the number of linear layers that now have a quantised weight.
    pub fn quantized(&self) -> usize {
        self.layers
            .iter()
            .filter(|layer| matches!(layer.outcome, Outcome::Quantized { .. }))
            .count()
    }

    /// Returns the number of linear layers that were skipped.
    pub fn skipped(&self) -> usize {
        self.linear().count() - self.quantized()
    }

    /// Returns the layers with groups whose scales are too small for the scale dtype.
    pub fn underflowing(&self) -> impl Iterator<Item = &LayerReport> {
        self.layers.iter().filter(|layer| {
            matches!(
                layer.outcome,
                Outcome::Quantized {
                    underflows: 1..,
                    ..
                }
            )
        })
    }

    /// Returns the linear layers.
    pub fn linear(&self) -> impl Iterator<Item = &LayerReport> {
        self.layers
            .iter()
            .filter(|layer| layer.outcome != Outcome::Skipped(SkipReason::NotLinear))
    }

    /// Returns the size in bytes of the converted layers' weights, before and after the conversion.
    /// A weight that layers share counts once.
    pub fn converted_bytes(&self) -> [usize; 2] {
        self.layers
            .iter()
            .fold([0, 0], |[before, after], layer| match layer.outcome {
                Outcome::Quantized {
                    size_bytes,
                    shared_with: None,
                    ..
                } => [before + layer.float_bytes, after + size_bytes],
                _ => [before, after],
            })
    }

    /// Returns the size of the model in bytes, before and after the conversion. The first size is
    /// that of the float parameters. The second size is that of the remaining float parameters and
    /// the quantised weights. A weight that layers share counts once.
    pub fn total_bytes(&self) -> [usize; 2] {
        let shared = |layer: &&LayerReport| {
            matches!(
                layer.outcome,
                Outcome::Quantized {
                    shared_with: Some(_),
                    ..
                }
            )
        };
        let before = self.model_bytes
            - self
                .layers
                .iter()
                .filter(shared)
                .map(|layer| layer.float_bytes)
                .sum::<usize>();
        let [float, quantized] = self.converted_bytes();
        [before, before - float + quantized]
    }

    /// Returns the report as JSON: `layers`, each with `path`, `shape`, `float_bytes` and its
    /// outcome, the number of `underflowing` layers, `unmatched` patterns, `missing` parameters,
    /// `unused` tensors, and the totals.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self)
            .unwrap_or_else(|error| unreachable!("strings and numbers are JSON: {error}"))
    }
}

/// The outcome for one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerReport {
    /// Path of the parameter in the model.
    pub path: String,
    /// The shape of the weight; [K, N] for a `Linear`.
    pub shape: Vec<usize>,
    /// The size of the float values in bytes.
    pub float_bytes: usize,
    /// The outcome.
    pub outcome: Outcome,
}

/// The outcome of a conversion for one layer: quantised, or skipped for a reason.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The layer has a quantised weight.
    Quantized {
        /// The format to which the weight was rounded. A device without sparse tensor cores holds a
        /// 2:4 weight dense.
        format: WeightFormat,
        /// The size of the weight on the device in bytes.
        size_bytes: usize,
        /// The kernel that runs the layer with one row of activations, and the reason for the
        /// choice.
        plan: Plan,
        /// The path of the layer that shares this weight, if the two weights were one tensor before
        /// the conversion.
        shared_with: Option<String>,
        /// The number of groups whose scales are too small for the scale dtype
        /// ([`PlainWeight::underflows`](marlin_format::PlainWeight::underflows)). Values of these
        /// groups become 0, or are rounded with a larger error than that of the bit width.
        underflows: usize,
    },
    /// The layer was skipped and is unchanged.
    Skipped(SkipReason),
}

impl Outcome {
    /// Returns the outcome for the layer at `path` that now has `weight`, and logs it at debug
    /// level.
    pub(super) fn quantized(
        path: &str,
        weight: &QuantizedWeight,
        format: WeightFormat,
        activations: ActivationDtype,
        shared_with: Option<String>,
    ) -> Self {
        let plan = plan_converted(&weight.problem(1, activations), &target(&weight.device()));
        tracing::debug!(layer = %path, %format, kernel = %plan.kernel, reason = %plan.reason, "W4A16 layer");
        Self::Quantized {
            format,
            size_bytes: weight.size_bytes(),
            plan,
            shared_with,
            underflows: 0,
        }
    }

    /// Sets the number of groups whose scales underflow.
    pub(super) fn with_underflows(mut self, count: usize) -> Self {
        if let Self::Quantized { underflows, .. } = &mut self {
            *underflows = count;
        }
        self
    }
}

/// The reason why a layer was skipped.
#[derive(Debug, Clone, PartialEq)]
pub enum SkipReason {
    /// The parameter is not the weight of Burn's `Linear`. It belongs to an embedding, a
    /// convolution or another module.
    NotLinear,
    /// The weight belongs to a type named `Linear` that is not Burn's, and may store the weight as
    /// [N, K].
    OtherLinear,
    /// The weight of a `Linear` that the [loaded](crate::WeightQuantizer::load) checkpoint holds in
    /// float.
    FloatInCheckpoint,
    /// The weight of a `Linear` that the [loaded](crate::WeightQuantizer::load_with) checkpoint
    /// does not hold.
    NotInCheckpoint,
    /// An excluding pattern matches the path of the layer.
    Excluded {
        /// The pattern.
        pattern: String,
    },
    /// No including pattern matches the path of the layer, and there are some.
    NotIncluded,
    /// The weight is already quantised by Burn.
    AlreadyQuantized,
    /// The parameter already has a reparameterisation (LoRA or an earlier conversion), and takes
    /// only one.
    Reparameterized,
    /// The parameter has a shape that no quantised weight can have.
    Shape {
        /// The cause.
        error: FormatError,
    },
}

impl SkipReason {
    /// Returns true if a strict conversion accepts a layer that is skipped for this reason.
    pub(super) fn is_wanted(&self) -> bool {
        matches!(
            self,
            Self::NotLinear
                | Self::FloatInCheckpoint
                | Self::NotInCheckpoint
                | Self::Excluded { .. }
                | Self::NotIncluded
        )
    }
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLinear => f.write_str("not the weight of a Linear"),
            Self::OtherLinear => f.write_str("a type named Linear that is not Burn's; if its weight is [K, N], ask for it with `also`"),
            Self::FloatInCheckpoint => f.write_str("float in the checkpoint"),
            Self::NotInCheckpoint => f.write_str("not in the checkpoint"),
            Self::Excluded { pattern } => write!(f, "excluded by `{pattern}`"),
            Self::NotIncluded => f.write_str("not included by any pattern"),
            Self::AlreadyQuantized => f.write_str("already quantised by Burn"),
            Self::Reparameterized => f.write_str("already reparameterised (LoRA or an earlier conversion)"),
            Self::Shape { error } => error.fmt(f),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Quantized {
                format,
                plan,
                shared_with,
                underflows,
                ..
            } => {
                write!(f, "{format}; {}: {}", plan.kernel, plan.reason)?;
                if *underflows > 0 {
                    write!(
                        f,
                        "; {underflows} groups too small for {} scales",
                        format.spec.scales.dtype
                    )?;
                }
                shared_with
                    .as_ref()
                    .map_or(Ok(()), |path| write!(f, "; one with {path}"))
            }
            Self::Skipped(reason) => write!(f, "skipped: {reason}"),
        }
    }
}

impl LayerReport {
    fn shape(&self) -> String {
        self.shape
            .iter()
            .map(usize::to_string)
            .collect::<Vec<_>>()
            .join(" x ")
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [float, quantized] = self.converted_bytes();
        let [before, after] = self.total_bytes();
        writeln!(
            f,
            "{} of {} linear layers quantised: {float} to {quantized} bytes",
            self.quantized(),
            self.linear().count()
        )?;
        writeln!(f, "the whole model: {before} to {after} bytes")?;
        if f.alternate() {
            self.write_table(f)?;
        } else {
            self.write_runs(f)?;
        }
        let small = self.underflowing().count();
        if small > 0 {
            writeln!(
                f,
                "{small} layers have weights too small for their scales; use bf16 or f32 scales (`QuantSpec::with_scale_dtype`)"
            )?;
        }
        for pattern in &self.unmatched {
            writeln!(f, "`{pattern}` matches nothing that it could select")?;
        }
        if !self.missing.is_empty() {
            writeln!(
                f,
                "{} parameters are not in the checkpoint: {}",
                self.missing.len(),
                self.missing.join(", ")
            )?;
        }
        if !self.unused.is_empty() {
            writeln!(
                f,
                "{} tensors and layers of the checkpoint are unused: {}",
                self.unused.len(),
                self.unused.join(", ")
            )?;
        }
        Ok(())
    }
}

impl Report {
    /// Writes one line for each layer.
    fn write_table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self
            .layers
            .iter()
            .map(|layer| layer.path.len())
            .max()
            .unwrap_or(0);
        for layer in &self.layers {
            let after = match layer.outcome {
                Outcome::Quantized { size_bytes, .. } => size_bytes,
                Outcome::Skipped(_) => layer.float_bytes,
            };
            writeln!(
                f,
                "{:width$}  {:>14}  {:>11}  {after:>11}  {}",
                layer.path,
                layer.shape(),
                layer.float_bytes,
                layer.outcome
            )?;
        }
        Ok(())
    }

    /// Writes one line for each run of linear layers with the same outcome whose paths differ only
    /// in consecutive numbers, and one line for all other parameters.
    fn write_runs(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let describe = |layer: &LayerReport| {
            (
                layer.path.clone(),
                format!("{:>14}  {}", layer.shape(), layer.outcome),
            )
        };
        let runs = fold_layers(self.linear().map(describe));
        let width = runs.iter().map(|run| run.path.len()).max().unwrap_or(0);
        for run in runs {
            writeln!(
                f,
                "{:>5} x {:width$}  {}",
                run.count, run.path, run.description
            )?;
        }
        let others = self.layers.len() - self.linear().count();
        if others > 0 {
            writeln!(
                f,
                "{others:>5} other parameters (embeddings, convolutions, ..) left as they are"
            )?;
        }
        Ok(())
    }
}

impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let ([float, quantized], [before, after]) = (self.converted_bytes(), self.total_bytes());
        let mut report = serializer.serialize_struct("Report", 11)?;
        report.serialize_field("quantized", &self.quantized())?;
        report.serialize_field("skipped", &self.skipped())?;
        report.serialize_field("converted_bytes_before", &float)?;
        report.serialize_field("converted_bytes_after", &quantized)?;
        report.serialize_field("bytes_before", &before)?;
        report.serialize_field("bytes_after", &after)?;
        report.serialize_field("underflowing", &self.underflowing().count())?;
        report.serialize_field("unmatched", &self.unmatched)?;
        report.serialize_field("missing", &self.missing)?;
        report.serialize_field("unused", &self.unused)?;
        report.serialize_field("layers", &self.layers)?;
        report.end()
    }
}

impl Serialize for LayerReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut layer = serializer.serialize_struct("LayerReport", 10)?;
        layer.serialize_field("path", &self.path)?;
        layer.serialize_field("shape", &self.shape)?;
        layer.serialize_field("float_bytes", &self.float_bytes)?;
        match &self.outcome {
            Outcome::Quantized {
                format,
                size_bytes,
                plan,
                shared_with,
                underflows,
            } => {
                layer.serialize_field("spec", &format.spec)?;
                layer.serialize_field("sparsity", &format.sparsity.to_string())?;
                layer.serialize_field("size_bytes", size_bytes)?;
                layer.serialize_field("kernel", &plan.kernel.to_string())?;
                layer.serialize_field("reason", &plan.reason.to_string())?;
                layer.serialize_field("shared_with", shared_with)?;
                layer.serialize_field("underflows", underflows)?;
            }
            Outcome::Skipped(reason) => layer.serialize_field("skipped", &reason.to_string())?,
        }
        layer.end()
    }
}
