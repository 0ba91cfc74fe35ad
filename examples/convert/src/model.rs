//! A transformer of Burn's own layers, without any code for 4-bit weights.

use burn::module::Module;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

/// The number of features of an attention head.
pub const HEAD_FEATURES: usize = 64;
/// The number of output features of the model.
pub const CLASSES: usize = 256;

/// An encoder, and a classifier for each of its output rows.
#[derive(Module, Debug)]
pub struct Model {
    encoder: TransformerEncoder,
    classifier: Linear,
}

impl Model {
    /// Creates a model with random weights. `hidden` is a multiple of [`HEAD_FEATURES`].
    pub fn new(hidden: usize, layers: usize, device: &Device) -> Self {
        let encoder =
            TransformerEncoderConfig::new(hidden, 4 * hidden, hidden / HEAD_FEATURES, layers);
        Self {
            encoder: encoder.with_dropout(0.0).init(device),
            classifier: LinearConfig::new(hidden, CLASSES).init(device),
        }
    }

    /// Returns the output [batch, rows, CLASSES] for an input [batch, rows, hidden].
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.classifier
            .forward(self.encoder.forward(TransformerEncoderInput::new(x)))
    }
}
