//! Mixtral 8x7B and 8x22B (`MixtralForCausalLM`): Mistral's attention, and experts in all layers.

use super::{
    BlockShape, Declaration, Defaults, ExpertDefaults, ExpertFields, ExpertsShape,
    FeedForwardShape, llama, mistral, qwen2_moe,
};
use crate::config::ModelConfig;

pub(super) const DECLARATION: Declaration = Declaration {
    class: "MixtralForCausalLM",
    model_type: "mixtral",
    experts: ExpertFields::Mixtral(ExpertDefaults {
        count: 8,
        top_k: 2,
        intermediate_size: 14_336,
        shared_intermediate_size: None,
    }),
    defaults: Defaults {
        rms_norm_eps: 1e-5,
        rope_theta: 1e6,
        sliding_window: None,
        ..mistral::DECLARATION.defaults
    },
    block,
    ..mistral::DECLARATION
};

fn block(config: &ModelConfig, layer: usize) -> BlockShape {
    let block = llama::block(config, layer);
    let Some(experts) = config.experts_of(layer) else {
        return block;
    };
    BlockShape {
        feed_forward: FeedForwardShape::Experts(ExpertsShape {
            router_layer: "block_sparse_moe.gate",
            name: "block_sparse_moe.experts",
            layers: ["w1", "w3", "w2"],
            ..qwen2_moe::experts(config, experts)
        }),
        ..block
    }
}
