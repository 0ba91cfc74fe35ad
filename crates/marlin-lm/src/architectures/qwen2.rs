//! Qwen 2 and 2.5 (`Qwen2ForCausalLM`): q, k and v have biases, attention's output has none, and
//! the upper layers may have a sliding window.

use super::{
    AttentionShape, Bias, BlockShape, Declaration, Defaults, MixerShape, ProjectionShape, Window,
    llama,
};
use crate::config::ModelConfig;

pub(super) const DECLARATION: Declaration = Declaration {
    class: "Qwen2ForCausalLM",
    model_type: "qwen2",
    attention_bias: Bias::Always,
    mlp_bias: Bias::Never,
    window: Window::UpperLayers,
    defaults: Defaults {
        num_key_value_heads: Some(32),
        max_position_embeddings: 32_768,
        sliding_window: Some(4096),
        max_window_layers: 28,
        ..llama::DECLARATION.defaults
    },
    block,
    ..llama::DECLARATION
};

pub(super) fn block(config: &ModelConfig, layer: usize) -> BlockShape {
    let attention = llama::attention(config, layer);
    BlockShape {
        mixer: MixerShape::Attention(AttentionShape {
            output: ProjectionShape {
                bias: false,
                ..attention.output
            },
            ..attention
        }),
        ..llama::block(config, layer)
    }
}
