use crate::cache::CacheShape;
use crate::kernels::attention::{AttentionPass, AttentionShape};
use burn::tensor::Tensor;
use marlin_kernels::ActivationDtype;

/// The parameters of a layer's attention, other than the KV cache.
#[derive(Debug, Clone)]
pub struct AttentionParts {
    /// The number of query heads.
    pub heads: usize,
    /// The tables of cosines and of sines, f32 [positions, rotary_dim / 2] each. Features `i` and
    /// `i + rotary_dim / 2` of a head are rotated as a pair.
    pub rope: [Tensor<2>; 2],
    /// The weights `[head_dim]` of the RMSNorms of query heads and of key heads, and their epsilon;
    /// `None` if the model has no such norms.
    pub norms: Option<([Tensor<1>; 2], f64)>,
    /// The length of the sliding window in positions, if the model has a window.
    pub window: Option<usize>,
    /// A score of each query head that counts in its softmax without a position, `[heads]`, as
    /// gpt-oss has ("attention sinks"); `None` if the model has none.
    pub sinks: Option<Tensor<1>>,
}

impl AttentionParts {
    /// Returns the shape of the attention of `rows` rows in `dtype` over a KV cache.
    pub fn shape(
        &self,
        pass: AttentionPass,
        rows: usize,
        cache: CacheShape,
        dtype: ActivationDtype,
    ) -> AttentionShape {
        let [max_positions, pairs] = self.rope[0].dims();
        AttentionShape {
            rows,
            pass,
            heads: self.heads,
            rotary_dim: 2 * pairs,
            cache,
            max_positions,
            window: self.window,
            has_sinks: self.sinks.is_some(),
            norm_epsilon: self.norms.as_ref().map(|(_, epsilon)| *epsilon as f32),
            dtype,
        }
    }
}
