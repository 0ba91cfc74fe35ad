//! Grammars of calls as XML.
//!
//! The parameters come in the order of the schema, those that are not required may be left out, and
//! there are no others. A value that is a text keeps to the lengths, the pattern and the
//! alternatives of its schema.

use std::collections::BTreeSet;
use std::fmt::Write;

use marlin_serve::grammar::GrammarSource;
use serde_json::{Map, Value};

use super::grammar::{literal, marker};
use super::types::{ParameterType, alternatives};
use super::xml::{FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END};
use super::{ToolFormat, ToolGrammarError, ToolSchema};

/// The documents of definitions to which references of a schema lead.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// Returns the grammar of an answer that calls one of `tools`, see [`ToolFormat::grammar`].
pub(super) fn grammar(
    format: ToolFormat,
    tools: &[ToolSchema<'_>],
    several: bool,
    token_id: impl Fn(&str) -> Option<u32>,
) -> Result<String, ToolGrammarError> {
    let [open, close] = format.tags().map(|text| marker(text, &token_id));
    let more = if several { r#" ("\n" call)*"# } else { "" };
    let calls: Vec<_> = (0..tools.len())
        .map(|tool| format!("tool_{tool}"))
        .collect();
    // Models of Qwen write a value on lines of its own.
    let (line_break, lines) = match format {
        ToolFormat::SeedOss => ("", " & ~/\\n(?s:.*)/ & ~/(?s:.*)\\n/"),
        _ => ("\n", ""),
    };
    let mut grammar = format!(
        "start: call{more}\ncall: {open} \"\\n\" function \"\\n\" {close}\nfunction: {}\n\
         TEXT: /(?s:.*)/ & ~/(?s:.*)({})(?s:.*)/{lines}\n",
        calls.join(" | "),
        tags(format),
    );
    for (index, tool) in tools.iter().enumerate() {
        let rules = Rules {
            tool,
            schema: tool.schema()?,
            prefix: format!("tool_{index}"),
            line_break,
        };
        rules.write(&mut grammar)?;
    }
    Ok(grammar)
}

/// Returns a regular expression, in the syntax of Lark, for the tags that may end a value.
fn tags(format: ToolFormat) -> String {
    let [open, close] = format.tags();
    [PARAMETER, PARAMETER_END, FUNCTION_END, open, close]
        .map(|tag| tag.replace('/', "\\/"))
        .join("|")
}

/// The rules of the calls of one tool.
struct Rules<'a> {
    tool: &'a ToolSchema<'a>,
    /// The schema of the arguments, an object.
    schema: Value,
    /// The start of the rules' names.
    prefix: String,
    /// What is before and after a value.
    line_break: &'static str,
}

impl Rules<'_> {
    fn write(&self, grammar: &mut String) -> Result<(), ToolGrammarError> {
        let required: BTreeSet<_> = self.schema["required"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let empty = Map::new();
        let properties = self.schema["properties"].as_object().unwrap_or(&empty);
        let any = Value::Bool(true);
        let others = required
            .iter()
            .filter(|name| !properties.contains_key(**name));
        let others = others.map(|name| (*name, &any));
        let all = properties
            .iter()
            .map(|(name, schema)| (name.as_str(), schema));
        let (mut call, mut rules) = (String::new(), String::new());
        for (index, (name, schema)) in all.chain(others).enumerate() {
            let is_required = required.contains(name);
            if !is_name(name) {
                if is_required {
                    return Err(ToolGrammarError::Parameter {
                        tool: self.tool.name.into(),
                        name: name.into(),
                    });
                }
                continue;
            }
            let rule = format!("{}_{index}", self.prefix);
            let optional = if is_required { "" } else { "?" };
            let _ = write!(call, " {rule}{optional}");
            self.parameter(&rule, name, schema, &mut rules);
        }
        let start = literal(&format!("{FUNCTION}{}>\n", self.tool.checked_name()?));
        let _ = write!(
            grammar,
            "{}: {start}{call} \"{FUNCTION_END}\"\n{rules}",
            self.prefix
        );
        Ok(())
    }

    /// Writes the rules of a parameter.
    fn parameter(&self, rule: &str, name: &str, schema: &Value, rules: &mut String) {
        let start = literal(&format!("{PARAMETER}{name}>{}", self.line_break));
        let end = literal(&format!("{}{PARAMETER_END}", self.line_break));
        let (value, attribute) = match ParameterType::of_schema(schema, &self.schema) {
            ParameterType::Json => (format!("%json {}", self.document(schema)), ""),
            ParameterType::Text | ParameterType::NullableText => self.text(schema),
        };
        let _ = match attribute {
            "" => writeln!(
                rules,
                "{rule}: {start} {rule}_value {end} \"\\n\"\n{rule}_value: {value}"
            ),
            attribute => writeln!(
                rules,
                "{rule}: {start} {rule}_value \"\\n\"\n{rule}_value[{attribute}={end}]: {value}"
            ),
        };
    }

    /// Returns the expression of a text, and the attribute that has what ends it.
    fn text(&self, schema: &Value) -> (String, &'static str) {
        let alternatives = alternatives(schema, &self.schema);
        let is_text = |schema: &&Map<String, Value>| {
            let schema = Value::Object((*schema).clone());
            ParameterType::of_schema(&schema, &self.schema) != ParameterType::Json
        };
        let mut texts = alternatives.into_iter().filter(is_text);
        // Of several schemas none is chosen.
        let (Some(schema), None) = (texts.next(), texts.next()) else {
            return ("TEXT".into(), "suffix");
        };
        let values = match (schema.get("enum"), schema.get("const")) {
            (Some(Value::Array(values)), _) => values.as_slice(),
            (_, Some(value)) => std::slice::from_ref(value),
            _ => &[],
        };
        let values = values.iter().filter_map(|value| match value {
            Value::String(text) => Some(literal(text)),
            Value::Null => Some("\"null\"".into()),
            _ => None,
        });
        let values: Vec<_> = values.collect();
        if !values.is_empty() {
            return (values.join(" | "), "");
        }
        let mut text = String::from("TEXT");
        let length = |name: &str| schema.get(name).and_then(Value::as_u64);
        let bounds = (length("minLength"), length("maxLength"));
        if bounds != (None, None) {
            let most = bounds.1.map(|most| most.to_string()).unwrap_or_default();
            let _ = write!(text, " & /(?s:.{{{},{most}}})/", bounds.0.unwrap_or(0));
        }
        if let Some(pattern) = schema.get("pattern").and_then(Value::as_str) {
            let _ = write!(text, " & {}", search(pattern));
        }
        (text, "suffix")
    }

    /// Returns a schema of the document as a document of its own, with the definitions that it may
    /// refer to.
    fn document(&self, schema: &Value) -> Value {
        let mut schema = schema.clone();
        if let Value::Object(fields) = &mut schema {
            for name in DEFINITIONS {
                if let Some(definitions) = self.schema.get(name) {
                    fields.entry(name).or_insert_with(|| definitions.clone());
                }
            }
        }
        schema
    }
}

/// Returns the expression of a text in which a pattern of a JSON schema is found.
fn search(pattern: &str) -> String {
    let (pattern, before) = match pattern.strip_prefix('^') {
        Some(pattern) => (pattern, ""),
        None => (pattern, "(?s:.*)"),
    };
    let is_end = pattern.ends_with('$') && !pattern.ends_with("\\$");
    let (pattern, after) = match pattern.strip_suffix('$').filter(|_| is_end) {
        Some(pattern) => (pattern, ""),
        None => (pattern, "(?s:.*)"),
    };
    GrammarSource::Regex(format!("{before}({pattern}){after}")).lark_expression()
}

/// Returns true if the XML can have a parameter of this name.
fn is_name(name: &str) -> bool {
    let of_name = |c: char| !c.is_control() && !"<>".contains(c);
    (1..=super::xml::LONGEST_NAME).contains(&name.len()) && name.chars().all(of_name)
}
