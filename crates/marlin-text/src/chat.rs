//! Chat templates, which render conversations to text in the form that a model was trained on. They
//! render as in Hugging Face's `transformers`.
//!
//! A template is a Jinja template. It is read from `chat_template.jinja`, or else from the field
//! `chat_template` of `tokenizer_config.json`, or else from the same field of `chat_template.json`.
//! The field is a string, or a list of named templates, of which `default` is used.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use marlin_format::checkpoint::{MAX_CONFIG_BYTES, read_text};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::harmony::{CHANNEL, MESSAGE};
use crate::tokenizer_config::{TokenizerConfig, optional_json};
use crate::worker::{Request, Subject, Worker};
use crate::{TextError, Tokenizer};

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The speaker: `system`, `user` or `assistant`.
    pub role: String,
    /// The text of the turn.
    pub content: String,
}

impl Message {
    /// Creates a message that is given to the model before the conversation.
    pub fn system(content: impl Into<String>) -> Self {
        Self {
            role: "system".into(),
            content: content.into(),
        }
    }

    /// Creates a turn of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self {
            role: "user".into(),
            content: content.into(),
        }
    }

    /// Creates a turn of the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self {
            role: "assistant".into(),
            content: content.into(),
        }
    }
}

/// The compiled chat template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    worker: Worker,
    text: String,
    /// The path of the file with the template.
    path: PathBuf,
    /// The text of the token that ends the model's turn, according to the tokenizer's config.
    eos_token: Option<String>,
}

impl ChatTemplate {
    /// Reads the template of a Hugging Face folder; `None` if the folder has no template, as with
    /// base models.
    ///
    /// # Errors
    /// [`TextError::Io`] and [`TextError::Json`] for files that cannot be read,
    /// [`TextError::ChatTemplateField`] if the field holds something else, or several templates
    /// without one named `default`, and [`TextError::ChatTemplate`] if the text is not a valid
    /// template.
    pub fn open(dir: &Path) -> Result<Option<Self>, TextError> {
        let config = TokenizerConfig::read(dir)?;
        let special_tokens = config.template_tokens();
        let jinja_path = dir.join("chat_template.jinja");
        match read_text(&jinja_path, MAX_CONFIG_BYTES) {
            Ok(text) => return Self::compile(&text, jinja_path, special_tokens).map(Some),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(source) => return Err(TextError::io(&jinja_path, source)),
        }
        let old_path = dir.join("chat_template.json");
        let old: serde_json::Value = optional_json(&old_path)?.unwrap_or_default();
        for (path, file) in [(config.path, config.json), (old_path, old)] {
            if let Some(text) = template_text(&path, &file["chat_template"])? {
                return Self::compile(&text, path, special_tokens).map(Some);
            }
        }
        Ok(None)
    }

    /// Compiles a template's text. `special_tokens` are the names and texts of the tokens that the
    /// template may use, `path` is the file that errors name.
    ///
    /// # Errors
    /// [`TextError::ChatTemplate`] if the text is not a valid template.
    pub fn compile(
        text: &str,
        path: PathBuf,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self, TextError> {
        let eos_token = special_tokens.get("eos_token").cloned();
        match Worker::open(Subject::Template {
            text: text.into(),
            special_tokens,
        }) {
            Ok((worker, ())) => Ok(Self {
                worker,
                text: text.into(),
                path,
                eos_token,
            }),
            Err(source) => Err(TextError::ChatTemplate { path, source }),
        }
    }

    /// Returns the file that the template was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the template's own text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Renders a conversation to text. With `add_generation_prompt` the text ends where the model's
    /// answer begins.
    ///
    /// The text contains special tokens as text, including the token that starts a text. Encode it
    /// with [`Tokenizer::encode_rendered`].
    ///
    /// # Errors
    /// [`TextError::ChatTemplate`] with the template's own message, for example that it does not
    /// support system messages.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, TextError> {
        let message =
            |Message { role, content }: &Message| json!({ "role": role, "content": content });
        self.render_json(
            messages.iter().map(message).collect(),
            add_generation_prompt,
        )
    }

    /// Renders messages that have more fields than [`Message`], such as `tool_calls`. Each message
    /// is an object, which the template receives unchanged. See [`render`](Self::render).
    ///
    /// # Errors
    /// See [`render`](Self::render).
    pub fn render_json(
        &self,
        messages: Vec<serde_json::Value>,
        add_generation_prompt: bool,
    ) -> Result<String, TextError> {
        self.render_with(messages, serde_json::Map::new(), add_generation_prompt)
    }

    /// Renders messages with further variables of the template, such as `tools` with the tools that
    /// the model may call, or `enable_thinking`. A variable that is named like a special token
    /// replaces the token; `messages` and `add_generation_prompt` are always those of the call. See
    /// [`render_json`](Self::render_json).
    ///
    /// # Errors
    /// See [`render`](Self::render).
    pub fn render_with(
        &self,
        messages: Vec<serde_json::Value>,
        variables: serde_json::Map<String, serde_json::Value>,
        add_generation_prompt: bool,
    ) -> Result<String, TextError> {
        let request = Request::Render {
            messages,
            variables,
            add_generation_prompt,
        };
        self.worker
            .call(request, &[])
            .map_err(|source| TextError::ChatTemplate {
                path: self.path.clone(),
                source,
            })
    }

    /// Returns true if the template is one of the [harmony](crate::harmony) format, in which a
    /// message has a channel: `<|channel|>final<|message|>`.
    pub fn is_harmony(&self) -> bool {
        [CHANNEL, MESSAGE]
            .iter()
            .all(|marker| self.text.contains(marker))
    }

    /// Returns the tokens that end the model's turn: the tokenizer's `eos_token`, and the token
    /// that [`end_of_turn`](Self::end_of_turn) finds, or in the [harmony](Self::is_harmony) format
    /// `<|return|>` and, where the model waits for a tool, `<|call|>`.
    pub fn stop_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let token_id = |token: &str| tokenizer.token_id(token).ok()?;
        let eos = self.eos_token.as_deref().and_then(token_id);
        if self.is_harmony() {
            // A template may write `<|end|>` after an answer, which also ends the reasoning.
            let ends = ["<|return|>", "<|call|>"].into_iter().filter_map(token_id);
            return eos.into_iter().chain(ends).collect();
        }
        eos.into_iter().chain(self.end_of_turn(tokenizer)).collect()
    }

    /// Returns the token that ends the model's turn, which the template writes after an answer:
    /// `<|eot_id|>` of Llama 3, `<|im_end|>` of ChatML. `None` if no added token, special or not,
    /// follows an answer.
    pub fn end_of_turn(&self, tokenizer: &Tokenizer) -> Option<u32> {
        const ANSWER: &str = "An answer.";
        let text = self
            .render(
                &[Message::user("A question?"), Message::assistant(ANSWER)],
                false,
            )
            .ok()?;
        let (_, after) = text.rsplit_once(ANSWER)?;
        let tokens = tokenizer.encode_rendered(after.trim_start()).ok()?;
        tokens
            .first()
            .copied()
            .filter(|&token| tokenizer.is_added(token))
    }
}

/// Returns the template in a field `chat_template`: its text, or the text named `default` in a
/// list.
fn template_text(path: &Path, field: &serde_json::Value) -> Result<Option<String>, TextError> {
    let wrong = |found: String| TextError::ChatTemplateField {
        path: path.into(),
        found,
    };
    match field {
        serde_json::Value::Null => Ok(None),
        serde_json::Value::String(text) => Ok(Some(text.clone())),
        serde_json::Value::Array(named) => {
            let default = named.iter().find(|entry| entry["name"] == "default");
            match default.and_then(|entry| entry["template"].as_str()) {
                Some(text) => Ok(Some(text.into())),
                None => {
                    let names: Vec<&str> = named
                        .iter()
                        .filter_map(|entry| entry["name"].as_str())
                        .collect();
                    Err(wrong(format!(
                        "templates named {names:?}, none of them `default`"
                    )))
                }
            }
        }
        other => Err(wrong(other.to_string())),
    }
}

#[cfg(test)]
mod tests;
