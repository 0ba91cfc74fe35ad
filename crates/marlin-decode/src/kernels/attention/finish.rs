//! From the sums of teams and shares to the output, always in the same order.

use super::kernel::{Lengths, Place};
use super::plan::{AttentionConfig, MAX_SHARES};
use super::softmax::{NONE, Sums};
use super::team::{F8, has_vector, lane_vector, set_shared_vector, team_max, team_sum};
use cubecl::prelude::*;

/// Adds the teams' sums and writes the output, or leaves them for the last block of the row to add.
#[cube]
pub(super) fn finish<F: Float>(
    sums: &Sums,
    out: &mut [F],
    partials: &mut [f32],
    tickets: &mut [Atomic<u32>],
    place: &Place,
    lengths: &Lengths,
    #[comptime] config: AttentionConfig,
) {
    let (teams, count) = comptime!((config.teams(), config.lane_vectors()));
    let outputs = comptime!(config.heads * config.head_dim);
    let mut best = Shared::<[f32]>::new_slice(comptime!(config.teams() * config.heads));
    let mut total = Shared::<[f32]>::new_slice(comptime!(config.teams() * config.heads));
    let mut parts = Shared::<[f32]>::new_aligned_slice(comptime!(config.teams() * config.heads * config.head_dim), 32usize);
    let first_head = place.team as usize * config.heads;
    #[unroll(config.unrolls())]
    for head in 0..config.heads {
        best[first_head + head] = sums.best[head];
    }
    sync_cube();
    // Every team scales its sums to the block's largest score.
    #[unroll(config.unrolls())]
    for head in 0..config.heads {
        let kept = (sums.best[head] - block_best(&best, head, config)).exp();
        total[first_head + head] = sums.total[head] * kept;
        #[unroll(config.unrolls())]
        for j in 0..count {
            if has_vector(j, place, config) {
                let vector = (first_head + head) * comptime!(config.vectors()) + lane_vector(j, place, config) as usize;
                set_shared_vector(&mut parts, vector, sums.out[head * count + j] * F8::new(kept), config);
            }
        }
    }
    sync_cube();

    let mut shares = 1u32.runtime();
    if comptime!(config.is_shared) {
        shares = max(place.cached.div_ceil(place.share), shares);
    }
    let first_output = ((place.row * lengths.heads + place.head) * comptime!(config.head_dim as u32)) as usize;
    let group = place.row * CUBE_COUNT_Y + CUBE_POS_Y;
    let partial = ((group * CUBE_COUNT_X + CUBE_POS_X) * comptime!(config.partial() as u32)) as usize;
    for round in 0..comptime!(outputs.div_ceil(config.threads)) {
        let output = round * config.threads + UNIT_POS_X as usize;
        if output < outputs {
            let head = output / config.head_dim;
            let mut sum = 0.0f32.runtime();
            let mut part = 0.0f32.runtime();
            for team in 0..teams {
                sum += total[team * config.heads + head];
                part += parts[team * outputs + output];
            }
            if shares == 1 {
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
    if comptime!(config.is_shared) {
        if shares > 1 {
            combine(out, &*partials, tickets, first_output, group, shares, place, config);
        }
    }
}

/// Takes a ticket; with the last of the row's, adds what all its blocks have left.
#[cube]
fn combine<F: Float>(
    out: &mut [F],
    partials: &[f32],
    tickets: &mut [Atomic<u32>],
    first_output: usize,
    group: u32,
    shares: u32,
    place: &Place,
    #[comptime] config: AttentionConfig,
) {
    let mut arrived = Shared::<u32>::new();
    // What this block has left is there before its ticket is taken.
    sync_storage();
    if UNIT_POS_X == 0 {
        *arrived = tickets[group as usize].fetch_add(1u32);
    }
    // And what the others have left is seen after theirs were.
    sync_storage();
    if *arrived + 1 == shares {
        if UNIT_POS_X == 0 {
            tickets[group as usize].store(0u32);
        }
        let outputs = comptime!(config.heads * config.head_dim);
        let stride = config.partial();
        let first = group as usize * CUBE_COUNT_X as usize * stride;
        let shares = shares as usize;
        let mut weights = Shared::<[f32]>::new_slice(comptime!(config.heads * MAX_SHARES));
        let mut totals = Shared::<[f32]>::new_slice(config.heads);
        for round in 0..config.heads.div_ceil(config.teams()) {
            let head = min(round * config.teams() + place.team as usize, comptime!(config.heads - 1));
            let best = first + outputs + 2 * head;
            // Every lane goes as many rounds, the last share again where it has none: a shuffle is for whole planes.
            let rounds = shares.div_ceil(config.lanes);
            let mut most = NONE.runtime();
            for round in 0..rounds {
                let share = min(round * config.lanes + place.lane as usize, shares - 1);
                most = max(most, partials[best + share * stride]);
            }
            most = team_max(most, config);
            let mut sum = 0.0f32.runtime();
            for round in 0..rounds {
                let own = round * config.lanes + place.lane as usize;
                let share = min(own, shares - 1);
                let weight = (partials[best + share * stride] - most).exp();
                weights[head * MAX_SHARES + share] = weight;
                sum += select(own < shares, weight * partials[best + share * stride + 1], 0.0f32.runtime());
            }
            totals[head] = team_sum(sum, config);
        }
        sync_cube();
        let mut output = UNIT_POS_X as usize;
        while output < outputs {
            let head = output / config.head_dim;
            let mut sum = 0.0f32.runtime();
            for share in 0..shares {
                sum += weights[head * MAX_SHARES + share] * partials[first + share * stride + output];
            }
            out[first_output + output] = F::cast_from(sum / totals[head]);
            output += config.threads;
        }
    }
}

/// The largest score of a head among the block's teams.
#[cube]
fn block_best(best: &Shared<[f32]>, head: usize, #[comptime] config: AttentionConfig) -> f32 {
    let mut most = NONE.runtime();
    for team in 0..config.teams() {
        most = max(most, best[team * config.heads + head]);
    }
    most
}
