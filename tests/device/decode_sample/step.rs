//! A step of sampling on the host: random rows of all kinds, and the tokens chosen for these rows.

use crate::kernels::{bytes, values};
use marlin_kernels::ActivationDtype;
use marlin_nn::kernels::sample::{SampleShape, SlotTokens, TokenTable, sample_host};
use marlin_nn::kernels::{SequenceState, SequenceStatus};
use rand::RngExt;
use rand::rngs::StdRng;

/// The rows of a step and their logits.
pub(super) struct Step {
    pub(super) shape: SampleShape,
    /// The logits [rows, vocab], exact in the shape's dtype.
    pub(super) logits: Vec<f32>,
    pub(super) rows: Vec<SequenceState>,
    /// The token table.
    pub(super) token_table: Vec<u32>,
}

impl Step {
    pub(super) fn random(
        vocab: usize,
        rows: usize,
        dtype: ActivationDtype,
        rng: &mut StdRng,
    ) -> Self {
        let shape = SampleShape {
            rows,
            vocab,
            slots: rows + 1,
            max_len: 100,
            dtype,
        };
        let logits: Vec<f32> = (0..rows).flat_map(|_| random_logits(vocab, rng)).collect();
        let logits = values(&bytes(&logits, dtype), dtype)
            .into_iter()
            .map(|value| value as f32)
            .collect();
        // The slot of a row differs from its index.
        let rows = (0..rows)
            .map(|row| SequenceState {
                slot: (row + 1) as u32,
                ..random_row(vocab as u32, rng)
            })
            .collect();
        let token_table = random_table(&shape, rng);
        Self {
            shape,
            logits,
            rows,
            token_table,
        }
    }

    pub(super) fn host(&mut self) {
        let (vocab, max_len) = (self.shape.vocab, self.shape.max_len as u32);
        let words = TokenTable::words(vocab);
        for (row, logits) in self.rows.iter_mut().zip(self.logits.chunks_exact(vocab)) {
            let tokens = SlotTokens::of_slot(&mut self.token_table, words, row.slot as usize);
            sample_host(logits, row, &mut tokens.expect("a row has a slot"), max_len);
        }
    }
}

/// Draws bitmaps with a quarter of their bits, and biases, half of them 0.
fn random_table(shape: &SampleShape, rng: &mut StdRng) -> Vec<u32> {
    let words = TokenTable::words(shape.vocab);
    let mut table = Vec::with_capacity(shape.table_words());
    for _ in 0..shape.slots {
        let bitmaps = TokenTable::BIASES * words;
        table.extend((0..bitmaps).map(|_| rng.random::<u32>() & rng.random::<u32>()));
        table.extend((0..32 * words).map(|token| {
            let is_biased = token < shape.vocab && rng.random();
            let bias = if is_biased {
                rng.random_range(-3.0..3.0)
            } else {
                0.0f32
            };
            bias.to_bits()
        }));
    }
    table
}

fn pick<T: Copy>(from: &[T], rng: &mut StdRng) -> T {
    from[rng.random_range(0..from.len())]
}

/// Draws the logits of a row, mostly from an approximately normal distribution. Some rows have many
/// equal logits, only equal logits, minus infinity, NaN or infinity.
fn random_logits(vocab: usize, rng: &mut StdRng) -> Vec<f32> {
    let normal = |rng: &mut StdRng| (0..6).map(|_| rng.random_range(-1.0f32..1.0)).sum::<f32>();
    let kind = rng.random_range(0..12);
    let scale = pick(&[0.1f32, 2.0, 5.0], rng);
    let mut logits: Vec<f32> = match kind {
        0 => vec![normal(rng); vocab],
        1 | 2 => (0..vocab).map(|_| normal(rng).round()).collect(),
        _ => (0..vocab).map(|_| normal(rng) * scale).collect(),
    };
    match kind {
        3 | 4 => logits
            .iter_mut()
            .filter(|_| rng.random_range(0..3) > 0)
            .for_each(|logit| *logit = f32::NEG_INFINITY),
        5 => logits[rng.random_range(0..vocab)] = pick(&[f32::NAN, f32::INFINITY], rng),
        6 => logits = vec![f32::NEG_INFINITY; vocab],
        7 => logits[rng.random_range(0..vocab)] = -0.0,
        _ => {}
    }
    logits
}

fn random_row(vocab: u32, rng: &mut StdRng) -> SequenceState {
    let states = [
        SequenceStatus::At(rng.random_range(0..99)),
        SequenceStatus::At(99),
        SequenceStatus::Idle,
        SequenceStatus::Failed,
        SequenceStatus::WindowFull,
    ];
    SequenceState {
        token: rng.random_range(0..vocab),
        status: if rng.random_range(0..4) > 0 {
            states[0]
        } else {
            pick(&states, rng)
        },
        slot: 0,
        seed: rng.random(),
        top_k: pick(
            &[
                0,
                0,
                1,
                2,
                5,
                50,
                200,
                vocab.saturating_sub(1),
                vocab,
                vocab + 7,
            ],
            rng,
        ),
        temperature: pick(&[0.0, 0.1, 0.7, 1.0, 1.0, 3.0], rng),
        top_p: pick(&[1.0, 1.0, 0.999, 0.95, 0.5, 0.1, 1e-6], rng),
        repetition_penalty: pick(&[1.0, 1.1, 2.0, 0.7], rng),
        // The last value, a subnormal number, counts as 0.
        min_p: pick(
            &[
                0.0,
                0.0,
                0.0,
                1.0,
                0.5,
                0.1,
                1e-3,
                1e-20,
                f32::MIN_POSITIVE,
                f32::MIN_POSITIVE / 2.0,
            ],
            rng,
        ),
        suppresses: rng.random(),
        is_biased: rng.random(),
        presence_penalty: pick(&[0.0, 0.5, -2.0], rng),
        frequency_penalty: pick(&[0.0, 0.3, -0.1], rng),
        logprobs: pick(&[None, Some(0), Some(1), Some(5), Some(20)], rng)
            .map(|count: u32| count.min(vocab)),
    }
}
