//! The part of an attention problem that one block computes.

use super::config::AttentionConfig;
use super::shape::AttentionPass;
use crate::cache::CacheLengths;
use cubecl::prelude::*;
use cubecl::std::FastDivmod;

/// The sizes of a problem as the kernel sees them; see
/// [`AttentionShape`](super::AttentionShape) and [`AttentionPlan`](super::AttentionPlan).
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct AttentionSizes {
    pub heads: u32,
    pub cache: CacheLengths,
    /// The number of positions of the sliding window; `u32::MAX` without a window.
    pub window: u32,
    /// The planned number of splits of a sequence
    /// ([`AttentionPlan::splits`](super::AttentionPlan::splits)), as a divisor.
    pub splits: FastDivmod<u32>,
    /// The minimum number of positions of a split.
    pub split_least: u32,
    /// The maximum number of positions of a split.
    pub split_most: u32,
    pub epsilon: f32,
}

/// The part of the problem that a block computes, and the position of the thread in the block.
#[derive(CubeType, Clone, Copy)]
pub(super) struct WorkTile {
    pub row: u32,
    /// The position of the row's token.
    pub position: u32,
    /// The index of the block's first query head.
    pub head: u32,
    /// The index of the key head of the block's query heads.
    pub kv_head: u32,
    /// True if the block has the first query heads of the key head.
    pub is_first: bool,
    pub slot: u32,
    /// The first cached position of the block's split.
    pub start: u32,
    /// One past the last cached position of the block's split.
    pub end: u32,
    /// The number of cached positions in the window to which the row attends. The token's own
    /// position counts for prompts, but not in a step.
    pub cached: u32,
    /// The number of positions of a split; the last split may have fewer.
    pub split_len: u32,
    /// True if the block also attends to the token itself.
    pub has_token: bool,
    pub lane_group: u32,
    /// The thread's number in its lane group.
    pub lane: u32,
}

/// Returns the place of the current block and thread.
#[cube]
pub(super) fn place(
    row: u32,
    position: u32,
    slot: u32,
    sizes: &AttentionSizes,
    #[comptime] config: AttentionConfig,
) -> WorkTile {
    let kv_head = CUBE_POS_Y / comptime!(config.parts as u32);
    let own = comptime!(u32::from(config.pass == AttentionPass::Prompt));
    let cached = min(position, sizes.window - 1) + own;
    let after = position + own;
    let first = after - cached;
    let mut place = WorkTile {
        row,
        position,
        head: CUBE_POS_Y * comptime!(config.heads as u32),
        kv_head,
        is_first: kv_head * comptime!(config.parts as u32) == CUBE_POS_Y,
        slot,
        start: first,
        end: after,
        cached,
        split_len: cached,
        has_token: comptime!(config.pass == AttentionPass::Step).runtime(),
        lane_group: UNIT_POS_X / comptime!(config.lanes as u32),
        lane: UNIT_POS_X % comptime!(config.lanes as u32),
    };
    if comptime!(config.is_split) {
        let lane_groups = comptime!(config.lane_groups() as u32);
        let split_len = clamp(
            sizes.splits.div(cached) + 1,
            sizes.split_least,
            sizes.split_most,
        );
        let split_len = split_len.div_ceil(lane_groups) * lane_groups;
        let before = min(CUBE_POS_X * split_len, cached);
        place.start = first + before;
        place.end = first + min(before + split_len, cached);
        place.split_len = split_len;
        place.has_token = place.end == position && (before < cached || CUBE_POS_X == 0);
    }
    place
}
