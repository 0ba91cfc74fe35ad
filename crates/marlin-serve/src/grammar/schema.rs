//! Checks of JSON schemas before they are compiled, and the whitespace that texts of them may have.

use serde_json::{Value, json};

use super::GrammarError;

/// The largest common multiple of the `multipleOf` of a grammar, which takes 0.3 s and 30 MB to
/// compile. The lexer of multiples of N has N states, and that of several numbers as many as their
/// least common multiple; all else is bounded while a grammar is compiled.
const MOST: u128 = 100_000;

/// The whitespace between two tokens of JSON: enough for a line break and an indentation. Without a
/// bound, a model that prefers whitespace to what the schema asks for writes it until its tokens
/// are spent.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,64}";

/// Returns the JSON of a schema, with a bound of whitespace.
pub(super) fn read(text: &str) -> Result<Value, GrammarError> {
    let schema = bound_whitespace(serde_json::from_str(text).map_err(GrammarError::Json)?);
    check([&schema])?;
    Ok(schema)
}

/// Returns a Lark grammar with a bound of whitespace in its JSON schemas. What is no JSON is left
/// to the compiler.
pub(super) fn read_lark(text: &str) -> Result<String, GrammarError> {
    const MARK: &str = "%json";
    let (mut schemas, mut bounded) = (Vec::new(), String::new());
    let mut rest = text;
    while let Some(at) = rest.find(MARK) {
        let (before, after) = rest.split_at(at + MARK.len());
        bounded.push_str(before);
        rest = after;
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        if let Some(Ok(schema)) = values.next() {
            let schema = bound_whitespace(schema);
            bounded.push_str(&format!(" {schema}"));
            schemas.push(schema);
            rest = &rest[values.byte_offset()..];
        }
    }
    check(&schemas)?;
    Ok(bounded + rest)
}

/// Bounds the whitespace between tokens of JSON, unless the schema has options of its own for the
/// compiler.
fn bound_whitespace(schema: Value) -> Value {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        schema => schema,
    };
    if let Value::Object(fields) = &mut schema {
        let options = || json!({ "whitespace_pattern": WHITESPACE });
        fields.entry("x-guidance").or_insert_with(options);
    }
    schema
}

fn check<'a>(schemas: impl IntoIterator<Item = &'a Value>) -> Result<(), GrammarError> {
    let mut multiple = 1;
    let mut values: Vec<&Value> = schemas.into_iter().collect();
    while let Some(value) = values.pop() {
        match value {
            Value::Array(items) => values.extend(items),
            Value::Object(fields) => {
                values.extend(fields.values());
                if let Some(Value::Number(number)) = fields.get("multipleOf") {
                    multiple = common_multiple(multiple, coefficient(&number.to_string()));
                }
            }
            _ => {}
        }
        if multiple > MOST {
            let found = "the least common multiple of all `multipleOf`, without decimal points";
            return Err(GrammarError::Refused(format!(
                "{found}, is more than {MOST}: leave some out"
            )));
        }
    }
    Ok(())
}

/// Returns the digits of a number before its exponent, without its sign and point.
fn coefficient(number: &str) -> u128 {
    let mantissa = number.split(['e', 'E']).next().unwrap_or_default();
    let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
    match digits.trim_start_matches('0') {
        "" => 1,
        digits => digits.parse().unwrap_or(u128::MAX),
    }
}

fn common_multiple(a: u128, b: u128) -> u128 {
    let (mut divisor, mut rest) = (a, b);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor).saturating_mul(b)
}
