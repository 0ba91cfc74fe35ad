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

use super::layer_tensors::LayerTensors;
use super::packed::{FileWords, plain_words};
use super::{Checkpoint, CheckpointError, Dtype, Marlin24Names, TensorView};
use crate::layout::{Marlin24Layout, PlainLayout, TILE_N, Tile, TileTable, gather};
use crate::weight::position;
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
/// and for metadata that do not name two features in ascending order.
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
    QuantSpec::check_shape(k, n).map_err(invalid)?;
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
    let place = |group, column| layout.scale_index(group, column, permuted);
    let scales = match scales.expect_shape(&[groups, n])?.scales()? {
        Scales::F16(packed) => Scales::F16(gather(&packed, [groups, n], place)),
        Scales::BF16(packed) => Scales::BF16(gather(&packed, [groups, n], place)),
        Scales::F32(packed) => Scales::F32(gather(&packed, [groups, n], place)),
    };

    let packed = weight.words()?;
    let pairs = metadata_of(&metadata)?;
    let plain = PlainLayout::new(k, n, spec.bits);
    let words = tensors_of_layer.buffer(&plain);
    let words = match spec.bits {
        Bits::Four => unpack::<8>(words, &plain, packed, pairs, &layout),
        Bits::Eight => unpack::<4>(words, &plain, packed, pairs, &layout),
    };
    let spec = spec.with_scale_dtype(scales.dtype());
    PlainWeight::new(PlainParts { k, n, spec, words, scales, zero_points: None, row_permutation: None }).map_err(invalid)
}

/// The metadata, each nibble of which names two different rows in ascending order.
fn metadata_of<'a>(tensor: &TensorView<'a>) -> Result<&'a [[u8; 2]], CheckpointError> {
    if tensor.dtype() != Dtype::I16 {
        return Err(tensor.wrong_dtype("I16"));
    }
    let invalid = |byte: u8| (byte & 3 >= (byte >> 2) & 3) | ((byte >> 4) & 3 >= byte >> 6);
    const BLOCK: usize = 1 << 16;
    let bytes = tensor.bytes();
    let bad_in_block = |(block, bytes): (usize, &[u8])| position(bytes, invalid).map(|at| block * BLOCK + at);
    match bytes.par_chunks(BLOCK).enumerate().find_map_first(bad_in_block) {
        None => Ok(bytes.as_chunks().0),
        Some(at) => Err(tensor.bad_values(format!(
            "byte {at} is {:#04x}; each nibble must name the two rows kept of four in ascending order: 4, 8, 9, 12, 13 or 14",
            bytes[at]
        ))),
    }
}

/// To [`PlainLayout`], `V` values to a word.
fn unpack<const V: usize>(
    words: Vec<u32>,
    plain: &PlainLayout,
    packed: &FileWords,
    metadata: &[[u8; 2]],
    layout: &Marlin24Layout,
) -> Vec<u32> {
    let table = TileTable::<V>::new(|row, column| layout.index(row, column));
    // In one tile of 16 kept rows, by half of its rows and column.
    let places: [[usize; TILE_N]; 2] = std::array::from_fn(|half| std::array::from_fn(|column| layout.metadata_index(half, column)));
    let (n, padding, word_rows) = (plain.n, plain.bits.padding_word(), 32 / V);
    plain_words(words, plain, word_rows, |row, block| {
        let tile_row = row / word_rows;
        let columns = 16 * n / V;
        let packed = &packed[tile_row * columns..][..columns];
        let metadata = metadata[tile_row * 2 * n..][..2 * n].as_chunks::<{ 2 * TILE_N }>().0;
        let (mut tile, mut nibbles, mut kept) = (Tile::new(), [[0; TILE_N]; 2], [0; TILE_N]);
        for (index, metadata) in metadata.iter().enumerate() {
            tile.load(packed, index);
            for (nibbles, &place) in nibbles.as_flattened_mut().iter_mut().zip(places.as_flattened()) {
                *nibbles = u32::from(u16::from_le_bytes(metadata[place % (2 * TILE_N)]));
            }
            // Every row of kept words makes two rows of words.
            for (row, lines) in block.chunks_exact_mut(2 * n).enumerate() {
                // 16 rows have one value of metadata, which is 4 nibbles; V kept values need V / 2 of them.
                let (nibbles, first) = (&nibbles[V * row / 8], V * row % 8 / 2);
                kept.iter_mut().zip(table.words(&tile, row)).for_each(|(to, from)| *to = from ^ padding);
                for (half, line) in lines.chunks_exact_mut(n).enumerate() {
                    let line = &mut line[TILE_N * index..][..TILE_N];
                    for ((to, kept), nibbles) in line.iter_mut().zip(&kept).zip(nibbles) {
                        *to = expand::<V>(kept >> (16 * half), nibbles >> (4 * first + V * half)) ^ padding;
                    }
                }
            }
        }
    })
}

/// The lower 16 bits of kept values in the word of the `V` values among which they were kept, the others 0; a nibble for every four of these
/// says which of them the two kept ones are. Without branches and tables, so that many words go at a time.
#[inline]
fn expand<const V: usize>(kept: u32, nibbles: u32) -> u32 {
    let bits = 32 / V;
    // The bits of four values, and the lowest bit of every four.
    let four = u32::MAX >> (32 - 4 * bits);
    let ones = u32::MAX / four;
    // Fields of `width` bits to the lowest ones of every four.
    let spread = |fields: u32, width: usize| {
        (0..V / 4).fold(0, |spread, i| spread | (((fields >> (width * i)) & ((1 << width) - 1)) << (4 * bits * i)))
    };
    let (pairs, nibbles) = (spread(kept, 2 * bits), spread(nibbles, 4));
    // Values up by 0 to 3 places: by one where the lower bit of `places` is set, then by two where the upper one is.
    let place = |values: u32, places: u32| {
        let odd = (places & ones) * four;
        let values = (values & !odd) | ((values << bits) & odd);
        let upper = ((places >> 1) & ones) * four;
        (values & !upper) | ((values << (2 * bits)) & upper)
    };
    let value = ones * ((1 << bits) - 1);
    place(pairs & value, nibbles) | place((pairs >> bits) & value, nibbles >> 2)
}
