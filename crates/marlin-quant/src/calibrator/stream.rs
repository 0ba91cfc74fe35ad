//! The tensors of a model whose recorded operations run.

use std::collections::{BTreeMap, HashSet};

use burn::backend::capture::TensorId;
use burn::backend::ir::{BackendIr, HandleKind, TensorIr, TensorStatus};
use burn::backend::{DispatchKindConversion, DispatchTensor};
use burn::tensor::{Shape, Tensor, TensorData};
use burn_router::TensorInterpreter;

/// The tensors of the quantised model or of the float model.
pub(super) struct Stream<B: BackendIr> {
    pub interpreter: TensorInterpreter<B>,
    /// The tensors with recorded values that are on the device.
    pub loaded: HashSet<TensorId>,
}

impl<B: BackendIr> Stream<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    /// Creates a stream without tensors.
    pub fn new(device: B::Device) -> Self {
        Self {
            interpreter: TensorInterpreter::new(device),
            loaded: HashSet::new(),
        }
    }

    /// Loads a tensor to the device.
    pub fn load(&mut self, id: TensorId, data: TensorData) {
        self.interpreter.register_tensor_data_id(id, data);
        self.loaded.insert(id);
    }

    /// Loads a tensor with recorded values to the device, unless it is already there.
    pub fn require(&mut self, id: TensorId, values: &BTreeMap<TensorId, TensorData>) {
        if let Some(data) = values.get(&id).filter(|_| !self.loaded.contains(&id)) {
            self.load(id, data.clone());
        }
    }

    /// Returns a tensor [.., K] as rows [tokens, K].
    pub fn rows(
        &mut self,
        tensor: &TensorIr,
        values: &BTreeMap<TensorId, TensorData>,
    ) -> Tensor<2> {
        self.require(tensor.id, values);
        let k = tensor.shape.iter().next_back().copied().unwrap_or(1);
        let rows = tensor.shape.num_elements() / k.max(1);
        let read = TensorIr {
            status: TensorStatus::ReadOnly,
            ..tensor.clone()
        };
        match self.interpreter.get_tensor(&read) {
            HandleKind::Float(primitive) => {
                Tensor::from_primitive::<B>(B::float_reshape(primitive, Shape::new([rows, k])))
            }
            _ => unreachable!("the activations of a linear layer are floats"),
        }
    }
}
