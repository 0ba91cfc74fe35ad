//! The JSON of a parameter's value, from the text of a call as XML.

use std::mem::take;

use serde_json::Value;

use super::types::ParameterType;
use super::xml::is_space;

/// The most bytes of a text that stands for `null`.
const LONGEST_NULL: usize = 4;

/// Writes the value of a parameter as JSON.
pub(super) struct ValueWriter {
    kind: ParameterType,
    /// The text so far, unless it is given out at once.
    text: String,
    /// True until the value has text, or a line break that is no part of it.
    is_start: bool,
    has_text: bool,
    /// True if a line break comes next, which belongs to the value unless the value ends.
    line_break: bool,
}

impl Default for ValueWriter {
    fn default() -> Self {
        Self {
            kind: ParameterType::Json,
            text: String::new(),
            is_start: true,
            has_text: false,
            line_break: false,
        }
    }
}

impl ValueWriter {
    /// Begins a value. `json` is what its JSON is written to.
    pub fn new(kind: ParameterType, json: &mut String) -> Self {
        if kind == ParameterType::Text {
            json.push('"');
        }
        Self {
            kind,
            ..Self::default()
        }
    }

    /// Returns true if the text that comes next is at the start of a line.
    pub fn is_at_line_start(&self) -> bool {
        self.line_break || !self.has_text
    }

    /// Adds text to the value.
    pub fn write(&mut self, text: &str, json: &mut String) {
        for character in text.chars() {
            if take(&mut self.is_start) && character == '\n' {
                continue;
            }
            self.has_text = true;
            if std::mem::replace(&mut self.line_break, character == '\n') {
                self.push('\n', json);
            }
            if character != '\n' {
                self.push(character, json);
            }
        }
    }

    fn push(&mut self, character: char, json: &mut String) {
        if self.kind == ParameterType::Text {
            return escape(character, json);
        }
        self.text.push(character);
        if self.kind == ParameterType::NullableText && self.text.len() > LONGEST_NULL {
            self.kind = ParameterType::Text;
            json.push('"');
            take(&mut self.text)
                .chars()
                .for_each(|character| escape(character, json));
        }
    }

    /// Ends the value.
    pub fn end(self, json: &mut String) {
        match self.kind {
            ParameterType::Text => json.push('"'),
            ParameterType::NullableText if is_null(&self.text) => *json += "null",
            ParameterType::NullableText => *json += &Value::from(self.text).to_string(),
            ParameterType::Json => *json += &value(self.text),
        }
    }
}

/// Returns the JSON that a text is, or that stands for it.
fn value(text: String) -> String {
    let json = text.trim_matches(is_space);
    if serde_json::from_str::<Value>(json).is_ok() {
        return json.into();
    }
    // Templates that print values as Python does teach models to do so.
    for name in ["true", "false"] {
        if json.eq_ignore_ascii_case(name) {
            return name.into();
        }
    }
    match is_null(json) {
        true => "null".into(),
        false => Value::from(text).to_string(),
    }
}

fn is_null(text: &str) -> bool {
    text.eq_ignore_ascii_case("null") || text.eq_ignore_ascii_case("none")
}

/// Writes a character of a string of JSON.
fn escape(character: char, json: &mut String) {
    match character {
        '"' => *json += "\\\"",
        '\\' => *json += "\\\\",
        '\n' => *json += "\\n",
        '\r' => *json += "\\r",
        '\t' => *json += "\\t",
        '\0'..' ' => *json += &format!("\\u{:04x}", u32::from(character)),
        _ => json.push(character),
    }
}
