use burn::tensor::DType;
use marlin_format::FormatError;

/// What can go wrong between a float weight and a quantised layer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The format does not fit the weight.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The format does not fit the weight of a named layer.
    #[error("{path}: {source}")]
    Layer {
        /// Path of the parameter in the model.
        path: String,
        /// What is wrong.
        source: FormatError,
    },
    /// A bias has another length than the weight has output features.
    #[error("the bias has {found} values; the weight has {expected} output features")]
    BiasLength {
        /// Output features of the weight.
        expected: usize,
        /// Length of the bias.
        found: usize,
    },
    /// A tensor of the quantised weight could not be read back.
    #[error("{tensor} of a quantised weight cannot be read from the device: {reason}")]
    Read {
        /// The tensor: words, scales, zero points or row permutation.
        tensor: &'static str,
        /// What the device said.
        reason: String,
    },
    /// The device did not finish a step of decode.
    #[error("a step of decode failed on the device: {reason}")]
    Step {
        /// What the device said.
        reason: String,
    },
    /// A tensor holds another dtype than a quantised weight has, after loading a record that does not belong to it.
    #[error("{tensor} of a quantised weight has dtype {found:?}; expected {expected}")]
    Dtype {
        /// The tensor: words, scales, zero points or row permutation.
        tensor: &'static str,
        /// What was expected.
        expected: &'static str,
        /// What was found.
        found: DType,
    },
    /// A pattern on parameter paths is no regular expression.
    #[error("`{pattern}` is not a regular expression: {source}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        source: Box<regex::Error>,
    },
    /// The fusion provider came too late.
    #[error("the fusion provider must be installed before the first tensor operation of the program: {reason}")]
    Install {
        /// What Burn said.
        reason: String,
    },
}
