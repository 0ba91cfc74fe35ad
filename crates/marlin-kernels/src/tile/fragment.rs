//! From packed words to fragments, in registers.

use super::config::Config;
use super::lengths::NibbleMasks;
use crate::ptx::{
    F4, U4, and_here, cvt_halves, fma_bf16x2, fma_f16x2, half_to_f32, lane, ld_shared_2,
    ld_shared_4, ld_shared_8, ld_shared_16, mul_f16x2, opaque, prmt, prmt_duplicate_half,
    sub_f16x2,
};
use cubecl::prelude::*;
use marlin_format::{Bits, GroupSize};

/// Scales and zero points of a warp's columns, 64 or 32, in one group: a lane's eight columns, or
/// four, are `groupID + 8i`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Group {
    /// Eight scales, column `groupID + 8i` in half `i % 2` of register `i / 2`. Not read where
    /// scales are applied at the end.
    pub scales: U4,
    /// Eight zero points, column `groupID + 8i` in nibble `i`; of 8 bits the first four, in bytes.
    pub zeros: u32,
    /// Of 8 bits the last four zero points.
    pub more_zeros: u32,
}

/// Reads a lane's scales and zero points of a group from the stage.
#[cube]
pub(crate) fn load_group(scales: u32, zeros: u32, #[comptime] config: Config) -> Group {
    let group_id = lane() / 4;
    let scales = if comptime!(config.grouped()) {
        lane_words(scales + group_id * 16, config)
    } else {
        U4::new(0u32)
    };
    if comptime!(!config.zero_points) {
        Group {
            scales,
            zeros: 0x8888_8888u32.runtime(),
            more_zeros: 0u32.runtime(),
        }
    } else if comptime!(config.bits == Bits::Four) {
        let zeros = zeros + group_id * 4;
        let zeros = if comptime!(config.tile.sub_tiles() == 4) {
            ld_shared_4(zeros)
        } else {
            ld_shared_2(zeros)
        };
        Group {
            scales,
            zeros,
            more_zeros: 0u32.runtime(),
        }
    } else if comptime!(config.tile.sub_tiles() == 2) {
        Group {
            scales,
            zeros: ld_shared_4(zeros + group_id * 8),
            more_zeros: 0u32.runtime(),
        }
    } else {
        let both = ld_shared_8(zeros + group_id * 8);
        Group {
            scales,
            zeros: both.extract(0usize),
            more_zeros: both.extract(1usize),
        }
    }
}

/// Reads a lane's word of each of its warp's sub-tiles.
#[cube]
fn lane_words(address: u32, #[comptime] config: Config) -> U4 {
    if comptime!(config.tile.sub_tiles() == 4) {
        ld_shared_16(address)
    } else {
        let two = ld_shared_8(address);
        let mut words = U4::new(0u32);
        words.insert(0usize, two.extract(0usize));
        words.insert(1usize, two.extract(1usize));
        words
    }
}

/// Reads a lane's words of a step from the stage, where rows of tiles are `row` bytes apart, into
/// one of the two sets that alternate.
#[cube]
pub(crate) fn load_words(
    sets: &mut Array<U4>,
    words: u32,
    #[comptime] step: usize,
    #[comptime] row: u32,
    #[comptime] config: Config,
) {
    let tiles = comptime!(config.tiles_in_step());
    #[unroll]
    for i in 0..tiles {
        sets[comptime!(step % 2 * tiles + i)] =
            lane_words(words + comptime!((step * tiles + i) as u32 * row), config);
    }
}

/// A lane's word of sub-tile `j` in the first and in the last tile of a step, which of 4 bits are
/// one.
#[cube]
pub(crate) fn sub_tile(
    sets: &Array<U4>,
    #[comptime] step: usize,
    #[comptime] j: usize,
    #[comptime] config: Config,
) -> (u32, u32) {
    let tiles = comptime!(config.tiles_in_step());
    (
        sets[comptime!(step % 2 * tiles)].extract(j),
        sets[comptime!(step % 2 * tiles + tiles - 1)].extract(j),
    )
}

/// The fragment A of `mma.m16n8k16`, 16 columns of the weight by 16 rows of K, from one word of
/// [`MarlinLayout`](marlin_format::layout::MarlinLayout): the values as they are stored, in other
/// units for the two halves of the columns.
///
/// With `groupID = lane / 4` and `t = lane % 4`, register by register (PTX ISA, "Matrix Fragments
/// for mma.m16n8k16"):
///
/// | register | row of A: column of the weight | column of A: row of K | nibbles | f16 holds | bf16 holds |
/// |---|---|---|---|---|---|
/// | 0 | `groupID`     | `2t`, `2t + 1`     | 0, 4 | q / 2^24 | 128 + q |
/// | 1 | `groupID + 8` | `2t`, `2t + 1`     | 1, 5 | q / 2^20 | 128 + q |
/// | 2 | `groupID`     | `2t + 8`, `2t + 9` | 2, 6 | q / 2^24 | 128 + q |
/// | 3 | `groupID + 8` | `2t + 8`, `2t + 9` | 3, 7 | q / 2^20 | 128 + q |
///
/// A nibble in the lowest bits of an f16 is a subnormal number, which tensor cores multiply like
/// any other: one `and` makes a pair of weights. bf16 has too few bits and too small subnormals for
/// that: there a nibble is the end of 128 + q. [`stored_ones`] is 1 in the same units,
/// [`column_zeros`] the factor that subtracts the zero points from a group's sums.
///
/// `is_fixed` keeps the masking where it is written: see [`and_here`].
#[cube]
pub(crate) fn stored(
    word: u32,
    masks: &NibbleMasks,
    #[comptime] is_fixed: bool,
    #[comptime] config: Config,
) -> U4 {
    let mut fragment = U4::new(0u32);
    #[unroll]
    for half in 0..2usize {
        let word = word >> comptime!(8 * half as u32);
        if comptime!(config.bf16) {
            fragment.insert(comptime!(2 * half), (word & masks.low) | 0x4300_4300u32);
            fragment.insert(
                comptime!(2 * half + 1),
                ((word >> 4u32) & masks.low) | 0x4300_4300u32,
            );
        } else if comptime!(is_fixed) {
            fragment.insert(comptime!(2 * half), and_here(word, masks.low));
            fragment.insert(comptime!(2 * half + 1), and_here(word, masks.high));
        } else {
            fragment.insert(comptime!(2 * half), word & masks.low);
            fragment.insert(comptime!(2 * half + 1), word & masks.high);
        }
    }
    fragment
}

/// The fragment A of ones, in the units of [`stored`]: its products are the sums of the
/// activations.
///
/// `is_held` keeps it in registers; otherwise the compiler rematerialises it at every use.
#[cube]
pub(crate) fn stored_ones(#[comptime] is_held: bool, #[comptime] config: Config) -> U4 {
    let (low, high) = comptime!(if config.bf16 {
        (0x3f80_3f80u32, 0x3f80_3f80u32)
    } else {
        (0x0001_0001, 0x0010_0010)
    });
    let mut ones = U4::new(low);
    ones.insert(1usize, high);
    ones.insert(3usize, high);
    if comptime!(is_held) {
        #[unroll]
        for i in 0..4usize {
            ones.insert(
                i,
                opaque(comptime!(if i % 2 == 0 { low } else { high }).runtime()),
            );
        }
    }
    ones
}

/// The factors of sums in the units of [`stored`] at the end: for columns of `groupID`, and of
/// `groupID + 8`.
pub(crate) fn stored_units(config: &Config) -> (f32, f32) {
    if config.multiplies_stored() && !config.bf16 {
        (16_777_216.0, 1_048_576.0)
    } else {
        (1.0, 1.0)
    }
}

/// The scales of an accumulator's four elements.
#[cube]
pub(crate) fn column_scales(group: &Group, #[comptime] j: usize, #[comptime] config: Config) -> F4 {
    let pair = group.scales.extract(j);
    let (first, second) = (
        half_to_f32(pair, false, config.bf16),
        half_to_f32(pair, true, config.bf16),
    );
    let mut scale = F4::new(first);
    scale.insert(2usize, second);
    scale.insert(3usize, second);
    scale
}

/// The factors of the activations' sums in an accumulator of [`stored`] weights: the negative zero
/// points of its four elements.
#[cube]
pub(crate) fn column_zeros(group: &Group, #[comptime] j: usize, #[comptime] config: Config) -> F4 {
    if comptime!(config.zero_points) {
        // 0x4b000000 is 2^23, whose last bit is 1.
        let offset = comptime!(if config.bf16 {
            8_388_608.0f32 - 128.0
        } else {
            8_388_608.0
        });
        let low = offset
            - f32::reinterpret(((group.zeros >> comptime!(8 * j as u32)) & 15u32) | 0x4b00_0000u32);
        let high = offset
            - f32::reinterpret(
                ((group.zeros >> comptime!(8 * j as u32 + 4)) & 15u32) | 0x4b00_0000u32,
            );
        let mut zero = F4::new(low);
        zero.insert(2usize, high);
        zero.insert(3usize, high);
        zero
    } else {
        F4::new(comptime!(if config.bf16 { -136.0f32 } else { -8.0 }))
    }
}

/// The fragment A of `mma.m16n8k16` from the words of [`sub_tile`] `j`, in the ownership of
/// [`stored`]: the weights q - z, times their scales where sums are not scaled instead.
#[cube]
pub(crate) fn dequantize(
    words: (u32, u32),
    group: &Group,
    masks: &NibbleMasks,
    #[comptime] j: usize,
    #[comptime] config: Config,
) -> U4 {
    let mut fragment = U4::new(0u32);
    let (low_zero, high_zero) = if comptime!(config.bits == Bits::Four) {
        zero_pairs(group, masks, j, config)
    } else {
        byte_zeros(group, j, config)
    };
    #[unroll]
    for half in 0..2usize {
        let (low, high) = if comptime!(config.bits == Bits::Eight) {
            let word = if comptime!(half == 0) {
                words.0
            } else {
                words.1
            };
            (
                byte_pair(word, low_zero, 0usize, config),
                byte_pair(word, high_zero, 2usize, config),
            )
        } else {
            let word = words.0 >> comptime!(8 * half as u32);
            if comptime!(config.bf16) {
                (
                    bf16_pair(word, low_zero, masks),
                    bf16_pair(word >> 4u32, high_zero, masks),
                )
            } else {
                f16_pairs(word, low_zero, high_zero, masks)
            }
        };
        let (low, high) = if comptime!(config.grouped() && !config.scales_sums()) {
            let pair = group.scales.extract(j);
            (
                scaled(low, prmt_duplicate_half(pair, false), config),
                scaled(high, prmt_duplicate_half(pair, true), config),
            )
        } else {
            (low, high)
        };
        fragment.insert(comptime!(2 * half), low);
        fragment.insert(comptime!(2 * half + 1), high);
    }
    fragment
}

/// The zero points of the lane's columns `groupID` and `groupID + 8` of sub-tile `j`, each twice:
/// the first in bits 0 to 3 of each half, the second in bits 4 to 7 for f16, where the weights'
/// nibbles are, and in bits 0 to 3 for bf16.
#[cube]
fn zero_pairs(
    group: &Group,
    masks: &NibbleMasks,
    #[comptime] j: usize,
    #[comptime] config: Config,
) -> (u32, u32) {
    if comptime!(config.zero_points) {
        // Four columns' zero points in both halves: one mask takes a column's from both.
        let four = prmt_duplicate_half(group.zeros, comptime!(j >= 2));
        let two = if comptime!(j % 2 == 0) {
            four
        } else {
            four >> 8u32
        };
        let high = if comptime!(config.bf16) {
            (two >> 4u32) & masks.low
        } else {
            two & masks.high
        };
        (two & masks.low, high)
    } else {
        (
            0x0008_0008u32.runtime(),
            comptime!(if config.bf16 {
                0x0008_0008u32
            } else {
                0x0080_0080
            })
            .runtime(),
        )
    }
}

/// q - z of the nibbles 0 and 4, and of the nibbles 1 and 5: exact.
///
/// 0x6400 is 1024 in f16, whose last bit is 1: or-ing a nibble into bits 0 to 3 gives 1024 + q,
/// into bits 4 to 7 gives 1024 + 16q. One instruction subtracts from both: (1024 + q) - (1024 + z),
/// and (1024 + 16q) / 16 - (64 + z).
#[cube]
fn f16_pairs(word: u32, low_zero: u32, high_zero: u32, masks: &NibbleMasks) -> (u32, u32) {
    let low = (word & masks.low) | 0x6400_6400u32;
    let high = (word & masks.high) | 0x6400_6400u32;
    // 64 is 0x5400 in f16 and its last bit is 1/16, so z in bits 4 to 7 makes it 64 + z; 0xd400 is
    // -64. 0x2c00 is 1/16.
    (
        sub_f16x2(low, low_zero | 0x6400_6400u32),
        fma_f16x2(high, 0x2c00_2c00u32.runtime(), high_zero | 0xd400_d400u32),
    )
}

/// q - z of the nibbles 0 and 4: exact. 0x4300 is 128 in bf16, whose last bit is 1; 0xc300 is -128
/// and 0x3f80 is 1.
#[cube]
fn bf16_pair(word: u32, low_zero: u32, masks: &NibbleMasks) -> u32 {
    fma_bf16x2(
        (word & masks.low) | 0x4300_4300u32,
        0x3f80_3f80u32.runtime(),
        low_zero | 0xc300_c300u32,
    )
}

/// The number to subtract from the bytes of columns `groupID` and `groupID + 8` of sub-tile `j`:
/// 1024 + z as a pair of f16, or 2^23 + z as an f32.
#[cube]
fn byte_zeros(group: &Group, #[comptime] j: usize, #[comptime] config: Config) -> (u32, u32) {
    if comptime!(config.zero_points) {
        let zeros = if comptime!(j < 2) {
            group.zeros
        } else {
            group.more_zeros
        };
        let first = comptime!(2 * (j as u32 % 2));
        if comptime!(config.bf16) {
            let magic = 0x4b00_0000u32.runtime();
            (
                prmt(zeros, magic, comptime!(0x7440 + first)),
                prmt(zeros, magic, comptime!(0x7441 + first)),
            )
        } else {
            let magic = 0x6464_6464u32.runtime();
            (
                prmt(zeros, magic, comptime!(0x4040 + 0x0101 * first)),
                prmt(zeros, magic, comptime!(0x4141 + 0x0101 * first)),
            )
        }
    } else {
        let middle = comptime!(if config.bf16 {
            0x4b00_0080u32
        } else {
            0x6480_6480
        });
        (middle.runtime(), middle.runtime())
    }
}

/// q - z of bytes `first` and `first + 1` of a word: exact.
///
/// 0x6400 is 1024 in f16, whose last bit is 1, so a byte below 0x64 is 1024 + q: one instruction
/// takes 1024 + z from both. bf16 has too few bits for that; there a byte is the end of the f32
/// 2^23 + q, which is 0x4b000000, and the difference, which fits bf16's eight bits, is converted.
#[cube]
fn byte_pair(word: u32, zero: u32, #[comptime] first: usize, #[comptime] config: Config) -> u32 {
    let first = comptime!(first as u32);
    if comptime!(config.bf16) {
        let magic = 0x4b00_0000u32.runtime();
        let low =
            f32::reinterpret(prmt(word, magic, comptime!(0x7440 + first))) - f32::reinterpret(zero);
        let high =
            f32::reinterpret(prmt(word, magic, comptime!(0x7441 + first))) - f32::reinterpret(zero);
        cvt_halves(low, high, true)
    } else {
        sub_f16x2(
            prmt(
                word,
                0x6464_6464u32.runtime(),
                comptime!(0x4140 + 0x0101 * first),
            ),
            zero,
        )
    }
}

/// A pair of weights times a pair of scales.
#[cube]
fn scaled(pair: u32, scale: u32, #[comptime] config: Config) -> u32 {
    if comptime!(config.bf16) {
        // Adding -0 changes no product, not even one of -0.
        fma_bf16x2(pair, scale, 0x8000_8000u32.runtime())
    } else {
        mul_f16x2(pair, scale)
    }
}

/// The group of a chunk's part `i`: a chunk has one group or, where groups have fewer rows,
/// several.
#[cube]
pub(crate) fn group_of(chunk: u32, i: u32, #[comptime] config: Config) -> u32 {
    if comptime!(config.group == GroupSize::Channel) {
        0u32.runtime()
    } else if comptime!(config.groups_in_chunk() > 1) {
        chunk * comptime!(config.groups_in_chunk() as u32) + i
    } else {
        chunk / comptime!((config.group.rows(0) / config.tile.chunk_rows()) as u32)
    }
}
