use burn::tensor::Tensor;

/// The parameters of a layer's attention, besides its cache.
#[derive(Debug, Clone)]
pub struct AttentionParts {
    /// Query heads.
    pub heads: usize,
    /// Cosines and sines, f32 [positions, rotary_dim / 2] each: features `i` and `i + rotary_dim / 2` of a head are rotated as a pair.
    pub rope: [Tensor<2>; 2],
    /// Weights `[head_dim]` of the RMSNorms of the heads of queries and of keys, and their epsilon, if the model has such norms.
    pub norms: Option<([Tensor<1>; 2], f64)>,
    /// Length of the sliding window in positions, if the model has one.
    pub window: Option<usize>,
}
