//! The problems that this routine takes, and on how many blocks.

use super::config::{COLUMNS, Config, WARPS};
use crate::tile::candidates::Format;
use crate::tile::config::CHUNK_K;
use crate::tile::cost::format;
use crate::{ActivationDtype, Card, QuantProblem};
use marlin_format::{GroupSize, Sparsity, WeightLayout};

/// The compute capability, 90 for 9.0, that brought clusters.
const MIN_CAPABILITY: u32 = 90;
/// Warps of a multiprocessor that load weights at the same time: the kernel's registers allow this many.
const RESIDENT_WARPS: usize = 16;
/// The numbers of blocks that a cluster can have.
pub const CLUSTERS: [usize; 4] = [1, 2, 4, 8];

/// Returns the number of blocks that split K for 64 columns, if this routine takes the problem: one row of f16 or bf16, a weight in more than one
/// group, without act-order and with a K that is a multiple of 8, on a card with clusters.
///
/// The most blocks that are resident on the card at once: then they use its memory's rate evenly, and end together. On an H200 that is the fastest
/// cluster for the joined projections of Llama 2 7B, Llama 3 8B and Llama 2 70B.
pub fn plan(problem: &QuantProblem, card: &Card) -> Option<usize> {
    let QuantProblem { m, weight, activations, scales, .. } = *problem;
    let takes = m == 1
        && card.capability >= MIN_CAPABILITY
        && weight.layout == WeightLayout::Tile
        && activations != ActivationDtype::F32
        && scales == activations
        && !weight.format.permuted
        && weight.k.is_multiple_of(8)
        && takes_format(&format(problem));
    let layout = weight.tiles();
    let tiles = layout.n_padded() / COLUMNS;
    let steps = (layout.k_padded() / CHUNK_K).div_ceil(Config::new(1, &format(problem)).chunks());
    let fits = |&blocks: &usize| blocks * WARPS <= steps && tiles * blocks * WARPS <= RESIDENT_WARPS * card.multiprocessors;
    takes.then(|| CLUSTERS.into_iter().rev().find(fits).unwrap_or(1))
}

/// Returns true for more than one group, but for a 2:4 weight with zero points in groups of 32: there ptxas (13.5) spills a few registers.
pub(super) fn takes_format(format: &Format) -> bool {
    let Format { group, zero_points, sparsity, .. } = *format;
    group != GroupSize::Channel && !(sparsity == Sparsity::TwoFour && zero_points && group == GroupSize::G32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use marlin_format::{QuantSpec, WeightDescriptor};

    const H200: Card = Card { capability: 90, multiprocessors: 132, shared_limit: 227 * 1024 };

    fn problem(m: usize, k: usize, n: usize) -> QuantProblem {
        let weight = WeightDescriptor::plain(QuantSpec::int4(GroupSize::G128), k, n).in_layout(WeightLayout::Tile);
        QuantProblem::new(m, weight, ActivationDtype::F16)
    }

    #[test]
    fn as_many_blocks_as_fit_share_a_column() {
        let blocks = |k, n| plan(&problem(1, k, n), &H200);
        assert_eq!(blocks(4096, 12288), Some(2));
        assert_eq!(blocks(4096, 22016), Some(1));
        assert_eq!(blocks(4096, 6144), Some(4));
        assert_eq!(blocks(4096, 4096), Some(8));
        assert_eq!(blocks(1024, 4096), Some(2), "a block's warps have a step each");
        assert_eq!(blocks(8192, 57344), Some(1));
        assert_eq!(blocks(256, 1), Some(1));
    }

    #[test]
    fn what_it_does_not_take_has_no_blocks() {
        let taken = problem(1, 4096, 4096);
        assert!(plan(&taken, &H200).is_some());
        assert_eq!(plan(&taken, &Card { capability: 89, ..H200 }), None);
        let of = |spec: QuantSpec| {
            let weight = WeightDescriptor::plain(spec, 4096, 4096).in_layout(WeightLayout::Tile);
            QuantProblem { weight, ..taken }
        };
        assert!(plan(&of(QuantSpec::int8(GroupSize::G128)), &H200).is_some());
        let column = of(QuantSpec::int4(GroupSize::Channel));
        let bf16_scales = taken.with_scales(ActivationDtype::BF16);
        let f32 = QuantProblem { activations: ActivationDtype::F32, ..taken };
        let mut permuted = taken;
        permuted.weight.format.permuted = true;
        let sparse = |spec: QuantSpec| of(spec).with_sparsity(Sparsity::TwoFour);
        assert!(plan(&sparse(QuantSpec::int4(GroupSize::G32)), &H200).is_some());
        let spilling = sparse(QuantSpec::int4(GroupSize::G32).with_zero_points());
        let plain = taken.in_layout(WeightLayout::Plain);
        for problem in [
            problem(0, 256, 64),
            problem(2, 256, 64),
            problem(1, 128, 64),
            problem(1, 300, 64),
            permuted,
            bf16_scales,
            column,
            f32,
            plain,
            spilling,
        ] {
            assert_eq!(plan(&problem, &H200), None, "{problem}");
        }
    }
}
