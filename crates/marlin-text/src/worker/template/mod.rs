//! The chat template that a worker renders.

mod json;
mod methods;
mod source;
mod text;
mod values;

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::io;

use marlin_format::with_causes;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, Error, ErrorKind as TemplateErrorKind, context};

use super::request::Refusal;

/// A compiled template.
#[derive(Debug)]
pub(super) struct Template {
    environment: Environment<'static>,
    /// The names of the special tokens that the template may use, such as `bos_token`, and their
    /// texts.
    special_tokens: BTreeMap<String, String>,
}

/// The template's name in its environment. Error messages show it.
const NAME: &str = "chat_template";

/// The number of steps after which a template is assumed to run forever. Templates of published
/// models need a few hundred steps for each message. The steps must fit in a template's time limit,
/// also on a slow core and without optimisation: there 10 million steps took 2.7 of the 4 s, and
/// more than 4 s beside other work (AMD EPYC without AVX-512).
pub(super) const FUEL: u64 = 4_000_000;

/// The largest number of bytes of a template. Templates of published models have some thousand.
/// Jinja's parser recurses for every operand of an expression, so that the length bounds the depth
/// of its recursion.
pub(super) const MAX_TEMPLATE_BYTES: usize = 256 << 10;

/// The largest number of bytes of a rendered conversation.
pub(super) const MAX_RENDERED_BYTES: usize = 32 << 20;

impl Template {
    pub fn compile(text: &str, special_tokens: BTreeMap<String, String>) -> Result<Self, Refusal> {
        if text.len() > MAX_TEMPLATE_BYTES {
            return Err(Refusal::Length { bytes: text.len() });
        }
        let error = |error: Error| refusal(&error);
        let mut environment = Environment::new();
        // Jinja is set up as in `transformers`, and values behave as in Python.
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .map_err(error)?,
        );
        environment.set_unknown_method_callback(methods::call);
        environment.set_formatter(values::write);
        environment.add_filter("tojson", json::tojson);
        environment.add_filter("string", values::string);
        environment.add_filter("join", values::join);
        environment.add_filter("replace", values::replace);
        environment.add_filter("first", values::first);
        environment.add_filter("last", values::last);
        environment.add_filter("items", values::items);
        environment.add_filter("int", values::int);
        environment.add_filter("float", values::float);
        // Both tests are true for the same values: a loop accepts every value with an index or
        // keys.
        for name in ["sequence", "iterable"] {
            environment.add_test(name, values::is_sequence);
        }
        for name in ["length", "count"] {
            environment.add_filter(name, values::length);
        }
        for name in ["escape", "e"] {
            environment.add_filter(name, values::escape);
        }
        environment.add_filter("forceescape", values::force_escape);
        environment.add_filter(source::MOD, values::modulo);
        environment.add_filter(source::STORE, values::storable);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.set_fuel(Some(FUEL));
        environment
            .add_template_owned(NAME, source::rewritten(text)?)
            .map_err(error)?;
        Ok(Self {
            environment,
            special_tokens,
        })
    }

    pub fn render(
        &self,
        messages: &[serde_json::Value],
        variables: &serde_json::Map<String, serde_json::Value>,
        add_generation_prompt: bool,
    ) -> Result<String, Refusal> {
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| refusal(&error))?;
        let tokens = Value::from_pairs(
            self.special_tokens
                .iter()
                .map(|(name, token)| (name.as_str(), token.as_str())),
        );
        let messages = Value::from(Serde(messages));
        // Of two variables with the same name, the first counts.
        let variables = Value::from(Serde(variables));
        let others =
            context! { ..variables, ..context! { tools => (), documents => (), ..tokens } };
        let context = context! { messages, add_generation_prompt, ..others };
        let mut output = Rendered::default();
        let rendered = template
            .render_captured_to(context, &mut output)
            .map(drop)
            .map_err(|error| refusal(&error));
        if output.is_full {
            return Err(Refusal::Output);
        }
        rendered?;
        String::from_utf8(output.text).map_err(|error| error.to_string().into())
    }
}

/// The text that a template has written, of at most [`MAX_RENDERED_BYTES`].
#[derive(Debug, Default)]
struct Rendered {
    text: Vec<u8>,
    /// True if the template tried to write more than the limit.
    is_full: bool,
}

impl io::Write for Rendered {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > MAX_RENDERED_BYTES - self.text.len() {
            self.is_full = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The cause of an error that stops a template because a value is nested too deeply.
#[derive(Debug, thiserror::Error)]
#[error("a value is nested too deeply")]
struct TooDeep;

/// Returns the refusal for an error of a template.
fn refusal(error: &Error) -> Refusal {
    let first: &(dyn StdError + 'static) = error;
    for cause in std::iter::successors(Some(first), |&cause| cause.source()) {
        if cause.is::<TooDeep>() {
            return Refusal::Nesting;
        }
        let error: Option<&Error> = cause.downcast_ref();
        if error.is_some_and(|error| error.kind() == TemplateErrorKind::OutOfFuel) {
            return Refusal::Steps;
        }
    }
    Refusal::Message(with_causes(error))
}

/// Implements the function `raise_exception`, with which templates refuse a conversation.
fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(TemplateErrorKind::InvalidOperation, message))
}

/// Implements the function `strftime_now`: Python's `datetime.now().strftime`.
fn strftime_now(format: &str) -> Result<String, Error> {
    let text = jiff::fmt::strtime::format(format, &jiff::Zoned::now());
    text.map_err(|error| {
        Error::new(
            TemplateErrorKind::InvalidOperation,
            format!("strftime_now(`{format}`)"),
        )
        .with_source(error)
    })
}

#[cfg(test)]
mod tests;
