//! The types of the parameters of tools, which a call as XML does not tell.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::ToolSchema;

/// The most references of a schema that are followed to a type.
const MAX_REFERENCES: usize = 16;
/// The most alternatives of a schema that are read for its type.
const MAX_ALTERNATIVES: usize = 64;

/// The types of the parameters of tools, by their JSON schemas.
#[derive(Debug, Clone, Default)]
pub struct ToolTypes(Arc<HashMap<String, ParameterTypes>>);

/// The types of the parameters of one tool, by their names.
pub(crate) type ParameterTypes = BTreeMap<String, ParameterType>;

/// How the text of a parameter is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParameterType {
    /// The text is the value.
    Text,
    /// The text is the value, unless it is `null`.
    NullableText,
    /// The text is JSON.
    Json,
}

impl ToolTypes {
    /// Reads the schemas of tools.
    pub fn new<'a>(tools: impl IntoIterator<Item = ToolSchema<'a>>) -> Self {
        let tools = tools.into_iter().map(|tool| {
            let parameters = tool.properties().map(|(name, schema)| {
                let root = tool.parameters.unwrap_or(&Value::Null);
                (name.clone(), ParameterType::of_schema(schema, root))
            });
            (tool.name.to_string(), parameters.collect())
        });
        Self(Arc::new(tools.collect()))
    }

    /// Returns the parameters of a tool; `None` if there is no such tool.
    pub(crate) fn parameters(&self, tool: &str) -> Option<&ParameterTypes> {
        self.0.get(tool)
    }
}

impl<'a> ToolSchema<'a> {
    /// Returns the schemas of the parameters, by their names.
    pub(super) fn properties(self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        let properties = self.parameters.and_then(|schema| schema.get("properties"));
        properties.and_then(Value::as_object).into_iter().flatten()
    }
}

impl ParameterType {
    /// Returns the type that a schema in the document `root` asks for. The first type other than
    /// `null` decides where there are several; a schema without a type has texts.
    pub fn of_schema(schema: &Value, root: &Value) -> Self {
        let types = types(schema, root);
        let is_nullable = types.contains(&"null");
        match types.iter().find(|name| **name != "null") {
            Some(&("integer" | "number" | "boolean" | "object" | "array")) => Self::Json,
            None if is_nullable => Self::Json,
            _ if is_nullable => Self::NullableText,
            _ => Self::Text,
        }
    }
}

/// Follows the references of a schema to one that is none, or that leads nowhere.
fn resolved<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    let mut schema = schema;
    for _ in 0..MAX_REFERENCES {
        let target = schema.get("$ref").and_then(Value::as_str);
        let pointer = target.and_then(|target| target.strip_prefix('#'));
        match pointer.and_then(|pointer| root.pointer(pointer)) {
            Some(target) => schema = target,
            None => break,
        }
    }
    schema
}

/// Returns the alternatives of a schema, without references.
pub(super) fn alternatives<'a>(schema: &'a Value, root: &'a Value) -> Vec<&'a Map<String, Value>> {
    let (mut found, mut open) = (Vec::new(), vec![schema]);
    for _ in 0..MAX_ALTERNATIVES {
        let Some(Value::Object(schema)) = open.pop().map(|schema| resolved(schema, root)) else {
            if open.is_empty() {
                break;
            }
            continue;
        };
        let nested = ["anyOf", "oneOf", "allOf"]
            .iter()
            .find_map(|keyword| schema.get(*keyword)?.as_array());
        match nested.filter(|_| !schema.contains_key("type")) {
            Some(nested) => open.extend(nested.iter().rev()),
            None => found.push(schema),
        }
    }
    found
}

/// Returns the names of the types that a schema allows, in its order.
fn types<'a>(schema: &'a Value, root: &'a Value) -> Vec<&'a str> {
    let alternatives = alternatives(schema, root).into_iter();
    let types = alternatives.flat_map(|schema| {
        let of_values = |values: &'a [Value]| values.iter().map(type_of).collect();
        match schema.get("type") {
            Some(Value::String(name)) => vec![name.as_str()],
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            _ => match (schema.get("enum"), schema.get("const")) {
                (Some(Value::Array(values)), _) => of_values(values),
                (_, Some(value)) => of_values(std::slice::from_ref(value)),
                _ => Vec::new(),
            },
        }
    });
    types.collect()
}

/// Returns the name that JSON schemas have for the type of a value.
fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
