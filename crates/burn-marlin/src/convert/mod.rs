//! One call that turns an unmodified Burn model into a W4A16 or W8A16 model.

mod report;
mod survey;

pub use report::{LayerReport, LeftReason, Outcome, Report};

use crate::{Error, QuantizedWeight, target};
use burn::module::{Module, Param, ParamId, Reparameterizer};
use burn::tensor::{Device, Shape, Tensor};
use marlin_format::{FormatError, QuantSpec};
use marlin_kernels::{ActivationDtype, select_converted};
use regex::Regex;
use std::collections::HashMap;
use survey::{Candidate, survey};

/// Converts a model: every `Linear` that the patterns select gets a quantised weight, everything else stays as it is.
///
/// The weight's bits are those of the spec: 4 with [`QuantSpec::int4`], 8 with [`QuantSpec::int8`], which makes W8A16 layers.
///
/// The model's type does not change. Each converted weight keeps its place and shape, but the tensor behind it is an expanded zero of one
/// element; the quantised weight is attached to it as a reparameterisation. Call [`install`](crate::install) at the start of the program, so that
/// on CubeCL devices matmuls read the packed weight directly.
///
/// Patterns are regular expressions, searched anywhere in a parameter's path (`layers.0.attention.query.weight`).
///
/// - A record of the converted model holds the quantised weights. To load it, convert a freshly initialised model the same way first, and load
///   before its first use.
/// - Move a model to another *backend* (Flex to CUDA, say) before its first use: later, such a move rewrites every tensor, and the expanded
///   zero becomes a full float tensor. Moves between devices of one backend keep it.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::tensor::Device;
/// use burn_marlin::{GroupSize, QuantSpec, W4A16};
/// # let model = LinearConfig::new(64, 32).init(&Device::flex());
/// let (model, report) = W4A16::new(QuantSpec::int4(GroupSize::G64)).exclude("lm_head").quantize(model)?;
/// # assert_eq!(report.quantized(), 1);
/// # Ok::<(), burn_marlin::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct W4A16 {
    spec: QuantSpec,
    include: Vec<String>,
    exclude: Vec<String>,
}

impl W4A16 {
    /// Converts every `Linear` to `spec`.
    pub fn new(spec: QuantSpec) -> Self {
        Self { spec, include: Vec::new(), exclude: Vec::new() }
    }

    /// Converts only layers whose path matches this or another included pattern.
    pub fn include(mut self, pattern: impl Into<String>) -> Self {
        self.include.push(pattern.into());
        self
    }

    /// Leaves layers whose path matches; stronger than [`include`](Self::include).
    pub fn exclude(mut self, pattern: impl Into<String>) -> Self {
        self.exclude.push(pattern.into());
        self
    }

    /// Converts the model and reports every layer.
    ///
    /// # Errors
    /// A pattern that is no regular expression, or a weight with values that are not finite. A group that does not divide K is no error: the
    /// layer is left and reported.
    pub fn quantize<M: Module>(&self, model: M) -> Result<(M, Report), Error> {
        let (include, exclude) = (compile(&self.include)?, compile(&self.exclude)?);
        let mut report = Report::default();
        let mut weights = HashMap::new();
        for candidate in survey(&model) {
            let outcome = match self.left(&candidate, &include, &exclude) {
                Some(reason) => Outcome::Left(reason),
                None => {
                    let weight = candidate.quantize(&self.spec)?;
                    let activations = crate::ops::activation_dtype(candidate.dtype()).unwrap_or(ActivationDtype::F32);
                    let plan = select_converted(&weight.problem(1, activations), weight.layout(), &target(&weight.device()));
                    tracing::debug!(layer = %candidate.path, kernel = %plan.kernel, reason = %plan.reason, "W4A16 layer");
                    let size_bytes = weight.size_bytes();
                    weights.insert(candidate.id, weight);
                    Outcome::Quantized { spec: self.spec, size_bytes, plan }
                }
            };
            report.layers.push(LayerReport { path: candidate.path, shape: candidate.shape, outcome });
        }
        Ok((model.apply_reparameterization(Attach { weights }), report))
    }

    /// Why a layer stays as it is; `None` where it is converted.
    fn left(&self, candidate: &Candidate, include: &[Regex], exclude: &[Regex]) -> Option<LeftReason> {
        if !candidate.is_linear() {
            return Some(LeftReason::NotLinear);
        }
        if candidate.reparameterized {
            return Some(LeftReason::Reparameterized);
        }
        if let Some(pattern) = exclude.iter().find(|pattern| pattern.is_match(&candidate.path)) {
            return Some(LeftReason::Excluded { pattern: pattern.to_string() });
        }
        if !include.is_empty() && !include.iter().any(|pattern| pattern.is_match(&candidate.path)) {
            return Some(LeftReason::NotIncluded);
        }
        if candidate.is_quantized() {
            return Some(LeftReason::AlreadyQuantized);
        }
        match self.spec.check(candidate.shape[0], candidate.shape[1]) {
            Err(error @ FormatError::GroupDoesNotDivide { .. }) => Some(LeftReason::Group { error }),
            _ => None,
        }
    }
}

fn compile(patterns: &[String]) -> Result<Vec<Regex>, Error> {
    let compile =
        |pattern: &String| Regex::new(pattern).map_err(|source| Error::Pattern { pattern: pattern.clone(), source: Box::new(source) });
    patterns.iter().map(compile).collect()
}

/// Attaches the quantised weights to the parameters they were made from.
struct Attach {
    weights: HashMap<ParamId, QuantizedWeight>,
}

impl Reparameterizer for Attach {
    type Reparam = QuantizedWeight;

    fn reparameterize<const D: usize>(&mut self, _path: &str, param: Param<Tensor<D>>) -> (Param<Tensor<D>>, Option<QuantizedWeight>) {
        match self.weights.remove(&param.id) {
            Some(weight) => (placeholder(param, weight.dims()), Some(weight)),
            None => (param, None),
        }
    }
}

/// A parameter of the weight's shape [K, N] that holds one zero.
///
/// It keeps `shape()` and `Display` right for code that looks at the weight. It is lazy, so that it costs nothing to move before its first
/// use, and declares the one element that records hold. It is a new parameter, so that mappers of the float weight (`LinearLayout::Col`
/// transposes when saving) do not apply to it.
fn placeholder<const D: usize>(param: Param<Tensor<D>>, shape: [usize; 2]) -> Param<Tensor<D>> {
    let (device, dtype) = (param.lazy_device(), param.base().dtype());
    let expand = move |zero: Tensor<D>| zero.expand(Shape::new(shape));
    let init = move |device: &Device, _: bool| expand(Tensor::zeros([1; D], (device, dtype)));
    Param::uninitialized(param.id, init, device, false, Shape::new([1; D]))
        .save_mapper(|tensor| tensor.slice([(); D].map(|()| 0..1)))
        .load_mapper(expand)
}
