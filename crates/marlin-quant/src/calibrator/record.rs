//! Recording of a model's runs on some batches as a list of operations.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::Capture;
use burn::backend::capture::{CapturedGraph, TensorId};
use burn::backend::ir::OperationIr;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Tensor, TensorData};
use burn_marlin::convert::SelectedLayer;
use marlin_format::WeightFormat;

use super::CalibrationError;

/// The operations of all batches, one after the other.
pub(super) struct Recording {
    pub operations: Vec<OperationIr>,
    /// The values of tensors that no operation computes: parameters, inputs and constants.
    pub values: BTreeMap<TensorId, TensorData>,
    pub layers: Vec<RecordedLayer>,
}

/// A selected layer, whose weight may be read by recorded operations.
pub(super) struct RecordedLayer {
    /// The paths of the weight: more than one if layers share it.
    pub paths: Vec<String>,
    /// The tensor at each path.
    pub weights: Vec<TensorId>,
    pub k: usize,
    pub n: usize,
    pub format: WeightFormat,
}

impl Recording {
    /// Records the runs of a model on all batches.
    pub fn of<M: Module, T>(
        model: &M,
        layers: Vec<SelectedLayer>,
        batches: impl IntoIterator<Item = T>,
        mut run: impl FnMut(&M, T, &Device),
    ) -> Result<Self, CalibrationError> {
        let device = Device::capture();
        let mut tensors = HashMap::new();
        // Burn panics at operations that cannot be recorded.
        let recorded = catch_unwind(AssertUnwindSafe(|| {
            device.capture_scope(|scope| {
                let model = model.clone().to_device(&device);
                model.visit(&mut Weights {
                    path: Vec::new(),
                    found: &mut tensors,
                });
                batches
                    .into_iter()
                    .for_each(|batch| run(&model, batch, &device));
                scope.complete([], [])
            })
        }));
        let CapturedGraph { graph, values } = match recorded {
            Ok(Ok(captured)) => captured,
            Ok(Err(error)) => {
                return Err(CalibrationError::Record {
                    reason: error.to_string(),
                });
            }
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| panic.downcast_ref::<&str>().copied());
                return Err(CalibrationError::Record {
                    reason: text.unwrap_or("Burn panicked").to_owned(),
                });
            }
        };
        let layers = shared(layers, &tensors, &values);
        Ok(Self {
            operations: graph.operations,
            values,
            layers,
        })
    }
}

/// Merges selected layers that share a parameter with the same values.
fn shared(
    selected: Vec<SelectedLayer>,
    tensors: &HashMap<String, TensorId>,
    values: &BTreeMap<TensorId, TensorData>,
) -> Vec<RecordedLayer> {
    let mut layers: Vec<RecordedLayer> = Vec::new();
    let mut known: HashMap<ParamId, Vec<usize>> = HashMap::new();
    for SelectedLayer {
        path,
        id,
        k,
        n,
        format,
    } in selected
    {
        let Some(&tensor) = tensors.get(&path) else {
            continue;
        };
        let same = known.entry(id).or_default();
        let found = same.iter().copied().find(|&index| {
            layers[index].format == format
                && values.get(&layers[index].weights[0]) == values.get(&tensor)
        });
        match found {
            Some(index) => {
                layers[index].paths.push(path);
                layers[index].weights.push(tensor);
            }
            None => {
                same.push(layers.len());
                layers.push(RecordedLayer {
                    paths: vec![path],
                    weights: vec![tensor],
                    k,
                    n,
                    format,
                });
            }
        }
    }
    layers
}

/// A visitor that finds the recorded tensors of a model's parameters, by path.
struct Weights<'a> {
    path: Vec<String>,
    found: &'a mut HashMap<String, TensorId>,
}

impl ModuleVisitor for Weights<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Ok(tensor) = param.base().try_into_primitive::<Capture>() {
            self.found.insert(self.path.join("."), tensor.id());
        }
    }
}
