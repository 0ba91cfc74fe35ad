//! One call of a tool as XML, read character by character.

use std::collections::HashSet;
use std::mem::take;
use std::ops::Bound;

use serde_json::Value;

use super::call::Malformed;
use super::types::{ParameterType, ParameterTypes, ToolTypes};
use super::value::ValueWriter;

/// The most bytes of the name of a tool or a parameter.
pub(crate) const LONGEST_NAME: usize = 256;
/// The most bytes of white space between two tags.
const LONGEST_SPACE: usize = 256;

/// What begins the name of a tool, up to `>`.
pub(crate) const FUNCTION: &str = "<function=";
/// What ends the parameters of a tool.
pub(crate) const FUNCTION_END: &str = "</function>";
/// What begins the name of a parameter, up to `>`.
pub(crate) const PARAMETER: &str = "<parameter=";
/// What ends the value of a parameter.
pub(crate) const PARAMETER_END: &str = "</parameter>";

/// A call, `<function=NAME><parameter=KEY>VALUE</parameter>..</function>`, whose arguments are
/// given out as an object of JSON.
///
/// A value ends with `</parameter>` where another parameter or the end of the call follows, so that
/// a value can contain that text. Models forget the tag: a value also ends before another parameter
/// of the tool at the start of a line, before `</function>` where the end of the call follows, and
/// before the end of the call where another call or the end of the answer follows. One line break
/// directly after a value's start and one directly before its end are no part of it. A parameter
/// that is written twice is twice in the object.
pub(crate) struct XmlCall {
    markers: [&'static str; 2],
    types: ToolTypes,
    /// True if the tool must be one of `types`.
    must_be_known: bool,
    place: Place,
    /// The end of the text so far, which may be a part of a tag.
    pending: String,
    name: String,
    /// The parameters that have begun.
    seen: HashSet<String>,
    value: ValueWriter,
    /// True after the first tag that follows the name.
    has_begun: bool,
    /// The text of the arguments that was not taken.
    fragment: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Before `<function=`.
    Function,
    /// The name of the tool.
    Name,
    /// Between parameters.
    Body,
    /// The value of a parameter.
    Value,
}

/// Whether a value ends before or within a text.
enum ValueEnd {
    /// This many bytes belong to the value.
    No(usize),
    /// The value ends here, with a tag of this many bytes.
    Yes(usize),
    /// More text is needed.
    Unknown,
}

/// Which of several tags a text begins with.
enum Tag {
    Found(&'static str),
    /// The text is the start of a tag.
    Partial,
    Other,
}

impl XmlCall {
    /// Starts after the first of two markers, of which the other ends the call.
    pub fn new(markers: [&'static str; 2], types: ToolTypes) -> Self {
        Self {
            markers,
            types,
            must_be_known: false,
            place: Place::Function,
            pending: String::new(),
            name: String::new(),
            seen: HashSet::new(),
            value: ValueWriter::default(),
            has_begun: false,
            fragment: String::new(),
        }
    }

    /// Starts after a [`FUNCTION`] that no marker is before: a call if the name is that of a tool.
    pub fn unmarked(markers: [&'static str; 2], types: ToolTypes) -> Self {
        Self {
            must_be_known: true,
            place: Place::Name,
            ..Self::new(markers, types)
        }
    }

    /// Adds a character. Returns true if the call has ended before or with it: what follows is
    /// [unread](Self::take_unread).
    pub fn push(&mut self, character: char) -> Result<bool, Malformed> {
        self.pending.push(character);
        loop {
            let goes_on = match self.place {
                Place::Function => self.function()?,
                Place::Name => self.name_step()?,
                Place::Body => match self.body()? {
                    None => return Ok(true),
                    Some(goes_on) => goes_on,
                },
                Place::Value => self.value_step(false),
            };
            if !goes_on {
                return Ok(false);
            }
        }
    }

    /// Ends the answer. Returns true if the call is complete, though tags at its end are missing.
    pub fn finish(&mut self) -> bool {
        if self.place == Place::Value {
            while self.value_step(true) && self.place == Place::Value {}
        }
        if self.place != Place::Body {
            return false;
        }
        let rest = self.pending.trim_start_matches(is_space);
        let is_end = rest.starts_with(FUNCTION_END) || rest.starts_with(self.markers[1]);
        let is_complete = is_end || (rest.is_empty() && self.has_begun);
        if is_complete {
            self.pending.clear();
            self.complete();
        }
        is_complete
    }

    /// Returns the name of the tool, as soon as its arguments have begun.
    pub fn name(&self) -> Option<&str> {
        self.has_begun.then_some(self.name.as_str())
    }

    /// Takes the text of the arguments that came since the last call.
    pub fn take_fragment(&mut self) -> String {
        take(&mut self.fragment)
    }

    /// Takes the end of the text that belongs to no tag and no value.
    pub fn take_unread(&mut self) -> String {
        take(&mut self.pending)
    }

    /// Returns the types of the tool's parameters; `None` if it is unknown.
    fn parameters(&self) -> Option<&ParameterTypes> {
        self.types.parameters(&self.name)
    }

    /// Returns the length of the white space before a tag.
    fn space(&self) -> Result<usize, Malformed> {
        match space(&self.pending) {
            length if length > LONGEST_SPACE => Err(Malformed),
            length => Ok(length),
        }
    }

    /// Takes the text up to `>`, if it is there, after `start` bytes.
    fn take_name(
        &mut self,
        start: usize,
        of_name: impl Fn(char) -> bool,
    ) -> Result<Option<String>, Malformed> {
        let text = &self.pending[start..];
        let end = text.find('>');
        let name = &text[..end.unwrap_or(text.len())];
        let is_empty = name.is_empty() && end.is_some();
        if is_empty || name.len() > LONGEST_NAME || !name.chars().all(of_name) {
            return Err(Malformed);
        }
        let name = name.to_string();
        Ok(end.map(|end| {
            self.pending.drain(..start + end + 1);
            name
        }))
    }

    fn function(&mut self) -> Result<bool, Malformed> {
        let start = self.space()?;
        match tag(&self.pending[start..], &[FUNCTION]) {
            Tag::Found(found) => {
                self.pending.drain(..start + found.len());
                self.place = Place::Name;
                Ok(true)
            }
            Tag::Partial => Ok(false),
            Tag::Other => Err(Malformed),
        }
    }

    fn name_step(&mut self) -> Result<bool, Malformed> {
        // Examples of calls in the text of an answer have names such as `{{ tool.name }}`.
        let of_name = |c: char| !c.is_whitespace() && !"<>{}\"'".contains(c);
        let Some(name) = self.take_name(0, of_name)? else {
            return Ok(false);
        };
        if self.must_be_known && self.types.parameters(&name).is_none() {
            self.pending = format!("{name}>");
            return Err(Malformed);
        }
        self.name = name;
        self.place = Place::Body;
        Ok(true)
    }

    /// Reads a tag between parameters. Returns `None` at the end of the call.
    fn body(&mut self) -> Result<Option<bool>, Malformed> {
        let start = self.space()?;
        match tag(
            &self.pending[start..],
            &[PARAMETER, FUNCTION_END, self.markers[1]],
        ) {
            Tag::Found(PARAMETER) => {
                let of_key = |c: char| !c.is_control() && c != '<';
                let key = self.take_name(start + PARAMETER.len(), of_key)?;
                let goes_on = key.is_some();
                if let Some(key) = key {
                    self.begin_parameter(key);
                }
                Ok(Some(goes_on))
            }
            Tag::Found(found) => {
                self.pending.drain(..start + found.len());
                self.complete();
                Ok(None)
            }
            Tag::Partial => Ok(Some(false)),
            Tag::Other => Err(Malformed),
        }
    }

    fn begin_parameter(&mut self, key: String) {
        let before = if self.begin() { "{" } else { ", " };
        let kind = self.parameters().and_then(|types| types.get(&key).copied());
        let key_text = Value::from(key.as_str()).to_string();
        self.fragment += &format!("{before}{key_text}: ");
        self.value = ValueWriter::new(kind.unwrap_or(ParameterType::Text), &mut self.fragment);
        self.seen.insert(key);
        self.place = Place::Value;
    }

    /// Begins the arguments. Returns true if they had not begun.
    fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.has_begun, true)
    }

    fn complete(&mut self) {
        let end = if self.begin() { "{}" } else { "}" };
        self.fragment += end;
    }

    /// Reads a part of a value. Returns true if there is more to read.
    fn value_step(&mut self, is_last: bool) -> bool {
        match self.value_end(is_last) {
            ValueEnd::No(length) => {
                self.value
                    .write(&self.pending[..length], &mut self.fragment);
                self.pending.drain(..length);
                !self.pending.is_empty()
            }
            ValueEnd::Yes(length) => {
                self.pending.drain(..length);
                take(&mut self.value).end(&mut self.fragment);
                self.place = Place::Body;
                true
            }
            ValueEnd::Unknown => false,
        }
    }

    /// Says whether the value ends with the text that is pending. `is_last` if no text follows.
    fn value_end(&self, is_last: bool) -> ValueEnd {
        let text = self.pending.as_str();
        let next_tag = text.char_indices().skip(1).find(|(_, c)| *c == '<');
        let no = ValueEnd::No(next_tag.map_or(text.len(), |(at, _)| at));
        let [opening, closing] = self.markers;
        let found = match tag(text, &[PARAMETER_END, FUNCTION_END, closing, PARAMETER]) {
            Tag::Found(found) => found,
            Tag::Partial if !text.is_empty() && !is_last => return ValueEnd::Unknown,
            Tag::Partial | Tag::Other => return no,
        };
        let after = &text[found.len()..];
        let (length, followers) = match found {
            PARAMETER if self.value.is_at_line_start() => {
                return match after.find('>') {
                    Some(end) if self.may_begin(&after[..end]) => ValueEnd::Yes(0),
                    None if !is_last && self.may_be_key(after) => ValueEnd::Unknown,
                    _ => no,
                };
            }
            PARAMETER => return no,
            PARAMETER_END => (found.len(), [PARAMETER, FUNCTION_END, closing]),
            FUNCTION_END => (0, [closing; 3]),
            _ => (0, [opening; 3]),
        };
        let space = space(after);
        match tag(&after[space..], &followers) {
            _ if space > LONGEST_SPACE => no,
            Tag::Found(_) => ValueEnd::Yes(length),
            Tag::Partial if !is_last => ValueEnd::Unknown,
            Tag::Partial if space == after.len() => ValueEnd::Yes(length),
            Tag::Partial | Tag::Other => no,
        }
    }

    /// Returns true if a key is that of a parameter of the tool that has not begun.
    fn may_begin(&self, key: &str) -> bool {
        let is_known = self
            .parameters()
            .is_some_and(|types| types.contains_key(key));
        is_known && !self.seen.contains(key)
    }

    /// Returns true if a text is the start of the key of a parameter of the tool.
    fn may_be_key(&self, start: &str) -> bool {
        let from = (Bound::Included(start), Bound::Unbounded);
        let next = self
            .parameters()
            .and_then(|types| types.range::<str, _>(from).next());
        next.is_some_and(|(key, _)| key.starts_with(start))
    }
}

/// Returns the tag that a text begins with.
fn tag(text: &str, tags: &[&'static str]) -> Tag {
    if let Some(tag) = tags.iter().find(|tag| text.starts_with(**tag)) {
        return Tag::Found(tag);
    }
    match tags.iter().any(|tag| tag.starts_with(text)) {
        true => Tag::Partial,
        false => Tag::Other,
    }
}

/// Returns the number of bytes of white space at the start of a text.
fn space(text: &str) -> usize {
    text.len() - text.trim_start_matches(is_space).len()
}

pub(super) fn is_space(character: char) -> bool {
    character.is_ascii_whitespace()
}
