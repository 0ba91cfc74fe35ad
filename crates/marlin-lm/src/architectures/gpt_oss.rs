//! OpenAI's gpt-oss-20b and gpt-oss-120b (`GptOssForCausalLM`): experts with a clamped SwiGLU and
//! biases, scores without a position ("sinks") in attention, and a window in every other layer.

use marlin_kernels::Epilogue;

use super::{
    AttentionShape, Bias, BlockShape, Declaration, Defaults, ExpertDefaults, ExpertFields,
    ExpertsShape, FeedForwardShape, MixerShape, StackShape, Window, llama, qwen2_moe,
};
use crate::config::{ModelConfig, YarnRopeScaling};

pub(super) const DECLARATION: Declaration = Declaration {
    class: "GptOssForCausalLM",
    model_type: "gpt_oss",
    attention_bias: Bias::Always,
    mlp_bias: Bias::Always,
    window: Window::EvenLayers,
    experts: ExpertFields::Mixtral(ExpertDefaults {
        count: 128,
        top_k: 4,
        intermediate_size: 2880,
        shared_intermediate_size: None,
    }),
    defaults: Defaults {
        num_key_value_heads: Some(8),
        head_dim: Some(64),
        rms_norm_eps: 1e-5,
        rope_theta: 150_000.0,
        max_position_embeddings: 131_072,
        yarn: Some(YarnRopeScaling {
            factor: 32.0,
            original_max_position_embeddings: 4096,
            beta_fast: YarnRopeScaling::DEFAULT_BETA_FAST,
            beta_slow: YarnRopeScaling::DEFAULT_BETA_SLOW,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: false,
        }),
        sliding_window: Some(128),
        ..llama::DECLARATION.defaults
    },
    block,
    ..llama::DECLARATION
};

fn block(config: &ModelConfig, layer: usize) -> BlockShape {
    let block = BlockShape {
        mixer: MixerShape::Attention(AttentionShape {
            sinks: Some("self_attn.sinks"),
            ..llama::attention(config, layer)
        }),
        ..llama::block(config, layer)
    };
    let Some(experts) = config.experts_of(layer) else {
        return block;
    };
    BlockShape {
        feed_forward: FeedForwardShape::Experts(ExpertsShape {
            router_layer: "mlp.router",
            bias: true,
            epilogue: Epilogue::ClampedSwiGlu,
            stack: StackShape {
                alternates: true,
                has_k_first: true,
                is_own: true,
            },
            ..qwen2_moe::experts(config, experts)
        }),
        ..block
    }
}
