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
#[cfg(doc)]
use super::conversion::Conversion;
use crate::ptx::{and_here, fma_bf16x2, lop3_and_or, lop3_select, mul_f16x2, prmt};
use cubecl::prelude::*;

/// Returns the numbers of two e2m1 values of a word, nibbles `nibble` and `nibble + 4` before
/// [`scatter_bits`](marlin_format::layout::scatter_bits) moved their bits: 1, 2, 4 and 4 instructions
/// for the four pairs in f16, 3, 3, 4 and 4 in bf16, and one to lift each pair.
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

/// Returns the e4m3 codes of two words, in the order of fragment A of a product of e4m3: the bytes of
/// the first number are the first value of the lower and upper half of `first`, then of `second`,
/// those of the second number the second values. 7 instructions.
///
/// [`scatter_bits`](marlin_format::layout::scatter_bits) moved the bits of a half:
///
/// | bits | 15 | 14 | 13 to 7 | 6 to 0 |
/// |---|---|---|---|---|
/// | hold | sign of the first | sign of the second | the rest of the first | the rest of the second |
#[cube]
pub(crate) fn e4m3_codes(first: u32, second: u32) -> (u32, u32) {
    let upper = prmt(first, second, 0x7531u32);
    let lower = prmt(first, second, 0x6420u32);
    let shifted = upper << 1u32;
    let low = lop3_select(upper, shifted, 0x8080_8080u32);
    (
        lop3_select(low, lower >> 7u32, 0xfefe_fefeu32),
        lop3_select(shifted, lower, 0x8080_8080u32),
    )
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

/// Returns the numbers of two e4m3 values of a word, bytes 0 and 1 or (`second`) bytes 2 and 3 before
/// [`scatter_bits`](marlin_format::layout::scatter_bits) moved their bits: 1 and 4 instructions for
/// the two pairs in f16, 3 and 4 in bf16, and one to lift each pair.
#[cube]
pub(super) fn e4m3_pair(word: u32, #[comptime] second: bool, #[comptime] config: Config) -> u32 {
    let stays = comptime!(stays(&config));
    let pair = if comptime!(!config.bf16 && !second) {
        // Sign, exponent and mantissa are where f16 has them.
        if comptime!(stays) {
            and_here(word, 0xbf80_bf80u32.runtime())
        } else {
            word & 0xbf80_bf80u32
        }
    } else {
        // The distance to the lowest bit of f16, or of bf16.
        let (by, mask) = comptime!(match (config.bf16, second) {
            (false, _) => (7i32, 0x3f80_3f80u32),
            (true, false) => (-3, 0x07f0_07f0),
            (true, true) => (4, 0x07f0_07f0),
        });
        let sign = (word << comptime!(u32::from(second))) & 0x8000_8000u32;
        lop3_and_or(shifted(word, by), mask, sign, stays)
    };
    lifted(pair, config)
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
    if comptime!(config.lifts_sums()) {
        pair
    } else if comptime!(config.bf16) {
        // Adding -0 changes no product, including -0.
        fma_bf16x2(pair, lift.runtime(), 0x8000_8000u32.runtime())
    } else {
        mul_f16x2(pair, lift.runtime())
    }
}
