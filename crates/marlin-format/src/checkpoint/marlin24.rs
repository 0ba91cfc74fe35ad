//! Marlin 2:4: weights that keep two of every four input features, in the tile order of the Sparse-Marlin kernel.
//!
//! One linear layer of K input and N output features, in G groups, is these tensors, each named `{layer}.{tensor}`, in
//! [`Marlin24Layout`]:
//!
//! | compressed-tensors `marlin-24` | GPTQ `marlin_24` | dtype | shape | holds |
//! |---|---|---|---|---|
//! | `weight_packed` | `B_24` | i32 | `[K/32, 2N]` (4 bits), `[K/32, 4N]` (8 bits) | q of the kept features |
//! | `meta` | `B_meta` | i16 | `[K/32, 2N]` | which features are kept |
//! | `scale_packed` | `s` | f16 or bf16 | `[G, N]` | scales |
//!
//! Weights are symmetric; in the plain form a feature that is not kept holds the midpoint, which is zero.
//!
//! Sources: as for [`Marlin24Layout`].

use rayon::prelude::*;

use super::layer::LayerTensors;
use super::packed::{FileWords, plain_words};
use super::{Checkpoint, CheckpointError, Dtype, Marlin24Names, TensorView};
use crate::layout::{Marlin24Layout, Tile, TileTable};
use crate::{Bits, PlainParts, PlainWeight, QuantSpec, Scales};

/// The names of weight, metadata and scales.
pub(super) const fn tensors(names: Marlin24Names) -> [&'static str; 3] {
    match names {
        Marlin24Names::CompressedTensors => ["weight_packed", "meta", "scale_packed"],
        Marlin24Names::Gptq => ["B_24", "B_meta", "s"],
    }
}

/// Reads the weight of `layer`. The scale tensor's dtype counts, not `spec.scale_dtype`.
///
/// # Errors
/// [`CheckpointError`] for a spec with zero points, which the format does not have; for tensors that are missing, of another dtype or shape;
/// for metadata that do not name two features in ascending order; and for a K that the group size does not divide.
pub fn to_plain(checkpoint: &Checkpoint, layer: &str, spec: &QuantSpec, names: Marlin24Names) -> Result<PlainWeight, CheckpointError> {
    let tensors_of_layer = LayerTensors::new(checkpoint, layer);
    if spec.zero_points {
        return Err(tensors_of_layer.unsupported("Marlin 2:4", "symmetric", spec));
    }
    let [weight, metadata, scales] = tensors(names).map(|tensor| tensors_of_layer.get(tensor));
    let (weight, metadata, scales) = (weight?, metadata?, scales?);
    let invalid = |source| tensors_of_layer.invalid(&weight, source);

    let [tile_rows, columns] = metadata.expect_matrix("[K/32, 2N]")?;
    let (k, n) = (tile_rows.saturating_mul(32), columns / 2);
    spec.check(k, n).map_err(invalid)?;
    let layout = Marlin24Layout::new(k, n, spec.bits).map_err(invalid)?;
    metadata.expect_shape(&layout.metadata_shape())?;
    weight.expect_shape(&layout.shape())?;
    let groups = spec.group.count(k);
    // What counts is the K that the packer compared the group with: GPTQ's the weight's, compressed-tensors' the half that it kept, so that
    // it leaves two groups of 128 in their natural order.
    let permuted = match names {
        Marlin24Names::Gptq => groups > 1,
        Marlin24Names::CompressedTensors => groups > 2,
    };
    let natural = |position: usize| layout.scale_index(position / n, position % n, permuted);
    let scales = match scales.expect_shape(&[groups, n])?.scales()? {
        Scales::F16(packed) => Scales::F16((0..packed.len()).map(|position| packed[natural(position)]).collect()),
        Scales::BF16(packed) => Scales::BF16((0..packed.len()).map(|position| packed[natural(position)]).collect()),
    };

    let packed = weight.words()?;
    let pairs = metadata_of(&metadata)?;
    let words = match spec.bits {
        Bits::Four => unpack::<8>(packed, pairs, &layout, k, n, spec.bits),
        Bits::Eight => unpack::<4>(packed, pairs, &layout, k, n, spec.bits),
    };
    let spec = spec.with_scale_dtype(scales.dtype());
    PlainWeight::new(PlainParts { k, n, spec, words, scales, zero_points: None, row_permutation: None }).map_err(invalid)
}

/// The metadata, each nibble of which names two different rows in ascending order.
fn metadata_of<'a>(tensor: &TensorView<'a>) -> Result<&'a [[u8; 2]], CheckpointError> {
    if tensor.dtype() != Dtype::I16 {
        return Err(tensor.wrong_dtype("I16"));
    }
    let valid = |nibble: u8| nibble & 3 < nibble >> 2;
    let valid_byte: [bool; 256] = std::array::from_fn(|byte| valid(byte as u8 & 0xf) && valid(byte as u8 >> 4));
    const BLOCK: usize = 1 << 16;
    let bytes = tensor.bytes();
    let bad_in_block =
        |(block, bytes): (usize, &[u8])| bytes.iter().position(|&byte| !valid_byte[usize::from(byte)]).map(|at| block * BLOCK + at);
    match bytes.par_chunks(BLOCK).enumerate().find_map_first(bad_in_block) {
        None => Ok(bytes.as_chunks().0),
        Some(at) => Err(tensor.bad_values(format!(
            "byte {at} is {:#04x}; each nibble must name the two rows kept of four in ascending order: 4, 8, 9, 12, 13 or 14",
            bytes[at]
        ))),
    }
}

/// To [`PlainLayout`](crate::layout::PlainLayout), `V` values to a word.
fn unpack<const V: usize>(packed: &FileWords, metadata: &[[u8; 2]], layout: &Marlin24Layout, k: usize, n: usize, bits: Bits) -> Vec<u32> {
    let table = TileTable::<V>::new(|row, column| layout.index(row, column));
    // In one tile of 16 kept rows, by half of its rows and column.
    let places: [[usize; 64]; 2] = std::array::from_fn(|half| std::array::from_fn(|column| layout.metadata_index(half, column)));
    let word_rows = 32 / V;
    plain_words(k, n, bits, word_rows, |row, block| {
        let tile_row = row / word_rows;
        let columns = 16 * n / V;
        let packed = &packed[tile_row * columns..][..columns];
        let metadata = &metadata[tile_row * 2 * n..][..2 * n];
        for tile in 0..n / 64 {
            let words = Tile::load::<V>(packed, tile);
            let metadata = &metadata[128 * tile..][..128];
            // Every row of kept words makes two rows of words.
            for (row, lines) in block.chunks_exact_mut(2 * n).enumerate() {
                let (upper, lower) = lines.split_at_mut(n);
                let (upper, lower) = (&mut upper[64 * tile..][..64], &mut lower[64 * tile..][..64]);
                // 16 rows have one value of metadata, which is 4 nibbles; V kept values need V / 2 of them.
                let (half, shift) = (V * row / 8, 4 * (V * row % 8 / 2));
                for (column, kept) in table.words(&words, row).enumerate() {
                    let nibbles = u16::from_le_bytes(metadata[places[half][column]]) >> shift;
                    [upper[column], lower[column]] = expand::<V>(kept, nibbles.into(), bits.padding_word());
                }
            }
        }
    })
}

/// `V` kept values, low first, to the twice as many among which they were kept.
#[inline]
fn expand<const V: usize>(kept: u32, nibbles: u32, padding: u32) -> [u32; 2] {
    let (bits, max) = (32 / V as u32, u32::MAX >> (32 - 32 / V));
    // A product with a power of two in place of a shift by a variable, which takes three times as long.
    let places: [u32; 4] = std::array::from_fn(|place| 1 << (bits * place as u32));
    let mut words = [padding; 2];
    // Differences from the padding, so that they can be put in its place by xor.
    let kept = kept ^ padding;
    for four in 0..V / 2 {
        let pair = kept >> (2 * bits * four as u32);
        let nibble = nibbles >> (4 * four);
        let first = (pair & max) * places[(nibble & 3) as usize];
        let second = ((pair >> bits) & max) * places[((nibble >> 2) & 3) as usize];
        words[four / (V / 4)] ^= (first ^ second) << (4 * bits * (four % (V / 4)) as u32 % 32);
    }
    words
}
