//! The fields of JSON objects, with the path to them for errors.
//!
//! The order of an object's entries counts: of a config's patterns, the first that matches does.
//! `serde_json` keeps the file's order by its feature `preserve_order`. Of two entries with one
//! key, it keeps the value of the later, as Python does.

use serde_json::{Map, Value};

use crate::checkpoint::ConfigError;
use crate::text::excerpt;

/// A value as JSON, cut to a length that fits a message.
fn shown(value: &Value) -> String {
    excerpt(&value.to_string())
}

/// An object's fields. Null ones count as absent; absent ones are looked up in the fields that
/// these override, where there are such.
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
    path: String,
    overridden: Option<&'a Fields<'a>>,
}

impl<'a> Fields<'a> {
    /// The fields of the value at `path`; the path is empty for the config itself.
    pub fn new(value: &'a Value, path: String) -> Result<Self, ConfigError> {
        match value {
            Value::Object(object) => Ok(Self {
                object,
                path,
                overridden: None,
            }),
            found => {
                let field = if path.is_empty() {
                    "quantization_config".into()
                } else {
                    path
                };
                Err(ConfigError::Unsupported {
                    field,
                    expected: "an object",
                    found: shown(found),
                })
            }
        }
    }

    /// The same, with `overridden` for absent fields.
    pub fn overriding(self, overridden: &'a Fields<'a>) -> Self {
        Self {
            overridden: Some(overridden),
            ..self
        }
    }

    /// All entries of the object itself, in the order of the file.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.object.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// A field, or `None` if it is absent or null.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        let own = self
            .object
            .get(field)
            .filter(|value| **value != Value::Null);
        own.or_else(|| self.overridden.and_then(|fields| fields.get(field)))
    }

    /// Of several names for one field, the first that is there.
    pub fn first<'n>(&self, names: &[&'n str]) -> Option<(&'n str, &'a Value)> {
        names.iter().find_map(|&name| Some((name, self.get(name)?)))
    }

    /// The path of a field, present or not.
    pub fn path(&self, field: &str) -> String {
        match self.overridden {
            Some(fields)
                if self
                    .object
                    .get(field)
                    .is_none_or(|value| *value == Value::Null) =>
            {
                fields.path(field)
            }
            _ if self.path.is_empty() => excerpt(field),
            _ => format!("{}.{}", self.path, excerpt(field)),
        }
    }

    pub fn missing(&self, field: &str, expected: &'static str) -> ConfigError {
        ConfigError::Missing {
            field: self.path(field),
            expected,
        }
    }

    pub fn unsupported(&self, field: &str, expected: &'static str, found: &Value) -> ConfigError {
        ConfigError::Unsupported {
            field: self.path(field),
            expected,
            found: shown(found),
        }
    }

    pub fn boolean(&self, field: &str) -> Result<Option<bool>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(found) => Err(self.unsupported(field, "true or false", found)),
        }
    }

    pub fn integer(&self, field: &str) -> Result<Option<i64>, ConfigError> {
        self.get(field)
            .map(|found| {
                found
                    .as_i64()
                    .ok_or_else(|| self.unsupported(field, "an integer", found))
            })
            .transpose()
    }

    /// The fields of an object in this one.
    pub fn object(&self, field: &str) -> Result<Option<Fields<'a>>, ConfigError> {
        self.get(field)
            .map(|value| Fields::new(value, self.path(field)))
            .transpose()
    }

    pub fn text(&self, field: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(found) => Err(self.unsupported(field, "a string", found)),
        }
    }

    /// A list of strings, or of lists of strings and so on, flattened.
    pub fn strings(&self, field: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        fn collect<'a>(value: &'a Value, strings: &mut Vec<&'a str>) -> bool {
            match value {
                Value::String(text) => {
                    strings.push(text);
                    true
                }
                Value::Array(values) => values.iter().all(|value| collect(value, strings)),
                _ => false,
            }
        }
        let Some(found) = self.get(field) else {
            return Ok(None);
        };
        let mut strings = Vec::new();
        match found {
            Value::Array(_) if collect(found, &mut strings) => Ok(Some(strings)),
            _ => Err(self.unsupported(field, "a list of strings", found)),
        }
    }
}
