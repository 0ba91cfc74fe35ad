//! AWQ, version gemm: the 4-bit weights that AutoAWQ writes.
//!
//! A linear layer with K input features, N output features and G groups is stored in these tensors,
//! each named `{layer}.{tensor}`:
//! | tensor | dtype | shape | holds |
//! |---|---|---|---|
//! | `qweight` | i32 | `[K, N/8]` | q, packed along N |
//! | `qzeros`, if not symmetric | i32 | `[G, N/8]` | z, packed like q |
//! | `scales` | f16 or bf16 | `[G, N]` | scales |
//!
//! A word holds eight columns, the even columns before the odd columns:
//!
//! | nibble | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
//! |---|---|---|---|---|---|---|---|---|
//! | column of the eight | 0 | 2 | 4 | 6 | 1 | 3 | 5 | 7 |
//!
//! Source: AutoAWQ, `awq/modules/linear/gemm.py`.

use super::layer_tensors::LayerTensors;
use super::packed::{FileWords, plain_words, unpack_columns};
use super::{Checkpoint, CheckpointError};
use crate::layout::{PlainLayout, exchange};
use crate::{PlainParts, PlainWeight, QuantSpec, WeightValue};

pub(super) const TENSORS: [&str; 3] = [WEIGHT, ZERO_POINTS, SCALES];
const WEIGHT: &str = "qweight";
const ZERO_POINTS: &str = "qzeros";
const SCALES: &str = "scales";

/// The nibble index of each of the eight columns of a word.
const NIBBLES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Reads the weight of `layer`. The dtype of the scale tensor decides, not `spec.scale_dtype`.
///
/// # Errors
/// [`CheckpointError`] for a spec of 8 bits, which AWQ does not support; for tensors that are
/// missing or have another dtype or shape; for zero points that are present although `spec` is
/// symmetric, or absent although it is not.
pub fn to_plain(
    checkpoint: &Checkpoint,
    layer: &str,
    spec: &QuantSpec,
) -> Result<PlainWeight, CheckpointError> {
    let tensors = LayerTensors::new(checkpoint, layer);
    let weight = tensors.get(WEIGHT)?;
    if spec.value != WeightValue::Int4 {
        return Err(tensors.unsupported("AWQ", "4-bit", spec));
    }
    let [k, word_columns] = weight.expect_matrix("[K, N/8]")?;
    let n = word_columns.saturating_mul(8);
    QuantSpec::check_shape(k, n).map_err(|source| tensors.invalid(&weight, source))?;
    let groups = spec.scales.group.count(k);

    let scales = tensors.get(SCALES)?.expect_shape(&[groups, n])?.scales()?;
    let zero_points = match tensors.zero_points(ZERO_POINTS, spec)? {
        Some(stored) => {
            let shifts = NIBBLES.map(|nibble| 4 * nibble as u32);
            Some(unpack_columns(
                stored.expect_shape(&[groups, word_columns])?.words()?,
                n,
                spec.value,
                &shifts,
            ))
        }
        None => None,
    };

    let (source, layout) = (weight.words()?, PlainLayout::new(k, n, spec.value));
    // Rows past K, in the last row of words.
    let no_row = vec![[0; 4]; word_columns];
    let qweight = plain_words(tensors.buffer(&layout), &layout, 1, |word_row, line| {
        let row = |i: usize| {
            source
                .get((8 * word_row + i) * word_columns..)
                .filter(|row| !row.is_empty())
                .unwrap_or(&no_row)
        };
        let rows: [&FileWords; 8] = std::array::from_fn(|i| &row(i)[..word_columns]);
        let (blocks, rest) = line.as_chunks_mut::<{ 8 * LANES }>();
        let done = LANES * blocks.len();
        blocks
            .iter_mut()
            .enumerate()
            .for_each(|(i, block)| unpack::<LANES>(rows, LANES * i, block));
        rest.as_chunks_mut::<8>()
            .0
            .iter_mut()
            .enumerate()
            .for_each(|(i, block)| unpack::<1>(rows, done + i, block));
    });
    let spec = spec.with_scale_dtype(scales.dtype());
    PlainWeight::new(PlainParts {
        k,
        n,
        spec,
        qweight,
        metadata: None,
        scales,
        zero_points,
        row_permutation: None,
    })
    .map_err(|source| tensors.invalid(&weight, source))
}

/// The number of word columns that are unpacked at a time: 128 bits, the vector register width of
/// every x86-64 and AArch64 CPU.
const LANES: usize = 4;

/// Unpacks word columns `first..first + L` of eight rows to the words of their `8 * L` columns.
#[inline]
fn unpack<const L: usize>(rows: [&FileWords; 8], first: usize, columns: &mut [u32]) {
    let mut words: [[u32; L]; 8] = std::array::from_fn(|i| {
        let row = &rows[i][first..][..L];
        std::array::from_fn(|lane| u32::from_le_bytes(row[lane]))
    });
    // A transposition of eight words of eight nibbles: nibble `i` of word `j` becomes nibble `j` of
    // word `i`.
    let runs = words.as_flattened_mut();
    exchange(runs, 4 * L, 16, 0x0000_ffff);
    exchange(runs, 2 * L, 8, 0x00ff_00ff);
    exchange(runs, L, 4, 0x0f0f_0f0f);
    for (lane, columns) in columns.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *columns = NIBBLES.map(|nibble| words[nibble][lane]);
    }
}
