use burn::tensor::{Device, Int, Tensor};
use marlin_nn::{self as decode, SequenceState};

use super::{KvCache, Model, Residual};

/// The rows of a pass, one row for each token, and the other inputs of its kernels.
#[derive(Debug)]
pub(crate) struct PassBatch {
    /// The rows, [rows, [`SequenceState::WORDS`]].
    pub(crate) rows: Tensor<2, Int>,
    pub(crate) work: Work,
    /// The log probabilities of the chosen tokens, [rows that choose, [`decode::LOGPROB_WORDS`]],
    /// if the pass computes them.
    pub(crate) logprobs: Option<Tensor<2, Int>>,
}

/// The work of a pass.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a few hundred bytes a pass")]
pub(crate) enum Work {
    /// A decode step: one token of each sequence, after which its next token is chosen.
    Step {
        /// The arrival counters of attention, zeros [rows, heads].
        arrival_counters: Tensor<2, Int>,
    },
    /// Tokens of prompts.
    Prompts {
        /// The tiles of attention [tiles, [`TILE_WORDS`](decode::TILE_WORDS)].
        tiles: Tensor<2, Int>,
        /// A row [ends, [`SequenceState::WORDS`]] for each prompt that ends in the pass, after
        /// which its first token is chosen: the word of the token is the number of the prompt's
        /// last row. None if no prompt ends.
        last_rows: Option<Tensor<2, Int>>,
    },
}

impl PassBatch {
    /// Creates a decode step of idle rows.
    pub(crate) fn step(rows: usize, heads: usize, device: &Device) -> Self {
        Self {
            rows: idle(rows, device),
            work: Work::Step {
                arrival_counters: decode::words([rows, heads], device),
            },
            logprobs: None,
        }
    }

    /// Adds the output of the log probabilities of the chosen tokens, which the pass then computes.
    pub(crate) fn with_logprobs(mut self) -> Self {
        let choosing = self.last_rows().unwrap_or(&self.rows);
        let shape = [choosing.dims()[0], decode::LOGPROB_WORDS];
        self.logprobs = Some(decode::words(shape, &self.rows.device()));
        self
    }

    /// Creates idle rows for the tokens of prompts of up to `slots` sequences, of which up to
    /// `last_rows` end.
    pub(crate) fn prompts(rows: usize, last_rows: usize, slots: usize, device: &Device) -> Self {
        let tiles = decode::words(
            [decode::most_tiles(rows, slots), decode::TILE_WORDS],
            device,
        );
        Self {
            rows: idle(rows, device),
            work: Work::Prompts {
                tiles,
                last_rows: (last_rows > 0).then(|| idle(last_rows, device)),
            },
            logprobs: None,
        }
    }

    /// Writes the rows of prompts, and the last rows of the prompts that end.
    pub(crate) fn set_prompts(&mut self, rows: &[SequenceState], last_rows: &[SequenceState]) {
        decode::write_rows(&mut self.rows, 0, rows);
        if let Work::Prompts {
            tiles,
            last_rows: of_device,
        } = &mut self.work
        {
            let count = tiles.dims()[0];
            decode::write_words(tiles, 0, decode::tiles(rows, count));
            if let Some(of_device) = of_device {
                decode::write_rows(of_device, 0, last_rows);
            }
        }
    }

    /// Returns the last rows of the prompts that end; `None` in a decode step.
    pub(crate) fn last_rows(&self) -> Option<&Tensor<2, Int>> {
        match &self.work {
            Work::Step { .. } => None,
            Work::Prompts { last_rows, .. } => last_rows.as_ref(),
        }
    }
}

/// Creates rows that no sequence uses.
fn idle(count: usize, device: &Device) -> Tensor<2, Int> {
    let mut rows = decode::words([count, SequenceState::WORDS], device);
    decode::write_rows(&mut rows, 0, &vec![SequenceState::IDLE; count]);
    rows
}

impl Model {
    /// Runs each row's token through the model, and writes its keys and values to the cache. Then
    /// chooses the next token of each row of a decode step, or of each prompt that ends, and writes
    /// that token and its position to the row.
    ///
    /// `token_table` is the [`decode::TokenTable`].
    pub(crate) fn pass(
        &self,
        batch: &mut PassBatch,
        cache: &mut KvCache,
        token_table: &mut Tensor<2, Int>,
    ) {
        let window = cache.max_len().min(self.max_len());
        let stream = self.rows(batch, cache);
        let (stream, rows) = match &mut batch.work {
            Work::Step { .. } => (stream, &mut batch.rows),
            // Selects the last rows: an embedding whose table has the hidden states of all rows.
            Work::Prompts {
                last_rows: Some(last_rows),
                ..
            } => (
                stream.map(|hidden| decode::embed(hidden, last_rows)),
                last_rows,
            ),
            Work::Prompts {
                last_rows: None, ..
            } => return,
        };
        let logits = self.logits(stream.norm(&self.norm));
        decode::sample(logits.clone(), rows, token_table, window);
        if let Some(logprobs) = &mut batch.logprobs {
            decode::logprobs(logits, rows, logprobs);
        }
    }

    /// Returns the logits [rows, vocab] of the tokens of prompts in `rows`, and writes their keys
    /// and values to the cache, of which each rank computes its part in this call.
    pub(super) fn row_logits_of_rank(
        &self,
        rows: &[SequenceState],
        slots: usize,
        cache: &mut KvCache,
    ) -> Tensor<2> {
        let mut batch = PassBatch::prompts(rows.len(), 0, slots, &self.device());
        batch.set_prompts(rows, &[]);
        self.logits(self.rows(&batch, cache).norm(&self.norm))
    }

    /// Returns the residual stream [rows, hidden] after all blocks, and writes the rows' keys and
    /// values to the cache.
    fn rows(&self, batch: &PassBatch, cache: &mut KvCache) -> Residual<2> {
        let mut stream = self.residual(decode::embed(self.embed_tokens.weight.val(), &batch.rows));
        for (index, layer) in self.layers.iter().enumerate() {
            stream = layer.forward(stream, |attention, qkv| {
                attention.forward_rows(qkv, &self.rope, cache.layer(index), batch)
            });
        }
        stream
    }
}
