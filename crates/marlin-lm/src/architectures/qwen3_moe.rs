//! Qwen 3's mixtures of experts (`Qwen3MoeForCausalLM`), such as Qwen3-30B-A3B: Qwen 3's attention,
//! and experts in all layers or in some.

use super::{
    BlockShape, Declaration, Defaults, ExpertDefaults, ExpertFields, FeedForwardShape, llama,
    qwen2_moe, qwen3,
};
use crate::config::ModelConfig;

pub(super) const DECLARATION: Declaration = Declaration {
    class: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    experts: ExpertFields::Qwen(ExpertDefaults {
        count: 128,
        top_k: 8,
        intermediate_size: 768,
        shared_intermediate_size: None,
    }),
    defaults: Defaults {
        num_key_value_heads: Some(4),
        head_dim: None,
        sliding_window: None,
        max_window_layers: 0,
        ..qwen3::DECLARATION.defaults
    },
    block,
    ..qwen3::DECLARATION
};

fn block(config: &ModelConfig, layer: usize) -> BlockShape {
    let feed_forward = match config.experts_of(layer) {
        Some(experts) => FeedForwardShape::Experts(qwen2_moe::experts(config, experts)),
        None => FeedForwardShape::SwiGlu(llama::swiglu(config)),
    };
    BlockShape {
        feed_forward,
        ..qwen3::block(config, layer)
    }
}
