//! Decides which problems this routine supports, and how many blocks split K.

use super::super::config::{COLUMNS, GemvConfig, WARPS};
use super::super::plan::{CLUSTERS, RESIDENT_WARPS};
use super::config::ExpertRows;
use crate::device::{CLUSTER_CAPABILITY, ClustersAtOnce};
use crate::tile::cost::format;
use crate::tile::shape::CHUNK_K;
use crate::{ActivationDtype, Card, Prologue, QuantProblem};
use marlin_format::{GroupSize, Sparsity, WeightLayout};

/// Returns the number of blocks that split K for 64 columns of an expert, or `None` if this routine
/// does not support the problem of tokens with `top_k` experts each (M = tokens x `top_k`). It
/// supports f16 and bf16 on a card with clusters, with a dense weight in the tile layout that has
/// more than one group, no act-order and a K that is a multiple of 8. With summed rows, it supports
/// at most eight experts a token, because a cluster has a block for each.
///
/// The result is the largest number with which all blocks are resident on the card at once, or the
/// smallest one.
pub fn plan(problem: &QuantProblem, rows: ExpertRows, top_k: usize, card: &Card) -> Option<usize> {
    if card.capability < CLUSTER_CAPABILITY {
        return None;
    }
    let layout = problem.weight.tiles();
    let tiles = layout.n_padded() / COLUMNS * problem.m;
    let takes = |&blocks: &usize| config(problem, rows, top_k, blocks).is_some();
    let is_resident = |blocks: &usize| {
        config(problem, rows, top_k, *blocks).is_some_and(|config| {
            let steps = (layout.k_padded() / CHUNK_K).div_ceil(config.chunks());
            blocks * WARPS <= steps
                && tiles * blocks * WARPS <= resident_warps(&config) * card.multiprocessors
        })
    };
    let resident = CLUSTERS.into_iter().rev().find(is_resident);
    resident.or_else(|| CLUSTERS.into_iter().find(takes))
}

/// The most rows of e2m1 in bf16 and groups of 32 that are multiplied in steps of two chunks. On an
/// H200 a layer of gpt-oss-20b takes 30 us with these and 32 us with steps of one chunk for one
/// token (4 rows), 45 and 42 for two, 81 and 73 for four.
const MAX_LONG_STEP_ROWS: usize = 4;

/// Returns true if the rows of a problem are multiplied in steps of one chunk where others have
/// two.
pub fn has_short_steps(problem: &QuantProblem) -> bool {
    let config = GemvConfig::new(1, &format(problem), problem.prologue);
    config.is_e2m1_in_bf16() && problem.m > MAX_LONG_STEP_ROWS
}

/// Returns the number of resident warps of a multiprocessor, limited by the kernel's registers: 80
/// for steps of one chunk of e2m1.
fn resident_warps(config: &GemvConfig) -> usize {
    if config.is_e2m1_in_bf16() && config.has_short_steps {
        24
    } else {
        RESIDENT_WARPS
    }
}

/// Returns the configuration of a row's product with K split among `blocks` blocks; `None` if this
/// routine does not support it.
pub(super) fn config(
    problem: &QuantProblem,
    rows: ExpertRows,
    top_k: usize,
    blocks: usize,
) -> Option<GemvConfig> {
    let config = GemvConfig {
        experts: Some(match rows {
            ExpertRows::Gathered => 1,
            ExpertRows::Summed => top_k,
        }),
        has_short_steps: has_short_steps(problem),
        ..GemvConfig::new(blocks, &format(problem), problem.prologue)
    };
    let format = problem.weight.format;
    let takes = problem.weight.layout == WeightLayout::Tile
        && format.sparsity == Sparsity::Dense
        && !format.permuted
        && problem.activations != ActivationDtype::F32
        && problem.scales == problem.activations
        && problem.prologue == Prologue::None
        && problem.k().is_multiple_of(8)
        && problem.divides_into(2 * COLUMNS)
        && top_k > 0
        && problem.m.is_multiple_of(top_k)
        && (rows == ExpertRows::Gathered || !config.is_gated())
        && CLUSTERS.contains(&blocks)
        && config.cluster() <= ClustersAtOnce::MOST_BLOCKS
        && config.group != GroupSize::Channel;
    takes.then_some(config)
}
