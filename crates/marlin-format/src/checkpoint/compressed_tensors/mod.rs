//! compressed-tensors, format `pack-quantized`: the weights that vLLM and llm-compressor write.
//!
//! A linear layer with K input features, N output features and G groups is stored in these tensors,
//! each named `{layer}.{tensor}`. A word is an i32 of V values (eight 4-bit or four 8-bit values),
//! the first value in the lowest bits:
//!
//! | tensor | dtype | shape | holds |
//! |---|---|---|---|
//! | `weight_packed` | i32 | `[N, ceil(K/V)]` | q: value `i` of word `c` is input feature `V*c + i`, values past K are 0 |
//! | `weight_scale` | f16 or bf16 | `[N, G]` | scales |
//! | `weight_shape` | i64 | `[2]` | N, K |
//! | `weight_zero_point`, if not symmetric | i32 | `[ceil(N/V), G]` | z: value `i` of row `r` is output feature `V*r + i` |
//! | `weight_g_idx`, if act-order with several groups | i32 | `[K]` | the group of each input feature |
//!
//! The Python package uses signed integers; q and z are these integers plus 8 (4 bits) or 128 (8
//! bits), in 0..=15 or 0..=255.
//!
//! Versions of the package before 0.19 read `weight_g_idx` (`actorder: group`); later versions and
//! vLLM refuse it.
//!
//! Source: the `compressed-tensors` Python package,
//! `compressors/quantized_compressors/pack_quantized.py`.

mod config;
mod floats;
mod pattern;

use self::floats::FloatFormat;
pub use config::{QuantizationConfig, is_expert};
pub use pattern::LayerPattern;

use rayon::prelude::*;

use super::layer_tensors::LayerTensors;
use super::packed::{
    FileWords, PERMUTED_COLUMNS, TRANSPOSE_ROWS, ascending, from_columns, natural_words,
    pack_columns, permuted_words, transpose_into, transposed, unpack_columns,
};
use super::{
    Checkpoint, CheckpointError, Dtype, Fp4Format, Fp8Config, Fp8Format, TensorData, TensorSpec,
    fp4, fp8, groups,
};
use crate::layout::PlainLayout;
use crate::{FormatError, GroupSize, PlainParts, PlainWeight, QuantSpec, Scales, WeightValue};

pub(super) const TENSORS: [&str; 5] = [PACKED, SCALE, SHAPE, ZERO_POINT, GROUP_INDEX];
const PACKED: &str = "weight_packed";
const SCALE: &str = "weight_scale";
const SHAPE: &str = "weight_shape";
const ZERO_POINT: &str = "weight_zero_point";
const GROUP_INDEX: &str = "weight_g_idx";

/// Returns true if the checkpoint has the tensor `weight_packed` of `layer`: the layer is
/// quantised.
pub fn contains(checkpoint: &Checkpoint, layer: &str) -> bool {
    checkpoint.contains(&name(layer, PACKED))
}

/// Reads the weight of `layer`, such as `model.layers.0.mlp.up_proj`. Floats are read from the
/// tensors of `float-quantized`, `mxfp4-pack-quantized` or `nvfp4-pack-quantized`.
///
/// The dtype of the scale tensor decides, not `spec.scale_dtype`, which no config declares. A
/// `weight_g_idx` that is not in the natural order of groups becomes a row permutation.
///
/// # Errors
/// [`CheckpointError`] for tensors that are missing, have another dtype or shape, or have invalid
/// values; for zero points that are present although `spec` is symmetric, or absent although it is
/// not.
pub fn to_plain(
    checkpoint: &Checkpoint,
    layer: &str,
    spec: &QuantSpec,
) -> Result<PlainWeight, CheckpointError> {
    let tensors = LayerTensors::new(checkpoint, layer);
    let bits = spec.value;
    if bits.is_float() {
        return floats_to_plain(tensors, checkpoint, layer, spec);
    }
    let weight = tensors.get(PACKED)?;
    let invalid = |source| tensors.invalid(&weight, source);

    let shape = tensors.get(SHAPE)?.expect_shape(&[2])?;
    let extents = shape.to_i64()?;
    let [n, k] = [0, 1].map(|axis| {
        extents
            .get(axis)
            .and_then(|&extent| usize::try_from(extent).ok())
    });
    let (Some(n), Some(k)) = (n, k) else {
        return Err(shape.bad_values(format!("it says [N, K] = {extents:?}")));
    };
    QuantSpec::check_shape(k, n).map_err(invalid)?;
    let groups = spec.scales.group.count(k);
    weight.expect_shape(&[n, k.div_ceil(bits.per_word())])?;

    let scales = match tensors.get(SCALE)?.expect_shape(&[n, groups])?.scales()? {
        Scales::F16(values) => Scales::F16(transposed(&values, n, groups)),
        Scales::BF16(values) => Scales::BF16(transposed(&values, n, groups)),
        Scales::F32(values) => Scales::F32(transposed(&values, n, groups)),
    };
    let zero_points = match tensors.zero_points(ZERO_POINT, spec)? {
        Some(stored) => {
            let rows = n.div_ceil(bits.per_word());
            let words = transposed(stored.expect_shape(&[rows, groups])?.words()?, rows, groups);
            Some(unpack_columns(&words, n, bits, &ascending(bits)))
        }
        None => None,
    };
    let row_permutation = match tensors.optional(GROUP_INDEX) {
        Some(index) => groups::row_permutation(&index.expect_shape(&[k])?, spec.scales.group)?,
        None => None,
    };

    let layout = PlainLayout::new(k, n, bits);
    let qweight = unpack_words(
        tensors.buffer(&layout),
        &layout,
        weight.words()?,
        row_permutation.as_deref(),
    );
    let spec = spec.with_scale_dtype(scales.dtype());
    PlainWeight::new(PlainParts {
        k,
        n,
        spec,
        qweight,
        metadata: None,
        scales,
        zero_points,
        row_permutation,
    })
    .map_err(invalid)
}

/// Reads the weight of a layer of floats.
fn floats_to_plain(
    tensors: LayerTensors<'_>,
    checkpoint: &Checkpoint,
    layer: &str,
    spec: &QuantSpec,
) -> Result<PlainWeight, CheckpointError> {
    let fp8 = |blocks| Fp8Format {
        config: Fp8Config::CompressedTensors,
        blocks,
        activations: spec.fp8_activations,
    };
    match (spec.value, spec.scales.group) {
        _ if spec.check().is_err() => {
            Err(tensors.unsupported("compressed-tensors", "FP8, MXFP4 or NVFP4", spec))
        }
        (WeightValue::E4m3, group) => {
            fp8::to_plain(checkpoint, layer, &fp8(group != GroupSize::Channel))
        }
        (_, GroupSize::G16) => fp4::to_plain(checkpoint, layer, Fp4Format::NvFp4Packed),
        _ => fp4::to_plain(checkpoint, layer, Fp4Format::MxFp4Packed),
    }
}

/// Checks that [`tensors_of`] has a format for weights of a spec.
///
/// # Errors
/// [`FormatError::UnwrittenGroup`] for e4m3 values in groups of 128, of which only those of equal
/// columns would be blocks.
pub fn check(spec: &QuantSpec) -> Result<(), FormatError> {
    if spec.value.is_float() && FloatFormat::of(spec).is_none() {
        return Err(FormatError::UnwrittenGroup {
            value: spec.value,
            group: spec.scales.group,
        });
    }
    Ok(())
}

/// Returns the specs of the tensors of `layer`, in the order of [`tensors_of`]. A writer declares
/// these tensors before the weight is quantised.
///
/// `act_order` is true if the weight has a row permutation.
pub fn tensor_specs(
    layer: &str,
    k: usize,
    n: usize,
    spec: &QuantSpec,
    act_order: bool,
) -> Vec<TensorSpec> {
    if let Some(format) = FloatFormat::of(spec) {
        return format.tensor_specs(layer, k, n, spec);
    }
    let (groups, per_word) = (spec.scales.group.count(k), spec.value.per_word());
    let mut specs = vec![
        TensorSpec::new(name(layer, PACKED), Dtype::I32, [n, k.div_ceil(per_word)]),
        TensorSpec::new(name(layer, SCALE), spec.scales.dtype.into(), [n, groups]),
        TensorSpec::new(name(layer, SHAPE), Dtype::I64, [2]),
    ];
    if spec.has_zero_points() {
        specs.push(TensorSpec::new(
            name(layer, ZERO_POINT),
            Dtype::I32,
            [n.div_ceil(per_word), groups],
        ));
    }
    if has_group_index(act_order, groups) {
        specs.push(TensorSpec::new(name(layer, GROUP_INDEX), Dtype::I32, [k]));
    }
    specs
}

/// Returns the tensors that store `weight` as `layer`, in the format of its kind of values:
/// integers, FP8, MXFP4 or NVFP4. A row permutation is written as `weight_g_idx`, with the rows in
/// their natural order. A weight with a single group has no `weight_g_idx`, because the order of
/// quantisation does not affect the group of a row.
pub fn tensors_of(layer: &str, weight: &PlainWeight) -> Vec<TensorData> {
    let weight = weight.to_dense();
    let (k, n, spec) = (weight.k(), weight.n(), weight.spec());
    if let Some(format) = FloatFormat::of(&spec) {
        let specs = format.tensor_specs(layer, k, n, &spec).into_iter();
        let tensors = specs.zip(format.tensors(&weight));
        return tensors
            .map(|(spec, bytes)| TensorData { spec, bytes })
            .collect();
    }
    let groups = spec.scales.group.count(k);
    let permutation = weight.row_permutation();
    let scales = match weight.scales() {
        Scales::F16(values) => Scales::F16(transposed(values, groups, n)),
        Scales::BF16(values) => Scales::BF16(transposed(values, groups, n)),
        Scales::F32(values) => Scales::F32(transposed(values, groups, n)),
    };

    let mut bytes = vec![
        bytemuck::cast_slice(&pack_words(&weight)).to_vec(),
        scales.as_bytes().to_vec(),
        bytemuck::cast_slice(&[n as i64, k as i64]).to_vec(),
    ];
    if let Some(zero_points) = weight.zero_points() {
        bytes.push(
            bytemuck::cast_slice(&pack_zero_points(zero_points, n, groups, spec.value)).to_vec(),
        );
    }
    if let Some(permutation) = permutation.filter(|_| has_group_index(true, groups)) {
        bytes.push(
            bytemuck::cast_slice(&groups::group_index(permutation, spec.scales.group)).to_vec(),
        );
    }
    let specs = tensor_specs(layer, k, n, &spec, permutation.is_some());
    specs
        .into_iter()
        .zip(bytes)
        .map(|(spec, bytes)| TensorData { spec, bytes })
        .collect()
}

/// Returns true if a weight has a `weight_g_idx`.
fn has_group_index(act_order: bool, groups: usize) -> bool {
    act_order && groups > 1
}

fn name(layer: &str, tensor: &str) -> String {
    format!("{layer}.{tensor}")
}

/// Converts words `[N, ceil(K / values in a word)]` to [`PlainLayout`], with the rows in the order
/// of the permutation.
fn unpack_words(
    words: Vec<u32>,
    layout: &PlainLayout,
    packed: &FileWords,
    permutation: Option<&[u32]>,
) -> Vec<u32> {
    let (n, rows) = (layout.n, layout.rows());
    // In both layouts a word holds consecutive rows of K, so only whole words are transposed.
    match permutation {
        None => from_columns(words, layout, packed),
        Some(permutation) => permuted_words(words, layout, permutation, |column, lines| {
            let shape = [PERMUTED_COLUMNS.min(n - column), rows];
            let mut lines: Vec<&mut [u32]> = lines.iter_mut().map(<[_; _]>::as_mut_slice).collect();
            let source = &packed[column * rows..];
            transpose_into(source, shape, 0, &mut lines, u32::from_le_bytes);
        }),
    }
}

/// Converts a weight to words, the inverse of [`unpack_words`]. Padding is 0, as in the Python
/// package.
fn pack_words(weight: &PlainWeight) -> Vec<u32> {
    let (n, layout) = (weight.n(), weight.layout());
    let (rows, columns) = (layout.rows(), layout.columns());
    let words = natural_words(weight);
    let last_mask = layout.rows_mask(rows - 1);
    let mut packed = vec![0u32; n * rows];
    packed
        .par_chunks_mut(TRANSPOSE_ROWS * rows)
        .enumerate()
        .for_each(|(block, lines)| {
            let first = TRANSPOSE_ROWS * block;
            let mut to: Vec<&mut [u32]> = lines.chunks_exact_mut(rows).collect();
            transpose_into(&words, [rows, columns], first, &mut to, |word| word);
            lines
                .iter_mut()
                .skip(rows - 1)
                .step_by(rows)
                .for_each(|word| *word &= last_mask);
        });
    packed
}

/// Zero points `[G, N]` to words `[ceil(N / values in a word), G]`, packed along N.
fn pack_zero_points(zero_points: &[u8], n: usize, groups: usize, bits: WeightValue) -> Vec<u32> {
    transposed(
        &pack_columns(zero_points, n, bits),
        groups,
        n.div_ceil(bits.per_word()),
    )
}
