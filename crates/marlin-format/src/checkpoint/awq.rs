//! AWQ, version gemm: the 4-bit weights that AutoAWQ writes.
//!
//! One linear layer of K input and N output features, in G groups, is these tensors, each named `{layer}.{tensor}`:
//!
//! | tensor | dtype | shape | holds |
//! |---|---|---|---|
//! | `qweight` | i32 | `[K, N/8]` | q, packed along N |
//! | `qzeros`, where not symmetric | i32 | `[G, N/8]` | z, packed alike |
//! | `scales` | f16 or bf16 | `[G, N]` | scales |
//!
//! A word holds eight columns, the even ones before the odd ones:
//!
//! | nibble | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
//! |---|---|---|---|---|---|---|---|---|
//! | column of the eight | 0 | 2 | 4 | 6 | 1 | 3 | 5 | 7 |
//!
//! Source: AutoAWQ, `awq/modules/linear/gemm.py`.

use super::layer::LayerTensors;
use super::packed::{plain_words, unpack_columns};
use super::{Checkpoint, CheckpointError};
use crate::{Bits, PlainParts, PlainWeight, QuantSpec};

pub(super) const TENSORS: [&str; 3] = [WEIGHT, ZERO_POINTS, SCALES];
const WEIGHT: &str = "qweight";
const ZERO_POINTS: &str = "qzeros";
const SCALES: &str = "scales";

/// The nibble of each of a word's eight columns.
const NIBBLES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Reads the weight of `layer`. The scale tensor's dtype counts, not `spec.scale_dtype`.
///
/// # Errors
/// [`CheckpointError`] for a spec of 8 bits, which AWQ does not have; for tensors that are missing, of another dtype or shape; for zero
/// points that are there where `spec` is symmetric, or absent where it is not; and for a K that the group size does not divide.
pub fn to_plain(checkpoint: &Checkpoint, layer: &str, spec: &QuantSpec) -> Result<PlainWeight, CheckpointError> {
    let tensors = LayerTensors::new(checkpoint, layer);
    let weight = tensors.get(WEIGHT)?;
    if spec.bits != Bits::Four {
        return Err(tensors.unsupported("AWQ", "4-bit", spec));
    }
    let [k, word_columns] = weight.expect_matrix("[K, N/8]")?;
    let n = word_columns.saturating_mul(8);
    spec.check(k, n).map_err(|source| tensors.invalid(&weight, source))?;
    let groups = spec.group.count(k);

    let scales = tensors.get(SCALES)?.expect_shape(&[groups, n])?.to_scales()?;
    let zero_points = match tensors.zero_points(ZERO_POINTS, spec)? {
        Some(stored) => {
            let shifts = NIBBLES.map(|nibble| 4 * nibble as u32);
            Some(unpack_columns(stored.expect_shape(&[groups, word_columns])?.words()?, n, spec.bits, &shifts))
        }
        None => None,
    };

    let source = weight.words()?;
    let words = plain_words(k, n, spec.bits, 1, |row, line| {
        let rows = &source[8 * row * word_columns..];
        let rows: [&[[u8; 4]]; 8] = std::array::from_fn(|i| rows.get(i * word_columns..(i + 1) * word_columns).unwrap_or_default());
        for (column, words) in line.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // Rows past K are missing in the last row of words.
            let packed = rows.map(|row| row.get(column).map_or(0, |&word| u32::from_le_bytes(word)));
            let by_nibble = transposed_nibbles(packed);
            *words = NIBBLES.map(|nibble| by_nibble[nibble]);
        }
    });
    let spec = spec.with_scale_dtype(scales.dtype());
    PlainWeight::new(PlainParts { k, n, spec, words, scales, zero_points, row_permutation: None })
        .map_err(|source| tensors.invalid(&weight, source))
}

/// Eight words of eight nibbles, transposed: nibble `i` of word `j` becomes nibble `j` of word `i`. In three steps, which swap blocks of
/// 4 x 4, 2 x 2 and single nibbles across the diagonal.
fn transposed_nibbles(mut words: [u32; 8]) -> [u32; 8] {
    for (distance, mask) in [(4, 0x0000_ffff), (2, 0x00ff_00ff), (1, 0x0f0f_0f0f)] {
        let shift = 4 * distance;
        for i in (0..8).filter(|i| i & distance == 0) {
            let (low, high) = (words[i], words[i + distance]);
            words[i] = (low & mask) | ((high & mask) << shift);
            words[i + distance] = ((low >> shift) & mask) | (high & !mask);
        }
    }
    words
}
