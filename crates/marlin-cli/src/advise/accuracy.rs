//! What is known of the accuracy of a format. None of it is about the model that advice is for.

use super::Format;

/// The changes of perplexity of small models in a format, in per cent of that in f16.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelsRecord {
    pub format: Format,
    /// The models, and the files in `benches/records` that have the changes.
    pub source: &'static Source,
    /// The name of the variant in the files.
    pub variant: &'static str,
    /// The changes of the models of the source.
    pub changes: &'static [f64],
}

/// Models whose perplexity was measured.
#[derive(Debug, PartialEq)]
pub struct Source {
    /// The names of the models in the files.
    pub models: &'static [&'static str],
    /// The millions of parameters of the models, as text.
    sizes: &'static str,
    /// The files in `benches/records`.
    pub files: &'static [&'static str],
}

/// The family of models of [`train-tiny-llama`](../../../../examples/train-tiny-llama).
const FAMILY: Source = Source {
    models: &["1m", "5m", "20m"],
    sizes: "1M, 5M and 20M",
    files: &["family-h100.json", "family-20m-h100.json"],
};
/// The two of them that the repository ships, in formats of floats.
const SHIPPED: Source = Source {
    models: &["1m", "5m"],
    sizes: "1M and 5M",
    files: &["family-floats-cpu.json"],
};

/// The larger of them and the same trained on with 2:4 weights, which the repository ships, too.
const TRAINED: Source = Source {
    models: &["5m"],
    sizes: "5M",
    files: &["accuracy-flex.json"],
};

const fn record(
    format: Format,
    source: &'static Source,
    variant: &'static str,
    changes: &'static [f64],
) -> ModelsRecord {
    ModelsRecord {
        format,
        source,
        variant,
        changes,
    }
}

/// The changes by GPTQ, and of 2:4 weights by GPTQ after training with their zeros; of FP8 and of
/// 2:4 weights in int8 by rounding to nearest.
pub const RECORDS: [ModelsRecord; 9] = [
    record(Format::Int8, &FAMILY, "int8-g128-gptq", &[-0.02, 0.01, 0.0]),
    record(Format::Fp8, &SHIPPED, "fp8-rtn", &[0.33, 0.23]),
    record(Format::Fp8W8A8, &SHIPPED, "fp8-rtn", &[0.33, 0.23]),
    record(
        Format::Int4G32,
        &FAMILY,
        "int4-g32-gptq",
        &[1.67, 1.04, 0.30],
    ),
    record(Format::Nvfp4, &SHIPPED, "nvfp4-gptq", &[2.3, 1.6]),
    record(Format::Int4, &FAMILY, "int4-g128-gptq", &[2.97, 1.44, 0.20]),
    record(Format::Mxfp4, &SHIPPED, "mxfp4-gptq", &[3.53, 2.69]),
    record(
        Format::Int8TwoFour,
        &TRAINED,
        "24-int8-g128-recovered-rtn",
        &[-7.15],
    ),
    record(
        Format::Int4TwoFour,
        &FAMILY,
        "24-int4-g128-recovered-gptq",
        &[5.28, -8.18, 3.72],
    ),
];

/// The means of MMLU, WinoGrande and ARC-Challenge of Llama 2 in f16, int4, and int4 2:4 (MARLIN,
/// arXiv 2408.11743, Table 1).
const PAPER: [f64; 3] = [56.96, 53.63, 58.52];

/// Returns a sentence about the accuracy of a format, with its sources.
pub fn note(format: Format) -> String {
    let Some(record) = RECORDS.iter().find(|record| record.format == format) else {
        return "the reference: the weights as they were trained".into();
    };
    let method = match format {
        Format::Int4TwoFour => "by GPTQ, trained on with the zeros",
        Format::Int8TwoFour => "by rounding to nearest, trained on with the zeros",
        Format::Fp8 => "by rounding to nearest",
        Format::Fp8W8A8 => "by rounding the weights to nearest, not the activations",
        _ => "by GPTQ",
    };
    let changes: Vec<String> = record
        .changes
        .iter()
        .map(|change| format!("{change:+.2}"))
        .collect();
    let changes = match changes.as_slice() {
        [others @ .., last] if !others.is_empty() => format!("{} and {last}", others.join(", ")),
        one => one.concat(),
    };
    let models = format!(
        "perplexity {method}: {changes} % (measured, models of {} parameters: {})",
        record.source.sizes,
        record.source.files.join(", ")
    );
    let [float, int4, sparse] = PAPER;
    let paper = |mean: f64| {
        format!("; mean of three benchmarks {mean}, f16 {float} (Llama 2: MARLIN, Table 1)")
    };
    match format {
        Format::Int4 => models + &paper(int4),
        Format::Int4TwoFour => models + &paper(sparse),
        _ => models,
    }
}
