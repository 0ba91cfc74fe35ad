//! The tool `add` of requests.

use serde_json::{Value, json};

/// An answer that calls the tool, in the form of Hermes and Qwen.
pub const CALL: &str =
    r#"Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>"#;

/// Returns the schema of the tool's arguments.
pub fn parameters() -> Value {
    json!({
        "type": "object",
        "properties": { "a": { "type": "integer", "minimum": 0, "maximum": 9 } },
        "required": ["a"],
        "additionalProperties": false,
    })
}

/// Returns the tool as chat completions have it.
pub fn chat_tool() -> Value {
    json!({ "type": "function", "function": { "name": "add", "parameters": parameters() } })
}
