//! Export of a converted model as a checkpoint that other engines read.

use super::entered::{Entered, is_linear_weight, path, pytorch_name};
use super::parameters::{file_dtype, remapped};
use super::{ExportError, WeightQuantizer};
use crate::QuantizedWeight;
use crate::weight::{Passed, REPARAMETERIZATION};
use burn::module::{Module, ModuleVisitor, Param, Parameter, Reparameterization};
use burn::store::KeyRemapper;
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Int, Shape, Tensor, TensorData};
use marlin_format::checkpoint::compressed_tensors::{
    QuantizationConfig, check, tensor_specs, tensors_of,
};
use marlin_format::checkpoint::{CheckpointError, CheckpointWriter, TensorSpec};
use marlin_format::{QuantSpec, ScaleDtype};
use serde_json::json;
use std::path::Path;

const CONFIG_FILE: &str = "config.json";
const WEIGHT: &str = ".weight";

impl WeightQuantizer {
    /// Writes a converted model to a folder in the pack-quantized format of compressed-tensors:
    /// `model.safetensors`, and a `config.json` that records in its `quantization_config` how each
    /// layer is quantised. [`load`](Self::load) reads the folder. Transformers and vLLM also read
    /// it if the fields of the model's own config are added to `config.json`.
    ///
    /// Quantised weights, including those of [`QuantLinear`](crate::QuantLinear), are written bit
    /// for bit. Every other parameter is written in its dtype and in PyTorch's form: weights of
    /// `Linear` as [N, K], parameters of norms as `weight` and `bias`.
    ///
    /// `keys` renames parameters of the model to tensors of the files: the inverse of the key map
    /// that `load` takes.
    ///
    /// ```no_run
    /// # use burn::nn::transformer::TransformerEncoder;
    /// # use burn::store::KeyRemapper;
    /// # use burn_marlin::WeightQuantizer;
    /// # fn export(model: &TransformerEncoder) -> Result<(), Box<dyn std::error::Error>> {
    /// WeightQuantizer::export(model, "exported", &KeyRemapper::new().add_pattern(r"^layers\.", "bert.encoder.layer.")?)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns an [`ExportError`] for a folder that is not empty, adapters that are not merged, a
    /// dtype that files do not hold, names that clash, or the name of a quantised layer that does
    /// not end in `.weight`. On an error, nothing is written to `dir`.
    pub fn export<M: Module>(
        model: &M,
        dir: impl AsRef<Path>,
        keys: &KeyRemapper,
    ) -> Result<(), ExportError> {
        let dir = dir.as_ref();
        let mut visitor = Visitor::default();
        model.visit(&mut visitor);
        let entries = visitor
            .finish()?
            .into_iter()
            .map(|entry| entry.named(keys))
            .collect::<Result<Vec<_>, _>>()?;
        let config = config(&entries).map_err(|source| CheckpointError::Config {
            path: dir.join(CONFIG_FILE),
            source,
        })?;

        let mut writer = CheckpointWriter::create(dir)?;
        writer.write_file(CONFIG_FILE, format!("{config:#}\n").as_bytes())?;
        let specs = entries
            .iter()
            .map(Entry::specs)
            .collect::<Result<Vec<_>, _>>()?;
        writer.declare(specs.into_iter().flatten())?;
        for entry in &entries {
            entry.write(&mut writer)?;
        }
        writer.finish()?;
        Ok(())
    }
}

/// Returns the contents of `config.json` for a folder with these parameters.
fn config(entries: &[Entry]) -> Result<serde_json::Value, marlin_format::checkpoint::ConfigError> {
    let mut groups: Vec<(QuantSpec, bool, Vec<String>)> = Vec::new();
    let mut ignored = Vec::new();
    for Entry { name, value, .. } in entries {
        match value {
            Value::Quantized(weight) => {
                // The config does not record the dtype of scales.
                let (spec, [k, _]) = (
                    weight.spec().with_scale_dtype(ScaleDtype::F16),
                    weight.dims(),
                );
                let act_order = weight.is_permuted() && spec.scales.group.count(k) > 1;
                if act_order {
                    tracing::warn!(layer = %name, "has act-order over groups, which compressed-tensors from 0.19 on and vLLM refuse; burn-marlin reads it");
                }
                match groups
                    .iter_mut()
                    .find(|(of, ordered, _)| (*of, *ordered) == (spec, act_order))
                {
                    Some((_, _, names)) => names.push(name.clone()),
                    None => groups.push((spec, act_order, vec![name.clone()])),
                }
            }
            Value::Tensor { linear: true, .. } => {
                ignored.extend(name.strip_suffix(WEIGHT).map(String::from))
            }
            Value::Tensor { .. } => {}
        }
    }
    // The most common format is declared for all linear layers; every other format is declared for
    // its layers by name.
    groups.sort_by_key(|(_, _, names)| std::cmp::Reverse(names.len()));
    let mut groups = groups.into_iter();
    let Some((spec, act_order, _)) = groups.next() else {
        return Ok(json!({}));
    };
    let config = QuantizationConfig::new(spec, ignored)?.with_act_order(act_order);
    let config = groups.fold(config, |config, (spec, act_order, names)| {
        config.with_layers(spec, act_order, names)
    });
    Ok(json!({ "quantization_config": config.to_json() }))
}

/// A parameter to be written.
struct Entry {
    /// The parameter's path in the model.
    path: String,
    /// The parameter's name in the file; for a quantised layer, without `.weight`.
    name: String,
    value: Value,
}

enum Value {
    Quantized(Box<QuantizedWeight>),
    Tensor {
        dtype: DType,
        /// The shape of the tensor in the file.
        shape: Shape,
        /// True if the tensor is the weight of a linear layer.
        linear: bool,
        read: Box<dyn Fn() -> Result<TensorData, String>>,
    },
}

impl Entry {
    /// Replaces the entry's name in the model with its name in the file.
    fn named(self, keys: &KeyRemapper) -> Result<Self, ExportError> {
        let name = remapped(keys, &self.name);
        let name = match (&self.value, name.strip_suffix(WEIGHT)) {
            (Value::Quantized(_), Some(layer)) => layer.to_owned(),
            (Value::Quantized(_), None) => {
                return Err(ExportError::Name {
                    path: self.path,
                    name,
                });
            }
            _ => name,
        };
        Ok(Self { name, ..self })
    }

    /// Returns the specs of the entry's tensors in the file.
    fn specs(&self) -> Result<Vec<TensorSpec>, ExportError> {
        match &self.value {
            Value::Quantized(weight) => {
                let [k, n] = weight.dims();
                check(&weight.spec()).map_err(|source| ExportError::Format {
                    path: self.path.clone(),
                    source,
                })?;
                Ok(tensor_specs(
                    &self.name,
                    k,
                    n,
                    &weight.spec(),
                    weight.is_permuted(),
                ))
            }
            Value::Tensor { dtype, shape, .. } => match file_dtype(*dtype) {
                Some(dtype) => Ok(vec![TensorSpec::new(&self.name, dtype, shape.to_vec())]),
                None => Err(ExportError::Dtype {
                    path: self.path.clone(),
                    found: *dtype,
                }),
            },
        }
    }

    fn write(&self, writer: &mut CheckpointWriter) -> Result<(), ExportError> {
        let path = || self.path.clone();
        match &self.value {
            Value::Quantized(weight) => {
                let plain = weight.to_plain().map_err(|source| ExportError::Weight {
                    path: path(),
                    source,
                })?;
                for tensor in tensors_of(&self.name, &plain) {
                    writer.write_tensor(&tensor.spec.name, &tensor.bytes)?;
                }
            }
            Value::Tensor { read, .. } => {
                let data = read().map_err(|reason| ExportError::Read {
                    path: path(),
                    reason,
                })?;
                writer.write_tensor(&self.name, data.as_bytes())?;
            }
        }
        Ok(())
    }
}

#[derive(Default)]
struct Visitor {
    /// Every module entered, the outermost first.
    stack: Vec<Entered>,
    entries: Vec<Entry>,
    /// The previous parameter. If a quantised weight is attached to it, that weight is visited
    /// next, and the parameter is a placeholder that must not be read.
    pending: Option<Box<dyn FnOnce() -> Entry>>,
    /// The depth of the stack at which the current weight began, while its tensors are visited.
    weight: Option<usize>,
    /// The first parameter with a reparameterisation other than a quantised weight.
    reparameterized: Option<String>,
}

impl Visitor {
    fn finish(mut self) -> Result<Vec<Entry>, ExportError> {
        self.add_pending();
        match self.reparameterized {
            None => Ok(self.entries),
            Some(path) => Err(ExportError::Reparameterized { path }),
        }
    }

    fn add_pending(&mut self) {
        self.entries
            .extend(self.pending.take().map(|entry| entry()));
    }

    fn add<const D: usize, K: Basic + 'static>(&mut self, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter,
    {
        if self.weight.is_some() || self.reparameterized.is_some() {
            return;
        }
        self.add_pending();
        let linear = D == 2 && is_linear_weight(&self.stack);
        let (path, name, param) = (path(&self.stack), pytorch_name(&self.stack), param.clone());
        self.pending = Some(Box::new(move || {
            let tensor = if linear {
                param.val().swap_dims(0, 1)
            } else {
                param.val()
            };
            let (dtype, shape) = (tensor.dtype(), tensor.shape());
            let read = move || {
                tensor
                    .clone()
                    .try_into_data()
                    .map_err(|error| format!("{error:?}"))
            };
            Entry {
                path,
                name,
                value: Value::Tensor {
                    dtype,
                    shape,
                    linear,
                    read: Box::new(read),
                },
            }
        }));
    }

    /// Begins a quantised weight. The top of the stack is the first tensor of the weight.
    fn begin_weight(&mut self, weight: QuantizedWeight) {
        let mut depth = self.stack.len().saturating_sub(1);
        if self.stack[..depth]
            .last()
            .is_some_and(Entered::is_reparameterization)
        {
            depth -= 1;
            self.pending = None;
        }
        self.add_pending();
        self.weight = Some(depth);
        let stack = &self.stack[..depth];
        self.entries.push(Entry {
            path: path(stack),
            name: pytorch_name(stack),
            value: Value::Quantized(Box::new(weight)),
        });
    }
}

impl ModuleVisitor for Visitor {
    #[track_caller]
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == REPARAMETERIZATION && name != QuantizedWeight::NAME {
            self.reparameterized
                .get_or_insert_with(|| path(&self.stack));
        }
        self.stack.push(Entered::new(name, container));
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.stack.pop();
        self.weight.take_if(|depth| self.stack.len() < *depth);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(weight) = Passed::visited(param) {
            self.begin_weight(weight.clone());
        }
        self.add(param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(param);
    }
}
