//! The lm_head kernel on tensor cores. A block computes some groups of 16 columns for all rows, and
//! its warps take turns along K. Weights are fragment A of `mma.m16n8k16`, activations are fragment
//! B.
//!
//! The sum over K may be taken in any order as long as both fragments use the same order, so a lane
//! loads contiguous values: 16 bytes, eight features of one column or row, are its part of two
//! products. With `groupID = lane / 4` and `t = lane % 4`:
//!
//! | features of a step | product | in A, columns `groupID` and `groupID + 8` | in B, row `groupID` |
//! |---|---|---|---|
//! | `8t`, `8t + 1`     | first  | `a0`, `a1` | `b0` |
//! | `8t + 2`, `8t + 3` | first  | `a2`, `a3` | `b1` |
//! | `8t + 4`, `8t + 5` | second | `a0`, `a1` | `b0` |
//! | `8t + 6`, `8t + 7` | second | `a2`, `a3` | `b1` |
//!
//! Nothing is staged in shared memory: many small warps on each multiprocessor keep enough loads in
//! flight.
//!
//! Source: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".

use crate::ActivationDtype;
#[cfg(feature = "cubecl-runtime")]
use {
    crate::matmul::float::biased,
    crate::pdl::launch_dependents_and_wait,
    crate::ptx::{F4, U4, global_address, lane, ld_global_once_16, mma_m16n8k16},
    cubecl::prelude::*,
};

/// Features in a step, which is two products.
pub(super) const STEP: usize = 32;
/// Columns of a group.
const COLUMNS: usize = 16;
/// Maximum number of row tiles with which a block has a single group of columns.
const FEW_TILES: usize = 4;
/// Groups of columns of a block with more row tiles than [`FEW_TILES`]: each block reads all
/// activations from the second-level cache. 64 rows on an H200, 4096 features, 32,000 columns: 176
/// us in one group, 147 in two, 121 in four.
const MANY_ROWS_GROUPS: usize = 4;
/// Warps of a block.
pub(super) const WARPS: usize = 4;

/// The compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct LmHeadConfig {
    /// K, a multiple of [`STEP`].
    pub features: usize,
    /// Tiles of eight rows.
    pub tiles: usize,
    /// Groups of columns.
    pub groups: usize,
    /// True if values are in bf16; otherwise f16.
    pub bf16: bool,
}

impl LmHeadConfig {
    /// Creates the configuration for `rows` rows in f16 or bf16.
    pub fn new(rows: usize, features: usize, dtype: ActivationDtype) -> Self {
        let tiles = rows.div_ceil(8);
        let groups = if tiles <= FEW_TILES {
            1
        } else {
            MANY_ROWS_GROUPS
        };
        Self {
            features,
            tiles,
            groups,
            bf16: dtype == ActivationDtype::BF16,
        }
    }

    /// Returns the number of columns of a block.
    pub fn columns(&self) -> usize {
        COLUMNS * self.groups
    }
}

/// Computes the lm_head. The buffers are those of
/// [`FloatOperands`](crate::matmul::float::FloatOperands); `x` and `weight` are read as vectors of
/// four words, eight values.
#[cfg(feature = "cubecl-runtime")]
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn head<F: Float>(
    x: &[U4],
    weight: &[U4],
    bias: ComptimeOption<&[F]>,
    out: &mut [F],
    columns: usize,
    rows: usize,
    #[comptime] config: LmHeadConfig,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let vectors = comptime!(config.features / 8);
    let warp = UNIT_POS as usize / 32;
    let lane = lane() as usize;
    let (group_id, t) = (lane / 4, lane % 4);
    let first = CUBE_POS * comptime!(config.columns());
    // Columns and rows beyond the last load the last one again; their results are not used.
    let mut column_starts = Array::<usize>::new(comptime!(2 * config.groups));
    #[unroll]
    for half in 0..comptime!(2 * config.groups) {
        column_starts[half] =
            min(first + comptime!(8 * half) + group_id, columns - 1) * vectors + t;
    }
    let mut sums = Array::<F4>::new(comptime!(config.groups * config.tiles));
    #[unroll]
    for sum in 0..comptime!(config.groups * config.tiles) {
        sums[sum] = F4::new(0.0);
    }
    let mut row_starts = Array::<usize>::new(config.tiles);
    #[unroll]
    for tile in 0..config.tiles {
        row_starts[tile] = min(comptime!(8 * tile) + group_id, rows - 1) * vectors + t;
    }
    let mut place = warp * 4;
    while place < vectors {
        let mut words = Array::<U4>::new(comptime!(2 * config.groups));
        #[unroll]
        for half in 0..comptime!(2 * config.groups) {
            words[half] = load_once(weight, column_starts[half] + place);
        }
        #[unroll]
        for tile in 0..config.tiles {
            let row = x[row_starts[tile] + place];
            #[unroll]
            for group in 0..config.groups {
                let (upper, lower) = (words[comptime!(2 * group)], words[comptime!(2 * group + 1)]);
                let index = comptime!(group * config.tiles + tile);
                let (first_part, second_part) = (
                    fragment(upper, lower, 0usize),
                    fragment(upper, lower, 2usize),
                );
                let sum = mma_m16n8k16(
                    first_part,
                    row.extract(0usize),
                    row.extract(1usize),
                    sums[index],
                    comptime!(config.bf16),
                );
                sums[index] = mma_m16n8k16(
                    second_part,
                    row.extract(2usize),
                    row.extract(3usize),
                    sum,
                    comptime!(config.bf16),
                );
            }
        }
        place += comptime!(4 * WARPS);
    }

    // The sums of a group, [tile, register, warp, lane]. A lane's registers are rows 2t and 2t + 1
    // of its first column, then of its second column.
    let mut parts = Shared::<[f32]>::new_slice(comptime!(config.tiles * 4 * WARPS * 32));
    #[unroll]
    for group in 0..config.groups {
        if comptime!(group > 0) {
            sync_cube();
        }
        #[unroll]
        for tile in 0..config.tiles {
            #[unroll]
            for register in 0..4usize {
                parts[comptime!((4 * tile + register) * WARPS * 32) + warp * 32 + lane] =
                    sums[comptime!(group * config.tiles + tile)].extract(register);
            }
        }
        sync_cube();
        // Each thread of the block takes a row and a column; columns vary fastest.
        let mut output = UNIT_POS as usize;
        while output < comptime!(8 * COLUMNS * config.tiles) {
            let (row, column) = (output / COLUMNS, output % COLUMNS);
            let register = column / 8 * 2 + row % 2;
            let lane = column % 8 * 4 + row % 8 / 2;
            let place = (row / 8 * 4 + register) * comptime!(WARPS * 32) + lane;
            let mut sum = 0.0f32;
            #[unroll]
            for warp in 0..WARPS {
                sum += parts[place + comptime!(warp * 32)];
            }
            let column = first + comptime!(COLUMNS * group) + column;
            if row < rows && column < columns {
                let sum = biased::<F>(sum, &bias, column);
                out[row * columns + column] = F::cast_from(sum);
            }
            output += comptime!(32 * WARPS);
        }
    }
}

/// Loads the 16 bytes of a vector of the weight, bypassing the first-level cache so that the
/// activations stay in it.
#[cfg(feature = "cubecl-runtime")]
#[cube]
fn load_once(weight: &[U4], place: usize) -> U4 {
    ld_global_once_16(global_address(weight) + 16u64 * u64::cast_from(place))
}

/// Builds fragment A from words `word` and `word + 1` of two columns.
#[cfg(feature = "cubecl-runtime")]
#[cube]
fn fragment(upper: U4, lower: U4, #[comptime] word: usize) -> U4 {
    let mut a = U4::new(0u32);
    a.insert(0usize, upper.extract(word));
    a.insert(1usize, lower.extract(word));
    a.insert(2usize, upper.extract(comptime!(word + 1)));
    a.insert(3usize, lower.extract(comptime!(word + 1)));
    a
}
