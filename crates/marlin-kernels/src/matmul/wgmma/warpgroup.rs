//! The products of a warpgroup by `wgmma`, with the weight in registers and the activations in
//! shared memory.
//!
//! A is 64 columns of the weight by 16 rows of K. Warp `w` of the four holds the rows `16w..16w +
//! 16` of A, distributed over its lanes as in `mma.m16n8k16`. Each warp therefore passes the
//! fragment that it would pass to `mma.sync`: 16 columns of its own chunk. One instruction replaces
//! the `mma.sync` instructions of four warps for all n8 tiles of activations, and no warp loads
//! activations into registers.

use super::fp8::half_rows;
use super::pipeline::PipelineState;
use crate::ptx::{
    F4, U2, U4, lane, ld_shared_4, ld_shared_8, wgmma, wgmma_b, wgmma_clear, wgmma_commit_group,
    wgmma_declare, wgmma_descriptor, wgmma_fence, wgmma_more, wgmma_sp, wgmma_sum,
    wgmma_wait_group,
};
use crate::tile::config::Config;
use crate::tile::fragment::{
    Group, column_scales, column_zeros, dequantize, load_group, load_words, stored, sub_tile,
};
use crate::tile::shape::{ATOM_ROW_BYTES, CHUNK_N, CHUNK_STEPS, METADATA_ROWS, TILE_BYTES};
use crate::tile::sizes::NibbleMasks;
use crate::tile::stripe::TilePart;
use cubecl::prelude::*;

impl Config {
    /// Returns the number of accumulators of four registers each, in the order of `fragment.rs`.
    /// The accumulators of the products come first; if stored values are multiplied directly, those
    /// of the activations' sums follow. Products of e4m3 have those of half of a warp's outputs
    /// ([`fp8`](super::fp8)).
    fn accumulators(&self) -> usize {
        if self.tile.is_fp8() {
            return half_rows(&self.tile) / 8;
        }
        self.tile.batch_tiles * (self.tile.sub_tiles() + usize::from(self.multiplies_subnormals()))
    }

    /// Returns the index of the first accumulator of the activations' sums.
    fn x_sums(&self) -> usize {
        self.tile.sub_tiles() * self.tile.batch_tiles
    }
}

/// Declares the accumulators of a kernel.
#[cube]
pub(super) fn declare(#[comptime] config: Config) {
    wgmma_declare(comptime!(4 * config.accumulators()));
}

/// Sets the accumulators to 0.
#[cube]
pub(super) fn clear(#[comptime] config: Config) {
    #[unroll]
    for i in 0..comptime!(4 * config.accumulators()) {
        wgmma_clear(i);
    }
}

/// Reads accumulator `i`.
#[cube]
pub(super) fn accumulator(#[comptime] i: usize) -> F4 {
    let mut four = F4::new(0.0);
    #[unroll]
    for element in 0..4usize {
        four.insert(element, wgmma_sum(comptime!(4 * i + element)));
    }
    four
}

/// Waits for all products, and reads the accumulators into `sums` unless [`multiply`] has already
/// added them.
#[cube]
pub(super) fn end(sums: &mut Array<F4>, #[comptime] config: Config) {
    wgmma_wait_group(0usize);
    if comptime!(!config.multiplies_subnormals()) {
        #[unroll]
        for i in 0..comptime!(config.tile.sub_tiles() * config.tile.batch_tiles) {
            sums[i] = accumulator(i);
        }
    }
}

/// Waits for all products of a group, scales them and adds them to the sums.
#[cube]
fn add_group(sums: &mut Array<F4>, group: &Group, #[comptime] config: Config) {
    wgmma_wait_group(0usize);
    let batch_tiles = comptime!(config.tile.batch_tiles);
    #[unroll]
    for j in 0..config.tile.sub_tiles() {
        let scale = column_scales(group, j, config);
        let zero = column_zeros(group, j, config);
        #[unroll]
        for tile in 0..batch_tiles {
            let i = comptime!(j * batch_tiles + tile);
            let products = fma(
                accumulator(comptime!(config.x_sums() + tile)),
                zero,
                accumulator(i),
            );
            sums[i] = fma(products, scale, sums[i]);
        }
    }
}

/// Returns the number of bytes of a row of tiles of words in a stage; a row has the tiles of all
/// chunks along N.
#[cube]
pub(super) fn words_row(#[comptime] config: Config) -> comptime_type!(u32) {
    comptime!(config.tile.chunks_n() as u32 * TILE_BYTES as u32)
}

/// The part of a step that a warp multiplies.
#[derive(CubeType)]
struct WarpPlace {
    /// The chunk along N.
    chunk: u32,
    /// The half of the chunk; 0 if a warp has a whole chunk.
    part: u32,
    /// The chunk along K.
    warp_k: u32,
}

#[cube]
impl WarpPlace {
    fn new(warp: u32, #[comptime] config: Config) -> Self {
        let in_chunk = comptime!((config.tile.warps_n / config.tile.chunks_n()) as u32);
        let (warp_n, warp_k) = (
            warp % comptime!(config.tile.warps_n as u32),
            warp / comptime!(config.tile.warps_n as u32),
        );
        WarpPlace {
            chunk: warp_n / in_chunk,
            part: warp_n % in_chunk,
            warp_k,
        }
    }
}

/// The shared-memory addresses of a warp's chunk of the weight in a stage: of a lane's first words,
/// of the scales and of the zero points.
#[derive(CubeType)]
struct Chunk {
    words: u32,
    scales: u32,
    zeros: u32,
}

#[cube]
impl Chunk {
    fn new(stage: u32, warp: u32, #[comptime] config: Config) -> Self {
        let chunks_n = comptime!(config.tile.chunks_n() as u32);
        let words_row = words_row(config);
        let WarpPlace {
            chunk,
            part,
            warp_k,
        } = WarpPlace::new(warp, config);
        let group = warp_k * comptime!(config.groups_in_chunk() as u32 * chunks_n) + chunk;
        Chunk {
            words: stage
                + warp_k * comptime!(config.word_rows() as u32 * words_row)
                + chunk * comptime!(TILE_BYTES as u32)
                + lane() * 16
                + part * 8,
            scales: stage
                + comptime!(config.scales_offset() as u32)
                + group * comptime!(CHUNK_N as u32 * 2)
                + part * 8,
            zeros: stage
                + comptime!(config.zeros_offset() as u32)
                + group * comptime!(config.group_zeros_bytes() as u32)
                + part * comptime!(config.group_zeros_bytes() as u32 / 16),
        }
    }
}

/// Waits for the stage of a step, adds the products of a warp's chunk to its accumulators, and
/// releases the preceding stage. The products of the last 16 rows of K are complete only in the
/// next call.
///
/// If stored values are multiplied directly, a group's first products replace the contents of the
/// accumulators, and after the group's last products the accumulators are added to `sums`.
///
/// The fragments of 16 rows of K are converted while the fragments of the preceding 16 rows are
/// multiplied. The registers of a fragment may change only after its products are done, so two sets
/// of registers alternate.
#[cube]
pub(super) fn multiply(
    state: &PipelineState,
    warp: u32,
    unit: u32,
    part: &TilePart,
    ones: U4,
    sums: &mut Array<F4>,
    masks: &NibbleMasks,
    #[comptime] config: Config,
) {
    let (warps_n, chunks_n) =
        comptime!((config.tile.warps_n as u32, config.tile.chunks_n() as u32));
    let words_row = words_row(config);
    let Chunk {
        words,
        scales,
        zeros,
    } = Chunk::new(state.stage, warp, config);
    let warp_k = warp / warps_n;
    let activations = comptime!(config.activations_offset() as u32)
        + warp_k * comptime!((config.tile.rows() * ATOM_ROW_BYTES) as u32);
    let descriptor = wgmma_descriptor(plane_broadcast(state.stage + activations, 0u32));

    let mut continues_group = 0u32.runtime();
    let mut ends_group = true.runtime();
    if comptime!(config.pairs_steps()) {
        continues_group = if unit == part.first {
            0u32.runtime()
        } else {
            unit % 2
        };
        ends_group = unit % 2 == 1 || unit + 1 == part.end;
    }
    wgmma_more(continues_group);
    state.wait();
    let mut a_words = Array::<U4>::new(comptime!(2 * config.tiles_in_step()));
    load_words(&mut a_words, words, 0usize, words_row, config);
    #[unroll]
    for half in 0..comptime!(config.groups_in_chunk()) {
        let scales = scales + comptime!(half as u32 * chunks_n * CHUNK_N as u32 * 2);
        let zeros = zeros + comptime!(half as u32 * chunks_n * config.group_zeros_bytes() as u32);
        let group = load_group(scales, zeros, config);
        #[unroll]
        for in_half in 0..comptime!(CHUNK_STEPS / config.groups_in_chunk()) {
            let step = comptime!(half * CHUNK_STEPS / config.groups_in_chunk() + in_half);
            if comptime!(step + 1 < CHUNK_STEPS) {
                load_words(&mut a_words, words, comptime!(step + 1), words_row, config);
            }
            let mut a = Array::<U4>::new(4usize);
            #[unroll]
            for j in 0..config.tile.sub_tiles() {
                let words = sub_tile(&a_words, step, j, config);
                a[j] = if comptime!(config.multiplies_subnormals()) {
                    stored(words.0, masks, true, config)
                } else {
                    dequantize(words, &group, masks, j, config)
                };
            }
            wgmma_b(descriptor + comptime!(2 * step as u32));
            wgmma_fence();
            let starts = comptime!(config.multiplies_subnormals() && in_half == 0);
            #[unroll]
            for j in 0..config.tile.sub_tiles() {
                let sums = comptime!(4 * config.tile.batch_tiles);
                wgmma(
                    a[j],
                    comptime!(j * sums),
                    comptime!(config.tile.rows()),
                    starts,
                    config.bf16,
                );
            }
            if comptime!(config.multiplies_subnormals()) {
                wgmma(
                    ones,
                    comptime!(4 * config.x_sums()),
                    comptime!(config.tile.rows()),
                    starts,
                    config.bf16,
                );
            }
            wgmma_commit_group();
            wgmma_wait_group(1usize);
            if comptime!(step == 0) {
                state.release_last();
            }
        }
        if comptime!(config.multiplies_subnormals()) {
            if comptime!(half + 1 < config.groups_in_chunk()) || ends_group {
                add_group(sums, &group, config);
            }
        }
    }
}

/// Adds products like [`multiply`], for a 2:4 weight, by `wgmma.sp`: 128 rows of K, of which 64 are
/// stored, in four steps of 32.
///
/// `chunks` is the number of the tile's chunks along N. Beyond them the stage is uninitialised, and
/// the result of `wgmma.sp` is not defined for all metadata. A warp without a chunk therefore uses
/// the metadata of the first chunk, for sums that no thread writes.
#[cube]
pub(super) fn multiply_sparse(
    state: &PipelineState,
    warp: u32,
    chunks: u32,
    masks: &NibbleMasks,
    #[comptime] config: Config,
) {
    let chunks_n = comptime!(config.tile.chunks_n() as u32);
    let words_row = words_row(config);
    let Chunk {
        words,
        scales,
        zeros,
    } = Chunk::new(state.stage, warp, config);
    let WarpPlace {
        chunk,
        part,
        warp_k,
    } = WarpPlace::new(warp, config);
    let chunk = if chunk < chunks {
        chunk
    } else {
        0u32.runtime()
    };
    let metadata = state.stage
        + comptime!(config.metadata_offset() as u32)
        + warp_k * comptime!(METADATA_ROWS as u32 * words_row)
        + chunk * comptime!(TILE_BYTES as u32)
        + lane() * 16
        + part * 4;
    let atom_bytes = comptime!((config.tile.rows() * ATOM_ROW_BYTES) as u32);
    let activations = comptime!(config.activations_offset() as u32) + warp_k * 2 * atom_bytes;
    let descriptor = wgmma_descriptor(plane_broadcast(state.stage + activations, 0u32));

    state.wait();
    let mut a_words = Array::<U4>::new(comptime!(2 * config.tiles_in_step()));
    load_words(&mut a_words, words, 0usize, words_row, config);
    #[unroll]
    for part in 0..comptime!(config.groups_in_chunk()) {
        let scales = scales + comptime!(part as u32 * chunks_n * CHUNK_N as u32 * 2);
        let zeros = zeros + comptime!(part as u32 * chunks_n * config.group_zeros_bytes() as u32);
        let group = load_group(scales, zeros, config);
        #[unroll]
        for in_part in 0..comptime!(CHUNK_STEPS / config.groups_in_chunk()) {
            let step = comptime!(part * CHUNK_STEPS / config.groups_in_chunk() + in_part);
            if comptime!(step + 1 < CHUNK_STEPS) {
                load_words(&mut a_words, words, comptime!(step + 1), words_row, config);
            }
            // Every two sub-tiles share a register of metadata.
            let at = metadata + comptime!((step / 2) as u32 * words_row + (step % 2 * 8) as u32);
            let places = if comptime!(config.tile.sub_tiles() == 4) {
                ld_shared_8(at)
            } else {
                U2::new(ld_shared_4(at))
            };
            let mut a = Array::<U4>::new(4usize);
            #[unroll]
            for j in 0..config.tile.sub_tiles() {
                a[j] = dequantize(
                    sub_tile(&a_words, step, j, config),
                    &group,
                    masks,
                    j,
                    config,
                );
            }
            // 32 rows of K are 64 bytes of an atom's row, four of the descriptor's units.
            wgmma_b(
                descriptor
                    + comptime!((step / 2) as u32 * (atom_bytes / 16) + (step % 2 * 4) as u32),
            );
            wgmma_fence();
            #[unroll]
            for j in 0..config.tile.sub_tiles() {
                let sums = comptime!(4 * config.tile.batch_tiles);
                wgmma_sp(
                    a[j],
                    places.extract(comptime!(j / 2)),
                    comptime!(j % 2),
                    comptime!(j * sums),
                    comptime!(config.tile.rows()),
                    config.bf16,
                );
            }
            wgmma_commit_group();
            wgmma_wait_group(1usize);
            if comptime!(step == 0) {
                state.release_last();
            }
        }
    }
}
