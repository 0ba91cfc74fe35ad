use super::entered::{Entered, is_in_reparameterization, path};
use super::report::SkipReason;
use crate::weight::REPARAMETERIZATION;
use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization};
use burn::tensor::{DType, Device, Tensor};
use std::collections::HashSet;

/// A parameter that may be the weight of a layer: one with two or more dimensions.
pub(super) struct Candidate {
    pub id: ParamId,
    /// Path of the parameter in the model, such as `layers.0.attention.query.weight`.
    pub path: String,
    pub shape: Vec<usize>,
    /// The size of the values in bytes.
    pub size_bytes: usize,
    /// The reason why it is not converted, whatever the patterns select.
    pub skipped: Option<SkipReason>,
}

/// The result of a survey of a model's parameters.
pub(super) struct Survey {
    /// Every candidate, in the model's order.
    pub candidates: Vec<Candidate>,
    /// Paths of weights that are converted already.
    pub converted: HashSet<String>,
    /// The size in bytes of all float parameters, including the candidates.
    pub size_bytes: usize,
}

/// The options of a survey: the types that may be converted, and whether parameters are
/// initialised.
pub(super) struct Types<'a> {
    /// The names of types besides Burn's `Linear` whose `weight` [K, N] may be converted.
    pub also: &'a [String],
    /// True if lazy parameters are initialised.
    pub initialize: bool,
}

/// Collects the candidates of a model, in the model's order.
pub(super) fn survey<M: Module>(model: &M, types: Types<'_>) -> Survey {
    let mut visitor = Visitor {
        types,
        stack: Vec::new(),
        found: Survey::new(),
    };
    model.visit(&mut visitor);
    visitor.found
}

impl Survey {
    fn new() -> Self {
        Self {
            candidates: Vec::new(),
            converted: HashSet::new(),
            size_bytes: 0,
        }
    }
}

struct Visitor<'a> {
    types: Types<'a>,
    /// Every module entered, the outermost first.
    stack: Vec<Entered>,
    found: Survey,
}

impl ModuleVisitor for Visitor<'_> {
    #[track_caller]
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == REPARAMETERIZATION {
            let path = path(&self.stack);
            if let Some(candidate) = self
                .found
                .candidates
                .last_mut()
                .filter(|candidate| candidate.path == path)
            {
                candidate.skipped = Some(SkipReason::Reparameterized);
                if name == crate::QuantizedWeight::NAME {
                    self.found.converted.insert(path);
                }
            }
        }
        self.stack.push(Entered::new(name, container));
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.stack.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if is_in_reparameterization(&self.stack) {
            return;
        }
        let (shape, dtype) = if self.types.initialize || param.is_initialized() {
            // Parameters of any rank are initialised here: a bias that is first initialised in the
            // middle of a layer would keep the layer from being fused.
            let base = param.base();
            (base.dims().to_vec(), base.dtype())
        } else {
            (
                param.lazy_shape().to_vec(),
                DType::from(param.lazy_device().settings().float_dtype),
            )
        };
        let size_bytes = shape.iter().product::<usize>() * dtype.size();
        self.found.size_bytes += size_bytes;
        let path = path(&self.stack);
        if D == 1 {
            self.expect_bias(&path, shape[0]);
        }
        if D < 2 {
            return;
        }
        let skipped = match self.stack.last() {
            Some(field) if D == 2 && field.name == "weight" => {
                self.skipped(field, &param.lazy_device(), dtype)
            }
            _ => Some(SkipReason::NotLinear),
        };
        self.found.candidates.push(Candidate {
            id: param.id,
            path,
            shape,
            size_bytes,
            skipped,
        });
    }
}

impl Visitor<'_> {
    /// Returns the reason why the field `weight` of a type is skipped; `None` if it is the weight
    /// of a linear layer.
    fn skipped(&self, field: &Entered, device: &Device, dtype: DType) -> Option<SkipReason> {
        let Some(name) = field.struct_name() else {
            return Some(SkipReason::NotLinear);
        };
        let asked = self.types.also.iter().any(|also| also == name);
        if name != "Linear" && !asked {
            return Some(SkipReason::NotLinear);
        }
        if !asked && !field.is_of_burn_linear(device) {
            return Some(SkipReason::OtherLinear);
        }
        matches!(dtype, DType::QFloat(_)).then_some(SkipReason::AlreadyQuantized)
    }

    /// Checks the weight [K, N] of a layer against its bias: if the bias does not have N values,
    /// the layer is of a type that stores its weight in another form.
    fn expect_bias(&mut self, path: &str, length: usize) {
        let Some(layer) = path.strip_suffix(".bias") else {
            return;
        };
        let weight = self
            .found
            .candidates
            .last_mut()
            .filter(|candidate| candidate.path.strip_suffix(".weight") == Some(layer));
        // A lazy weight may be stored transposed.
        if let Some(weight) = weight.filter(|weight| {
            self.types.initialize
                && weight.skipped.is_none()
                && weight.shape.last() != Some(&length)
        }) {
            weight.skipped = Some(SkipReason::OtherLinear);
        }
    }
}
