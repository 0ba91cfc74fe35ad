//! A JSON writer with the behaviour of Python's `json.dumps`.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::values::float_text;

/// Implements the filter `tojson` of transformers: `json.dumps` with `ensure_ascii` false by
/// default, and without the escapes that Jinja's own filter makes for HTML. Takes `ensure_ascii`,
/// `indent`, `separators` and `sort_keys`, in this order or by name.
pub(super) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    const NAMES: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if args.len() > NAMES.len() {
        return Err(Error::new(ErrorKind::TooManyArguments, "tojson"));
    }
    let mut options: [Value; 4] = Default::default();
    for (index, (option, name)) in options.iter_mut().zip(NAMES).enumerate() {
        *option = match args.get(index) {
            Some(option) => option.clone(),
            None => kwargs.get::<Option<Value>>(name)?.unwrap_or_default(),
        };
    }
    kwargs.assert_all_used()?;
    let [ensure_ascii, indent, separators, sort_keys] = options;
    let indent = match indent.kind() {
        ValueKind::Undefined | ValueKind::None => None,
        ValueKind::String => Some(indent.to_string()),
        _ => Some(" ".repeat(usize::try_from(i64::try_from(indent)?).unwrap_or(0))),
    };
    let separators = match separators.kind() {
        ValueKind::Undefined | ValueKind::None => {
            [if indent.is_some() { "," } else { ", " }, ": "].map(String::from)
        }
        _ => {
            let texts: Vec<String> = separators
                .try_iter()?
                .filter_map(|text| text.as_str().map(String::from))
                .collect();
            texts.try_into().map_err(|_| {
                Error::new(
                    ErrorKind::InvalidOperation,
                    "the separators of tojson are two texts",
                )
            })?
        }
    };
    let mut writer = Writer {
        out: String::new(),
        ensure_ascii: ensure_ascii.is_true(),
        sort_keys: sort_keys.is_true(),
        indent,
        separators,
    };
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct Writer {
    out: String,
    ensure_ascii: bool,
    sort_keys: bool,
    /// The indent of a level; `None` writes everything on one line.
    indent: Option<String>,
    /// The separator between values, and the separator between a key and its value.
    separators: [String; 2],
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::String => self.text(value.as_str().unwrap_or_default()),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                self.out.push_str(&scalar(value))
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let values = value.try_iter()?;
                self.container(['[', ']'], values, depth, |writer, value| {
                    writer.value(&value, depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    let comparable = |pair: &[Value]| pair[0].kind() == pair[1].kind();
                    if !keys.windows(2).all(comparable) {
                        return Err(Error::new(
                            ErrorKind::InvalidOperation,
                            "keys of several types have no order",
                        ));
                    }
                    keys.sort();
                }
                let colon = self.separators[1].clone();
                self.container(['{', '}'], keys.into_iter(), depth, |writer, key| {
                    match key.kind() {
                        ValueKind::String => writer.text(key.as_str().unwrap_or_default()),
                        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                            writer.text(&scalar(&key))
                        }
                        kind => {
                            return Err(Error::new(
                                ErrorKind::BadSerialization,
                                format!("a key of JSON is a text, not a value of type {kind}"),
                            ));
                        }
                    }
                    writer.out.push_str(&colon);
                    writer.value(&value.get_item(&key)?, depth + 1)
                })?;
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::BadSerialization,
                    format!("JSON has no value of type {kind}"),
                ));
            }
        }
        Ok(())
    }

    /// Writes values in brackets, each on a line of its own if there is an indent.
    fn container<T>(
        &mut self,
        [open, close]: [char; 2],
        values: impl Iterator<Item = T>,
        depth: usize,
        write: impl Fn(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        let mut is_empty = true;
        for value in values {
            if !std::mem::take(&mut is_empty) {
                self.out.push_str(&self.separators[0]);
            }
            self.line(depth + 1);
            write(self, value)?;
        }
        if !is_empty {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                ' '..='~' => self.out.push(character),
                _ if character >= ' ' && !self.ensure_ascii => self.out.push(character),
                _ => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
            }
        }
        self.out.push('"');
    }
}

/// Formats a number, a boolean or a null as JSON.
fn scalar(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "null".into(),
        ValueKind::Bool => value.is_true().to_string(),
        _ if value.is_integer() => value.to_string(),
        _ => match f64::try_from(value.clone()) {
            Ok(number) if number.is_nan() => "NaN".into(),
            Ok(number) if number.is_infinite() => if number > 0.0 {
                "Infinity"
            } else {
                "-Infinity"
            }
            .into(),
            Ok(number) => float_text(number),
            Err(_) => value.to_string(),
        },
    }
}
