//! The products of a warp's chunk, by `mma.sync`.

use crate::ptx::{F4, U4, lane, ldmatrix_x4, mma_m16n8k16};
use crate::tile::config::Config;
use crate::tile::fragment::{
    Group, column_scales, column_zeros, dequantize, load_group, load_words, stored, sub_tile,
};
use crate::tile::shape::{CHUNK_N, CHUNK_STEPS, TILE_BYTES};
use crate::tile::sizes::NibbleMasks;
use cubecl::prelude::*;

/// Adds the products of a warp's chunk to its sums. `sums[j * batch_tiles + b]` holds the columns
/// `16j..16j + 16` of the warp's 64 columns and the rows `8b..8b + 8`. A lane owns the elements of
/// an accumulator of `mma.m16n8k16`:
///
/// | element | column in 16 | row in 8 |
/// |---|---|---|
/// | 0, 1 | `lane / 4`     | `2 (lane % 4)`, `2 (lane % 4) + 1` |
/// | 2, 3 | `lane / 4 + 8` | `2 (lane % 4)`, `2 (lane % 4) + 1` |
#[cube]
pub(super) fn multiply(
    stage: u32,
    sums: &mut Array<F4>,
    ones: U4,
    masks: &NibbleMasks,
    #[comptime] config: Config,
) {
    let lane = lane();
    let warp = UNIT_POS_X / 32;
    let words = stage + warp * comptime!((config.word_rows() * TILE_BYTES) as u32) + lane * 16;
    let scales = stage
        + comptime!(config.scales_offset() as u32)
        + warp * comptime!(config.scales_bytes() as u32);
    let zeros = stage
        + comptime!(config.zeros_offset() as u32)
        + warp * comptime!(config.zeros_bytes() as u32);

    let batch_tiles = comptime!(config.tile.batch_tiles);
    let (activations, swizzle) = activations(lane, warp, config);
    // The next step's fragments are loaded while this step's are multiplied.
    let mut b = Array::<u32>::new(comptime!(if batch_tiles == 1 {
        8
    } else {
        4 * batch_tiles
    }));
    let mut a_words = Array::<U4>::new(comptime!(2 * config.tiles_in_step()));
    let mut group_sums = Array::<F4>::new(comptime!(4 * batch_tiles));
    // The sums of the activations, which are multiplied by the zero points.
    let mut x_sums = Array::<F4>::new(batch_tiles);
    load_words(&mut a_words, words, 0usize, TILE_BYTES as u32, config);
    load_activations(stage + activations, swizzle, &mut b, 0usize, config);
    #[unroll]
    for part in 0..comptime!(config.groups_in_chunk()) {
        let group = load_group(
            scales + comptime!((part * CHUNK_N * 2) as u32),
            zeros + comptime!((part * config.group_zeros_bytes()) as u32),
            config,
        );
        #[unroll]
        for in_part in 0..comptime!(CHUNK_STEPS / config.groups_in_chunk()) {
            let step = comptime!(part * CHUNK_STEPS / config.groups_in_chunk() + in_part);
            let is_first = comptime!(in_part == 0);
            if comptime!(step + 1 < CHUNK_STEPS) {
                load_words(
                    &mut a_words,
                    words,
                    comptime!(step + 1),
                    TILE_BYTES as u32,
                    config,
                );
                load_activations(
                    stage + activations,
                    swizzle,
                    &mut b,
                    comptime!(step + 1),
                    config,
                );
            }
            #[unroll]
            for j in 0..4usize {
                let words = sub_tile(&a_words, step, j, config);
                let a = if comptime!(config.multiplies_subnormals()) {
                    stored(words.0, masks, true, config)
                } else {
                    dequantize(words, &group, masks, j, config)
                };
                #[unroll]
                for tile in 0..batch_tiles {
                    let first = comptime!(b_set(step, batch_tiles) + 2 * tile);
                    let i = comptime!(j * batch_tiles + tile);
                    if comptime!(config.scales_sums()) {
                        let before = if is_first {
                            F4::new(0.0)
                        } else {
                            group_sums[i]
                        };
                        group_sums[i] =
                            mma_m16n8k16(a, b[first], b[comptime!(first + 1)], before, config.bf16);
                    } else {
                        sums[i] = mma_m16n8k16(
                            a,
                            b[first],
                            b[comptime!(first + 1)],
                            sums[i],
                            config.bf16,
                        );
                    }
                }
            }
            if comptime!(config.multiplies_subnormals()) {
                #[unroll]
                for tile in 0..batch_tiles {
                    let first = comptime!(b_set(step, batch_tiles) + 2 * tile);
                    let before = if is_first { F4::new(0.0) } else { x_sums[tile] };
                    x_sums[tile] =
                        mma_m16n8k16(ones, b[first], b[comptime!(first + 1)], before, config.bf16);
                }
            }
        }
        if comptime!(config.scales_sums()) {
            add_group(sums, &group_sums, &x_sums, &group, config);
        }
    }
}

/// Returns the place of a lane's row of activations in a stage, and the position of its first run
/// of 16 bytes there.
///
/// Lane 8i + r gives the address of row r of matrix i of ldmatrix.x4. With one batch tile the four
/// matrices are 64 bytes of a row, 32 rows of K; with more, they are 32 bytes of two batch tiles.
#[cube]
pub(super) fn activations(lane: u32, warp: u32, #[comptime] config: Config) -> (u32, u32) {
    let matrix = lane / 8;
    let (row, run) = if comptime!(config.tile.batch_tiles == 1) {
        (lane % 8, matrix)
    } else {
        (lane % 8 + matrix / 2 * 8, matrix % 2)
    };
    let runs = comptime!((row_bytes(&config) / 16) as u32);
    let activations = comptime!(config.activations_offset() as u32)
        + (row * runs + warp / comptime!(config.tile.warps_n as u32) * 8) * 16;
    (activations, run ^ (lane % 8))
}

/// Returns the number of bytes of a row of activations in a stage.
pub(super) const fn row_bytes(config: &Config) -> usize {
    config.tile.depth() * config.tile.activation_bytes()
}

/// Scales a group's products and adds them to the sums.
#[cube]
pub(super) fn add_group(
    sums: &mut Array<F4>,
    group_sums: &Array<F4>,
    x_sums: &Array<F4>,
    group: &Group,
    #[comptime] config: Config,
) {
    let batch_tiles = comptime!(config.tile.batch_tiles);
    #[unroll]
    for j in 0..4usize {
        let scale = column_scales(group, j, config);
        let zero = column_zeros(group, j, config);
        #[unroll]
        for tile in 0..batch_tiles {
            let i = comptime!(j * batch_tiles + tile);
            let products = if comptime!(config.multiplies_subnormals()) {
                fma(x_sums[tile], zero, group_sums[i])
            } else {
                group_sums[i]
            };
            sums[i] = fma(products, scale, sums[i]);
        }
    }
}

/// Returns the first register of a step's B fragments. Two sets of registers alternate. One batch
/// tile loads two steps at once, and has four separate sets.
fn b_set(step: usize, batch_tiles: usize) -> usize {
    if batch_tiles == 1 {
        2 * step
    } else {
        step % 2 * 2 * batch_tiles
    }
}

/// Loads the B fragments of one step of 16 rows of K: for each batch tile the two registers that
/// `mma.m16n8k16` takes.
#[cube]
fn load_activations(
    address: u32,
    swizzle: u32,
    b: &mut Array<u32>,
    #[comptime] step: usize,
    #[comptime] config: Config,
) {
    let batch_tiles = comptime!(config.tile.batch_tiles);
    let place = address + (swizzle ^ comptime!(2 * step as u32)) * 16;
    if comptime!(batch_tiles > 1) {
        #[unroll]
        for pair in 0..comptime!(batch_tiles / 2) {
            let four = ldmatrix_x4(place + comptime!((pair * 16 * row_bytes(&config)) as u32));
            #[unroll]
            for i in 0..4usize {
                b[comptime!(b_set(step, batch_tiles) + 4 * pair + i)] = four.extract(i);
            }
        }
    } else if comptime!(step.is_multiple_of(2)) {
        let four = ldmatrix_x4(place);
        #[unroll]
        for i in 0..4usize {
            b[comptime!(b_set(step, 1) + i)] = four.extract(i);
        }
    }
}
