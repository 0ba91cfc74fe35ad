//! Float matrices stored as compressed-tensors' `sparse-24-bitmask`, with two of every four values
//! in the file.
//!
//! A matrix `{layer}.weight` `[N, K]` is stored in three tensors:
//!
//! | tensor | shape | holds |
//! |---|---|---|
//! | `{layer}.shape` | [2] or [2, 1], I64 | N and K |
//! | `{layer}.compressed` | [N, K/2], F16, BF16 or F32 | the stored values, in row-major order |
//! | `{layer}.bitmask` | [N, K/8 rounded up], U8 | bit `k % 8`, lowest first, of byte `k / 8`: value `k` is stored |
//!
//! Source: the `compressed-tensors` Python package, versions 0.9 to 0.14,
//! `compressors/sparse_compressors/sparse_24_bitmask.py`.

use std::sync::OnceLock;

use rayon::prelude::*;
use safetensors::Dtype;

use super::header::Entry;
use super::{CheckpointError, TensorView, is_float};
use crate::memory_short_of;

/// The names of the three tensors, without the name of the layer.
pub(super) const TENSORS: [&str; 3] = ["shape", "compressed", "bitmask"];

/// The bitmask of a matrix, and the expanded values after the first read.
#[derive(Debug)]
pub(super) struct Bitmasked {
    pub bitmask: (usize, Entry),
    values: OnceLock<Vec<u8>>,
}

impl Bitmasked {
    pub fn new(bitmask: (usize, Entry)) -> Self {
        Self {
            bitmask,
            values: OnceLock::new(),
        }
    }

    /// Returns all values of the matrix, as bytes. `matrix` has the shape of the whole matrix and
    /// the stored values.
    ///
    /// # Errors
    /// An error if the bitmask does not select two of every four values.
    pub fn values(
        &self,
        matrix: TensorView<'_>,
        bitmask: TensorView<'_>,
    ) -> Result<&[u8], CheckpointError> {
        if let Some(values) = self.values.get() {
            return Ok(values);
        }
        let values = expand(matrix, bitmask)?;
        Ok(self.values.get_or_init(|| values))
    }
}

/// Returns the shape `[N, K]` of the matrix that three tensors store, or `None` if its values are
/// not floats.
///
/// # Errors
/// An error if a tensor has another shape or dtype.
pub(super) fn shape(
    shape: TensorView<'_>,
    compressed: TensorView<'_>,
    bitmask: TensorView<'_>,
) -> Result<Option<[usize; 2]>, CheckpointError> {
    if !is_float(compressed.dtype()) {
        return Ok(None);
    }
    let extents: Vec<usize> = shape
        .to_i64()?
        .into_iter()
        .filter_map(|extent| usize::try_from(extent).ok())
        .collect();
    let &[n, k] = extents.as_slice() else {
        return Err(shape.bad_values(format!(
            "it has {} extents; expected N and K of a matrix",
            extents.len()
        )));
    };
    if n == 0 || k == 0 || !k.is_multiple_of(4) {
        return Err(shape.bad_values(format!(
            "N = {n}, K = {k}; expected a matrix whose K is a multiple of 4"
        )));
    }
    compressed.expect_shape(&[n, k / 2])?;
    bitmask.expect_shape(&[n, k.div_ceil(8)])?;
    if bitmask.dtype() != Dtype::U8 {
        return Err(bitmask.wrong_dtype("U8"));
    }
    Ok(Some([n, k]))
}

/// Expands the stored values of every row to their positions, with zeros in the other positions.
fn expand(matrix: TensorView<'_>, bitmask: TensorView<'_>) -> Result<Vec<u8>, CheckpointError> {
    // Shapes were checked when the file was opened.
    let (stored, [n, k]) = (matrix.bytes(), [matrix.shape()[0], matrix.shape()[1]]);
    let row_bytes = stored.len() / n;
    let size = row_bytes / (k / 2);
    let mask_bytes = bitmask.shape()[1];
    // A sparse file can declare more bytes than it occupies on the disk.
    let needed = 2 * stored.len();
    if let Some(available) = memory_short_of(needed) {
        return Err(CheckpointError::LayerTooLarge {
            layer: matrix.name().into(),
            needed,
            available,
        });
    }
    let mut values = vec![0; needed];
    let rows = values
        .par_chunks_exact_mut(2 * row_bytes)
        .zip(stored.par_chunks_exact(row_bytes));
    rows.zip(bitmask.bytes().par_chunks_exact(mask_bytes))
        .enumerate()
        .try_for_each(|(row, ((values, stored), mask))| {
            for (four, (values, stored)) in values
                .chunks_exact_mut(4 * size)
                .zip(stored.chunks_exact(2 * size))
                .enumerate()
            {
                let mask = mask[four / 2] >> (4 * (four % 2)) & 15;
                if mask.count_ones() != 2 {
                    return Err(bitmask.bad_values(format!(
                        "of values {} to {} of row {row} it names {}; expected two of every four",
                        4 * four,
                        4 * four + 3,
                        mask.count_ones()
                    )));
                }
                let places = (0..4).filter(|place| mask >> place & 1 == 1);
                for (place, stored) in places.zip(stored.chunks_exact(size)) {
                    values[place * size..][..size].copy_from_slice(stored);
                }
            }
            Ok(())
        })?;
    Ok(values)
}
