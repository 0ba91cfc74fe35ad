//! The products of a warp's chunk of a 2:4 weight, by `mma.sp.sync`.

use super::multiply::add_group;
use crate::ptx::{F4, U4, lane, ld_shared_16, ldmatrix_x4, mma_sp_m16n8k32};
use crate::tile::config::Config;
use crate::tile::fragment::{dequantize, load_group, load_words, sub_tile};
use crate::tile::shape::{CHUNK_N, CHUNK_STEPS, METADATA_ROWS, TILE_BYTES};
use crate::tile::sizes::NibbleMasks;
use cubecl::prelude::*;

/// Adds the products of a warp's chunk, 128 rows of K of which 64 are stored, to its sums. The sums
/// have the same layout as in `multiply`.
///
/// A step multiplies 32 rows of K. It uses 16 stored rows of the weight, which are one or two of
/// the chunk's tiles of words, and half of one of the chunk's two tiles of metadata
/// ([`SparseLayout`](marlin_format::layout::SparseLayout)). Fragment B is 32 rows of K for eight
/// rows of activations: one `ldmatrix.x4`.
#[cube]
pub(super) fn multiply_sparse(
    stage: u32,
    sums: &mut Array<F4>,
    masks: &NibbleMasks,
    #[comptime] config: Config,
) {
    let lane = lane();
    let warp = UNIT_POS_X / 32;
    let words = stage + warp * comptime!((config.word_rows() * TILE_BYTES) as u32) + lane * 16;
    let metadata = stage
        + comptime!(config.metadata_offset() as u32)
        + warp * comptime!((METADATA_ROWS * TILE_BYTES) as u32)
        + lane * 16;
    let scales = stage
        + comptime!(config.scales_offset() as u32)
        + warp * comptime!(config.scales_bytes() as u32);
    let zeros = stage
        + comptime!(config.zeros_offset() as u32)
        + warp * comptime!(config.zeros_bytes() as u32);

    // Lane 8i + r gives the address of row r of matrix i of ldmatrix.x4, which is run i of a step's
    // four runs of K.
    let batch_tiles = comptime!(config.tile.batch_tiles);
    let runs = comptime!((config.tile.depth() / 8) as u32);
    let warp_k = warp / comptime!(config.tile.warps_n as u32);
    let row = stage
        + comptime!(config.activations_offset() as u32)
        + (lane % 8 * runs + warp_k * comptime!((config.tile.chunk_rows() / 8) as u32)) * 16;
    let swizzle = (lane / 8) ^ (lane % 8);

    // The fragments of the next eight rows of activations are loaded while the current ones are
    // multiplied, and the words of the next step while those of this step are multiplied.
    let mut b = Array::<U4>::new(2usize);
    let mut a_words = Array::<U4>::new(comptime!(2 * config.tiles_in_step()));
    let mut places = Array::<U4>::new(METADATA_ROWS);
    let mut group_sums = Array::<F4>::new(comptime!(4 * batch_tiles));
    load_words(&mut a_words, words, 0usize, TILE_BYTES as u32, config);
    #[unroll]
    for i in 0..METADATA_ROWS {
        places[i] = ld_shared_16(metadata + comptime!((TILE_BYTES * i) as u32));
    }
    b[0] = ldmatrix_x4(row + swizzle * 16);
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
            if comptime!(step + 1 < CHUNK_STEPS) {
                load_words(
                    &mut a_words,
                    words,
                    comptime!(step + 1),
                    TILE_BYTES as u32,
                    config,
                );
            }
            let mut a = Array::<U4>::new(4usize);
            #[unroll]
            for j in 0..4usize {
                a[j] = dequantize(
                    sub_tile(&a_words, step, j, config),
                    &group,
                    masks,
                    j,
                    config,
                );
            }
            #[unroll]
            for tile in 0..batch_tiles {
                let index = comptime!(step * batch_tiles + tile);
                if comptime!(index + 1 < CHUNK_STEPS * batch_tiles) {
                    let (next_step, next_tile) =
                        comptime!(((index + 1) / batch_tiles, (index + 1) % batch_tiles));
                    let rows = comptime!((next_tile * 8 * config.tile.depth() * 2) as u32);
                    b[comptime!((index + 1) % 2)] =
                        ldmatrix_x4(row + rows + (swizzle ^ comptime!(4 * next_step as u32)) * 16);
                }
                let b = b[comptime!(index % 2)];
                #[unroll]
                for j in 0..4usize {
                    let place =
                        places[comptime!(step / 2)].extract(comptime!(step % 2 * 2 + j / 2));
                    let i = comptime!(j * batch_tiles + tile);
                    if comptime!(config.scales_sums()) {
                        let before = if comptime!(in_part == 0) {
                            F4::new(0.0)
                        } else {
                            group_sums[i]
                        };
                        group_sums[i] =
                            mma_sp_m16n8k32(a[j], b, before, place, comptime!(j % 2), config.bf16);
                    } else {
                        sums[i] =
                            mma_sp_m16n8k32(a[j], b, sums[i], place, comptime!(j % 2), config.bf16);
                    }
                }
            }
        }
        if comptime!(config.scales_sums()) {
            add_group(sums, &group_sums, &group_sums, &group, config);
        }
    }
}
