use burn::module::{Module, Param};
use burn::tensor::{Bool, FloatDType, Tensor, activation};
use marlin_nn::{self as decode, AttentionParts, LayerCache};

use super::cache::{CachePosition, append};
use super::prompt::Span;
use super::rope::Rope;
use super::step::{PassBatch, Work};
use super::{ProjectionGroup, RmsNorm};

/// The value of masked scores. The value is finite, since some shader compilers assume that
/// infinities do not occur.
const MASKED: f32 = -1e30;

/// Causal self-attention with grouped key and value heads (GQA, arXiv 2305.13245).
#[derive(Module, Debug)]
pub struct Attention {
    /// The projections of queries [hidden, heads * head_dim], and of keys and values
    /// [hidden, kv_heads * head_dim].
    pub qkv_proj: ProjectionGroup,
    /// The norm of each query head, `[head_dim]`, which Qwen 3 has.
    pub q_norm: Option<RmsNorm>,
    /// The norm of each key head, `[head_dim]`, which Qwen 3 has.
    pub k_norm: Option<RmsNorm>,
    /// A score of each query head that counts in its softmax without a position, `[heads]`, which
    /// gpt-oss has.
    pub sinks: Option<Param<Tensor<1>>>,
    /// [heads * head_dim, hidden].
    pub o_proj: ProjectionGroup,
    /// Query heads.
    pub heads: usize,
    /// The number of key and value heads.
    pub kv_heads: usize,
    /// The number of features of one head.
    pub head_dim: usize,
    /// The number of positions that a query attends to, including its own; `None` for all positions
    /// before.
    #[module(skip)]
    pub window: Option<usize>,
}

impl Attention {
    /// Computes attention of whole prompts from queries, keys and values side by side,
    /// [batch, seq, (heads + 2 * kv_heads) * head_dim], and returns [batch, seq, hidden].
    ///
    /// `cache` is the layer's cache and the position of the first query in it.
    pub(crate) fn forward_prompt(
        &self,
        qkv: Tensor<3>,
        span: &Span,
        cache: Option<(LayerCache<'_>, CachePosition)>,
    ) -> Tensor<3> {
        self.o_proj
            .forward_joined(self.mix_prompt(qkv, span, cache))
    }

    /// Computes [`forward_prompt`](Self::forward_prompt) without the output projection, and returns
    /// [batch, seq, heads * head_dim].
    pub(crate) fn mix_prompt(
        &self,
        qkv: Tensor<3>,
        span: &Span,
        cache: Option<(LayerCache<'_>, CachePosition)>,
    ) -> Tensor<3> {
        let [batch, seq, _] = qkv.dims();
        let heads = |x: Tensor<3>, heads: usize| {
            x.reshape([batch, seq, heads, self.head_dim])
                .swap_dims(1, 2)
        };
        let rotated = |x: Tensor<4>, norm: &Option<RmsNorm>| match norm {
            Some(norm) => span.rope.apply(norm.forward(x)),
            None => span.rope.apply(x),
        };
        let [queries, keys, values] = self.qkv_proj.split(qkv);
        let queries = rotated(heads(queries, self.heads), &self.q_norm);
        let keys = rotated(heads(keys, self.kv_heads), &self.k_norm);
        let values = heads(values, self.kv_heads);
        let (keys, values) = match cache {
            Some((layer, position)) => append(layer, position, keys, values),
            None => (keys, values),
        };
        let mixed = self
            .attend(queries, keys, values, span.mask(self.window))
            .swap_dims(1, 2);
        mixed.reshape([batch, seq, self.heads * self.head_dim])
    }

    /// Computes attention of the token of each row of a decode step or of prompts. The inputs are
    /// queries, keys and values side by side, [rows, (heads + 2 * kv_heads) * head_dim]; the result
    /// is [rows, hidden].
    pub(crate) fn forward_rows(
        &self,
        qkv: Tensor<2>,
        rope: &Rope,
        cache: LayerCache<'_>,
        batch: &PassBatch,
    ) -> Tensor<2> {
        self.o_proj
            .forward_joined(self.mix_rows(qkv, rope, cache, batch))
    }

    /// Computes [`forward_rows`](Self::forward_rows) without the output projection, and returns
    /// [rows, heads * head_dim].
    pub(crate) fn mix_rows(
        &self,
        qkv: Tensor<2>,
        rope: &Rope,
        cache: LayerCache<'_>,
        batch: &PassBatch,
    ) -> Tensor<2> {
        let parts = self.parts(rope);
        match &batch.work {
            Work::Step { arrival_counters } => {
                decode::attention(qkv, &batch.rows, cache, arrival_counters, &parts)
            }
            Work::Prompts { tiles, .. } => {
                decode::prompt_attention(qkv, &batch.rows, cache, tiles, &parts)
            }
        }
    }

    /// Returns the inputs of the attention of rows other than its rows and its cache.
    pub(super) fn parts(&self, rope: &Rope) -> AttentionParts {
        let norms = match (&self.q_norm, &self.k_norm) {
            (Some(q_norm), Some(k_norm)) => {
                Some(([q_norm.weight.val(), k_norm.weight.val()], q_norm.epsilon))
            }
            _ => None,
        };
        AttentionParts {
            heads: self.heads,
            rope: rope.tables(),
            norms,
            window: self.window,
            sinks: self.sinks.as_ref().map(Param::val),
        }
    }

    /// Computes softmax(q k^T / sqrt(head_dim)) v, [batch, heads, seq, head_dim].
    ///
    /// The query heads that share a key head are stacked along `seq`, so that keys and values are
    /// not repeated.
    fn attend(
        &self,
        queries: Tensor<4>,
        keys: Tensor<4>,
        values: Tensor<4>,
        mask: Option<&Tensor<4, Bool>>,
    ) -> Tensor<4> {
        let [batch, heads, seq, head_dim] = queries.dims();
        let positions = keys.dims()[2];
        let stacked = heads / self.kv_heads * seq;
        let dtype = FloatDType::from(queries.dtype());

        // Queries are scaled before the product, which could leave the range of f16 otherwise.
        let queries = queries.mul_scalar(1.0 / (head_dim as f64).sqrt()).reshape([
            batch,
            self.kv_heads,
            stacked,
            head_dim,
        ]);
        let scores = decode::matmul(queries, keys.swap_dims(2, 3))
            .cast(FloatDType::F32)
            .reshape([batch, heads, seq, positions]);
        let scores = match mask {
            Some(mask) => {
                scores.mask_fill(mask.clone().expand([batch, heads, seq, positions]), MASKED)
            }
            None => scores,
        };
        let scores = match &self.sinks {
            Some(sinks) => {
                let sinks = sinks.val().cast(FloatDType::F32).reshape([1, heads, 1, 1]);
                Tensor::cat(vec![scores, sinks.expand([batch, heads, seq, 1])], 3)
            }
            None => scores,
        };
        let weights = activation::softmax(scores, 3)
            .slice_dim(3, 0..positions)
            .cast(dtype)
            .reshape([batch, self.kv_heads, stacked, positions]);
        decode::matmul(weights, values).reshape([batch, heads, seq, head_dim])
    }
}
