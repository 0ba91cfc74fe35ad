//! The layers that an entry of a config names.

use regex::Regex;

use crate::checkpoint::ConfigError;

/// What an entry begins with that is a pattern, not a name.
const PREFIX: &str = "re:";

/// Layers: a name, or `re:` and a regular expression that matches from the start of the name.
#[derive(Debug, Clone)]
pub struct LayerPattern {
    entry: String,
    regex: Option<Regex>,
}

impl LayerPattern {
    /// Compiles an entry.
    ///
    /// # Errors
    /// [`ConfigError::Pattern`] for an expression that is none, or that looks around.
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

    /// The entry.
    pub fn entry(&self) -> &str {
        &self.entry
    }

    /// Returns true if the layer `name` is one of them.
    pub fn matches(&self, name: &str) -> bool {
        match &self.regex {
            Some(regex) => regex.is_match(name),
            None => self.entry == name,
        }
    }
}
