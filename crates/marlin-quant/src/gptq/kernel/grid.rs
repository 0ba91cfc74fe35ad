//! The grids that a column is rounded to: their scales, zero points and codes.

use super::Levels;
use cubecl::prelude::*;
use marlin_format::ScaleDtype;

/// The range of a column, 0 in it.
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

/// The part of the whole range that grid `index` of a search has:
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

/// The scale of grid `index` of a range, rounded to its dtype:
/// [`Grid::candidate`](crate::grid::Grid::candidate).
#[cube]
pub(super) fn scale_of(low: f32, high: f32, index: u32, #[comptime] levels: Levels) -> f32 {
    // The least positive number of the dtype, where all weights are zero.
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

/// The zero point of grid `index` of a range.
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

/// The q of the nearest level.
#[cube]
pub(super) fn code(value: f32, scale: f32, zero: f32, #[comptime] levels: Levels) -> f32 {
    clamp(
        (value / scale).round() + zero,
        0.0,
        comptime!(levels.top as f32),
    )
}

/// A value, not below 0, rounded to a dtype; above the largest of f16 to what f16 would have there
/// with a larger exponent, for the host to refuse. In arithmetic, because NVIDIA's compiler for
/// Vulkan drops a conversion to the dtype and back.
#[cube]
fn rounded_to(value: f32, #[comptime] dtype: ScaleDtype) -> f32 {
    if comptime!(dtype == ScaleDtype::F32) {
        value
    } else {
        // Bits after the leading one, and the least exponent: below it neighbours are no closer.
        // bf16's would be -126, for which the step is no normal number.
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
