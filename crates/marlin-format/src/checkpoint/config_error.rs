//! Errors of a config that declares how a checkpoint is quantised.

use crate::text::excerpt;

/// The reason why a `quantization_config` cannot be read by this version.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A config that is not JSON.
    #[error("the config is not valid JSON")]
    Json(#[from] serde_json::Error),
    /// A required field that is absent.
    #[error("the quantization config has no `{field}`; expected {expected}")]
    Missing {
        /// The field, including its path.
        field: String,
        /// The accepted values.
        expected: &'static str,
    },
    /// A field with a value that is not supported.
    #[error(
        "the quantization config's `{field}` is {found}; this version reads {expected}: use a checkpoint quantised so, or a float one"
    )]
    Unsupported {
        /// The field, including its path.
        field: String,
        /// The accepted values.
        expected: &'static str,
        /// The value, as JSON.
        found: String,
    },
    /// A regular expression that cannot be used.
    #[error(
        "the quantization config's `{field}` has `{}`, which is not a regular expression this version can use; correct it",
        excerpt(pattern)
    )]
    Regex {
        /// The field, including its path.
        field: String,
        /// The regular expression.
        pattern: String,
        /// The cause.
        source: Box<fancy_regex::Error>,
    },
    /// More patterns than the limit for comparisons with every layer.
    #[error(
        "the quantization config has more than {limit} patterns and other entries that every layer is compared with; name layers in full, or use fewer patterns"
    )]
    TooManyPatterns {
        /// The limit.
        limit: usize,
    },
    /// A regular expression that exceeds the limit of steps in a match.
    #[error(
        "the quantization config's pattern `{}` could not be matched with the layer `{layer}`; write it in a simpler way",
        excerpt(pattern)
    )]
    Match {
        /// The regular expression.
        pattern: String,
        /// The layer.
        layer: String,
        /// The cause.
        source: Box<fancy_regex::Error>,
    },
    /// An invalid or unsupported `re:` pattern.
    #[error(
        "layers are named by `{}`, which is not a regular expression this version can use",
        excerpt(pattern)
    )]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The cause.
        source: Box<regex::Error>,
    },
}
