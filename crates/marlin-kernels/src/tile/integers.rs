//! Conversion of packed integers of 4 and 8 bits to pairs of f16 or bf16, in registers: the values
//! less their zero points, without rounding.

use super::config::Config;
use super::conversion::Conversion;
use super::fragment::Group;
use super::sizes::NibbleMasks;
use crate::ptx::{cvt_halves, fma_bf16x2, fma_f16x2, prmt, prmt_duplicate_half, sub_f16x2};
use cubecl::prelude::*;

/// Returns the zero points of the lane's columns `groupID` and `groupID + 8` of sub-tile `j`, each
/// in both halves of a register. The first is in bits 0 to 3 of each half. The second is in bits 4
/// to 7 for f16, the position of the weights' nibbles, and in bits 0 to 3 for bf16.
#[cube]
pub(super) fn zero_pairs(
    group: &Group,
    masks: &NibbleMasks,
    #[comptime] j: usize,
    #[comptime] config: Config,
) -> (u32, u32) {
    if comptime!(config.zero_points) {
        // Both halves hold the zero points of four columns, so one mask selects a column's zero
        // point in both.
        let four = prmt_duplicate_half(group.zeros, comptime!(j >= 2));
        let two = if comptime!(j % 2 == 0) {
            four
        } else {
            four >> 8u32
        };
        let high = match comptime!(config.conversion()) {
            Conversion::Int4ToBf16 => (two >> 4u32) & masks.low,
            _ => two & masks.high,
        };
        (two & masks.low, high)
    } else {
        let high = comptime!(match config.conversion() {
            Conversion::Int4ToBf16 => 0x0008_0008u32,
            _ => 0x0080_0080,
        });
        (0x0008_0008u32.runtime(), high.runtime())
    }
}

/// Returns q - z of nibbles 0 and 4, and of nibbles 1 and 5, without rounding.
///
/// 0x6400 is 1024 in f16, where the lowest mantissa bit has the value 1. A nibble in bits 0 to 3
/// gives 1024 + q, in bits 4 to 7 it gives 1024 + 16q. One instruction for a pair computes (1024 +
/// q) - (1024 + z), or (1024 + 16q) / 16 - (64 + z).
#[cube]
pub(super) fn f16_pairs(
    word: u32,
    low_zero: u32,
    high_zero: u32,
    masks: &NibbleMasks,
) -> (u32, u32) {
    let low = (word & masks.low) | 0x6400_6400u32;
    let high = (word & masks.high) | 0x6400_6400u32;
    // 64 is 0x5400 in f16, where the lowest mantissa bit has the value 1/16, so z in bits 4 to 7
    // gives 64 + z. 0xd400 is -64, and 0x2c00 is 1/16.
    (
        sub_f16x2(low, low_zero | 0x6400_6400u32),
        fma_f16x2(high, 0x2c00_2c00u32.runtime(), high_zero | 0xd400_d400u32),
    )
}

/// Returns q - z of nibbles 0 and 4, without rounding. 0x4300 is 128 in bf16, where the lowest
/// mantissa bit has the value 1; 0xc300 is -128, and 0x3f80 is 1.
#[cube]
pub(super) fn bf16_pair(word: u32, low_zero: u32, masks: &NibbleMasks) -> u32 {
    fma_bf16x2(
        (word & masks.low) | 0x4300_4300u32,
        0x3f80_3f80u32.runtime(),
        low_zero | 0xc300_c300u32,
    )
}

/// Returns the numbers to subtract from the bytes of columns `groupID` and `groupID + 8` of
/// sub-tile `j`: 1024 + z as a pair of f16, or 2^23 + z as an f32 for bf16.
#[cube]
pub(super) fn byte_zeros(
    group: &Group,
    #[comptime] j: usize,
    #[comptime] config: Config,
) -> (u32, u32) {
    if comptime!(config.zero_points) {
        let zeros = if comptime!(j < 2) {
            group.zeros
        } else {
            group.more_zeros
        };
        let first = comptime!(2 * (j as u32 % 2));
        match comptime!(config.conversion()) {
            Conversion::Int8ToBf16 => {
                let magic = 0x4b00_0000u32.runtime();
                (
                    prmt(zeros, magic, comptime!(0x7440 + first)),
                    prmt(zeros, magic, comptime!(0x7441 + first)),
                )
            }
            _ => {
                let magic = 0x6464_6464u32.runtime();
                (
                    prmt(zeros, magic, comptime!(0x4040 + 0x0101 * first)),
                    prmt(zeros, magic, comptime!(0x4141 + 0x0101 * first)),
                )
            }
        }
    } else {
        let middle = comptime!(match config.conversion() {
            Conversion::Int8ToBf16 => 0x4b00_0080u32,
            _ => 0x6480_6480,
        });
        (middle.runtime(), middle.runtime())
    }
}

/// Returns q - z of bytes `first` and `first + 1` of a word, without rounding.
///
/// 0x6400 is 1024 in f16, where the lowest mantissa bit has the value 1. A half with 0x64 above a
/// byte is 1024 + q, and one instruction subtracts 1024 + z from both halves. bf16 has too few
/// mantissa bits for that: there a byte becomes the lowest bits of the f32 2^23 + q, where 2^23 is
/// 0x4b000000. The difference, which fits in bf16's eight significant bits, is converted.
#[cube]
pub(super) fn byte_pair(
    word: u32,
    zero: u32,
    #[comptime] first: usize,
    #[comptime] config: Config,
) -> u32 {
    let first = comptime!(first as u32);
    match comptime!(config.conversion()) {
        Conversion::Int8ToBf16 => {
            let magic = 0x4b00_0000u32.runtime();
            let low = f32::reinterpret(prmt(word, magic, comptime!(0x7440 + first)))
                - f32::reinterpret(zero);
            let high = f32::reinterpret(prmt(word, magic, comptime!(0x7441 + first)))
                - f32::reinterpret(zero);
            cvt_halves(low, high, true)
        }
        _ => sub_f16x2(
            prmt(
                word,
                0x6464_6464u32.runtime(),
                comptime!(0x4140 + 0x0101 * first),
            ),
            zero,
        ),
    }
}
