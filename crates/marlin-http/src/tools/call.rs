//! One call of a tool, read character by character.

use actson::feeder::PushJsonFeeder;
use actson::{JsonEvent, JsonParser};

use super::xml::XmlCall;

/// A text is not a call with a name and arguments.
pub(crate) struct Malformed;

/// A call in one of the forms.
pub(super) enum Call {
    Json(CallObject),
    Xml(XmlCall),
}

impl Call {
    /// Adds a character. Returns true if the call has ended.
    pub fn push(&mut self, character: char) -> Result<bool, Malformed> {
        match self {
            Self::Json(call) => call.push(character),
            Self::Xml(call) => call.push(character),
        }
    }

    /// Ends the answer. Returns true if the call is complete all the same.
    pub fn finish(&mut self) -> bool {
        match self {
            Self::Json(_) => false,
            Self::Xml(call) => call.finish(),
        }
    }

    /// Returns the name of the tool, as soon as its arguments have begun.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Json(call) => call.name(),
            Self::Xml(call) => call.name(),
        }
    }

    /// Takes the text of the arguments that came since the last call.
    pub fn take_fragment(&mut self) -> String {
        match self {
            Self::Json(call) => call.take_fragment(),
            Self::Xml(call) => call.take_fragment(),
        }
    }

    /// Takes the end of the text that is no part of the call: of one that has ended what follows
    /// it, of a malformed one what may be the start of another, up to `last`, the last character.
    pub fn take_unread(&mut self, last: Option<char>) -> String {
        match self {
            Self::Json(_) => last.into_iter().collect(),
            Self::Xml(call) => call.take_unread(),
        }
    }
}

/// The object of a call, `{"name": .., "arguments": {..}}`, or the arguments alone.
///
/// `parameters` is the same as `arguments`, the order of the fields does not matter, and other
/// fields are skipped.
pub(crate) struct CallObject {
    json: JsonParser<PushJsonFeeder>,
    depth: usize,
    /// The depth of the object of arguments.
    arguments_depth: usize,
    /// The field of the outer object whose value is being read.
    field: Field,
    name: Option<String>,
    arguments: Arguments,
    /// The text of the arguments that was not taken.
    fragment: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    Other,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Arguments {
    Missing,
    Open,
    Complete,
}

impl CallObject {
    /// Starts an object with the fields `name` and `arguments`.
    pub fn new() -> Self {
        Self::start(None, 2)
    }

    /// Starts the arguments of a call whose name is known.
    pub fn arguments_of(name: String) -> Self {
        Self::start(Some(name), 1)
    }

    fn start(name: Option<String>, arguments_depth: usize) -> Self {
        Self {
            json: JsonParser::new(PushJsonFeeder::new()),
            depth: 0,
            arguments_depth,
            field: Field::Arguments,
            name,
            arguments: Arguments::Missing,
            fragment: String::new(),
        }
    }

    /// Adds a character. Returns true if it ends the object.
    pub fn push(&mut self, character: char) -> Result<bool, Malformed> {
        if self.depth == 0 && character != '{' {
            return if character.is_ascii_whitespace() {
                Ok(false)
            } else {
                Err(Malformed)
            };
        }
        let was_open = self.arguments == Arguments::Open;
        for &byte in character.encode_utf8(&mut [0; 4]).as_bytes() {
            self.json.feeder.push_byte(byte).map_err(|_| Malformed)?;
            loop {
                match self.json.next_event().map_err(|_| Malformed)? {
                    None | Some(JsonEvent::NeedMoreInput) => break,
                    Some(event) => self.event(event)?,
                }
            }
        }
        if was_open || self.arguments == Arguments::Open {
            self.fragment.push(character);
        }
        Ok(self.depth == 0)
    }

    fn event(&mut self, event: JsonEvent) -> Result<(), Malformed> {
        let is_value = self.depth + 1 == self.arguments_depth;
        match event {
            JsonEvent::StartObject | JsonEvent::StartArray => {
                if is_value {
                    self.value(event)?;
                }
                self.depth += 1;
            }
            JsonEvent::EndObject | JsonEvent::EndArray => {
                if self.depth == self.arguments_depth && self.arguments == Arguments::Open {
                    self.arguments = Arguments::Complete;
                }
                self.depth -= 1;
                let is_whole = self.name.is_some() && self.arguments == Arguments::Complete;
                if self.depth == 0 && !is_whole {
                    return Err(Malformed);
                }
            }
            JsonEvent::FieldName if is_value => {
                self.field = match self.text()? {
                    "name" => Field::Name,
                    "arguments" | "parameters" => Field::Arguments,
                    _ => Field::Other,
                };
            }
            _ if is_value => self.value(event)?,
            _ => {}
        }
        Ok(())
    }

    /// Takes the start of the value of the current field.
    fn value(&mut self, event: JsonEvent) -> Result<(), Malformed> {
        match self.field {
            Field::Name => {
                let name = match event {
                    JsonEvent::ValueString => self.text()?.to_string(),
                    _ => return Err(Malformed),
                };
                if name.is_empty() || self.name.replace(name).is_some() {
                    return Err(Malformed);
                }
            }
            Field::Arguments => {
                let is_first = self.arguments == Arguments::Missing;
                if event != JsonEvent::StartObject || !is_first {
                    return Err(Malformed);
                }
                self.arguments = Arguments::Open;
            }
            Field::Other => {}
        }
        Ok(())
    }

    fn text(&self) -> Result<&str, Malformed> {
        self.json.current_str().map_err(|_| Malformed)
    }

    /// Returns the name of the tool, as soon as its arguments have begun.
    pub fn name(&self) -> Option<&str> {
        let has_begun = self.arguments != Arguments::Missing;
        self.name.as_deref().filter(|_| has_begun)
    }

    /// Takes the text of the arguments that came since the last call.
    pub fn take_fragment(&mut self) -> String {
        std::mem::take(&mut self.fragment)
    }
}
