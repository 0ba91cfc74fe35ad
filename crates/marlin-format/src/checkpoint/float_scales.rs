//! Scales of float weights: their codes of 8 bits, and the checks that all formats share.

use super::layer_tensors::LayerTensors;
use super::{CheckpointError, Dtype, TensorView};
use crate::WeightValue;
use crate::weight::position;

/// The code of e8m0 that is NaN.
const E8M0_NAN: u8 = 0xff;

/// Returns the number of a code of e8m0, `2^(code - 127)` (OCP Microscaling Formats 1.0, section
/// 5.4.1).
fn e8m0(code: u8) -> f32 {
    match code {
        E8M0_NAN => f32::NAN,
        // The only number below the smallest normal f32: the highest bit of the mantissa alone.
        0 => f32::from_bits(1 << 22),
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

/// Returns the numbers of all codes of a dtype of scales with 8 bits, or `None` for another dtype.
/// `U8` is e8m0, as in files that were written without that dtype.
pub(super) fn numbers(dtype: Dtype) -> Option<[f32; 256]> {
    let number: fn(u8) -> f32 = match dtype {
        Dtype::F8_E4M3 => |code| WeightValue::E4m3.decode(code),
        Dtype::F8_E8M0 | Dtype::U8 => e8m0,
        _ => return None,
    };
    Some(std::array::from_fn(|code| number(code as u8)))
}

/// Returns the scales of an `F16`, `BF16`, `F32` or `F8_E8M0` tensor in f32, in the order of the
/// file.
pub(super) fn to_f32(tensor: &TensorView<'_>) -> Result<Vec<f32>, CheckpointError> {
    match tensor.dtype() {
        Dtype::F8_E8M0 => Ok(tensor.bytes().iter().map(|&code| e8m0(code)).collect()),
        Dtype::F16 | Dtype::BF16 | Dtype::F32 => tensor.to_f32(),
        _ => Err(tensor.wrong_dtype("F16, BF16, F32 or F8_E8M0")),
    }
}

/// Returns the only value of a tensor with a single element.
pub(super) fn single(tensor: &TensorView<'_>) -> Result<f32, CheckpointError> {
    let values = tensor.to_f32()?;
    if let &[value] = values.as_slice() {
        return Ok(value);
    }
    let shape = tensor.shape();
    Err(tensor.bad_values(format!("its shape is {shape:?}; expected [1] or []")))
}

/// The names of tensors with scales of a layer's activations.
const ACTIVATION_SCALES: [&str; 3] = ["input_scale", "activation_scale", "input_global_scale"];

/// Refuses scales of activations that are not positive and finite. They are not used, but a file
/// that has such a scale was not written to its end.
pub(super) fn check_activations(tensors: &LayerTensors<'_>) -> Result<(), CheckpointError> {
    let stored = ACTIVATION_SCALES
        .into_iter()
        .filter_map(|name| tensors.optional(name));
    for tensor in stored {
        let is_bad = |scale: &f32| !(*scale > 0.0 && scale.is_finite());
        if let Some(scale) = tensor.to_f32()?.into_iter().find(is_bad) {
            return Err(tensor.bad_values(format!(
                "a scale of activations is {scale}; it must be finite and positive"
            )));
        }
    }
    Ok(())
}

/// Refuses scales `[G, N]` of which one is NaN, infinite or negative. A scale may be 0: a group of
/// zeros has this scale.
pub(super) fn check(
    tensor: &TensorView<'_>,
    scales: &[f32],
    n: usize,
) -> Result<(), CheckpointError> {
    let is_bad = |scale: f32| !(scale >= 0.0 && scale.is_finite());
    match position(scales, is_bad) {
        None => Ok(()),
        Some(index) => Err(tensor.bad_values(format!(
            "the scale of group {}, output feature {} is {}; scales must be finite and not negative",
            index / n,
            index % n,
            scales[index]
        ))),
    }
}
