//! The scales, zero points and codes of the grids that a column is rounded to.

use super::Levels;
use cubecl::prelude::*;
use marlin_format::ScaleDtype;

/// Returns the range of a column, which includes 0.
#[cube]
pub(super) fn range(weight: &[f32], column: usize, n: usize, rows: usize) -> (f32, f32) {
    let mut low = 0.0f32.runtime();
    let mut high = 0.0f32.runtime();
    for row in 0..rows {
        let value = weight[row * n + column];
        low = min(low, value);
        high = max(high, value);
    }
    (low, high)
}

/// Returns the part of the whole range that grid `index` of a search covers:
/// [`Grid::candidate`](crate::grid::Grid::candidate).
#[cube]
fn part(index: u32, #[comptime] levels: Levels) -> f32 {
    let index = if comptime!(levels.has_zero_points) {
        index
    } else {
        index / 2
    };
    1.0 - f32::cast_from(index) / 100.0
}

/// Returns the scale of grid `index` for a range, rounded to its dtype:
/// [`Grid::candidate`](crate::grid::Grid::candidate).
#[cube]
pub(super) fn scale_of(low: f32, high: f32, index: u32, #[comptime] levels: Levels) -> f32 {
    // The smallest positive number of the dtype, for groups whose weights are all zero.
    let least = comptime!(match levels.scale {
        ScaleDtype::F16 => 5.9604645e-8f32,
        ScaleDtype::BF16 | ScaleDtype::F32 => f32::MIN_POSITIVE,
    });
    let part = part(index, levels);
    if comptime!(levels.has_zero_points) {
        let exact = (high - low) * part / comptime!(levels.top as f32);
        max(rounded_to(exact, levels.scale), least)
    } else {
        let exact = max(high, -low) * part / comptime!(levels.top as f32 / 2.0);
        let scale = max(rounded_to(exact, levels.scale), least);
        if index & 1 == 0 { scale } else { -scale }
    }
}

/// Returns the zero point of grid `index` for a range.
#[cube]
pub(super) fn zero_of(low: f32, scale: f32, index: u32, #[comptime] levels: Levels) -> f32 {
    if comptime!(levels.has_zero_points) {
        clamp(
            (-low * part(index, levels) / scale).round(),
            0.0,
            comptime!(levels.top as f32),
        )
    } else {
        comptime!(levels.top.div_ceil(2) as f32).runtime()
    }
}

/// Returns the code q of the nearest level.
#[cube]
pub(super) fn code(value: f32, scale: f32, zero: f32, #[comptime] levels: Levels) -> f32 {
    clamp(
        (value / scale).round() + zero,
        0.0,
        comptime!(levels.top as f32),
    )
}

/// Rounds a non-negative value to a dtype. A value above the largest f16 value is rounded as if f16
/// had larger exponents, and the host refuses the result. The rounding uses arithmetic, because
/// NVIDIA's compiler for Vulkan drops a conversion to the dtype and back.
#[cube]
fn rounded_to(value: f32, #[comptime] dtype: ScaleDtype) -> f32 {
    if comptime!(dtype == ScaleDtype::F32) {
        value
    } else {
        // The number of bits after the leading one, and the least exponent: below it, the step
        // between neighbouring values stays the same. For bf16, the least exponent is -119 instead
        // of -126, for which the step is not a normal number.
        let (bits, least) = comptime!(if dtype == ScaleDtype::F16 {
            (10, -14i32)
        } else {
            (7, -119)
        });
        let exponent = max(
            (u32::reinterpret(value) >> 23) as i32 - 127,
            comptime!(least).runtime(),
        );
        let step = f32::reinterpret(((exponent + comptime!(127 - bits)) as u32) << 23);
        (value / step).round() * step
    }
}
