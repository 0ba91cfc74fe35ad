//! The errors of the quantisers.

use marlin_format::FormatError;

/// A layer that cannot be quantised.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// The weight or its spec does not hold together.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Activations that are no whole rows.
    #[error("{found} activations are not rows of K = {k}; pass whole rows")]
    Rows {
        /// Input features.
        k: usize,
        /// The number of values found.
        found: usize,
    },
    /// An activation that is no number.
    #[error(
        "activation {feature} of row {row} is {value}; the model or its input overflows before this layer"
    )]
    NonFiniteActivation {
        /// The row, of all that were added.
        row: usize,
        /// The input feature.
        feature: usize,
        /// The value.
        value: f32,
    },
    /// Activations that have no sum of squares.
    #[error(
        "activations in batch {batch} are no numbers, or their squares overflow; the model or its input overflows before this layer"
    )]
    NonFiniteBatch {
        /// The batch, of all that were added.
        batch: usize,
    },
    /// Activations that the device did not return.
    #[error("the second moments of the layer's inputs cannot be read from the device: {reason}")]
    Read {
        /// The cause.
        reason: String,
    },
    /// A weight that does not have K * N values.
    #[error("a weight of K = {k} by N = {n} has {found} values; it must have {}", k * n)]
    Shape {
        /// Input features of the Hessian.
        k: usize,
        /// Output features.
        n: usize,
        /// The number of values found.
        found: usize,
    },
    /// A Hessian that is not positive definite whatever is added to its diagonal.
    #[error(
        "the Hessian of K = {k} has no factor with {damping:e} of its mean diagonal added; it has values that are no numbers, or overflow"
    )]
    NoFactor {
        /// Input features.
        k: usize,
        /// The largest damping that was tried.
        damping: f64,
    },
}
