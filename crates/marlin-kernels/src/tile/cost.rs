//! The choice of a tile and of the number of blocks, from a model of the time of a launch.

use super::candidates::{Format, chunk_nanoseconds};
use super::exchange::MAX_BLOCKS;
use super::rows::RowOrder;
use super::shape::{CHUNK_K, Tile};
use crate::device::MIN_CAPABILITY;
use crate::{ActivationDtype, Card, Epilogue, QuantProblem};
use marlin_format::{GroupSize, WeightLayout};

/// A launch of a tile kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Launch {
    /// The division of a block's work.
    pub tile: Tile,
    /// The number of blocks: at most one for each multiprocessor. With clusters, there is one
    /// cluster for each tile.
    pub blocks: usize,
}

/// The microseconds of a separate SwiGLU kernel after the matmul: 2.2 for one row of Llama 2 7B on
/// an H200.
const SWIGLU_MICROSECONDS: f64 = 2.2;

/// Returns the launch that the model expects to be the fastest. `None` if the card is too old, if
/// no tile fits in its shared memory, or if a separate SwiGLU kernel after the matmul is expected
/// to be faster than tiles that compute SwiGLU.
pub fn plan(problem: &QuantProblem, card: &Card) -> Option<Launch> {
    let (time, launch) = fastest(problem, card)?;
    if problem.epilogue.is_gated() {
        let (without, _) = fastest(&problem.with_epilogue(Epilogue::None), card)?;
        return (time <= without + SWIGLU_MICROSECONDS).then_some(launch);
    }
    Some(launch)
}

/// Returns the fastest launch, and its estimated time in microseconds.
fn fastest(problem: &QuantProblem, card: &Card) -> Option<(f64, Launch)> {
    let estimated = launches(problem, card)
        .into_iter()
        .map(|launch| (estimate(problem, &launch.tile, card), launch));
    estimated.min_by(|(a, _), (b, _)| a.total_cmp(b))
}

/// Returns every launch of a problem on a card: the candidates of [`plan`].
pub fn launches(problem: &QuantProblem, card: &Card) -> Vec<Launch> {
    if card.capability < MIN_CAPABILITY {
        return Vec::new();
    }
    let tiles = format(problem)
        .configs(card.capability, card.shared_limit)
        .filter(|config| config.takes_columns(problem.n()))
        .map(|config| config.tile);
    let launch = |tile: Tile| {
        Some(Launch {
            tile,
            blocks: blocks(problem, &tile, card)?,
        })
    };
    tiles
        .filter(|tile| !tile.is_fp8() || takes_fp8(problem))
        .filter_map(launch)
        .collect()
}

/// Returns true if a problem's activations may be rounded to e4m3, its K fills the chunks of 128
/// rows, and its rows are in their natural order, which a norm before the product needs.
pub(crate) fn takes_fp8(problem: &QuantProblem) -> bool {
    problem.spec().fp8_activations
        && !problem.weight.format.permuted
        && problem.k().is_multiple_of(FP8_CHUNK)
}

/// The number of rows of K in a chunk with activations in e4m3.
const FP8_CHUNK: usize = 2 * CHUNK_K;

/// Returns the number of blocks of a launch. `None` if the card cannot run a cluster for each tile
/// at the same time, or if K has fewer steps than a cluster has blocks.
pub(crate) fn blocks(problem: &QuantProblem, tile: &Tile, card: &Card) -> Option<usize> {
    let work = Work::new(problem, tile);
    if tile.is_clustered() {
        let fits = (1..=card.clusters.of(tile.cluster)).contains(&work.tiles())
            && work.depth >= tile.cluster;
        return fits.then_some(work.tiles() * tile.cluster);
    }
    Some(
        card.multiprocessors
            .min(MAX_BLOCKS)
            .min(work.units())
            .max(1),
    )
}

/// Returns the part of a configuration that a problem determines.
pub(crate) fn format(problem: &QuantProblem) -> Format {
    let (spec, weight) = (problem.spec(), problem.weight.in_layout(WeightLayout::Tile));
    // A weight with one group has no group boundaries along K; its scales are applied at the end.
    let group = if weight.groups() > 1 {
        spec.scales.group
    } else {
        GroupSize::Channel
    };
    let sparsity = weight.format.sparsity;
    let bf16 = problem.activations == ActivationDtype::BF16;
    Format {
        group,
        value: spec.value,
        zero_points: spec.has_zero_points(),
        bf16,
        sparsity,
        epilogue: problem.epilogue,
        rows: RowOrder::InOrder,
    }
}

/// The work of a problem, in units of a tile.
pub(crate) struct Work {
    /// The number of output tiles along N.
    pub columns: usize,
    /// The number of blocks of rows of activations, which is the number of output tiles along M.
    pub row_blocks: usize,
    /// The number of steps of K in a tile.
    pub depth: usize,
}

impl Work {
    pub fn new(problem: &QuantProblem, tile: &Tile) -> Self {
        let layout = problem.weight.tiles();
        Self {
            columns: layout.n_padded().div_ceil(tile.columns()),
            row_blocks: problem.m.div_ceil(tile.rows()),
            depth: format(problem)
                .config(*tile)
                .steps(layout.k_padded() / tile.stored_chunk_rows()),
        }
    }

    /// Returns the number of output tiles.
    pub fn tiles(&self) -> usize {
        self.columns * self.row_blocks
    }

    /// Returns the number of units of work: the steps of all tiles.
    pub fn units(&self) -> usize {
        self.tiles() * self.depth
    }

    /// Returns the number of waves of whole tiles, one tile per block in each wave. At least one
    /// tile per block is left for division into stripes, if there are as many tiles as blocks.
    pub fn waves(&self, tile: &Tile, blocks: usize) -> usize {
        if tile.has_waves() {
            (self.tiles() / blocks).saturating_sub(1)
        } else {
            0
        }
    }
}

/// The bytes of weights per nanosecond that a multiprocessor of an H200 reads from memory while all
/// multiprocessors read: 4.37 TB/s among 132.
const BYTES_A_NANOSECOND: f64 = 33.0;

/// The microseconds of a launch of clusters beyond its products, and the nanoseconds of each byte
/// that a block receives. Both constants, and the nanoseconds of chunks of clustered tiles, are a
/// fit to launches on an H100 at 64, 128 and 256 rows.
const CLUSTER_MICROSECONDS: f64 = 2.4;
const NANOSECONDS_A_RECEIVED_BYTE: f64 = 0.021;

/// The microseconds in which a kernel rounds rows of activations to e4m3, of every launch and of
/// each value: 15.4 for 4096 rows of 4096 on an H200.
const FP8_MICROSECONDS: (f64, f64) = (2.5, 7.7e-7);

/// Returns the estimated time in microseconds: of the steps, of adding the sums of split tiles and
/// writing whole tiles, and of the launch.
///
/// The constants, and [`chunk_nanoseconds`], are a fit to launches of every tile on an H200 (12
/// shapes, M = 1 to 256, groups of 128, f16). The mean error is 6 %, and the chosen tile is on
/// average 0.4 %, at most 7 %, slower than the best tile. On other cards the choice was not
/// measured.
///
/// The nanoseconds of 2:4 tiles are a fit to seven of the shapes: the chosen tile is on average 0.8
/// %, at most 4 %, slower than the best tile. The nanoseconds of 8-bit tiles are a fit to four of
/// the shapes (M = 1 to 64): on average 0.3 %, at most 3 % slower. The nanoseconds of tiles of 128
/// rows are a fit to the tiles that were chosen for nine shapes at M = 128 to 4096.
fn estimate(problem: &QuantProblem, tile: &Tile, card: &Card) -> f64 {
    estimate_of(problem, tile, card, &Work::new(problem, tile))
}

/// Returns the estimated time of a problem with a given amount of work; see [`estimate`].
pub(crate) fn estimate_of(problem: &QuantProblem, tile: &Tile, card: &Card, work: &Work) -> f64 {
    let (warps, chunks) = (tile.warps() as f64, tile.chunks() as f64);
    if tile.is_clustered() {
        let products = work.depth.div_ceil(tile.cluster) as f64
            * chunks
            * chunk_nanoseconds(tile, problem.spec().value);
        let received = format(problem).config(*tile).received_bytes() as f64;
        return (products + received * NANOSECONDS_A_RECEIVED_BYTE) / 1000.0
            + CLUSTER_MICROSECONDS
            + 0.2057 * warps;
    }
    // The number of units of a block.
    let share = work.units() as f64 / card.multiprocessors.min(work.units()).max(1) as f64;
    let products = share.ceil() * chunks * chunk_nanoseconds(tile, problem.spec().value);
    let steps = match problem.spec().value.bits() {
        4 => products,
        // Blocks of the same columns read the same bytes, from memory only once.
        _ => {
            let bytes = share / work.row_blocks as f64
                * chunks
                * format(problem).config(*tile).chunk_bytes() as f64;
            products.max(bytes / BYTES_A_NANOSECOND)
        }
    } / 1000.0;

    // `parts` is the number of blocks that share a tile, and `tails` the number of tiles that a
    // block writes.
    let is_split = share.fract() != 0.0 || share % work.depth as f64 != 0.0;
    let parts = if is_split {
        (work.depth as f64 / share).max(1.0).ceil()
    } else {
        0.0
    };
    let tails = (share / work.depth as f64).ceil();
    let outputs = (tile.rows() * tile.columns() / tile.threads()) as f64;
    // Sums under a flag cost a wait, but less time for each sum.
    let ends = if format(problem).config(*tile).is_flagged() {
        3.8 + outputs * (0.0137 * parts + 0.0045 * tails)
    } else {
        outputs * (0.066 * parts + 0.0764 * tails)
    };
    let rounding = if tile.is_fp8() {
        FP8_MICROSECONDS.0 + FP8_MICROSECONDS.1 * (problem.m * problem.k()) as f64
    } else {
        0.0
    };
    rounding + steps + ends + 0.2057 * warps
}

#[cfg(test)]
mod tests {
    use super::*;
    use marlin_format::{QuantSpec, WeightDescriptor};

    const H200: Card = Card::assumed(90, 132, 227 * 1024);
    const RTX_4090: Card = Card::assumed(89, 128, 99 * 1024);
    const A100: Card = Card::assumed(80, 108, 163 * 1024);

    fn problem(m: usize, k: usize, n: usize, group: GroupSize) -> QuantProblem {
        QuantProblem::new(
            m,
            WeightDescriptor::plain(QuantSpec::int4(group), k, n),
            ActivationDtype::F16,
        )
    }

    #[test]
    fn every_problem_has_a_launch_on_every_card() {
        for card in [H200, RTX_4090, A100] {
            for group in GroupSize::INTEGERS {
                for m in [1, 8, 9, 16, 17, 33, 64, 65, 4096] {
                    for (k, n) in [(128, 1), (4096, 4096), (28672, 8192), (18432, 73728)] {
                        for zero_points in [false, true] {
                            let mut problem = problem(m, k, n, group);
                            problem.weight.format.spec = problem
                                .weight
                                .format
                                .spec
                                .with_zero_point(zero_points.into());
                            let launch = plan(&problem, &card)
                                .unwrap_or_else(|| panic!("{problem} on {card:?}"));
                            assert!(
                                format(&problem).config(launch.tile).shared_bytes()
                                    <= card.shared_limit,
                                "{problem} on {card:?}: {launch:?}"
                            );
                            assert!(
                                (1..=card.multiprocessors).contains(&launch.blocks),
                                "{problem} on {card:?}: {launch:?}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn few_rows_take_a_tile_of_few_rows() {
        for (m, rows) in [
            (1, 8),
            (8, 8),
            (9, 16),
            (16, 16),
            (17, 32),
            (32, 32),
            (4096, 128),
        ] {
            let launch = plan(&problem(m, 8192, 8192, GroupSize::G128), &H200)
                .map(|launch| launch.tile.rows());
            assert_eq!(launch, Some(rows), "M = {m}");
        }
        let small =
            plan(&problem(3, 72, 40, GroupSize::Channel), &H200).map(|launch| launch.tile.rows());
        assert_eq!(small, Some(8));
    }

    #[test]
    fn clusters_have_a_tile_each_and_run_at_the_same_time() {
        for (n, m, clusters) in [
            (4096, 64, 16),
            (6144, 128, 24),
            (8192, 64, 32),
            (12288, 64, 48),
        ] {
            let launch = plan(&problem(m, 4096, n, GroupSize::G128), &H200);
            let found = launch
                .filter(|launch| launch.tile.is_clustered())
                .map(|launch| launch.blocks / launch.tile.cluster);
            assert_eq!(found, Some(clusters), "N = {n}, M = {m}: {launch:?}");
        }
    }

    #[test]
    fn narrow_weights_take_deep_tiles_and_wide_weights_wide_ones() {
        let columns = |k, n| {
            plan(&problem(1, k, n, GroupSize::G128), &H200).map(|launch| launch.tile.columns())
        };
        assert_eq!(columns(4096, 4096), Some(64));
        assert_eq!(columns(8192, 57344), Some(256));
    }

    #[test]
    fn a_card_before_ampere_has_no_launch() {
        let card = Card::assumed(75, 40, 64 * 1024);
        assert_eq!(plan(&problem(1, 4096, 4096, GroupSize::G128), &card), None);
    }
}
