//! A BERT classifier of Burn's own layers, without any code for 4-bit weights.

use burn::module::Module;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::store::KeyRemapper;
use burn::tensor::{Device, Int, Tensor};
use serde::Deserialize;
use std::collections::BTreeMap;

/// The sizes of a BERT in its `config.json`.
#[derive(Debug, Clone, Deserialize)]
pub struct BertConfig {
    /// The number of tokens of the vocabulary.
    pub vocab_size: usize,
    /// The number of features of a token.
    pub hidden_size: usize,
    /// The number of hidden features of a feed-forward network.
    pub intermediate_size: usize,
    /// The number of layers of the encoder.
    pub num_hidden_layers: usize,
    /// The number of heads of an attention layer.
    pub num_attention_heads: usize,
    /// The number of positions of the longest text.
    pub max_position_embeddings: usize,
    /// The number of segment types.
    pub type_vocab_size: usize,
    /// The epsilon of every norm, added to the variance.
    pub layer_norm_eps: f64,
    /// The name of each class, by the number of the class.
    pub id2label: BTreeMap<String, String>,
}

impl BertConfig {
    /// Creates a model with random weights.
    pub fn init(&self, device: &Device) -> Bert {
        let (hidden, epsilon) = (self.hidden_size, self.layer_norm_eps);
        let embedding = |rows| EmbeddingConfig::new(rows, hidden).init(device);
        let encoder = TransformerEncoderConfig::new(
            hidden,
            self.intermediate_size,
            self.num_attention_heads,
            self.num_hidden_layers,
        );
        Bert {
            words: embedding(self.vocab_size),
            positions: embedding(self.max_position_embeddings),
            segments: embedding(self.type_vocab_size),
            norm: LayerNormConfig::new(hidden)
                .with_epsilon(epsilon)
                .init(device),
            encoder: encoder
                .with_layer_norm_eps(epsilon)
                .with_dropout(0.0)
                .init(device),
            pooler: LinearConfig::new(hidden, hidden).init(device),
            classifier: LinearConfig::new(hidden, self.id2label.len()).init(device),
        }
    }
}

/// A BERT with a classifier, like `BertForSequenceClassification` of transformers.
#[derive(Module, Debug)]
pub struct Bert {
    words: Embedding,
    positions: Embedding,
    segments: Embedding,
    norm: LayerNorm,
    encoder: TransformerEncoder,
    pooler: Linear,
    classifier: Linear,
}

impl Bert {
    /// Returns the last hidden state `[batch, tokens, hidden]` of token ids and segments `[batch,
    /// tokens]`.
    pub fn encode(&self, ids: Tensor<2, Int>, segments: Tensor<2, Int>) -> Tensor<3> {
        let [_, tokens] = ids.dims();
        let positions = Tensor::<1, Int>::arange(0..tokens as i64, &ids.device()).unsqueeze();
        let embedded = self.words.forward(ids)
            + self.positions.forward(positions)
            + self.segments.forward(segments);
        self.encoder
            .forward(TransformerEncoderInput::new(self.norm.forward(embedded)))
    }

    /// Returns the logits `[batch, classes]` of the last hidden state `[batch, tokens, hidden]`.
    pub fn classify(&self, hidden: Tensor<3>) -> Tensor<2> {
        let [batch, _, features] = hidden.dims();
        let first = hidden.slice([0..batch, 0..1]).reshape([batch, features]);
        self.classifier.forward(self.pooler.forward(first).tanh())
    }

    /// Returns the map from tensor names of transformers to parameter names of this model. The map
    /// is the same as for a float checkpoint.
    ///
    /// # Errors
    /// Returns no error, because all patterns are valid regular expressions.
    pub fn from_transformers() -> Result<KeyRemapper, Box<dyn std::error::Error>> {
        Ok(KeyRemapper::new()
            .add_pattern(r"^bert\.embeddings\.word_embeddings\.", "words.")?
            .add_pattern(r"^bert\.embeddings\.position_embeddings\.", "positions.")?
            .add_pattern(r"^bert\.embeddings\.token_type_embeddings\.", "segments.")?
            .add_pattern(r"^bert\.embeddings\.LayerNorm\.", "norm.")?
            .add_pattern(r"^bert\.pooler\.dense\.", "pooler.")?
            .add_pattern(r"^bert\.encoder\.layer\.(\d+)\.", "encoder.layers.$1.")?
            .add_pattern(r"\.attention\.self\.", ".mha.")?
            .add_pattern(r"\.attention\.output\.dense\.", ".mha.output.")?
            .add_pattern(r"\.attention\.output\.LayerNorm\.", ".norm_1.")?
            .add_pattern(r"\.intermediate\.dense\.", ".pwff.linear_inner.")?
            .add_pattern(r"\.output\.dense\.", ".pwff.linear_outer.")?
            .add_pattern(r"\.output\.LayerNorm\.", ".norm_2.")?)
    }

    /// Returns the map from parameter names of this model to tensor names of transformers, to
    /// export the model.
    ///
    /// # Errors
    /// Returns no error, because all patterns are valid regular expressions.
    pub fn to_transformers() -> Result<KeyRemapper, Box<dyn std::error::Error>> {
        Ok(KeyRemapper::new()
            .add_pattern(r"^words\.", "bert.embeddings.word_embeddings.")?
            .add_pattern(r"^positions\.", "bert.embeddings.position_embeddings.")?
            .add_pattern(r"^segments\.", "bert.embeddings.token_type_embeddings.")?
            .add_pattern(r"^norm\.", "bert.embeddings.LayerNorm.")?
            .add_pattern(r"^pooler\.", "bert.pooler.dense.")?
            .add_pattern(r"^encoder\.layers\.(\d+)\.", "bert.encoder.layer.$1.")?
            .add_pattern(r"\.mha\.output\.", ".attention.output.dense.")?
            .add_pattern(r"\.mha\.", ".attention.self.")?
            .add_pattern(r"\.norm_1\.", ".attention.output.LayerNorm.")?
            .add_pattern(r"\.pwff\.linear_inner\.", ".intermediate.dense.")?
            .add_pattern(r"\.pwff\.linear_outer\.", ".output.dense.")?
            .add_pattern(r"\.norm_2\.", ".output.LayerNorm.")?)
    }
}
