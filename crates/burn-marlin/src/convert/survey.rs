use crate::{Error, QuantizedWeight};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor};
use marlin_format::QuantSpec;

/// A parameter that could be the weight of a layer: two dimensions or more.
pub(super) struct Candidate {
    pub id: ParamId,
    /// Path of the parameter in the model, such as `layers.0.attention.query.weight`.
    pub path: String,
    pub shape: Vec<usize>,
    /// Whether another reparameterisation (LoRA, say) is attached; a parameter takes one.
    pub reparameterized: bool,
    /// The weight, where its innermost container is Burn's `Linear`.
    weight: Option<Tensor<2>>,
    dtype: DType,
}

impl Candidate {
    pub fn is_linear(&self) -> bool {
        self.weight.is_some()
    }

    pub fn is_quantized(&self) -> bool {
        matches!(self.dtype, DType::QFloat(_))
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn quantize(&self, spec: &QuantSpec) -> Result<QuantizedWeight, Error> {
        let Some(weight) = &self.weight else { unreachable!("only weights of a Linear are quantised") };
        QuantizedWeight::quantize(weight.clone(), spec).map_err(|error| match error {
            Error::Format(source) => Error::Layer { path: self.path.clone(), source },
            other => other,
        })
    }
}

/// Every candidate of a model, in the model's order.
pub(super) fn survey<M: Module>(model: &M) -> Vec<Candidate> {
    let mut visitor = Visitor::default();
    model.visit(&mut visitor);
    visitor.candidates
}

#[derive(Default)]
struct Visitor {
    /// Field name and container of every module entered.
    stack: Vec<(String, String)>,
    candidates: Vec<Candidate>,
    /// Entered reparameterisations: what is inside them is no layer of the model.
    inside: usize,
}

impl ModuleVisitor for Visitor {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == "Reparameterization" {
            self.inside += 1;
            let path = self.path();
            if let Some(candidate) = self.candidates.last_mut().filter(|candidate| candidate.path == path) {
                candidate.reparameterized = true;
            }
        }
        self.stack.push((name.to_owned(), container.to_owned()));
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        if container == "Reparameterization" {
            self.inside -= 1;
        }
        self.stack.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // Initialises a lazy parameter, of any rank: a bias that is first drawn in the middle of a layer would keep it from being fused.
        let base = param.base();
        if D < 2 || self.inside > 0 {
            return;
        }
        let is_linear = D == 2 && self.stack.last().is_some_and(|(name, container)| name == "weight" && container == "Struct:Linear");
        let dtype = base.dtype();
        let shape = base.dims().to_vec();
        let weight = is_linear.then(|| base.reshape([shape[0], shape[1]]));
        self.candidates.push(Candidate { id: param.id, path: self.path(), shape, reparameterized: false, weight, dtype });
    }
}

impl Visitor {
    fn path(&self) -> String {
        self.stack.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(".")
    }
}
