//! Conversations as the chat template of gpt-oss reads them.

use serde_json::{Value, json};

use crate::structure::NamedSchema;

/// A conversation in the form that the template of gpt-oss reads, which differs from that of other
/// templates:
///
/// - Only the first message may be one of the system. The texts of all are joined there.
/// - A message has one call, and its result follows. Further calls are messages of their own.
/// - Reasoning is in the field `thinking`. A message with a call has either that or content, and
///   both are reasoning; they are joined.
/// - Every tool has a description, which may be empty.
///
/// The template has no variable for the schema of the answer. The format has it at the end of the
/// instructions, which are the text of the system.
#[derive(Debug)]
pub(crate) struct Adapted {
    pub messages: Vec<Value>,
    pub tools: Vec<Value>,
}

impl Adapted {
    /// Adapts messages and tools in the form of other templates, for an answer that follows
    /// `schema`.
    pub fn new(messages: Vec<Value>, mut tools: Vec<Value>, schema: Option<&NamedSchema>) -> Self {
        for tool in &mut tools {
            if let Some(function) = tool["function"].as_object_mut()
                && function.get("description").is_none_or(Value::is_null)
            {
                function.insert("description".into(), "".into());
            }
        }
        let mut system = Vec::new();
        let mut adapted = Vec::with_capacity(messages.len());
        let mut messages = messages.into_iter().peekable();
        while let Some(mut message) = messages.next() {
            match message["role"].as_str() {
                Some("system") => system.push(text(&message["content"]).to_string()),
                Some("assistant") => {
                    think(&mut message);
                    let calls = match message["tool_calls"].take() {
                        Value::Array(calls) => calls,
                        _ => Vec::new(),
                    };
                    let mut results = Vec::new();
                    if !calls.is_empty() {
                        let is_result = |next: &Value| next["role"] == "tool";
                        results.extend(std::iter::from_fn(|| messages.next_if(is_result)));
                    }
                    add(&mut adapted, message, calls, results);
                }
                _ => adapted.push(message),
            }
        }
        system.extend(schema.map(response_formats));
        if !system.is_empty() {
            let content = system.join("\n\n");
            adapted.insert(0, json!({ "role": "system", "content": content }));
        }
        Self {
            messages: adapted,
            tools,
        }
    }
}

/// Returns the section of the instructions that tells of the schema of the answer.
fn response_formats(schema: &NamedSchema) -> String {
    let NamedSchema {
        name,
        description,
        text,
    } = schema;
    let description: String = (description.iter().flat_map(|text| text.lines()))
        .map(|line| format!("// {line}\n"))
        .collect();
    format!("# Response Formats\n\n## {name}\n\n{description}{text}")
}

/// Puts the reasoning of a message where the template reads it.
fn think(message: &mut Value) {
    let Some(fields) = message.as_object_mut() else {
        return;
    };
    let mut thinking = match fields.remove("reasoning_content") {
        Some(Value::String(reasoning)) => reasoning,
        _ => String::new(),
    };
    let has_calls = fields.contains_key("tool_calls");
    if let Some(content) = fields.get_mut("content").filter(|_| has_calls) {
        let content = content.take();
        if !thinking.is_empty() && !text(&content).is_empty() {
            thinking += "\n\n";
        }
        thinking += text(&content);
        fields.insert("content".into(), "".into());
    }
    if !thinking.is_empty() {
        fields.insert("thinking".into(), thinking.into());
    }
}

/// Adds a message of the assistant, its calls, and their results.
fn add(adapted: &mut Vec<Value>, mut message: Value, calls: Vec<Value>, mut results: Vec<Value>) {
    if let Some(fields) = message.as_object_mut() {
        fields.remove("tool_calls");
    }
    let is_plain = calls.is_empty();
    for call in calls {
        let result = (results.iter()).position(|result| result["tool_call_id"] == call["id"]);
        let next = json!({ "role": "assistant", "content": "" });
        let mut own = std::mem::replace(&mut message, next);
        own["tool_calls"] = json!([call]);
        adapted.push(own);
        adapted.extend(result.map(|index| results.remove(index)));
    }
    if is_plain {
        adapted.push(message);
    }
    adapted.append(&mut results);
}

fn text(content: &Value) -> &str {
    content.as_str().unwrap_or_default()
}
