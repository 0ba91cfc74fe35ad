//! Regular expressions of configs, which are Python's. Some use look-around, which the crate
//! `regex` does not support.

use fancy_regex::{Regex, RegexBuilder};

use crate::checkpoint::ConfigError;

/// The maximum size of a compiled expression in bytes. Names are short, and so are the patterns in
/// published configs.
const SIZE_LIMIT: usize = 1 << 20;

/// Returns true if an entry is a pattern: it has characters that no layer name has.
pub(super) fn is_pattern(entry: &str) -> bool {
    entry.contains(['*', '?', '+', '^', '$', '|', '\\', '(', '[', '{'])
}

/// A compiled regular expression.
#[derive(Debug, Clone)]
pub(super) struct Pattern {
    regex: Regex,
    /// True if a match must begin at the start of the name.
    from_start: bool,
}

impl Pattern {
    /// Creates a pattern that matches from the start of a name, as Python's `re.match` does.
    /// `field` is the path of the pattern's field in the config.
    pub fn from_start(field: String, pattern: &str) -> Result<Self, ConfigError> {
        Ok(Self {
            regex: compile(field, pattern)?,
            from_start: true,
        })
    }

    /// Creates a pattern that matches a name from its start to the end of a module in it, as
    /// transformers does: `layers.*` matches `layers.1.mlp`, and `mlp.gate` does not match
    /// `mlp.gate_proj`.
    pub fn module(field: String, pattern: &str) -> Result<Self, ConfigError> {
        Self::from_start(field, &format!(r"(?:{pattern})(?:(?<=\.)|(?=\.|$))"))
    }

    /// Creates a pattern from a shell's wildcards: `*` is any text and `?` any character. It
    /// matches the names of modules, and so all layers in them.
    pub fn wildcards(field: String, entry: &str) -> Result<Self, ConfigError> {
        let mut pattern = String::with_capacity(2 * entry.len());
        for character in entry.chars() {
            match character {
                '*' => pattern += ".*",
                '?' => pattern += ".",
                other => pattern += &fancy_regex::escape(other.encode_utf8(&mut [0; 4])),
            }
        }
        Self::from_start(field, &format!(r"(?:{pattern})(?:\.|$)"))
    }

    /// Creates a pattern that matches anywhere in a name, as Python's `re.search` does.
    pub fn anywhere(field: String, pattern: &str) -> Result<Self, ConfigError> {
        Ok(Self {
            regex: compile(field, pattern)?,
            from_start: false,
        })
    }

    /// Returns true if the pattern matches the name of a layer.
    ///
    /// # Errors
    /// [`ConfigError::Match`] if a match exceeds the limit of steps.
    pub fn matches(&self, layer: &str) -> Result<bool, ConfigError> {
        let too_long = |source| ConfigError::Match {
            pattern: self.regex.as_str().into(),
            layer: layer.into(),
            source: Box::new(source),
        };
        // `find` returns the leftmost match, which begins at the start if any match does.
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
