//! The errors of the quantisers.

use marlin_format::FormatError;

/// The reason why a layer cannot be quantised.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// The weight or its spec is invalid.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The number of activations is not a multiple of K.
    #[error("{found} activations are not rows of K = {k}; pass whole rows")]
    Rows {
        /// The number of input features, K.
        k: usize,
        /// The number of values found.
        found: usize,
    },
    /// An activation is not finite.
    #[error(
        "activation {feature} of row {row} is {value}; the model or its input overflows before this layer"
    )]
    NonFiniteActivation {
        /// The row, counted over all rows added.
        row: usize,
        /// The input feature.
        feature: usize,
        /// The value.
        value: f32,
    },
    /// The activations of a batch have no finite sum of squares.
    #[error(
        "activations in batch {batch} are no numbers, or their squares overflow; the model or its input overflows before this layer"
    )]
    NonFiniteBatch {
        /// The batch, counted over all batches added.
        batch: usize,
    },
    /// A tensor, such as the second moments, cannot be read from the device.
    #[error("the second moments of the layer's inputs cannot be read from the device: {reason}")]
    Read {
        /// The cause.
        reason: String,
    },
    /// The weight does not have K * N values.
    #[error("a weight of K = {k} by N = {n} has {found} values; it must have {}", k * n)]
    Shape {
        /// The number of input features, K.
        k: usize,
        /// The number of output features, N.
        n: usize,
        /// The number of values found.
        found: usize,
    },
    /// The Hessian is not positive definite, even with the largest damping added to its diagonal.
    #[error(
        "the Hessian of K = {k} has no factor with {damping:e} of its mean diagonal added; it has values that are no numbers, or overflow"
    )]
    NoFactor {
        /// The number of input features, K.
        k: usize,
        /// The largest damping that was tried.
        damping: f64,
    },
}
