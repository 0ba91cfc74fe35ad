use super::plan::{AttentionConfig, MAX_SHARES, VECTOR};
use crate::decode::Row;
use cubecl::prelude::*;
use cubecl::std::FastDivmod;

/// Elements that are read at a time.
type N = Const<VECTOR>;
/// Those in f32.
type F8 = Vector<f32, N>;

/// Below every score, and still far enough from minus infinity that it can be taken off itself.
const NONE: f32 = -1e30;
/// A score that counts for nothing beside [`NONE`].
const MASKED: f32 = -3e38;

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
struct Place {
    row: u32,
    /// The position of the row's token.
    position: u32,
    /// The first of the block's query heads, and their key head.
    head: u32,
    kv_head: u32,
    /// Whether no other block has an earlier query head of that key head.
    is_first: bool,
    /// The first vector of the slot's keys, and of its values.
    cache: usize,
    /// The block's share of the positions before the token's: from `start`, before `end`.
    start: u32,
    end: u32,
    /// Positions before the token's that count, and those of a share but the last.
    cached: u32,
    share: u32,
    /// Whether the token itself is the block's too.
    has_token: bool,
    team: u32,
    lane: u32,
}

/// Online softmax of a team, for each of the block's heads: the largest score, the sum of exponentials, and the lane's part of the output.
#[derive(CubeType)]
struct Sums {
    best: Array<f32>,
    total: Array<f32>,
    out: Array<F8>,
}

/// Buffers as in [`AttentionArgs`](super::AttentionArgs), keys and values as the words that hold [`VECTOR`] elements; the grid is [`AttentionPlan::blocks`](super::AttentionPlan::blocks).
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn attention<F: Float, W: Size>(
    qkv: &[F],
    state: &[i32],
    keys: &mut [Vector<u32, W>],
    values: &mut [Vector<u32, W>],
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
    let mut key = Array::<Vector<u32, W>>::new(held);
    let mut value = Array::<Vector<u32, W>>::new(held);
    if place.start < place.end {
        load(&*keys, &mut key, place.start, &place, config);
        load(&*values, &mut value, place.start, &place, config);
    }

    // The block's heads of q, then the token's key and value.
    let mut staged = Shared::<[f32]>::new_aligned_slice(comptime!((config.heads + 2) * config.head_dim), 32usize);
    stage(qkv, cos, sin, &q_norm, &k_norm, &mut staged, &place, &lengths, config);
    sync_cube();
    let staged = staged.as_vectorized().with_vector_size::<N>();

    let mut sums = Sums {
        best: Array::<f32>::new(config.heads),
        total: Array::<f32>::new(config.heads),
        out: Array::<F8>::new(comptime!(config.heads * config.lane_vectors())),
    };
    start(&mut sums, staged, &place, config);
    if place.has_token && place.is_first {
        write_token::<F, W>(keys, values, staged, &place, config);
    }

    // The next keys and values are asked for as soon as there is room: past the share's end that is its last position, again and for nothing.
    let tile = comptime!((config.teams() * config.positions) as u32);
    let mut first = place.start;
    while first < place.end {
        let mut scores = Array::<f32>::new(comptime!(config.heads * config.positions));
        score::<F, W>(&mut scores, &key, staged, first, &place, config);
        load(&*keys, &mut key, first + tile, &place, config);
        accumulate::<F, W>(&mut sums, &mut scores, &value, config);
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

/// Reads the vectors of keys or values that a lane has at the team's positions of a tile. Past the share's end it reads its last position again.
#[cube]
fn load<W: Size>(
    cache: &[Vector<u32, W>],
    held: &mut Array<Vector<u32, W>>,
    first: u32,
    place: &Place,
    #[comptime] config: AttentionConfig,
) {
    let (vectors, count) = comptime!((config.vectors() as u32, config.lane_vectors()));
    #[unroll(config.unrolls())]
    for i in 0..config.positions {
        let position = min(first + u32::cast_from(i) * comptime!(config.teams() as u32) + place.team, place.end - 1);
        #[unroll(config.unrolls())]
        for j in 0..count {
            let vector = lane_vector(j, place, config);
            held[i * count + j] = cache[place.cache + (position * vectors + vector) as usize];
        }
    }
}

/// The number in its head of a lane's vector. A lane that has none takes the last, whose part of q is then 0.
#[cube]
fn lane_vector(j: usize, place: &Place, #[comptime] config: AttentionConfig) -> u32 {
    let vector = u32::cast_from(j) * comptime!(config.lanes as u32) + place.lane;
    if comptime!(config.is_even()) { vector } else { min(vector, comptime!(config.vectors() as u32 - 1)) }
}

/// A lane's vector of a staged head, 0 where it has none.
#[cube]
fn staged_vector(staged: &[F8], head: usize, j: usize, place: &Place, #[comptime] config: AttentionConfig) -> F8 {
    let vector = staged[head * comptime!(config.vectors()) + lane_vector(j, place, config) as usize];
    if comptime!(config.is_even()) { vector } else { select(has_vector(j, place, config), vector, F8::new(0.0)) }
}

#[cube]
fn has_vector(j: usize, place: &Place, #[comptime] config: AttentionConfig) -> bool {
    u32::cast_from(j) * comptime!(config.lanes as u32) + place.lane < comptime!(config.vectors() as u32)
}

/// Puts the block's heads of q, times 1 / sqrt(head_dim), and the token's key and value into shared memory: normalised, turned and,
/// what goes to the cache, rounded.
#[cube]
fn stage<F: Float>(
    qkv: &[F],
    cos: &[f32],
    sin: &[f32],
    q_norm: &ComptimeOption<&[F]>,
    k_norm: &ComptimeOption<&[F]>,
    staged: &mut Shared<[f32]>,
    place: &Place,
    lengths: &Lengths,
    #[comptime] config: AttentionConfig,
) {
    let (heads, head_dim) = comptime!((config.heads as u32, config.head_dim as u32));
    let half = comptime!(config.rotary_dim as u32 / 2);
    let scale = comptime!(1.0 / (config.head_dim as f32).sqrt());
    let mut norms = Shared::<[f32]>::new_slice(comptime!(config.heads + 1));
    if comptime!(q_norm.is_some()) {
        norm(qkv, &mut norms, place, lengths, config);
        sync_cube();
    }
    let elements = if place.has_token { comptime!((heads + 2) * head_dim).runtime() } else { comptime!(heads * head_dim).runtime() };
    let rounds = comptime!((config.heads + 2) * config.head_dim).div_ceil(config.threads);
    // All that is read is asked for before any of it is used. Threads without an element do the last one again.
    let mut x = Array::<f32>::new(rounds);
    let mut y = Array::<f32>::new(rounds);
    let mut turn_cos = Array::<f32>::new(rounds);
    let mut turn_sin = Array::<f32>::new(rounds);
    #[unroll(config.unrolls())]
    for round in 0..rounds {
        let index = min(u32::cast_from(round) * comptime!(config.threads as u32) + UNIT_POS_X, elements - 1);
        let head = index / head_dim;
        let feature = index % head_dim;
        let base = (place.row * (lengths.heads + 2 * lengths.kv_heads) + source(head, place, lengths, config)) * head_dim;
        x[round] = f32::cast_from(qkv[(base + feature) as usize]);
        if comptime!(half > 0) {
            let angle = (place.position * half + feature % half) as usize;
            y[round] = f32::cast_from(qkv[(base + partner(feature, config)) as usize]);
            turn_cos[round] = cos[angle];
            turn_sin[round] = sin[angle];
        }
    }
    #[unroll(config.unrolls())]
    for round in 0..rounds {
        let index = min(u32::cast_from(round) * comptime!(config.threads as u32) + UNIT_POS_X, elements - 1);
        let head = index / head_dim;
        let feature = index % head_dim;
        let mut turned = x[round] * norm_weight(q_norm, k_norm, &norms, head, feature, config);
        if comptime!(half > 0) {
            let other = y[round] * norm_weight(q_norm, k_norm, &norms, head, partner(feature, config), config);
            let other = select(feature < half, -other, other);
            let is_turned = feature < comptime!(2 * half);
            turned = select(is_turned, turned * turn_cos[round] + other * turn_sin[round], turned);
        }
        let key = f32::cast_from(F::cast_from(turned));
        let token = select(head == heads, key, x[round]);
        staged[index as usize] = select(head < heads, turned * scale, token);
    }
}

/// The feature that turns with this one; itself where it does not turn.
#[cube]
fn partner(feature: u32, #[comptime] config: AttentionConfig) -> u32 {
    let half = comptime!(config.rotary_dim as u32 / 2);
    let other = select(feature < half, feature + half, feature - half);
    select(feature < comptime!(2 * half), other, feature)
}

/// Where in a row of qkv a staged head comes from: the block's query heads, then the key's and the value's.
#[cube]
fn source(head: u32, place: &Place, lengths: &Lengths, #[comptime] config: AttentionConfig) -> u32 {
    if head < comptime!(config.heads as u32) {
        place.head + head
    } else {
        lengths.heads + (head - comptime!(config.heads as u32)) * lengths.kv_heads + place.kv_head
    }
}

/// Leaves 1 / sqrt(mean of squares + epsilon) of each of the block's heads of q and of the token's key.
#[cube]
fn norm<F: Float>(qkv: &[F], norms: &mut Shared<[f32]>, place: &Place, lengths: &Lengths, #[comptime] config: AttentionConfig) {
    let rows = place.row * (lengths.heads + 2 * lengths.kv_heads);
    let qkv = qkv.as_vectorized().with_vector_size::<N>();
    #[unroll]
    for round in 0..comptime!((config.heads + 1).div_ceil(config.teams())) {
        // Teams without a head take the last one again: a shuffle is for whole planes.
        let head = min(comptime!((round * config.teams()) as u32) + place.team, comptime!(config.heads as u32));
        let base = (rows + source(head, place, lengths, config)) * comptime!(config.vectors() as u32);
        let mut squares = 0.0f32.runtime();
        for j in 0..config.lane_vectors() {
            let x = F8::cast_from(qkv[(base + lane_vector(j, place, config)) as usize]);
            squares = select(has_vector(j, place, config), add_dot(squares, x, x), squares);
        }
        squares = team_sum(squares, config);
        norms[head as usize] = (squares * comptime!(1.0 / config.head_dim as f32) + lengths.epsilon).inverse_sqrt();
    }
}

/// What RMSNorm multiplies a feature of a staged head by.
#[cube]
fn norm_weight<F: Float>(
    q_norm: &ComptimeOption<&[F]>,
    k_norm: &ComptimeOption<&[F]>,
    norms: &Shared<[f32]>,
    head: u32,
    feature: u32,
    #[comptime] config: AttentionConfig,
) -> f32 {
    #[comptime]
    match (q_norm, k_norm) {
        (ComptimeOption::Some(q_norm), ComptimeOption::Some(k_norm)) => {
            let is_key = head == comptime!(config.heads as u32);
            let weight = if is_key { k_norm[feature as usize] } else { q_norm[feature as usize] };
            norms[head as usize] * f32::cast_from(weight)
        }
        _ => 1.0f32.runtime(),
    }
}

/// Sums of nothing; in the first team of the block that has the token, of the token.
#[cube]
fn start(sums: &mut Sums, staged: &[F8], place: &Place, #[comptime] config: AttentionConfig) {
    let count = comptime!(config.lane_vectors());
    #[unroll(config.unrolls())]
    for head in 0..config.heads {
        sums.best[head] = NONE;
        sums.total[head] = 0.0;
        #[unroll(config.unrolls())]
        for j in 0..count {
            sums.out[head * count + j] = F8::new(0.0);
        }
    }
    if place.has_token {
        // Every team works it out, since a shuffle is for whole planes.
        let is_mine = place.team == 0;
        #[unroll(config.unrolls())]
        for head in 0..config.heads {
            let mut score = 0.0f32.runtime();
            #[unroll(config.unrolls())]
            for j in 0..count {
                let key = staged_vector(staged, config.heads, j, place, config);
                score = add_dot(score, staged_vector(staged, head, j, place, config), key);
                let value = staged_vector(staged, comptime!(config.heads + 1), j, place, config);
                sums.out[head * count + j] = select(is_mine, value, F8::new(0.0));
            }
            sums.best[head] = select(is_mine, team_sum(score, config), NONE);
            sums.total[head] = select(is_mine, 1.0f32.runtime(), 0.0f32.runtime());
        }
    }
}

/// Writes the token's key and value to the cache.
#[cube]
fn write_token<F: Float, W: Size>(
    keys: &mut [Vector<u32, W>],
    values: &mut [Vector<u32, W>],
    staged: &[F8],
    place: &Place,
    #[comptime] config: AttentionConfig,
) {
    let vectors = comptime!(config.vectors() as u32);
    for round in 0..comptime!(config.vectors().div_ceil(config.threads) as u32) {
        let vector = round * comptime!(config.threads as u32) + UNIT_POS_X;
        if vector < vectors {
            let index = place.cache + (place.position * vectors + vector) as usize;
            keys[index] = narrow::<F, W>(staged[(comptime!(config.heads as u32) * vectors + vector) as usize]);
            values[index] = narrow::<F, W>(staged[(comptime!(config.heads as u32 + 1) * vectors + vector) as usize]);
        }
    }
}

/// The scores of the team's positions of a tile, of all heads.
#[cube]
fn score<F: Float, W: Size>(
    scores: &mut Array<f32>,
    key: &Array<Vector<u32, W>>,
    staged: &[F8],
    first: u32,
    place: &Place,
    #[comptime] config: AttentionConfig,
) {
    let (positions, count) = comptime!((config.positions, config.lane_vectors()));
    #[unroll(config.unrolls())]
    for i in 0..comptime!(config.heads * config.positions) {
        scores[i] = 0.0;
    }
    #[unroll(config.unrolls())]
    for j in 0..count {
        let mut wide = Array::<F8>::new(positions);
        #[unroll(config.unrolls())]
        for i in 0..positions {
            wide[i] = widen::<F, W>(key[i * count + j]);
        }
        #[unroll(config.unrolls())]
        for head in 0..config.heads {
            let query = staged_vector(staged, head, j, place, config);
            #[unroll(config.unrolls())]
            for i in 0..positions {
                scores[head * positions + i] = add_dot(scores[head * positions + i], query, wide[i]);
            }
        }
    }
    #[unroll(config.unrolls())]
    for i in 0..positions {
        let is_there = first + u32::cast_from(i) * comptime!(config.teams() as u32) + place.team < place.end;
        #[unroll(config.unrolls())]
        for head in 0..config.heads {
            let sum = team_sum(scores[head * positions + i], config);
            scores[head * positions + i] = select(is_there, sum, MASKED);
        }
    }
}

/// Adds the values of a tile to a team's sums.
#[cube]
fn accumulate<F: Float, W: Size>(
    sums: &mut Sums,
    scores: &mut Array<f32>,
    value: &Array<Vector<u32, W>>,
    #[comptime] config: AttentionConfig,
) {
    let (positions, count) = comptime!((config.positions, config.lane_vectors()));
    #[unroll(config.unrolls())]
    for head in 0..config.heads {
        let old = sums.best[head];
        let mut best = old;
        #[unroll(config.unrolls())]
        for i in 0..positions {
            best = max(best, scores[head * positions + i]);
        }
        let kept = (old - best).exp();
        let mut total = sums.total[head] * kept;
        #[unroll(config.unrolls())]
        for i in 0..positions {
            let part = (scores[head * positions + i] - best).exp();
            total += part;
            scores[head * positions + i] = part;
        }
        sums.best[head] = best;
        sums.total[head] = total;
        #[unroll(config.unrolls())]
        for j in 0..count {
            sums.out[head * count + j] *= F8::new(kept);
        }
    }
    #[unroll(config.unrolls())]
    for i in 0..positions {
        #[unroll(config.unrolls())]
        for j in 0..count {
            let wide = widen::<F, W>(value[i * count + j]);
            #[unroll(config.unrolls())]
            for head in 0..config.heads {
                sums.out[head * count + j] += wide * F8::new(scores[head * positions + i]);
            }
        }
    }
}

/// Adds the teams' sums and writes the output, or leaves them for the last block of the row to add.
#[cube]
fn finish<F: Float>(
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
    {
        let parts = parts.as_vectorized_mut().with_vector_size_mut::<N>();
        #[unroll(config.unrolls())]
        for head in 0..config.heads {
            let kept = (sums.best[head] - block_best(&best, head, config)).exp();
            total[first_head + head] = sums.total[head] * kept;
            #[unroll(config.unrolls())]
            for j in 0..count {
                if has_vector(j, place, config) {
                    let vector = (first_head + head) * comptime!(config.vectors()) + lane_vector(j, place, config) as usize;
                    parts[vector] = sums.out[head * count + j] * F8::new(kept);
                }
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

/// The largest score of a head among the block's teams.
#[cube]
fn block_best(best: &Shared<[f32]>, head: usize, #[comptime] config: AttentionConfig) -> f32 {
    let mut most = NONE.runtime();
    for team in 0..config.teams() {
        most = max(most, best[team * config.heads + head]);
    }
    most
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

/// Elements in f32 of the words that hold them. Keys and values stay words from load to use: the compiler takes halves apart, and so waits for them,
/// right where they are loaded.
#[cube]
fn widen<F: Float, W: Size>(words: Vector<u32, W>) -> F8 {
    F8::cast_from(Vector::<F, N>::reinterpret(words))
}

/// Elements rounded, in words.
#[cube]
fn narrow<F: Float, W: Size>(elements: F8) -> Vector<u32, W> {
    Vector::<u32, W>::reinterpret(Vector::<F, N>::cast_from(elements))
}

/// A sum and the sum of two vectors' products.
#[cube]
fn add_dot(sum: f32, a: F8, b: F8) -> f32 {
    let mut sum = sum;
    #[unroll]
    for i in 0..VECTOR {
        sum += a.extract(i) * b.extract(i);
    }
    sum
}

/// The sum over a team's lanes, in every lane.
#[cube]
fn team_sum(value: f32, #[comptime] config: AttentionConfig) -> f32 {
    let mut sum = value;
    #[unroll]
    for i in 0..comptime!(config.lanes.ilog2()) {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << i));
    }
    sum
}

/// The largest value of a team's lanes, in every lane.
#[cube]
fn team_max(value: f32, #[comptime] config: AttentionConfig) -> f32 {
    let mut most = value;
    #[unroll]
    for i in 0..comptime!(config.lanes.ilog2()) {
        most = max(most, plane_shuffle_xor(most, comptime!(1u32 << i)));
    }
    most
}
