//! The form that an answer must have: a grammar, or a call of a tool.

use openai_protocol::common::Function;
use serde_json::{Value, json};

/// The form of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Structure {
    /// JSON that a schema allows.
    JsonSchema(Value),
    /// Text that a regular expression matches.
    Regex(String),
}

impl Structure {
    /// Any object of JSON.
    pub fn json_object() -> Self {
        Self::JsonSchema(json!({ "type": "object" }))
    }
}

/// The tools that a model may call.
#[derive(Debug, Clone)]
pub(crate) struct ToolUse {
    /// All tools in the form of templates.
    pub definitions: Vec<Value>,
    /// Those that may be called.
    pub callable: Vec<Function>,
    /// True if one of them must be called.
    pub forced: bool,
    /// True if several may be called.
    pub several: bool,
}
