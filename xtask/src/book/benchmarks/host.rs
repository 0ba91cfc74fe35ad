//! The tables of perplexities and of the host's times.

use super::records::parse;
use crate::process::Error;
use serde::Deserialize;

/// A record of perplexities.
#[derive(Deserialize)]
struct Perplexities {
    models: Vec<Float>,
}

/// A model in f16, and the same in other forms.
#[derive(Deserialize)]
struct Float {
    bytes: usize,
    f16_perplexity: f64,
    variants: Vec<Variant>,
}

#[derive(Deserialize)]
struct Variant {
    name: String,
    bytes: usize,
    perplexity: f64,
    /// The change of the perplexity over that of the model in f16, as a fraction.
    change: f64,
}

/// The record of `cargo xtask bench host`.
#[derive(Deserialize)]
struct Host {
    layers: Vec<Layer>,
    models: Vec<Speed>,
}

#[derive(Deserialize)]
struct Layer {
    layer: String,
    rows: usize,
    ratio: f64,
}

#[derive(Deserialize)]
struct Speed {
    folder: String,
    prompt_tokens_per_second: f64,
    decode_tokens_per_second: f64,
}

/// The titles of forms with the names of variants.
const FORMS: [(&str, &str); 7] = [
    ("int4, groups of 128, round to nearest", "int4-g128-rtn"),
    ("int4, groups of 128, GPTQ", "int4-g128-gptq"),
    ("int4, groups of 32, GPTQ", "int4-g32-gptq"),
    ("int8, groups of 128, round to nearest", "int8-g128-rtn"),
    (
        "int4, 2:4 by magnitude, without fine-tuning",
        "24-int4-g128-magnitude",
    ),
    (
        "int8, 2:4, fine-tuned with a fixed mask",
        "24-int8-g128-recovered-rtn",
    ),
    (
        "int4, 2:4, fine-tuned with a fixed mask",
        "24-int4-g128-recovered-rtn",
    ),
];

/// The perplexities of the shipped model in several forms.
pub fn perplexities() -> Result<String, Error> {
    let record: Perplexities = parse("accuracy-flex.json")?;
    let mut lines = vec![
        "| | tensors | perplexity |".to_owned(),
        "|---|---|---|".to_owned(),
    ];
    let line = |title: &str, bytes: usize, perplexity: f64, change: &str| {
        let size = bytes as f64 / 1000.0;
        format!("| {title} | {size:.1} kB | {perplexity:.4}{change} |")
    };
    for model in &record.models {
        lines.push(line("f16", model.bytes, model.f16_perplexity, ""));
        for (title, name) in FORMS {
            let of_form = model.variants.iter().filter(|variant| variant.name == name);
            lines.extend(of_form.map(|variant| {
                let percent = 100.0 * variant.change;
                let change = match percent.abs() {
                    ..0.1 => format!(" ({percent:+.2} %)"),
                    ..100.0 => format!(" ({percent:+.1} %)"),
                    _ => format!(" ({percent:+.0} %)"),
                };
                line(title, variant.bytes, variant.perplexity, &change)
            }));
        }
    }
    Ok(lines.join("\n"))
}

/// The times of layers in 4 bits, of those of float layers, on the host's cores.
pub fn layers() -> Result<String, Error> {
    let record: Host = parse("host-epyc-zen5.json")?;
    let mut lines = vec![
        "| rows | `QuantLinear` 768 x 3072 | the same `Linear`, converted | the Linears of a BERT block, converted | a converted LSTM |".to_owned(),
        "|---|---|---|---|---|".to_owned(),
    ];
    for rows in [1, 8, 128] {
        // `QuantLinear` had another name when the record was made.
        let cells = [
            "W4A16Linear 768 x 3072",
            "converted Linear 768 x 3072",
            "converted BERT block's Linears",
            "converted LSTM 512, one step",
        ]
        .map(|name| {
            let mut layers = record.layers.iter();
            let layer = layers.find(|layer| layer.layer == name && layer.rows == rows);
            layer.map_or(String::new(), |layer| format!("{:.2}", layer.ratio))
        });
        lines.push(format!("| {rows} | {} |", cells.join(" | ")));
    }
    Ok(lines.join("\n"))
}

/// The tokens per second of SmolLM2-135M-Instruct on the host's cores.
pub fn models() -> Result<String, Error> {
    let record: Host = parse("host-epyc-zen5.json")?;
    let mut lines = vec![
        "| tokens per second | prompt of 128 tokens | decode |".to_owned(),
        "|---|---:|---:|".to_owned(),
    ];
    for (title, folder) in [("f16", "smol-f16"), ("int4 g64", "smol-int4")] {
        for model in record.models.iter().filter(|model| model.folder == folder) {
            lines.push(format!(
                "| {title} | {:.0} | {:.0} |",
                model.prompt_tokens_per_second, model.decode_tokens_per_second
            ));
        }
    }
    Ok(lines.join("\n"))
}
