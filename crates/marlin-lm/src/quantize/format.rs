//! The file formats of quantised folders.

use std::borrow::Cow;

use marlin_format::checkpoint::{TensorData, TensorSpec, compressed_tensors, gptq, marlin24};
use marlin_format::{FormatError, PlainWeight, QuantSpec};
use serde::{Deserialize, Serialize};

use crate::ModelError;
use crate::architectures::ProjectionShape;

/// The file format of a quantised folder.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileFormat {
    /// compressed-tensors, pack-quantized: the format of llm-compressor. Act-order over groups is
    /// not supported, since readers of the format refuse it.
    #[default]
    CompressedTensors,
    /// GPTQ, version 2: the format of GPTQModel. K and N of every layer must fill whole words. The
    /// `gate_up_proj` of Phi-3 is written as two layers, `gate_proj` and `up_proj`, as GPTQModel
    /// does from 7.0 on; transformers reads Phi-3 in the compressed-tensors format.
    Gptq,
    /// compressed-tensors, marlin-24: two of every four weights. compressed-tensors from 0.15 on
    /// and vLLM no longer read this format. Weights are 2:4, symmetric, in groups of 128 or a whole
    /// column; K is a multiple of 32, and N of 64.
    Marlin24,
}

impl FileFormat {
    /// Checks that readers of this format accept a layer [K, N].
    pub(super) fn check(
        self,
        layer: &str,
        k: usize,
        n: usize,
        spec: &QuantSpec,
        act_order: bool,
    ) -> Result<(), ModelError> {
        let (multiple, groups) = (spec.value.per_word(), spec.scales.group.count(k));
        match self {
            Self::CompressedTensors if act_order && groups > 1 => Err(ModelError::ActOrderGroups {
                layer: layer.into(),
                groups,
            }),
            Self::CompressedTensors => {
                compressed_tensors::check(spec).map_err(|source| ModelError::Quantize {
                    layer: layer.into(),
                    source,
                })
            }
            Self::Gptq if spec.value.is_float() => Err(ModelError::Quantize {
                layer: layer.into(),
                source: FormatError::IntegerFormat {
                    format: "GPTQ",
                    value: spec.value,
                },
            }),
            Self::Marlin24 => marlin24::check(k, n, spec).map_err(|source| ModelError::Quantize {
                layer: layer.into(),
                source,
            }),
            Self::Gptq if !(k.is_multiple_of(multiple) && n.is_multiple_of(multiple)) => {
                Err(ModelError::GptqShape {
                    layer: layer.into(),
                    multiple,
                    k,
                    n,
                })
            }
            _ => Ok(()),
        }
    }

    /// Returns the names of the layers that `layer`, a layer of `projection`, has in a file of this
    /// format.
    pub(super) fn names(self, layer: &str, projection: &ProjectionShape) -> Vec<String> {
        // A layer with all outputs of a projection, which may be one layer for each output in
        // GPTQModel.
        let joined = projection
            .layers
            .iter()
            .find(|_| projection.layers.len() == 1);
        let block = joined.and_then(|joined| layer.strip_suffix(joined));
        match (self, block, projection.split_layers) {
            (Self::Gptq, Some(block), Some(split)) => {
                split.iter().map(|name| format!("{block}{name}")).collect()
            }
            _ => vec![layer.into()],
        }
    }

    /// Returns the specs of the tensors of a layer.
    pub(super) fn tensor_specs(
        self,
        layer: &str,
        k: usize,
        n: usize,
        spec: &QuantSpec,
    ) -> Vec<TensorSpec> {
        match self {
            Self::CompressedTensors => compressed_tensors::tensor_specs(layer, k, n, spec, false),
            Self::Gptq => gptq::tensor_specs(layer, k, n, spec),
            Self::Marlin24 => marlin24::tensor_specs(layer, k, n, spec),
        }
    }

    /// Returns the weight with the values that a file of this format stores.
    pub(super) fn stored(self, weight: &PlainWeight) -> Result<Cow<'_, PlainWeight>, FormatError> {
        match self {
            Self::CompressedTensors | Self::Gptq => Ok(weight.to_dense()),
            Self::Marlin24 => weight.to_two_four(),
        }
    }

    /// Returns the tensors of a layer.
    pub(super) fn tensors_of(
        self,
        layer: &str,
        stored: &PlainWeight,
    ) -> Result<Vec<TensorData>, FormatError> {
        match self {
            Self::CompressedTensors => Ok(compressed_tensors::tensors_of(layer, stored)),
            Self::Gptq => Ok(gptq::tensors_of(layer, stored)),
            Self::Marlin24 => marlin24::tensors_of(layer, stored),
        }
    }
}
