//! ByteDance's Seed-OSS (`SeedOssForCausalLM`): Llama's block with biases of q, k and v alone, and
//! heads whose width does not follow from the hidden size.

use super::{Bias, Declaration, Defaults, llama, qwen2};

pub(super) const DECLARATION: Declaration = Declaration {
    class: "SeedOssForCausalLM",
    model_type: "seed_oss",
    attention_bias: Bias::UnlessConfig,
    defaults: Defaults {
        num_key_value_heads: Some(8),
        head_dim: Some(128),
        max_position_embeddings: 524_288,
        ..llama::DECLARATION.defaults
    },
    block: qwen2::block,
    ..llama::DECLARATION
};
