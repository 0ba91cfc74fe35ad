//! The options of a quantisation.

use marlin_format::{QuantSpec, Sparsity};
use marlin_quant::{GptqOptions, Quantizer, Rounding, RowOrder};

use super::{Calibration, FileFormat, Override};

/// The options of a quantisation: the layers, the method, and the file format.
#[derive(Debug, Clone, Default)]
pub struct QuantizeOptions {
    /// The format of the files.
    pub format: FileFormat,
    /// The sparsity of the weights. 2:4 prunes every layer: of every four weights of an output
    /// feature two are kept.
    pub sparsity: Sparsity,
    /// Layers that are skipped: names such as `model.layers.0.mlp.down_proj`, or `re:` and a
    /// regular expression that matches from the start of the name. Each must match a layer of the
    /// model.
    pub exclude: Vec<String>,
    /// Layers that are quantised differently from the spec, by patterns like those of `exclude`.
    /// The first pattern that matches applies. `exclude` takes precedence over all of them.
    pub overrides: Vec<(String, Override)>,
    /// The format of the output head, or `None` to leave it float. The head is rounded to nearest,
    /// whatever the method, and is never pruned. A head that is tied to the embedding becomes a
    /// weight of its own, and the embedding is unchanged.
    pub head: Option<QuantSpec>,
    /// The way in which quantised values are chosen.
    pub method: Method,
}

/// The way in which quantised values are chosen.
#[derive(Debug, Clone)]
pub enum Method {
    /// Rounding to nearest, after pruning by magnitude if the weights are to be 2:4.
    Round {
        /// True to choose, for each group, the one of 76 ranges that leaves the least squared
        /// error.
        clipping: bool,
    },
    /// AWQ (arXiv 2306.00978): inputs are scaled ([`marlin_quant::awq_scales`]), and weights
    /// rounded with the search of [`Round`](Self::Round), block after block on a device.
    Awq {
        /// The calibration samples.
        calibration: Calibration,
    },
    /// GPTQ ([`marlin_quant::gptq`]), block after block on a device. If the weights are to be 2:4,
    /// it prunes as SparseGPT does.
    Gptq {
        /// The order in which input features are rounded.
        order: RowOrder,
        /// The fraction of the mean of a Hessian's diagonal that is added to the diagonal.
        damping: f64,
        /// True to scale inputs first, as [`Awq`](Self::Awq) does.
        awq: bool,
        /// The calibration samples.
        calibration: Calibration,
    },
}

impl Default for Method {
    fn default() -> Self {
        Self::Round { clipping: false }
    }
}

impl Method {
    pub(super) fn quantizer(&self, sparsity: Sparsity) -> Box<dyn Quantizer> {
        match *self {
            Self::Round { clipping } => Box::new(Rounding { sparsity, clipping }),
            Self::Awq { .. } => Box::new(Rounding {
                sparsity,
                clipping: true,
            }),
            Self::Gptq { order, damping, .. } => Box::new(GptqOptions {
                order,
                damping,
                sparsity,
                ..GptqOptions::default()
            }),
        }
    }

    /// Returns the quantiser of the output head.
    pub(super) fn head_quantizer(&self) -> Rounding {
        Rounding {
            sparsity: Sparsity::Dense,
            clipping: !matches!(self, Self::Round { clipping: false }),
        }
    }

    /// Returns the calibration, if the method uses one.
    pub(super) fn calibration(&self) -> Option<&Calibration> {
        match self {
            Self::Round { .. } => None,
            Self::Awq { calibration } | Self::Gptq { calibration, .. } => Some(calibration),
        }
    }

    /// Returns true if inputs are scaled.
    pub(super) fn awq(&self) -> bool {
        matches!(self, Self::Awq { .. } | Self::Gptq { awq: true, .. })
    }

    /// Returns true if weights have a row permutation.
    pub(super) fn act_order(&self) -> bool {
        matches!(
            self,
            Self::Gptq {
                order: RowOrder::ActOrder,
                ..
            }
        )
    }
}
