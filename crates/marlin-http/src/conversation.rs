//! The tokens of a prompt for a conversation of an API.

use crate::error::ApiError;
use crate::harmony::Adapted;
use crate::structure::NamedSchema;
use marlin_text::{ChatTemplate, Tokenizer};
use openai_protocol::chat::{ChatMessage, MessageContent};
use openai_protocol::common::{ContentPart, Tool};
use serde_json::{Map, Value, json};

/// The names of the speakers for a model without a chat template.
const USER: &str = "User:";
const ASSISTANT: &str = "Assistant:";
const SYSTEM: &str = "System:";
/// The text that ends the answer of a model without a chat template.
pub(crate) const PLAIN_STOP: &str = "\nUser:";

/// A conversation in the form that chat templates read.
#[derive(Debug, Clone, Default)]
pub(crate) struct Conversation {
    /// The messages, objects with `role` and `content`.
    pub messages: Vec<Value>,
    /// The tools that the model may call, in OpenAI's form.
    pub tools: Vec<Value>,
    /// The JSON schema that the answer follows. Only the harmony format has a place for it.
    pub schema: Option<NamedSchema>,
    /// Further variables of the template, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// True if the answer continues the last message.
    pub continues: bool,
}

impl Conversation {
    /// Adds a message.
    pub fn push(&mut self, role: &str, content: impl Into<Value>) {
        self.messages
            .push(json!({ "role": role, "content": content.into() }));
    }

    /// Returns the tokens of the conversation up to where the answer begins, and the text that they
    /// stand for.
    pub fn encode(
        self,
        template: Option<&ChatTemplate>,
        tokenizer: &Tokenizer,
    ) -> Result<(Vec<u32>, String), ApiError> {
        let Some(template) = template else {
            let text = self.plain()?;
            return Ok((tokenizer.encode(&text)?, text));
        };
        let text = self.render(template)?;
        Ok((tokenizer.encode_rendered(&text)?, text))
    }

    fn render(mut self, template: &ChatTemplate) -> Result<String, ApiError> {
        if template.is_harmony() {
            let Adapted { messages, tools } =
                Adapted::new(self.messages, self.tools, self.schema.as_ref());
            (self.messages, self.tools) = (messages, tools);
        }
        if !self.tools.is_empty() {
            self.variables.insert("tools".into(), self.tools.into());
        }
        if !self.continues {
            return Ok(template.render_with(self.messages, self.variables, true)?);
        }
        let last = self
            .messages
            .last()
            .and_then(|last| last["content"].as_str());
        let last = last.unwrap_or_default().trim().to_string();
        let mut text = template.render_with(self.messages, self.variables, false)?;
        // The template ends the turn after the message.
        match text.rfind(&last) {
            Some(start) => text.truncate(start + last.len()),
            None => {
                return Err(ApiError::unsupported(
                    "messages",
                    "The model's chat template does not let the answer continue the last message.",
                ));
            }
        }
        Ok(text)
    }

    /// Returns the text of a conversation for a model without a template.
    fn plain(&self) -> Result<String, ApiError> {
        if !self.tools.is_empty() {
            return Err(ApiError::unsupported(
                "tools",
                "The model has no chat template, so that it cannot be told of tools.",
            ));
        }
        let mut text = String::new();
        for message in &self.messages {
            let name = match message["role"].as_str() {
                Some("user") => USER,
                Some("assistant") => ASSISTANT,
                _ => SYSTEM,
            };
            let content = message["content"].as_str().unwrap_or_default();
            text += &format!("{name} {content}\n");
        }
        if self.continues {
            text.pop();
        } else {
            text += ASSISTANT;
        }
        Ok(text)
    }
}

/// Returns the messages of a chat completion in the form of templates.
pub(crate) fn chat_messages(messages: Vec<ChatMessage>) -> Result<Vec<Value>, ApiError> {
    let messages = messages.into_iter().enumerate();
    messages
        .map(|(index, message)| {
            chat_message(message)
                .map_err(|reason| ApiError::unsupported(format!("messages[{index}]"), reason))
        })
        .collect()
}

/// Returns a message in the form of templates, or the reason why it is refused.
fn chat_message(message: ChatMessage) -> Result<Value, String> {
    // A template knows one name for both.
    const SYSTEM: &str = "system";
    let with_name = |role: &str, content: MessageContent, name: Option<String>| {
        let mut message = json!({ "role": role, "content": text(content)? });
        if let Some(name) = name {
            message["name"] = name.into();
        }
        Ok(message)
    };
    match message {
        ChatMessage::System { content, name, .. } => with_name(SYSTEM, content, name),
        ChatMessage::Developer { content, name, .. } => with_name(SYSTEM, content, name),
        ChatMessage::User { content, name, .. } => with_name("user", content, name),
        ChatMessage::Assistant {
            content,
            name,
            tool_calls,
            reasoning_content,
            ..
        } => {
            let mut message = with_name("assistant", content.unwrap_or_default(), name)?;
            if let Some(reasoning) = reasoning_content {
                message["reasoning_content"] = reasoning.into();
            }
            let calls = tool_calls.unwrap_or_default().into_iter().map(|call| {
                let function = call.function;
                tool_call(&call.id, &function.name, function.arguments.as_deref())
            });
            let calls = calls.collect::<Result<Vec<_>, _>>()?;
            if !calls.is_empty() {
                message["tool_calls"] = calls.into();
            }
            Ok(message)
        }
        ChatMessage::Tool {
            content,
            tool_call_id,
        } => Ok(json!({
            "role": "tool",
            "content": text(content)?,
            "tool_call_id": tool_call_id,
        })),
        ChatMessage::Function { .. } => {
            Err("Messages of the role `function` are not supported; use `tool`.".into())
        }
        ChatMessage::Root { .. } => Err("Messages of the role `root` are not supported.".into()),
    }
}

/// Returns a call of a tool in the form of templates, which take the arguments as an object.
pub(crate) fn tool_call(id: &str, name: &str, arguments: Option<&str>) -> Result<Value, String> {
    let arguments = match arguments.map(str::trim) {
        None | Some("") => Value::Object(Map::new()),
        Some(text) => match serde_json::from_str(text) {
            Ok(arguments @ Value::Object(_)) => arguments,
            Ok(_) => return Err(format!("The arguments of the call `{id}` are no object.")),
            Err(error) => {
                return Err(format!(
                    "The arguments of the call `{id}` are not JSON: {error}"
                ));
            }
        },
    };
    Ok(json!({
        "id": id,
        "type": "function",
        "function": { "name": name, "arguments": arguments },
    }))
}

/// Returns the text of a message's content. Parts are lines of their own.
fn text(content: MessageContent) -> Result<String, String> {
    let parts = match content {
        MessageContent::Text(text) => return Ok(text),
        MessageContent::Parts(parts) => parts,
    };
    let parts = parts.into_iter().map(|part| match part {
        ContentPart::Text { text } => Ok(text),
        _ => Err("Only parts of the type `text` are supported; the model reads no others."),
    });
    let parts: Result<Vec<_>, _> = parts.collect();
    Ok(parts?.join("\n"))
}

/// Returns tools in the form of templates.
pub(crate) fn chat_tools(tools: &[Tool]) -> Result<Vec<Value>, ApiError> {
    tools
        .iter()
        .enumerate()
        .map(|(index, tool)| {
            if tool.tool_type != "function" {
                return Err(ApiError::unsupported(
                    format!("tools[{index}].type"),
                    format!("Tools of the type `{}` are not supported.", tool.tool_type),
                ));
            }
            serde_json::to_value(tool).map_err(|error| ApiError::json(&error))
        })
        .collect()
}
