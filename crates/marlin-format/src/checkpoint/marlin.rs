//! Marlin: dense weights in the tile order of the Marlin kernel, as AutoGPTQ wrote them
//! (`checkpoint_format` is `marlin`).
//!
//! A linear layer with K input features, N output features and G groups is stored in these tensors,
//! each named `{layer}.{tensor}`:
//!
//! | tensor | dtype | shape | holds |
//! |---|---|---|---|
//! | `B` | i32 | `[K/16, 2N]` | q, in [`MarlinLayout`] |
//! | `s` | f16 or bf16 | `[G, N]` | scales, in [`ScaleLayout`] |
//!
//! Weights are 4-bit and symmetric. Marlin's kernel requires multiples of 128 (K) and 256 (N); this
//! reader requires only whole tiles, multiples of 16 and 64.
//!
//! Source: the packer of the Marlin paper's authors (IST-DASLab/marlin).

use super::layer_tensors::LayerTensors;
use super::packed::plain_words;
use super::{Checkpoint, CheckpointError};
use crate::layout::{MarlinLayout, PlainLayout, ScaleLayout, TILE_N, Tile, TileTable};
use crate::{PlainParts, PlainWeight, QuantSpec, WeightValue};

pub(super) const TENSORS: [&str; 2] = [WEIGHT, SCALES];
const WEIGHT: &str = "B";
const SCALES: &str = "s";

/// Reads the weight of `layer`. The dtype of the scale tensor decides, not `spec.scale_dtype`.
///
/// # Errors
/// [`CheckpointError`] for a spec of 8 bits or with zero points, which the format does not support;
/// for tensors that are missing or have another dtype or shape.
pub fn to_plain(
    checkpoint: &Checkpoint,
    layer: &str,
    spec: &QuantSpec,
) -> Result<PlainWeight, CheckpointError> {
    let tensors = LayerTensors::new(checkpoint, layer);
    let weight = tensors.get(WEIGHT)?;
    let invalid = |source| tensors.invalid(&weight, source);
    if spec.value != WeightValue::Int4 || spec.has_zero_points() {
        return Err(tensors.unsupported("Marlin", "symmetric 4-bit", spec));
    }
    let [tile_rows, columns] = weight.expect_matrix("[K/16, 2N]")?;
    let (k, n) = (tile_rows.saturating_mul(16), columns / 2);
    if !columns.is_multiple_of(128) {
        return Err(weight.bad_values(format!(
            "its shape is {:?}; expected [K/16, 2N], N a multiple of 64",
            weight.shape()
        )));
    }
    QuantSpec::check_shape(k, n).map_err(invalid)?;

    let layout = MarlinLayout::new(k, n);
    let packed_scales = tensors
        .get(SCALES)?
        .expect_shape(&[spec.scales.group.count(k), n])?
        .scales()?;
    let scales = ScaleLayout::new(&layout, spec.scales.group)
        .unpack(&packed_scales)
        .map_err(invalid)?;

    let packed = weight.words()?;
    let table = TileTable::<8>::new(|row, column| layout.index(row, column));
    let plain = PlainLayout::new(k, n, spec.value);
    let qweight = plain_words(tensors.buffer(&plain), &plain, 2, |row, block| {
        let tile_row = &packed[row / 2 * columns..][..columns];
        let mut tile = Tile::new();
        for index in 0..n / TILE_N {
            tile.load(tile_row, index);
            for (row, line) in block.chunks_exact_mut(n).enumerate() {
                line[TILE_N * index..]
                    .iter_mut()
                    .zip(table.words(&tile, row))
                    .for_each(|(to, from)| *to = from);
            }
        }
    });
    let spec = spec.with_scale_dtype(scales.dtype());
    PlainWeight::new(PlainParts {
        k,
        n,
        spec,
        qweight,
        metadata: None,
        scales,
        zero_points: None,
        row_permutation: None,
    })
    .map_err(invalid)
}
