//! Llama 2 and 3 (`LlamaForCausalLM`), and the declarations that most architectures share.

use marlin_kernels::Epilogue;

use super::{
    AttentionShape, Bias, BlockShape, Declaration, Defaults, ExpertFields, FeedForwardShape, Input,
    MixerShape, ProjectionKind, ProjectionShape, RopeFields, SwiGluShape, Window,
};
use crate::config::ModelConfig;

pub(super) const DECLARATION: Declaration = Declaration {
    class: "LlamaForCausalLM",
    model_type: "llama",
    attention_bias: Bias::Config,
    mlp_bias: Bias::Config,
    window: Window::None,
    rope: RopeFields::Any,
    experts: ExpertFields::None,
    defaults: Defaults {
        num_key_value_heads: None,
        head_dim: None,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        max_position_embeddings: 2048,
        original_max_position_embeddings: None,
        yarn: None,
        sliding_window: None,
        max_window_layers: 0,
    },
    block,
};

/// Returns the shape of a block: attention and SwiGLU, each after a norm.
pub(super) fn block(config: &ModelConfig, layer: usize) -> BlockShape {
    BlockShape {
        mixer_norm: "input_layernorm",
        mixer: MixerShape::Attention(attention(config, layer)),
        feed_forward_norm: "post_attention_layernorm",
        feed_forward: FeedForwardShape::SwiGlu(swiglu(config)),
    }
}

/// Returns the shape of attention without head norms. The output has a bias if q, k and v have
/// biases.
pub(super) fn attention(config: &ModelConfig, layer: usize) -> AttentionShape {
    AttentionShape {
        qkv: ProjectionShape {
            kind: ProjectionKind::Qkv,
            name: "self_attn.qkv_proj",
            layers: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            split_layers: None,
            k: config.hidden_size,
            outputs: vec![
                config.query_size(),
                config.key_value_size(),
                config.key_value_size(),
            ],
            bias: config.attention_bias,
            input: Input::MixerNorm,
            epilogue: Epilogue::None,
            part: None,
        },
        head_norms: None,
        sinks: None,
        output: ProjectionShape {
            kind: ProjectionKind::Output,
            name: "self_attn.o_proj",
            layers: &["self_attn.o_proj"],
            split_layers: None,
            k: config.query_size(),
            outputs: vec![config.hidden_size],
            bias: config.attention_bias,
            input: Input::Attention {
                head_dim: config.head_dim,
                shared: config.num_attention_heads / config.num_key_value_heads,
            },
            epilogue: Epilogue::None,
            part: None,
        },
        window: config.window_of(layer),
    }
}

pub(super) fn swiglu(config: &ModelConfig) -> SwiGluShape {
    SwiGluShape {
        gate_up: ProjectionShape {
            kind: ProjectionKind::GateUp,
            name: "mlp.gate_up_proj",
            layers: &["mlp.gate_proj", "mlp.up_proj"],
            split_layers: None,
            k: config.hidden_size,
            outputs: vec![config.intermediate_size; 2],
            bias: config.mlp_bias,
            input: Input::FeedForwardNorm,
            epilogue: Epilogue::SwiGlu,
            part: None,
        },
        down: ProjectionShape {
            kind: ProjectionKind::Down,
            name: "mlp.down_proj",
            layers: &["mlp.down_proj"],
            split_layers: None,
            k: config.intermediate_size,
            outputs: vec![config.hidden_size],
            bias: config.mlp_bias,
            input: Input::Gated,
            epilogue: Epilogue::None,
            part: None,
        },
    }
}
