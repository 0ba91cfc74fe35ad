//! Reading a layer in whatever format it is.

use super::{
    Checkpoint, CheckpointError, ConfigError, LayerFormat, Quantization, TensorView, awq, compressed_tensors, gptq, marlin, marlin24,
};
use crate::layout::PlainLayout;
use crate::{FormatError, PlainWeight, QuantSpec};

/// How `layer` is held, by what the configs of its folder say ([`Quantization::read`]): as floats where they say nothing.
///
/// # Errors
/// As [`Quantization::layer`].
pub fn layer_format(quantization: Option<&Quantization>, layer: &str) -> Result<LayerFormat, ConfigError> {
    quantization.map_or(Ok(LayerFormat::Float), |quantization| quantization.layer(layer))
}

/// The names of the tensors that hold the weight of `layer`, of those that the checkpoint has. A `bias` is not one of them.
///
/// A tensor counts that its format may hold but its config excludes, such as zero points of a symmetric weight: [`read_layer`] refuses it.
pub fn layer_tensors(checkpoint: &Checkpoint, layer: &str, format: &LayerFormat) -> Vec<String> {
    let tensors: &[&str] = match format {
        LayerFormat::Float => &["weight"],
        LayerFormat::Gptq(_) => &gptq::TENSORS,
        LayerFormat::Awq(_) => &awq::TENSORS,
        LayerFormat::PackQuantized(_) => &compressed_tensors::TENSORS,
        LayerFormat::Marlin(_) => &marlin::TENSORS,
        LayerFormat::Marlin24(_, names) => &marlin24::tensors(*names),
    };
    tensors.iter().map(|tensor| format!("{layer}.{tensor}")).filter(|name| checkpoint.contains(name)).collect()
}

/// Reads the weight of a quantised layer, such as `model.layers.0.mlp.up_proj`, into the plain form.
///
/// The dtype of the scale tensor counts, not the one in the format's spec, which no config says.
///
/// # Errors
/// [`CheckpointError::NotQuantized`] for [`LayerFormat::Float`]; what `to_plain` of the format's module refuses: tensors that are missing, of
/// another dtype or shape than the format says, or whose values make no sense.
pub fn read_layer(checkpoint: &Checkpoint, layer: &str, format: &LayerFormat) -> Result<PlainWeight, CheckpointError> {
    match format {
        LayerFormat::Float => Err(CheckpointError::NotQuantized { layer: layer.into() }),
        LayerFormat::Gptq(format) => gptq::to_plain(checkpoint, layer, format),
        LayerFormat::Awq(spec) => awq::to_plain(checkpoint, layer, spec),
        LayerFormat::PackQuantized(format) => compressed_tensors::to_plain(checkpoint, layer, &format.spec),
        LayerFormat::Marlin(spec) => marlin::to_plain(checkpoint, layer, spec),
        LayerFormat::Marlin24(spec, names) => marlin24::to_plain(checkpoint, layer, spec, *names),
    }
}

/// The tensors of one layer, by their names inside it, and the errors that concern it.
#[derive(Clone, Copy)]
pub(super) struct LayerTensors<'a> {
    checkpoint: &'a Checkpoint,
    layer: &'a str,
}

impl<'a> LayerTensors<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, layer: &'a str) -> Self {
        Self { checkpoint, layer }
    }

    pub(super) fn name(&self, tensor: &str) -> String {
        format!("{}.{tensor}", self.layer)
    }

    pub(super) fn get(&self, tensor: &str) -> Result<TensorView<'a>, CheckpointError> {
        self.checkpoint.tensor(&self.name(tensor))
    }

    pub(super) fn optional(&self, tensor: &str) -> Option<TensorView<'a>> {
        self.get(tensor).ok()
    }

    /// The zero points, which must be there exactly where `spec` has them. Of a symmetric weight the tensor may be there if all that it holds is
    /// the midpoint: GPTQModel's AWQ writes it beside `zero_point: false`.
    pub(super) fn zero_points(&self, tensor: &str, spec: &QuantSpec) -> Result<Option<TensorView<'a>>, CheckpointError> {
        let midpoints = spec.bits.padding_word().to_le_bytes();
        match (self.optional(tensor), spec.zero_points) {
            (Some(found), false) if found.words().is_ok_and(|words| words.iter().all(|&word| word == midpoints)) => Ok(None),
            (Some(found), false) => Err(CheckpointError::UnexpectedZeroPoints { path: found.path().into(), tensor: self.name(tensor) }),
            (None, true) => Err(CheckpointError::MissingZeroPoints { dir: self.checkpoint.dir().into(), tensor: self.name(tensor) }),
            (found, _) => Ok(found),
        }
    }

    /// Words for a weight in `layout`, whatever they are.
    pub(super) fn buffer(&self, layout: &PlainLayout) -> Vec<u32> {
        self.checkpoint.buffer(layout.words())
    }

    pub(super) fn missing(&self, tensor: &str) -> CheckpointError {
        CheckpointError::MissingTensor { dir: self.checkpoint.dir().into(), tensor: self.name(tensor) }
    }

    pub(super) fn unsupported(&self, format: &'static str, expected: &'static str, found: &QuantSpec) -> CheckpointError {
        CheckpointError::Spec { layer: self.layer.into(), format, expected, found: *found }
    }

    /// A weight that does not hold together; `tensor` is the one that holds its values.
    pub(super) fn invalid(&self, tensor: &TensorView<'_>, source: FormatError) -> CheckpointError {
        CheckpointError::Weight { layer: self.layer.into(), path: tensor.path().into(), source }
    }
}
