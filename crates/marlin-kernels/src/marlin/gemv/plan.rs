//! Whether this routine takes a problem, and on how many blocks.

use super::config::{COLUMNS, STEP_K, WARPS};
use crate::marlin::plan::format;
use crate::marlin::{Card, layout};
use crate::{ActivationDtype, Problem};
use marlin_format::{Bits, GroupSize};

/// The compute capability, 90 for 9.0, that brought clusters.
const MIN_CAPABILITY: u32 = 90;
/// Warps of a multiprocessor that ask for weights at the same time: a kernel's registers are for so many.
const RESIDENT_WARPS: usize = 16;
/// Blocks that can be a cluster.
pub const CLUSTERS: [usize; 4] = [1, 2, 4, 8];

/// Blocks that share the K of 64 columns, where this routine takes a problem: one row of f16 or bf16, a weight of 4 bits in more than one
/// group, without act-order and with a K that is a multiple of 8, on a card with clusters.
///
/// As many as all fit the card at once: then they share its memory's rate evenly, and end together. On an H200 that is the fastest cluster for the joined
/// projections of Llama 2 7B, Llama 3 8B and Llama 2 70B.
pub fn plan(problem: &Problem, card: &Card) -> Option<usize> {
    let Problem { m, n, k, spec, activations, scales, permuted } = *problem;
    let takes = m == 1
        && card.capability >= MIN_CAPABILITY
        && spec.bits == Bits::Four
        && activations != ActivationDtype::F32
        && scales == activations
        && !permuted
        && k.is_multiple_of(8)
        && format(problem).group != GroupSize::Channel;
    let layout = layout(k, n);
    let tiles = layout.n_padded() / COLUMNS;
    let steps = layout.k_padded().div_ceil(STEP_K);
    let fits = |&blocks: &usize| blocks * WARPS <= steps && tiles * blocks * WARPS <= RESIDENT_WARPS * card.multiprocessors;
    takes.then(|| CLUSTERS.into_iter().rev().find(fits).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use marlin_format::QuantSpec;

    const H200: Card = Card { capability: 90, multiprocessors: 132, shared_limit: 227 * 1024 };

    fn problem(m: usize, k: usize, n: usize) -> Problem {
        let spec = QuantSpec::int4(GroupSize::G128);
        Problem { m, n, k, spec, activations: ActivationDtype::F16, scales: ActivationDtype::F16, permuted: false }
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
        let wide = Problem { spec: QuantSpec::int8(GroupSize::G128), ..taken };
        let bf16_scales = Problem { scales: ActivationDtype::BF16, ..taken };
        let column = Problem { spec: QuantSpec::int4(GroupSize::Channel), ..taken };
        let f32 = Problem { activations: ActivationDtype::F32, ..taken };
        let permuted = Problem { permuted: true, ..taken };
        for problem in
            [problem(0, 256, 64), problem(2, 256, 64), problem(1, 128, 64), problem(1, 300, 64), permuted, wide, bf16_scales, column, f32]
        {
            assert_eq!(plan(&problem, &H200), None, "{problem}");
        }
    }
}
