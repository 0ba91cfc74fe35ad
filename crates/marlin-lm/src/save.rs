//! Writing a model as a float Hugging Face folder.

use std::path::Path;

use burn::tensor::{FloatDType, Tensor};
use half::{bf16, f16};
use marlin_format::checkpoint::{CheckpointWriter, Dtype, TensorSpec};

use crate::ModelError;
use crate::architectures::StackShape;
use crate::config::ModelConfig;
use crate::model::{DenseExperts, Experts, Model, ModelTensor, Projection};
use crate::parallel::ParallelError;

/// Writes `config.json` and `model.safetensors` to a new folder, with Hugging Face's names and
/// layout (projections [N, K]).
///
/// Projections that are joined into one matmul in the model are written as the separate layers of
/// the architecture.
///
/// Weights are rounded to `dtype`. An output head that is tied to the embedding is not written. The
/// folder appears when it is complete.
///
/// # Errors
/// [`ModelError::Checkpoint`] if `dir` exists and is not empty, or cannot be written;
/// [`ModelError::SaveDtype`] if `dtype` is not f16, bf16 or f32; [`ModelError::NotFloat`] for a
/// model with quantised projections; [`ModelError::NotRepresentable`] for values that are not
/// finite in `dtype`; [`ModelError::Parallel`] for a model that is split over several devices;
/// [`ModelError::Read`] if the device fails.
pub fn save_float(
    model: &Model,
    config: &ModelConfig,
    dir: &Path,
    dtype: FloatDType,
) -> Result<(), ModelError> {
    let file_dtype = match dtype {
        FloatDType::F16 => Dtype::F16,
        FloatDType::BF16 => Dtype::BF16,
        FloatDType::F32 => Dtype::F32,
        FloatDType::F64 | FloatDType::Flex32 => return Err(ModelError::SaveDtype { found: dtype }),
    };
    if model.is_split() {
        let count = model.rank_count();
        return Err(ParallelError::NotWhole { count }.into());
    }
    let mut tensors = Vec::new();
    for (name, part) in model.parts() {
        tensors.extend(stored(&name, &part)?);
    }
    let mut writer = CheckpointWriter::create(dir)?;
    let config = ModelConfig {
        dtype: Some(dtype),
        ..config.clone()
    };
    writer.write_file(
        "config.json",
        format!("{:#}\n", config.to_json()).as_bytes(),
    )?;
    writer.declare(
        tensors
            .iter()
            .map(|tensor| TensorSpec::new(tensor.name.as_str(), file_dtype, tensor.values.shape())),
    )?;
    for Stored { name, values } in tensors {
        writer.write_tensor(&name, &bytes(&name, &values.read(&name)?, dtype)?)?;
    }
    Ok(writer.finish()?)
}

/// A tensor to write, in the file's layout. The tensor is not read from the device until it is
/// written, and matrices are transposed as views, so that saving takes the memory of one tensor.
struct Stored {
    name: String,
    values: Values,
}

enum Values {
    Vector(Tensor<1>),
    Matrix(Tensor<2>),
    Stack(Tensor<3>),
}

/// Returns the tensors to write for a part of the model: its weight, then its bias if it has one.
fn stored(name: &str, part: &ModelTensor<'_>) -> Result<Vec<Stored>, ModelError> {
    let weight = |values| Stored {
        name: format!("{name}.weight"),
        values,
    };
    Ok(match part {
        ModelTensor::Embedding(embedding) => vec![weight(Values::Matrix(embedding.weight.val()))],
        ModelTensor::Norm(norm) => vec![weight(Values::Vector(norm.weight.val()))],
        ModelTensor::Vector(vector) => vec![Stored {
            name: name.into(),
            values: Values::Vector(vector.val()),
        }],
        ModelTensor::Projection {
            projection: Projection::Quant(_),
            ..
        } => return Err(ModelError::NotFloat { layer: name.into() }),
        ModelTensor::Expert {
            experts: Experts::Quant(_),
            ..
        }
        | ModelTensor::Stack {
            experts: Experts::Quant(_),
            ..
        } => return Err(ModelError::NotFloat { layer: name.into() }),
        ModelTensor::Expert {
            experts: Experts::Dense(experts),
            expert,
            is_down,
            columns,
        } => {
            let all = if *is_down {
                &experts.down
            } else {
                &experts.gate_up
            };
            let of_expert = all.val().slice_dim(0, *expert..expert + 1).squeeze_dim(0);
            let columns = of_expert.slice_dim(1, columns.clone());
            vec![weight(Values::Matrix(columns.transpose()))]
        }
        ModelTensor::Stack {
            experts: Experts::Dense(experts),
            is_down,
            shape,
        } => stack(name, experts, *is_down, *shape),
        ModelTensor::Projection {
            projection: Projection::Dense(linear),
            columns,
        } => {
            let columns_of_weight = linear.weight.val().slice_dim(1, columns.clone());
            let mut tensors = vec![weight(Values::Matrix(columns_of_weight.transpose()))];
            let bias = linear
                .bias
                .as_ref()
                .map(|bias| Values::Vector(bias.val().slice_dim(0, columns.clone())));
            tensors.extend(bias.map(|values| Stored {
                name: format!("{name}.bias"),
                values,
            }));
            tensors
        }
    })
}

/// Returns the tensors of the weights of all experts, and of their biases if there are any.
fn stack(name: &str, experts: &DenseExperts, is_down: bool, shape: StackShape) -> Vec<Stored> {
    let (weights, biases) = if is_down {
        (&experts.down, &experts.down_bias)
    } else {
        (&experts.gate_up, &experts.gate_up_bias)
    };
    let ordered = |columns: Tensor<3>| match shape.alternates && !is_down {
        true => {
            let [experts, k, n] = columns.dims();
            let of_layers = columns.reshape([experts, k, 2, n / 2]);
            of_layers.swap_dims(2, 3).reshape([experts, k, n])
        }
        false => columns,
    };
    let weights = ordered(weights.val());
    let weights = match shape.has_k_first {
        true => weights,
        false => weights.swap_dims(1, 2),
    };
    let mut tensors = vec![Stored {
        name: name.into(),
        values: Values::Stack(weights),
    }];
    tensors.extend(biases.as_ref().map(|biases| Stored {
        name: format!("{name}_bias"),
        values: Values::Matrix(ordered(biases.val().unsqueeze_dim(1)).squeeze_dim(1)),
    }));
    tensors
}

impl Values {
    fn shape(&self) -> Vec<usize> {
        match self {
            Self::Vector(tensor) => tensor.dims().to_vec(),
            Self::Matrix(tensor) => tensor.dims().to_vec(),
            Self::Stack(tensor) => tensor.dims().to_vec(),
        }
    }

    fn read(self, name: &str) -> Result<Vec<f32>, ModelError> {
        let values = match self {
            Self::Vector(tensor) => tensor.try_into_vec_as::<f32>(),
            Self::Matrix(tensor) => tensor.try_into_vec_as::<f32>(),
            Self::Stack(tensor) => tensor.try_into_vec_as::<f32>(),
        };
        values.map_err(|error| ModelError::Read {
            tensor: name.into(),
            reason: error.to_string(),
        })
    }
}

/// Rounds `value` to the nearest number of `dtype`.
pub(crate) fn rounded(value: f32, dtype: FloatDType) -> f32 {
    match dtype {
        FloatDType::F16 => f16::from_f32(value).to_f32(),
        FloatDType::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Converts `values` to little-endian bytes of `dtype`.
pub(crate) fn bytes(
    tensor: &str,
    values: &[f32],
    dtype: FloatDType,
) -> Result<Vec<u8>, ModelError> {
    if let Some((index, &value)) = values
        .iter()
        .enumerate()
        .find(|&(_, &value)| !rounded(value, dtype).is_finite())
    {
        return Err(ModelError::NotRepresentable {
            tensor: tensor.into(),
            index,
            value,
            dtype,
        });
    }
    Ok(match dtype {
        FloatDType::F16 => values
            .iter()
            .flat_map(|&value| f16::from_f32(value).to_le_bytes())
            .collect(),
        FloatDType::BF16 => values
            .iter()
            .flat_map(|&value| bf16::from_f32(value).to_le_bytes())
            .collect(),
        _ => values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
    })
}
