//! Conversion of packed floats of 4 and 8 bits to pairs of f16 or bf16, in registers.
//!
//! A code has a sign, an exponent and a mantissa, as f16 and bf16 have, with fewer bits. With the
//! sign in the highest bit, and the exponent and the mantissa on both sides of the place where they
//! meet, its bits are the number divided by a power of two, subnormal numbers included: the
//! difference of the biases. Tensor cores and the instructions on pairs multiply subnormal f16 and
//! bf16 like any other number.
//!
//! | | sign | exponent and mantissa | divided by |
//! |---|---|---|---|
//! | e2m1 in f16 | 15 | 11 to 9 | 2^14 |
//! | e2m1 in bf16 | 15 | 8 to 6 | 2^126 |
//! | e4m3 in f16 | 15 | 13 to 7 | 2^8 |
//! | e4m3 in bf16 | 15 | 10 to 4 | 2^120 |
//!
//! The power of two is multiplied back to each pair ([`Conversion::lift`]), or in f16 to the sums
//! ([`Config::lifts_sums`]).

use super::config::Config;
use super::conversion::Conversion;
use crate::ptx::{cvt_f16x2_e4m3, fma_bf16x2, lop3_and_or, mul_f16x2, prmt};
use cubecl::prelude::*;

/// Returns the numbers of two e2m1 values of a word, nibbles `nibble` and `nibble + 4` before
/// [`scatter_bits`](marlin_format::layout::scatter_bits) moved their bits: 1, 2, 4 and 4
/// instructions for the four pairs in f16, 3, 3, 4 and 4 in bf16, and one to lift each pair.
#[cube]
pub(super) fn e2m1_pair(word: u32, #[comptime] nibble: u32, #[comptime] config: Config) -> u32 {
    let pair = if comptime!(!config.bf16 && nibble < 2) {
        // Sign, exponent and mantissa are as far from each other as in f16.
        (word << comptime!(3 * nibble)) & 0x8e00_8e00u32
    } else {
        let sign = comptime!([0u32, 3, 1, 2][nibble as usize]);
        // The place of the lowest bit in f16, or in bf16.
        let (by, mask) = comptime!(if config.bf16 {
            (3 * nibble as i32 - 3, 0x01c0_01c0u32)
        } else {
            (3 * nibble as i32, 0x0e00_0e00)
        });
        lop3_and_or(
            shifted(word, by),
            mask,
            (word << sign) & 0x8000_8000u32,
            false,
        )
    };
    lifted(pair, config)
}

/// Shifts a word left by `by` bits, or right if `by` is negative.
#[cube]
pub(crate) fn shifted(word: u32, #[comptime] by: i32) -> u32 {
    if comptime!(by >= 0) {
        word << comptime!(by as u32)
    } else {
        word >> comptime!(by.unsigned_abs())
    }
}

/// Returns the numbers of two e4m3 values of a word, bytes 0 and 2 or (`upper`) bytes 1 and 3: 4
/// and 3 instructions for the two pairs, and one to lift each pair. With an instruction from e4m3,
/// one for each pair and one for both.
#[cube]
pub(super) fn e4m3_pair(word: u32, #[comptime] upper: bool, #[comptime] config: Config) -> u32 {
    if comptime!(config.conversion() == Conversion::E4m3ToF16ByCvt) {
        let pairs = prmt(word, word, 0x3120u32);
        cvt_f16x2_e4m3(pairs, upper)
    } else {
        e4m3_pair_by_masks(word, upper, config)
    }
}

/// Returns a pair as [`e4m3_pair`] does, by shifts and masks.
#[cube]
fn e4m3_pair_by_masks(word: u32, #[comptime] upper: bool, #[comptime] config: Config) -> u32 {
    // The distance to the lowest bit of f16, or of bf16.
    let (by, mask) = comptime!(match (config.bf16, upper) {
        (false, true) => (-1i32, 0x3f80_3f80u32),
        (false, false) => (7, 0x3f80_3f80),
        (true, true) => (-4, 0x07f0_07f0),
        (true, false) => (4, 0x07f0_07f0),
    });
    let sign = shifted(word, comptime!(if upper { 0i32 } else { 8 })) & 0x8000_8000u32;
    lifted(
        lop3_and_or(shifted(word, by), mask, sign, comptime!(stays(&config))),
        config,
    )
}

/// Returns true if the compiler must not move the last instruction of a pair beyond the
/// `wgmma_fence` before which the pair must be available.
fn stays(config: &Config) -> bool {
    config.tile.is_wgmma() && config.lifts_sums()
}

/// Multiplies a pair by its power of two, unless the sums are.
#[cube]
fn lifted(pair: u32, #[comptime] config: Config) -> u32 {
    let lift = comptime!(config.conversion().lift());
    if comptime!(config.lifts_sums() || !config.conversion().needs_lift()) {
        pair
    } else if comptime!(config.bf16) {
        // Adding -0 changes no product, including -0.
        fma_bf16x2(pair, lift.runtime(), 0x8000_8000u32.runtime())
    } else {
        mul_f16x2(pair, lift.runtime())
    }
}
