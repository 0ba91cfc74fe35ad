use super::config::Config;
use super::cost::{Launch, Work};
use super::rows::RowOrder;
use super::shape::CHUNK_N;
use crate::QuantProblem;
use crate::ptx::ld_global_l2_16;
use cubecl::prelude::*;
use cubecl::std::FastDivmod;

/// The compilation argument of a divisor that the host precomputes.
#[cfg(feature = "inspect")]
type Divmod = <FastDivmod<u32> as LaunchArg>::CompilationArg;

/// The sizes of a problem as the tile kernels see them. Derived values are computed on the host,
/// and divisors as multipliers: the first loads are issued that much sooner.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct TileSizes {
    /// Rows of activations.
    pub m: u32,
    /// Output features; with SwiGLU, half of the weight's columns.
    pub n: u32,
    /// Input features, a multiple of 8.
    pub k: u32,
    /// Columns of chunks of the weight: N / 64, rounded up.
    pub chunks_n: u32,
    /// Rows of chunks of the weight: stored rows / 64, or 128 for e4m3 activations, rounded up.
    pub chunks_k: u32,
    /// Blocks of rows of activations.
    pub row_blocks: u32,
    /// The divisor for divisions by the number of tiles that are numbered before the next column,
    /// or with experts before the next block of rows: `row_blocks`, or with experts `columns`.
    pub by_inner: FastDivmod<u32>,
    /// Output tiles along N.
    pub columns: u32,
    /// Steps of K in a tile.
    pub depth: u32,
    /// The divisor for divisions by `depth`.
    pub by_depth: FastDivmod<u32>,
    /// The number of output tiles that are divided into stripes; these are the first tiles.
    pub striped: u32,
    /// The number of waves of the other tiles. Each block computes one tile in a wave.
    pub waves: u32,
    /// The minimum number of units of work in the stripe of a block.
    pub units_each: u32,
    /// The number of blocks, from the first on, whose stripe has one more unit.
    pub blocks_with_one_more: u32,
    /// Masks that select nibbles of a word.
    pub masks: NibbleMasks,
}

/// Returns the sizes with the number of blocks of rows that a routing decided on the device, at the
/// address `row_blocks`, and with their work divided among all blocks of the launch. Without
/// experts, returns the sizes.
#[cube]
pub(crate) fn of_routing(
    sizes: TileSizes,
    row_blocks: u64,
    #[comptime] config: Config,
) -> TileSizes {
    if comptime!(config.rows.has_experts()) {
        let row_blocks = ld_global_l2_16(row_blocks).extract(0usize);
        let tiles = row_blocks * sizes.columns;
        // As `Work::waves` does on the host.
        let waves = if comptime!(config.tile.has_waves()) {
            max(tiles / CUBE_COUNT_X, 1u32) - 1
        } else {
            sizes.waves
        };
        let striped = if comptime!(config.tile.has_waves()) {
            tiles - waves * CUBE_COUNT_X
        } else {
            sizes.striped
        };
        let units = if comptime!(config.tile.has_waves()) {
            striped * sizes.depth
        } else {
            tiles * sizes.depth
        };
        TileSizes {
            m: sizes.m,
            n: sizes.n,
            k: sizes.k,
            chunks_n: sizes.chunks_n,
            chunks_k: sizes.chunks_k,
            row_blocks,
            by_inner: sizes.by_inner,
            columns: sizes.columns,
            depth: sizes.depth,
            by_depth: sizes.by_depth,
            striped,
            waves,
            units_each: units / CUBE_COUNT_X,
            blocks_with_one_more: units % CUBE_COUNT_X,
            masks: sizes.masks,
        }
    } else {
        sizes
    }
}

/// Masks of the lowest nibble, and of the second lowest nibble, of both halves of a word. They are
/// kernel arguments because the compiler would load a constant anew for every word.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct NibbleMasks {
    /// The mask 0x000f000f of the lowest nibbles.
    pub low: u32,
    /// The mask 0x00f000f0 of the second lowest nibbles.
    pub high: u32,
}

/// Returns the launch argument of the masks.
pub(crate) fn nibble_masks() -> NibbleMasksLaunch {
    NibbleMasksLaunch::new(0x000f_000f, 0x00f0_00f0)
}

/// Returns the launch argument of the lengths of a problem, for a launch. With experts, the kernel
/// computes the work of its blocks from the routing
/// ([`of_routing`]).
pub(crate) fn sizes(problem: &QuantProblem, rows: RowOrder, launch: &Launch) -> TileSizesLaunch {
    let layout = problem.weight.tiles();
    let work = Work::new(problem, &launch.tile);
    let waves = work.waves(&launch.tile, launch.blocks);
    let striped = work.tiles() - waves * launch.blocks;
    let (each, more) = (
        striped * work.depth / launch.blocks,
        striped * work.depth % launch.blocks,
    );
    let chunks_n = layout.n_padded() / CHUNK_N;
    let chunks_k = layout.k_padded() / launch.tile.stored_chunk_rows();
    let k = super::row_length(problem.k());
    let [
        m,
        n,
        k,
        chunks_n,
        chunks_k,
        row_blocks,
        columns,
        depth,
        striped,
        waves,
        each,
        more,
    ] = [
        problem.m,
        problem.outputs(),
        k,
        chunks_n,
        chunks_k,
        work.row_blocks,
        work.columns,
        work.depth,
        striped,
        waves,
        each,
        more,
    ]
    .map(|length| length as u32);
    TileSizesLaunch::new(
        m,
        n,
        k,
        chunks_n,
        chunks_k,
        row_blocks,
        if rows.has_experts() {
            columns
        } else {
            row_blocks
        },
        columns,
        depth,
        depth,
        striped,
        waves,
        each,
        more,
        nibble_masks(),
    )
}

/// Returns the compilation argument of the masks, for a kernel that is compiled without a device.
#[cfg(feature = "inspect")]
pub(crate) fn compiled_masks() -> NibbleMasksCompilationArg {
    NibbleMasksCompilationArg { low: (), high: () }
}

/// Returns the compilation argument of the lengths, for a kernel that is compiled without a device.
#[cfg(feature = "inspect")]
pub(crate) fn compiled_lengths() -> TileSizesCompilationArg {
    TileSizesCompilationArg {
        m: (),
        n: (),
        k: (),
        chunks_n: (),
        chunks_k: (),
        row_blocks: (),
        by_inner: Divmod::Fast,
        columns: (),
        depth: (),
        by_depth: Divmod::Fast,
        striped: (),
        waves: (),
        units_each: (),
        blocks_with_one_more: (),
        masks: compiled_masks(),
    }
}
