//! The choice of a tile and its blocks, from a model of the time a launch takes.

use super::candidates::{Format, chunk_nanoseconds};
use super::config::{CHUNK_K, Tile};
use super::exchange::MAX_BLOCKS;
use crate::device::MIN_CAPABILITY;
use crate::{ActivationDtype, Card, Epilogue, QuantProblem};
use marlin_format::{Bits, GroupSize, WeightLayout};

/// A launch of a tile kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Launch {
    /// The layout of a block's work.
    pub tile: Tile,
    /// Blocks: at most one for each multiprocessor. Of clusters there is one for each tile.
    pub blocks: usize,
}

/// Microseconds of a kernel of its own for SwiGLU after the matmul: 2.2 for one row of Llama 2 7B
/// on an H200.
const SWIGLU_MICROSECONDS: f64 = 2.2;

/// The launch that the model expects to be the fastest; `None` if the card is too old or no tile
/// fits it, or if tiles that take SwiGLU are so much slower that a kernel of its own is the faster.
pub fn plan(problem: &QuantProblem, card: &Card) -> Option<Launch> {
    let (time, launch) = fastest(problem, card)?;
    if problem.epilogue == Epilogue::SwiGlu {
        let (without, _) = fastest(&problem.with_epilogue(Epilogue::None), card)?;
        return (time <= without + SWIGLU_MICROSECONDS).then_some(launch);
    }
    Some(launch)
}

/// The fastest launch, with the estimated microseconds.
fn fastest(problem: &QuantProblem, card: &Card) -> Option<(f64, Launch)> {
    let estimated = launches(problem, card)
        .into_iter()
        .map(|launch| (estimate(problem, &launch.tile, card), launch));
    estimated.min_by(|(a, _), (b, _)| a.total_cmp(b))
}

/// Every launch of a problem on a card: the candidates of [`plan`].
pub fn launches(problem: &QuantProblem, card: &Card) -> Vec<Launch> {
    if card.capability < MIN_CAPABILITY {
        return Vec::new();
    }
    let tiles = format(problem)
        .configs(card.capability, card.shared_limit)
        .map(|config| config.tile);
    let launch = |tile: Tile| {
        Some(Launch {
            tile,
            blocks: blocks(problem, &tile, card)?,
        })
    };
    tiles
        .filter(|tile| problem.fills(tile.columns()))
        .filter_map(launch)
        .collect()
}

/// The blocks of a launch; `None` if the card does not run a cluster for each tile at the same
/// time, or K has fewer steps than a cluster blocks.
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

/// The part of a configuration that a problem fixes.
pub(crate) fn format(problem: &QuantProblem) -> Format {
    let (spec, weight) = (problem.spec(), problem.weight.in_layout(WeightLayout::Tile));
    // With one group, K has no group boundaries: its scales are applied at the end.
    let group = if weight.groups() > 1 {
        spec.group
    } else {
        GroupSize::Channel
    };
    let sparsity = weight.format.sparsity;
    let bf16 = problem.activations == ActivationDtype::BF16;
    Format {
        group,
        bits: spec.bits,
        zero_points: spec.zero_points,
        bf16,
        sparsity,
        epilogue: problem.epilogue,
    }
}

/// A problem in a tile's units.
pub(crate) struct Work {
    /// Output tiles along N.
    pub columns: usize,
    /// Blocks of rows of activations.
    pub row_blocks: usize,
    /// Steps of K in a tile.
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
                .steps(layout.k_padded() / CHUNK_K),
        }
    }

    /// Output tiles.
    pub fn tiles(&self) -> usize {
        self.columns * self.row_blocks
    }

    /// Steps of all tiles.
    pub fn units(&self) -> usize {
        self.tiles() * self.depth
    }

    /// Waves of whole tiles, one for each block: as many as leave each block a tile or more that is
    /// divided into stripes.
    pub fn waves(&self, tile: &Tile, blocks: usize) -> usize {
        if tile.has_waves() {
            (self.tiles() / blocks).saturating_sub(1)
        } else {
            0
        }
    }
}

/// Bytes of weights that a multiprocessor of an H200 gets from memory while all read: 4.37 TB/s
/// among 132.
const BYTES_A_NANOSECOND: f64 = 33.0;

/// Microseconds of a launch of clusters beside its products, and nanoseconds of each byte that a
/// block receives. With the nanoseconds of their chunks they are a fit to launches of an H100 at
/// 64, 128 and 256 rows.
const CLUSTER_MICROSECONDS: f64 = 2.4;
const NANOSECONDS_A_RECEIVED_BYTE: f64 = 0.021;

/// Estimated time in microseconds: of the steps, of adding split tiles and writing whole ones, and
/// of the launch.
///
/// The constants, and [`chunk_nanoseconds`], are a fit to launches of every tile on an H200 (12
/// shapes, M = 1 to 256, groups of 128, f16): the mean error is 6 %, and the tile that they choose
/// is on average 0.4 %, at most 7 %, slower than the best. On other cards the choice was not
/// measured. The nanoseconds of 2:4 tiles are a fit to seven of the shapes: the tile that they
/// choose is on average 0.8 %, at most 4 %, slower than the best. Those of 8 bits are a fit to four
/// of the shapes (M = 1 to 64): on average 0.3 %, at most 3 %. Those of tiles of 128 rows are a fit
/// to the tiles that were chosen of nine shapes at M = 128 to 4096.
fn estimate(problem: &QuantProblem, tile: &Tile, card: &Card) -> f64 {
    let work = Work::new(problem, tile);
    let (warps, chunks) = (tile.warps() as f64, tile.chunks() as f64);
    if tile.is_clustered() {
        let products = work.depth.div_ceil(tile.cluster) as f64
            * chunks
            * chunk_nanoseconds(tile, problem.spec().bits);
        let received = format(problem).config(*tile).received_bytes() as f64;
        return (products + received * NANOSECONDS_A_RECEIVED_BYTE) / 1000.0
            + CLUSTER_MICROSECONDS
            + 0.2057 * warps;
    }
    // The units of a block.
    let share = work.units() as f64 / card.multiprocessors.min(work.units()).max(1) as f64;
    let products = share.ceil() * chunks * chunk_nanoseconds(tile, problem.spec().bits);
    let steps = match problem.spec().bits {
        Bits::Four => products,
        // Blocks of the same columns read the same bytes, from memory only once.
        Bits::Eight => {
            let bytes = share / work.row_blocks as f64
                * chunks
                * format(problem).config(*tile).chunk_bytes() as f64;
            products.max(bytes / BYTES_A_NANOSECOND)
        }
    } / 1000.0;

    // Blocks that have a part of the same tile, and tiles that a block writes.
    let is_split = share.fract() != 0.0 || share % work.depth as f64 != 0.0;
    let parts = if is_split {
        (work.depth as f64 / share).max(1.0).ceil()
    } else {
        0.0
    };
    let tails = (share / work.depth as f64).ceil();
    let outputs = (tile.rows() * tile.columns() / tile.threads()) as f64;
    // Sums under a flag cost a wait, but less for each sum.
    let ends = if format(problem).config(*tile).is_flagged() {
        3.8 + outputs * (0.0137 * parts + 0.0045 * tails)
    } else {
        outputs * (0.066 * parts + 0.0764 * tails)
    };
    steps + ends + 0.2057 * warps
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
            for group in GroupSize::ALL {
                for m in [1, 8, 9, 16, 17, 33, 64, 65, 4096] {
                    for (k, n) in [(128, 1), (4096, 4096), (28672, 8192), (18432, 73728)] {
                        for zero_points in [false, true] {
                            let mut problem = problem(m, k, n, group);
                            problem.weight.format.spec.zero_points = zero_points;
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
