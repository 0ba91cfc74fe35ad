//! Grammars of answers that call a tool.

use std::fmt::Write;

use serde_json::{Value, json};
use thiserror::Error;

use super::{ToolFormat, xml_grammar};

/// A tool that a model may call.
#[derive(Debug, Clone, Copy)]
pub struct ToolSchema<'a> {
    /// The name of the tool.
    pub name: &'a str,
    /// The JSON schema of its arguments; `None` if it takes none.
    pub parameters: Option<&'a Value>,
}

/// A tool for which there is no grammar.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ToolGrammarError {
    /// No tool can be called.
    #[error("`tool_choice` asks for a call, but there is no tool: list it in `tools`")]
    NoTools,
    /// The name of a tool cannot be written in the format.
    #[error(
        "the name of the tool {name:?} must have 1 to 64 letters, digits, underscores, dots or dashes"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// The name of a parameter that a call must have cannot be written in the format.
    #[error(
        "the parameter {name:?} of the tool `{tool}` cannot be written as XML, which the model calls tools with: its name must have 1 to 256 bytes, and no control characters and angle brackets"
    )]
    Parameter {
        /// The name of the tool.
        tool: String,
        /// The name of the parameter.
        name: String,
    },
    /// The arguments of a tool are not an object.
    #[error(
        "the parameters of the tool `{name}` must be a JSON schema of `type` `object`, but are {found}"
    )]
    Parameters {
        /// The name of the tool.
        name: String,
        /// What was found.
        found: String,
    },
}

impl ToolFormat {
    /// Returns the grammar, in the Lark syntax of `llguidance`, of an answer that calls one of
    /// `tools` and has nothing else. With `several`, more calls may follow, except in the format of
    /// Llama 3, whose models are trained to call one tool at a time.
    ///
    /// `token_id` is the token of a [marker](Self::markers) in the tokenizer's vocabulary, `None`
    /// if there is none, and the marker is then written as text. If there is a token `[ARGS]`, the
    /// calls of Mistral are written with it.
    ///
    /// # Errors
    /// See [`ToolGrammarError`].
    pub fn grammar(
        self,
        tools: &[ToolSchema<'_>],
        several: bool,
        token_id: impl Fn(&str) -> Option<u32>,
    ) -> Result<String, ToolGrammarError> {
        if tools.is_empty() {
            return Err(ToolGrammarError::NoTools);
        }
        let marker = |text: &str| marker(text, &token_id);
        let is_named = self == Self::Mistral && token_id("[ARGS]").is_some();
        let open = marker(self.markers()[0]);
        let start = match self {
            Self::Hermes => {
                let close = marker("</tool_call>");
                let call = format!(
                    "start: call{}\n",
                    if several { r#" ("\n" call)*"# } else { "" }
                );
                format!("{call}call: {open} \"\\n\" object \"\\n\" {close}\n")
            }
            Self::Llama3Json => "start: object\n".to_string(),
            Self::Mistral if is_named => {
                let repeated = if several { "+" } else { "" };
                format!("start: call{repeated}\ncall: {open} object\n")
            }
            Self::Mistral => {
                let more = if several { r#" (", " object)*"# } else { "" };
                format!("start: {open} \"[\" object{more} \"]\"\n")
            }
            Self::Qwen3Coder | Self::SeedOss => {
                return xml_grammar::grammar(self, tools, several, &token_id);
            }
        };
        let mut grammar = start;
        let mut objects = Vec::new();
        let arguments = match self {
            Self::Llama3Json => "parameters",
            _ => "arguments",
        };
        for (index, tool) in tools.iter().enumerate() {
            let name = tool.checked_name()?;
            let schema = tool.schema()?;
            objects.push(if is_named {
                format!("{} {} arguments_{index}", literal(name), marker("[ARGS]"))
            } else {
                let before = format!(r#"{{"name": "{name}", "{arguments}": "#);
                format!(r#"{} arguments_{index} "}}""#, literal(&before))
            });
            // Each schema is a document of its own, in which `$ref` is resolved.
            let _ = writeln!(grammar, "arguments_{index}: %json {schema}");
        }
        let _ = writeln!(grammar, "object: {}", objects.join(" | "));
        Ok(grammar)
    }
}

impl ToolSchema<'_> {
    /// Returns the name, which needs no escapes in JSON.
    pub(crate) fn checked_name(&self) -> Result<&str, ToolGrammarError> {
        let of_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        let is_name = (1..=64).contains(&self.name.len()) && self.name.chars().all(of_name);
        is_name
            .then_some(self.name)
            .ok_or_else(|| ToolGrammarError::Name {
                name: self.name.into(),
            })
    }

    /// Returns the schema of the arguments, which are an object.
    pub(crate) fn schema(&self) -> Result<Value, ToolGrammarError> {
        let wrong = |found: String| ToolGrammarError::Parameters {
            name: self.name.into(),
            found,
        };
        match self.parameters {
            None => Ok(json!({ "type": "object", "additionalProperties": false })),
            Some(Value::Object(schema)) => match schema.get("type") {
                None => {
                    let mut schema = schema.clone();
                    schema.insert("type".into(), "object".into());
                    Ok(Value::Object(schema))
                }
                Some(Value::String(kind)) if kind == "object" => Ok(schema.clone().into()),
                Some(other) => Err(wrong(format!("of `type` {other}"))),
            },
            Some(other) => Err(wrong(match other {
                Value::Array(_) => "a list".into(),
                other => other.to_string().chars().take(40).collect(),
            })),
        }
    }
}

/// Returns a marker in Lark: its token, or its text if the vocabulary has no token for it.
pub(crate) fn marker(text: &str, token_id: impl Fn(&str) -> Option<u32>) -> String {
    match token_id(text) {
        Some(id) => format!("<[{id}]>"),
        None => literal(text),
    }
}

/// Returns a text as a literal of Lark.
pub(crate) fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
