//! The forms of quantised folders.

use std::borrow::Cow;

use marlin_format::checkpoint::{TensorData, TensorSpec, compressed_tensors, gptq, marlin24};
use marlin_format::{FormatError, PlainWeight, QuantSpec};
use serde::{Deserialize, Serialize};

use crate::LlamaError;
use crate::config::MLP_INPUTS_APART;

/// The form in which a quantised folder is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileFormat {
    /// compressed-tensors, pack-quantized: llm-compressor's form.
    #[default]
    CompressedTensors,
    /// GPTQ, version 2: GPTQModel's form. K and N of every layer fill whole words. The `gate_up_proj` of Phi-3 is two layers,
    /// `gate_proj` and `up_proj`, as GPTQModel has them from 7.0 on; transformers takes Phi-3 in compressed-tensors' form.
    Gptq,
    /// compressed-tensors, marlin-24: two of every four weights. Weights are 2:4, symmetric, in groups of 128 or a whole column; K is a multiple of
    /// 32, N of 64.
    Marlin24,
}

impl FileFormat {
    /// Checks that readers of this form accept a layer [K, N].
    pub(super) fn check(self, layer: &str, k: usize, n: usize, spec: &QuantSpec) -> Result<(), LlamaError> {
        let multiple = spec.bits.per_word();
        match self {
            Self::Marlin24 => marlin24::check(k, n, spec).map_err(|source| LlamaError::Quantize { layer: layer.into(), source }),
            Self::Gptq if !(k.is_multiple_of(multiple) && n.is_multiple_of(multiple)) => {
                Err(LlamaError::GptqShape { layer: layer.into(), multiple, k, n })
            }
            _ => Ok(()),
        }
    }

    /// The layers that `layer` is in a file of this form.
    pub(super) fn names(self, layer: &str) -> Vec<String> {
        match (self, layer.strip_suffix("gate_up_proj")) {
            (Self::Gptq, Some(parent)) => MLP_INPUTS_APART.iter().map(|name| format!("{parent}{name}")).collect(),
            _ => vec![layer.into()],
        }
    }

    /// The tensors of a layer, without their bytes.
    pub(super) fn tensor_specs(self, layer: &str, k: usize, n: usize, spec: &QuantSpec, act_order: bool) -> Vec<TensorSpec> {
        match self {
            Self::CompressedTensors => compressed_tensors::tensor_specs(layer, k, n, spec, act_order),
            Self::Gptq => gptq::tensor_specs(layer, k, n, spec),
            Self::Marlin24 => marlin24::tensor_specs(layer, k, n, spec),
        }
    }

    /// The weight with the values that a file of this form stores.
    pub(super) fn stored(self, weight: &PlainWeight) -> Result<Cow<'_, PlainWeight>, FormatError> {
        match self {
            Self::CompressedTensors | Self::Gptq => Ok(weight.to_dense()),
            Self::Marlin24 => weight.to_two_four(),
        }
    }

    /// The tensors of a layer.
    pub(super) fn tensors_of(self, layer: &str, stored: &PlainWeight, act_order: bool) -> Result<Vec<TensorData>, FormatError> {
        match self {
            Self::CompressedTensors if act_order => Ok(compressed_tensors::activation_ordered_tensors_of(layer, stored)),
            Self::CompressedTensors => Ok(compressed_tensors::tensors_of(layer, stored)),
            Self::Gptq => Ok(gptq::tensors_of(layer, stored)),
            Self::Marlin24 => marlin24::tensors_of(layer, stored),
        }
    }
}
