//! Patterns that select layers by name, in the form of config entries.

use regex::Regex;

use crate::checkpoint::ConfigError;

/// The prefix of an entry that is a pattern, not a name.
const PREFIX: &str = "re:";

/// A selection of layers: a name, or `re:` and a regular expression that matches from the start of
/// the name.
#[derive(Debug, Clone)]
pub struct LayerPattern {
    entry: String,
    regex: Option<Regex>,
}

impl LayerPattern {
    /// Creates a pattern from a config entry.
    ///
    /// # Errors
    /// [`ConfigError::Pattern`] for an invalid regular expression, or one with look-around.
    pub fn new(entry: impl Into<String>) -> Result<Self, ConfigError> {
        let entry = entry.into();
        let compile = |pattern: &str| {
            let invalid = |source| ConfigError::Pattern {
                pattern: pattern.into(),
                source: Box::new(source),
            };
            Regex::new(&format!("^(?:{pattern})")).map_err(invalid)
        };
        let regex = entry.strip_prefix(PREFIX).map(compile).transpose()?;
        Ok(Self { entry, regex })
    }

    /// Returns the config entry.
    pub fn entry(&self) -> &str {
        &self.entry
    }

    /// Returns true if the pattern selects the layer `name`.
    pub fn matches(&self, name: &str) -> bool {
        match &self.regex {
            Some(regex) => regex.is_match(name),
            None => self.entry == name,
        }
    }
}
