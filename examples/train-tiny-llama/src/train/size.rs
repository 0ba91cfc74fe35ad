//! A model family with one tokenizer and text, in three sizes.

use clap::ValueEnum;
use marlin_lm::{Architecture, ModelConfig};

use crate::corpus::{CONTEXT, tokenizer};

/// A size of the model family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// 1.2 million parameters, 0.5 of them the embedding.
    #[value(name = "1m")]
    Small,
    /// 5.0 million parameters, 1.0 of them the embedding: the shipped model.
    #[value(name = "5m")]
    Shipped,
    /// 21.0 million parameters, 2.1 of them the embedding.
    #[value(name = "20m")]
    Large,
}

impl Size {
    /// Returns the model's config. Every size in the config is a multiple of 128, so that every
    /// 4-bit kernel supports the layers.
    pub fn config(self) -> ModelConfig {
        let (hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads) = match self
        {
            Self::Small => (128, 3, 2, 2),
            Self::Shipped => (256, 5, 4, 2),
            Self::Large => (512, 6, 8, 4),
        };
        ModelConfig {
            architecture: Architecture::Llama,
            vocab_size: tokenizer::VOCAB_SIZE,
            hidden_size,
            intermediate_size: 3 * hidden_size,
            experts: None,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim: 64,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: None,
            partial_rotary_factor: 1.0,
            sliding_window: None,
            max_position_embeddings: CONTEXT,
            tie_word_embeddings: true,
            attention_bias: false,
            mlp_bias: false,
            bos_token_id: Some(0),
            eos_token_ids: vec![0],
            dtype: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::module::Module;
    use burn::tensor::Device;
    use marlin_lm::Model;

    #[test]
    fn every_size_suits_every_kernel_and_has_its_parameters() {
        for (size, parameters) in [
            (Size::Small, 1_164_160),
            (Size::Shipped, 4_983_552),
            (Size::Large, 20_978_176),
        ] {
            let config = size.config();
            config.validate().unwrap();
            let sizes = [
                config.vocab_size,
                config.hidden_size,
                config.intermediate_size,
                config.query_size(),
                config.key_value_size(),
            ];
            assert!(
                sizes.iter().all(|size| size % 128 == 0),
                "{size:?}: {sizes:?}"
            );
            assert_eq!(
                Model::new(&config, &Device::flex()).num_params(),
                parameters,
                "{size:?}"
            );
        }
    }
}
