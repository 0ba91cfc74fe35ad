//! Loading of published checkpoints into any Burn model.

use super::parameters::{Kind, ModelParameter, burn_dtype, parameters, remapped};
use super::{LayerReport, LoadError, LoadOptions, Outcome, Report, SkipReason, WeightQuantizer};
use crate::QuantizedWeight;
use crate::backend::activation_dtype;
use crate::weight::{FORMAT, Passed};
use burn::module::{Module, ModuleMapper, Param, Parameter, Reparameterizer};
use burn::store::KeyRemapper;
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use marlin_format::checkpoint::{
    Checkpoint, CheckpointEntry, LayerFormat, Quantization, entries, read_layer,
};
use marlin_kernels::ActivationDtype;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

impl WeightQuantizer {
    /// Loads a checkpoint into an unmodified model. Quantised layers are loaded into `Linear`s,
    /// which then multiply with the packed weights; float tensors are loaded into all other
    /// parameters. A [`QuantLinear`](crate::QuantLinear) also takes a quantised layer, in any
    /// format.
    ///
    /// `path` is a Hugging Face folder, or one safetensors file in such a folder. The folder's
    /// configs determine the format of each layer: GPTQ, AWQ, compressed-tensors, AutoRound, Marlin
    /// ([`LayerFormat`]). A checkpoint may mix formats. No float copy of a quantised layer is made,
    /// and parameters of the model that were not yet used are never initialised.
    ///
    /// `keys` renames tensors of the files to parameters of the model, as in Burn's own stores: a
    /// remapper that loads the float model from safetensors also loads its quantised checkpoints. A
    /// quantised layer has the name of its float weight, such as
    /// `encoder.layer.0.output.dense.weight`.
    ///
    /// - As in Burn's `PyTorchToBurnAdapter`, weights of `Linear` are transposed, and `weight` and
    ///   `bias` of norms are loaded into `gamma` and `beta`.
    /// - Variants of enums are not part of a name. Every type named `Linear` is treated as Burn's.
    /// - Every parameter keeps its dtype and device; float tensors are converted to that dtype.
    /// - Tensors for which the model has no parameter are listed in [`Report::unused`].
    ///
    /// ```no_run
    /// use burn::nn::transformer::TransformerEncoderConfig;
    /// use burn::store::KeyRemapper;
    /// use burn::tensor::Device;
    /// use burn_marlin::WeightQuantizer;
    ///
    /// burn_marlin::install()?;
    /// let model = TransformerEncoderConfig::new(768, 3072, 12, 12).init(&Device::flex()); // any Burn module
    /// let keys = KeyRemapper::new()
    ///     .add_pattern(r"^bert\.encoder\.layer\.", "layers.")?
    ///     .add_pattern(r"\.attention\.self\.", ".mha.")?
    ///     .add_pattern(r"\.attention\.output\.dense\.", ".mha.output.")?
    ///     .add_pattern(r"\.attention\.output\.LayerNorm\.", ".norm_1.")?
    ///     .add_pattern(r"\.intermediate\.dense\.", ".pwff.linear_inner.")?
    ///     .add_pattern(r"\.output\.dense\.", ".pwff.linear_outer.")?
    ///     .add_pattern(r"\.output\.LayerNorm\.", ".norm_2.")?;
    /// let (model, report) = WeightQuantizer::load(model, "bert-base-uncased-W4A16", &keys)?;
    /// println!("{report}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns a [`LoadError`] for files that cannot be read, parameters without a tensor, and
    /// tensors and layers of another shape or kind than their parameters.
    pub fn load<M: Module>(
        model: M,
        path: impl AsRef<Path>,
        keys: &KeyRemapper,
    ) -> Result<(M, Report), LoadError> {
        Self::load_with(model, path, &LoadOptions::new(keys.clone()))
    }

    /// Loads a checkpoint like [`load`](Self::load), with options. For example, the options can
    /// allow that the checkpoint does not hold every parameter of the model.
    ///
    /// # Errors
    /// The errors of [`load`](Self::load), and [`LoadError::Pattern`].
    pub fn load_with<M: Module>(
        model: M,
        path: impl AsRef<Path>,
        options: &LoadOptions,
    ) -> Result<(M, Report), LoadError> {
        let mut optional = options.optional()?;
        let checkpoint = Checkpoint::open(path)?;
        let quantization = Quantization::read(checkpoint.dir())?
            .map(|quantization| quantization.with_fp8_activations(options.fp8_activations()));
        let mut sources = sources(&checkpoint, quantization.as_ref(), options.keys())?;
        let (mut load, mut layers) = (Load::new(&checkpoint), HashMap::new());
        let (mut missing, mut report) = (Vec::new(), Report::default());
        for parameter in parameters(&model) {
            let may_be_missing = optional.matches(&parameter.path);
            let part = sources.remove(&parameter.name);
            if part.is_none() && !may_be_missing {
                missing.push(parameter.name);
                continue;
            }
            if part.is_some() && parameter.reparameterized {
                return Err(LoadError::Reparameterized {
                    path: parameter.path,
                });
            }
            let outcome = match part {
                Some(CheckpointEntry::Layer {
                    name,
                    format,
                    tensors,
                }) => {
                    let (outcome, weight) =
                        quantized(&checkpoint, &parameter, &name, &format, &tensors)?;
                    if parameter.kind == Kind::Quantized {
                        load.weights.insert(parameter.path.clone(), weight);
                    } else {
                        layers.insert(parameter.path.clone(), (weight, parameter.dtype));
                    }
                    outcome
                }
                Some(CheckpointEntry::Tensor { name }) => {
                    check_tensor(&checkpoint, &parameter, &name)?;
                    let reason = if parameter.linear {
                        SkipReason::FloatInCheckpoint
                    } else {
                        SkipReason::NotLinear
                    };
                    load.tensors
                        .insert(parameter.path.clone(), (name, parameter.clone()));
                    Outcome::Skipped(reason)
                }
                None => {
                    report.missing.push(parameter.path.clone());
                    let linear = parameter.linear || parameter.kind == Kind::Quantized;
                    Outcome::Skipped(if linear {
                        SkipReason::NotInCheckpoint
                    } else {
                        SkipReason::NotLinear
                    })
                }
            };
            if matches!(parameter.kind, Kind::Int | Kind::Bool) {
                continue;
            }
            let float_bytes = parameter.shape.iter().product::<usize>() * parameter.dtype.size();
            report.model_bytes += float_bytes;
            if parameter.shape.len() > 1 {
                report.layers.push(LayerReport {
                    path: parameter.path,
                    shape: parameter.shape,
                    float_bytes,
                    outcome,
                });
            }
        }
        if !missing.is_empty() {
            return Err(LoadError::Missing {
                dir: checkpoint.dir().into(),
                missing,
                unused: sources.into_keys().collect(),
            });
        }
        report.unused = sources
            .into_values()
            .map(|part| part.name().to_owned())
            .collect();
        if let Some(first) = report.unused.first() {
            tracing::warn!(
                unused = report.unused.len(),
                first,
                "tensors of the checkpoint that the model has no parameter for"
            );
        }
        if let Some(first) = report.missing.first() {
            tracing::warn!(
                missing = report.missing.len(),
                first,
                "parameters of the model that the checkpoint has no tensor for stay as they are"
            );
        }
        report.unmatched = optional.unmatched();
        let model = model.map(&mut load);
        Ok((model.apply_reparameterization(Attach { layers }), report))
    }
}

/// Returns the tensors and layers of a checkpoint, by the names that the key map gives them.
fn sources(
    checkpoint: &Checkpoint,
    quantization: Option<&Quantization>,
    keys: &KeyRemapper,
) -> Result<BTreeMap<String, CheckpointEntry>, LoadError> {
    let mut sources = BTreeMap::<String, CheckpointEntry>::new();
    for part in entries(checkpoint, quantization)? {
        let name = match &part {
            CheckpointEntry::Layer { name, .. } => remapped(keys, &format!("{name}.weight")),
            CheckpointEntry::Tensor { name } => remapped(keys, name),
        };
        if let Some(other) = sources.get(&name) {
            let (first, second) = (other.name().to_owned(), part.name().to_owned());
            return Err(LoadError::SameName {
                dir: checkpoint.dir().into(),
                first,
                second,
                name,
            });
        }
        sources.insert(name, part);
    }
    Ok(sources)
}

/// Reads a quantised layer from a checkpoint to the device of its parameter.
fn quantized(
    checkpoint: &Checkpoint,
    parameter: &ModelParameter,
    layer: &str,
    format: &LayerFormat,
    tensors: &[String],
) -> Result<(Outcome, QuantizedWeight), LoadError> {
    if !parameter.linear && parameter.kind != Kind::Quantized {
        let (layer, dir, path) = (
            layer.to_owned(),
            checkpoint.dir().into(),
            parameter.path.clone(),
        );
        return Err(LoadError::NotLinear {
            layer,
            dir,
            format: *format,
            path,
        });
    }
    let plain = read_layer(checkpoint, layer, format)?;
    let (expected, found) = (parameter.file_shape(), vec![plain.n(), plain.k()]);
    if expected != found {
        let file = tensors
            .first()
            .and_then(|tensor| checkpoint.info(tensor))
            .map_or_else(|| checkpoint.dir(), |info| info.path);
        return Err(LoadError::Shape {
            tensor: layer.into(),
            file: file.into(),
            path: parameter.path.clone(),
            expected,
            found,
        });
    }
    let activations = activation_dtype(parameter.dtype).unwrap_or(ActivationDtype::F32);
    let format = plain.descriptor().format;
    let weight = QuantizedWeight::from_owned_plain(plain, activations, &parameter.device);
    tensors.iter().for_each(|tensor| checkpoint.release(tensor));
    Ok((
        Outcome::quantized(&parameter.path, &weight, format, activations, None),
        weight,
    ))
}

/// Checks that the kind and shape of a tensor fit its parameter.
fn check_tensor(
    checkpoint: &Checkpoint,
    parameter: &ModelParameter,
    name: &str,
) -> Result<(), LoadError> {
    let view = checkpoint.tensor(name)?;
    let (tensor, file, path) = (
        name.to_owned(),
        view.path().to_owned(),
        parameter.path.clone(),
    );
    let (fits, kind) = match (parameter.kind, burn_dtype(view.dtype())) {
        (Kind::Quantized, _) => return Err(LoadError::NotQuantized { tensor, file, path }),
        (Kind::Float, dtype) => (dtype.is_some_and(|dtype| dtype.is_float()), "floats"),
        (Kind::Int, dtype) => (
            dtype.is_some_and(|dtype| dtype.is_int() || dtype.is_uint()),
            "integers",
        ),
        (Kind::Bool, dtype) => (dtype.is_some_and(|dtype| dtype.is_bool()), "booleans"),
    };
    if !fits {
        return Err(LoadError::Dtype {
            tensor,
            file,
            path,
            expected: kind,
            found: view.dtype(),
        });
    }
    let expected = parameter.file_shape();
    if view.shape() != expected {
        return Err(LoadError::Shape {
            tensor,
            file,
            path,
            expected,
            found: view.shape().to_vec(),
        });
    }
    Ok(())
}

/// A mapper that loads tensors of a checkpoint into parameters, and replaces quantised weights with
/// quantised layers of the checkpoint.
struct Load<'a> {
    checkpoint: &'a Checkpoint,
    /// The tensor to load into each parameter, by the path of the parameter.
    tensors: HashMap<String, (String, ModelParameter)>,
    /// The replacement for each quantised weight, by path.
    weights: HashMap<String, QuantizedWeight>,
    path: Vec<String>,
}

impl<'a> Load<'a> {
    fn new(checkpoint: &'a Checkpoint) -> Self {
        Self {
            checkpoint,
            tensors: HashMap::new(),
            weights: HashMap::new(),
            path: Vec::new(),
        }
    }

    fn load<const D: usize, K: Basic>(&mut self, param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        let Some((name, parameter)) = self.tensors.remove(&self.path.join(".")) else {
            return param;
        };
        // `check_tensor` has already found the tensor and its dtype.
        let Ok(view) = self.checkpoint.tensor(&name) else {
            return param;
        };
        let Some(dtype) = burn_dtype(view.dtype()) else {
            return param;
        };
        // A record in column layout holds the weight as the file does. For row layout, the weight
        // is transposed in memory, because a matmul with a transposed view is slower.
        let transposed = if parameter.linear && !parameter.column_layout {
            view.transposed_bytes().ok()
        } else {
            None
        };
        let data = match transposed {
            Some(bytes) => TensorData::from_bytes_vec(bytes, parameter.shape.clone(), dtype),
            None => TensorData::from_bytes_vec(view.bytes().to_vec(), view.shape().to_vec(), dtype),
        };
        let tensor = Tensor::from_data(data, (&parameter.device, parameter.dtype));
        self.checkpoint.release(&name);
        let id = param.id;
        param.transform_for_load(tensor, id)
    }
}

impl ModuleMapper for Load<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if let Some((last, of)) = self.path.split_last()
            && last == FORMAT
            && let Some(weight) = self.weights.remove(&of.join("."))
        {
            return Passed::weight(weight).attach(param);
        }
        self.load(param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.load(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.load(param)
    }
}

/// A reparameteriser that attaches quantised weights to the parameters at their paths.
struct Attach {
    /// The weight and the dtype of each parameter, by path.
    layers: HashMap<String, (QuantizedWeight, DType)>,
}

impl Reparameterizer for Attach {
    type Reparam = QuantizedWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<QuantizedWeight>) {
        match self.layers.remove(path) {
            Some((weight, dtype)) => {
                let (placeholder, weight) = weight.attach(path, &param, dtype);
                (placeholder, Some(weight))
            }
            None => (param, None),
        }
    }
}
