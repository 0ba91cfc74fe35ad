//! The tables of the book's page of benchmarks, made from the records in `benches/records`.

mod host;
mod mixtures;
pub mod records;

use crate::process::{Error, root};
use records::{decode_of_log, line, rows, text};
use serde::Deserialize;
use std::fmt::Write;
use std::fs;

const PAGE: &str = "book/src/benchmarks.md";
/// The end of a table in the page; `<!-- table: NAME -->` is its beginning.
const END: &str = "<!-- end -->";
/// The layers of the tables of matmuls, with the names of their shapes in records.
const LAYERS: [(&str, &str); 5] = [
    ("Llama 2 7B, qkv", "7b.qkv"),
    ("Llama 2 7B, o", "7b.o"),
    ("Llama 2 7B, down", "7b.down"),
    ("Llama 3 8B, gate and up", "8b.gate_up"),
    ("Llama 2 70B, gate and up", "70b.gate_up"),
];
/// The numbers of rows of activations of the tables of matmuls.
const ROWS: [usize; 5] = [1, 8, 16, 64, 1024];
const BATCHES: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

/// A row of a record of `cargo xtask bench kernels`.
#[derive(Deserialize)]
struct Matmul {
    kernel: String,
    shape: String,
    k: usize,
    n: usize,
    m: usize,
    /// The name of the values, if they are floats.
    value: Option<String>,
    bits: usize,
    group: i64,
    us: f64,
    floor_us: f64,
}

/// A row of a record of `cargo xtask bench decode`.
#[derive(Deserialize)]
struct Decode {
    model: String,
    weights: String,
    batch: usize,
    tokens_per_second: f64,
    read_fraction: Option<f64>,
}

/// A row of a record of `cargo xtask bench prompts`.
#[derive(Deserialize)]
struct Prompts {
    prompts: usize,
    tokens: usize,
    ttft_ms: f64,
}

/// Writes the tables of the page anew if `update` is true; otherwise checks that they are those of
/// the records.
///
/// # Errors
/// [`Error::Needs`] names the first table that differs from the records.
pub fn tables(update: bool) -> Result<(), Error> {
    let path = root().join(PAGE);
    let page = fs::read_to_string(&path).map_err(Error::file(&path))?;
    let (mut written, mut rest) = (String::new(), page.as_str());
    while let Some((before, after)) = rest.split_once("<!-- table: ") {
        let parts = after
            .split_once(" -->\n")
            .and_then(|(name, after)| Some((name, after.split_once(END)?)));
        let Some((name, (found, after))) = parts else {
            return Err(Error::Needs(format!("{PAGE}: a table without `{END}`")));
        };
        let expected = format!("\n{}\n", table(name)?);
        if !update && found != expected {
            return Err(Error::Needs(format!(
                "{PAGE}: the table `{name}` is not that of the records; `cargo xtask book --update` writes it anew"
            )));
        }
        let _ = write!(written, "{before}<!-- table: {name} -->\n{expected}{END}");
        rest = after;
    }
    written += rest;
    if update && written != page {
        fs::write(&path, written).map_err(Error::file(&path))?;
    }
    Ok(())
}

fn table(name: &str) -> Result<String, Error> {
    match name {
        "matmul" => matmuls("h200", "h200-24"),
        "matmul-int8" => matmuls("h200-int8", "h200-int8-24"),
        "matmul-formats" => matmuls_of_formats(),
        "decode-formats" => decode_of_formats(),
        "prompts" => prompts(),
        "decode" => decode(),
        "decode-24" => decode_24(),
        "parts" => parts(),
        "mixtures" => mixtures::layers(),
        "mixtures-matmuls" => mixtures::matmuls(),
        "mixtures-prompts" => mixtures::prompts(),
        "decode-qwen" => mixtures::decode_of_qwen(),
        "decode-gpt-oss" => mixtures::decode_of_gpt_oss(),
        "perplexities" => host::perplexities(),
        "host-layers" => host::layers(),
        "host-models" => host::models(),
        _ => Err(Error::Needs(format!("{PAGE}: no table is named `{name}`"))),
    }
}

/// Returns the first lines of a table whose columns are numbers of `what`.
fn by_number(what: &str, numbers: &[usize]) -> Vec<String> {
    let header = numbers.iter().map(usize::to_string).collect::<Vec<_>>();
    vec![
        format!("| {what} | {} |", header.join(" | ")),
        format!("|---|{}", "---:|".repeat(numbers.len())),
    ]
}

/// The times of the layers' matmuls, dense and 2:4, in microseconds.
fn matmuls(dense: &str, sparse: &str) -> Result<String, Error> {
    let mut lines = vec![
        format!(
            "| layer | K x N | floor, {} | {} |",
            rows_of(1),
            ROWS.map(rows_of).join(" | ")
        ),
        "|---|---|---:|---:|---:|---:|---:|---:|".to_owned(),
    ];
    let (dense, sparse) = (rows::<Matmul>(dense)?, rows::<Matmul>(sparse)?);
    for (layer, shape) in LAYERS {
        for (rows, label) in [(&dense, layer), (&sparse, "the same, 2:4")] {
            let of_m = |m| rows.iter().find(|row| row.shape == shape && row.m == m);
            let Some(first) = of_m(1) else { continue };
            let start = format!(
                "| {label} | {}\u{a0}x\u{a0}{} | {:.1}",
                first.k, first.n, first.floor_us
            );
            lines.push(start + &times(ROWS.map(of_m)));
        }
    }
    Ok(lines.join("\n"))
}

/// The head of the column of `m` rows of activations, which does not wrap.
fn rows_of(m: usize) -> String {
    format!("M\u{a0}=\u{a0}{m}")
}

/// The end of a table's line: the times of matmuls, in microseconds.
fn times<const N: usize>(rows: [Option<&Matmul>; N]) -> String {
    let cells = rows.map(|row| row.map_or(String::new(), |row| format!("{:.1}", row.us)));
    format!(" | {} |", cells.join(" | "))
}

/// The times of Llama 2 7B's matmuls in several formats, in microseconds.
fn matmuls_of_formats() -> Result<String, Error> {
    const ROWS: [usize; 6] = [1, 16, 64, 256, 1024, 4096];
    const LAYERS: [(&str, &str); 4] = [
        ("qkv", "7b.qkv"),
        ("o", "7b.o"),
        ("gate and up", "7b.gate_up"),
        ("down", "7b.down"),
    ];
    // Nine columns: the heads of all but the first time are numbers alone.
    let others = ROWS[1..].iter().map(usize::to_string).collect::<Vec<_>>();
    let mut lines = vec![
        format!(
            "| layer | format | floor, {one} | {one} | {} |",
            others.join(" | "),
            one = rows_of(1)
        ),
        format!("|---|---|---:|{}", "---:|".repeat(ROWS.len())),
    ];
    let rows = rows::<Matmul>("formats-h200")?;
    for (layer, shape) in LAYERS {
        for (label, value, bits, group, is_w8a8) in [
            ("int4, groups of 128", None, 4, 128, false),
            ("MXFP4", Some("e2m1"), 4, 32, false),
            ("NVFP4", Some("e2m1"), 4, 16, false),
            ("int8, groups of 128", None, 8, 128, false),
            ("FP8", Some("e4m3"), 8, -1, false),
            ("FP8, W8A8", Some("e4m3"), 8, -1, true),
        ] {
            let of_m = |m| {
                rows.iter().find(|row| {
                    (row.shape.as_str(), row.m, row.bits, row.group) == (shape, m, bits, group)
                        && row.value.as_deref() == value
                        && row.kernel.contains("wgmma e4m3") == is_w8a8
                })
            };
            let floor = of_m(1).map_or(String::new(), |row| format!("{:.1}", row.floor_us));
            let start = format!("| {layer} | {label} | {floor}");
            lines.push(start + &times(ROWS.map(of_m)));
        }
    }
    Ok(lines.join("\n"))
}

/// The tokens per second of decode of Llama 2 7B in several formats, of all sequences together.
fn decode_of_formats() -> Result<String, Error> {
    const BATCHES: [usize; 3] = [1, 16, 64];
    let header = BATCHES.map(|batch| batch.to_string()).join(" | ");
    let mut lines = vec![
        format!("| sequences | {header} | read rate, 1 sequence |"),
        format!("|---|{}---:|", "---:|".repeat(BATCHES.len())),
    ];
    let rows = rows::<Decode>("decode-floats-llama-2-7b-h200")?;
    for (label, weights) in [
        ("int4, groups of 128", "w4a16"),
        ("MXFP4", "mxfp4"),
        ("NVFP4", "nvfp4"),
        ("FP8", "fp8"),
        ("int8, groups of 128", "w8a16"),
    ] {
        let of_batch = |batch| {
            rows.iter()
                .find(|row| row.weights == weights && row.batch == batch)
        };
        let tokens = BATCHES.map(|batch| {
            of_batch(batch).map_or(String::new(), |row| format!("{:.0}", row.tokens_per_second))
        });
        let read = of_batch(1).and_then(|row| row.read_fraction);
        let read = read.map_or(String::new(), |read| format!("{:.0} %", 100.0 * read));
        lines.push(format!("| {label} | {} | {read} |", tokens.join(" | ")));
    }
    Ok(lines.join("\n"))
}

/// The times to the first token of Llama 2 7B's shape, in milliseconds.
fn prompts() -> Result<String, Error> {
    let mut lines = vec![
        "| prompts | tokens of each | ms to the first token of the last |".to_owned(),
        "|---:|---:|---:|".to_owned(),
    ];
    for row in rows::<Prompts>("prompts-h200")? {
        lines.push(format!(
            "| {} | {} | {:.1} |",
            row.prompts, row.tokens, row.ttft_ms
        ));
    }
    Ok(lines.join("\n"))
}

/// The tokens per second of decode, of all sequences together: int4 from one run of all models, f16
/// from the records of each.
fn decode() -> Result<String, Error> {
    let log = text("decode-models-h200.log")?;
    let int4 = |model: &str, batch: usize| decode_of_log(&log, model, "w4a16", batch);
    let mut lines = by_number("sequences", &BATCHES);
    for (title, model, has_f16) in [
        ("Llama 2 7B", "llama-2-7b", true),
        ("Llama 3 8B", "llama-3-8b", true),
        ("Llama 2 70B", "llama-2-70b", false),
    ] {
        let line = |weights: &str, found: [Option<f64>; BATCHES.len()]| {
            let figures = found.map(|tokens| tokens.map_or(String::new(), |t| format!("{t:.0}")));
            format!("| {title}, {weights} | {} |", figures.join(" | "))
        };
        lines.push(line("int4", BATCHES.map(|batch| int4(model, batch))));
        if has_f16 {
            let rows = rows::<Decode>(&format!("decode-{model}-h200"))?;
            let best = |batch: usize| {
                rows.iter()
                    .filter(|row| row.weights == "f16" && row.batch == batch)
                    .map(|row| row.tokens_per_second)
                    .reduce(f64::max)
            };
            lines.push(line("f16", BATCHES.map(best)));
        }
    }
    Ok(lines.join("\n"))
}

/// The tokens per second of decode with dense and with 2:4 weights, of all sequences together.
fn decode_24() -> Result<String, Error> {
    let mut lines = vec![
        "| sequences | 7B, 1 | 7B, 16 | 70B, 1 |".to_owned(),
        "|---|---:|---:|---:|".to_owned(),
    ];
    let runs = [
        ("decode-24-llama-2-7b-h200", 1),
        ("decode-24-llama-2-7b-batch-16-h200", 16),
        ("decode-24-llama-2-70b-h200", 1),
    ];
    for (label, weights) in [("int4", "w4a16"), ("int4, 2:4", "w4a16-24")] {
        let mut cells = Vec::new();
        for (name, batch) in runs {
            let found = rows::<Decode>(name)?;
            // The first row is that of 64 new tokens.
            let row = found
                .iter()
                .find(|row| row.weights == weights && row.batch == batch);
            cells.push(row.map_or(String::new(), |row| format!("{:.0}", row.tokens_per_second)));
        }
        lines.push(format!("| {label} | {} |", cells.join(" | ")));
    }
    Ok(lines.join("\n"))
}

/// The times of the parts of a step of Llama 2 7B in int4, in microseconds.
fn parts() -> Result<String, Error> {
    const HEADER: &str = "part                      us a step us a layer\n";
    let log = text("decode-models-h200.log")?;
    let times = |part: &str| {
        let words: Vec<&str> = part.split(' ').collect();
        let blocks = log.split(HEADER).skip(1);
        let found = blocks.filter_map(|block| {
            let time = *line(block, &words)?.get(words.len())?;
            time.parse::<f64>().ok()
        });
        let cells: Vec<String> = found.map(|time| format!("{time:.0}")).collect();
        format!("| {part} | {} |", cells.join(" | "))
    };
    let mut lines = by_number("sequences", &[1, 64]);
    lines.extend(
        [
            "norm and qkv",
            "attention",
            "o",
            "norm, gate_up and SwiGLU",
            "down",
            "head",
            "embedding",
            "sampling",
            "together",
        ]
        .map(times),
    );
    Ok(lines.join("\n"))
}
