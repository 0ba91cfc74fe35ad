//! The assignment of a tile's outputs to the threads that add and write them, and the barrier of
//! these threads.

use super::config::Config;
#[cfg(feature = "cubecl-runtime")]
use {crate::ptx::bar_sync, cubecl::prelude::*};

/// The number of the named barrier of the warps that multiply. Barrier 0 is the barrier of
/// `sync_cube`.
pub(crate) const CONSUMERS: usize = 1;

impl Config {
    /// Returns the number of totals of a thread at the end of a tile.
    pub(crate) const fn outputs(&self) -> usize {
        self.batch_tiles_each() * self.outputs_of_eight_rows()
    }

    /// Returns true if a thread has consecutive columns of every eight rows, which it stores at
    /// once, always the same columns. Other threads have too few outputs.
    pub(crate) const fn has_runs(&self) -> bool {
        self.tile.batch_tiles > 8 && (8 * self.output_columns()).is_multiple_of(self.tile.threads())
    }

    /// Returns the number of consecutive outputs of a thread, if it [has runs](Self::has_runs).
    pub(crate) const fn run(&self) -> usize {
        8 * self.output_columns() / self.tile.threads()
    }

    /// Returns the number of totals of a thread in eight rows. Of every eight rows, a thread has
    /// the outputs `i * threads + UNIT_POS_X`, counted row by row, or with [runs](Self::has_runs)
    /// of `count` the outputs `UNIT_POS_X * count + i`. With SwiGLU an output has two totals, of
    /// gate and up.
    pub(crate) const fn outputs_of_eight_rows(&self) -> usize {
        self.epilogue.columns() * (8 * self.output_columns()).div_ceil(self.tile.threads())
    }
}

/// Waits for all warps that multiply.
#[cfg(feature = "cubecl-runtime")]
#[cube]
pub(crate) fn sync_consumers(#[comptime] config: Config) {
    if comptime!(config.has_producer()) {
        bar_sync(CONSUMERS, comptime!(config.tile.threads()));
    } else {
        sync_cube();
    }
}

/// Returns the position of a thread's total `i` in its tile, counted row by row.
#[cfg(feature = "cubecl-runtime")]
#[cube]
pub(crate) fn output(#[comptime] i: usize, #[comptime] config: Config) -> u32 {
    let count = comptime!(config.outputs_of_eight_rows());
    let eight_rows = comptime!((i / count * 8 * config.tile.columns()) as u32);
    if comptime!(config.has_runs()) {
        let run = comptime!(config.run() as u32);
        let columns = comptime!(config.epilogue.columns());
        let place = UNIT_POS_X * run + comptime!((i % count / columns) as u32);
        if comptime!(config.is_gated()) {
            let columns = comptime!(config.output_columns() as u32);
            place + place / columns * columns + comptime!(eight_rows + (i % 2) as u32 * columns)
        } else {
            place + eight_rows
        }
    } else if comptime!(config.is_gated()) {
        // Totals 2j and 2j + 1 are a gate and the corresponding up, which is half of the tile's
        // columns further on.
        let columns = comptime!(config.output_columns() as u32);
        let place = UNIT_POS_X + comptime!((i % count / 2 * config.tile.threads()) as u32);
        place + place / columns * columns + comptime!(eight_rows + (i % 2) as u32 * columns)
    } else {
        UNIT_POS_X + comptime!(eight_rows + (i % count * config.tile.threads()) as u32)
    }
}

/// Returns true if a thread's total `i` exists in a tile of `rows` rows.
#[cfg(feature = "cubecl-runtime")]
#[cube]
pub(crate) fn has_output(#[comptime] i: usize, rows: u32, #[comptime] config: Config) -> bool {
    let count = comptime!(config.outputs_of_eight_rows() / config.epilogue.columns());
    let outputs = comptime!(8 * config.output_columns());
    let in_tile = output(i, config) < rows * comptime!(config.tile.columns() as u32);
    if comptime!(
        i / config.epilogue.columns() % count + 1 < count
            || count * config.tile.threads() == outputs
    ) {
        in_tile
    } else {
        in_tile && UNIT_POS_X < comptime!((outputs - (count - 1) * config.tile.threads()) as u32)
    }
}
