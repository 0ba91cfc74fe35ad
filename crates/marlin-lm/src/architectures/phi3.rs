//! Phi-3, Phi-3.5 and Phi-4 (`Phi3ForCausalLM`): checkpoints have q, k and v in one layer, gate and
//! up in another.

use super::{
    AttentionShape, Bias, BlockShape, Declaration, Defaults, ExpertFields, FeedForwardShape,
    MixerShape, ProjectionShape, RopeFields, SwiGluShape, Window, llama,
};
use crate::config::ModelConfig;

pub(super) const DECLARATION: Declaration = Declaration {
    class: "Phi3ForCausalLM",
    model_type: "phi3",
    attention_bias: Bias::Never,
    mlp_bias: Bias::Never,
    window: Window::AllLayers,
    rope: RopeFields::LongRope,
    experts: ExpertFields::None,
    defaults: Defaults {
        rms_norm_eps: 1e-5,
        max_position_embeddings: 4096,
        original_max_position_embeddings: Some(4096),
        ..llama::DECLARATION.defaults
    },
    block,
};

fn block(config: &ModelConfig, layer: usize) -> BlockShape {
    let (attention, mlp) = (llama::attention(config, layer), llama::swiglu(config));
    BlockShape {
        mixer: MixerShape::Attention(AttentionShape {
            qkv: ProjectionShape {
                layers: &["self_attn.qkv_proj"],
                ..attention.qkv
            },
            ..attention
        }),
        feed_forward: FeedForwardShape::SwiGlu(SwiGluShape {
            gate_up: ProjectionShape {
                layers: &["mlp.gate_up_proj"],
                // GPTQModel from 7.0 on writes gate and up as separate layers.
                split_layers: mlp.gate_up.layers.into(),
                ..mlp.gate_up
            },
            ..mlp
        }),
        ..llama::block(config, layer)
    }
}
