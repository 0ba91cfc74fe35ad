//! The tables of mixtures of experts.

use super::records::{decode_of_log, line, rows, text};
use super::{Decode, Prompts, by_number};
use crate::process::Error;

/// The titles of the models with their names in records.
const MODELS: [(&str, &str); 3] = [
    ("Qwen3-30B-A3B", "qwen3-30b-a3b"),
    ("Mixtral 8x7B", "mixtral-8x7b"),
    ("gpt-oss-20b", "gpt-oss-20b"),
];
const LOG: &str = "moe-tiles-h200.log";
const BATCHES: [usize; 4] = [1, 4, 16, 64];

/// A number with three digits, or with all that it has before the point.
fn three_digits(number: f64) -> String {
    match number {
        ..99.95 => format!("{number:.1}"),
        _ => format!("{number:.0}"),
    }
}

/// A cell of a number that a run may lack.
fn cell(number: Option<f64>) -> String {
    number.map_or_else(|| "–".into(), three_digits)
}

/// The columns of a line of a layer in the log of tiles.
fn layer(log: &str, model: &str, tokens: usize) -> [Option<f64>; 3] {
    let words = line(log, &[model, &tokens.to_string()]).unwrap_or_default();
    let is_layer = words
        .get(2)
        .is_some_and(|cell| *cell == "-" || cell.parse::<f64>().is_ok());
    // Layer, matmuls and floor, among the columns of the router, the routing and the sums.
    [2, 5, 7].map(|column| words.get(column).filter(|_| is_layer)?.parse().ok())
}

/// The times of layers, and of reading the bytes of their experts, in microseconds.
pub fn layers() -> Result<String, Error> {
    let log = text(LOG)?;
    let mut lines = by_number("tokens", &BATCHES);
    for ((title, model), experts) in MODELS.into_iter().zip([
        "128 experts, 8 active",
        "8 experts, 2 active",
        "32 experts, 4 active",
    ]) {
        let found = BATCHES.map(|tokens| layer(&log, model, tokens));
        for (label, column) in [(format!("{title} ({experts})"), 0), ("bytes".into(), 2)] {
            let cells = found.map(|columns| cell(columns[column]));
            lines.push(format!("| {label} | {} |", cells.join(" | ")));
        }
    }
    Ok(lines.join("\n"))
}

/// The times of both matmuls of layers, beside those of other programs, in microseconds.
pub fn matmuls() -> Result<String, Error> {
    const TOKENS: [usize; 4] = [64, 256, 1024, 4096];
    let log = text(LOG)?;
    let other = |start: &[&str]| -> Option<f64> {
        let words = line(&log, start)?;
        let place = words.iter().position(|word| *word == "matmuls")?;
        words.get(place + 1)?.parse().ok()
    };
    let mut lines = by_number("tokens", &TOKENS);
    for ((title, model), values) in MODELS.into_iter().zip(["int4", "int4", "mxfp4"]) {
        let mut line = |label: &str, of_tokens: &dyn Fn(usize) -> Option<f64>| {
            let cells = TOKENS.map(|tokens| cell(of_tokens(tokens)));
            lines.push(format!("| {label} | {} |", cells.join(" | ")));
        };
        line(title, &|tokens| layer(&log, model, tokens)[1]);
        line("Humming", &|tokens| {
            let tokens = tokens.to_string();
            other(&[model, values, "tokens", &tokens, "humming"])
        });
        line("`_grouped_mm`", &|tokens| {
            other(&[model, &tokens.to_string(), "grouped_mm"])
        });
    }
    Ok(lines.join("\n"))
}

/// The tokens per second of decode of Qwen3-30B-A3B, of all sequences together.
pub fn decode_of_qwen() -> Result<String, Error> {
    let found = rows::<Decode>("decode-qwen3-30b-a3b-h200")?;
    let mut lines = by_number("sequences", &BATCHES);
    let cells = BATCHES.map(|batch| {
        let row = found.iter().find(|row| row.batch == batch);
        row.map_or_else(|| "–".into(), |row| format!("{:.0}", row.tokens_per_second))
    });
    lines.push(format!("| tokens per second | {} |", cells.join(" | ")));
    Ok(lines.join("\n"))
}

/// The tokens per second of decode of gpt-oss, of all sequences together: of the 20b with few
/// sequences from the logs of later kernels.
pub fn decode_of_gpt_oss() -> Result<String, Error> {
    let found = rows::<Decode>("decode-gpt-oss-h200")?;
    let of_record = |model: &str, batch: usize| {
        let row = found
            .iter()
            .find(|row| row.model == model && row.batch == batch);
        Some(row?.tokens_per_second)
    };
    let logs = [(1, LOG), (4, "moe-rows-h200.log")];
    let mut lines = by_number("sequences", &BATCHES);
    for model in ["gpt-oss-20b", "gpt-oss-120b"] {
        let mut cells = Vec::new();
        for batch in BATCHES {
            let log = logs.into_iter().find(|(of_batch, _)| *of_batch == batch);
            let tokens = match log {
                Some((_, log)) if model == "gpt-oss-20b" => {
                    decode_of_log(&text(log)?, model, "mxfp4", batch)
                }
                _ => of_record(model, batch),
            };
            cells.push(tokens.map_or_else(|| "–".into(), |tokens| format!("{tokens:.0}")));
        }
        let cells = cells.join(" | ");
        lines.push(format!("| {model}, tokens per second | {cells} |"));
    }
    Ok(lines.join("\n"))
}

/// The times to the first token of one prompt, in milliseconds.
pub fn prompts() -> Result<String, Error> {
    const TOKENS: [usize; 3] = [64, 1024, 4000];
    let mut lines = by_number("tokens of a prompt", &TOKENS);
    for (title, name) in [
        ("Qwen3-30B-A3B, ms", "prompts-qwen3-30b-a3b-h200"),
        ("gpt-oss-20b, ms", "prompts-gpt-oss-20b-h200"),
    ] {
        let found = rows::<Prompts>(name)?;
        let cells = TOKENS.map(|tokens| {
            let row = found
                .iter()
                .find(|row| row.prompts == 1 && row.tokens == tokens);
            cell(row.map(|row| row.ttft_ms))
        });
        lines.push(format!("| {title} | {} |", cells.join(" | ")));
    }
    Ok(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::{layer, three_digits};

    #[test]
    fn a_layer_is_the_first_line_of_its_run() {
        let log = "layer tokens layer us router routing matmuls sums floor us kernels\n\
                   a-model  64  113.9  3.8  6.9  99.5  3.1  70.1  8 x 256 x 256\n\
                   a-model 256      -    - 10.0 131.4  4.2  71.3  24 x 256 x 128\n\
                   a-model  64  119.5  3.8 14.5 106.2  4.0  70.1  8 x 256 x 256\n";
        assert_eq!(
            layer(log, "a-model", 64),
            [Some(113.9), Some(99.5), Some(70.1)]
        );
        assert_eq!(layer(log, "a-model", 256), [None, Some(131.4), Some(71.3)]);
        assert_eq!(layer(log, "a-model", 4), [None; 3]);
        let other = "a-model 4096 grouped_mm both matmuls 1412.5 us\n";
        assert_eq!(layer(other, "a-model", 4096), [None; 3]);
    }

    #[test]
    fn numbers_have_three_digits() {
        let digits = [14.06, 99.94, 99.96, 823.7, 5050.9].map(three_digits);
        assert_eq!(digits, ["14.1", "99.9", "100", "824", "5051"]);
    }
}
