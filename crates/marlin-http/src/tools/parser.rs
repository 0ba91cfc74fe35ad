//! The division of an answer into content and calls of tools.

use std::mem::take;

use super::call::{Call, CallObject, Malformed};
use super::xml::{FUNCTION, XmlCall};
use super::{ToolDelta, ToolFormat, ToolTypes};

/// The number of characters of the longest name of a tool that comes before `[ARGS]`.
const LONGEST_NAME: usize = 256;

/// Divides the text of an answer into content and calls of tools while it is generated.
///
/// Where the text is divided into pieces changes nothing but the pieces of the result.
pub struct ToolParser {
    format: ToolFormat,
    types: ToolTypes,
    state: State,
    /// Text that may belong to a call, or does, since the white space before it.
    held: String,
    /// The end of the white space at the start of `held`. Only kept while a marker is looked for.
    mark: usize,
    /// The number of calls that have begun.
    calls: usize,
    /// The place of the text: the start of the answer, directly after a call, or elsewhere.
    place: Place,
    deltas: Vec<ToolDelta>,
}

enum State {
    /// Content, which a marker may end.
    Content,
    /// The object of a call, or its XML.
    Object(Box<Object>),
    /// The end of a call: the marker that ends it may follow.
    Closing,
    /// The end of `[TOOL_CALLS]`: a list or a name follows.
    Opened,
    /// A name before `[ARGS]`, or the id of a call between `[CALL_ID]` and `[ARGS]`.
    Name {
        name: String,
        is_id: bool,
        /// The start of a marker.
        marker: String,
    },
    /// A list of calls before a call.
    BeforeCall,
    /// A list of calls after a call.
    AfterCall,
}

struct Object {
    call: Call,
    /// True if the name was given out.
    is_announced: bool,
    /// What follows the object.
    next: Next,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Content,
    Closing,
    List,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Start,
    AfterCall,
    Within,
}

impl ToolParser {
    /// Starts at the beginning of an answer. `types` are those of the tools that the request has,
    /// which only calls as XML need: without them, all of their arguments are texts.
    pub fn new(format: ToolFormat, types: ToolTypes) -> Self {
        Self {
            format,
            types,
            state: State::Content,
            held: String::new(),
            mark: 0,
            calls: 0,
            place: Place::Start,
            deltas: Vec::new(),
        }
    }

    /// Adds text and returns the parts of the answer that it completes. Text that may be the start
    /// of a call is held back.
    pub fn push(&mut self, text: &str) -> Vec<ToolDelta> {
        for character in text.chars() {
            self.step(character);
        }
        take(&mut self.deltas)
    }

    /// Ends the answer and returns its last parts. A call that is not complete is malformed.
    pub fn finish(mut self) -> Vec<ToolDelta> {
        match take_state(&mut self.state) {
            State::Content if self.place == Place::AfterCall && self.mark == self.held.len() => {}
            State::Content => self.release(),
            State::Closing | State::AfterCall => {}
            State::Object(mut object) => match object.call.finish() {
                true => self.end_of_object(object),
                false => self.malformed(object.is_announced),
            },
            State::Opened | State::Name { .. } | State::BeforeCall => self.malformed(false),
        }
        self.deltas
    }

    fn step(&mut self, character: char) {
        match take_state(&mut self.state) {
            State::Content => self.content_step(character),
            State::Object(object) => self.object_step(object, character),
            State::Closing => self.closing_step(character),
            State::Opened => self.opened_step(character),
            State::Name {
                name,
                is_id,
                marker,
            } => self.name_step(name, is_id, marker, character),
            State::BeforeCall => match character {
                '{' => self.json(CallObject::new(), Next::List, Some('{')),
                _ if is_space(character) => self.hold(character, State::BeforeCall),
                _ => self.not_a_call(false, character),
            },
            State::AfterCall => match character {
                ',' => self.hold(character, State::BeforeCall),
                ']' => self.held.clear(),
                _ if is_space(character) => self.hold(character, State::AfterCall),
                _ => self.replay(character),
            },
        }
    }

    /// The markers that start a call.
    fn openings(&self) -> &'static [&'static str] {
        match self.format {
            ToolFormat::Hermes => &["<tool_call>"],
            ToolFormat::Llama3Json => &["<|python_tag|>"],
            ToolFormat::Mistral => &["[TOOL_CALLS]"],
            // Models forget the marker before it.
            ToolFormat::Qwen3Coder => &["<tool_call>", FUNCTION],
            ToolFormat::SeedOss => &["<seed:tool_call>", FUNCTION],
        }
    }

    fn content_step(&mut self, character: char) {
        let is_marked = self.held.len() > self.mark;
        let mut openings = self.openings().iter();
        if openings.any(|opening| self.continues(opening, character)) {
            self.held.push(character);
            let marker = &self.held[self.mark..];
            if let Some(opening) = self.openings().iter().find(|text| **text == marker) {
                self.mark = 0;
                self.open(opening);
            }
            return;
        }
        if !is_marked {
            let is_llama = self.format == ToolFormat::Llama3Json;
            if character == '{' && is_llama && self.place != Place::Within {
                self.mark = 0;
                return self.json(CallObject::new(), Next::Content, Some('{'));
            }
            let divides = character == ';'
                && is_llama
                && self.place == Place::AfterCall
                && !self.held.contains(';');
            if is_space(character) || divides {
                self.held.push(character);
                self.mark = self.held.len();
                return;
            }
        }
        self.release();
        let mut openings = self.openings().iter();
        if is_space(character) || openings.any(|opening| opening.starts_with(character)) {
            self.held.push(character);
            self.mark = if is_space(character) {
                self.held.len()
            } else {
                0
            };
        } else {
            self.content(character.encode_utf8(&mut [0; 4]));
            self.place = Place::Within;
        }
    }

    /// Returns true if the held text after `mark`, with a character more, is the start of `marker`.
    fn continues(&self, marker: &str, character: char) -> bool {
        let rest = marker.strip_prefix(&self.held[self.mark..]);
        rest.is_some_and(|rest| rest.starts_with(character))
    }

    /// Begins a call after a marker.
    fn open(&mut self, opening: &str) {
        match self.format {
            ToolFormat::Hermes => self.json(CallObject::new(), Next::Closing, None),
            ToolFormat::Llama3Json => self.json(CallObject::new(), Next::Content, None),
            ToolFormat::Mistral => self.state = State::Opened,
            ToolFormat::Qwen3Coder | ToolFormat::SeedOss => self.xml(opening),
        }
    }

    fn json(&mut self, call: CallObject, next: Next, first: Option<char>) {
        let object = Object {
            call: Call::Json(call),
            is_announced: false,
            next,
        };
        match first {
            Some(character) => self.object_step(object.into(), character),
            None => self.state = State::Object(object.into()),
        }
    }

    fn xml(&mut self, opening: &str) {
        let (markers, types) = (self.format.tags(), self.types.clone());
        let call = match opening {
            FUNCTION => XmlCall::unmarked(markers, types),
            _ => XmlCall::new(markers, types),
        };
        let object = Object {
            call: Call::Xml(call),
            is_announced: false,
            next: Next::Closing,
        };
        self.state = State::Object(object.into());
    }

    fn object_step(&mut self, mut object: Box<Object>, character: char) {
        self.held.push(character);
        match object.call.push(character) {
            Ok(false) => {
                self.give(&mut object);
                self.state = State::Object(object);
            }
            Ok(true) => self.end_of_object(object),
            Err(Malformed) => {
                let unread = object.call.take_unread(Some(character));
                self.held.truncate(self.held.len() - unread.len());
                self.malformed(object.is_announced);
                unread.chars().for_each(|character| self.step(character));
            }
        }
    }

    /// Gives out what is new of a call.
    fn give(&mut self, object: &mut Object) {
        let index = self.calls;
        let Some(name) = object.call.name() else {
            return;
        };
        if !object.is_announced {
            object.is_announced = true;
            let name = name.to_string();
            self.deltas.push(ToolDelta::Start { index, name });
        }
        let fragment = object.call.take_fragment();
        self.arguments(index, &fragment);
    }

    /// Gives out the end of a call, and reads what follows it.
    fn end_of_object(&mut self, mut object: Box<Object>) {
        self.give(&mut object);
        self.deltas.push(ToolDelta::End { index: self.calls });
        self.calls += 1;
        self.held.clear();
        self.place = Place::AfterCall;
        self.state = match object.next {
            Next::Content => State::Content,
            Next::Closing => State::Closing,
            Next::List => State::AfterCall,
        };
        let unread = object.call.take_unread(None);
        unread.chars().for_each(|character| self.step(character));
    }

    fn closing_step(&mut self, character: char) {
        let [_, closing] = self.format.tags();
        if self.continues(closing, character) {
            self.hold(character, State::Closing);
            if &self.held[self.mark..] == closing {
                self.state = State::Content;
                self.held.clear();
                self.mark = 0;
            }
        } else if is_space(character) && self.held.len() == self.mark {
            self.hold(character, State::Closing);
            self.mark = self.held.len();
        } else {
            self.mark = 0;
            self.replay(character);
        }
    }

    fn opened_step(&mut self, character: char) {
        match character {
            '[' => self.hold(character, State::BeforeCall),
            _ if is_space(character) => self.hold(character, State::Opened),
            _ => self.name_step(String::new(), false, String::new(), character),
        }
    }

    fn name_step(
        &mut self,
        mut name: String,
        mut is_id: bool,
        mut marker: String,
        character: char,
    ) {
        let of_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        let is_named = !name.is_empty();
        if marker.is_empty() && of_name(character) && name.len() < LONGEST_NAME {
            if !is_id {
                name.push(character);
            }
        } else if marker.is_empty() && character == '{' && is_named && !is_id {
            // The special token `[ARGS]` was skipped.
            return self.json(CallObject::arguments_of(name), Next::Content, Some('{'));
        } else {
            marker.push(character);
            match marker.as_str() {
                "[ARGS]" if is_named => {
                    self.held.push(character);
                    return self.json(CallObject::arguments_of(name), Next::Content, None);
                }
                "[CALL_ID]" if is_named && !is_id => {
                    is_id = true;
                    marker.clear();
                }
                start if ["[ARGS]", "[CALL_ID]"].iter().any(|m| m.starts_with(start)) => {}
                _ => return self.not_a_call(false, character),
            }
        }
        let next = State::Name {
            name,
            is_id,
            marker,
        };
        self.hold(character, next);
    }

    fn hold(&mut self, character: char, next: State) {
        self.held.push(character);
        self.state = next;
    }

    /// The held text after a call is no part of a call: reads it as content.
    fn replay(&mut self, character: char) {
        let held = take(&mut self.held);
        for character in held.chars().chain([character]) {
            self.step(character);
        }
    }

    /// The held text is no call, and the character after it is read as content.
    fn not_a_call(&mut self, is_announced: bool, character: char) {
        self.malformed(is_announced);
        self.step(character);
    }

    /// Gives out the held text, which is no call.
    fn malformed(&mut self, is_announced: bool) {
        if is_announced {
            let (index, text) = (self.calls, take(&mut self.held));
            self.deltas.push(ToolDelta::Malformed { index, text });
            self.calls += 1;
        } else {
            self.release();
        }
        self.place = Place::Within;
    }

    /// Gives out the held text as content.
    fn release(&mut self) {
        let held = take(&mut self.held);
        let text = match self.place {
            Place::AfterCall => held.trim_start_matches(is_space),
            Place::Start | Place::Within => &held,
        };
        self.content(text);
        if !text.trim_start_matches(is_space).is_empty() {
            self.place = Place::Within;
        }
        self.mark = 0;
    }

    fn content(&mut self, text: &str) {
        match self.deltas.last_mut() {
            Some(ToolDelta::Content(content)) => content.push_str(text),
            _ if text.is_empty() => {}
            _ => self.deltas.push(ToolDelta::Content(text.into())),
        }
    }

    fn arguments(&mut self, index: usize, fragment: &str) {
        match self.deltas.last_mut() {
            Some(ToolDelta::Arguments { text, .. }) => text.push_str(fragment),
            _ if fragment.is_empty() => {}
            _ => self.deltas.push(ToolDelta::Arguments {
                index,
                text: fragment.into(),
            }),
        }
    }
}

fn is_space(character: char) -> bool {
    character.is_ascii_whitespace()
}

fn take_state(state: &mut State) -> State {
    std::mem::replace(state, State::Content)
}
