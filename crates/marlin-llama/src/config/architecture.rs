//! The differences between the decoders of the family: one declaration each, read by the config and
//! by the model.

use std::fmt;

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
    /// The layers of `self_attn` in a file that make queries, keys and values: three, or one with
    /// all of them side by side.
    pub(crate) attention_inputs: &'static [&'static str],
    /// The layers of `mlp` in a file that make gate and up: two, or one with both side by side.
    pub(crate) mlp_inputs: &'static [&'static str],
    /// The source of the biases of the q, k and v projections.
    pub(crate) attention_bias: Bias,
    /// True if the o projection has a bias where q, k and v do.
    pub(crate) output_bias: bool,
    /// The source of the biases of the gate, up and down projections.
    pub(crate) mlp_bias: Bias,
    /// True if `q_norm` and `k_norm` normalise each head before its rotation.
    pub(crate) qk_norm: bool,
    /// The layers that `sliding_window` applies to.
    pub(crate) window: Window,
    /// The values of fields that `config.json` may leave out.
    pub(crate) defaults: Defaults,
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

/// The layers of `mlp` that make gate and up where a file has them as two tensors, as GPTQModel
/// from 7.0 on writes those of architectures that have one layer for both.
pub(crate) const MLP_INPUTS_APART: &[&str] = &["gate_proj", "up_proj"];

const LLAMA: Declaration = Declaration {
    class: "LlamaForCausalLM",
    model_type: "llama",
    attention_inputs: &["q_proj", "k_proj", "v_proj"],
    mlp_inputs: MLP_INPUTS_APART,
    attention_bias: Bias::Config,
    output_bias: true,
    mlp_bias: Bias::Config,
    qk_norm: false,
    window: Window::None,
    defaults: Defaults {
        num_key_value_heads: None,
        head_dim: None,
        rms_norm_eps: 1e-6,
        max_position_embeddings: 2048,
        original_max_position_embeddings: None,
        sliding_window: None,
        max_window_layers: 0,
    },
};

const MISTRAL: Declaration = Declaration {
    class: "MistralForCausalLM",
    model_type: "mistral",
    attention_bias: Bias::Never,
    mlp_bias: Bias::Never,
    window: Window::AllLayers,
    defaults: Defaults {
        num_key_value_heads: Some(8),
        max_position_embeddings: 131_072,
        sliding_window: Some(4096),
        ..LLAMA.defaults
    },
    ..LLAMA
};

const QWEN_DEFAULTS: Defaults = Defaults {
    num_key_value_heads: Some(32),
    max_position_embeddings: 32_768,
    sliding_window: Some(4096),
    max_window_layers: 28,
    ..LLAMA.defaults
};

const QWEN2: Declaration = Declaration {
    class: "Qwen2ForCausalLM",
    model_type: "qwen2",
    attention_bias: Bias::Always,
    output_bias: false,
    mlp_bias: Bias::Never,
    window: Window::UpperLayers,
    defaults: QWEN_DEFAULTS,
    ..LLAMA
};

const QWEN3: Declaration = Declaration {
    class: "Qwen3ForCausalLM",
    model_type: "qwen3",
    mlp_bias: Bias::Never,
    qk_norm: true,
    window: Window::UpperLayers,
    defaults: Defaults {
        head_dim: Some(128),
        ..QWEN_DEFAULTS
    },
    ..LLAMA
};

const PHI3: Declaration = Declaration {
    class: "Phi3ForCausalLM",
    model_type: "phi3",
    attention_inputs: &["qkv_proj"],
    mlp_inputs: &["gate_up_proj"],
    attention_bias: Bias::Never,
    mlp_bias: Bias::Never,
    window: Window::AllLayers,
    defaults: Defaults {
        rms_norm_eps: 1e-5,
        max_position_embeddings: 4096,
        original_max_position_embeddings: Some(4096),
        ..LLAMA.defaults
    },
    ..LLAMA
};

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
            Self::Llama => &LLAMA,
            Self::Mistral => &MISTRAL,
            Self::Qwen2 => &QWEN2,
            Self::Qwen3 => &QWEN3,
            Self::Phi3 => &PHI3,
        }
    }

    /// The architecture of a `config.json`: `architectures` counts; where it is absent or empty,
    /// `model_type` does.
    pub(super) fn find(classes: &[String], model_type: Option<&str>) -> Option<Self> {
        Self::ALL.into_iter().find(|architecture| {
            let declaration = architecture.declaration();
            match classes {
                [] => model_type == Some(declaration.model_type),
                classes => classes.iter().any(|class| class == declaration.class),
            }
        })
    }

    /// The names of all of them, for messages.
    pub(super) fn names() -> String {
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
    pub(super) fn resolve(self, asked: Option<bool>) -> bool {
        match self {
            Self::Never => false,
            Self::Always => true,
            Self::Config => asked.unwrap_or(false),
        }
    }

    /// Returns true if a model may have biases, or none, according to `has`.
    pub(super) fn allows(self, has: bool) -> bool {
        self.resolve(Some(has)) == has
    }
}
