//! compressed-tensors, format `pack-quantized`: the 4-bit weights that vLLM and llm-compressor write.
//!
//! One linear layer of K input and N output features, in G groups, is these tensors, each named `{layer}.{tensor}`:
//!
//! | tensor | dtype | shape | holds |
//! |---|---|---|---|
//! | `weight_packed` | i32 | `[N, ceil(K/8)]` | q, 0..=15: nibble `i` of word `c` is input feature `8c + i`, nibbles past K are 0 |
//! | `weight_scale` | f16 or bf16 | `[N, G]` | scales |
//! | `weight_shape` | i64 | `[2]` | N, K |
//! | `weight_zero_point`, where not symmetric | i32 | `[ceil(N/8), G]` | z, 0..=15: nibble `i` of row `r` is output feature `8r + i` |
//! | `weight_g_idx`, where activation-ordered | i32 | `[K]` | the group of each input feature |
//!
//! Source: the `compressed-tensors` Python package, `compressors/quantized_compressors/pack_quantized.py`.

mod config;
mod groups;

pub use config::QuantizationConfig;

use half::{bf16, f16};
use safetensors::Dtype;

use super::{Checkpoint, CheckpointError, TensorData, TensorSpec, TensorView};
use crate::layout::PlainLayout;
use crate::{Bits, PlainParts, PlainWeight, QuantSpec, ScaleDtype, Scales};

const PACKED: &str = "weight_packed";
const SCALE: &str = "weight_scale";
const SHAPE: &str = "weight_shape";
const ZERO_POINT: &str = "weight_zero_point";
const GROUP_INDEX: &str = "weight_g_idx";

/// Whether `layer` is quantised in this checkpoint: its `weight_packed` is there.
pub fn contains(checkpoint: &Checkpoint, layer: &str) -> bool {
    checkpoint.contains(&name(layer, PACKED))
}

/// Reads the weight of `layer`, such as `model.layers.0.mlp.up_proj`.
///
/// The scale tensor's dtype counts, not `spec.scale_dtype`, which no config says. A `weight_g_idx` that is not the natural order of groups
/// becomes a row permutation.
///
/// # Errors
/// [`CheckpointError`] for tensors that are missing, of another dtype or shape, or whose values make no sense; for zero points that are
/// there where `spec` is symmetric; and for a K that the group size does not divide.
pub fn to_plain(checkpoint: &Checkpoint, layer: &str, spec: &QuantSpec) -> Result<PlainWeight, CheckpointError> {
    let tensor = |tensor| checkpoint.tensor(&name(layer, tensor));
    let invalid = |source| CheckpointError::Weight { layer: layer.into(), source };

    let shape = tensor(SHAPE)?.expect_shape(&[2])?;
    let extents = shape.to_i64()?;
    let [n, k] = [0, 1].map(|axis| extents.get(axis).and_then(|&extent| usize::try_from(extent).ok()));
    let (Some(n), Some(k)) = (n, k) else {
        return Err(shape.bad_values(format!("it says [N, K] = {extents:?}")));
    };
    spec.check(k, n).map_err(invalid)?;
    let groups = spec.group.count(k);

    let packed = tensor(PACKED)?.expect_shape(&[n, k.div_ceil(8)])?;
    let scale = tensor(SCALE)?.expect_shape(&[n, groups])?;
    let scales = match scale.dtype() {
        Dtype::F16 => Scales::F16(transposed(&scale.elements(f16::from_le_bytes), n, groups)),
        Dtype::BF16 => Scales::BF16(transposed(&scale.elements(bf16::from_le_bytes), n, groups)),
        _ => return Err(scale.wrong_dtype("F16 or BF16")),
    };
    let spec = spec.with_scale_dtype(scales.dtype());

    let zero_points = match (spec.zero_points, checkpoint.contains(&name(layer, ZERO_POINT))) {
        (false, false) => None,
        (false, true) => return Err(CheckpointError::UnexpectedZeroPoints { tensor: name(layer, ZERO_POINT) }),
        (true, _) => Some(unpack_zero_points(&tensor(ZERO_POINT)?.expect_shape(&[n.div_ceil(8), groups])?, n, groups)?),
    };
    let row_permutation = match checkpoint.contains(&name(layer, GROUP_INDEX)) {
        true => groups::row_permutation(&tensor(GROUP_INDEX)?.expect_shape(&[k])?, spec.group)?,
        false => None,
    };

    let words = unpack_words(&words_of(&packed)?, k, n, row_permutation.as_deref());
    PlainWeight::new(PlainParts { k, n, spec, words, scales, zero_points, row_permutation }).map_err(invalid)
}

/// The tensors of `layer`, without their bytes, in the order of [`tensors_of`]: what a writer declares before the weight is quantised.
///
/// `act_order` says whether the weight has a row permutation.
pub fn tensor_specs(layer: &str, k: usize, n: usize, spec: &QuantSpec, act_order: bool) -> Vec<TensorSpec> {
    let groups = spec.group.count(k);
    let scale_dtype = match spec.scale_dtype {
        ScaleDtype::F16 => Dtype::F16,
        ScaleDtype::BF16 => Dtype::BF16,
    };
    let mut specs = vec![
        TensorSpec::new(name(layer, PACKED), Dtype::I32, [n, k.div_ceil(8)]),
        TensorSpec::new(name(layer, SCALE), scale_dtype, [n, groups]),
        TensorSpec::new(name(layer, SHAPE), Dtype::I64, [2]),
    ];
    if spec.zero_points {
        specs.push(TensorSpec::new(name(layer, ZERO_POINT), Dtype::I32, [n.div_ceil(8), groups]));
    }
    if act_order {
        specs.push(TensorSpec::new(name(layer, GROUP_INDEX), Dtype::I32, [k]));
    }
    specs
}

/// The tensors that hold `weight` as `layer`. A row permutation is written as `weight_g_idx`, with the rows in their natural order.
pub fn tensors_of(layer: &str, weight: &PlainWeight) -> Vec<TensorData> {
    let (k, n, spec) = (weight.k(), weight.n(), weight.spec());
    let groups = spec.group.count(k);
    let permutation = weight.row_permutation();
    let scales = match weight.scales() {
        Scales::F16(values) => Scales::F16(transposed(values, groups, n)),
        Scales::BF16(values) => Scales::BF16(transposed(values, groups, n)),
    };

    let mut bytes = vec![
        bytemuck::cast_slice(&pack_words(weight)).to_vec(),
        scales.as_bytes().to_vec(),
        bytemuck::cast_slice(&[n as i64, k as i64]).to_vec(),
    ];
    if let Some(zero_points) = weight.zero_points() {
        bytes.push(bytemuck::cast_slice(&pack_zero_points(zero_points, n, groups)).to_vec());
    }
    if let Some(permutation) = permutation {
        bytes.push(bytemuck::cast_slice(&groups::group_index(permutation, spec.group)).to_vec());
    }
    let specs = tensor_specs(layer, k, n, &spec, permutation.is_some());
    specs.into_iter().zip(bytes).map(|(spec, bytes)| TensorData { spec, bytes }).collect()
}

fn name(layer: &str, tensor: &str) -> String {
    format!("{layer}.{tensor}")
}

fn words_of(tensor: &TensorView<'_>) -> Result<Vec<u32>, CheckpointError> {
    match tensor.dtype() {
        Dtype::I32 => Ok(tensor.elements(u32::from_le_bytes)),
        _ => Err(tensor.wrong_dtype("I32")),
    }
}

/// `[rows, columns]` to `[columns, rows]`.
fn transposed<T: Copy>(values: &[T], rows: usize, columns: usize) -> Vec<T> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column])).collect()
}

/// Words `[N, ceil(K/8)]` to [`PlainLayout`], with the rows in the order of the permutation.
fn unpack_words(packed: &[u32], k: usize, n: usize, permutation: Option<&[u32]>) -> Vec<u32> {
    let layout = PlainLayout::new(k, n, Bits::Four);
    let (rows, columns) = (layout.rows(), layout.columns());
    if let Some(permutation) = permutation {
        return layout.pack_with(|stored, column| {
            let natural = permutation[stored] as usize;
            (packed[column * rows + natural / 8] >> (4 * (natural % 8))) as u8 & 0xf
        });
    }
    // Both hold eight rows of K in a word: only the words are transposed, and the padding is another.
    let mut words = layout.padding();
    for (row, line) in words.chunks_exact_mut(columns).enumerate() {
        let mask = rows_mask(k, row);
        for (column, word) in line.iter_mut().take(n).enumerate() {
            *word = (packed[column * rows + row] & mask) | (*word & !mask);
        }
    }
    words
}

/// The inverse of [`unpack_words`], with padding of 0 as the Python package writes it.
fn pack_words(weight: &PlainWeight) -> Vec<u32> {
    let (k, n, layout) = (weight.k(), weight.n(), weight.layout());
    let (rows, columns) = (layout.rows(), layout.columns());
    let mut packed = vec![0u32; n * rows];
    if let Some(permutation) = weight.row_permutation() {
        for (stored, &natural) in permutation.iter().enumerate() {
            let natural = natural as usize;
            for column in 0..n {
                packed[column * rows + natural / 8] |= u32::from(weight.q(stored, column)) << (4 * (natural % 8));
            }
        }
    } else {
        for (row, line) in weight.words().chunks_exact(columns).enumerate() {
            let mask = rows_mask(k, row);
            for (column, word) in line.iter().take(n).enumerate() {
                packed[column * rows + row] = word & mask;
            }
        }
    }
    packed
}

/// The bits of a word in row `row` whose nibbles are rows below K.
fn rows_mask(k: usize, row: usize) -> u32 {
    let rows = k - 8 * row;
    if rows >= 8 { u32::MAX } else { !(u32::MAX << (4 * rows)) }
}

/// Words `[ceil(N/8), G]`, packed along N, to `[G, N]`.
fn unpack_zero_points(tensor: &TensorView<'_>, n: usize, groups: usize) -> Result<Vec<u8>, CheckpointError> {
    let packed = words_of(tensor)?;
    let zero_point = |group: usize, column: usize| (packed[column / 8 * groups + group] >> (4 * (column % 8))) as u8 & 0xf;
    Ok((0..groups * n).map(|i| zero_point(i / n, i % n)).collect())
}

/// The inverse of [`unpack_zero_points`].
fn pack_zero_points(zero_points: &[u8], n: usize, groups: usize) -> Vec<u32> {
    let mut packed = vec![0u32; n.div_ceil(8) * groups];
    for (i, &zero_point) in zero_points.iter().enumerate() {
        let (group, column) = (i / n, i % n);
        packed[column / 8 * groups + group] |= u32::from(zero_point) << (4 * (column % 8));
    }
    packed
}
