//! The architectures: a file each, which declares the fields of the config that it reads and the
//! shape of its blocks.
//!
//! To add one: a file beside the others, a variant of [`Architecture`] and its line in
//! [`Architecture::declaration`], and a golden folder.

mod block;
mod llama;
mod mistral;
mod phi3;
mod qwen2;
mod qwen3;

use std::fmt;

use crate::config::{ModelConfig, RopeScaling};

pub(crate) use block::{
    AttentionShape, BlockShape, FeedForwardShape, Input, LayerShape, MixerShape, ProjectionKind,
    ProjectionShape, SwiGluShape,
};

/// A Llama-style decoder by its Hugging Face class.
///
/// Every one of them is the same model with another declaration: rotary positions, grouped-query
/// attention, SwiGLU and root mean square norms are common to all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 2 and 3.
    Llama,
    /// Mistral 7B and Nemo: a sliding window in the first of them.
    Mistral,
    /// Qwen 2 and 2.5: q, k and v have biases.
    Qwen2,
    /// Qwen 3: queries and keys are normalised head by head.
    Qwen3,
    /// Phi-3, Phi-3.5 and Phi-4: q, k, v and gate, up are one tensor each.
    Phi3,
}

/// The particulars of one architecture.
pub(crate) struct Declaration {
    /// The class in `architectures`.
    pub(crate) class: &'static str,
    /// `model_type`.
    pub(crate) model_type: &'static str,
    /// The source of the biases of the q, k and v projections.
    pub(crate) attention_bias: Bias,
    /// The source of the biases of the gate, up and down projections.
    pub(crate) mlp_bias: Bias,
    /// The layers that `sliding_window` applies to.
    pub(crate) window: Window,
    /// The rotary scalings that its config class reads.
    pub(crate) rope: RopeFields,
    /// The values of fields that `config.json` may leave out.
    pub(crate) defaults: Defaults,
    /// The shape of the block of this index.
    pub(crate) block: fn(&ModelConfig, usize) -> BlockShape,
}

/// The source that decides whether there are biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bias {
    /// There are none, whatever the config has.
    Never,
    /// There always are.
    Always,
    /// The config's `attention_bias` or `mlp_bias`.
    Config,
}

/// The layers that attend to a window of `sliding_window` positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Window {
    /// None: the field is not read.
    None,
    /// All of them, where the field holds a number.
    AllLayers,
    /// Those from `max_window_layers` on, where `use_sliding_window` is true.
    UpperLayers,
}

/// The rotary scalings that a config class reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RopeFields {
    /// All of them.
    Any,
    /// LongRoPE alone, also by its early names `su` and `yarn`.
    LongRope,
}

/// The defaults of the architecture's Hugging Face config class, where architectures differ.
pub(crate) struct Defaults {
    /// `None`: as many as query heads.
    pub(crate) num_key_value_heads: Option<usize>,
    /// `None`: `hidden_size / num_attention_heads`.
    pub(crate) head_dim: Option<usize>,
    pub(crate) rms_norm_eps: f64,
    pub(crate) max_position_embeddings: usize,
    /// `None`: that of the rotary scaling.
    pub(crate) original_max_position_embeddings: Option<usize>,
    pub(crate) sliding_window: Option<usize>,
    pub(crate) max_window_layers: usize,
}

impl Architecture {
    /// Every architecture that is read.
    pub const ALL: [Architecture; 5] = [
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Phi3,
    ];

    /// The name in the field `architectures` of a `config.json`.
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
        }
    }

    /// The architecture of a `config.json`: `architectures` counts; where it is absent or empty,
    /// `model_type` does.
    pub(crate) fn find(classes: &[String], model_type: Option<&str>) -> Option<Self> {
        Self::ALL.into_iter().find(|architecture| {
            let declaration = architecture.declaration();
            match classes {
                [] => model_type == Some(declaration.model_type),
                classes => classes.iter().any(|class| class == declaration.class),
            }
        })
    }

    /// The names of all of them, for messages.
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
    /// Returns true if there are biases, where the config has `asked`.
    pub(crate) fn resolve(self, asked: Option<bool>) -> bool {
        match self {
            Self::Never => false,
            Self::Always => true,
            Self::Config => asked.unwrap_or(false),
        }
    }

    /// Returns true if a model may have biases, or none, according to `has`.
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
