//! Mistral 7B and Nemo (`MistralForCausalLM`): Llama's block, with a sliding window in all layers
//! of the first version of Mistral 7B.

use super::{Bias, Declaration, Defaults, Window, llama};

pub(super) const DECLARATION: Declaration = Declaration {
    class: "MistralForCausalLM",
    model_type: "mistral",
    attention_bias: Bias::Never,
    mlp_bias: Bias::Never,
    window: Window::AllLayers,
    defaults: Defaults {
        num_key_value_heads: Some(8),
        max_position_embeddings: 131_072,
        sliding_window: Some(4096),
        ..llama::DECLARATION.defaults
    },
    ..llama::DECLARATION
};
