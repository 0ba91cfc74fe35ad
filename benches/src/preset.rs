//! The models whose shapes the benches use.

use crate::BenchError;
use crate::decode::failed;
use clap::ValueEnum;
use marlin_lm::ModelConfig;
use serde_json::json;

/// A model whose shape is known.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Preset {
    #[value(name = "llama-2-7b")]
    Llama2Seven,
    #[value(name = "llama-3-8b")]
    Llama3Eight,
    #[value(name = "llama-2-70b")]
    Llama2Seventy,
    #[value(name = "qwen3-30b-a3b")]
    Qwen3Thirty,
    #[value(name = "mixtral-8x7b")]
    Mixtral,
    #[value(name = "gpt-oss-20b")]
    GptOssTwenty,
    #[value(name = "gpt-oss-120b")]
    GptOssHundredTwenty,
    /// The shipped model of this project.
    #[value(name = "train-tiny-llama")]
    Shipped,
}

impl Preset {
    /// Returns a config with the shape of the model.
    pub fn config(self) -> Result<ModelConfig, BenchError> {
        let config = |hidden: usize,
                      intermediate: usize,
                      layers: usize,
                      heads: usize,
                      kv_heads: usize,
                      vocab: usize,
                      positions: usize,
                      theta: f64| {
            json!({
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
                "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
                "rms_norm_eps": 1e-5, "max_position_embeddings": positions, "rope_theta": theta, "eos_token_id": 2,
            })
            .to_string()
        };
        let gpt_oss = |layers: usize, experts: usize| {
            json!({
                "architectures": ["GptOssForCausalLM"], "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
                "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": experts,
                "num_experts_per_tok": 4, "eos_token_id": 200_002,
            })
            .to_string()
        };
        let text = match self {
            Self::Llama2Seven => config(4096, 11008, 32, 32, 32, 32000, 4096, 1e4),
            Self::Llama3Eight => config(4096, 14336, 32, 32, 8, 128_256, 131_072, 5e5),
            Self::Llama2Seventy => config(8192, 28672, 80, 64, 8, 32000, 4096, 1e4),
            Self::Qwen3Thirty => json!({
                "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
                "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 1e6,
                "max_position_embeddings": 40_960, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                "norm_topk_prob": true, "eos_token_id": 2,
            })
            .to_string(),
            Self::Mixtral => json!({
                "architectures": ["MixtralForCausalLM"], "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14336,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32_768,
                "num_local_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 2,
            })
            .to_string(),
            Self::GptOssTwenty => gpt_oss(24, 32),
            Self::GptOssHundredTwenty => gpt_oss(36, 128),
            Self::Shipped => {
                include_str!("../../examples/train-tiny-llama/model/config.json").to_owned()
            }
        };
        ModelConfig::from_json(&text).map_err(failed)
    }
}
