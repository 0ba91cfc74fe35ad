use super::config::{CHUNK_K, CHUNK_N};
use super::cost::{Launch, Work};
use crate::QuantProblem;
use cubecl::prelude::*;
use cubecl::std::FastDivmod;

/// A divisor that the host precomputes for CubeCL.
#[cfg(feature = "inspect")]
type Divmod = <FastDivmod<u32> as LaunchArg>::CompilationArg;

/// Lengths of a problem as the tile kernels see them. Derived values are computed on the host, and
/// divisors as multipliers: the first loads are issued that much sooner.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Lengths {
    /// Rows of activations.
    pub m: u32,
    /// Output features: with SwiGLU half of the weight's columns.
    pub n: u32,
    /// Input features, a multiple of 8.
    pub k: u32,
    /// Columns of chunks of the weight: N / 64, rounded up.
    pub chunks_n: u32,
    /// Rows of chunks of the weight: K / 64, rounded up.
    pub chunks_k: u32,
    /// Blocks of rows of activations.
    pub row_blocks: u32,
    /// Divides by them.
    pub by_row_blocks: FastDivmod<u32>,
    /// Output tiles along N.
    pub columns: u32,
    /// Steps of K in a tile.
    pub depth: u32,
    /// Divides by the steps of K in a tile.
    pub by_depth: FastDivmod<u32>,
    /// Output tiles that are divided into stripes, the first of all.
    pub striped: u32,
    /// Waves of the other tiles, of which each block has one in a wave.
    pub waves: u32,
    /// Units of work that every block has in its stripe.
    pub units_each: u32,
    /// Blocks that have one more.
    pub blocks_with_one_more: u32,
    /// Masks of the nibbles of a word.
    pub masks: NibbleMasks,
}

/// Masks of the lowest nibble of both halves of a word, and of the next. They are parameters
/// because the compiler would load a constant anew for every word.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct NibbleMasks {
    /// 0x000f000f.
    pub low: u32,
    /// 0x00f000f0.
    pub high: u32,
}

/// The masks as a launch passes them.
pub(crate) fn nibble_masks() -> NibbleMasksLaunch {
    NibbleMasksLaunch::new(0x000f_000f, 0x00f0_00f0)
}

/// The lengths of a problem under a launch.
pub(crate) fn lengths(problem: &QuantProblem, launch: &Launch) -> LengthsLaunch {
    let layout = problem.weight.tiles();
    let work = Work::new(problem, &launch.tile);
    let waves = work.waves(&launch.tile, launch.blocks);
    let striped = work.tiles() - waves * launch.blocks;
    let (each, more) = (
        striped * work.depth / launch.blocks,
        striped * work.depth % launch.blocks,
    );
    let (chunks_n, chunks_k) = (layout.n_padded() / CHUNK_N, layout.k_padded() / CHUNK_K);
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
    LengthsLaunch::new(
        m,
        n,
        k,
        chunks_n,
        chunks_k,
        row_blocks,
        row_blocks,
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

/// The masks as a kernel without a device is compiled for.
#[cfg(feature = "inspect")]
pub(crate) fn compiled_masks() -> NibbleMasksCompilationArg {
    NibbleMasksCompilationArg { low: (), high: () }
}

/// The lengths as a kernel without a device is compiled for.
#[cfg(feature = "inspect")]
pub(crate) fn compiled_lengths() -> LengthsCompilationArg {
    LengthsCompilationArg {
        m: (),
        n: (),
        k: (),
        chunks_n: (),
        chunks_k: (),
        row_blocks: (),
        by_row_blocks: Divmod::Fast,
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
