use burn::tensor::{Device, Int, Tensor};
use marlin_decode::{self as decode, Row};

use super::{KvCache, LlamaModel};

/// The rows of a decode step, and what its kernels count with.
#[derive(Debug)]
pub(crate) struct Batch {
    /// [rows, [`Row::WORDS`]].
    pub(crate) rows: Tensor<2, Int>,
    /// [rows, heads] of zeros.
    pub(crate) tickets: Tensor<2, Int>,
}

impl Batch {
    /// Rows that no sequence uses.
    pub(crate) fn idle(count: usize, heads: usize, device: &Device) -> Self {
        let mut rows = decode::words([count, Row::WORDS], device);
        decode::write_rows(&mut rows, 0, &vec![Row::IDLE; count]);
        Self { rows, tickets: decode::words([count, heads], device) }
    }
}

impl LlamaModel {
    /// One step of decode: takes each row's token through the model, and writes the next one and its position to the row.
    ///
    /// `seen` [slots, vocab / 32 up] are the bitmaps of the tokens in each slot's sequence.
    pub(crate) fn step(&self, batch: &mut Batch, cache: &mut KvCache, seen: &mut Tensor<2, Int>) {
        let window = cache.max_len().min(self.max_len());
        let mut residual = decode::embed(self.embed_tokens.weight.val(), &batch.rows);
        let mut mixed: Option<Tensor<2>> = None;
        for (index, layer) in self.layers.iter().enumerate() {
            let (attention, mlp) = (&layer.self_attn, &layer.mlp);
            let qkv;
            (qkv, residual) = match mixed {
                Some(mixed) => attention.qkv_proj.forward_add_norm(mixed, residual, &layer.input_layernorm),
                None => (attention.qkv_proj.forward_joined(layer.input_layernorm.forward(residual.clone())), residual),
            };
            let attended = attention.decode(qkv, &self.rope, self.config.window_of(index), cache.layer(index), batch);
            let (gate_up, sum) = mlp.gate_up_proj.forward_add_norm(attended, residual, &layer.post_attention_layernorm);
            residual = sum;
            mixed = Some(mlp.forward_down(gate_up));
        }
        let (x, _) = self.norm.forward_residual(mixed, residual);
        decode::sample(self.decode_head(x), &mut batch.rows, seen, window);
    }
}
