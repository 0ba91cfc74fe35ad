//! Marlin 2:4: weights that keep two of every four input features, in the tile order of the
//! Sparse-Marlin kernel.
//!
//! A linear layer with K input features, N output features and G groups is stored in these tensors,
//! each named `{layer}.{tensor}`, in [`Marlin24Layout`]:
//!
//! | compressed-tensors `marlin-24` | GPTQ `marlin_24` | dtype | shape | holds |
//! |---|---|---|---|---|
//! | `weight_packed` | `B_24` | i32 | `[K/32, 2N]` (4 bits), `[K/32, 4N]` (8 bits) | q of the kept features |
//! | `meta` | `B_meta` | i16 | `[K/32, 2N]` | the indices of the kept features |
//! | `scale_packed` | `s` | f16 or bf16 | `[G, N]` | scales |
//!
//! Weights are symmetric. In the plain form these weights stay 2:4, with kept values and metadata.
//!
//! Sources: those of [`Marlin24Layout`].

use rayon::prelude::*;

use super::layer_tensors::LayerTensors;
use super::packed::{FileWords, plain_words};
use super::{
    Checkpoint, CheckpointError, Dtype, Marlin24Names, TensorData, TensorSpec, TensorView,
};
use crate::layout::{Marlin24Layout, MetadataLayout, PlainLayout, TILE_N, Tile, TileTable, gather};
use crate::weight::position;
use crate::{FormatError, GroupSize, PlainParts, PlainWeight, QuantSpec, Scales};

/// Returns the names of the tensors of values, metadata and scales.
pub(super) const fn tensors(names: Marlin24Names) -> [&'static str; 3] {
    match names {
        Marlin24Names::CompressedTensors => ["weight_packed", "meta", "scale_packed"],
        Marlin24Names::Gptq => ["B_24", "B_meta", "s"],
    }
}

/// Reads the weight of `layer`. The dtype of the scale tensor decides, not `spec.scale_dtype`.
///
/// # Errors
/// [`CheckpointError`] for a spec with zero points, which the format does not support; for tensors
/// that are missing or have another dtype or shape; for metadata that do not name two features in
/// ascending order.
pub fn to_plain(
    checkpoint: &Checkpoint,
    layer: &str,
    spec: &QuantSpec,
    names: Marlin24Names,
) -> Result<PlainWeight, CheckpointError> {
    let tensors_of_layer = LayerTensors::new(checkpoint, layer);
    if spec.has_zero_points() {
        return Err(tensors_of_layer.unsupported("Marlin 2:4", "symmetric", spec));
    }
    let [weight, metadata, scales] = tensors(names).map(|tensor| tensors_of_layer.get(tensor));
    let (weight, metadata, scales) = (weight?, metadata?, scales?);
    let invalid = |source| tensors_of_layer.invalid(&weight, source);

    let [tile_rows, columns] = metadata.expect_matrix("[K/32, 2N]")?;
    let (k, n) = (tile_rows.saturating_mul(32), columns / 2);
    QuantSpec::check_shape(k, n).map_err(invalid)?;
    let layout = Marlin24Layout::new(k, n, spec.value).map_err(invalid)?;
    metadata.expect_shape(&layout.metadata_shape())?;
    weight.expect_shape(&layout.shape())?;
    let groups = spec.scales.group.count(k);
    let permuted = scales_are_permuted(names, groups);
    let place = |group, column| layout.scale_index(group, column, permuted);
    let scales = match scales.expect_shape(&[groups, n])?.scales()? {
        Scales::F16(packed) => Scales::F16(gather(&packed, [groups, n], place)),
        Scales::BF16(packed) => Scales::BF16(gather(&packed, [groups, n], place)),
        Scales::F32(packed) => Scales::F32(gather(&packed, [groups, n], place)),
    };

    let packed = weight.words()?;
    let metadata = plain_metadata(metadata_of(&metadata)?, &layout, k, n);
    let plain = PlainLayout::new(k / 2, n, spec.value);
    let qweight = tensors_of_layer.buffer(&plain);
    let qweight = match spec.value.per_word() {
        8 => unpack::<8>(qweight, &plain, packed, &layout),
        _ => unpack::<4>(qweight, &plain, packed, &layout),
    };
    let spec = spec.with_scale_dtype(scales.dtype());
    let metadata = Some(metadata);
    PlainWeight::new(PlainParts {
        k,
        n,
        spec,
        qweight,
        metadata,
        scales,
        zero_points: None,
        row_permutation: None,
    })
    .map_err(invalid)
}

/// Returns true if the packer permutes the scales of this number of groups. Each packer compares
/// the group size with a K. GPTQ's packer uses K of the weight. The packer of compressed-tensors
/// uses the K/2 kept rows, so two groups of 128 keep their natural order.
fn scales_are_permuted(names: Marlin24Names, groups: usize) -> bool {
    match names {
        Marlin24Names::Gptq => groups > 1,
        Marlin24Names::CompressedTensors => groups > 2,
    }
}

/// Checks that `marlin-24` of compressed-tensors supports a weight of this shape and spec.
///
/// # Errors
/// [`FormatError::TileDoesNotDivide`]; [`FormatError::Marlin24Spec`] for floats, for zero points,
/// or for a group size other than 128 rows or the whole column.
pub fn check(k: usize, n: usize, spec: &QuantSpec) -> Result<(), FormatError> {
    Marlin24Layout::new(k, n, spec.value)?;
    match !spec.value.is_float()
        && !spec.has_zero_points()
        && matches!(spec.scales.group, GroupSize::Channel | GroupSize::G128)
    {
        true => Ok(()),
        false => Err(FormatError::Marlin24Spec { found: *spec }),
    }
}

/// Returns the specs of the tensors of `layer`, with compressed-tensors' names, in the order of
/// [`tensors_of`].
pub fn tensor_specs(layer: &str, k: usize, n: usize, spec: &QuantSpec) -> Vec<TensorSpec> {
    let shapes = [
        [k / 32, 16 * n / spec.value.per_word()],
        [k / 32, 2 * n],
        [spec.scales.group.count(k), n],
    ];
    let dtypes = [Dtype::I32, Dtype::I16, spec.scales.dtype.into()];
    let tensors = tensors(Marlin24Names::CompressedTensors)
        .into_iter()
        .zip(dtypes)
        .zip(shapes);
    tensors
        .map(|((tensor, dtype), shape)| TensorSpec::new(format!("{layer}.{tensor}"), dtype, shape))
        .collect()
}

/// Returns the tensors that store `weight` as `layer`, with compressed-tensors' names. A dense
/// weight must have the 2:4 pattern.
///
/// # Errors
/// The errors of [`check`], and [`FormatError::NotTwoFour`].
pub fn tensors_of(layer: &str, weight: &PlainWeight) -> Result<Vec<TensorData>, FormatError> {
    let (k, n, spec) = (weight.k(), weight.n(), weight.spec());
    check(k, n, &spec)?;
    let weight = weight.to_two_four()?;
    let layout = Marlin24Layout::new(k, n, spec.value)?;

    let [_, columns] = layout.shape();
    let mut words = vec![0; k / 32 * columns];
    words
        .par_chunks_exact_mut(columns)
        .enumerate()
        .for_each(|(tile_row, words)| {
            for row in 0..16 {
                (0..n).for_each(|column| {
                    layout
                        .index(row, column)
                        .write(words, weight.q(16 * tile_row + row, column))
                });
            }
        });
    let mut metadata = vec![[0; 2]; k / 16 * n];
    for (place, word) in weight.metadata().unwrap_or_default().iter().enumerate() {
        let [low, high, second_low, second_high] = word.to_le_bytes();
        metadata[layout.metadata_index(place / n * 2, place % n)] = [low, high];
        metadata[layout.metadata_index(place / n * 2 + 1, place % n)] = [second_low, second_high];
    }
    let groups = spec.scales.group.count(k);
    let permuted = scales_are_permuted(Marlin24Names::CompressedTensors, groups);
    let natural = weight.scales().to_f32();
    let mut scales = vec![0.0; natural.len()];
    for (place, scale) in natural.into_iter().enumerate() {
        scales[layout.scale_index(place / n, place % n, permuted)] = scale;
    }

    let scales = Scales::from_f32(&scales, spec.scales.dtype);
    let bytes = [
        bytemuck::cast_slice(&words).to_vec(),
        metadata.into_flattened(),
        scales.as_bytes().to_vec(),
    ];
    Ok(tensor_specs(layer, k, n, &spec)
        .into_iter()
        .zip(bytes)
        .map(|(spec, bytes)| TensorData { spec, bytes })
        .collect())
}

/// Returns the metadata after checking that each nibble names two rows in ascending order.
fn metadata_of<'a>(tensor: &TensorView<'a>) -> Result<&'a [[u8; 2]], CheckpointError> {
    if tensor.dtype() != Dtype::I16 {
        return Err(tensor.wrong_dtype("I16"));
    }
    let invalid = |byte: u8| (byte & 3 >= (byte >> 2) & 3) | ((byte >> 4) & 3 >= byte >> 6);
    const BLOCK: usize = 1 << 16;
    let bytes = tensor.bytes();
    let bad_in_block =
        |(block, bytes): (usize, &[u8])| position(bytes, invalid).map(|at| block * BLOCK + at);
    match bytes.par_chunks(BLOCK).enumerate().find_map_first(bad_in_block) {
        None => Ok(bytes.as_chunks().0),
        Some(at) => Err(tensor.bad_values(format!(
            "byte {at} is {:#04x}; each nibble must name the two rows kept of four in ascending order: 4, 8, 9, 12, 13 or 14",
            bytes[at]
        ))),
    }
}

/// Converts metadata to [`MetadataLayout`], in which a word joins the metadata of the first and the
/// second 16 of 32 rows.
fn plain_metadata(metadata: &[[u8; 2]], layout: &Marlin24Layout, k: usize, n: usize) -> Vec<u32> {
    let mut words = vec![0; MetadataLayout::new(k, n).words()];
    words
        .par_chunks_exact_mut(n)
        .enumerate()
        .for_each(|(row, line)| {
            for (column, word) in line.iter_mut().enumerate() {
                let half = |half| {
                    u32::from(u16::from_le_bytes(
                        metadata[layout.metadata_index(2 * row + half, column)],
                    ))
                };
                *word = half(0) | half(1) << 16;
            }
        });
    words
}

/// Converts words to [`PlainLayout`] of the kept rows, with `V` values per word.
fn unpack<const V: usize>(
    words: Vec<u32>,
    plain: &PlainLayout,
    packed: &FileWords,
    layout: &Marlin24Layout,
) -> Vec<u32> {
    let table = TileTable::<V>::new(|row, column| layout.index(row, column));
    let (n, word_rows) = (plain.n, 16 / V);
    plain_words(words, plain, word_rows, |row, block| {
        let columns = 16 * n / V;
        let packed = &packed[row / word_rows * columns..][..columns];
        let mut tile = Tile::new();
        for index in 0..n / TILE_N {
            tile.load(packed, index);
            for (row, line) in block.chunks_exact_mut(n).enumerate() {
                line[TILE_N * index..]
                    .iter_mut()
                    .zip(table.words(&tile, row))
                    .for_each(|(to, from)| *to = from);
            }
        }
    })
}
