//! The records of `benches/records`: their rows and numbers.

use crate::process::{Error, root};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fs;

#[derive(Deserialize)]
struct Record<Row> {
    rows: Vec<Row>,
}

/// Returns the text of a record.
pub fn text(file: &str) -> Result<String, Error> {
    let path = root().join("benches/records").join(file);
    fs::read_to_string(&path).map_err(Error::file(&path))
}

/// Parses a record in JSON.
pub fn parse<T: DeserializeOwned>(file: &str) -> Result<T, Error> {
    serde_json::from_str(&text(file)?)
        .map_err(|error| Error::Needs(format!("benches/records/{file}: {error}")))
}

/// Returns the rows of the record `name`, which `cargo xtask bench` wrote.
pub fn rows<Row: DeserializeOwned>(name: &str) -> Result<Vec<Row>, Error> {
    Ok(parse::<Record<Row>>(&format!("{name}.json"))?.rows)
}

/// Returns the words of the first line of a log whose first words are `start`.
pub fn line<'a>(log: &'a str, start: &[&str]) -> Option<Vec<&'a str>> {
    log.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.starts_with(start).then_some(words)
    })
}

/// Returns the tokens per second of decode that a log has of a model.
pub fn decode_of_log(log: &str, model: &str, weights: &str, batch: usize) -> Option<f64> {
    let words = line(log, &[model, weights, &batch.to_string()])?;
    // Before the last two columns, the read rate and its fraction.
    words.get(words.len().checked_sub(3)?)?.parse().ok()
}

/// Returns the numbers of the rows of a record that `row` selects.
///
/// In a log they are the lines that contain `row`, with any space between its words. In JSON they
/// are the objects that have all fields of `row`, which has the form `model=llama-2-7b, batch=1`;
/// only their own fields count, not those of objects in them.
pub fn numbers(file: &str, row: &str) -> Result<Vec<f64>, Error> {
    let mut found = Vec::new();
    if file.ends_with(".json") {
        let fields: Vec<(&str, &str)> = row
            .split(", ")
            .filter_map(|field| field.split_once('='))
            .collect();
        numbers_of_objects(&parse(file)?, &fields, &mut found);
    } else {
        let row = row.split_whitespace().collect::<Vec<_>>().join(" ");
        for line in text(file)?.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            if words.join(" ").contains(&row) {
                found.extend(words.iter().filter_map(|word| number(word)));
            }
        }
    }
    if found.is_empty() {
        return Err(Error::Needs(format!(
            "benches/records/{file} has no row with numbers for `{row}`"
        )));
    }
    Ok(found)
}

fn numbers_of_objects(value: &Value, fields: &[(&str, &str)], found: &mut Vec<f64>) {
    match value {
        Value::Object(object) => {
            let is_selected = fields.iter().all(|(name, wanted)| {
                object.get(*name).is_some_and(|value| match value {
                    Value::String(text) => text == wanted,
                    other => format!("{other}") == *wanted,
                })
            });
            if is_selected && !fields.is_empty() {
                found.extend(object.values().filter_map(Value::as_f64));
            }
            for value in object.values() {
                numbers_of_objects(value, fields, found);
            }
        }
        Value::Array(values) => {
            for value in values {
                numbers_of_objects(value, fields, found);
            }
        }
        _ => {}
    }
}

/// Returns the number that a word is, without the punctuation around it: `16,210` and `(+5.4` and
/// `20.0%,` are numbers, `4-bit`, `2:4` and `0.22.1` are not.
pub fn number(word: &str) -> Option<f64> {
    let word = word.trim_matches(|c: char| "()[],.;:%\"".contains(c));
    let digits = word.strip_prefix(['+', '-']).unwrap_or(word);
    let is_number = digits.starts_with(|c: char| c.is_ascii_digit())
        && digits
            .chars()
            .all(|c| c.is_ascii_digit() || c == ',' || c == '.');
    if !is_number {
        return None;
    }
    word.replace(',', "").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{number, numbers_of_objects};
    use serde_json::json;

    #[test]
    fn numbers_stand_alone() {
        for (word, expected) in [
            ("16,210", 16210.0),
            ("(+5.4", 5.4),
            ("20.0%,", 20.0),
            ("-0.01", -0.01),
            ("64.", 64.0),
        ] {
            assert_eq!(number(word), Some(expected), "{word}");
        }
        for word in ["4-bit", "2:4", "0.22.1", "W4A16", "H200", "–", "%", "-"] {
            assert_eq!(number(word), None, "{word}");
        }
    }

    #[test]
    fn objects_are_selected_by_all_fields() {
        let record = json!({ "rows": [
            { "batch": 1, "weights": "f16", "us": 2.5, "parts": { "us": 9.0 } },
            { "batch": 2, "weights": "f16", "us": 3.5 },
        ] });
        let mut found = Vec::new();
        numbers_of_objects(&record, &[("weights", "f16"), ("batch", "1")], &mut found);
        found.sort_by(f64::total_cmp);
        assert_eq!(found, [1.0, 2.5]);
    }
}
