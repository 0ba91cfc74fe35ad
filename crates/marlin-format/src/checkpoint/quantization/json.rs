//! JSON objects as the file orders them, and their fields with the path to them for errors.
//!
//! `serde_json`'s own objects are sorted by key; here the order counts, because of a config's patterns the first that matches does.

use std::collections::HashMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Serialize, Serializer};
use serde_json::Number;

use crate::checkpoint::ConfigError;
use crate::text::excerpt;

/// A JSON value.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Number(Number),
    String(String),
    Array(Vec<Json>),
    Object(Object),
}

/// A JSON object: its entries in the order of the file. Of two with one key, the later counts, as in Python.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Object {
    entries: Vec<(String, Json)>,
    /// The position of the entry that counts, by key.
    index: HashMap<String, usize>,
}

impl Json {
    /// An integer, or `None` for anything else.
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Self::Number(number) => number.as_i64(),
            _ => None,
        }
    }
}

impl From<i64> for Json {
    fn from(number: i64) -> Self {
        Self::Number(number.into())
    }
}

impl From<&str> for Json {
    fn from(text: &str) -> Self {
        Self::String(text.into())
    }
}

impl Object {
    fn get(&self, key: &str) -> Option<&Json> {
        self.index.get(key).map(|&entry| &self.entries[entry].1)
    }
}

impl Serialize for Object {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.entries.iter().map(|(key, value)| (key, value)))
    }
}

impl fmt::Display for Json {
    /// As JSON, cut to a length that fits a message.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&excerpt(&serde_json::to_string(self).map_err(|_| fmt::Error)?))
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyValue;

        impl<'de> Visitor<'de> for AnyValue {
            type Value = Json;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON value")
            }

            fn visit_unit<E>(self) -> Result<Json, E> {
                Ok(Json::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
                Ok(Json::Bool(value))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
                Ok(Json::Number(value.into()))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
                Ok(Json::Number(value.into()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
                Ok(Number::from_f64(value).map_or(Json::Null, Json::Number))
            }

            fn visit_str<E>(self, value: &str) -> Result<Json, E> {
                Ok(Json::String(value.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Json, A::Error> {
                let mut array = Vec::new();
                while let Some(value) = values.next_element()? {
                    array.push(value);
                }
                Ok(Json::Array(array))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
                let mut object = Object::default();
                while let Some((key, value)) = map.next_entry::<String, Json>()? {
                    object.index.insert(key.clone(), object.entries.len());
                    object.entries.push((key, value));
                }
                Ok(Json::Object(object))
            }
        }

        deserializer.deserialize_any(AnyValue)
    }
}

/// An object's fields. Null ones count as absent; absent ones are looked up in the fields that these override, where there are such.
pub(super) struct Fields<'a> {
    object: &'a Object,
    path: String,
    overridden: Option<&'a Fields<'a>>,
}

impl<'a> Fields<'a> {
    /// The fields of the value at `path`; the path is empty for the config itself.
    pub fn new(value: &'a Json, path: String) -> Result<Self, ConfigError> {
        match value {
            Json::Object(object) => Ok(Self { object, path, overridden: None }),
            found => {
                let field = if path.is_empty() { "quantization_config".into() } else { path };
                Err(ConfigError::Unsupported { field, expected: "an object", found: found.to_string() })
            }
        }
    }

    /// The same, with `overridden` for absent fields.
    pub fn overriding(self, overridden: &'a Fields<'a>) -> Self {
        Self { overridden: Some(overridden), ..self }
    }

    /// All entries of the object itself, in the order of the file.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Json)> {
        self.object.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// A field, or `None` if it is absent or null.
    pub fn get(&self, field: &str) -> Option<&'a Json> {
        let own = self.object.get(field).filter(|value| **value != Json::Null);
        own.or_else(|| self.overridden.and_then(|fields| fields.get(field)))
    }

    /// Of several names for one field, the first that is there.
    pub fn first<'n>(&self, names: &[&'n str]) -> Option<(&'n str, &'a Json)> {
        names.iter().find_map(|&name| Some((name, self.get(name)?)))
    }

    /// The path of a field, present or not.
    pub fn path(&self, field: &str) -> String {
        match self.overridden {
            Some(fields) if self.object.get(field).is_none_or(|value| *value == Json::Null) => fields.path(field),
            _ if self.path.is_empty() => excerpt(field),
            _ => format!("{}.{}", self.path, excerpt(field)),
        }
    }

    pub fn missing(&self, field: &str, expected: &'static str) -> ConfigError {
        ConfigError::Missing { field: self.path(field), expected }
    }

    pub fn unsupported(&self, field: &str, expected: &'static str, found: &Json) -> ConfigError {
        ConfigError::Unsupported { field: self.path(field), expected, found: found.to_string() }
    }

    pub fn boolean(&self, field: &str) -> Result<Option<bool>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Json::Bool(value)) => Ok(Some(*value)),
            Some(found) => Err(self.unsupported(field, "true or false", found)),
        }
    }

    pub fn integer(&self, field: &str) -> Result<Option<i64>, ConfigError> {
        self.get(field).map(|found| found.as_i64().ok_or_else(|| self.unsupported(field, "an integer", found))).transpose()
    }

    /// The fields of an object in this one.
    pub fn object(&self, field: &str) -> Result<Option<Fields<'a>>, ConfigError> {
        self.get(field).map(|value| Fields::new(value, self.path(field))).transpose()
    }

    pub fn text(&self, field: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Json::String(text)) => Ok(Some(text)),
            Some(found) => Err(self.unsupported(field, "a string", found)),
        }
    }

    /// A list of strings, or of lists of strings and so on, flattened.
    pub fn strings(&self, field: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        fn collect<'a>(value: &'a Json, strings: &mut Vec<&'a str>) -> bool {
            match value {
                Json::String(text) => {
                    strings.push(text);
                    true
                }
                Json::Array(values) => values.iter().all(|value| collect(value, strings)),
                _ => false,
            }
        }
        let Some(found) = self.get(field) else { return Ok(None) };
        let mut strings = Vec::new();
        match found {
            Json::Array(_) if collect(found, &mut strings) => Ok(Some(strings)),
            _ => Err(self.unsupported(field, "a list of strings", found)),
        }
    }
}
