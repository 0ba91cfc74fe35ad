//! Conversion of packed words to fragments, in registers.

use super::config::Config;
use super::conversion::Conversion;
use super::floats::{e2m1_pair, e4m3_pair};
use super::integers::{bf16_pair, byte_pair, byte_zeros, f16_pairs, zero_pairs};
use super::sizes::NibbleMasks;
use crate::ptx::{
    F4, U4, and_here, fma_bf16x2, half_to_f32, lane, ld_shared_2, ld_shared_4, ld_shared_8,
    ld_shared_16, mul_f16x2, opaque, prmt_duplicate_half,
};
use cubecl::prelude::*;
use marlin_format::{GroupSize, WeightValue};

/// The scales and zero points of a warp's 64 or 32 columns in one group. A lane holds those of
/// eight or four columns, `groupID + 8i`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Group {
    /// Eight scales, column `groupID + 8i` in half `i % 2` of register `i / 2`. They are not read
    /// if scales are applied at the end.
    pub scales: U4,
    /// Eight zero points, column `groupID + 8i` in nibble `i`. With 8 bits, the first four zero
    /// points, in bytes.
    pub zeros: u32,
    /// The last four zero points; used with 8 bits only.
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
    } else if comptime!(config.value == WeightValue::Int4) {
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

/// Reads a lane's words of a step from the stage into one of two alternating sets of registers.
/// Rows of tiles are `row` bytes apart in the stage.
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

/// Returns a lane's words of sub-tile `j` in the first and in the last tile of a step: of 8-bit
/// integers, the first and the last rows, of e4m3, the first and the last columns. With 4 bits a
/// step has one tile, so both words are the same.
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

/// Returns fragment A of `mma.m16n8k16`, 16 columns of the weight by 16 rows of K, from one word of
/// [`MarlinLayout`](marlin_format::layout::MarlinLayout). The fragment holds the stored values, in
/// different units for the two halves of the columns.
///
/// With `groupID = lane / 4` and `t = lane % 4`, the registers hold (PTX ISA, "Matrix Fragments for
/// mma.m16n8k16"):
///
/// | register | row of A: column of the weight | column of A: row of K | nibbles | f16 holds | bf16 holds |
/// |---|---|---|---|---|---|
/// | 0 | `groupID`     | `2t`, `2t + 1`     | 0, 4 | q / 2^24 | 128 + q |
/// | 1 | `groupID + 8` | `2t`, `2t + 1`     | 1, 5 | q / 2^20 | 128 + q |
/// | 2 | `groupID`     | `2t + 8`, `2t + 9` | 2, 6 | q / 2^24 | 128 + q |
/// | 3 | `groupID + 8` | `2t + 8`, `2t + 9` | 3, 7 | q / 2^20 | 128 + q |
///
/// A nibble in the lowest bits of an f16 is a subnormal number, which tensor cores multiply like
/// any other number, so one `and` makes a pair of weights. bf16 has too few mantissa bits and too
/// small subnormals for that, so a nibble becomes the lowest bits of 128 + q. [`stored_ones`] is 1
/// in the same units. [`column_zeros`] is the factor that subtracts the zero points from a group's
/// sums.
///
/// If `is_fixed`, the compiler does not move the masking: see [`and_here`].
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
        match comptime!(config.conversion()) {
            Conversion::Int4ToBf16 => {
                fragment.insert(comptime!(2 * half), (word & masks.low) | 0x4300_4300u32);
                fragment.insert(
                    comptime!(2 * half + 1),
                    ((word >> 4u32) & masks.low) | 0x4300_4300u32,
                );
            }
            _ => {
                if comptime!(is_fixed) {
                    fragment.insert(comptime!(2 * half), and_here(word, masks.low));
                    fragment.insert(comptime!(2 * half + 1), and_here(word, masks.high));
                } else {
                    fragment.insert(comptime!(2 * half), word & masks.low);
                    fragment.insert(comptime!(2 * half + 1), word & masks.high);
                }
            }
        }
    }
    fragment
}

/// Returns a fragment A of ones, in the units of [`stored`]. Its products are the sums of the
/// activations.
///
/// If `is_held`, the fragment stays in registers; otherwise the compiler rematerialises it at every
/// use.
#[cube]
pub(crate) fn stored_ones(#[comptime] is_held: bool, #[comptime] config: Config) -> U4 {
    let (low, high) = comptime!(config.conversion().stored_ones());
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

/// Returns the factors that convert final sums from the units of [`stored`], or of floats that are
/// not [lifted](Config::lifts_sums), for columns `groupID` and `groupID + 8`.
pub(crate) fn stored_units(config: &Config) -> (f32, f32) {
    if config.multiplies_subnormals() {
        config.conversion().stored_units()
    } else if config.lifts_sums() {
        let lift = config.conversion().lift_of_sums();
        (lift, lift)
    } else {
        (1.0, 1.0)
    }
}

/// Returns the scales of an accumulator's four elements.
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

/// Returns the factors of the activations' sums that subtract the zero points from an accumulator
/// of [`stored`] weights: the negative zero points of its four elements, less 128 in bf16.
#[cube]
pub(crate) fn column_zeros(group: &Group, #[comptime] j: usize, #[comptime] config: Config) -> F4 {
    if comptime!(config.zero_points) {
        // 0x4b000000 is 2^23, whose last bit is 1.
        let offset = comptime!(8_388_608.0f32 - config.conversion().stored_offset());
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
        F4::new(comptime!(-8.0f32 - config.conversion().stored_offset()))
    }
}

/// Returns fragment A of `mma.m16n8k16` from the words of [`sub_tile`] `j`, with the registers of
/// [`stored`]: the weights q - z or the floats, multiplied by their scales unless the sums are
/// scaled.
#[cube]
pub(crate) fn dequantize(
    words: (u32, u32),
    group: &Group,
    masks: &NibbleMasks,
    #[comptime] j: usize,
    #[comptime] config: Config,
) -> U4 {
    let mut fragment = U4::new(0u32);
    let (low_zero, high_zero) = if comptime!(config.value == WeightValue::Int4) {
        zero_pairs(group, masks, j, config)
    } else if comptime!(config.value == WeightValue::Int8) {
        byte_zeros(group, j, config)
    } else {
        (0u32.runtime(), 0u32.runtime())
    };
    #[unroll]
    for half in 0..2usize {
        let (low, high) = match comptime!(config.conversion()) {
            Conversion::Int4ToF16 => {
                let word = words.0 >> comptime!(8 * half as u32);
                f16_pairs(word, low_zero, high_zero, masks)
            }
            Conversion::Int4ToBf16 => {
                let word = words.0 >> comptime!(8 * half as u32);
                (
                    bf16_pair(word, low_zero, masks),
                    bf16_pair(word >> 4u32, high_zero, masks),
                )
            }
            Conversion::Int8ToF16 | Conversion::Int8ToBf16 => {
                let word = if comptime!(half == 0) {
                    words.0
                } else {
                    words.1
                };
                (
                    byte_pair(word, low_zero, 0usize, config),
                    byte_pair(word, high_zero, 2usize, config),
                )
            }
            Conversion::E2m1ToF16 | Conversion::E2m1ToBf16 => (
                e2m1_pair(words.0, comptime!(2 * half as u32), config),
                e2m1_pair(words.0, comptime!(2 * half as u32 + 1), config),
            ),
            Conversion::E4m3ToF16 | Conversion::E4m3ToF16ByCvt | Conversion::E4m3ToBf16 => (
                e4m3_pair(words.0, comptime!(half == 1), config),
                e4m3_pair(words.1, comptime!(half == 1), config),
            ),
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

/// Returns a pair of weights multiplied by a pair of scales.
#[cube]
fn scaled(pair: u32, scale: u32, #[comptime] config: Config) -> u32 {
    if comptime!(config.bf16) {
        // Adding -0 changes no product, including -0.
        fma_bf16x2(pair, scale, 0x8000_8000u32.runtime())
    } else {
        mul_f16x2(pair, scale)
    }
}

/// Returns the group of part `i` of a chunk. A chunk has several groups if groups have fewer rows
/// than a chunk; otherwise it has one.
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
