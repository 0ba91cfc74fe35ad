//! Calls of tools in the text of a model.
//!
//! | format | as in vLLM | a call |
//! |---|---|---|
//! | [`Hermes`](ToolFormat::Hermes) | `hermes` | `<tool_call>{"name": .., "arguments": {..}}</tool_call>` |
//! | [`Llama3Json`](ToolFormat::Llama3Json) | `llama3_json` | `{"name": .., "parameters": {..}}` as the whole answer, or after `<\|python_tag\|>`; several are divided by `;` |
//! | [`Qwen3Coder`](ToolFormat::Qwen3Coder) | `qwen3_coder`, `qwen3_xml` | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>..</function></tool_call>` |
//! | [`SeedOss`](ToolFormat::SeedOss) | `seed_oss` | the same between `<seed:tool_call>` and `</seed:tool_call>` |
//! | [`Mistral`](ToolFormat::Mistral) | `mistral` | `[TOOL_CALLS][{"name": .., "arguments": {..}}, ..]`, or `[TOOL_CALLS]name[ARGS]{..}` |
//!
//! [`ToolParser`] divides a text into content and calls while it is generated; [`collect`] does so
//! for a whole text. [`ToolFormat::grammar`] is the grammar of an answer that calls a tool.
//!
//! gpt-oss models write calls in the messages of the [harmony](crate::harmony) format.
//!
//! White space directly before and after a call is dropped. A text that begins like a call and is
//! none is content.
//!
//! # Values as XML
//!
//! The value of a parameter is a text without its first and its last line break. The tool's JSON
//! schema says what it is:
//!
//! | the first type of the parameter that is not `null` | the value |
//! |---|---|
//! | `string`, none, or a parameter that the schema does not have | the text; `null` for `null` and `None` if the schema allows it |
//! | `integer`, `number`, `boolean`, `object`, `array`, or `null` alone | the text as JSON, also `True`, `False` and `None`; the text itself if it is none of these |
//!
//! The arguments are given out as an object of JSON while they come, the characters of a text one
//! by one. Where tags are missing, a value ends before the next parameter of the tool at the start
//! of a line, and before the end of the call; the answer may end after a value. A call without
//! `<tool_call>` is one if it is of a tool of the request.

pub(crate) mod call;
pub(crate) mod grammar;
mod parser;
#[cfg(test)]
pub(crate) mod tests;
mod types;
mod value;
mod xml;
mod xml_grammar;

pub use grammar::{ToolGrammarError, ToolSchema};
pub use parser::ToolParser;
pub use types::ToolTypes;

/// How a family of models writes the calls of tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen 2.5 and Qwen 3.
    Hermes,
    /// `{"name": .., "parameters": {..}}`: Llama 3.1 and later.
    Llama3Json,
    /// `[TOOL_CALLS]` before a list of calls, or before each call: Mistral.
    Mistral,
    /// XML between `<tool_call>` and `</tool_call>`: Qwen 3 Coder, Qwen 3.5, Nemotron 3.
    Qwen3Coder,
    /// XML between `<seed:tool_call>` and `</seed:tool_call>`: Seed-OSS.
    SeedOss,
}

impl ToolFormat {
    /// All formats.
    pub const ALL: [Self; 5] = [
        Self::Hermes,
        Self::Llama3Json,
        Self::Mistral,
        Self::Qwen3Coder,
        Self::SeedOss,
    ];

    /// Returns the name that vLLM's `--tool-call-parser` has for the format.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama3Json => "llama3_json",
            Self::Mistral => "mistral",
            Self::Qwen3Coder => "qwen3_coder",
            Self::SeedOss => "seed_oss",
        }
    }

    /// Returns the format with a [`name`](Self::name), or with another that vLLM has for it; `None`
    /// if there is none.
    pub fn from_name(name: &str) -> Option<Self> {
        let name = if name == "qwen3_xml" {
            "qwen3_coder"
        } else {
            name
        };
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// Returns the format that the text of a chat template asks the model for; `None` if the
    /// template has no tools, or calls in a form that is not one of these.
    pub fn of_template(template: &str) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        if has("[TOOL_CALLS]") {
            return Some(Self::Mistral);
        }
        if has("<seed:tool_call>") {
            return Some(Self::SeedOss);
        }
        if has("<tool_call>") {
            if has("<function=") {
                return Some(Self::Qwen3Coder);
            }
            // GLM writes arguments in another form of XML between the same tags.
            return (!has("<arg_key>")).then_some(Self::Hermes);
        }
        let is_llama = has("<|start_header_id|>") && has("\"parameters\":");
        (is_llama || has("<|python_tag|>")).then_some(Self::Llama3Json)
    }

    /// Returns the texts that mark a call. A tokenizer may have them as special tokens, which
    /// decoding skips, but the text that a [`ToolParser`] is given must contain them: the engine's
    /// tokenizer is one that [shows](marlin_text::Tokenizer::showing) them.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::Qwen3Coder => &["<tool_call>", "</tool_call>"],
            Self::SeedOss => &["<seed:tool_call>", "</seed:tool_call>"],
            Self::Llama3Json => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        }
    }

    /// Returns the tags around a call, in a format that has them.
    fn tags(self) -> [&'static str; 2] {
        match self {
            Self::SeedOss => ["<seed:tool_call>", "</seed:tool_call>"],
            _ => ["<tool_call>", "</tool_call>"],
        }
    }
}

/// A part of an answer. The parts of a call follow each other without content between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolDelta {
    /// Text that belongs to no call.
    Content(String),
    /// A call begins.
    Start {
        /// The number of calls before it.
        index: usize,
        /// The name of the tool.
        name: String,
    },
    /// The next part of the arguments of a call, as the model wrote it, or as JSON if it wrote XML.
    /// All parts together are an object of JSON, unless [`Malformed`](Self::Malformed) follows.
    Arguments {
        /// The call.
        index: usize,
        /// The text.
        text: String,
    },
    /// The arguments of a call are complete.
    End {
        /// The call.
        index: usize,
    },
    /// The arguments of a call are not of its form, or the answer ended within them. An answer in
    /// one piece has `text` as content in place of the call.
    Malformed {
        /// The call.
        index: usize,
        /// The whole text of the call so far. Text after it is content.
        text: String,
    },
}

/// A whole call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The name of the tool.
    pub name: String,
    /// The arguments: an object of JSON, as the model wrote it unless it wrote XML.
    pub arguments: String,
}

/// Joins the parts of an answer to its content and its calls. Malformed calls are content.
pub fn collect(deltas: impl IntoIterator<Item = ToolDelta>) -> (String, Vec<ToolCall>) {
    let (mut content, mut calls) = (String::new(), Vec::new());
    let mut open: Option<ToolCall> = None;
    for delta in deltas {
        match delta {
            ToolDelta::Content(text) => content.push_str(&text),
            ToolDelta::Start { name, .. } => {
                open = Some(ToolCall {
                    name,
                    arguments: String::new(),
                });
            }
            ToolDelta::Arguments { text, .. } => {
                if let Some(call) = &mut open {
                    call.arguments.push_str(&text);
                }
            }
            ToolDelta::End { .. } => calls.extend(open.take()),
            ToolDelta::Malformed { text, .. } => {
                open = None;
                content.push_str(&text);
            }
        }
    }
    (content, calls)
}
