//! The parts of an answer: content, reasoning, and calls of tools.

use crate::reasoning::{ReasoningDelta, ReasoningParser};
use crate::tools::{ToolDelta, ToolFormat, ToolParser};
use uuid::Uuid;

/// A part of an answer, in the order of the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    /// Text of the answer.
    Content(String),
    /// Text before the answer, which the template marks as reasoning.
    Reasoning(String),
    /// A call of a tool begins.
    Call {
        /// The number of calls before it.
        index: usize,
        /// A new id.
        id: String,
        name: String,
    },
    /// The next part of a call's arguments, which together are an object of JSON.
    Arguments { index: usize, text: String },
    /// A call that has begun is none; `text` is what was given of it. A stream cannot take it back.
    Malformed { index: usize, text: String },
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    /// The number of calls that began before it.
    index: usize,
    pub id: String,
    pub name: String,
    pub arguments: String,
}

/// How an answer is divided.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct OutputOptions {
    /// True if the template marks reasoning.
    pub reasoning: bool,
    /// How the model calls tools, if it may.
    pub tools: Option<ToolFormat>,
    /// True to leave out all calls but the first.
    pub first_call_only: bool,
}

/// Divides the text of an answer.
pub(crate) struct OutputParser {
    reasoning: Option<ReasoningParser>,
    tools: Option<ToolParser>,
    first_call_only: bool,
}

impl OutputParser {
    /// Starts at the beginning of the answer to `prompt`, the text that the template rendered.
    pub fn new(options: OutputOptions, prompt: &str) -> Self {
        Self {
            reasoning: options.reasoning.then(|| ReasoningParser::new(prompt)),
            tools: options.tools.map(ToolParser::new),
            first_call_only: options.first_call_only,
        }
    }

    /// Adds text.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        if self.reasoning.is_none() && self.tools.is_none() {
            return match text {
                "" => Vec::new(),
                text => vec![Part::Content(text.into())],
            };
        }
        let deltas = match &mut self.reasoning {
            Some(parser) => parser.push(text),
            None => vec![ReasoningDelta::Content(text.into())],
        };
        self.divide(deltas)
    }

    /// Ends the answer.
    pub fn finish(&mut self) -> Vec<Part> {
        let deltas = self.reasoning.take().map(ReasoningParser::finish);
        let mut parts = self.divide(deltas.unwrap_or_default());
        let deltas = self.tools.take().map(ToolParser::finish);
        self.add(&mut parts, deltas.unwrap_or_default());
        parts
    }

    fn divide(&mut self, deltas: Vec<ReasoningDelta>) -> Vec<Part> {
        let mut parts = Vec::new();
        for delta in deltas {
            match (delta, &mut self.tools) {
                (ReasoningDelta::Reasoning(text), _) => parts.push(Part::Reasoning(text)),
                (ReasoningDelta::Content(text), None) => parts.push(Part::Content(text)),
                (ReasoningDelta::Content(text), Some(parser)) => {
                    let deltas = parser.push(&text);
                    self.add(&mut parts, deltas);
                }
            }
        }
        parts
    }

    /// Adds the parts of an answer with calls.
    fn add(&self, parts: &mut Vec<Part>, deltas: Vec<ToolDelta>) {
        let first_only = self.first_call_only;
        let deltas = deltas.into_iter().filter(|delta| {
            let (ToolDelta::Start { index, .. }
            | ToolDelta::Arguments { index, .. }
            | ToolDelta::End { index }
            | ToolDelta::Malformed { index, .. }) = delta
            else {
                return true;
            };
            !first_only || *index == 0
        });
        parts.extend(deltas.filter_map(part));
    }
}

/// Returns the part of an answer for a part of its calls.
fn part(delta: ToolDelta) -> Option<Part> {
    Some(match delta {
        ToolDelta::Content(text) => Part::Content(text),
        ToolDelta::Start { index, name } => Part::Call {
            index,
            id: format!("call_{}", Uuid::new_v4().simple()),
            name,
        },
        ToolDelta::Arguments { index, text } => Part::Arguments { index, text },
        ToolDelta::End { .. } => return None,
        ToolDelta::Malformed { index, text } => Part::Malformed { index, text },
    })
}

/// The parts of a whole answer, joined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Joined {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<Call>,
}

impl Joined {
    /// Adds parts.
    pub fn extend(&mut self, parts: Vec<Part>) {
        for part in parts {
            match part {
                Part::Content(text) => self.content += &text,
                Part::Reasoning(text) => self.reasoning += &text,
                Part::Call { index, id, name } => self.calls.push(Call {
                    index,
                    id,
                    name,
                    arguments: String::new(),
                }),
                Part::Arguments { index, text } => {
                    let call = self.calls.iter_mut().find(|call| call.index == index);
                    if let Some(call) = call {
                        call.arguments += &text;
                    }
                }
                Part::Malformed { index, text } => {
                    self.calls.retain(|call| call.index != index);
                    self.content += &text;
                }
            }
        }
    }
}
