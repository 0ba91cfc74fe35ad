//! What a quantiser says of a layer.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Quantized;

/// What a quantiser says of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerLoss {
    /// Its name.
    pub layer: String,
    /// Tokens that it saw.
    pub tokens: usize,
    /// The squared error that is left of a token's outputs, all together, where the quantiser knows
    /// it.
    pub loss: Option<f64>,
    /// The part of the mean of the Hessian's diagonal that was added to it.
    pub damping: Option<f64>,
    /// Input features that were zero in every token.
    pub dead: usize,
    /// True if it saw too few tokens, and was rounded.
    pub fell_back: bool,
}

impl LayerLoss {
    /// Of the layer that has the output features `columns` of a weight.
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
