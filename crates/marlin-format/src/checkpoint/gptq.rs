//! GPTQ: the weights that AutoGPTQ and GPTQModel write.
//!
//! A linear layer with K input features, N output features and G groups is stored in these tensors,
//! each named `{layer}.{tensor}`. A word is an i32 of V values (eight 4-bit or four 8-bit values),
//! the first value in the lowest bits:
//!
//! | tensor | dtype | shape | holds |
//! |---|---|---|---|
//! | `qweight` | i32 | `[ceil(K/V), N]` | q: value `i` of word row `r` is input feature `V*r + i` |
//! | `qzeros` | i32 | `[G, ceil(N/V)]` | z - 1 (version 1) or z (version 2): value `i` of word column `c` is output feature `V*c + i` |
//! | `scales` | f16 or bf16 | `[G, N]` | scales |
//! | `g_idx`, optional | i32 | `[K]` | the group of each input feature |
//!
//! Three pitfalls:
//!
//! * Version 1 stores z - 1, but some files that declare version 1 store z. If the config declares
//!   a symmetric weight, z is 8 (4 bits) or 128 (8 bits), whatever `qzeros` holds.
//! * Packers of version 1 subtract 1 from every value of a packed word at once: a z of 0 borrows
//!   from the value above. Adding 1 to every value of the packed word undoes the subtraction,
//!   including borrows, and gives z between 0 and 15 (255) for every word.
//! * `desc_act` is unreliable. The contents of `g_idx` decide whether rows are permuted.
//!
//! This module writes version 2. Source: GPTQModel's `nn_modules/qlinear` and the loader of vLLM.

use serde_json::{Map, Value, json};

use super::layer_tensors::LayerTensors;
use super::packed::{ascending, from_rows, natural_words, pack_columns, unpack_columns};
use super::{
    Checkpoint, CheckpointError, Dtype, GptqFormat, GptqVersion, TensorData, TensorSpec,
    TensorView, groups,
};
use crate::layout::PlainLayout;
use crate::{GroupSize, PlainParts, PlainWeight, QuantSpec, WeightValue};

pub(super) const TENSORS: [&str; 4] = [WEIGHT, ZERO_POINTS, SCALES, GROUP_INDEX];
const WEIGHT: &str = "qweight";
const ZERO_POINTS: &str = "qzeros";
const SCALES: &str = "scales";
const GROUP_INDEX: &str = "g_idx";

/// Reads the weight of `layer`.
///
/// The dtype of the scale tensor decides, not that of the spec. A `g_idx` that is not in the
/// natural order of groups becomes a row permutation. K is the length of `g_idx`; without a
/// `g_idx`, K follows from the rows of `qweight`.
///
/// # Errors
/// [`CheckpointError`] for tensors that are missing, have another dtype or shape, or have invalid
/// values.
pub fn to_plain(
    checkpoint: &Checkpoint,
    layer: &str,
    format: &GptqFormat,
) -> Result<PlainWeight, CheckpointError> {
    let tensors = LayerTensors::new(checkpoint, layer);
    let bits = format.spec.value;
    let weight = tensors.get(WEIGHT)?;
    if bits.is_float() {
        return Err(tensors.unsupported("GPTQ", "integer", &format.spec));
    }
    let [word_rows, n] = weight.expect_matrix("[K / values in a word, N]")?;
    let group_index = match tensors.optional(GROUP_INDEX) {
        None if format.act_order && format.spec.scales.group != GroupSize::Channel => {
            return Err(tensors.missing(GROUP_INDEX));
        }
        group_index => group_index,
    };
    let k = match group_index.map(|index| (index, index.shape())) {
        Some((_, &[k])) => k,
        Some((index, shape)) => {
            return Err(index.bad_values(format!("its shape is {shape:?}; expected [K]")));
        }
        None => word_rows.saturating_mul(bits.per_word()),
    };
    QuantSpec::check_shape(k, n).map_err(|source| tensors.invalid(&weight, source))?;
    let weight = weight.expect_shape(&[k.div_ceil(bits.per_word()), n])?;
    let groups = format.spec.scales.group.count(k);

    let scales = tensors.get(SCALES)?.expect_shape(&[groups, n])?.scales()?;
    let zero_points = match format.spec.has_zero_points() {
        true => {
            let stored = tensors
                .get(ZERO_POINTS)?
                .expect_shape(&[groups, n.div_ceil(bits.per_word())])?;
            Some(unpack_zero_points(&stored, n, bits, format.version)?)
        }
        false => None,
    };
    let row_permutation = match group_index {
        Some(index) if !is_unset(&index, groups)? => {
            groups::row_permutation(&index, format.spec.scales.group)?
        }
        _ => None,
    };

    let layout = PlainLayout::new(k, n, bits);
    let qweight = from_rows(
        tensors.buffer(&layout),
        &layout,
        weight.words()?,
        n,
        row_permutation.as_deref(),
    );
    let spec = format.spec.with_scale_dtype(scales.dtype());
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
    .map_err(|source| tensors.invalid(&weight, source))
}

/// Returns true if a `g_idx` is all zeros although there are several groups. Some quantisers never
/// fill `g_idx`. text-generation-inference and exllama also treat such a `g_idx` as absent.
fn is_unset(index: &TensorView<'_>, groups: usize) -> Result<bool, CheckpointError> {
    Ok(groups > 1 && index.words()?.iter().all(|&group| group == [0; 4]))
}

fn unpack_zero_points(
    tensor: &TensorView<'_>,
    n: usize,
    bits: WeightValue,
    version: GptqVersion,
) -> Result<Vec<u8>, CheckpointError> {
    let (words, shifts) = (tensor.words()?, ascending(bits));
    match version {
        GptqVersion::V2 => Ok(unpack_columns(words, n, bits, &shifts)),
        GptqVersion::V1 => {
            // A word with a 1 in each value.
            let ones = u32::MAX / u32::from(bits.max());
            let words: Vec<[u8; 4]> = words
                .iter()
                .map(|&word| u32::from_le_bytes(word).wrapping_add(ones).to_le_bytes())
                .collect();
            Ok(unpack_columns(&words, n, bits, &shifts))
        }
    }
}

/// Returns the specs of the tensors of `layer` in version 2, in the order of [`tensors_of`].
pub fn tensor_specs(layer: &str, k: usize, n: usize, spec: &QuantSpec) -> Vec<TensorSpec> {
    let (groups, per_word) = (spec.scales.group.count(k), spec.value.per_word());
    let name = |tensor: &str| format!("{layer}.{tensor}");
    vec![
        TensorSpec::new(name(WEIGHT), Dtype::I32, [k.div_ceil(per_word), n]),
        TensorSpec::new(
            name(ZERO_POINTS),
            Dtype::I32,
            [groups, n.div_ceil(per_word)],
        ),
        TensorSpec::new(name(SCALES), spec.scales.dtype.into(), [groups, n]),
        TensorSpec::new(name(GROUP_INDEX), Dtype::I32, [k]),
    ]
}

/// Returns the tensors that store `weight` as `layer` in version 2. A row permutation is written as
/// `g_idx`, with the rows in their natural order.
///
/// Values past K and N are 0. Other readers require that K and N fill whole words.
pub fn tensors_of(layer: &str, weight: &PlainWeight) -> Vec<TensorData> {
    let weight = weight.to_dense();
    let (k, n, spec) = (weight.k(), weight.n(), weight.spec());
    let groups = spec.scales.group.count(k);
    let layout = weight.layout();
    let mut words: Vec<u32> = natural_words(&weight)
        .chunks_exact(layout.columns())
        .flat_map(|line| &line[..n])
        .copied()
        .collect();
    let last_row = layout.rows() - 1;
    let mask = layout.rows_mask(last_row);
    words[last_row * n..]
        .iter_mut()
        .for_each(|word| *word &= mask);

    let zero_points = match weight.zero_points() {
        Some(zero_points) => pack_columns(zero_points, n, spec.value),
        None => pack_columns(&vec![spec.value.midpoint(); groups * n], n, spec.value),
    };
    let group_index = match weight.row_permutation() {
        Some(permutation) => groups::group_index(permutation, spec.scales.group),
        None => (0..k)
            .map(|row| (row / spec.scales.group.rows(k)) as i32)
            .collect(),
    };
    let bytes = [
        bytemuck::cast_slice(&words).to_vec(),
        bytemuck::cast_slice(&zero_points).to_vec(),
        weight.scales().as_bytes().to_vec(),
        bytemuck::cast_slice(&group_index).to_vec(),
    ];
    tensor_specs(layer, k, n, &spec)
        .into_iter()
        .zip(bytes)
        .map(|(spec, bytes)| TensorData { spec, bytes })
        .collect()
}

/// Returns the `quantization_config` object of a version 2 checkpoint. Linear layers are quantised
/// with `spec`. The layers in `excluded` are not quantised, and the layers in `others` have their
/// own bits and group size.
///
/// `act_order` is true if a layer has a row permutation. `lm_head` is true if the output head is
/// quantised. Layer names become entries of `dynamic`, which GPTQModel and vLLM read: `-:` for
/// excluded layers, `+:` for layers in `others`.
pub fn quantization_config(
    spec: &QuantSpec,
    act_order: bool,
    lm_head: bool,
    excluded: &[String],
    others: &[(String, QuantSpec)],
) -> Value {
    let entry = |sign: &str, name: &str| format!("{sign}:^{}$", regex::escape(name));
    let excluded = excluded.iter().map(|name| (entry("-", name), json!({})));
    let others = others.iter().map(|(name, spec)| {
        let fields = json!({ "bits": spec.value.bits(), "group_size": spec.scales.group.as_i64() });
        (entry("+", name), fields)
    });
    let dynamic: Map<String, Value> = excluded.chain(others).collect();
    json!({
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": spec.value.bits(),
        "group_size": spec.scales.group.as_i64(),
        "desc_act": act_order,
        "sym": !spec.has_zero_points(),
        "lm_head": lm_head,
        "pack_dtype": "int32",
        "dynamic": dynamic,
        "meta": { "quantizer": [concat!("burn-marlin:", env!("CARGO_PKG_VERSION"))] },
    })
}
