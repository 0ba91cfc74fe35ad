//! Decides which problems this routine supports, and how many blocks split K.

use super::config::{COLUMNS, GemvConfig, WARPS};
use crate::device::{CLUSTER_CAPABILITY, ClustersAtOnce};
use crate::tile::cost::format;
use crate::tile::shape::CHUNK_K;
use crate::{ActivationDtype, Card, Prologue, QuantProblem};
use marlin_format::{GroupSize, Sparsity, WeightLayout, WeightValue};

/// The number of resident warps of a multiprocessor, limited by the kernel's registers.
pub(super) const RESIDENT_WARPS: usize = 16;
/// The numbers of blocks among which K can be split.
pub const CLUSTERS: [usize; 4] = [1, 2, 4, 8];

/// Returns the number of blocks that split K for 64 columns, or `None` if this routine does not
/// support the problem. It supports one row of f16 or bf16, on a card with clusters, with a weight
/// in the tile layout that has more than one group, no act-order and a K that is a multiple of 8.
///
/// The result is the largest number with which all blocks are resident on the card at once, so that
/// they share the memory bandwidth evenly and end together. On an H200 this is the fastest cluster
/// size for the joined projections of Llama 2 7B, Llama 3 8B and Llama 2 70B.
///
/// Without a norm, it supports only weights of which a warp has fewer than four steps; for other
/// weights the [tile kernels](crate::tile) are faster.
pub fn plan(problem: &QuantProblem, card: &Card) -> Option<usize> {
    let QuantProblem {
        m,
        weight,
        activations,
        scales,
        ..
    } = *problem;
    let config = GemvConfig::new(1, &format(problem), problem.prologue);
    let takes = m == 1
        && card.capability >= CLUSTER_CAPABILITY
        && weight.layout == WeightLayout::Tile
        && activations != ActivationDtype::F32
        && scales == activations
        && !weight.format.permuted
        && weight.k.is_multiple_of(8)
        && problem.divides_into(2 * COLUMNS)
        && takes_format(&config);
    let layout = weight.tiles();
    let tiles = layout.n_padded() / COLUMNS;
    let steps = (layout.k_padded() / CHUNK_K).div_ceil(config.chunks());
    let fits = |&blocks: &usize| {
        blocks * WARPS <= steps
            && tiles * blocks * WARPS <= RESIDENT_WARPS * card.multiprocessors
            && fits_cluster(problem, blocks)
    };
    let blocks = CLUSTERS
        .into_iter()
        .rev()
        .find(fits)
        .unwrap_or_else(|| least_blocks(problem));
    let is_short = problem.prologue == Prologue::AddRmsNorm || steps < MOST_STEPS * blocks * WARPS;
    (takes && is_short).then_some(blocks)
}

/// The number of steps per warp from which on the tile kernels compute a problem without a norm. A
/// decode step of Llama 2 7B on an H200 takes 1.45 ms with o and down in this kernel (1 and 2.7
/// steps), and 1.53 ms with both in the tile kernels. A decode step of Llama 2 70B (4 and 14 steps)
/// takes 10.81 ms in this kernel, and 10.68 ms in the tile kernels before programmatic dependent
/// launch was used.
const MOST_STEPS: usize = 4;

/// Returns the minimum number of blocks that split K. Without a norm it is two: for one block ptxas
/// (13.5) spills a few registers, and one block is only of use for weights of few steps.
fn least_blocks(problem: &QuantProblem) -> usize {
    if problem.prologue == Prologue::AddRmsNorm {
        1
    } else {
        2
    }
}

/// Returns true if K can be split among `blocks` blocks: at least [`least_blocks`], and no more
/// than a cluster can hold for all of its tiles.
pub(super) fn fits_cluster(problem: &QuantProblem, blocks: usize) -> bool {
    (least_blocks(problem)..=ClustersAtOnce::MOST_BLOCKS / problem.epilogue.columns())
        .contains(&blocks)
}

/// Returns true if this routine supports a format: more than one group, and no register spills.
/// ptxas (13.5) spills a few registers for a 2:4 weight with zero points in groups of 32, and in
/// bf16 for three formats of a dense weight: 4 bits with zero points in groups of 32, with a norm;
/// 8 bits without zero points in groups of 32, without a norm; and 4 bits without zero points in
/// groups of 64, without a norm.
pub fn takes_format(config: &GemvConfig) -> bool {
    let GemvConfig {
        group,
        value,
        zero_points,
        bf16,
        sparsity,
        ..
    } = *config;
    if value.is_float() {
        // e2m1 in f16 and groups of 32 spills without a norm.
        let has_registers =
            value != WeightValue::E2m1 || group == GroupSize::G16 || bf16 || config.has_norm();
        return group != GroupSize::Channel && has_registers;
    }
    match (sparsity, group) {
        (_, GroupSize::Channel) => false,
        (Sparsity::TwoFour, GroupSize::G32) => !zero_points,
        (Sparsity::Dense, GroupSize::G32) if config.has_norm() => {
            value == WeightValue::Int8 || !zero_points || !bf16
        }
        (Sparsity::Dense, GroupSize::G32) => value == WeightValue::Int4 || zero_points || !bf16,
        (Sparsity::Dense, GroupSize::G64) => {
            config.has_norm() || value == WeightValue::Int8 || zero_points || !bf16
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use marlin_format::{QuantSpec, WeightDescriptor};

    const H200: Card = Card::assumed(90, 132, 227 * 1024);

    fn problem(m: usize, k: usize, n: usize) -> QuantProblem {
        let weight = WeightDescriptor::plain(QuantSpec::int4(GroupSize::G128), k, n)
            .in_layout(WeightLayout::Tile);
        QuantProblem::new(m, weight, ActivationDtype::F16)
    }

    #[test]
    fn as_many_blocks_as_fit_share_a_column() {
        let blocks = |k, n| plan(&problem(1, k, n).with_prologue(Prologue::AddRmsNorm), &H200);
        assert_eq!(blocks(4096, 12288), Some(2));
        assert_eq!(blocks(4096, 22016), Some(1));
        assert_eq!(blocks(4096, 6144), Some(4));
        assert_eq!(blocks(4096, 4096), Some(8));
        assert_eq!(
            blocks(1024, 4096),
            Some(2),
            "a block's warps have a step each"
        );
        assert_eq!(blocks(8192, 57344), Some(1));
        assert_eq!(blocks(256, 1), Some(1));
    }

    #[test]
    fn without_a_norm_it_takes_weights_of_few_steps() {
        let blocks = |k, n| plan(&problem(1, k, n), &H200);
        assert_eq!(blocks(4096, 4096), Some(8));
        assert_eq!(blocks(11008, 4096), Some(8));
        assert_eq!(blocks(14336, 4096), Some(8));
        assert_eq!(
            blocks(512, 4096),
            Some(2),
            "two blocks at least, with or without steps for all of their warps"
        );
        assert_eq!(blocks(8192, 8192), None);
        assert_eq!(blocks(28672, 8192), None);
    }

    #[test]
    fn what_it_does_not_take_has_no_blocks() {
        let taken = problem(1, 4096, 4096);
        assert!(plan(&taken, &H200).is_some());
        assert_eq!(
            plan(
                &taken,
                &Card {
                    capability: 89,
                    ..H200
                }
            ),
            None
        );
        let of = |spec: QuantSpec| {
            let weight = WeightDescriptor::plain(spec, 4096, 4096).in_layout(WeightLayout::Tile);
            QuantProblem { weight, ..taken }
        };
        assert!(plan(&of(QuantSpec::int8(GroupSize::G128)), &H200).is_some());
        let column = of(QuantSpec::int4(GroupSize::Channel));
        let bf16_scales = taken.with_scales(ActivationDtype::BF16);
        let f32 = QuantProblem {
            activations: ActivationDtype::F32,
            ..taken
        };
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
