//! Access to the tensors of one layer, shared by the readers of all formats.

use super::packed::from_byte_rows;
use super::{Checkpoint, CheckpointError, TensorView};
use crate::layout::PlainLayout;
use crate::{FormatError, PlainParts, PlainWeight, QuantSpec, Scales};

/// The tensors of one layer, by their names within the layer, and the errors about the layer.
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

    /// Returns the tensor of zero points, which must be present exactly if `spec` has zero points.
    /// For a symmetric weight the tensor may be present if all its values are the midpoint:
    /// GPTQModel writes such a tensor in AWQ checkpoints with `zero_point: false`.
    pub(super) fn zero_points(
        &self,
        tensor: &str,
        spec: &QuantSpec,
    ) -> Result<Option<TensorView<'a>>, CheckpointError> {
        let midpoints = spec.value.padding_word().to_le_bytes();
        match (self.optional(tensor), spec.has_zero_points()) {
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

    /// Returns a buffer of words for a weight in `layout`, with any contents.
    pub(super) fn buffer(&self, layout: &PlainLayout) -> Vec<u32> {
        self.checkpoint.buffer(layout.words())
    }

    /// Returns the weight `[K, N]` whose values are the bytes of `weight`, a row for each of the N
    /// output features, with scales `[G, N]`.
    pub(super) fn float_weight(
        &self,
        weight: &TensorView<'_>,
        spec: QuantSpec,
        [k, n]: [usize; 2],
        scales: Vec<f32>,
    ) -> Result<PlainWeight, CheckpointError> {
        let words = self.buffer(&PlainLayout::new(k, n, spec.value));
        float_weight(words, weight.bytes(), spec, [k, n], scales)
            .map_err(|source| self.invalid(weight, source))
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

    /// Returns the error for an inconsistent weight. `tensor` is the tensor with its quantised
    /// values.
    pub(super) fn invalid(&self, tensor: &TensorView<'_>, source: FormatError) -> CheckpointError {
        CheckpointError::Weight {
            layer: self.layer.into(),
            path: tensor.path().into(),
            source,
        }
    }
}

/// Returns the weight `[K, N]` whose values are `bytes`, a row for each of the N output features,
/// with scales `[G, N]`. `words` is a buffer for the values, with any contents.
pub(super) fn float_weight(
    words: Vec<u32>,
    bytes: &[u8],
    spec: QuantSpec,
    [k, n]: [usize; 2],
    scales: Vec<f32>,
) -> Result<PlainWeight, FormatError> {
    let layout = PlainLayout::new(k, n, spec.value);
    PlainWeight::new(PlainParts {
        k,
        n,
        spec,
        qweight: from_byte_rows(words, &layout, bytes),
        metadata: None,
        scales: Scales::F32(scales),
        zero_points: None,
        row_permutation: None,
    })
}
