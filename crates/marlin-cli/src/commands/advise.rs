use crate::advise::Format;
use crate::advise::cards::{self, CardSpec};
use crate::advise::report::{Advice, FormatRow, Question};
use crate::args::AdviseArgs;
use crate::error::CliError;
use crate::{device, hub, output};
use burn_marlin::device::{device_name, free_memory, target};
use marlin_format::checkpoint::{Checkpoint, CheckpointError, InPlaceOfWeights};
use marlin_kernels::{Runtime, Target};
use marlin_lm::{ModelConfig, OpenOptions};
use serde::Serialize;

/// Advice, and the bytes of the tensors in the folder, if it has any.
#[derive(Serialize)]
struct Answer {
    tensor_bytes: Option<usize>,
    #[serde(flatten)]
    advice: Advice,
}

pub fn run(args: &AdviseArgs) -> Result<(), CliError> {
    let dir = hub::folder_without_weights(&args.dir, &args.hub)?;
    let config = ModelConfig::read(&dir.join("config.json"))?;
    let options = OpenOptions {
        max_len: args.max_len,
        ..OpenOptions::default()
    };
    let positions = options.positions(&config)?;
    if args.prompt >= positions {
        return Err(CliError::LongPrompt {
            prompt: args.prompt,
            positions,
        });
    }
    let tensor_bytes = match Checkpoint::open(&dir) {
        Ok(checkpoint) => Some(checkpoint.size_bytes()),
        Err(CheckpointError::NoWeights {
            found: InPlaceOfWeights::Nothing,
            ..
        }) => None,
        Err(error) => return Err(error.into()),
    };
    let (card, target, memory) = match args.card {
        Some(card) => (card, card.target(), card.memory_bytes()),
        None => card_at_hand(args)?,
    };
    let advice = Question {
        config: &config,
        card: &card,
        target: &target,
        memory,
        sequences: &args.batch,
        prompt: args.prompt,
        positions,
    }
    .answer();
    let answer = Answer {
        tensor_bytes,
        advice,
    };
    if args.json {
        return output::json(&answer);
    }
    Ok(print(&answer)?)
}

/// Returns the card of the device, its properties, and its free memory in bytes.
fn card_at_hand(args: &AdviseArgs) -> Result<(CardSpec, Target, usize), CliError> {
    let device = device::open(args.device)?;
    let (title, target) = (device_name(&device), target(&device));
    if target.runtime != Runtime::Cuda {
        return Err(CliError::NoCard {
            device: title,
            cards: cards::names(),
        });
    }
    let card = CardSpec::of_title(&title)?;
    let memory = free_memory(&device).unwrap_or_else(|| card.memory_bytes());
    Ok((card, target, memory))
}

fn print(
    Answer {
        tensor_bytes,
        advice,
    }: &Answer,
) -> std::io::Result<()> {
    let card = &advice.card;
    let tensors = tensor_bytes.map_or_else(
        || "no tensors in the folder".into(),
        |bytes| format!("{} of tensors in the folder", output::size(bytes)),
    );
    let experts = advice
        .experts
        .map_or_else(String::new, |experts| format!(", {experts}"));
    output::line(&format!(
        "{}, {} layers{experts}, {} weights; {tensors}",
        advice.architecture, advice.layers, advice.weights
    ))?;
    output::line(&format!(
        "{}: {}, of which {} are kept free; {} GB/s and {} TFLOP/s ({})",
        card.title,
        output::size(card.memory_bytes),
        output::size(card.reserve_bytes),
        card.gigabytes_per_second,
        card.teraflops,
        card.source
    ))?;
    output::line(&format!(
        "cache of {} positions: {} for each sequence\n",
        advice.cache_positions,
        output::size(advice.cache_bytes_per_sequence)
    ))?;
    output::table(
        &[
            "format",
            "weights",
            "sequences that fit",
            "first token, floor",
            "first token",
            "basis",
        ],
        &advice.formats.iter().map(format_cells).collect::<Vec<_>>(),
    )?;
    output::line(&format!(
        "first token: of a prompt of {} tokens\n",
        advice.prompt_tokens
    ))?;
    output::table(
        &[
            "format",
            "sequences",
            "cache",
            "fits",
            "step, floor",
            "step",
            "tokens/s, floor",
            "tokens/s",
            "basis",
        ],
        &advice
            .formats
            .iter()
            .flat_map(decode_cells)
            .collect::<Vec<_>>(),
    )?;
    output::line("")?;
    for row in &advice.formats {
        output::line(&format!(
            "accuracy of {}: {}",
            row.format.name(),
            row.accuracy
        ))?;
    }
    output::line(&format!("\n{}", advice.advice))
}

fn format_cells(row: &FormatRow) -> Vec<String> {
    let first = &row.first_token;
    vec![
        name(row.format),
        output::size(row.weight_bytes),
        row.most_sequences.to_string(),
        milliseconds(first.floor_milliseconds),
        milliseconds(first.milliseconds),
        first.origin(),
    ]
}

fn decode_cells(row: &FormatRow) -> impl Iterator<Item = Vec<String>> {
    row.decode.iter().map(|decode| {
        vec![
            name(row.format),
            decode.sequences.to_string(),
            output::size(decode.cache_bytes),
            match decode.cards {
                Some(1) => "yes".into(),
                Some(cards) => format!("on {cards} cards"),
                None => "no".into(),
            },
            milliseconds(decode.step.floor_milliseconds),
            milliseconds(decode.step.milliseconds),
            format!("{:.0}", decode.floor_tokens_per_second),
            format!("{:.0}", decode.tokens_per_second),
            decode.step.origin(),
        ]
    })
}

fn name(format: Format) -> String {
    format.name().into()
}

fn milliseconds(time: f64) -> String {
    format!("{time:.2} ms")
}
