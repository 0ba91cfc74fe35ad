use burn::tensor::{Device, Int, Tensor};
use marlin_decode::{self as decode, Row};

use super::{KvCache, LlamaModel, Residual};

/// The rows of a decode step or of short prompts, and the counters of its kernels.
#[derive(Debug)]
pub(crate) struct Batch {
    /// [rows, [`Row::WORDS`]].
    pub(crate) rows: Tensor<2, Int>,
    /// [rows, heads] of zeros.
    pub(crate) tickets: Tensor<2, Int>,
    /// True if several rows may be of one sequence.
    pub(crate) is_prompt: bool,
}

impl Batch {
    /// Rows that no sequence uses.
    pub(crate) fn idle(count: usize, heads: usize, is_prompt: bool, device: &Device) -> Self {
        let mut rows = decode::words([count, Row::WORDS], device);
        decode::write_rows(&mut rows, 0, &vec![Row::IDLE; count]);
        Self { rows, tickets: decode::words([count, heads], device), is_prompt }
    }
}

impl LlamaModel {
    /// One step of decode: takes each row's token through the model, and writes the next one and its position to the row.
    ///
    /// `seen` [slots, vocab / 32 up] are the bitmaps of the tokens in each slot's sequence.
    pub(crate) fn step(&self, batch: &mut Batch, cache: &mut KvCache, seen: &mut Tensor<2, Int>) {
        let window = cache.max_len().min(self.max_len());
        let stream = self.rows(batch, cache);
        decode::sample(self.decode_head(stream.norm(&self.norm)), &mut batch.rows, seen, window);
    }

    /// Writes the keys and values of each row's token to the cache. Rows may be any tokens of prompts, if the batch says so.
    pub(crate) fn prefill_rows(&self, batch: &Batch, cache: &mut KvCache) {
        self.rows(batch, cache);
    }

    /// The residual stream [rows, hidden] of each row's token after all layers.
    fn rows(&self, batch: &Batch, cache: &mut KvCache) -> Residual<2> {
        let mut stream = Residual::new(decode::embed(self.embed_tokens.weight.val(), &batch.rows));
        for (index, layer) in self.layers.iter().enumerate() {
            stream = layer.forward(stream, |attention, qkv| attention.forward_step(qkv, &self.rope, cache.layer(index), batch));
        }
        stream
    }
}
