//! The model's tensors by their names in Hugging Face checkpoints: one list for random weights and for files, one for saving.

use std::convert::Infallible;

use burn::module::{Param, ParamId};
use burn::nn::{Embedding, Initializer, Linear};
use burn::tensor::{Device, Tensor};

use super::{Attention, Layer, LlamaModel, Mlp, Projection, RmsNorm, Rope};
use crate::config::LlamaConfig;

/// Where weights come from. Names are without `.weight`: `model.layers.0.self_attn.q_proj`.
pub(crate) trait WeightSource {
    type Error;

    /// [rows, features].
    fn embedding(&mut self, name: &str, shape: [usize; 2]) -> Result<Param<Tensor<2>>, Self::Error>;

    /// `[features]`.
    fn norm(&mut self, name: &str, features: usize) -> Result<Param<Tensor<1>>, Self::Error>;

    /// [K, N].
    fn projection(&mut self, name: &str, dims: [usize; 2], bias: bool) -> Result<Projection, Self::Error>;
}

/// A module of the model that holds weights of its own.
pub(crate) enum Part<'a> {
    Embedding(&'a Embedding),
    Norm(&'a RmsNorm),
    Projection(&'a Projection),
}

impl LlamaModel {
    /// Builds a model for `max_len` positions.
    pub(crate) fn assemble<S: WeightSource>(
        config: &LlamaConfig,
        max_len: usize,
        device: &Device,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let epsilon = config.rms_norm_eps;
        let embed_tokens = Embedding { weight: source.embedding("model.embed_tokens", [config.vocab_size, hidden])? };
        let mut layers = Vec::new();
        for index in 0..config.num_hidden_layers {
            let name = |part: &str| format!("model.layers.{index}.{part}");
            let bias = config.attention_bias;
            let (query, key_value) = (config.query_size(), config.key_value_size());
            let self_attn = Attention {
                q_proj: source.projection(&name("self_attn.q_proj"), [hidden, query], bias)?,
                k_proj: source.projection(&name("self_attn.k_proj"), [hidden, key_value], bias)?,
                v_proj: source.projection(&name("self_attn.v_proj"), [hidden, key_value], bias)?,
                o_proj: source.projection(&name("self_attn.o_proj"), [query, hidden], bias)?,
                heads: config.num_attention_heads,
                kv_heads: config.num_key_value_heads,
                head_dim: config.head_dim,
            };
            let bias = config.mlp_bias;
            let mlp = Mlp {
                gate_proj: source.projection(&name("mlp.gate_proj"), [hidden, intermediate], bias)?,
                up_proj: source.projection(&name("mlp.up_proj"), [hidden, intermediate], bias)?,
                down_proj: source.projection(&name("mlp.down_proj"), [intermediate, hidden], bias)?,
            };
            layers.push(Layer {
                input_layernorm: RmsNorm { weight: source.norm(&name("input_layernorm"), hidden)?, epsilon },
                self_attn,
                post_attention_layernorm: RmsNorm { weight: source.norm(&name("post_attention_layernorm"), hidden)?, epsilon },
                mlp,
            });
        }
        let norm = RmsNorm { weight: source.norm("model.norm", hidden)?, epsilon };
        let lm_head = match config.tie_word_embeddings {
            true => None,
            false => Some(source.projection("lm_head", [hidden, config.vocab_size], false)?),
        };
        Ok(Self { embed_tokens, layers, norm, lm_head, rope: Rope::new(config, max_len, device), config: config.clone() })
    }

    /// Every projection, the head included, under its name in a checkpoint.
    pub fn projections(&self) -> impl Iterator<Item = (String, &Projection)> {
        self.parts().into_iter().filter_map(|(name, part)| match part {
            Part::Projection(projection) => Some((name, projection)),
            Part::Embedding(_) | Part::Norm(_) => None,
        })
    }

    /// Every module with weights, under its name in a checkpoint.
    pub(crate) fn parts(&self) -> Vec<(String, Part<'_>)> {
        let mut parts = vec![("model.embed_tokens".to_string(), Part::Embedding(&self.embed_tokens))];
        for (index, layer) in self.layers.iter().enumerate() {
            let (attention, mlp) = (&layer.self_attn, &layer.mlp);
            let of_layer = [
                ("input_layernorm", Part::Norm(&layer.input_layernorm)),
                ("self_attn.q_proj", Part::Projection(&attention.q_proj)),
                ("self_attn.k_proj", Part::Projection(&attention.k_proj)),
                ("self_attn.v_proj", Part::Projection(&attention.v_proj)),
                ("self_attn.o_proj", Part::Projection(&attention.o_proj)),
                ("post_attention_layernorm", Part::Norm(&layer.post_attention_layernorm)),
                ("mlp.gate_proj", Part::Projection(&mlp.gate_proj)),
                ("mlp.up_proj", Part::Projection(&mlp.up_proj)),
                ("mlp.down_proj", Part::Projection(&mlp.down_proj)),
            ];
            parts.extend(of_layer.map(|(name, part)| (format!("model.layers.{index}.{name}"), part)));
        }
        parts.push(("model.norm".to_string(), Part::Norm(&self.norm)));
        parts.extend(self.lm_head.as_ref().map(|head| ("lm_head".to_string(), Part::Projection(head))));
        parts
    }
}

/// Random weights, as Hugging Face initialises a Llama: normal with a standard deviation of 0.02, biases 0, norms 1.
pub(crate) struct RandomWeights<'a> {
    pub(crate) device: &'a Device,
}

impl RandomWeights<'_> {
    const MATRIX: Initializer = Initializer::Normal { mean: 0.0, std: 0.02 };
}

impl WeightSource for RandomWeights<'_> {
    type Error = Infallible;

    fn embedding(&mut self, _: &str, shape: [usize; 2]) -> Result<Param<Tensor<2>>, Infallible> {
        Ok(Self::MATRIX.init(shape, self.device))
    }

    fn norm(&mut self, _: &str, features: usize) -> Result<Param<Tensor<1>>, Infallible> {
        Ok(Initializer::Ones.init([features], self.device))
    }

    fn projection(&mut self, _: &str, dims: [usize; 2], bias: bool) -> Result<Projection, Infallible> {
        let bias = bias.then(|| Initializer::Zeros.init([dims[1]], self.device));
        Ok(Projection::Dense(Linear { weight: Self::MATRIX.init(dims, self.device), bias }))
    }
}

/// A parameter of a model that was loaded from a file.
pub(crate) fn loaded<const D: usize>(tensor: Tensor<D>) -> Param<Tensor<D>> {
    Param::initialized(ParamId::new(), tensor)
}
