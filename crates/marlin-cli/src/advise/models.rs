//! The shapes of models that `benches/records` has figures of.

use super::records::DTYPE;
use marlin_lm::{Architecture, ExpertsConfig, ModelConfig};

/// A shape of model that was measured, with generated weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Model {
    Llama2Seven,
    Llama3Eight,
    Llama2Seventy,
    /// Qwen3-30B-A3B, a mixture of 128 experts.
    Qwen3Thirty,
    /// `examples/train-tiny-llama/model`.
    Shipped,
}

impl Model {
    const ALL: [Self; 5] = [
        Self::Llama2Seven,
        Self::Llama3Eight,
        Self::Llama2Seventy,
        Self::Qwen3Thirty,
        Self::Shipped,
    ];

    /// Returns the model with the shapes of a config.
    pub fn of(config: &ModelConfig) -> Option<Self> {
        let shapes = |config: &ModelConfig| {
            let matmuls = config.matmuls();
            let heads = (config.num_key_value_heads, config.head_dim);
            (
                matmuls,
                heads,
                config.num_hidden_layers,
                config.vocab_size,
                config.sliding_window,
                config
                    .experts
                    .as_ref()
                    .map(|experts| (experts.count, experts.top_k)),
            )
        };
        Self::ALL
            .into_iter()
            .find(|model| shapes(&model.config()) == shapes(config))
    }

    /// Returns a config with the shapes of the model.
    pub fn config(self) -> ModelConfig {
        let (hidden_size, intermediate_size, layers, heads, kv_heads, vocab_size) = match self {
            Self::Llama2Seven => (4096, 11008, 32, 32, 32, 32000),
            Self::Llama3Eight => (4096, 14336, 32, 32, 8, 128_256),
            Self::Llama2Seventy => (8192, 28672, 80, 64, 8, 32000),
            Self::Qwen3Thirty => (2048, 6144, 48, 32, 4, 151_936),
            Self::Shipped => (256, 768, 5, 4, 2, 4096),
        };
        let (architecture, experts) = match self {
            Self::Qwen3Thirty => (
                Architecture::Qwen3Moe,
                Some(ExpertsConfig {
                    count: 128,
                    top_k: 8,
                    intermediate_size: 768,
                    shared_intermediate_size: None,
                    normalises: true,
                    sparse_step: 1,
                    dense_layers: Vec::new(),
                }),
            ),
            _ => (Architecture::Llama, None),
        };
        ModelConfig {
            architecture,
            vocab_size,
            hidden_size,
            intermediate_size,
            experts,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim: match self {
                Self::Qwen3Thirty => 128,
                _ => hidden_size / heads,
            },
            rms_norm_eps: 1e-5,
            rope_theta: 1e4,
            rope_scaling: None,
            partial_rotary_factor: 1.0,
            sliding_window: None,
            max_position_embeddings: 4096,
            tie_word_embeddings: self == Self::Shipped,
            attention_bias: false,
            mlp_bias: false,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
            dtype: Some(DTYPE),
        }
    }
}
