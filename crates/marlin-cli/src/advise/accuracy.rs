//! What is known of the accuracy of a format. None of it is about the model that advice is for.

use super::Format;

/// The change of perplexity of small models in a format, in per cent of that in f16.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FamilyRecord {
    pub format: Format,
    /// The name of the variant in the records.
    pub variant: &'static str,
    /// The changes of the models with 1, 5 and 20 million parameters.
    pub changes: [f64; 3],
}

/// The files in `benches/records` that have the changes.
pub const FAMILY_FILES: [&str; 2] = ["family-h100.json", "family-20m-h100.json"];

/// The models in these files, in the order of the changes.
#[cfg(test)]
pub const FAMILY_MODELS: [&str; 3] = ["1m", "5m", "20m"];

const fn family(format: Format, variant: &'static str, changes: [f64; 3]) -> FamilyRecord {
    FamilyRecord {
        format,
        variant,
        changes,
    }
}

/// The changes by GPTQ, and of 2:4 weights by GPTQ after training with their zeros.
pub const FAMILY: [FamilyRecord; 4] = [
    family(Format::Int8, "int8-g128-gptq", [-0.02, 0.01, 0.0]),
    family(Format::Int4G32, "int4-g32-gptq", [1.67, 1.04, 0.30]),
    family(Format::Int4, "int4-g128-gptq", [2.97, 1.44, 0.20]),
    family(
        Format::Int4TwoFour,
        "24-int4-g128-recovered-gptq",
        [5.28, -8.18, 3.72],
    ),
];

/// The means of MMLU, WinoGrande and ARC-Challenge of Llama 2 in f16, int4, and int4 2:4 (MARLIN,
/// arXiv 2408.11743, Table 1).
const PAPER: [f64; 3] = [56.96, 53.63, 58.52];

/// Returns a sentence about the accuracy of a format, with its sources.
pub fn note(format: Format) -> String {
    let Some(record) = FAMILY.iter().find(|record| record.format == format) else {
        return "the reference: the weights as they were trained".into();
    };
    let training = match format {
        Format::Int4TwoFour => ", trained on with the zeros",
        _ => "",
    };
    let [small, middle, large] = record.changes;
    let family = format!(
        "perplexity by GPTQ{training}: {small:+.2}, {middle:+.2} and {large:+.2} % \
         (measured, models of 1M, 5M and 20M parameters: {})",
        FAMILY_FILES.join(", ")
    );
    let [float, int4, sparse] = PAPER;
    let paper = |mean: f64| {
        format!("; mean of three benchmarks {mean}, f16 {float} (Llama 2: MARLIN, Table 1)")
    };
    match format {
        Format::Int4 => family + &paper(int4),
        Format::Int4TwoFour => family + &paper(sparse),
        Format::F16 | Format::Int8 | Format::Int4G32 => family,
    }
}
