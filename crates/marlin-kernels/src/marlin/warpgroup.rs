//! Products of a warpgroup: `wgmma`, with the weight in registers and the activations in shared memory.
//!
//! A is 64 columns of the weight by 16 rows of K. Warp `w` of the four has its rows `16w..16w + 16` in the ownership of `mma.m16n8k16`, so each
//! warp puts in the fragment that it would give to `mma.sync`: 16 columns of its own chunk. One instruction then stands for those of all eights
//! of rows of activations in four warps, and no warp loads activations into registers.

use super::config::{ACTIVATION_ROW_BYTES, CHUNK_N, Config, TILE_ROW_BYTES, TILE_ROWS};
use super::fragment::{dequantize, load_group};
use super::kernel::Lengths;
use super::pipeline::Turn;
use crate::ptx::{
    F4, U4, lane, load_shared_16, wgmma, wgmma_b, wgmma_clear, wgmma_commit, wgmma_declare, wgmma_descriptor, wgmma_fence, wgmma_sum,
    wgmma_wait,
};
use cubecl::prelude::*;

/// Declares the sums of a kernel: `4 * batch_tiles` accumulators of four registers, in the order of `fragment.rs`.
#[cube]
pub(super) fn declare(#[comptime] config: Config) {
    wgmma_declare(comptime!(16 * config.tile.batch_tiles));
}

/// Sets the sums to 0.
#[cube]
pub(super) fn clear(#[comptime] config: Config) {
    #[unroll]
    for i in 0..comptime!(16 * config.tile.batch_tiles) {
        wgmma_clear(i);
    }
}

/// Waits for all products, and reads the sums.
#[cube]
pub(super) fn end(sums: &mut Array<F4>, #[comptime] config: Config) {
    wgmma_wait(0usize);
    #[unroll]
    for i in 0..comptime!(4 * config.tile.batch_tiles) {
        let mut four = F4::new(0.0);
        #[unroll]
        for element in 0..4usize {
            four.insert(element, wgmma_sum(comptime!(4 * i + element)));
        }
        sums[i] = four;
    }
}

/// Waits for a stage, adds the products of a warp's chunk to its sums, those of its last 16 rows of K only by the next call, and releases the
/// stage before.
///
/// The fragments of 16 rows of K are made while those of the 16 rows before are multiplied. Registers of a fragment may change once its products
/// are done, so two sets take turns.
#[cube]
pub(super) fn multiply(turn: &Turn, warp: u32, lengths: &Lengths, #[comptime] config: Config) {
    let lane = lane();
    let warps_n = comptime!(config.tile.warps_n as u32);
    let (warp_n, warp_k) = (warp % warps_n, warp / warps_n);
    // Chunks that are side by side along N lie row by row.
    let words_row = comptime!(warps_n * TILE_ROW_BYTES as u32);
    let words = turn.stage + warp_k * comptime!(TILE_ROWS as u32 * words_row) + warp_n * comptime!(TILE_ROW_BYTES as u32) + lane * 16;
    let group = warp_k * comptime!(config.groups_in_chunk() as u32 * warps_n) + warp_n;
    let scales = turn.stage + comptime!(config.scales_offset() as u32) + group * comptime!(CHUNK_N as u32 * 2);
    let zeros = turn.stage + comptime!(config.zeros_offset() as u32) + group * comptime!(CHUNK_N as u32 / 2);
    let activations =
        comptime!(config.activations_offset() as u32) + warp_k * comptime!((config.tile.rows() * ACTIVATION_ROW_BYTES) as u32);
    let descriptor = wgmma_descriptor(turn.stage + activations);

    turn.wait();
    let mut a_words = Array::<U4>::new(2usize);
    a_words[0] = load_shared_16(words);
    #[unroll]
    for part in 0..comptime!(config.groups_in_chunk()) {
        let scales = scales + comptime!(part as u32 * warps_n * CHUNK_N as u32 * 2);
        let zeros = zeros + comptime!(part as u32 * warps_n * CHUNK_N as u32 / 2);
        let group = load_group(scales, zeros, config);
        #[unroll]
        for in_part in 0..comptime!(4 / config.groups_in_chunk()) {
            let step = comptime!(part * 4 / config.groups_in_chunk() + in_part);
            if comptime!(step < 3) {
                a_words[comptime!((step + 1) % 2)] = load_shared_16(words + comptime!((step + 1) as u32 * words_row));
            }
            let mut a = Array::<U4>::new(4usize);
            #[unroll]
            for j in 0..4usize {
                a[j] = dequantize(a_words[comptime!(step % 2)].extract(j), &group, lengths, j, config);
            }
            wgmma_b(descriptor + comptime!(2 * step as u32));
            wgmma_fence();
            #[unroll]
            for j in 0..4usize {
                let sums = comptime!(4 * config.tile.batch_tiles);
                wgmma(a[j], comptime!(j * sums), comptime!(config.tile.rows()), config.bf16);
            }
            wgmma_commit();
            wgmma_wait(1usize);
            if comptime!(step == 0) {
                turn.release_last();
            }
        }
    }
}
