//! Operands of decode attention on the host, and the expected output in f64, from the definition.

use marlin_kernels::ActivationDtype;
use marlin_nn::kernels::attention::{AttentionPass, AttentionShape};
use marlin_nn::kernels::{SequenceState, SequenceStatus};
use marlin_testing::{random_values, rms_norm, rotate};
use marlin_tests::round;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

/// The operands on the host, every value exact in its dtype.
#[derive(Clone)]
pub(super) struct Operands {
    pub(super) rows: Vec<SequenceState>,
    pub(super) qkv: Vec<f32>,
    pub(super) keys: Vec<f32>,
    pub(super) values: Vec<f32>,
    /// The page table, if the cache has pages. Every page belongs to one slot at most.
    pub(super) pages: Option<Vec<i32>>,
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
    /// The weights of the norms of q and k.
    pub(super) norms: [Vec<f32>; 2],
    /// The scores of heads without a position. Of several heads, the last has one that is much
    /// larger than all others.
    pub(super) sinks: Vec<f32>,
}

impl Operands {
    /// Draws operands for rows at `positions`, where `None` is an idle row. Rows have random slots,
    /// and several idle rows may have the same slot. The cache is NaN from each row's position on.
    pub(super) fn random(shape: &AttentionShape, positions: &[Option<usize>], seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut slots: Vec<usize> = (0..shape.cache.slots).collect();
        slots.shuffle(&mut rng);
        let rows = (0..shape.rows)
            .map(|row| row_at(positions[row % positions.len()], slots[row % slots.len()]))
            .collect::<Vec<_>>();
        let pages = page_table(shape, &rows, &mut rng);
        let mut random =
            |count: usize, size: f32| rounded(random_values(count, size, &mut rng), shape.dtype);
        let mut operands = Self {
            qkv: random(shape.rows * shape.qkv_columns(), 2.5),
            keys: vec![f32::NAN; shape.cache_elements()],
            values: vec![f32::NAN; shape.cache_elements()],
            pages,
            cos: Vec::new(),
            sin: Vec::new(),
            norms: [
                random(shape.cache.head_dim, 2.0),
                random(shape.cache.head_dim, 2.0),
            ],
            sinks: random(shape.heads, 6.0),
            rows,
        };
        if let [_, .., last] = operands.sinks.as_mut_slice() {
            *last = 200.0;
        }
        for row in &operands.rows {
            let SequenceStatus::At(position) = row.status else {
                continue;
            };
            let cached = 0..(position as usize).min(shape.cache.max_len);
            for head in 0..shape.cache.kv_heads {
                let of_head = [row.slot as usize, head];
                for run in (shape.cache).runs(operands.pages.as_deref(), of_head, cached.clone()) {
                    operands.keys[run.clone()].copy_from_slice(&random(run.len(), 2.5));
                    operands.values[run.clone()].copy_from_slice(&random(run.len(), 1.0));
                }
            }
        }
        for position in 0..shape.max_positions {
            for i in 0..shape.rotary_dim / 2 {
                let angle =
                    position as f64 * 10_000f64.powf(-2.0 * i as f64 / shape.rotary_dim as f64);
                operands.cos.push(angle.cos() as f32);
                operands.sin.push(angle.sin() as f32);
            }
        }
        operands
    }

    /// Draws operands for prompts: the rows of each sequence, which is its first position and its
    /// number of tokens, then idle rows. The cache has the positions before each sequence's first
    /// row.
    pub(super) fn of_prompts(
        shape: &AttentionShape,
        sequences: &[(usize, usize)],
        seed: u64,
    ) -> Self {
        // `random` fills the cache before the first row of each sequence. The other rows are idle
        // until the cache is filled.
        let mut positions = Vec::new();
        for &(start, tokens) in sequences {
            positions.extend((0..tokens).map(|token| (token == 0).then_some(start)));
        }
        positions.resize(shape.rows, None);
        let mut operands = Self::random(shape, &positions, seed);
        let mut row = 0;
        for &(start, tokens) in sequences {
            let slot = operands.rows[row].slot as usize;
            for token in 0..tokens {
                operands.rows[row + token] = row_at(Some(start + token), slot);
            }
            row += tokens;
        }
        operands
    }

    /// Returns a head of q (0), k (1) or v (2) of a row.
    pub(super) fn head(
        &self,
        shape: &AttentionShape,
        row: usize,
        part: usize,
        head: usize,
    ) -> &[f32] {
        let first = [0, shape.heads, shape.heads + shape.cache.kv_heads][part] + head;
        let start = row * shape.qkv_columns() + first * shape.cache.head_dim;
        &self.qkv[start..start + shape.cache.head_dim]
    }

    /// Returns a head of q (0) or k (1), normalised and rotated.
    pub(super) fn rotated(
        &self,
        shape: &AttentionShape,
        row: usize,
        part: usize,
        head: usize,
        position: usize,
    ) -> Vec<f64> {
        let mut x: Vec<f64> = self
            .head(shape, row, part, head)
            .iter()
            .map(|&x| f64::from(x))
            .collect();
        if let Some(epsilon) = shape.norm_epsilon {
            x = rms_norm(&x, &self.norms[part], epsilon.into());
        }
        let half = shape.rotary_dim / 2;
        let angles = position * half..(position + 1) * half;
        rotate(&mut x, &self.cos[angles.clone()], &self.sin[angles]);
        x
    }

    /// Returns the page table with pages outside the cache past each sequence's last position,
    /// which kernels must not read.
    pub(super) fn used_pages(&self, shape: &AttentionShape) -> Option<Vec<i32>> {
        let (size, [_, columns]) = (shape.cache.pages?.size, shape.cache.table_dims()?);
        let mut used = vec![-1; self.pages.as_ref()?.len()];
        for row in &self.rows {
            if let SequenceStatus::At(position) = row.status {
                let first = row.slot as usize * columns;
                let of_row = first..first + position as usize / size + 1;
                used[of_row.clone()].copy_from_slice(&self.pages.as_ref()?[of_row]);
            }
        }
        Some(used)
    }

    /// Returns the index of a position's first element in the cache.
    pub(super) fn cache_index(
        &self,
        shape: &AttentionShape,
        slot: usize,
        head: usize,
        position: usize,
    ) -> usize {
        let [_, kv_heads, size, head_dim] = shape.cache.dims();
        let page = self.pages.as_ref().map_or(slot, |table| {
            table[slot * shape.cache.max_len.div_ceil(size) + position / size] as usize
        });
        ((page * kv_heads + head) * size + position % size) * head_dim
    }

    /// Writes a row's rounded keys and its values to the cache.
    pub(super) fn append(&mut self, shape: &AttentionShape, row: usize, position: usize) {
        for head in 0..shape.cache.kv_heads {
            let start = self.cache_index(shape, self.rows[row].slot as usize, head, position);
            let key = self
                .rotated(shape, row, 1, head, position)
                .into_iter()
                .map(|x| x as f32)
                .collect();
            let value = self.head(shape, row, 2, head).to_vec();
            self.keys[start..start + shape.cache.head_dim]
                .copy_from_slice(&rounded(key, shape.dtype));
            self.values[start..start + shape.cache.head_dim].copy_from_slice(&value);
        }
    }
}

pub(super) fn row_at(position: Option<usize>, slot: usize) -> SequenceState {
    let state = position.map_or(SequenceStatus::Idle, |position| {
        SequenceStatus::At(position as u32)
    });
    SequenceState {
        token: 7,
        status: state,
        slot: slot as u32,
        ..SequenceState::IDLE
    }
}

fn rounded(values: Vec<f32>, dtype: ActivationDtype) -> Vec<f32> {
    let rounded = values.into_iter().map(|value| round(value, dtype));
    rounded.collect()
}

/// Draws a page table for a shape with pages: all pages of the slots that have a row at a position,
/// in a random order. Other slots have pages outside the cache.
fn page_table(
    shape: &AttentionShape,
    rows: &[SequenceState],
    rng: &mut StdRng,
) -> Option<Vec<i32>> {
    let (pages, [slots, columns]) = (shape.cache.pages?, shape.cache.table_dims()?);
    let mut free: Vec<i32> = (0..pages.count as i32).collect();
    free.shuffle(rng);
    let mut table = vec![-1; slots * columns];
    for row in rows {
        if matches!(row.status, SequenceStatus::At(_)) && (row.slot as usize) < slots {
            table[row.slot as usize * columns..][..columns]
                .fill_with(|| free.pop().expect("the test has a page for every position"));
        }
    }
    Some(table)
}

/// Computes the output of a row and the magnitude of its terms in f64 from the definition, over the
/// keys of `operands` and the token's own key.
pub(super) fn reference(
    shape: &AttentionShape,
    operands: &Operands,
    row: usize,
    position: usize,
) -> (Vec<f64>, Vec<f64>) {
    let (mut out, mut magnitude) = (Vec::new(), Vec::new());
    let slot = operands.rows[row].slot as usize;
    let first = (position + 1).saturating_sub(shape.window.unwrap_or(usize::MAX));
    for head in 0..shape.heads {
        let kv_head = head / (shape.heads / shape.cache.kv_heads);
        let mut query = operands.rotated(shape, row, 0, head, position);
        if shape.pass == AttentionPass::Prompt {
            // The first kernel of a prompt pass rounds the queries, which the second kernel reads.
            query = rounded(query.into_iter().map(|x| x as f32).collect(), shape.dtype)
                .into_iter()
                .map(f64::from)
                .collect();
        }
        let key = operands
            .rotated(shape, row, 1, kv_head, position)
            .into_iter()
            .map(|x| x as f32)
            .collect();
        let key = rounded(key, shape.dtype);
        let at = |cache: &'_ [f32], position: usize| {
            let start = operands.cache_index(shape, slot, kv_head, position);
            cache[start..start + shape.cache.head_dim].to_vec()
        };
        let dot = |key: &[f32]| {
            key.iter()
                .zip(&query)
                .map(|(&k, q)| f64::from(k) * q)
                .sum::<f64>()
                / (shape.cache.head_dim as f64).sqrt()
        };
        let mut scores: Vec<f64> = (first..position)
            .map(|position| dot(&at(&operands.keys, position)))
            .collect();
        scores.push(dot(&key));
        let sink = match shape.has_sinks {
            true => f64::from(operands.sinks[head]),
            false => f64::NEG_INFINITY,
        };
        let most = scores.iter().copied().fold(sink, f64::max);
        let parts: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let total = parts.iter().sum::<f64>() + (sink - most).exp();
        let (mut sum, mut squares) = (
            vec![0.0; shape.cache.head_dim],
            vec![0.0; shape.cache.head_dim],
        );
        for (i, part) in parts.iter().enumerate() {
            let own = || operands.head(shape, row, 2, kv_head).to_vec();
            let value = if first + i == position {
                own()
            } else {
                at(&operands.values, first + i)
            };
            for (feature, value) in value.into_iter().enumerate() {
                let term = part / total * f64::from(value);
                sum[feature] += term;
                squares[feature] += term * term;
            }
        }
        out.extend(sum);
        magnitude.extend(squares.into_iter().map(f64::sqrt));
    }
    (out, magnitude)
}
