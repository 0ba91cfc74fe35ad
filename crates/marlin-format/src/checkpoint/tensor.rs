//! Tensors of a checkpoint: views of stored tensors, declarations, and data to write.

use std::ops::Range;
use std::path::Path;

use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;

use super::CheckpointError;
use super::packed::transposed;
use crate::{ScaleDtype, Scales};

/// A tensor in a file of a checkpoint. Its bytes are those of the file, mapped into memory, and may
/// have any alignment.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    pub(super) name: &'a str,
    pub(super) path: &'a Path,
    pub(super) dtype: Dtype,
    pub(super) shape: &'a [usize],
    pub(super) bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Returns the name of the tensor.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// Returns the file that contains the tensor.
    pub fn path(&self) -> &'a Path {
        self.path
    }

    /// Returns the dtype of the tensor.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the shape of the tensor.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Returns the bytes of the tensor: elements in row-major order, little-endian.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the tensor itself if it has this shape.
    ///
    /// # Errors
    /// [`CheckpointError::Shape`] if the tensor has another shape.
    pub fn expect_shape(&self, expected: &[usize]) -> Result<Self, CheckpointError> {
        if self.shape == expected {
            return Ok(*self);
        }
        Err(CheckpointError::Shape {
            path: self.path.into(),
            tensor: self.name.into(),
            expected: expected.to_vec(),
            found: self.shape.to_vec(),
        })
    }

    /// Returns a tensor of another shape and other bytes, with the name, file and dtype of this
    /// one: a part of it that is not contiguous.
    pub fn with_bytes<'b>(&'b self, shape: &'b [usize], bytes: &'b [u8]) -> TensorView<'b> {
        TensorView {
            shape,
            bytes,
            ..*self
        }
    }

    /// Returns the tensor itself if its dtype is a float dtype that [`to_f32`](Self::to_f32) reads.
    ///
    /// # Errors
    /// [`CheckpointError::Dtype`] if the tensor has another dtype.
    pub fn expect_float(&self) -> Result<Self, CheckpointError> {
        if is_float(self.dtype) {
            Ok(*self)
        } else {
            Err(self.wrong_dtype("F16, BF16 or F32"))
        }
    }

    /// Returns the tensor itself if it has one of these dtypes. `expected` names them in the error.
    pub(super) fn expect_dtype(
        &self,
        dtypes: &[Dtype],
        expected: &'static str,
    ) -> Result<Self, CheckpointError> {
        if dtypes.contains(&self.dtype) {
            Ok(*self)
        } else {
            Err(self.wrong_dtype(expected))
        }
    }

    /// Returns the two extents of a matrix. `axes` describes the axes in the error, such as
    /// `[K/8, N]`.
    pub(super) fn expect_matrix(&self, axes: &str) -> Result<[usize; 2], CheckpointError> {
        <[usize; 2]>::try_from(self.shape)
            .map_err(|_| self.bad_values(format!("its shape is {:?}; expected {axes}", self.shape)))
    }

    /// Returns the values of an `F16`, `BF16` or `F32` tensor as f32.
    ///
    /// # Errors
    /// [`CheckpointError::Dtype`] if the tensor has another dtype.
    pub fn to_f32(&self) -> Result<Vec<f32>, CheckpointError> {
        match self.dtype {
            Dtype::F16 => Ok(self.elements(|bytes| f16::from_le_bytes(bytes).to_f32())),
            Dtype::BF16 => Ok(self.elements(|bytes| bf16::from_le_bytes(bytes).to_f32())),
            Dtype::F32 => Ok(self.elements(f32::from_le_bytes)),
            _ => Err(self.wrong_dtype("F16, BF16 or F32")),
        }
    }

    /// Returns the bytes of the transpose `[C, R]` of a matrix `[R, C]`.
    ///
    /// # Errors
    /// [`CheckpointError::Values`] if the tensor is not a matrix; [`CheckpointError::Dtype`] if its
    /// elements do not have 1, 2, 4 or 8 bytes.
    pub fn transposed_bytes(&self) -> Result<Vec<u8>, CheckpointError> {
        let [rows, columns] = self.expect_matrix("[R, C]")?;
        if self.bytes.is_empty() {
            return Ok(Vec::new());
        }
        match self.dtype.bitsize() {
            8 => Ok(transposed(self.bytes, rows, columns)),
            16 => Ok(transposed(self.bytes.as_chunks::<2>().0, rows, columns).into_flattened()),
            32 => Ok(transposed(self.bytes.as_chunks::<4>().0, rows, columns).into_flattened()),
            64 => Ok(transposed(self.bytes.as_chunks::<8>().0, rows, columns).into_flattened()),
            _ => Err(self.wrong_dtype("a dtype of 1, 2, 4 or 8 bytes")),
        }
    }

    /// Returns true for a 2:4 float matrix `[N, K]`: at most two of every four values along K are
    /// nonzero. The test stops early for most matrices that are not 2:4.
    pub fn is_two_four(&self) -> bool {
        self.has_two_of_four(std::iter::once(0..self.bytes.len()))
    }

    /// Tests a sample of the matrix as [`is_two_four`](Self::is_two_four) does. At most one MiB is
    /// read, spread evenly over a large matrix, whatever its header declares.
    pub fn looks_two_four(&self) -> bool {
        self.has_two_of_four(sample(self.bytes.len()))
    }

    /// Tests ranges of bytes, each starting at a multiple of four values.
    fn has_two_of_four(&self, mut ranges: impl Iterator<Item = Range<usize>>) -> bool {
        let &[_, k] = self.shape else { return false };
        if !k.is_multiple_of(4) || k == 0 {
            return false;
        }
        ranges.all(|range| {
            let bytes = &self.bytes[range];
            match self.dtype {
                Dtype::F16 | Dtype::BF16 => {
                    has_two_of_four(bytes, |value: [u8; 2]| u16::from_le_bytes(value) << 1 != 0)
                }
                Dtype::F32 => {
                    has_two_of_four(bytes, |value: [u8; 4]| u32::from_le_bytes(value) << 1 != 0)
                }
                _ => false,
            }
        })
    }

    /// Returns the values of an `I32` tensor.
    ///
    /// # Errors
    /// [`CheckpointError::Dtype`] if the tensor has another dtype.
    pub fn to_i32(&self) -> Result<Vec<i32>, CheckpointError> {
        match self.dtype {
            Dtype::I32 => Ok(self.elements(i32::from_le_bytes)),
            _ => Err(self.wrong_dtype("I32")),
        }
    }

    /// Returns the values of an `I64` or `I32` tensor as i64.
    ///
    /// # Errors
    /// [`CheckpointError::Dtype`] if the tensor has another dtype.
    pub fn to_i64(&self) -> Result<Vec<i64>, CheckpointError> {
        match self.dtype {
            Dtype::I64 => Ok(self.elements(i64::from_le_bytes)),
            Dtype::I32 => Ok(self.elements(|bytes| i64::from(i32::from_le_bytes(bytes)))),
            _ => Err(self.wrong_dtype("I64 or I32")),
        }
    }

    /// Returns the words of an `I32` tensor as stored in the file: little-endian, at any alignment.
    pub(super) fn words(&self) -> Result<&'a [[u8; 4]], CheckpointError> {
        match self.dtype {
            Dtype::I32 => Ok(self.bytes.as_chunks().0),
            _ => Err(self.wrong_dtype("I32")),
        }
    }

    /// Returns the scales of an `F16`, `BF16` or `F32` tensor. F32 scales are converted to f16, or
    /// otherwise to bf16, if that dtype represents every value exactly.
    pub(super) fn scales(&self) -> Result<Scales, CheckpointError> {
        match self.dtype {
            Dtype::F16 => Ok(Scales::F16(self.elements(f16::from_le_bytes))),
            Dtype::BF16 => Ok(Scales::BF16(self.elements(bf16::from_le_bytes))),
            Dtype::F32 => {
                let values = self.elements(f32::from_le_bytes);
                let halves = [ScaleDtype::F16, ScaleDtype::BF16]
                    .map(|dtype| Scales::from_f32(&values, dtype));
                let exact = |scales: &Scales| {
                    values
                        .iter()
                        .enumerate()
                        .all(|(i, &value)| scales.get(i) == value)
                };
                Ok(halves
                    .into_iter()
                    .find(exact)
                    .unwrap_or(Scales::F32(values)))
            }
            _ => Err(self.wrong_dtype("F16, BF16 or F32")),
        }
    }

    /// Returns the elements, each `SIZE` bytes wide, which must be the width of the dtype.
    pub(super) fn elements<const SIZE: usize, T: Send>(
        &self,
        from_bytes: impl Fn([u8; SIZE]) -> T + Sync,
    ) -> Vec<T> {
        self.bytes
            .as_chunks::<SIZE>()
            .0
            .par_iter()
            .with_min_len(1 << 14)
            .map(|&bytes| from_bytes(bytes))
            .collect()
    }

    pub(super) fn wrong_dtype(&self, expected: &'static str) -> CheckpointError {
        CheckpointError::Dtype {
            path: self.path.into(),
            tensor: self.name.into(),
            expected,
            found: self.dtype,
        }
    }

    pub(super) fn bad_values(&self, problem: String) -> CheckpointError {
        CheckpointError::Values {
            path: self.path.into(),
            tensor: self.name.into(),
            problem,
        }
    }
}

/// Returns ranges of `bytes` bytes: either all bytes, or one MiB in 64 evenly spaced pieces from
/// the first to the last byte.
fn sample(bytes: usize) -> impl Iterator<Item = Range<usize>> {
    const PIECES: usize = 64;
    // A piece holds a whole number of groups of four values, for values of any size.
    const PIECE: usize = 16 << 10;
    let (pieces, piece, apart) = if bytes <= PIECES * PIECE {
        (1, bytes, 0)
    } else {
        (PIECES, PIECE, (bytes - PIECE) / (PIECES - 1) / 16 * 16)
    };
    (0..pieces).map(move |index| index * apart..index * apart + piece)
}

/// Returns true if at most two of every four values, each of `SIZE` bytes, are nonzero.
fn has_two_of_four<const SIZE: usize>(
    bytes: &[u8],
    is_not_zero: impl Fn([u8; SIZE]) -> bool + Sync,
) -> bool {
    let fits =
        |four: &[[u8; SIZE]; 4]| four.iter().filter(|&&value| is_not_zero(value)).count() <= 2;
    bytes
        .as_chunks::<SIZE>()
        .0
        .as_chunks::<4>()
        .0
        .par_iter()
        .all(fits)
}

/// Returns true if a dtype is a float dtype that [`TensorView::to_f32`] reads.
pub fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32)
}

impl From<ScaleDtype> for Dtype {
    fn from(dtype: ScaleDtype) -> Self {
        match dtype {
            ScaleDtype::F16 => Self::F16,
            ScaleDtype::BF16 => Self::BF16,
            ScaleDtype::F32 => Self::F32,
        }
    }
}

/// The name, dtype and shape of a tensor, as a file's header declares them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The name of the tensor.
    pub name: String,
    /// The dtype of the tensor.
    pub dtype: Dtype,
    /// The shape of the tensor.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Creates the spec of a tensor with this name, dtype and shape.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        Self {
            name: name.into(),
            dtype,
            shape: shape.into(),
        }
    }
}

/// A tensor to write to a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorData {
    /// The name, dtype and shape of the tensor.
    pub spec: TensorSpec,
    /// The bytes of the tensor: elements in row-major order, little-endian.
    pub bytes: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use super::sample;

    #[test]
    fn a_sample_is_small_and_from_all_over() {
        for bytes in [0, 16, 1 << 20] {
            assert!(sample(bytes).eq(std::iter::once(0..bytes)));
        }
        for bytes in [(1 << 20) + 16, 3_000_016, 256 << 30] {
            let ranges: Vec<_> = sample(bytes).collect();
            assert_eq!(
                ranges.iter().map(ExactSizeIterator::len).sum::<usize>(),
                1 << 20
            );
            assert!(
                ranges
                    .iter()
                    .all(|range| range.start % 16 == 0 && range.end <= bytes),
                "{ranges:?}"
            );
            let farthest = ranges
                .windows(2)
                .map(|pair| pair[1].start - pair[0].start)
                .max()
                .unwrap();
            assert!(
                farthest <= bytes / 63 && bytes - ranges[63].end < 64 * 16,
                "{bytes}: {ranges:?}"
            );
        }
    }
}
