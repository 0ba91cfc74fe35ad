//! Qwen 3 (`Qwen3ForCausalLM`): queries and keys are normalised head by head, and the upper layers
//! may have a sliding window.

use super::{
    AttentionShape, Bias, BlockShape, Declaration, Defaults, MixerShape, Window, llama, qwen2,
};
use crate::config::ModelConfig;

pub(super) const DECLARATION: Declaration = Declaration {
    class: "Qwen3ForCausalLM",
    model_type: "qwen3",
    mlp_bias: Bias::Never,
    window: Window::UpperLayers,
    defaults: Defaults {
        head_dim: Some(128),
        ..qwen2::DECLARATION.defaults
    },
    block,
    ..llama::DECLARATION
};

pub(super) fn block(config: &ModelConfig, layer: usize) -> BlockShape {
    BlockShape {
        mixer: MixerShape::Attention(AttentionShape {
            head_norms: Some(["self_attn.q_norm", "self_attn.k_norm"]),
            ..llama::attention(config, layer)
        }),
        ..llama::block(config, layer)
    }
}
