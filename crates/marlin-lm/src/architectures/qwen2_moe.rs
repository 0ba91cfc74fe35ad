//! Qwen 1.5's and 2's mixtures of experts (`Qwen2MoeForCausalLM`): Qwen 2's attention, experts in
//! all layers or in some, and an expert beside them that all tokens have.

use marlin_kernels::Epilogue;

use super::{
    BlockShape, Declaration, Defaults, ExpertDefaults, ExpertFields, ExpertsShape,
    FeedForwardShape, ProjectionShape, SharedExpertShape, StackShape, SwiGluShape, llama, qwen2,
};
use crate::config::{ExpertsConfig, ModelConfig};

pub(super) const DECLARATION: Declaration = Declaration {
    class: "Qwen2MoeForCausalLM",
    model_type: "qwen2_moe",
    experts: ExpertFields::Qwen(ExpertDefaults {
        count: 60,
        top_k: 4,
        intermediate_size: 1408,
        shared_intermediate_size: Some(5632),
    }),
    defaults: Defaults {
        num_key_value_heads: Some(16),
        ..qwen2::DECLARATION.defaults
    },
    block,
    ..qwen2::DECLARATION
};

fn block(config: &ModelConfig, layer: usize) -> BlockShape {
    let feed_forward = match config.experts_of(layer) {
        Some(of_layer) => FeedForwardShape::Experts(experts(config, of_layer)),
        None => FeedForwardShape::SwiGlu(llama::swiglu(config)),
    };
    BlockShape {
        feed_forward,
        ..qwen2::block(config, layer)
    }
}

/// Returns the shape of the experts of a layer, and of the one beside them if there is one.
pub(super) fn experts(config: &ModelConfig, experts: &ExpertsConfig) -> ExpertsShape {
    ExpertsShape {
        router_layer: "mlp.gate",
        router: experts.router(),
        name: "mlp.experts",
        layers: ["gate_proj", "up_proj", "down_proj"],
        hidden: config.hidden_size,
        intermediate: experts.intermediate_size,
        bias: false,
        epilogue: Epilogue::SwiGlu,
        stack: StackShape::TRANSFORMERS,
        shared: experts
            .shared_intermediate_size
            .map(|intermediate_size| SharedExpertShape {
                mlp: shared_expert(config, intermediate_size),
                gate: "mlp.shared_expert_gate",
            }),
        part: None,
    }
}

fn shared_expert(config: &ModelConfig, intermediate_size: usize) -> SwiGluShape {
    let mlp = llama::swiglu(config);
    SwiGluShape {
        gate_up: ProjectionShape {
            name: "mlp.shared_expert.gate_up_proj",
            layers: &["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"],
            outputs: vec![intermediate_size; 2],
            ..mlp.gate_up
        },
        down: ProjectionShape {
            name: "mlp.shared_expert.down_proj",
            layers: &["mlp.shared_expert.down_proj"],
            k: intermediate_size,
            ..mlp.down
        },
    }
}
