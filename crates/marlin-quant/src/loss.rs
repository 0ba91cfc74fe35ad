//! The report of a quantiser for one layer.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Quantized;

/// The report of a quantiser for one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerLoss {
    /// The name of the layer.
    pub layer: String,
    /// The number of calibration tokens of the layer.
    pub tokens: usize,
    /// The squared error that remains in all outputs of a token, averaged over tokens; `None` if
    /// the quantiser does not compute the error.
    pub loss: Option<f64>,
    /// The damping: the part of the mean of the Hessian's diagonal that was added to the diagonal;
    /// `None` if no Hessian was used.
    pub damping: Option<f64>,
    /// The number of input features that were zero in every token.
    pub dead: usize,
    /// True if the layer was rounded because it had too few calibration tokens.
    pub fell_back: bool,
}

impl LayerLoss {
    /// Creates the report of a layer whose output features are the columns `columns` of the
    /// quantised weight `of`.
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
