//! Conversations in the form that a model was trained on: its chat template, rendered as Hugging Face's `transformers` renders it.
//!
//! A template is a Jinja text. It is read from `chat_template.jinja`, or else the field `chat_template` of `tokenizer_config.json`, or else that of
//! `chat_template.json`. The field is a text, or a list of named texts, of which `default` counts.

use std::collections::BTreeMap;
use std::io;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use marlin_format::checkpoint::{MAX_CONFIG_BYTES, read_text};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind as TemplateErrorKind, context};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};

use crate::config::read_json;
use crate::{LlamaError, Tokenizer};

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    fn value(&self) -> Value {
        context! { role => self.role.as_str(), content => self.content.as_str() }
    }

    /// What a model is told before the conversation.
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: "system".into(), content: content.into() }
    }

    /// A turn of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user".into(), content: content.into() }
    }

    /// A turn of the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self { role: "assistant".into(), content: content.into() }
    }
}

/// A model's chat template, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Where the text is from.
    path: PathBuf,
    /// Tokens that templates name, such as `bos_token`.
    special_tokens: BTreeMap<String, String>,
}

/// The template's name in its environment, which messages show.
const NAME: &str = "chat_template";

/// The tokens of a `tokenizer_config.json` that a template can name.
const SPECIAL_TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Steps after which a template is taken to run forever; those of published models need a few hundred for each message.
const FUEL: u64 = 10_000_000;

impl ChatTemplate {
    /// Reads the template of a Hugging Face folder; `None` where it has none, as base models do not.
    ///
    /// # Errors
    /// [`LlamaError::Io`] and [`LlamaError::Json`] for files that cannot be read, [`LlamaError::ChatTemplateField`] where the field holds something
    /// else, or several templates and none named `default`, and [`LlamaError::ChatTemplate`] for a text that is no template.
    pub fn open(dir: &Path) -> Result<Option<Self>, LlamaError> {
        let config_path = dir.join("tokenizer_config.json");
        let config = optional_json(&config_path)?;
        let mut special_tokens = BTreeMap::new();
        for file in [&config, &optional_json(&dir.join("special_tokens_map.json"))?] {
            for name in SPECIAL_TOKENS {
                if let Some(token) = token_text(&file[name]) {
                    special_tokens.entry(name.to_string()).or_insert_with(|| token.to_string());
                }
            }
        }
        let jinja_path = dir.join("chat_template.jinja");
        match read_text(&jinja_path, MAX_CONFIG_BYTES) {
            Ok(text) => return Self::compile(&text, jinja_path, special_tokens).map(Some),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(source) => return Err(LlamaError::io("read", &jinja_path, source)),
        }
        let old_path = dir.join("chat_template.json");
        for (path, file) in [(config_path, config), (old_path.clone(), optional_json(&old_path)?)] {
            if let Some(text) = template_text(&path, &file["chat_template"])? {
                return Self::compile(&text, path, special_tokens).map(Some);
            }
        }
        Ok(None)
    }

    /// Compiles a template's text. `special_tokens` are the names and texts of the tokens that it may use, `path` is what errors name.
    ///
    /// # Errors
    /// [`LlamaError::ChatTemplate`] for a text that is no template.
    pub fn compile(text: &str, path: PathBuf, special_tokens: BTreeMap<String, String>) -> Result<Self, LlamaError> {
        let error = |source| LlamaError::ChatTemplate { path: path.clone(), source };
        let mut environment = Environment::new();
        // As `transformers` sets Jinja up, Python's methods on texts and maps included.
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(error)?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.set_fuel(Some(FUEL));
        environment.add_template_owned(NAME, without_generation_marks(text)).map_err(error)?;
        Ok(Self { environment, path, special_tokens })
    }

    /// The file that the template is from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The text of a conversation. With `add_generation_prompt` it ends where the model's answer begins.
    ///
    /// It holds special tokens as text, the one that starts a text among them: encode it with [`Tokenizer::encode_rendered`].
    ///
    /// # Errors
    /// [`LlamaError::ChatTemplate`] with the template's own message, such as that it takes no system message.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, LlamaError> {
        let error = |source| LlamaError::ChatTemplate { path: self.path.clone(), source };
        let template = self.environment.get_template(NAME).map_err(error)?;
        let messages: Vec<Value> = messages.iter().map(Message::value).collect();
        let tokens = Value::from_pairs(self.special_tokens.iter().map(|(name, token)| (name.as_str(), token.as_str())));
        template.render(context! { messages, add_generation_prompt, tools => (), documents => (), ..tokens }).map_err(error)
    }

    /// The tokens that end the model's turn: the tokenizer's `eos_token`, and what [`end_of_turn`](Self::end_of_turn) finds.
    pub fn stop_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let eos = self.special_tokens.get("eos_token").and_then(|token| tokenizer.token_id(token));
        eos.into_iter().chain(self.end_of_turn(tokenizer)).collect()
    }

    /// The token that the template has after an answer, which ends the model's turn: `<|eot_id|>` of Llama 3, `<|im_end|>` of ChatML. `None` where
    /// no special token follows.
    pub fn end_of_turn(&self, tokenizer: &Tokenizer) -> Option<u32> {
        const ANSWER: &str = "An answer.";
        let text = self.render(&[Message::user("A question?"), Message::assistant(ANSWER)], false).ok()?;
        let (_, after) = text.rsplit_once(ANSWER)?;
        let tokens = tokenizer.encode_rendered(after.trim_start()).ok()?;
        tokens.first().copied().filter(|&token| tokenizer.is_special(token))
    }
}

/// A token in a `tokenizer_config.json`: its text, or a map that holds it.
fn token_text(value: &serde_json::Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

/// A file as JSON; `null` where it is not there.
fn optional_json(path: &Path) -> Result<serde_json::Value, LlamaError> {
    match read_json(path) {
        Err(LlamaError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(serde_json::Value::Null),
        result => result,
    }
}

/// The template in a field `chat_template`: a text, or the one named `default` in a list.
fn template_text(path: &Path, field: &serde_json::Value) -> Result<Option<String>, LlamaError> {
    let wrong = |found: String| LlamaError::ChatTemplateField { path: path.into(), found };
    match field {
        serde_json::Value::Null => Ok(None),
        serde_json::Value::String(text) => Ok(Some(text.clone())),
        serde_json::Value::Array(named) => {
            let default = named.iter().find(|entry| entry["name"] == "default");
            match default.and_then(|entry| entry["template"].as_str()) {
                Some(text) => Ok(Some(text.into())),
                None => {
                    let names: Vec<&str> = named.iter().filter_map(|entry| entry["name"].as_str()).collect();
                    Err(wrong(format!("templates named {names:?}, none of them `default`")))
                }
            }
        }
        other => Err(wrong(other.to_string())),
    }
}

/// `{% generation %}` marks what a model is trained on, and renders nothing itself. Jinja's own tags in its place keep the control of whitespace.
fn without_generation_marks(text: &str) -> String {
    let mut replaced = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let word = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        replaced.push_str(before);
        match word {
            "generation" => replaced.push_str(&tag.replace(word, "if true")),
            "endgeneration" => replaced.push_str(&tag.replace(word, "endif")),
            _ => replaced.push_str(tag),
        }
        rest = after;
    }
    replaced.push_str(rest);
    replaced
}

/// How templates refuse a conversation.
fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(TemplateErrorKind::InvalidOperation, message))
}

/// `datetime.now().strftime` of Python.
fn strftime_now(format: &str) -> Result<String, Error> {
    let text = jiff::fmt::strtime::format(format, &jiff::Zoned::now());
    text.map_err(|error| Error::new(TemplateErrorKind::InvalidOperation, format!("strftime_now(`{format}`)")).with_source(error))
}

/// `json.dumps` of Python without escapes: Jinja's own filter escapes HTML. Takes `indent`.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    kwargs.assert_all_used()?;
    let spaces = indent.map(|indent| " ".repeat(indent.min(16)));
    let text = match &spaces {
        Some(spaces) => to_json(value, PrettyFormatter::with_indent(spaces.as_bytes())),
        None => to_json(value, Spaced),
    };
    let text = text.map_err(|error| Error::new(TemplateErrorKind::BadSerialization, "tojson").with_source(error))?;
    Ok(Value::from_safe_string(text))
}

fn to_json(value: &Value, formatter: impl Formatter) -> Result<String, serde_json::Error> {
    let mut bytes = Vec::new();
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Python's separators, `, ` and `: `.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests;
