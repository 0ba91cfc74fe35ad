//! The figures of `benches/records` that advice rests on. A test compares them with the files.

use super::Format;
use super::cards::{CardSpec, H100, H200};
use super::models::Model;
use burn::tensor::FloatDType;
use marlin_lm::ModelConfig;

/// The dtype of activations, output head and embedding in all records.
pub const DTYPE: FloatDType = FloatDType::F16;
/// The tokens of each prompt in the records of decode.
pub const PROMPT_TOKENS: usize = 64;
/// The tokens that each sequence decodes after its prompt in these records.
pub const NEW_TOKENS: usize = 64;

/// Times of one model on one card.
#[derive(Debug, Clone, Copy)]
pub struct Record {
    pub card: CardSpec,
    pub model: Model,
    pub format: Format,
    /// The file in `benches/records`.
    pub file: &'static str,
    /// Pairs of a number of sequences and the milliseconds of a step, or of a number of prompt
    /// tokens and the milliseconds to the first token; in ascending order of the first.
    pub milliseconds: &'static [(usize, f64)],
}

/// The times of a decode step: the mean over [`NEW_TOKENS`] tokens after a prompt of
/// [`PROMPT_TOKENS`].
///
/// Llama 3 8B in f16 was measured with several sequences only before these matmuls became 2.5 times
/// faster for Llama 2 7B. Those figures are left out.
pub const DECODE: &[Record] = &[
    Record {
        card: H200,
        model: Model::Llama2Seven,
        format: Format::Int4,
        file: "decode-models-h200.log",
        milliseconds: &[
            (1, 1.372),
            (2, 1.562),
            (4, 1.607),
            (8, 1.652),
            (16, 2.009),
            (32, 2.846),
            (64, 3.890),
            (128, 6.100),
        ],
    },
    Record {
        card: H200,
        model: Model::Llama3Eight,
        format: Format::Int4,
        file: "decode-models-h200.log",
        milliseconds: &[
            (1, 1.619),
            (2, 1.939),
            (4, 1.957),
            (8, 1.999),
            (16, 2.251),
            (32, 2.967),
            (64, 3.910),
            (128, 6.319),
        ],
    },
    Record {
        card: H200,
        model: Model::Llama2Seventy,
        format: Format::Int4,
        file: "decode-models-h200.log",
        milliseconds: &[
            (1, 10.597),
            (2, 11.633),
            (4, 11.923),
            (8, 12.499),
            (16, 14.024),
            (32, 17.362),
            (64, 24.671),
            (128, 36.301),
        ],
    },
    Record {
        card: H200,
        model: Model::Qwen3Thirty,
        format: Format::Int4,
        file: "decode-qwen3-30b-a3b-h200.json",
        milliseconds: &[(1, 1.564), (4, 3.186), (16, 5.224), (64, 7.176)],
    },
    Record {
        card: H200,
        model: Model::Shipped,
        format: Format::Int4,
        file: "decode-train-tiny-llama-h200.json",
        milliseconds: &[
            (1, 0.097),
            (2, 0.103),
            (4, 0.103),
            (8, 0.105),
            (16, 0.105),
            (32, 0.107),
            (64, 0.114),
            (128, 0.133),
        ],
    },
    Record {
        card: H200,
        model: Model::Shipped,
        format: Format::F16,
        file: "decode-train-tiny-llama-h200.json",
        milliseconds: &[(1, 0.133)],
    },
    Record {
        card: H200,
        model: Model::Llama2Seven,
        format: Format::F16,
        file: "decode-llama-2-7b-h200.json",
        milliseconds: &[
            (1, 3.795),
            (2, 5.474),
            (4, 5.533),
            (8, 5.590),
            (16, 6.665),
            (32, 7.218),
            (64, 16.076),
        ],
    },
    Record {
        card: H200,
        model: Model::Llama3Eight,
        format: Format::F16,
        file: "decode-llama-3-8b-h200.json",
        milliseconds: &[(1, 4.302)],
    },
    Record {
        card: H200,
        model: Model::Llama2Seven,
        format: Format::Int8,
        file: "decode-floats-llama-2-7b-h200.json",
        milliseconds: &[(1, 2.059), (16, 2.696), (64, 4.428)],
    },
    Record {
        card: H200,
        model: Model::Llama2Seven,
        format: Format::Int8TwoFour,
        file: "decode-int8-llama-2-7b-h200.json",
        milliseconds: &[(1, 1.598), (16, 2.166)],
    },
    Record {
        card: H200,
        model: Model::Llama2Seven,
        format: Format::Fp8,
        file: "decode-floats-llama-2-7b-h200.json",
        milliseconds: &[(1, 2.178), (16, 2.766), (64, 4.506)],
    },
    Record {
        card: H200,
        model: Model::Llama2Seven,
        format: Format::Nvfp4,
        file: "decode-floats-llama-2-7b-h200.json",
        milliseconds: &[(1, 1.791), (16, 2.347), (64, 4.281)],
    },
    Record {
        card: H200,
        model: Model::Llama2Seven,
        format: Format::Mxfp4,
        file: "decode-floats-llama-2-7b-h200.json",
        milliseconds: &[(1, 1.717), (16, 2.209), (64, 4.185)],
    },
    Record {
        card: H200,
        model: Model::Llama2Seven,
        format: Format::Int4TwoFour,
        file: "decode-formats-llama-2-7b-h200.json",
        milliseconds: &[(1, 1.369), (16, 1.756), (64, 3.368)],
    },
    Record {
        card: H200,
        model: Model::Llama2Seventy,
        format: Format::Int4TwoFour,
        file: "decode-24-llama-2-70b-h200.json",
        milliseconds: &[(1, 8.763)],
    },
    Record {
        card: H100,
        model: Model::Llama2Seven,
        format: Format::Int4,
        file: "decode-models-h100.log",
        milliseconds: &[
            (1, 1.563),
            (2, 1.813),
            (4, 1.879),
            (8, 1.964),
            (16, 2.269),
            (32, 3.103),
            (64, 4.200),
            (128, 6.488),
        ],
    },
    Record {
        card: H100,
        model: Model::Llama3Eight,
        format: Format::Int4,
        file: "decode-models-h100.log",
        milliseconds: &[
            (1, 1.984),
            (2, 2.300),
            (4, 2.346),
            (8, 2.378),
            (16, 2.489),
            (32, 3.084),
            (64, 4.026),
            (128, 6.354),
        ],
    },
    Record {
        card: H100,
        model: Model::Llama2Seventy,
        format: Format::Int4,
        file: "decode-models-h100.log",
        milliseconds: &[
            (1, 13.232),
            (2, 14.611),
            (4, 14.912),
            (8, 15.187),
            (16, 15.595),
            (32, 17.773),
            (64, 25.212),
            (128, 37.062),
        ],
    },
    Record {
        card: H100,
        model: Model::Llama2Seven,
        format: Format::F16,
        file: "decode-models-h100.log",
        milliseconds: &[
            (1, 4.962),
            (2, 6.461),
            (4, 6.512),
            (8, 6.583),
            (16, 7.570),
            (32, 7.893),
        ],
    },
    Record {
        card: H100,
        model: Model::Llama3Eight,
        format: Format::F16,
        file: "decode-models-h100.log",
        milliseconds: &[(1, 5.567)],
    },
];

/// The times from adding a prompt to its first token.
pub const PROMPTS: &[Record] = &[
    Record {
        card: H200,
        model: Model::Llama2Seven,
        format: Format::Int4,
        file: "prompts-h200.json",
        milliseconds: &[(64, 3.547), (512, 11.303), (1024, 22.100), (4000, 96.598)],
    },
    Record {
        card: H200,
        model: Model::Llama2Seven,
        format: Format::Fp8,
        file: "prompts-w8a8-llama-2-7b-h200.json",
        milliseconds: &[(4000, 104.916)],
    },
    Record {
        card: H200,
        model: Model::Llama2Seven,
        format: Format::Fp8W8A8,
        file: "prompts-w8a8-llama-2-7b-h200.json",
        milliseconds: &[(4000, 80.677)],
    },
    Record {
        card: H200,
        model: Model::Qwen3Thirty,
        format: Format::Int4,
        file: "prompts-qwen3-30b-a3b-h200.json",
        milliseconds: &[(64, 6.149), (1024, 20.744), (4000, 84.285)],
    },
    Record {
        card: H200,
        model: Model::Llama2Seventy,
        format: Format::Int4,
        file: "prompts-llama-2-70b-h200.json",
        milliseconds: &[(1024, 223.579)],
    },
    Record {
        card: H200,
        model: Model::Llama3Eight,
        format: Format::Int4,
        file: "decode-models-h200.log",
        milliseconds: &[(64, 5.260)],
    },
    Record {
        card: H200,
        model: Model::Llama2Seventy,
        format: Format::Int4,
        file: "decode-models-h200.log",
        milliseconds: &[(64, 31.400)],
    },
    Record {
        card: H200,
        model: Model::Llama2Seven,
        format: Format::F16,
        file: "decode-models-h200.log",
        milliseconds: &[(64, 15.890)],
    },
    Record {
        card: H100,
        model: Model::Llama2Seven,
        format: Format::Int4,
        file: "decode-models-h100.log",
        milliseconds: &[(64, 5.000)],
    },
    Record {
        card: H100,
        model: Model::Llama3Eight,
        format: Format::Int4,
        file: "decode-models-h100.log",
        milliseconds: &[(64, 5.910)],
    },
    Record {
        card: H100,
        model: Model::Llama2Seventy,
        format: Format::Int4,
        file: "decode-models-h100.log",
        milliseconds: &[(64, 34.820)],
    },
    Record {
        card: H100,
        model: Model::Llama2Seven,
        format: Format::F16,
        file: "decode-models-h100.log",
        milliseconds: &[(64, 17.230)],
    },
    Record {
        card: H100,
        model: Model::Llama3Eight,
        format: Format::F16,
        file: "decode-models-h100.log",
        milliseconds: &[(64, 19.290)],
    },
];

/// Returns the records of a model on a card.
pub fn of_model(
    records: &'static [Record],
    card: &CardSpec,
    model: Model,
    format: Format,
) -> impl Iterator<Item = &'static Record> {
    let name = card.name;
    records.iter().filter(move |record| {
        record.card.name == name && record.model == model && record.format == format
    })
}

/// Returns the measured milliseconds for a number of sequences or tokens, and the file that has
/// them.
pub fn measured(
    records: &'static [Record],
    config: &ModelConfig,
    card: &CardSpec,
    format: Format,
    number: usize,
) -> Option<(f64, &'static str)> {
    of_model(records, card, Model::of(config)?, format).find_map(|record| {
        let (_, time) = record
            .milliseconds
            .iter()
            .find(|(found, _)| *found == number)?;
        Some((*time, record.file))
    })
}
