//! Python's methods of strings, lists and dictionaries, except methods that modify a value, which
//! transformers refuses.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::text;

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Returns the result of `value.name(args)`.
pub(super) fn call(
    _state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let ("format", Some(pattern)) = (name, value.as_str()) {
        return format(FormatStyle::StrFormat, pattern, args).map(Value::from);
    }
    let mut args = Arguments::new(args)?;
    let result = match value.kind() {
        ValueKind::String => of_text(value.as_str().unwrap_or_default(), name, &mut args),
        ValueKind::Seq | ValueKind::Iterable => of_list(value, name, &mut args),
        ValueKind::Map => of_dictionary(value, name, &mut args),
        _ => Err(ErrorKind::UnknownMethod.into()),
    }?;
    args.end(name)?;
    Ok(result)
}

/// The arguments of a call, taken one by one.
struct Arguments {
    positional: std::vec::IntoIter<Value>,
    named: Option<Kwargs>,
}

impl Arguments {
    fn new(args: &[Value]) -> Result<Self, Error> {
        let (positional, named) = match args.split_last() {
            Some((last, positional)) if last.is_kwargs() => {
                (positional, Some(Kwargs::try_from(last.clone())?))
            }
            _ => (args, None),
        };
        Ok(Self {
            positional: Vec::from(positional).into_iter(),
            named,
        })
    }

    /// Returns the next argument; a value of `none` counts as a missing argument.
    fn next(&mut self) -> Option<Value> {
        self.positional.next().filter(|value| !value.is_none())
    }

    /// Returns the next argument, which may also be given by name.
    fn next_or(&mut self, name: &str) -> Result<Option<Value>, Error> {
        match (self.positional.next(), &self.named) {
            (Some(value), _) => Ok(Some(value).filter(|value| !value.is_none())),
            (None, Some(named)) if named.has(name) => named
                .get(name)
                .map(|value: Value| Some(value).filter(|value| !value.is_none())),
            (None, _) => Ok(None),
        }
    }

    fn text(&mut self) -> Result<String, Error> {
        as_text(self.positional.next())
    }

    fn integer(&mut self) -> Result<Option<i64>, Error> {
        self.next().map(i64::try_from).transpose()
    }

    /// Returns the start and end arguments as a range within `length` values, as in a slice.
    fn bounds(&mut self, length: usize) -> Result<std::ops::Range<usize>, Error> {
        let clipped = |bound: i64| {
            let distance = usize::try_from(bound.unsigned_abs()).unwrap_or(usize::MAX);
            if bound < 0 {
                length.saturating_sub(distance)
            } else {
                distance
            }
        };
        let start = self.integer()?.map_or(0, clipped);
        let end = self.integer()?.map_or(length, clipped);
        Ok(start..end.min(length))
    }

    fn end(mut self, name: &str) -> Result<(), Error> {
        if self.positional.next().is_some() {
            return Err(Error::new(
                ErrorKind::TooManyArguments,
                format!("{name}() has too many arguments"),
            ));
        }
        self.named.map_or(Ok(()), |named| named.assert_all_used())
    }
}

fn as_text(value: Option<Value>) -> Result<String, Error> {
    let value = value.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
    value.as_str().map(String::from).ok_or_else(|| {
        invalid(format!(
            "a text is needed, not a value of type {}",
            value.kind()
        ))
    })
}

fn list<T: Into<Value>>(values: impl IntoIterator<Item = T>) -> Value {
    Value::from(values.into_iter().map(Into::into).collect::<Vec<Value>>())
}

fn of_text(value: &str, name: &str, args: &mut Arguments) -> Result<Value, Error> {
    let length = || value.chars().count();
    Ok(match name {
        "upper" => value.to_uppercase().into(),
        "lower" => value.to_lowercase().into(),
        "casefold" => text::casefold(value).into(),
        "title" => text::title(value).into(),
        "capitalize" => text::capitalize(value).into(),
        "swapcase" => text::swapcase(value).into(),
        "strip" | "lstrip" | "rstrip" => {
            let characters = args.next().map(|value| as_text(Some(value))).transpose()?;
            let stripped = |character: char| {
                characters
                    .as_ref()
                    .map_or(text::is_space(character), |stripped| {
                        stripped.contains(character)
                    })
            };
            let value = if name == "rstrip" {
                value
            } else {
                value.trim_start_matches(stripped)
            };
            if name == "lstrip" {
                value
            } else {
                value.trim_end_matches(stripped)
            }
            .into()
        }
        "removeprefix" => value
            .strip_prefix(args.text()?.as_str())
            .unwrap_or(value)
            .into(),
        "removesuffix" => value
            .strip_suffix(args.text()?.as_str())
            .unwrap_or(value)
            .into(),
        "split" | "rsplit" => {
            let separator = args
                .next_or("sep")?
                .map(|value| as_text(Some(value)))
                .transpose()?;
            let most = args.next_or("maxsplit")?.map(i64::try_from).transpose()?;
            let most = most
                .and_then(|most| usize::try_from(most).ok())
                .unwrap_or(usize::MAX - 1);
            list(match (separator.as_deref(), name) {
                (Some(""), _) => return Err(invalid("an empty separator")),
                (Some(separator), "split") => value.splitn(most + 1, separator).collect(),
                (Some(separator), _) => {
                    let mut parts: Vec<&str> = value.rsplitn(most + 1, separator).collect();
                    parts.reverse();
                    parts
                }
                (None, "split") => text::split_spaces(value, most),
                (None, _) => text::rsplit_spaces(value, most),
            })
        }
        "partition" | "rpartition" => {
            let separator = args.text()?;
            if separator.is_empty() {
                return Err(invalid("an empty separator"));
            }
            let parts = match name {
                "partition" => value
                    .split_once(&separator)
                    .map_or([value, "", ""], |(before, after)| {
                        [before, &separator, after]
                    }),
                _ => value
                    .rsplit_once(&separator)
                    .map_or(["", "", value], |(before, after)| {
                        [before, &separator, after]
                    }),
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "splitlines" => list(text::lines(
            value,
            args.next_or("keepends")?.is_some_and(|keep| keep.is_true()),
        )),
        "join" => {
            let values = args
                .positional
                .next()
                .ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            let texts = values
                .try_iter()?
                .map(|value| as_text(Some(value)))
                .collect::<Result<Vec<String>, Error>>()?;
            texts.join(value).into()
        }
        "replace" => {
            let (old, new, most) = (args.text()?, args.text()?, args.integer()?);
            match most.and_then(|most| usize::try_from(most).ok()) {
                Some(most) => value.replacen(&old, &new, most).into(),
                None => value.replace(&old, &new).into(),
            }
        }
        "find" | "rfind" | "index" | "rindex" => {
            let (part, bounds) = (args.text()?, args.bounds(length())?);
            match (
                text::find(value, &part, bounds, name.starts_with('r')),
                name,
            ) {
                (Some(at), _) => at.into(),
                (None, "find" | "rfind") => (-1).into(),
                (None, _) => return Err(invalid("the text does not contain this one")),
            }
        }
        "count" => {
            let (part, bounds) = (args.text()?, args.bounds(length())?);
            text::part(value, bounds)
                .map_or(0, |value| value.matches(part.as_str()).count())
                .into()
        }
        "startswith" | "endswith" => {
            let affix = args
                .positional
                .next()
                .ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            let affixes = if affix.is_tuple() {
                affix.try_iter()?.map(Some).collect()
            } else {
                vec![Some(affix)]
            };
            let affixes = affixes
                .into_iter()
                .map(as_text)
                .collect::<Result<Vec<String>, Error>>()?;
            let part = text::part(value, args.bounds(length())?);
            let is_there = |value: &str| {
                affixes.iter().any(|affix| {
                    if name == "endswith" {
                        value.ends_with(affix)
                    } else {
                        value.starts_with(affix)
                    }
                })
            };
            part.is_some_and(is_there).into()
        }
        "center" | "ljust" | "rjust" => {
            let width = args
                .integer()?
                .ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            let fill = args
                .positional
                .next()
                .map_or(Ok(" ".into()), |fill| as_text(Some(fill)))?;
            let mut characters = fill.chars();
            let (Some(fill), None) = (characters.next(), characters.next()) else {
                return Err(invalid("one character fills"));
            };
            text::justify(value, usize::try_from(width).unwrap_or(0), fill, name).into()
        }
        "zfill" => {
            let width = args
                .integer()?
                .ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            let (sign, digits) = value.split_at(usize::from(value.starts_with(['-', '+'])));
            let width = usize::try_from(width)
                .unwrap_or(0)
                .saturating_sub(sign.len());
            format!("{sign}{}", text::justify(digits, width, '0', "rjust")).into()
        }
        "expandtabs" => {
            let size = args.next_or("tabsize")?.map_or(Ok(8), i64::try_from)?;
            text::expand_tabs(value, usize::try_from(size).unwrap_or(0)).into()
        }
        "format_map" => {
            let values = args
                .positional
                .next()
                .ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            let names = values
                .try_iter()?
                .filter_map(|key| Some((key.as_str()?.to_string(), values.get_item(&key).ok()?)));
            format(
                FormatStyle::StrFormat,
                value,
                &[Value::from(names.collect::<Kwargs>())],
            )?
            .into()
        }
        _ => text::is(value, name)
            .ok_or_else(|| Error::from(ErrorKind::UnknownMethod))?
            .into(),
    })
}

fn of_list(value: &Value, name: &str, args: &mut Arguments) -> Result<Value, Error> {
    let values: Vec<Value> = value.try_iter()?.collect();
    match name {
        "count" => {
            let item = args
                .positional
                .next()
                .ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            Ok(values.iter().filter(|value| **value == item).count().into())
        }
        "index" => {
            let item = args
                .positional
                .next()
                .ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            let bounds = args.bounds(values.len())?;
            let found = bounds.into_iter().find(|&at| values[at] == item);
            found
                .map(Value::from)
                .ok_or_else(|| invalid("the list does not contain this value"))
        }
        "copy" if !value.is_tuple() => Ok(values.into()),
        _ => Err(ErrorKind::UnknownMethod.into()),
    }
}

fn of_dictionary(value: &Value, name: &str, args: &mut Arguments) -> Result<Value, Error> {
    let keys = || value.try_iter();
    match name {
        "keys" => Ok(list(keys()?)),
        "values" => Ok(keys()?
            .map(|key| value.get_item(&key))
            .collect::<Result<Vec<Value>, Error>>()?
            .into()),
        "items" => {
            let items = keys()?.map(|key| {
                Ok(Value::from(Tuple::from([
                    key.clone(),
                    value.get_item(&key)?,
                ])))
            });
            Ok(items.collect::<Result<Vec<Value>, Error>>()?.into())
        }
        "get" => {
            let key = args
                .positional
                .next()
                .ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            let default = args.positional.next().unwrap_or(Value::from(()));
            let found = value.get_item(&key)?;
            Ok(if found.is_undefined() { default } else { found })
        }
        "copy" => Ok(Value::from_pairs(
            keys()?
                .map(|key| Ok((key.clone(), value.get_item(&key)?)))
                .collect::<Result<Vec<_>, Error>>()?,
        )),
        _ => Err(ErrorKind::UnknownMethod.into()),
    }
}
