//! The end of the kernel: it adds the sums of the lane groups and of the splits, always in the same
//! order, and writes the output.

use super::block::{AttentionSizes, WorkTile};
use super::config::AttentionConfig;
use super::lane_group::{
    F8, has_vector, lane_group_max, lane_group_sum, lane_vector, set_shared_vector,
};
use super::plan::MAX_SPLITS;
use super::softmax::{NONE, Sums};
use cubecl::prelude::*;

/// Adds the sums of the block's lane groups. Writes the output if the sequence has one split.
/// Otherwise writes the sums to `partials`, and the last block to arrive adds the sums of all
/// splits.
#[cube]
pub(super) fn finish<F: Float>(
    sums: &Sums,
    sinks: &ComptimeOption<&[F]>,
    out: &mut [F],
    partials: &mut [f32],
    arrival_counters: &mut [Atomic<u32>],
    place: &WorkTile,
    sizes: &AttentionSizes,
    #[comptime] config: AttentionConfig,
) {
    let (lane_groups, count) = comptime!((config.lane_groups(), config.lane_vectors()));
    let outputs = comptime!(config.heads * config.head_dim);
    let mut best = Shared::<[f32]>::new_slice(comptime!(config.lane_groups() * config.heads));
    let mut total = Shared::<[f32]>::new_slice(comptime!(config.lane_groups() * config.heads));
    let mut parts = Shared::<[f32]>::new_aligned_slice(
        comptime!(config.lane_groups() * config.heads * config.head_dim),
        32usize,
    );
    let first_head = place.lane_group as usize * config.heads;
    #[unroll(config.unrolls())]
    for head in 0..config.heads {
        best[first_head + head] = sums.best[head];
    }
    sync_cube();
    // Each lane group scales its sums to the block's largest score, so that they can be added.
    #[unroll(config.unrolls())]
    for head in 0..config.heads {
        let kept = (sums.best[head] - block_best(&best, head, config)).exp();
        total[first_head + head] = sums.total[head] * kept;
        #[unroll(config.unrolls())]
        for j in 0..count {
            if has_vector(j, place, config) {
                let vector = (first_head + head) * comptime!(config.vectors())
                    + lane_vector(j, place, config) as usize;
                set_shared_vector(
                    &mut parts,
                    vector,
                    sums.out[head * count + j] * F8::new(kept),
                    config,
                );
            }
        }
    }
    sync_cube();

    let mut splits = 1u32.runtime();
    if comptime!(config.is_split) {
        splits = max(place.cached.div_ceil(place.split_len), splits);
    }
    let first_output =
        ((place.row * sizes.heads + place.head) * comptime!(config.head_dim as u32)) as usize;
    let head_group = place.row * CUBE_COUNT_Y + CUBE_POS_Y;
    let partial =
        ((head_group * CUBE_COUNT_X + CUBE_POS_X) * comptime!(config.partial() as u32)) as usize;
    for round in 0..comptime!(outputs.div_ceil(config.threads)) {
        let output = round * config.threads + UNIT_POS_X as usize;
        if output < outputs {
            let head = output / config.head_dim;
            let mut sum = 0.0f32.runtime();
            let mut part = 0.0f32.runtime();
            for lane_group in 0..lane_groups {
                sum += total[lane_group * config.heads + head];
                part += parts[lane_group * outputs + output];
            }
            if splits == 1 {
                sum += sink(sinks, place, head, block_best(&best, head, config));
                out[first_output + output] = F::cast_from(part / sum);
            } else {
                partials[partial + output] = part;
                if output == head * config.head_dim {
                    partials[partial + outputs + 2 * head] = block_best(&best, head, config);
                    partials[partial + outputs + 2 * head + 1] = sum;
                }
            }
        }
    }
    if comptime!(config.is_split) {
        if splits > 1 {
            combine(
                sinks,
                out,
                &*partials,
                arrival_counters,
                first_output,
                head_group,
                splits,
                place,
                config,
            );
        }
    }
}

/// Increments the arrival counter of the row's group of query heads. The block that arrives last
/// adds the partial sums of all splits and writes the output.
#[cube]
fn combine<F: Float>(
    sinks: &ComptimeOption<&[F]>,
    out: &mut [F],
    partials: &[f32],
    arrival_counters: &mut [Atomic<u32>],
    first_output: usize,
    head_group: u32,
    splits: u32,
    place: &WorkTile,
    #[comptime] config: AttentionConfig,
) {
    let mut arrived = Shared::<u32>::new();
    // This block's partial sums must be visible before its increment of the counter is visible.
    sync_storage();
    if UNIT_POS_X == 0 {
        *arrived = arrival_counters[head_group as usize].fetch_add(1u32);
    }
    // The partial sums of the other blocks must be read after the counter.
    sync_storage();
    if *arrived + 1 == splits {
        if UNIT_POS_X == 0 {
            arrival_counters[head_group as usize].store(0u32);
        }
        let outputs = comptime!(config.heads * config.head_dim);
        let stride = config.partial();
        let first = head_group as usize * CUBE_COUNT_X as usize * stride;
        let splits = splits as usize;
        let mut weights = Shared::<[f32]>::new_slice(comptime!(config.heads * MAX_SPLITS));
        let mut totals = Shared::<[f32]>::new_slice(config.heads);
        for round in 0..config.heads.div_ceil(config.lane_groups()) {
            let head = min(
                round * config.lane_groups() + place.lane_group as usize,
                comptime!(config.heads - 1),
            );
            let best = first + outputs + 2 * head;
            // A lane without a split reads the last split again: all lanes of a plane take part in
            // its shuffles, so all lanes need the same number of rounds.
            let rounds = splits.div_ceil(config.lanes);
            let mut most = NONE.runtime();
            for round in 0..rounds {
                let split = min(round * config.lanes + place.lane as usize, splits - 1);
                most = max(most, partials[best + split * stride]);
            }
            most = lane_group_max(most, config);
            let mut sum = 0.0f32.runtime();
            for round in 0..rounds {
                let own = round * config.lanes + place.lane as usize;
                let split = min(own, splits - 1);
                let weight = (partials[best + split * stride] - most).exp();
                weights[head * MAX_SPLITS + split] = weight;
                sum += select(
                    own < splits,
                    weight * partials[best + split * stride + 1],
                    0.0f32.runtime(),
                );
            }
            totals[head] = lane_group_sum(sum, config) + sink(sinks, place, head, most);
        }
        sync_cube();
        let mut output = UNIT_POS_X as usize;
        while output < outputs {
            let head = output / config.head_dim;
            let mut sum = 0.0f32.runtime();
            for split in 0..splits {
                sum +=
                    weights[head * MAX_SPLITS + split] * partials[first + split * stride + output];
            }
            out[first_output + output] = F::cast_from(sum / totals[head]);
            output += config.threads;
        }
    }
}

/// Returns the exponential of the score without a position of the block's head number `head`,
/// relative to the largest score `best` of its positions; 0 without such scores. It is infinite for
/// a score that is much larger than all others, whose output is 0 then.
#[cube]
fn sink<F: Float>(sinks: &ComptimeOption<&[F]>, place: &WorkTile, head: usize, best: f32) -> f32 {
    #[comptime]
    match sinks {
        ComptimeOption::Some(sinks) => {
            (f32::cast_from(sinks[place.head as usize + head]) - best).exp()
        }
        ComptimeOption::None => 0.0f32.runtime(),
    }
}

/// Returns the largest score of a head among the block's lane groups.
#[cube]
fn block_best(best: &Shared<[f32]>, head: usize, #[comptime] config: AttentionConfig) -> f32 {
    let mut most = NONE.runtime();
    for lane_group in 0..config.lane_groups() {
        most = max(most, best[lane_group * config.heads + head]);
    }
    most
}
