//! Access to the fields of JSON objects, with the paths of the fields for errors.
//!
//! The order of an object's entries matters, because the first pattern of a config that matches
//! takes effect. `serde_json` keeps the file's order with its feature `preserve_order`. If two
//! entries have the same key, `serde_json` keeps the value of the later one, as Python does.

use serde_json::{Map, Value};

use crate::checkpoint::ConfigError;
use crate::text::excerpt;

/// Returns a value as JSON, cut to a length that fits in a message.
fn shown(value: &Value) -> String {
    excerpt(&value.to_string())
}

/// The fields of an object. Null fields count as absent. Absent fields are looked up in the
/// overridden fields, if there are any.
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
    path: String,
    overridden: Option<&'a Fields<'a>>,
}

impl<'a> Fields<'a> {
    /// Creates the fields of the value at `path`, which is empty for the config itself.
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

    /// Returns the fields with `overridden` as the source of absent fields.
    pub fn overriding(self, overridden: &'a Fields<'a>) -> Self {
        Self {
            overridden: Some(overridden),
            ..self
        }
    }

    /// Returns all entries of the object itself, in file order.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.object.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Returns a field, or `None` if it is absent or null.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        let own = self
            .object
            .get(field)
            .filter(|value| **value != Value::Null);
        own.or_else(|| self.overridden.and_then(|fields| fields.get(field)))
    }

    /// Returns the first present field among several names, with its name.
    pub fn first<'n>(&self, names: &[&'n str]) -> Option<(&'n str, &'a Value)> {
        names.iter().find_map(|&name| Some((name, self.get(name)?)))
    }

    /// Returns the path of a field, which may be absent.
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

    /// Returns the fields of a nested object.
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

    /// Returns a list of strings. Nested lists are flattened.
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
