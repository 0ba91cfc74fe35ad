//! The attention kernel.

use super::block::{AttentionSizes, WorkTile, place};
use super::config::AttentionConfig;
use super::finish::finish;
use super::lane_group::{F8, load};
use super::shape::AttentionPass;
use super::softmax::{Sums, accumulate, score, start};
use super::stage::{stage, stage_queries, write_codes, write_token};
use crate::cache::{CacheFormat, CacheLengths};
use crate::kernels::SequenceState;
use cubecl::prelude::*;
use marlin_kernels::pdl::{launch_dependents, wait};

/// Computes [`attention`](super::attention()). The buffers are those of
/// [`AttentionArgs`](super::AttentionArgs). Keys and values are vectors of
/// [`VECTOR`](super::shape::VECTOR) elements, stored as
/// [`KeyValueType`](super::config::KeyValueType) defines. The grid is
/// [`AttentionPlan::blocks`](super::AttentionPlan::blocks).
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn attention<F: Float, H: Numeric, W: Size>(
    qkv: &[F],
    state: &[i32],
    keys: &mut [Vector<H, W>],
    values: &mut [Vector<H, W>],
    pages: ComptimeOption<&[i32]>,
    cos: &[f32],
    sin: &[f32],
    q_norm: ComptimeOption<&[F]>,
    k_norm: ComptimeOption<&[F]>,
    sinks: ComptimeOption<&[F]>,
    out: &mut [F],
    partials: &mut [f32],
    arrival_counters: &mut [Atomic<u32>],
    sizes: AttentionSizes,
    #[comptime] config: AttentionConfig,
    #[define(F)] _dtype: ElemType,
    #[define(H)] _held: ElemType,
) {
    launch_dependents(config.uses_pdl);
    // The cached positions, the page table and the state that a step reads are complete before the
    // pass begins. The rows of prompts attend to keys and values that the previous kernel writes.
    let is_step = comptime!(config.pass == AttentionPass::Step);
    wait(comptime!(config.uses_pdl && !is_step));
    let row = CUBE_POS_Z;
    let position = state[(row * comptime!(SequenceState::WORDS as u32)
        + comptime!(SequenceState::POSITION as u32)) as usize];
    let slot = u32::cast_from(
        state[(row * comptime!(SequenceState::WORDS as u32) + comptime!(SequenceState::SLOT as u32))
            as usize],
    );
    let has_row =
        position >= 0 && u32::cast_from(position) < sizes.cache.max_len && slot < sizes.cache.slots;
    let place = place(
        row,
        if has_row {
            u32::cast_from(position)
        } else {
            0u32.runtime()
        },
        slot,
        &sizes,
        config,
    );

    // The first keys and values are loaded before q is staged, so that the loads overlap with the
    // staging.
    let held = comptime!(config.positions * config.lane_vectors());
    let mut key = Array::<Vector<H, W>>::new(held);
    let mut value = Array::<Vector<H, W>>::new(held);
    let mut key_scales = Array::<f32>::new(comptime!(config.scales()));
    let mut value_scales = Array::<f32>::new(comptime!(config.scales()));
    if has_row && place.start < place.end {
        load(
            &*keys,
            &pages,
            &mut key,
            &mut key_scales,
            place.start,
            &place,
            &sizes.cache,
            config,
        );
        load(
            &*values,
            &pages,
            &mut value,
            &mut value_scales,
            place.start,
            &place,
            &sizes.cache,
            config,
        );
    }

    wait(comptime!(config.uses_pdl && is_step));
    if !has_row || place.start >= place.end && !place.has_token {
        terminate!();
    }

    // The block's query heads, then, in a step, the token's key and value.
    let mut staged = Shared::<[f32]>::new_aligned_slice(
        comptime!(config.staged_heads() * config.head_dim),
        32usize,
    );
    if comptime!(is_step) {
        stage(
            qkv,
            cos,
            sin,
            &q_norm,
            &k_norm,
            &mut staged,
            &place,
            &sizes,
            config,
        );
    } else {
        stage_queries(qkv, &mut staged, &place, &sizes, config);
    }
    sync_cube();

    let mut sums = Sums {
        best: Array::<f32>::new(config.heads),
        total: Array::<f32>::new(config.heads),
        out: Array::<F8>::new(comptime!(config.heads * config.lane_vectors())),
    };
    start(&mut sums, &staged, &place, config);
    if comptime!(is_step) && place.has_token && place.is_first {
        if comptime!(config.format == CacheFormat::E4m3) {
            write_codes(keys, values, &pages, &staged, &place, &sizes.cache, config);
        } else {
            write_token::<F, H, W>(keys, values, &pages, &staged, &place, &sizes.cache, config);
        }
    }
    attend::<F, H, W>(
        &*keys,
        &*values,
        &pages,
        &mut key,
        &mut key_scales,
        &mut value,
        &mut value_scales,
        &staged,
        &mut sums,
        &place,
        &sizes.cache,
        config,
    );
    finish(
        &sums,
        &sinks,
        out,
        partials,
        arrival_counters,
        &place,
        &sizes,
        config,
    );
}

/// Adds the cached positions of the block's split to the sums. `key` and `value` hold the keys and
/// values of the first tile.
#[cube]
fn attend<F: Float, H: Numeric, W: Size>(
    keys: &[Vector<H, W>],
    values: &[Vector<H, W>],
    pages: &ComptimeOption<&[i32]>,
    key: &mut Array<Vector<H, W>>,
    key_scales: &mut Array<f32>,
    value: &mut Array<Vector<H, W>>,
    value_scales: &mut Array<f32>,
    staged: &Shared<[f32]>,
    sums: &mut Sums,
    place: &WorkTile,
    lengths: &CacheLengths,
    #[comptime] config: AttentionConfig,
) {
    // The next keys and values are loaded as soon as their registers are free. Past the end of the
    // split, the last position is loaded again, and the result is not used.
    let tile = comptime!((config.lane_groups() * config.positions) as u32);
    let mut first = place.start;
    while first < place.end {
        let mut scores = Array::<f32>::new(comptime!(config.heads * config.positions));
        score::<F, H, W>(
            &mut scores,
            &*key,
            &*key_scales,
            staged,
            first,
            place,
            config,
        );
        load(
            keys,
            pages,
            key,
            key_scales,
            first + tile,
            place,
            lengths,
            config,
        );
        accumulate::<F, H, W>(sums, &mut scores, &*value, &*value_scales, config);
        load(
            values,
            pages,
            value,
            value_scales,
            first + tile,
            place,
            lengths,
            config,
        );
        first += tile;
    }
}
