//! A chat template at work.

use std::collections::BTreeMap;
use std::io;

use marlin_format::with_causes;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, Error, ErrorKind as TemplateErrorKind, context};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};

/// A compiled template.
#[derive(Debug)]
pub(super) struct Template {
    environment: Environment<'static>,
    /// Tokens that it may name, such as `bos_token`.
    special_tokens: BTreeMap<String, String>,
}

/// The template's name in its environment, which messages show.
const NAME: &str = "chat_template";

/// Steps after which a template is assumed to run forever; those of published models need a few hundred for each message. They must end within the time that a
/// template has, on a slow core and without optimisation too: there 10 million took 2.7 of its 4 s, and more than 4 beside other work (AMD EPYC without AVX-512).
const FUEL: u64 = 4_000_000;

impl Template {
    pub fn compile(text: &str, special_tokens: BTreeMap<String, String>) -> Result<Self, String> {
        let error = |error: Error| with_causes(&error);
        let mut environment = Environment::new();
        // As `transformers` sets Jinja up, Python's methods on texts and maps included.
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(error)?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.set_fuel(Some(FUEL));
        environment.add_template_owned(NAME, without_generation_marks(text)).map_err(error)?;
        Ok(Self { environment, special_tokens })
    }

    pub fn render(&self, messages: &[serde_json::Value], add_generation_prompt: bool) -> Result<String, String> {
        let template = self.environment.get_template(NAME).map_err(|error| with_causes(&error))?;
        let tokens = Value::from_pairs(self.special_tokens.iter().map(|(name, token)| (name.as_str(), token.as_str())));
        let messages = Value::from(Serde(messages));
        let rendered = template.render(context! { messages, add_generation_prompt, tools => (), documents => (), ..tokens });
        rendered.map_err(|error| with_causes(&error))
    }
}

/// `{% generation %}` marks what a model is trained on, and renders nothing itself. Jinja's own tags in its place keep the control of whitespace.
fn without_generation_marks(text: &str) -> String {
    let mut replaced = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let word = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        replaced.push_str(before);
        match word {
            "generation" => replaced.push_str(&tag.replace(word, "if true")),
            "endgeneration" => replaced.push_str(&tag.replace(word, "endif")),
            _ => replaced.push_str(tag),
        }
        rest = after;
    }
    replaced.push_str(rest);
    replaced
}

/// The function with which templates refuse a conversation.
fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(TemplateErrorKind::InvalidOperation, message))
}

/// `datetime.now().strftime` of Python.
fn strftime_now(format: &str) -> Result<String, Error> {
    let text = jiff::fmt::strtime::format(format, &jiff::Zoned::now());
    text.map_err(|error| Error::new(TemplateErrorKind::InvalidOperation, format!("strftime_now(`{format}`)")).with_source(error))
}

/// `json.dumps` of Python without escapes: Jinja's own filter escapes HTML. Takes `indent`.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    kwargs.assert_all_used()?;
    let spaces = indent.map(|indent| " ".repeat(indent.min(16)));
    let text = match &spaces {
        Some(spaces) => to_json(value, PrettyFormatter::with_indent(spaces.as_bytes())),
        None => to_json(value, Spaced),
    };
    let text = text.map_err(|error| Error::new(TemplateErrorKind::BadSerialization, "tojson").with_source(error))?;
    Ok(Value::from_safe_string(text))
}

fn to_json(value: &Value, formatter: impl Formatter) -> Result<String, serde_json::Error> {
    let mut bytes = Vec::new();
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Python's separators, `, ` and `: `.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
