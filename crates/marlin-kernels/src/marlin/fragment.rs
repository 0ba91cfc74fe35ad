//! From packed words to multiplied fragments, in registers.

use super::config::{CHUNK_N, Config};
use super::kernel::Lengths;
use crate::ptx::{
    F4, U4, and_here, duplicate_half, fma_bf16x2, fma_f16x2, half_to_f32, lane, load_matrix_x4, load_shared_4, load_shared_16, mma,
    mul_f16x2, opaque, sub_f16x2,
};
use cubecl::prelude::*;

/// Adds the products of a warp's chunk to its sums. `sums[j * batch_tiles + b]` are the columns `16j..16j + 16` of the warp's 64 and the rows
/// `8b..8b + 8`, in the ownership of `mma.m16n8k16`'s accumulators:
///
/// | element | column in 16 | row in 8 |
/// |---|---|---|
/// | 0, 1 | `lane / 4`     | `2 (lane % 4)`, `2 (lane % 4) + 1` |
/// | 2, 3 | `lane / 4 + 8` | `2 (lane % 4)`, `2 (lane % 4) + 1` |
#[cube]
pub(super) fn multiply(stage: u32, sums: &mut Array<F4>, ones: U4, lengths: &Lengths, #[comptime] config: Config) {
    let lane = lane();
    let warp = UNIT_POS_X / 32;
    let words = stage + warp * 2048 + lane * 16;
    let scales = stage + comptime!(config.scales_offset() as u32) + warp * comptime!(config.scales_bytes() as u32);
    let zeros = stage + comptime!(config.zeros_offset() as u32) + warp * comptime!(config.zeros_bytes() as u32);

    // Lane 8i + r addresses row r of the matrix i that ldmatrix.x4 loads. With one batch tile the four matrices are 32 rows of K; with
    // more, they are 16 rows of K of two batch tiles.
    let batch_tiles = comptime!(config.tile.batch_tiles);
    let matrix = lane / 8;
    let (row, run) = if comptime!(batch_tiles == 1) { (lane % 8, matrix) } else { (lane % 8 + matrix / 2 * 8, matrix % 2) };
    let runs = comptime!((config.tile.depth() / 8) as u32);
    let activations = comptime!(config.activations_offset() as u32) + (row * runs + warp / comptime!(config.tile.warps_n as u32) * 8) * 16;
    let swizzle = run ^ (lane % 8);

    // The next step's fragments are loaded while this step's are multiplied.
    let mut b = Array::<u32>::new(comptime!(if batch_tiles == 1 { 8 } else { 4 * batch_tiles }));
    let mut a_words = Array::<U4>::new(2usize);
    let mut group_sums = Array::<F4>::new(comptime!(4 * batch_tiles));
    // Sums of the activations themselves.
    let mut x_sums = Array::<F4>::new(batch_tiles);
    a_words[0] = load_shared_16(words);
    load_activations(stage + activations, swizzle, &mut b, 0usize, config);
    #[unroll]
    for part in 0..comptime!(config.groups_in_chunk()) {
        let group = load_group(scales + comptime!((part * CHUNK_N * 2) as u32), zeros + comptime!((part * CHUNK_N / 2) as u32), config);
        #[unroll]
        for in_part in 0..comptime!(4 / config.groups_in_chunk()) {
            let step = comptime!(part * 4 / config.groups_in_chunk() + in_part);
            let is_first = comptime!(in_part == 0);
            if comptime!(step < 3) {
                a_words[comptime!((step + 1) % 2)] = load_shared_16(words + comptime!(512 * (step + 1) as u32));
                load_activations(stage + activations, swizzle, &mut b, comptime!(step + 1), config);
            }
            #[unroll]
            for j in 0..4usize {
                let word = a_words[comptime!(step % 2)].extract(j);
                let a = if comptime!(config.multiplies_stored()) {
                    stored(word, lengths, config)
                } else {
                    dequantize(word, &group, lengths, j, config)
                };
                #[unroll]
                for tile in 0..batch_tiles {
                    let first = comptime!(b_set(step, batch_tiles) + 2 * tile);
                    let i = comptime!(j * batch_tiles + tile);
                    if comptime!(config.scales_sums()) {
                        let before = if is_first { F4::new(0.0) } else { group_sums[i] };
                        group_sums[i] = mma(a, b[first], b[comptime!(first + 1)], before, config.bf16);
                    } else {
                        sums[i] = mma(a, b[first], b[comptime!(first + 1)], sums[i], config.bf16);
                    }
                }
            }
            if comptime!(config.multiplies_stored()) {
                #[unroll]
                for tile in 0..batch_tiles {
                    let first = comptime!(b_set(step, batch_tiles) + 2 * tile);
                    let before = if is_first { F4::new(0.0) } else { x_sums[tile] };
                    x_sums[tile] = mma(ones, b[first], b[comptime!(first + 1)], before, config.bf16);
                }
            }
        }
        if comptime!(config.scales_sums()) {
            #[unroll]
            for j in 0..4usize {
                let scale = column_scales(&group, j, config);
                let zero = column_zeros(&group, j, config);
                #[unroll]
                for tile in 0..batch_tiles {
                    let i = comptime!(j * batch_tiles + tile);
                    let products =
                        if comptime!(config.multiplies_stored()) { fma(x_sums[tile], zero, group_sums[i]) } else { group_sums[i] };
                    sums[i] = fma(products, scale, sums[i]);
                }
            }
        }
    }
}

/// Where a step's B fragments are among their registers: two sets take turns. One batch tile loads two steps at once, and has all four apart.
fn b_set(step: usize, batch_tiles: usize) -> usize {
    if batch_tiles == 1 { 2 * step } else { step % 2 * 2 * batch_tiles }
}

/// Loads the B fragments of one step of 16 rows of K: for each batch tile the two registers that `mma.m16n8k16` takes.
#[cube]
fn load_activations(address: u32, swizzle: u32, b: &mut Array<u32>, #[comptime] step: usize, #[comptime] config: Config) {
    let batch_tiles = comptime!(config.tile.batch_tiles);
    let place = address + (swizzle ^ comptime!(2 * step as u32)) * 16;
    if comptime!(batch_tiles > 1) {
        #[unroll]
        for pair in 0..comptime!(batch_tiles / 2) {
            let four = load_matrix_x4(place + comptime!((pair * 16 * config.tile.depth() * 2) as u32));
            #[unroll]
            for i in 0..4usize {
                b[comptime!(b_set(step, batch_tiles) + 4 * pair + i)] = four.extract(i);
            }
        }
    } else if comptime!(step.is_multiple_of(2)) {
        let four = load_matrix_x4(place);
        #[unroll]
        for i in 0..4usize {
            b[comptime!(b_set(step, 1) + i)] = four.extract(i);
        }
    }
}

/// What turns the words of 64 columns into weights, for one group: a lane's eight columns are `groupID + 8i`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Group {
    /// Eight scales, column `groupID + 8i` in half `i % 2` of register `i / 2`. Not read where scales are applied at the end.
    pub scales: U4,
    /// Eight zero points, column `groupID + 8i` in nibble `i`.
    pub zeros: u32,
}

/// Reads a lane's scales and zero points of a group from the stage.
#[cube]
pub(super) fn load_group(scales: u32, zeros: u32, #[comptime] config: Config) -> Group {
    let group_id = lane() / 4;
    let scales = if comptime!(config.grouped()) { load_shared_16(scales + group_id * 16) } else { U4::new(0u32) };
    let zeros = if comptime!(config.zero_points) { load_shared_4(zeros + group_id * 4) } else { 0x8888_8888u32.runtime() };
    Group { scales, zeros }
}

/// The fragment A of `mma.m16n8k16`, 16 columns of the weight by 16 rows of K, from one word of
/// [`MarlinLayout`](marlin_format::layout::MarlinLayout): the values as they are stored, in other units for the two halves of the columns.
///
/// With `groupID = lane / 4` and `t = lane % 4`, register by register (PTX ISA, "Matrix Fragments for mma.m16n8k16"):
///
/// | register | row of A: column of the weight | column of A: row of K | nibbles | f16 holds | bf16 holds |
/// |---|---|---|---|---|---|
/// | 0 | `groupID`     | `2t`, `2t + 1`     | 0, 4 | q / 2^24 | 128 + q |
/// | 1 | `groupID + 8` | `2t`, `2t + 1`     | 1, 5 | q / 2^20 | 128 + q |
/// | 2 | `groupID`     | `2t + 8`, `2t + 9` | 2, 6 | q / 2^24 | 128 + q |
/// | 3 | `groupID + 8` | `2t + 8`, `2t + 9` | 3, 7 | q / 2^20 | 128 + q |
///
/// A nibble in the lowest bits of an f16 is a subnormal number, which tensor cores multiply like any other: one `and` makes a pair of weights.
/// bf16 has too few bits and too small subnormals for that: there a nibble is the end of 128 + q. [`stored_ones`] is 1 in the same units,
/// [`column_zeros`] what takes the zero points out of a group's sums.
#[cube]
pub(super) fn stored(word: u32, lengths: &Lengths, #[comptime] config: Config) -> U4 {
    let mut fragment = U4::new(0u32);
    #[unroll]
    for half in 0..2usize {
        let word = word >> comptime!(8 * half as u32);
        if comptime!(config.bf16) {
            fragment.insert(comptime!(2 * half), (word & lengths.low_nibbles) | 0x4300_4300u32);
            fragment.insert(comptime!(2 * half + 1), ((word >> 4u32) & lengths.low_nibbles) | 0x4300_4300u32);
        } else {
            fragment.insert(comptime!(2 * half), and_here(word, lengths.low_nibbles));
            fragment.insert(comptime!(2 * half + 1), and_here(word, lengths.high_nibbles));
        }
    }
    fragment
}

/// The fragment A of ones, in the units of [`stored`]: its products are the sums of the activations.
#[cube]
pub(super) fn stored_ones(#[comptime] config: Config) -> U4 {
    let (low, high) = comptime!(if config.bf16 { (0x3f80_3f80u32, 0x3f80_3f80u32) } else { (0x0001_0001, 0x0010_0010) });
    let mut ones = U4::new(0u32);
    #[unroll]
    for i in 0..4usize {
        // Opaque, or the compiler makes them anew wherever they are multiplied.
        ones.insert(i, opaque(comptime!(if i % 2 == 0 { low } else { high }).runtime()));
    }
    ones
}

/// What sums in the units of [`stored`] are multiplied with at the end: for columns of `groupID`, and of `groupID + 8`.
pub(super) fn stored_units(config: &Config) -> (f32, f32) {
    if config.multiplies_stored() && !config.bf16 { (16_777_216.0, 1_048_576.0) } else { (1.0, 1.0) }
}

/// The scales of an accumulator's four elements.
#[cube]
pub(super) fn column_scales(group: &Group, #[comptime] j: usize, #[comptime] config: Config) -> F4 {
    let pair = group.scales.extract(j);
    let (first, second) = (half_to_f32(pair, false, config.bf16), half_to_f32(pair, true, config.bf16));
    let mut scale = F4::new(first);
    scale.insert(2usize, second);
    scale.insert(3usize, second);
    scale
}

/// What an accumulator of [`stored`] weights takes of the activations' sums: the negative zero points of its four elements.
#[cube]
pub(super) fn column_zeros(group: &Group, #[comptime] j: usize, #[comptime] config: Config) -> F4 {
    if comptime!(config.zero_points) {
        // 0x4b000000 is 2^23, whose last bit is 1.
        let offset = comptime!(if config.bf16 { 8_388_608.0f32 - 128.0 } else { 8_388_608.0 });
        let low = offset - f32::reinterpret(((group.zeros >> comptime!(8 * j as u32)) & 15u32) | 0x4b00_0000u32);
        let high = offset - f32::reinterpret(((group.zeros >> comptime!(8 * j as u32 + 4)) & 15u32) | 0x4b00_0000u32);
        let mut zero = F4::new(low);
        zero.insert(2usize, high);
        zero.insert(3usize, high);
        zero
    } else {
        F4::new(comptime!(if config.bf16 { -136.0f32 } else { -8.0 }))
    }
}

/// The fragment A of `mma.m16n8k16` from the word of sub-tile `j`, in the ownership of [`stored`]: the weights q - z, times their scales
/// where sums are not scaled instead.
#[cube]
pub(super) fn dequantize(word: u32, group: &Group, lengths: &Lengths, #[comptime] j: usize, #[comptime] config: Config) -> U4 {
    let mut fragment = U4::new(0u32);
    let (low_zero, high_zero) = zero_pairs(group, lengths, j, config);
    #[unroll]
    for half in 0..2usize {
        let word = word >> comptime!(8 * half as u32);
        let (low, high) = if comptime!(config.bf16) {
            (bf16_pair(word, low_zero, lengths), bf16_pair(word >> 4u32, high_zero, lengths))
        } else {
            f16_pairs(word, low_zero, high_zero, lengths)
        };
        let (low, high) = if comptime!(config.grouped() && !config.scales_sums()) {
            let pair = group.scales.extract(j);
            (scaled(low, duplicate_half(pair, false), config), scaled(high, duplicate_half(pair, true), config))
        } else {
            (low, high)
        };
        fragment.insert(comptime!(2 * half), low);
        fragment.insert(comptime!(2 * half + 1), high);
    }
    fragment
}

/// The zero points of the lane's columns `groupID` and `groupID + 8` of sub-tile `j`, each twice: the first in bits 0 to 3 of each half, the
/// second in bits 4 to 7 for f16, where the weights' nibbles are, and in bits 0 to 3 for bf16.
#[cube]
fn zero_pairs(group: &Group, lengths: &Lengths, #[comptime] j: usize, #[comptime] config: Config) -> (u32, u32) {
    if comptime!(config.zero_points) {
        // Four columns' zero points in both halves: one mask takes a column's from both.
        let four = duplicate_half(group.zeros, comptime!(j >= 2));
        let two = if comptime!(j % 2 == 0) { four } else { four >> 8u32 };
        let high = if comptime!(config.bf16) { (two >> 4u32) & lengths.low_nibbles } else { two & lengths.high_nibbles };
        (two & lengths.low_nibbles, high)
    } else {
        (0x0008_0008u32.runtime(), comptime!(if config.bf16 { 0x0008_0008u32 } else { 0x0080_0080 }).runtime())
    }
}

/// q - z of the nibbles 0 and 4, and of the nibbles 1 and 5: exact.
///
/// 0x6400 is 1024 in f16, whose last bit is 1: or-ing a nibble into bits 0 to 3 gives 1024 + q, into bits 4 to 7 gives 1024 + 16q. Both come
/// down in one instruction: (1024 + q) - (1024 + z), and (1024 + 16q) / 16 - (64 + z).
#[cube]
fn f16_pairs(word: u32, low_zero: u32, high_zero: u32, lengths: &Lengths) -> (u32, u32) {
    let low = (word & lengths.low_nibbles) | 0x6400_6400u32;
    let high = (word & lengths.high_nibbles) | 0x6400_6400u32;
    // 64 is 0x5400 in f16 and its last bit is 1/16, so z in bits 4 to 7 makes it 64 + z; 0xd400 is -64. 0x2c00 is 1/16.
    (sub_f16x2(low, low_zero | 0x6400_6400u32), fma_f16x2(high, 0x2c00_2c00u32.runtime(), high_zero | 0xd400_d400u32))
}

/// q - z of the nibbles 0 and 4: exact. 0x4300 is 128 in bf16, whose last bit is 1; 0xc300 is -128 and 0x3f80 is 1.
#[cube]
fn bf16_pair(word: u32, low_zero: u32, lengths: &Lengths) -> u32 {
    fma_bf16x2((word & lengths.low_nibbles) | 0x4300_4300u32, 0x3f80_3f80u32.runtime(), low_zero | 0xc300_c300u32)
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
