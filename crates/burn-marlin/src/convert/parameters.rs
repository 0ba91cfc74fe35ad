//! The parameters of a model with the names and shapes that they have in a PyTorch checkpoint.

use super::entered::{Entered, is_in_reparameterization, is_linear_weight, path, pytorch_name};
use crate::QuantizedWeight;
use crate::weight::{Passed, REPARAMETERIZATION};
use burn::module::{Module, ModuleVisitor, Param, Parameter};
use burn::store::KeyRemapper;
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, BoolStore, DType, Device, Int, Tensor};
use marlin_format::checkpoint::Dtype;
use std::collections::HashMap;

/// The kind of values that a parameter holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Float,
    Int,
    Bool,
    /// A quantised weight, such as that of a [`QuantLinear`](crate::QuantLinear).
    Quantized,
}

/// A parameter of a model.
#[derive(Debug, Clone)]
pub(super) struct ModelParameter {
    /// The path of the parameter, such as `layers.0.attention.query.weight`, with the variants of
    /// enums.
    pub path: String,
    /// The path as PyTorch writes it: without the variants of enums, and with `weight` and `bias`
    /// for Burn's `gamma` and `beta` of norms.
    pub name: String,
    pub kind: Kind,
    /// The shape of the value; [K, N] for a linear layer's weight, quantised or not.
    pub shape: Vec<usize>,
    /// True if the parameter is the weight of Burn's `Linear`, which files store as [N, K].
    pub linear: bool,
    /// True if records store the parameter transposed (`LinearLayout::Col`).
    pub column_layout: bool,
    /// True if a reparameterisation is attached: LoRA, or a quantised weight.
    pub reparameterized: bool,
    /// The dtype that the parameter has, or will have when it is first used; for a quantised
    /// weight, the dtype of its activations.
    pub dtype: DType,
    pub device: Device,
}

impl ModelParameter {
    /// Returns the shape of the parameter in a file.
    pub fn file_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if self.linear || self.kind == Kind::Quantized {
            shape.reverse();
        }
        shape
    }
}

/// Returns every parameter of a model, in the model's order. Lazy parameters stay lazy.
pub(super) fn parameters<M: Module>(model: &M) -> Vec<ModelParameter> {
    let mut visitor = Visitor::default();
    model.visit(&mut visitor);
    let mut parameters = visitor.parameters;
    // Parameters under quantised weights are excluded: they are placeholders.
    let linear = parameters
        .iter_mut()
        .filter(|parameter| parameter.linear && !parameter.reparameterized);
    model.visit(&mut Layouts {
        path: Vec::new(),
        linear: linear
            .map(|parameter| (parameter.path.clone(), parameter))
            .collect(),
    });
    parameters
}

/// Applies every pattern of a key map to `name`, as Burn's stores do.
pub(super) fn remapped(keys: &KeyRemapper, name: &str) -> String {
    keys.patterns
        .iter()
        .fold(name.to_owned(), |name, (pattern, to)| {
            pattern.replace_all(&name, to.as_str()).into_owned()
        })
}

/// The dtypes that Burn and files have in common.
const DTYPES: [(DType, Dtype); 12] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::I16, Dtype::I16),
    (DType::I8, Dtype::I8),
    (DType::U64, Dtype::U64),
    (DType::U32, Dtype::U32),
    (DType::U16, Dtype::U16),
    (DType::U8, Dtype::U8),
];

/// Converts a file's dtype to Burn's; `None` if Burn has no such dtype.
pub(super) fn burn_dtype(dtype: Dtype) -> Option<DType> {
    if dtype == Dtype::BOOL {
        return Some(DType::Bool(BoolStore::Native));
    }
    DTYPES
        .iter()
        .find(|(_, of_file)| *of_file == dtype)
        .map(|(of_burn, _)| *of_burn)
}

/// Converts Burn's dtype to a file's; `None` if files have no such dtype.
pub(super) fn file_dtype(dtype: DType) -> Option<Dtype> {
    if dtype == DType::Bool(BoolStore::Native) {
        return Some(Dtype::BOOL);
    }
    DTYPES
        .iter()
        .find(|(of_burn, _)| *of_burn == dtype)
        .map(|(_, of_file)| *of_file)
}

#[derive(Default)]
struct Visitor {
    /// Every module entered, the outermost first.
    stack: Vec<Entered>,
    parameters: Vec<ModelParameter>,
    /// The depth of the stack at which the current quantised weight began, while its tensors are
    /// visited.
    weight: Option<usize>,
}

impl Visitor {
    /// Adds a parameter; `default` returns the dtype of a parameter that has no value yet.
    fn add<const D: usize, K: Basic>(
        &mut self,
        param: &Param<Tensor<D, K>>,
        kind: Kind,
        default: impl Fn(&Device) -> DType,
    ) where
        Tensor<D, K>: Parameter,
    {
        if self.weight.is_some() || is_in_reparameterization(&self.stack) {
            return;
        }
        let device = param.lazy_device();
        let dtype = if param.is_initialized() {
            param.base().dtype()
        } else {
            default(&device)
        };
        let (path, name, shape) = (
            path(&self.stack),
            pytorch_name(&self.stack),
            param.lazy_shape().to_vec(),
        );
        self.parameters.push(ModelParameter {
            path,
            name,
            kind,
            shape,
            linear: false,
            column_layout: false,
            reparameterized: false,
            dtype,
            device,
        });
    }

    /// Adds a quantised weight. The top of the stack is the first tensor of the weight.
    fn add_weight(&mut self, weight: &QuantizedWeight) {
        let depth = self.stack.len().saturating_sub(1);
        self.weight = Some(depth);
        let stack = &self.stack[..depth];
        self.parameters.push(ModelParameter {
            path: path(stack),
            name: pytorch_name(stack),
            kind: Kind::Quantized,
            shape: weight.dims().to_vec(),
            linear: false,
            column_layout: false,
            reparameterized: false,
            dtype: weight.activations().into(),
            device: weight.device(),
        });
    }
}

impl ModuleVisitor for Visitor {
    #[track_caller]
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == REPARAMETERIZATION {
            let path = path(&self.stack);
            if let Some(parameter) = self
                .parameters
                .last_mut()
                .filter(|parameter| parameter.path == path)
            {
                parameter.reparameterized = true;
            }
        }
        self.stack.push(Entered::new(name, container));
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.stack.pop();
        self.weight.take_if(|depth| self.stack.len() < *depth);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(weight) = Passed::visited(param)
            && !is_in_reparameterization(&self.stack)
        {
            self.add_weight(weight);
        }
        self.add(param, Kind::Float, |device| {
            device.settings().float_dtype.into()
        });
        if D == 2
            && self.weight.is_none()
            && !is_in_reparameterization(&self.stack)
            && is_linear_weight(&self.stack)
            && let Some(parameter) = self.parameters.last_mut()
        {
            parameter.linear = true;
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(param, Kind::Int, |device| {
            device.settings().int_dtype.into()
        });
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(param, Kind::Bool, |device| {
            device.settings().bool_dtype.into()
        });
    }
}

/// A visitor that finds the weights that records store transposed. The layout of a weight is
/// visible only when a tensor is loaded into its parameter.
struct Layouts<'a> {
    path: Vec<String>,
    /// The weights of linear layers, by path.
    linear: HashMap<String, &'a mut ModelParameter>,
}

impl ModuleVisitor for Layouts<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(parameter) = self.linear.get_mut(&self.path.join(".")) else {
            return;
        };
        let mut shape = [1; D];
        shape[D - 1] = 2;
        let recorded = Tensor::zeros(shape, &parameter.device);
        parameter.column_layout =
            param.clone().transform_for_load(recorded, param.id).dims() != shape;
        if parameter.column_layout && !param.is_initialized() {
            parameter.shape.reverse();
        }
    }
}
