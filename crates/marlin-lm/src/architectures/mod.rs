//! The supported architectures. Each has a file that declares the fields of the config that it
//! reads, and the shape of its blocks.
//!
//! A new architecture needs a file beside the others, a variant of [`Architecture`] with its line
//! in [`Architecture::declaration`], and a golden folder.

mod block;
mod experts;
mod gpt_oss;
mod llama;
mod mistral;
mod mixtral;
mod part;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod seed_oss;

use std::fmt;

use crate::config::{ModelConfig, RopeScaling, YarnRopeScaling};

pub(crate) use block::{
    AttentionShape, BlockShape, FeedForwardShape, Input, LayerShape, MixerShape, ProjectionKind,
    ProjectionShape, SwiGluShape,
};
pub(crate) use experts::{ExpertLayers, ExpertsShape, SharedExpertShape, StackPart, StackShape};
pub(crate) use part::{ExpertsPart, LayerPart, ProjectionPart};

/// The architecture of a Llama-style decoder, by its Hugging Face class.
///
/// All architectures are the same model with different declarations. Rotary positions,
/// grouped-query attention, SwiGLU and root mean square norms are common to all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 2 and 3.
    Llama,
    /// Mistral 7B and Nemo: the first version of Mistral 7B has a sliding window.
    Mistral,
    /// Qwen 2 and 2.5: q, k and v have biases.
    Qwen2,
    /// Qwen 3: queries and keys are normalised head by head.
    Qwen3,
    /// Phi-3, Phi-3.5 and Phi-4: q, k, v and gate, up are one tensor each.
    Phi3,
    /// Mixtral 8x7B and 8x22B: Mistral with experts in every layer.
    Mixtral,
    /// The mixtures of Qwen 1.5 and 2: an expert beside the others that all tokens have.
    Qwen2Moe,
    /// The mixtures of Qwen 3, such as Qwen3-30B-A3B.
    Qwen3Moe,
    /// OpenAI's gpt-oss: attention with sinks, a window in every other layer, and experts with a
    /// clamped SwiGLU.
    GptOss,
    /// ByteDance's Seed-OSS: q, k and v have biases.
    SeedOss,
}

/// The declaration of one architecture.
pub(crate) struct Declaration {
    /// The class in `architectures`.
    pub(crate) class: &'static str,
    /// The value of `model_type`.
    pub(crate) model_type: &'static str,
    /// The source of the biases of the q, k and v projections.
    pub(crate) attention_bias: Bias,
    /// The source of the biases of the gate, up and down projections.
    pub(crate) mlp_bias: Bias,
    /// The layers that `sliding_window` applies to.
    pub(crate) window: Window,
    /// The rotary scalings that its config class reads.
    pub(crate) rope: RopeFields,
    /// The fields that describe experts.
    pub(crate) experts: ExpertFields,
    /// The values of fields that `config.json` may leave out.
    pub(crate) defaults: Defaults,
    /// The function that returns the shape of a block, by its index.
    pub(crate) block: fn(&ModelConfig, usize) -> BlockShape,
}

/// The source that decides whether there are biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bias {
    /// No biases, regardless of the config.
    Never,
    /// Biases in every model.
    Always,
    /// Biases if `attention_bias` or `mlp_bias` of the config is true.
    Config,
    /// Biases unless `attention_bias` of the config is false.
    UnlessConfig,
}

/// The layers that attend to a window of `sliding_window` positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Window {
    /// No layer: the field is not read.
    None,
    /// All layers, if the field is a number.
    AllLayers,
    /// The layers from `max_window_layers` on, if `use_sliding_window` is true.
    UpperLayers,
    /// The first layer, and every other layer after it, if the field is a number.
    EvenLayers,
}

/// The rotary scalings that a config class reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RopeFields {
    /// All supported scalings.
    Any,
    /// Only LongRoPE, also by its early names `su` and `yarn`.
    LongRope,
}

/// The fields that describe the experts of an architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpertFields {
    /// No field: the models are no mixtures.
    None,
    /// Those of Qwen's mixtures, whose layers may also be dense.
    Qwen(ExpertDefaults),
    /// Those of Mixtral and gpt-oss, where `intermediate_size` is that of the experts.
    Mixtral(ExpertDefaults),
}

/// The defaults of the fields that describe experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExpertDefaults {
    pub(crate) count: usize,
    pub(crate) top_k: usize,
    pub(crate) intermediate_size: usize,
    /// `None` if the architecture has no expert that all tokens have.
    pub(crate) shared_intermediate_size: Option<usize>,
}

/// The defaults of the architecture's Hugging Face config class, where architectures differ.
pub(crate) struct Defaults {
    /// The number of key and value heads; `None` for the number of query heads.
    pub(crate) num_key_value_heads: Option<usize>,
    /// The number of features of one head; `None` for `hidden_size / num_attention_heads`.
    pub(crate) head_dim: Option<usize>,
    pub(crate) rms_norm_eps: f64,
    pub(crate) rope_theta: f64,
    pub(crate) max_position_embeddings: usize,
    /// The number of positions before the context was stretched; `None` for the value in the rotary
    /// scaling.
    pub(crate) original_max_position_embeddings: Option<usize>,
    /// The rotary scaling of a config without one.
    pub(crate) yarn: Option<YarnRopeScaling>,
    pub(crate) sliding_window: Option<usize>,
    pub(crate) max_window_layers: usize,
}

impl Architecture {
    /// All supported architectures.
    pub const ALL: [Architecture; 10] = [
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Phi3,
        Self::Mixtral,
        Self::Qwen2Moe,
        Self::Qwen3Moe,
        Self::GptOss,
        Self::SeedOss,
    ];

    /// Returns the name in the field `architectures` of a `config.json`.
    pub fn class(self) -> &'static str {
        self.declaration().class
    }

    pub(crate) fn declaration(self) -> &'static Declaration {
        match self {
            Self::Llama => &llama::DECLARATION,
            Self::Mistral => &mistral::DECLARATION,
            Self::Qwen2 => &qwen2::DECLARATION,
            Self::Qwen3 => &qwen3::DECLARATION,
            Self::Phi3 => &phi3::DECLARATION,
            Self::Mixtral => &mixtral::DECLARATION,
            Self::Qwen2Moe => &qwen2_moe::DECLARATION,
            Self::Qwen3Moe => &qwen3_moe::DECLARATION,
            Self::GptOss => &gpt_oss::DECLARATION,
            Self::SeedOss => &seed_oss::DECLARATION,
        }
    }

    /// Returns the architecture of a `config.json`: by `architectures`, or by `model_type` if
    /// `architectures` is absent or empty.
    pub(crate) fn find(classes: &[String], model_type: Option<&str>) -> Option<Self> {
        Self::ALL.into_iter().find(|architecture| {
            let declaration = architecture.declaration();
            match classes {
                [] => model_type == Some(declaration.model_type),
                classes => classes.iter().any(|class| class == declaration.class),
            }
        })
    }

    /// Returns the names of all architectures, for messages.
    pub(crate) fn names() -> String {
        Self::ALL.map(Self::class).join(", ")
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.class())
    }
}

impl Bias {
    /// Returns true if there are biases, for the value `asked` of the config.
    pub(crate) fn resolve(self, asked: Option<bool>) -> bool {
        match self {
            Self::Never => false,
            Self::Always => true,
            Self::Config => asked.unwrap_or(false),
            Self::UnlessConfig => asked.unwrap_or(true),
        }
    }

    /// Returns true if a model may have biases (`has` is true), or may have none (`has` is false).
    pub(crate) fn allows(self, has: bool) -> bool {
        self.resolve(Some(has)) == has
    }
}

impl RopeFields {
    /// Returns true if the config class reads this scaling.
    pub(crate) fn reads(self, scaling: &RopeScaling) -> bool {
        self == Self::Any || matches!(scaling, RopeScaling::LongRope(_))
    }

    /// Returns true if a scaling of this type is LongRoPE.
    pub(crate) fn is_long_rope(self, rope_type: &str) -> bool {
        match self {
            Self::Any => matches!(rope_type, "longrope" | "su"),
            Self::LongRope => matches!(rope_type, "longrope" | "su" | "yarn"),
        }
    }
}

#[cfg(test)]
mod tests;
