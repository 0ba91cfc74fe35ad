//! The tensors of one layer, as the readers of all formats see them.

use super::{Checkpoint, CheckpointError, TensorView};
use crate::layout::PlainLayout;
use crate::{FormatError, QuantSpec};

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

    /// The zero points, which must be there exactly where `spec` has them. Of a symmetric weight
    /// the tensor may be there if all that it holds is the midpoint: GPTQModel's AWQ writes it
    /// beside `zero_point: false`.
    pub(super) fn zero_points(
        &self,
        tensor: &str,
        spec: &QuantSpec,
    ) -> Result<Option<TensorView<'a>>, CheckpointError> {
        let midpoints = spec.bits.padding_word().to_le_bytes();
        match (self.optional(tensor), spec.zero_points) {
            (Some(found), false)
                if found
                    .words()
                    .is_ok_and(|words| words.iter().all(|&word| word == midpoints)) =>
            {
                Ok(None)
            }
            (Some(found), false) => Err(CheckpointError::UnexpectedZeroPoints {
                path: found.path().into(),
                tensor: self.name(tensor),
            }),
            (None, true) => Err(CheckpointError::MissingZeroPoints {
                dir: self.checkpoint.dir().into(),
                tensor: self.name(tensor),
            }),
            (found, _) => Ok(found),
        }
    }

    /// Words for a weight in `layout`, whatever they are.
    pub(super) fn buffer(&self, layout: &PlainLayout) -> Vec<u32> {
        self.checkpoint.buffer(layout.words())
    }

    pub(super) fn missing(&self, tensor: &str) -> CheckpointError {
        CheckpointError::MissingTensor {
            dir: self.checkpoint.dir().into(),
            tensor: self.name(tensor),
        }
    }

    pub(super) fn unsupported(
        &self,
        format: &'static str,
        expected: &'static str,
        found: &QuantSpec,
    ) -> CheckpointError {
        CheckpointError::Spec {
            layer: self.layer.into(),
            format,
            expected,
            found: *found,
        }
    }

    /// A weight that does not hold together; `tensor` is the one that holds its values.
    pub(super) fn invalid(&self, tensor: &TensorView<'_>, source: FormatError) -> CheckpointError {
        CheckpointError::Weight {
            layer: self.layer.into(),
            path: tensor.path().into(),
            source,
        }
    }
}
