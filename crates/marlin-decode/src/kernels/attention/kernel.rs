use super::finish::finish;
use super::plan::AttentionConfig;
use super::softmax::{Sums, accumulate, score, start};
use super::stage::{stage, write_token};
use super::team::{F8, load};
use crate::kernels::Row;
use cubecl::prelude::*;
use cubecl::std::FastDivmod;

/// Lengths of a problem as the kernel sees them; see [`AttentionShape`](super::AttentionShape) and [`AttentionPlan`](super::AttentionPlan).
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Lengths {
    pub heads: u32,
    pub kv_heads: u32,
    pub slots: u32,
    pub max_len: u32,
    /// Positions that count; of any length where there is no window.
    pub window: u32,
    /// Shares that a sequence is cut into, and the fewest and most positions of one.
    pub shares: FastDivmod<u32>,
    pub share_least: u32,
    pub share_most: u32,
    pub epsilon: f32,
}

/// What a block works on.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    pub row: u32,
    /// The position of the row's token.
    pub position: u32,
    /// The first of the block's query heads, and their key head.
    pub head: u32,
    pub kv_head: u32,
    /// Whether no other block has an earlier query head of that key head.
    pub is_first: bool,
    /// The first vector of the slot's keys, and of its values.
    pub cache: usize,
    /// The block's share of the positions before the token's: from `start`, before `end`.
    pub start: u32,
    pub end: u32,
    /// Positions before the token's that count, and those of a share but the last.
    pub cached: u32,
    pub share: u32,
    /// Whether the token itself is the block's too.
    pub has_token: bool,
    pub team: u32,
    pub lane: u32,
}

/// Buffers as in [`AttentionArgs`](super::AttentionArgs), keys and values in vectors of what holds [`VECTOR`](super::shape::VECTOR) elements
/// ([`Held`](super::plan::Held)); the grid is [`AttentionPlan::blocks`](super::AttentionPlan::blocks).
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn attention<F: Float, H: Numeric, W: Size>(
    qkv: &[F],
    state: &[i32],
    keys: &mut [Vector<H, W>],
    values: &mut [Vector<H, W>],
    cos: &[f32],
    sin: &[f32],
    q_norm: ComptimeOption<&[F]>,
    k_norm: ComptimeOption<&[F]>,
    out: &mut [F],
    partials: &mut [f32],
    tickets: &mut [Atomic<u32>],
    lengths: Lengths,
    #[comptime] config: AttentionConfig,
    #[define(F)] _dtype: ElemType,
    #[define(H)] _held: ElemType,
) {
    let row = CUBE_POS_Z;
    let position = state[(row * comptime!(Row::WORDS as u32) + comptime!(Row::POSITION as u32)) as usize];
    let slot = u32::cast_from(state[(row * comptime!(Row::WORDS as u32) + comptime!(Row::SLOT as u32)) as usize]);
    if position < 0 || u32::cast_from(position) >= lengths.max_len || slot >= lengths.slots {
        terminate!();
    }
    let place = place(row, u32::cast_from(position), slot, &lengths, config);
    if place.start >= place.end && !place.has_token {
        terminate!();
    }

    // The first keys and values are under way while q is made ready.
    let held = comptime!(config.positions * config.lane_vectors());
    let mut key = Array::<Vector<H, W>>::new(held);
    let mut value = Array::<Vector<H, W>>::new(held);
    if place.start < place.end {
        load(&*keys, &mut key, place.start, &place, config);
        load(&*values, &mut value, place.start, &place, config);
    }

    // The block's heads of q, then the token's key and value.
    let mut staged = Shared::<[f32]>::new_aligned_slice(comptime!((config.heads + 2) * config.head_dim), 32usize);
    stage(qkv, cos, sin, &q_norm, &k_norm, &mut staged, &place, &lengths, config);
    sync_cube();

    let mut sums = Sums {
        best: Array::<f32>::new(config.heads),
        total: Array::<f32>::new(config.heads),
        out: Array::<F8>::new(comptime!(config.heads * config.lane_vectors())),
    };
    start(&mut sums, &staged, &place, config);
    if place.has_token && place.is_first {
        write_token::<F, H, W>(keys, values, &staged, &place, config);
    }

    // The next keys and values are asked for as soon as there is room: past the share's end that is its last position, again and for nothing.
    let tile = comptime!((config.teams() * config.positions) as u32);
    let mut first = place.start;
    while first < place.end {
        let mut scores = Array::<f32>::new(comptime!(config.heads * config.positions));
        score::<F, H, W>(&mut scores, &key, &staged, first, &place, config);
        load(&*keys, &mut key, first + tile, &place, config);
        accumulate::<F, H, W>(&mut sums, &mut scores, &value, config);
        load(&*values, &mut value, first + tile, &place, config);
        first += tile;
    }
    finish(&sums, out, partials, tickets, &place, &lengths, config);
}

/// The block's work.
#[cube]
fn place(row: u32, position: u32, slot: u32, lengths: &Lengths, #[comptime] config: AttentionConfig) -> Place {
    let kv_head = CUBE_POS_Y / comptime!(config.parts as u32);
    let cached = min(position, lengths.window - 1);
    let first = position - cached;
    let mut place = Place {
        row,
        position,
        head: CUBE_POS_Y * comptime!(config.heads as u32),
        kv_head,
        is_first: kv_head * comptime!(config.parts as u32) == CUBE_POS_Y,
        cache: (slot * lengths.kv_heads + kv_head) as usize * (lengths.max_len * comptime!(config.vectors() as u32)) as usize,
        start: first,
        end: position,
        cached,
        share: cached,
        has_token: true.runtime(),
        team: UNIT_POS_X / comptime!(config.lanes as u32),
        lane: UNIT_POS_X % comptime!(config.lanes as u32),
    };
    if comptime!(config.is_shared) {
        let teams = comptime!(config.teams() as u32);
        let share = clamp(lengths.shares.div(cached) + 1, lengths.share_least, lengths.share_most);
        let share = share.div_ceil(teams) * teams;
        let before = min(CUBE_POS_X * share, cached);
        place.start = first + before;
        place.end = first + min(before + share, cached);
        place.share = share;
        place.has_token = place.end == position && (before < cached || CUBE_POS_X == 0);
    }
    place
}
