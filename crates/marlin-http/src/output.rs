//! The parts of an answer: content, reasoning, and calls of tools.

use crate::harmony::{HarmonyDelta, HarmonyParser};
use crate::reasoning::{ReasoningDelta, ReasoningParser, ReasoningTags};
use crate::tools::{ToolDelta, ToolFormat, ToolParser, ToolTypes};
use marlin_text::ChatTemplate;
use marlin_text::harmony::MARKERS;
use uuid::Uuid;

/// How a model marks the parts of its answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerFormat {
    /// Reasoning and calls have tags, each their own.
    Tagged {
        /// The tags of reasoning, if there is any.
        reasoning: Option<ReasoningTags>,
        /// How tools are called, if they are.
        tools: Option<ToolFormat>,
    },
    /// Messages on channels.
    Harmony,
}

impl AnswerFormat {
    /// Returns the format that a chat template asks the model for.
    pub fn of_template(template: &ChatTemplate) -> Self {
        if template.is_harmony() {
            return Self::Harmony;
        }
        Self::Tagged {
            reasoning: ReasoningTags::of_template(template.text()),
            tools: ToolFormat::of_template(template.text()),
        }
    }

    /// Returns the format in which tools are called in this form, if there is one, instead.
    pub fn calling(self, form: Option<ToolFormat>) -> Self {
        match (self, form) {
            (Self::Tagged { reasoning, .. }, Some(_)) => Self::Tagged {
                reasoning,
                tools: form,
            },
            // Channels are the only form of calls.
            (Self::Harmony, _) | (Self::Tagged { .. }, None) => self,
        }
    }

    /// Returns true if the format has calls of tools.
    pub fn has_calls(self) -> bool {
        match self {
            Self::Tagged { tools, .. } => tools.is_some(),
            Self::Harmony => true,
        }
    }
}

impl Default for AnswerFormat {
    fn default() -> Self {
        Self::Tagged {
            reasoning: None,
            tools: None,
        }
    }
}

/// Returns the texts of the special tokens that an answer to a conversation of this template must
/// contain, since they mark its parts. The engine's tokenizer must be one that
/// [shows](marlin_text::Tokenizer::showing) them.
pub fn shown_tokens(template: &ChatTemplate) -> Vec<&'static str> {
    match AnswerFormat::of_template(template) {
        AnswerFormat::Tagged { reasoning, tools } => {
            let tags = reasoning.iter().flat_map(|tags| tags.texts());
            let markers = tools.iter().flat_map(|tools| tools.markers());
            tags.chain(markers).copied().collect()
        }
        AnswerFormat::Harmony => MARKERS.to_vec(),
    }
}

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
#[derive(Debug, Clone, Default)]
pub(crate) struct OutputOptions {
    pub format: AnswerFormat,
    /// True if reasoning is told apart from content.
    pub reasoning: bool,
    /// The types of the tools that the model may call; `None` if it may call none.
    pub tools: Option<ToolTypes>,
    /// True to leave out all calls but the first.
    pub first_call_only: bool,
}

/// Divides the text of an answer.
pub(crate) struct OutputParser {
    parser: Parser,
    options: OutputOptions,
}

enum Parser {
    Tagged {
        reasoning: Option<ReasoningParser>,
        tools: Option<ToolParser>,
    },
    Harmony(Option<HarmonyParser>),
}

impl OutputParser {
    /// Starts at the beginning of the answer to `prompt`, the text that the template rendered.
    pub fn new(options: OutputOptions, prompt: &str) -> Self {
        let parser = match options.format {
            AnswerFormat::Tagged { reasoning, tools } => Parser::Tagged {
                reasoning: reasoning
                    .filter(|_| options.reasoning)
                    .map(|tags| ReasoningParser::new(tags, prompt)),
                tools: tools
                    .zip(options.tools.clone())
                    .map(|(format, types)| ToolParser::new(format, types)),
            },
            AnswerFormat::Harmony => {
                Parser::Harmony(Some(HarmonyParser::new(prompt, options.tools.is_some())))
            }
        };
        Self { parser, options }
    }

    /// Adds text.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        let mut parts = Vec::new();
        match &mut self.parser {
            Parser::Harmony(parser) => {
                let deltas = parser.as_mut().map(|parser| parser.push(text));
                self.add_harmony(&mut parts, deltas.unwrap_or_default());
            }
            Parser::Tagged { reasoning, .. } => {
                let deltas = match reasoning {
                    Some(parser) => parser.push(text),
                    None if text.is_empty() => Vec::new(),
                    None => vec![ReasoningDelta::Content(text.into())],
                };
                self.add_tagged(&mut parts, deltas);
            }
        }
        parts
    }

    /// Ends the answer.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        match &mut self.parser {
            Parser::Harmony(parser) => {
                let deltas = parser.take().map(HarmonyParser::finish);
                self.add_harmony(&mut parts, deltas.unwrap_or_default());
            }
            Parser::Tagged { reasoning, .. } => {
                let deltas = reasoning.take().map(ReasoningParser::finish);
                self.add_tagged(&mut parts, deltas.unwrap_or_default());
                if let Parser::Tagged { tools, .. } = &mut self.parser {
                    let deltas = tools.take().map(ToolParser::finish);
                    self.add(&mut parts, deltas.unwrap_or_default());
                }
            }
        }
        parts
    }

    /// Adds the parts of an answer with tags.
    fn add_tagged(&mut self, parts: &mut Vec<Part>, deltas: Vec<ReasoningDelta>) {
        for delta in deltas {
            match (delta, &mut self.parser) {
                (ReasoningDelta::Reasoning(text), _) => parts.push(Part::Reasoning(text)),
                (
                    ReasoningDelta::Content(text),
                    Parser::Tagged {
                        tools: Some(parser),
                        ..
                    },
                ) => {
                    let deltas = parser.push(&text);
                    self.add(parts, deltas);
                }
                (ReasoningDelta::Content(text), _) => parts.push(Part::Content(text)),
            }
        }
    }

    /// Adds the parts of an answer with channels.
    fn add_harmony(&self, parts: &mut Vec<Part>, deltas: Vec<HarmonyDelta>) {
        for delta in deltas {
            match delta {
                HarmonyDelta::Reasoning(text) if self.options.reasoning => {
                    parts.push(Part::Reasoning(text));
                }
                HarmonyDelta::Reasoning(text) => parts.push(Part::Content(text)),
                HarmonyDelta::Answer(delta) => self.add(parts, vec![delta]),
            }
        }
    }

    /// Adds the parts of an answer with calls.
    fn add(&self, parts: &mut Vec<Part>, deltas: Vec<ToolDelta>) {
        let first_only = self.options.first_call_only;
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
