//! FP8: weights of e4m3 values, as compressed-tensors (`float-quantized`), DeepSeek's and Qwen's
//! checkpoints (`quant_method: fp8`), FBGEMM and ModelOpt store them.
//!
//! A linear layer with K input features and N output features is stored in these tensors, each
//! named `{layer}.{tensor}`:
//!
//! | tensor | dtype | shape | holds |
//! |---|---|---|---|
//! | `weight` | F8_E4M3 | `[N, K]` | values |
//! | `weight_scale`, or for `fp8` `weight_scale_inv` | f32, bf16, f16 or F8_E8M0 | `[ceil(N/128), ceil(K/128)]` | the scale of each block of 128 x 128 values |
//! | the same, without blocks | the same | `[N, 1]`, `[N]`, `[1]` or `[]` | the scale of each output feature, or of the weight |
//!
//! A weight is the product of value and scale; despite its name, `weight_scale_inv` is a factor,
//! too.
//!
//! Scales of activations (`input_scale`, `activation_scale`) and of caches are not used:
//! activations keep their 16 or 32 bits, or are rounded with a scale of each row
//! ([`QuantSpec::fp8_activations`]).
//!
//! Sources: compressed-tensors `compressors/naive_quantized/base.py`; transformers
//! `integrations/{finegrained_fp8,fbgemm_fp8}.py`; vLLM
//! `quantization/{fp8,fbgemm_fp8,modelopt}.py`.

use super::layer_tensors::LayerTensors;
use super::{
    Checkpoint, CheckpointError, Dtype, Fp8Config, Fp8Format, TensorView, float_scales, is_float,
};
use crate::{PlainWeight, QuantSpec};

const WEIGHT: &str = "weight";
const SCALE: &str = "weight_scale";
const SCALE_INV: &str = "weight_scale_inv";
const ZERO_POINT: &str = "weight_zero_point";
/// The extent of a block along both axes.
const BLOCK: usize = 128;

/// Returns the names of the tensors of a layer: those that are read, and those that are not used.
pub(super) fn tensors(config: Fp8Config) -> &'static [&'static str] {
    match config {
        Fp8Config::CompressedTensors => &[WEIGHT, SCALE, ZERO_POINT, "input_scale"],
        Fp8Config::Fp8 => &[
            WEIGHT,
            SCALE_INV,
            SCALE,
            "input_scale",
            "activation_scale",
            "k_scale",
            "v_scale",
        ],
        Fp8Config::FbgemmFp8 => &[WEIGHT, SCALE, "input_scale_ub"],
        Fp8Config::ModelOpt => &[WEIGHT, SCALE, "input_scale", "k_scale", "v_scale"],
    }
}

/// Returns true if `layer` is quantised: it has scales, or a `weight` that is not float.
pub fn contains(checkpoint: &Checkpoint, layer: &str) -> bool {
    let has = |tensor| checkpoint.contains(&format!("{layer}.{tensor}"));
    let weight = checkpoint.info(&format!("{layer}.{WEIGHT}"));
    has(SCALE) || has(SCALE_INV) || weight.is_some_and(|weight| !is_float(weight.dtype))
}

/// Reads the weight of `layer`.
///
/// # Errors
/// [`CheckpointError`] for tensors that are missing, or have another dtype or shape; for values
/// that are NaN, for scales that are NaN, infinite or negative, and for scales of activations that
/// are not positive.
pub fn to_plain(
    checkpoint: &Checkpoint,
    layer: &str,
    format: &Fp8Format,
) -> Result<PlainWeight, CheckpointError> {
    let (tensors, spec) = (LayerTensors::new(checkpoint, layer), format.spec());
    let weight = tensors.get(WEIGHT)?.expect_dtype(
        &[Dtype::F8_E4M3],
        "F8_E4M3, because the config says that the layer is quantised",
    )?;
    let [n, k] = weight.expect_matrix("[N, K]")?;
    QuantSpec::check_shape(k, n).map_err(|source| tensors.invalid(&weight, source))?;

    // Files of old versions hold zero points, all 0, of symmetric weights.
    if let Some(zero_points) = tensors.optional(ZERO_POINT)
        && zero_points.bytes().iter().any(|&byte| byte != 0)
    {
        return Err(CheckpointError::UnexpectedZeroPoints {
            path: zero_points.path().into(),
            tensor: tensors.name(ZERO_POINT),
        });
    }
    let stored = scale_tensor(&tensors, format)?;
    let scales = match format.blocks {
        true => block_scales(&stored, k, n)?,
        false => row_scales(&stored, n)?,
    };
    float_scales::check(&stored, &scales, n)?;
    float_scales::check_activations(&tensors)?;
    tensors.float_weight(&weight, spec, [k, n], scales)
}

/// Returns the tensor of scales, which has one of two names under `quant_method: fp8`.
fn scale_tensor<'a>(
    tensors: &LayerTensors<'a>,
    format: &Fp8Format,
) -> Result<TensorView<'a>, CheckpointError> {
    if format.config != Fp8Config::Fp8 {
        return tensors.get(SCALE);
    }
    match (tensors.optional(SCALE_INV), tensors.optional(SCALE)) {
        (Some(scales), Some(_)) => Err(scales.bad_values(format!(
            "there is also a `{}`; a weight has one tensor of scales",
            tensors.name(SCALE)
        ))),
        (Some(scales), None) | (None, Some(scales)) => Ok(scales),
        (None, None) => Err(tensors.missing(if format.blocks { SCALE_INV } else { SCALE })),
    }
}

/// Returns the scales `[1, N]` of a tensor with one scale for each output feature, or one for all.
fn row_scales(stored: &TensorView<'_>, n: usize) -> Result<Vec<f32>, CheckpointError> {
    match *stored.shape() {
        [] | [1] => Ok(vec![float_scales::single(stored)?; n]),
        [rows] if rows == n => float_scales::to_f32(stored),
        _ => float_scales::to_f32(&stored.expect_shape(&[n, 1])?),
    }
}

/// Returns the scales `[ceil(K / 128), N]` of a tensor with one scale for each block.
fn block_scales(stored: &TensorView<'_>, k: usize, n: usize) -> Result<Vec<f32>, CheckpointError> {
    let [rows, groups] = [n, k].map(|extent| extent.div_ceil(BLOCK));
    let blocks = float_scales::to_f32(&stored.expect_shape(&[rows, groups])?)?;
    let mut scales = Vec::with_capacity(groups * n);
    for group in 0..groups {
        for row in 0..rows {
            let columns = BLOCK.min(n - row * BLOCK);
            scales.extend(std::iter::repeat_n(blocks[row * groups + group], columns));
        }
    }
    Ok(scales)
}
