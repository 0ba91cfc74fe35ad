//! The shared memory of the `wgmma` kernel: its stages, and the thread that fills the stages.

use super::config::{FlashConfig, FlashLengths, TileRows};
use super::tiles::TILE_ROWS;
use crate::cache::position_start;
use cubecl::prelude::*;
use marlin_kernels::ptx::{
    cp_async_bulk_tensor_2d, lane, mbarrier_arrive, mbarrier_arrive_expect_tx,
    mbarrier_wait_parity, prefetch_tensormap,
};

/// The number of stages of keys, and of values.
pub(super) const STAGES: usize = 2;
/// The number of features of an atom: a part of a row that is contiguous in shared memory, of 128
/// bytes.
const ATOM: usize = 64;
/// The number of bytes of a row of an atom.
pub(super) const ATOM_ROW: usize = 2 * ATOM;

impl FlashConfig {
    /// Returns the number of positions of keys and values in a stage.
    pub(super) const fn stage_keys(&self) -> usize {
        if self.head_dim <= 128 { 128 } else { 64 }
    }

    /// Returns the number of positions that one copy moves: those of a stage, or of a page if that
    /// is shorter.
    pub(super) fn box_keys(&self) -> usize {
        self.page_size
            .map_or(self.stage_keys(), |size| size.min(self.stage_keys()))
    }

    /// Returns the number of atoms of a row.
    pub(super) const fn atoms(&self) -> usize {
        self.head_dim.div_ceil(ATOM)
    }

    /// Returns the number of bytes of an atom of all queries.
    pub(super) const fn query_atom(&self) -> usize {
        TILE_ROWS * ATOM_ROW
    }

    /// Returns the number of bytes of an atom of a stage.
    pub(super) const fn key_atom(&self) -> usize {
        self.stage_keys() * ATOM_ROW
    }

    /// Returns the number of bytes of a stage, of keys or of values.
    pub(super) const fn stage(&self) -> usize {
        self.atoms() * self.key_atom()
    }

    /// Returns the number of bytes of shared memory without the barriers: queries, stages of keys,
    /// stages of values.
    pub(super) const fn tiles_bytes(&self) -> usize {
        self.atoms() * self.query_atom() + 2 * STAGES * self.stage()
    }
}

/// The addresses in shared memory of a block.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Memory {
    pub queries: u32,
    pub keys: u32,
    pub values: u32,
    /// The barrier of the queries, then the barriers `full` and `empty` of every stage of keys,
    /// then those of every stage of values.
    pub barriers: u32,
}

#[cube]
impl Memory {
    /// Returns the address of the barrier `full` of a stage of keys; the barrier `empty` follows.
    pub fn keys_full(&self, stage: u32) -> u32 {
        self.barriers + 16 + stage * 16
    }

    /// Returns the address of the barrier `full` of a stage of values; the barrier `empty` follows.
    pub fn values_full(&self, stage: u32) -> u32 {
        self.barriers + comptime!(16 + 16 * STAGES as u32) + stage * 16
    }
}

/// Copies the queries, then stage after stage of keys and values. One thread of a block calls this
/// function.
#[cube]
pub(super) fn produce(
    queries: u64,
    keys: u64,
    values: u64,
    pages: &ComptimeOption<&[i32]>,
    tile: &TileRows,
    memory: &Memory,
    lengths: &FlashLengths,
    #[comptime] config: FlashConfig,
) {
    prefetch_tensormap(queries);
    prefetch_tensormap(keys);
    prefetch_tensormap(values);
    mbarrier_arrive_expect_tx(
        memory.barriers,
        comptime!((config.atoms() * config.query_atom()) as u32).runtime(),
    );
    let column = CUBE_POS_X * comptime!(config.head_dim as u32);
    #[unroll]
    for atom in 0..comptime!(config.atoms() as u32) {
        let to = memory.queries + comptime!(atom * config.query_atom() as u32);
        cp_async_bulk_tensor_2d(
            to,
            queries,
            column + comptime!(atom * ATOM as u32),
            tile.first,
            memory.barriers,
        );
    }
    let end = tile.end();
    let mut first = tile.first_key(lengths, comptime!(config.stage_keys() as u32));
    let mut number = 0u32.runtime();
    while first < end {
        // The phase before a barrier's first phase counts as complete, so the stages are empty at
        // first.
        let (stage, parity) = (number % 2, (number / 2 + 1) % 2);
        copy_stage(
            memory.keys,
            keys,
            memory.keys_full(stage),
            pages,
            tile,
            first,
            stage,
            parity,
            lengths,
            config,
        );
        copy_stage(
            memory.values,
            values,
            memory.values_full(stage),
            pages,
            tile,
            first,
            stage,
            parity,
            lengths,
            config,
        );
        first += comptime!(config.stage_keys() as u32);
        number += 1;
    }
}

/// Copies the positions from `first` on to a stage when the stage is empty. The rows of positions
/// past the end of the tile are undefined, or zeros past the end of the cache.
#[cube]
fn copy_stage(
    stages: u32,
    map: u64,
    full: u32,
    pages: &ComptimeOption<&[i32]>,
    tile: &TileRows,
    first: u32,
    stage: u32,
    parity: u32,
    lengths: &FlashLengths,
    #[comptime] config: FlashConfig,
) {
    mbarrier_wait_parity(full + 8, parity);
    mbarrier_arrive_expect_tx(full, comptime!(config.stage() as u32).runtime());
    let keys = comptime!(config.box_keys() as u32);
    #[unroll]
    for part in 0..comptime!(config.stage_keys() as u32 / keys) {
        // The page table has no entry for a page past the end of the tile: the last page is copied
        // again.
        let position = if comptime!(part == 0) {
            first
        } else {
            min(
                first + comptime!(part * keys),
                (tile.end() - 1) / keys * keys,
            )
        };
        let row = position_start::<u32>(
            pages,
            tile.slot,
            CUBE_POS_X / lengths.group,
            position,
            &lengths.cache,
            config.page_size,
            1u32,
        );
        #[unroll]
        for atom in 0..comptime!(config.atoms() as u32) {
            let to = stages
                + stage * comptime!(config.stage() as u32)
                + comptime!(atom * config.key_atom() as u32 + part * keys * ATOM_ROW as u32);
            cp_async_bulk_tensor_2d(to, map, comptime!(atom * ATOM as u32).runtime(), row, full);
        }
    }
}

/// Signals that a warp no longer needs the stage whose barrier `full` has address `full`.
#[cube]
pub(super) fn release(full: u32) {
    if lane() == 0 {
        mbarrier_arrive(full + 8);
    }
}
