//! Calls of tools in the text of a model.
//!
//! | format | as in vLLM | a call |
//! |---|---|---|
//! | [`Hermes`](ToolFormat::Hermes) | `hermes` | `<tool_call>{"name": .., "arguments": {..}}</tool_call>` |
//! | [`Llama3Json`](ToolFormat::Llama3Json) | `llama3_json` | `{"name": .., "parameters": {..}}` as the whole answer, or after `<\|python_tag\|>`; several are divided by `;` |
//! | [`Mistral`](ToolFormat::Mistral) | `mistral` | `[TOOL_CALLS][{"name": .., "arguments": {..}}, ..]`, or `[TOOL_CALLS]name[ARGS]{..}` |
//!
//! [`ToolParser`] divides a text into content and calls while it is generated; [`collect`] does so
//! for a whole text. [`ToolFormat::grammar`] is the grammar of an answer that calls a tool.
//!
//! gpt-oss models write calls in the messages of the [harmony](crate::harmony) format.
//!
//! White space directly before and after a call is dropped. A text that begins like a call and is
//! none is content.

pub(crate) mod call;
pub(crate) mod grammar;
mod parser;
#[cfg(test)]
pub(crate) mod tests;

pub use grammar::{ToolGrammarError, ToolSchema};
pub use parser::ToolParser;

/// How a family of models writes the calls of tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen 2.5 and Qwen 3.
    Hermes,
    /// `{"name": .., "parameters": {..}}`: Llama 3.1 and later.
    Llama3Json,
    /// `[TOOL_CALLS]` before a list of calls, or before each call: Mistral.
    Mistral,
}

impl ToolFormat {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::Hermes, Self::Llama3Json, Self::Mistral];

    /// Returns the name that vLLM's `--tool-call-parser` has for the format.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama3Json => "llama3_json",
            Self::Mistral => "mistral",
        }
    }

    /// Returns the format with a [`name`](Self::name); `None` if there is none.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// Returns the format that the text of a chat template asks the model for; `None` if the
    /// template has no tools, or calls in a form that is not one of these.
    pub fn of_template(template: &str) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        if has("[TOOL_CALLS]") {
            return Some(Self::Mistral);
        }
        if has("<tool_call>") {
            // Qwen 3 Coder and GLM write arguments as XML between the same tags.
            let is_xml = has("<function=") || has("<arg_key>");
            return (!is_xml).then_some(Self::Hermes);
        }
        let is_llama = has("<|start_header_id|>") && has("\"parameters\":");
        (is_llama || has("<|python_tag|>")).then_some(Self::Llama3Json)
    }

    /// Returns the texts that mark a call. A tokenizer may have them as special tokens, which
    /// decoding skips, but the text that a [`ToolParser`] is given must contain them: the engine's
    /// tokenizer is one that [shows](marlin_text::Tokenizer::showing) them.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>", "</tool_call>"],
            Self::Llama3Json => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
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
    /// The next part of the arguments of a call, as the model wrote it. All parts together are an
    /// object of JSON, unless [`Malformed`](Self::Malformed) follows.
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
    /// The arguments of a call are not JSON, or the answer ended within them. An answer in one
    /// piece has `text` as content in place of the call.
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
    /// The arguments: an object of JSON, as the model wrote it.
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
