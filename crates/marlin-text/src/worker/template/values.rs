//! Filters, and the formatting of values, as in Python where minijinja differs.

use std::fmt::Write;
use std::sync::LazyLock;

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value, filters, functions};

use super::TooDeep;

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Returns Python's `str` of a float: the shortest digits that are read back as the same number,
/// with an exponent below 0.0001 and from 1e16 on.
pub(super) fn float_text(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.into();
    }
    // Rust's `Debug` has the same digits and the same limits; it writes exponents as `1e16` and
    // `1e-5`.
    let text = format!("{number:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent
                .strip_prefix('-')
                .map_or(('+', exponent), |exponent| ('-', exponent));
            format!("{digits}e{sign}{exponent:0>2}")
        }
    }
}

/// Returns Python's `str` of a value.
pub(super) fn text(value: &Value) -> String {
    match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => repr(value),
        _ => value.to_string(),
    }
}

/// Returns Python's `repr` of a value.
fn repr(value: &Value) -> String {
    match value.kind() {
        ValueKind::Number if !value.is_integer() => {
            f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float_text)
        }
        ValueKind::Undefined => "Undefined".into(),
        ValueKind::Seq | ValueKind::Iterable => {
            let values: Vec<String> = value
                .try_iter()
                .into_iter()
                .flatten()
                .map(|value| repr(&value))
                .collect();
            match (value.is_tuple(), values.len()) {
                (true, 1) => format!("({},)", values[0]),
                (true, _) => format!("({})", values.join(", ")),
                (false, _) => format!("[{}]", values.join(", ")),
            }
        }
        ValueKind::Map => {
            let mut out = String::from("{");
            for key in value.try_iter().into_iter().flatten() {
                let separator = if out.len() > 1 { ", " } else { "" };
                let inner = value.get_item(&key).unwrap_or_default();
                // Writing to a string does not fail.
                let _ = write!(out, "{separator}{}: {}", repr(&key), repr(&inner));
            }
            out + "}"
        }
        _ => format!("{value:?}"),
    }
}

/// Writes the value of a `{{ .. }}`.
pub(super) fn write(
    out: &mut Output<'_>,
    _state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&text(value)),
    };
    written.map_err(|error| Error::new(ErrorKind::WriteFailure, error.to_string()))
}

/// The largest depth of a value that is assigned to an attribute of a namespace.
const MOST_LEVELS: usize = 100;

/// Implements the filter through which a value goes that is assigned to an attribute of a
/// namespace. Returns the value unchanged.
///
/// Only such an assignment can nest values once more in every step of a loop, or make a value
/// contain itself. A value that is nested too deeply, or that contains a namespace, is an error.
pub(super) fn storable(value: Value) -> Result<Value, Error> {
    if is_storable(&value, MOST_LEVELS) {
        Ok(value)
    } else {
        Err(invalid("a namespace cannot hold this value").with_source(TooDeep))
    }
}

fn is_storable(value: &Value, levels: usize) -> bool {
    /// The name of the type of namespaces, which minijinja does not export.
    static NAMESPACE: LazyLock<Option<&str>> = LazyLock::new(|| {
        let namespace = functions::namespace(None).ok()?;
        namespace.as_object().map(|object| object.type_name())
    });
    let Some(object) = value.as_object() else {
        return true;
    };
    let within = |value: &Value| levels > 0 && is_storable(value, levels - 1);
    match value.kind() {
        _ if Some(object.type_name()) == *NAMESPACE => false,
        ValueKind::Seq | ValueKind::Iterable => value
            .try_iter()
            .into_iter()
            .flatten()
            .all(|value| within(&value)),
        ValueKind::Map => value
            .try_iter()
            .into_iter()
            .flatten()
            .all(|key| within(&key) && value.get_item(&key).is_ok_and(|inner| within(&inner))),
        _ => true,
    }
}

/// Implements the filter `string`.
pub(super) fn string(value: &Value) -> Value {
    if value.as_str().is_some() {
        value.clone()
    } else {
        text(value).into()
    }
}

/// Implements the filters `length` and `count`. An undefined value has a length of 0.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        kind => value
            .len()
            .ok_or_else(|| invalid(format!("a value of type {kind} has no length"))),
    }
}

/// Implements the filter `first`.
pub(super) fn first(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        Ok(Value::UNDEFINED)
    } else {
        filters::first(value)
    }
}

/// Implements the filter `last`.
pub(super) fn last(value: Value) -> Result<Value, Error> {
    if value.is_undefined() {
        Ok(Value::UNDEFINED)
    } else {
        filters::last(value)
    }
}

/// Implements the filter `items`. An undefined value has no items.
pub(super) fn items(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        Ok(Value::from(Vec::<Value>::new()))
    } else {
        filters::items(value)
    }
}

/// Implements the filter `join`.
pub(super) fn join(
    values: &Value,
    separator: Option<String>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let separator = match separator {
        Some(separator) => separator,
        None => kwargs.get::<Option<String>>("d")?.unwrap_or_default(),
    };
    let attribute: Option<Value> = kwargs.get("attribute")?;
    kwargs.assert_all_used()?;
    let texts: Result<Vec<String>, Error> = values
        .try_iter()?
        .map(|value| match &attribute {
            Some(attribute) => Ok(text(&value.get_item(attribute)?)),
            None => Ok(text(&value)),
        })
        .collect();
    Ok(texts?.join(&separator))
}

/// Implements the filter `replace`, for all occurrences or the first `count`.
pub(super) fn replace(value: &Value, old: String, new: String, count: Option<i64>) -> String {
    match count.and_then(|count| usize::try_from(count).ok()) {
        Some(count) => text(value).replacen(&old, &new, count),
        None => text(value).replace(&old, &new),
    }
}

/// Implements the filter `int`. A value that is not a number becomes the default.
pub(super) fn int(
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let default = default
        .or(kwargs.get("default")?)
        .unwrap_or_else(|| 0.into());
    let base = base
        .or(kwargs.get("base")?)
        .filter(|base| (2..=36).contains(base))
        .unwrap_or(10);
    kwargs.assert_all_used()?;
    let whole = |number: f64| {
        if number.is_finite() {
            Value::from(number.trunc() as i128)
        } else {
            default.clone()
        }
    };
    Ok(match value.kind() {
        ValueKind::Undefined => return Err(Error::from(ErrorKind::UndefinedError)),
        ValueKind::Bool => i64::from(value.is_true()).into(),
        ValueKind::Number if value.is_integer() => value.clone(),
        ValueKind::Number => f64::try_from(value.clone()).map_or(default.clone(), whole),
        ValueKind::String => {
            let text = value
                .as_str()
                .unwrap_or_default()
                .trim()
                .replace('_', "")
                .to_lowercase();
            let prefix = match base {
                2 => "0b",
                8 => "0o",
                16 => "0x",
                _ => "",
            };
            match i128::from_str_radix(text.strip_prefix(prefix).unwrap_or(&text), base) {
                Ok(number) => i64::try_from(number).map_or_else(|_| number.into(), Value::from),
                Err(_) => text.parse().map_or(default.clone(), whole),
            }
        }
        _ => default,
    })
}

/// Implements the filter `float`. A value that is not a number becomes the default.
pub(super) fn float(value: &Value, default: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let default = default
        .or(kwargs.get("default")?)
        .unwrap_or_else(|| 0.0.into());
    kwargs.assert_all_used()?;
    Ok(match value.kind() {
        ValueKind::Undefined => return Err(Error::from(ErrorKind::UndefinedError)),
        ValueKind::Bool | ValueKind::Number => {
            f64::try_from(value.clone()).map_or(default, Value::from)
        }
        ValueKind::String => value
            .as_str()
            .unwrap_or_default()
            .trim()
            .parse::<f64>()
            .map_or(default, Value::from),
        _ => default,
    })
}

/// Implements the tests `sequence` and `iterable`, which are true also for an undefined value.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::String
            | ValueKind::Seq
            | ValueKind::Iterable
            | ValueKind::Map
            | ValueKind::Undefined
    )
}

/// Implements the filters `escape` and `e`. Values that are already safe stay unchanged.
pub(super) fn escape(value: &Value) -> Value {
    if value.is_safe() {
        value.clone()
    } else {
        force_escape(value)
    }
}

/// Implements the filter `forceescape`.
pub(super) fn force_escape(value: &Value) -> Value {
    let mut escaped = String::new();
    for character in text(value).chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\'' => escaped.push_str("&#39;"),
            '"' => escaped.push_str("&#34;"),
            _ => escaped.push(character),
        }
    }
    Value::from_safe_string(escaped)
}

/// Implements the operator `%`: the remainder of numbers, or the formatting of a string.
pub(super) fn modulo(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(pattern) = left.as_str() {
        return formatted(pattern, right).map(Value::from);
    }
    let is_number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    let is_float = |value: &Value| value.kind() == ValueKind::Number && !value.is_integer();
    if !is_number(left) || !is_number(right) {
        return Err(invalid(format!(
            "% is not for values of type {} and {}",
            left.kind(),
            right.kind()
        )));
    }
    if is_float(left) || is_float(right) {
        let (dividend, divisor) = (f64::try_from(left.clone())?, f64::try_from(right.clone())?);
        if divisor == 0.0 {
            return Err(invalid("the remainder of a division by 0"));
        }
        let rest = dividend % divisor;
        // The result has the sign of the divisor.
        let rest = if rest == 0.0 {
            0.0_f64.copysign(divisor)
        } else if (rest < 0.0) == (divisor < 0.0) {
            rest
        } else {
            rest + divisor
        };
        return Ok(rest.into());
    }
    let (dividend, divisor) = (
        i128::try_from(left.clone())?,
        i128::try_from(right.clone())?,
    );
    let rest = dividend
        .checked_rem(divisor)
        .ok_or_else(|| invalid("the remainder of a division by 0"))?;
    let rest = if rest != 0 && (rest < 0) != (divisor < 0) {
        rest + divisor
    } else {
        rest
    };
    Ok(i64::try_from(rest).map_or_else(|_| rest.into(), Value::from))
}

/// Formats a string with the values on the right side of `%`: the elements of a tuple, or a single
/// value.
fn formatted(pattern: &str, values: &Value) -> Result<String, Error> {
    let values: Vec<Value> = if values.is_tuple() {
        values.try_iter()?.collect()
    } else {
        vec![values.clone()]
    };
    let takes_all = match values.split_last() {
        None => true,
        Some((last, before)) => {
            last.kind() == ValueKind::Map || format(FormatStyle::Printf, pattern, before).is_err()
        }
    };
    let text = format(FormatStyle::Printf, pattern, &values)?;
    if takes_all {
        Ok(text)
    } else {
        Err(invalid("not all values of % are in the text"))
    }
}
