//! Outputs of threads that have consecutive columns of every eight rows of a tile
//! ([`has_runs`](Config::has_runs)): a thread reads its totals 16 bytes at a time, loads the scales
//! and biases of its columns once, and stores a row's outputs at once.

use super::config::Config;
use super::epilogue::{bias_of_expert, channel_scale_of_expert, gated};
use super::outputs::output;
use super::sizes::TileSizes;
use crate::ptx::{
    U4, cvt_halves, global_address_mut, ld_shared_f32_16, shared_address_mut, st_global_words,
};
use cubecl::prelude::*;

/// Adds the sums of the warps along K of eight rows, always in the same order, and stores them as a
/// thread's totals of n8 tile `batch_tile`.
#[cube]
pub(super) fn read_runs(
    reduce: &mut Shared<[f32]>,
    totals: &mut Array<f32>,
    #[comptime] batch_tile: usize,
    #[comptime] config: Config,
) {
    let (run, parts) = comptime!((config.run(), config.epilogue.columns()));
    let (columns, stride) = comptime!((config.tile.columns(), config.reduce_stride() as u32));
    let buffers = comptime!(config.reduce_floats() / config.eight_rows_floats());
    let buffer = comptime!((batch_tile % buffers * config.eight_rows_floats()) as u32);
    let buffer = shared_address_mut::<f32>(reduce) + comptime!(4 * buffer);
    let first = comptime!(batch_tile * config.outputs_of_eight_rows());
    #[unroll]
    for part in 0..parts {
        let index = output(part, config);
        let place = index / comptime!(columns as u32) * stride + index % comptime!(columns as u32);
        #[unroll]
        for four in 0..comptime!(run.div_ceil(4)) {
            let at = buffer + place * 4 + comptime!(16 * four as u32);
            // A run of two is the first or the last half of 16 bytes.
            let from = if comptime!(run < 4) { at - at % 16 } else { at };
            let mut total = ld_shared_f32_16(from);
            #[unroll]
            for k in 1..comptime!(config.tile.warps_k) {
                total += ld_shared_f32_16(from + comptime!(32 * k as u32 * stride));
            }
            #[unroll]
            for i in 0..comptime!(if run < 4 { run } else { 4 }) {
                totals[comptime!(first + (4 * four + i) * parts + part)] = if comptime!(run < 4) {
                    select(
                        at.is_multiple_of(16),
                        total.extract(i),
                        total.extract(comptime!(i + 2)),
                    )
                } else {
                    total.extract(i)
                };
            }
        }
    }
}

/// Writes the outputs of a thread's totals: `rows` rows from `first_row` on, of the tile whose
/// first column is `first_column`.
#[cube]
pub(super) fn write_runs<F: Float>(
    totals: &Array<f32>,
    first_row: u32,
    rows: u32,
    expert: u32,
    first_column: u32,
    scales: &[F],
    bias: &ComptimeOption<&[F]>,
    out: &mut [F],
    sizes: &TileSizes,
    #[comptime] config: Config,
) {
    let (run, parts) = comptime!((config.run(), config.epilogue.columns()));
    let columns = comptime!(config.tile.columns() as u32);
    let index = output(0usize, config);
    let (own_row, column) = (index / columns, first_column + index % columns);
    let mut factors = Array::<f32>::new(comptime!(run * parts));
    let mut biases = Array::<f32>::new(comptime!(run * parts));
    #[unroll]
    for i in 0..run {
        #[unroll]
        for part in 0..parts {
            // Columns beyond N read those of the last column, and are not stored.
            let of =
                min(column + comptime!(i as u32), sizes.n - 1) + sizes.n * comptime!(part as u32);
            let place = comptime!(i * parts + part);
            factors[place] = if comptime!(config.grouped()) {
                1.0f32.runtime()
            } else {
                let place = channel_scale_of_expert(of, expert, sizes, config);
                f32::cast_from(scales[place as usize])
            };
            biases[place] = #[comptime]
            match bias {
                ComptimeOption::Some(bias) => {
                    f32::cast_from(bias[bias_of_expert(of, expert, sizes, config) as usize])
                }
                ComptimeOption::None => 0.0f32.runtime(),
            };
        }
    }
    let is_whole =
        sizes.n.is_multiple_of(comptime!(run as u32)) && column + comptime!(run as u32) <= sizes.n;
    let address = global_address_mut::<F>(out);
    #[unroll]
    for tile in 0..comptime!(config.batch_tiles_each()) {
        let row = comptime!(8 * tile as u32) + own_row;
        if row < rows {
            let mut values = Array::<f32>::new(run);
            #[unroll]
            for i in 0..run {
                let place = comptime!(i * parts);
                let first = comptime!(tile * config.outputs_of_eight_rows() + place);
                let value = fma(totals[first], factors[place], biases[place]);
                values[i] = if comptime!(config.is_gated()) {
                    gated(
                        value,
                        fma(
                            totals[comptime!(first + 1)],
                            factors[comptime!(place + 1)],
                            biases[comptime!(place + 1)],
                        ),
                        config.epilogue,
                    )
                } else {
                    value
                };
            }
            let at = (first_row + row) * sizes.n + column;
            if is_whole {
                let mut words = U4::new(0u32);
                #[unroll]
                for i in 0..comptime!(run / 2) {
                    words.insert(
                        i,
                        cvt_halves(
                            values[comptime!(2 * i)],
                            values[comptime!(2 * i + 1)],
                            config.bf16,
                        ),
                    );
                }
                st_global_words(address + u64::cast_from(at) * 2, words, comptime!(run / 2));
            } else {
                #[unroll]
                for i in 0..run {
                    if column + comptime!(i as u32) < sizes.n {
                        out[(at + comptime!(i as u32)) as usize] = F::cast_from(values[i]);
                    }
                }
            }
        }
    }
}
