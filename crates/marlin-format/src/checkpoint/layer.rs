//! Reading a layer in whatever format it is.

use std::collections::BTreeSet;

use super::{
    CONFIG_FILE, Checkpoint, CheckpointError, ConfigError, LayerFormat, Quantization, awq,
    compressed_tensors, gptq, marlin, marlin24,
};
use crate::{PlainWeight, memory_short_of};

/// Returns the format of `layer` by the configs of its folder ([`Quantization::read`]): floats if
/// they do not mention it.
///
/// # Errors
/// As [`Quantization::layer`].
pub fn layer_format(
    quantization: Option<&Quantization>,
    layer: &str,
) -> Result<LayerFormat, ConfigError> {
    quantization.map_or(Ok(LayerFormat::Float), |quantization| {
        quantization.layer(layer)
    })
}

/// The names of the tensors that hold the weight of `layer`, of those that the checkpoint has. A
/// `bias` is not one of them.
///
/// A tensor counts that its format may hold but its config excludes, such as zero points of a
/// symmetric weight: [`read_layer`] refuses it.
pub fn layer_tensors(checkpoint: &Checkpoint, layer: &str, format: &LayerFormat) -> Vec<String> {
    let tensors: &[&str] = match format {
        LayerFormat::Float => &["weight"],
        LayerFormat::Gptq(_) => &gptq::TENSORS,
        LayerFormat::Awq(_) => &awq::TENSORS,
        LayerFormat::PackQuantized(_) => &compressed_tensors::TENSORS,
        LayerFormat::Marlin(_) => &marlin::TENSORS,
        LayerFormat::Marlin24(_, names) => &marlin24::tensors(*names),
    };
    tensors
        .iter()
        .map(|tensor| format!("{layer}.{tensor}"))
        .filter(|name| checkpoint.contains(name))
        .collect()
}

/// The contents of a checkpoint under one name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// A quantised layer.
    Layer {
        /// Its name, such as `model.layers.0.mlp.up_proj`.
        name: String,
        /// The format.
        format: LayerFormat,
        /// The names of its tensors, as [`layer_tensors`] has them.
        tensors: Vec<String>,
    },
    /// A tensor that belongs to no quantised layer.
    Tensor {
        /// Its name.
        name: String,
    },
}

impl Part {
    /// Its name: that of the layer, or of the tensor.
    pub fn name(&self) -> &str {
        match self {
            Self::Layer { name, .. } | Self::Tensor { name } => name,
        }
    }
}

/// All that a checkpoint holds, with the tensors of each quantised layer together, sorted by the
/// names of first tensors.
///
/// # Errors
/// [`CheckpointError::Config`], as [`Quantization::layer`].
pub fn parts(
    checkpoint: &Checkpoint,
    quantization: Option<&Quantization>,
) -> Result<Vec<Part>, CheckpointError> {
    let (mut parts, mut counted) = (Vec::new(), BTreeSet::new());
    for name in checkpoint.names() {
        if counted.contains(name) {
            continue;
        }
        let (layer, _) = name.rsplit_once('.').unwrap_or((name, ""));
        let format =
            layer_format(quantization, layer).map_err(|source| CheckpointError::Config {
                path: checkpoint.dir().join(CONFIG_FILE),
                source,
            })?;
        let tensors = layer_tensors(checkpoint, layer, &format);
        // A config may give a format to all layers, those of norms and embeddings with them.
        if format == LayerFormat::Float || !tensors.iter().any(|tensor| tensor == name) {
            parts.push(Part::Tensor { name: name.into() });
        } else {
            counted.extend(tensors.iter().cloned());
            parts.push(Part::Layer {
                name: layer.into(),
                format,
                tensors,
            });
        }
    }
    Ok(parts)
}

/// Reads the weight of a quantised layer, such as `model.layers.0.mlp.up_proj`, into the plain
/// form.
///
/// A weight that is 2:4 is stored as such, whatever its format ([`PlainWeight::as_found`]).
///
/// The dtype of the scale tensor counts, not the one in the format's spec, which no config has.
///
/// # Errors
/// [`CheckpointError::NotQuantized`] for [`LayerFormat::Float`]; [`CheckpointError::LayerTooLarge`]
/// for more than the memory holds; the errors of `to_plain` of the format's module: tensors that
/// are missing, of another dtype or shape than the format's, or whose values make no sense.
pub fn read_layer(
    checkpoint: &Checkpoint,
    layer: &str,
    format: &LayerFormat,
) -> Result<PlainWeight, CheckpointError> {
    // The file's bytes, and what they are converted to. A file may have holes, which take no space
    // on a disk.
    let tensors = layer_tensors(checkpoint, layer, format);
    let needed = 2 * tensors
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
    }?;
    Ok(weight.as_found())
}
