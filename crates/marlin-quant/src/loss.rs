//! What a quantiser says of a layer.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Quantized;

/// What a quantiser says of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerLoss {
    /// The name of the layer.
    pub layer: String,
    /// The number of tokens that the layer saw.
    pub tokens: usize,
    /// The squared error that remains in all outputs of a token, if the quantiser computes it.
    pub loss: Option<f64>,
    /// The damping: the part of the mean of the Hessian's diagonal that was added to the diagonal.
    pub damping: Option<f64>,
    /// The number of input features that were zero in every token.
    pub dead: usize,
    /// True if the layer saw too few tokens, and was rounded.
    pub fell_back: bool,
}

impl LayerLoss {
    /// Creates the report of the layer that has the output features `columns` of a weight.
    pub fn new(layer: &str, tokens: usize, of: &Quantized, columns: Range<usize>) -> Self {
        Self {
            layer: layer.into(),
            tokens,
            loss: of
                .losses
                .as_ref()
                .map(|losses| losses[columns].iter().sum()),
            damping: of.damping,
            dead: of.dead,
            fell_back: of.fell_back,
        }
    }
}
