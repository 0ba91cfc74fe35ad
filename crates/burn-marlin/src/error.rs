use crate::convert::SkipReason;
use burn::tensor::DType;
use marlin_format::{FormatError, QuantSpec};
use marlin_kernels::KernelError;
use std::fmt;

/// A model that could not be converted, and the cause.
///
/// The `?` operator converts this error to its [`Error`] and drops the model.
#[derive(Debug)]
pub struct ConvertError<M, E = Error> {
    /// The model.
    ///
    /// The model is unchanged if the error occurred before the first layer was converted. After a
    /// failure of the device or [`Error::WeightShape`], the layers before the failed layer are
    /// converted. After [`Error::Strict`] from [`unloaded`](crate::WeightQuantizer::unloaded), the
    /// model is converted.
    pub model: M,
    /// The cause.
    pub error: E,
}

impl<M, E: fmt::Display> fmt::Display for ConvertError<M, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<M: fmt::Debug, E: std::error::Error> std::error::Error for ConvertError<M, E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<M> From<ConvertError<M>> for Error {
    fn from(refused: ConvertError<M>) -> Self {
        refused.error
    }
}

/// An error in converting a model, or in creating or reading a quantised weight.
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
        /// The cause.
        source: FormatError,
    },
    /// The shape of a weight that is given for a layer differs from the layer's shape.
    #[error("{path}: a weight of {found:?} is given for a layer of [K, N] = {expected:?}")]
    WeightShape {
        /// Path of the parameter in the model.
        path: String,
        /// K and N of the layer.
        expected: [usize; 2],
        /// K and N of the weight.
        found: [usize; 2],
    },
    /// The length of a bias differs from the number of output features of the weight.
    #[error("the bias has {found} values; the weight has {expected} output features")]
    BiasLength {
        /// The number of output features of the weight.
        expected: usize,
        /// The length of the bias.
        found: usize,
    },
    /// A layer of experts has none.
    #[error("a mixture has at least one expert, and no weights of experts were given")]
    NoExperts,
    /// The matrices of experts differ in their shape or format, and one kernel multiplies by all of
    /// them.
    #[error(
        "expert {expert} has a weight {found}, and expert 0 {expected}: the experts of a layer must have one shape and format"
    )]
    ExpertFormats {
        /// The number of the expert.
        expert: usize,
        /// The shape and format of the first expert's matrix.
        expected: String,
        /// The shape and format of this expert's matrix.
        found: String,
    },
    /// The weights, biases and router of a mixture do not fit together.
    #[error("{what} of a mixture is {found}, expected {expected}")]
    ExpertShapes {
        /// The operand.
        what: &'static str,
        /// The shape that fits the others.
        expected: String,
        /// The shape found.
        found: String,
    },
    /// A model has no stacked weights of experts at a path.
    #[error(
        "the model has no float parameter [experts, K, N] at `{path}`; it has {}",
        listed(found)
    )]
    NoStack {
        /// The path that was asked for.
        path: String,
        /// The paths of the model's float parameters of three dimensions.
        found: Vec<String>,
    },
    /// The router of a mixture chooses more experts than there are, or than the kernels support.
    #[error(transparent)]
    Router(KernelError),
    /// A correction of the scores of a router whose scores are a softmax.
    #[error("only a router with the scores of a sigmoid has a correction")]
    Correction,
    /// A tensor of a weight could not be read from the device.
    #[error("{tensor} of a quantised weight cannot be read from the device: {reason}")]
    Read {
        /// The tensor: qweight, scales, zero points or row permutation.
        tensor: &'static str,
        /// The error of the device.
        reason: String,
    },
    /// A tensor of a quantised weight has the wrong dtype, after a record that does not belong to
    /// the weight was loaded.
    #[error("{tensor} of a quantised weight has dtype {found:?}; expected {expected}")]
    Dtype {
        /// The tensor: qweight, scales, zero points or row permutation.
        tensor: &'static str,
        /// The accepted dtype.
        expected: &'static str,
        /// The dtype of the tensor.
        found: DType,
    },
    /// A pattern for parameter paths is not a valid regular expression.
    #[error("`{pattern}` is not a regular expression: {source}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The cause.
        source: Box<regex::Error>,
    },
    /// A strict conversion would have skipped layers, or has patterns that match nothing.
    #[error("a strict conversion {}: exclude these layers, or mend the patterns", list_strict(.skipped, .unmatched))]
    Strict {
        /// Path of each layer that would have been skipped, and the reason.
        skipped: Vec<(String, SkipReason)>,
        /// Patterns that match no linear layer.
        unmatched: Vec<String>,
    },
    /// The linear layer is already converted to another spec.
    #[error(
        "the layer's weight is already {found}; rounding it again to {asked} would lose more: take it as it is, or start from the float layer"
    )]
    Converted {
        /// The weight's spec.
        found: QuantSpec,
        /// The requested spec.
        asked: QuantSpec,
    },
    /// A scheme of Burn's that no spec describes.
    #[error("the quantisation scheme has {found}; weights here have {expected}")]
    Scheme {
        /// The part of the scheme.
        found: String,
        /// What is supported in its place.
        expected: &'static str,
    },
    /// The fusion provider was installed too late.
    #[error(
        "the fusion provider must be installed before the first tensor operation of the program: {reason}"
    )]
    Install {
        /// Burn's error.
        reason: String,
    },
}

impl Error {
    /// Adds the path of the layer to a format error.
    pub(crate) fn in_layer(self, path: &str) -> Self {
        match self {
            Self::Format(source) => Self::Layer {
                path: path.to_owned(),
                source,
            },
            other => other,
        }
    }
}

/// Returns a list of paths, or that there are none.
fn listed(paths: &[String]) -> String {
    if paths.is_empty() {
        "no parameter of three dimensions".into()
    } else {
        paths.join(", ")
    }
}

fn list_strict(skipped: &[(String, SkipReason)], unmatched: &[String]) -> String {
    let mut parts = Vec::new();
    if !skipped.is_empty() {
        let layers: Vec<String> = skipped
            .iter()
            .map(|(path, reason)| format!("{path} ({reason})"))
            .collect();
        parts.push(format!("would leave {}", layers.join(", ")));
    }
    if !unmatched.is_empty() {
        let patterns: Vec<String> = unmatched
            .iter()
            .map(|pattern| format!("`{pattern}`"))
            .collect();
        parts.push(format!(
            "has patterns that match no linear layer, {}",
            patterns.join(", ")
        ));
    }
    parts.join(" and ")
}
