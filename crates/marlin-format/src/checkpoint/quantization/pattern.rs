//! Regular expressions of configs. They are Python's, and some look around, which the crate `regex`
//! does not.

use fancy_regex::{Regex, RegexBuilder};

use crate::checkpoint::ConfigError;

/// Bytes of a compiled expression: names are short, and so are the patterns that files have for
/// them.
const SIZE_LIMIT: usize = 1 << 20;

/// Returns true if an entry is a pattern, not a name: it has characters that no name has.
pub(super) fn is_pattern(entry: &str) -> bool {
    entry.contains(['*', '?', '+', '^', '$', '|', '\\', '(', '[', '{'])
}

/// A compiled expression.
#[derive(Debug, Clone)]
pub(super) struct Pattern {
    regex: Regex,
    /// True if a match must begin at the start of the name.
    from_start: bool,
}

impl Pattern {
    /// Matches from the start of a name, as Python's `re.match`. `field` is where the config has
    /// it.
    pub fn from_start(field: String, pattern: &str) -> Result<Self, ConfigError> {
        Ok(Self {
            regex: compile(field, pattern)?,
            from_start: true,
        })
    }

    /// Matches anywhere in a name, as Python's `re.search`.
    pub fn anywhere(field: String, pattern: &str) -> Result<Self, ConfigError> {
        Ok(Self {
            regex: compile(field, pattern)?,
            from_start: false,
        })
    }

    /// # Errors
    /// [`ConfigError::Match`] where trying takes too many steps.
    pub fn matches(&self, layer: &str) -> Result<bool, ConfigError> {
        let too_long = |source| ConfigError::Match {
            pattern: self.regex.as_str().into(),
            layer: layer.into(),
            source: Box::new(source),
        };
        // The leftmost match: it begins at the start if any does.
        let found = self.regex.find(layer).map_err(too_long)?;
        Ok(found.is_some_and(|found| !self.from_start || found.start() == 0))
    }
}

fn compile(field: String, pattern: &str) -> Result<Regex, ConfigError> {
    RegexBuilder::new(pattern)
        .delegate_size_limit(SIZE_LIMIT)
        .build()
        .map_err(|source| ConfigError::Regex {
            field,
            pattern: pattern.into(),
            source: Box::new(source),
        })
}
