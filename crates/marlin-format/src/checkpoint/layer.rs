//! Reads layers of any supported format.

use std::collections::BTreeSet;

use super::{
    CONFIG_FILE, Checkpoint, CheckpointError, ConfigError, LayerFormat, Quantization, awq,
    compressed_tensors, fp4, fp8, gptq, marlin, marlin24, stacked,
};
use crate::{PlainWeight, memory_short_of};

/// Returns the format of `layer` according to the configs of its folder ([`Quantization::read`]).
/// The format is [`LayerFormat::Float`] if the configs do not mention the layer.
///
/// # Errors
/// The errors of [`Quantization::layer`].
pub fn layer_format(
    quantization: Option<&Quantization>,
    layer: &str,
) -> Result<LayerFormat, ConfigError> {
    quantization.map_or(Ok(LayerFormat::Float), |quantization| {
        quantization.layer(layer)
    })
}

/// Returns the names of the tensors in the checkpoint that store the weight of `layer`. A `bias` is
/// not included.
///
/// The result includes tensors that the format allows but the config excludes, such as zero points
/// of a symmetric weight. [`read_layer`] refuses these. It also includes the scales of quantised
/// activations and caches that files of floats hold, which are not used.
pub fn layer_tensors(checkpoint: &Checkpoint, layer: &str, format: &LayerFormat) -> Vec<String> {
    let tensors: &[&str] = match format {
        LayerFormat::Float => &["weight"],
        LayerFormat::Gptq(_) => &gptq::TENSORS,
        LayerFormat::Awq(_) => &awq::TENSORS,
        LayerFormat::PackQuantized(_) => &compressed_tensors::TENSORS,
        LayerFormat::Marlin(_) => &marlin::TENSORS,
        LayerFormat::Marlin24(_, names) => &marlin24::tensors(*names),
        // A config may declare FP8 for all layers, including norms and embeddings, whose `weight`
        // is float.
        LayerFormat::Fp8(_) if !fp8::contains(checkpoint, layer) => &[],
        LayerFormat::Fp4(format) if !fp4::contains(checkpoint, layer, *format) => &[],
        LayerFormat::StackedMxFp4 if !stacked::contains(checkpoint, layer) => &[],
        LayerFormat::Fp8(format) => fp8::tensors(format.config),
        LayerFormat::Fp4(format) => fp4::tensors(*format),
        LayerFormat::StackedMxFp4 => &stacked::TENSORS,
    };
    // The names of a stack of experts continue its own name.
    let dot = match format {
        LayerFormat::StackedMxFp4 => "",
        _ => ".",
    };
    tensors
        .iter()
        .map(|tensor| format!("{layer}{dot}{tensor}"))
        .filter(|name| checkpoint.contains(name))
        .collect()
}

/// An entry of a checkpoint: a quantised layer or another tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckpointEntry {
    /// A quantised layer.
    Layer {
        /// The name of the layer, such as `model.layers.0.mlp.up_proj`.
        name: String,
        /// The format of the layer.
        format: LayerFormat,
        /// The names of the layer's tensors, as returned by [`layer_tensors`].
        tensors: Vec<String>,
    },
    /// A tensor that belongs to no quantised layer.
    Tensor {
        /// The name of the tensor.
        name: String,
    },
}

impl CheckpointEntry {
    /// Returns the name of the layer or of the tensor.
    pub fn name(&self) -> &str {
        match self {
            Self::Layer { name, .. } | Self::Tensor { name } => name,
        }
    }
}

/// Returns all entries of a checkpoint, sorted by the name of the first tensor. The tensors of a
/// quantised layer form one entry.
///
/// # Errors
/// [`CheckpointError::Config`] with the error of [`Quantization::layer`].
pub fn entries(
    checkpoint: &Checkpoint,
    quantization: Option<&Quantization>,
) -> Result<Vec<CheckpointEntry>, CheckpointError> {
    let (mut entries, mut counted) = (Vec::new(), BTreeSet::new());
    for name in checkpoint.names() {
        if counted.contains(name) {
            continue;
        }
        let stack = stacked::TENSORS
            .into_iter()
            .find_map(|end| name.strip_suffix(end));
        let (layer, _) = name.rsplit_once('.').unwrap_or((name, ""));
        let layer = stack.unwrap_or(layer);
        let format =
            layer_format(quantization, layer).map_err(|source| CheckpointError::Config {
                path: checkpoint.dir().join(CONFIG_FILE),
                source,
            })?;
        let tensors = layer_tensors(checkpoint, layer, &format);
        // A config may declare a format for all layers, including norms and embeddings.
        if format == LayerFormat::Float || !tensors.iter().any(|tensor| tensor == name) {
            entries.push(CheckpointEntry::Tensor { name: name.into() });
        } else {
            counted.extend(tensors.iter().cloned());
            entries.push(CheckpointEntry::Layer {
                name: layer.into(),
                format,
                tensors,
            });
        }
    }
    Ok(entries)
}

/// Reads the weight of a quantised layer, such as `model.layers.0.mlp.up_proj`, into the plain
/// form.
///
/// A weight with the 2:4 pattern is stored as 2:4, whatever its format
/// ([`PlainWeight::detect_two_four`]).
///
/// The dtype of the scale tensor decides, not the dtype in the format's spec, which no config
/// declares. Scales of floats become f32.
///
/// # Errors
/// * [`CheckpointError::NotQuantized`] for [`LayerFormat::Float`].
/// * [`CheckpointError::LayerTooLarge`] if the layer does not fit in memory.
/// * The errors of `to_plain` in the format's module: tensors that are missing, have another dtype
///   or shape than the format's, or have invalid values.
pub fn read_layer(
    checkpoint: &Checkpoint,
    layer: &str,
    format: &LayerFormat,
) -> Result<PlainWeight, CheckpointError> {
    // The bytes of the file and the converted weight; for floats also rows that are padded to whole
    // words, and scales that become f32. A sparse file can declare more bytes than it occupies on
    // the disk.
    let copies = match format {
        LayerFormat::Fp8(_) | LayerFormat::Fp4(_) | LayerFormat::StackedMxFp4 => 3,
        _ => 2,
    };
    let tensors = layer_tensors(checkpoint, layer, format);
    let needed = copies
        * tensors
            .iter()
            .filter_map(|name| Some(checkpoint.tensor(name).ok()?.bytes().len()))
            .sum::<usize>();
    if let Some(available) = memory_short_of(needed) {
        return Err(CheckpointError::LayerTooLarge {
            layer: layer.into(),
            needed,
            available,
        });
    }
    let weight = match format {
        LayerFormat::Float => Err(CheckpointError::NotQuantized {
            layer: layer.into(),
        }),
        LayerFormat::Gptq(format) => gptq::to_plain(checkpoint, layer, format),
        LayerFormat::Awq(spec) => awq::to_plain(checkpoint, layer, spec),
        LayerFormat::PackQuantized(format) => {
            compressed_tensors::to_plain(checkpoint, layer, &format.spec)
        }
        LayerFormat::Marlin(spec) => marlin::to_plain(checkpoint, layer, spec),
        LayerFormat::Marlin24(spec, names) => marlin24::to_plain(checkpoint, layer, spec, *names),
        LayerFormat::Fp8(format) => fp8::to_plain(checkpoint, layer, format),
        LayerFormat::Fp4(format) => fp4::to_plain(checkpoint, layer, *format),
        LayerFormat::StackedMxFp4 => stacked::to_plain(checkpoint, layer),
    }?;
    Ok(weight.detect_two_four())
}
