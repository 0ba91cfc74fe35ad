//! Sequences that are decoded during the prefill of other prompts.

use super::{open, requests};
use crate::llama::{example, logits, quantised};
use crate::setup::is_card;
use burn::tensor::{Device, FloatDType};
use marlin_lm::{Engine, LanguageModel, Model, OpenOptions, RequestParams, StepOutput};

/// Checks that a running sequence gets a token in every step during the prefill of long prompts,
/// and that all sequences get the same tokens as when run alone.
pub(super) fn while_read(device: &Device) {
    let (_guard, folder) = quantised();
    let options = OpenOptions {
        dtype: Some(FloatDType::F32),
        max_len: None,
        with_tokenizer: true,
        ..OpenOptions::default()
    };
    let llama =
        LanguageModel::open(&folder, device, &options).unwrap_or_else(|error| panic!("{error}"));
    let text = std::fs::read_to_string(example().join("heldout.txt"))
        .unwrap_or_else(|error| panic!("{error}"));
    let tokens = llama
        .tokenizer()
        .and_then(|tokenizer| Ok(tokenizer.encode(&text)?))
        .unwrap_or_else(|error| panic!("{error}"));
    let long = llama.model.max_len() - 40;
    let prompts = [&tokens[..5], &tokens[..long], &tokens[long..2 * long]];
    let options = RequestParams {
        max_new_tokens: 20,
        ..RequestParams::default()
    };
    let alone = |prompt: &[u32]| {
        let mut engine =
            Engine::new(llama.model.clone(), 1).unwrap_or_else(|error| panic!("{error}"));
        requests::run(&mut engine, 1, 1, &[(prompt.to_vec(), options.clone())]).concat()
    };
    let mut engine = Engine::new(llama.model.clone(), 3).unwrap_or_else(|error| panic!("{error}"));
    let mut tokens = vec![Vec::new(); 3];
    let mut steps = 0;
    while steps == 0 || engine.sequences() > 0 {
        let added = match steps {
            0 => &prompts[..1],
            3 => &prompts[1..],
            _ => &[],
        };
        for prompt in added {
            engine
                .add_request(prompt, &options)
                .unwrap_or_else(|error| panic!("{error}"));
        }
        steps += 1;
        for StepOutput { slot, token, .. } in
            engine.step().unwrap_or_else(|error| panic!("{error}"))
        {
            tokens[slot].extend(token);
        }
        assert_eq!(tokens[0].len(), steps.min(20), "a token each step");
        // The first prompt is read in the step after it was added, the second in the one after
        // that; with look-ahead each has its token one step later.
        assert!(
            steps < 6 || (!tokens[1].is_empty() && (steps < 7 || !tokens[2].is_empty())),
            "{tokens:?} after {steps} steps"
        );
    }
    assert_eq!(tokens, prompts.map(alone));
}

/// Sequences that are added while others run, their prompts in chunks of 100 tokens. In f16 on
/// tensor cores all run in the passes of the prompts, where a token that is nearly as likely as the
/// host's may be chosen: each must be within 0.05 of the host's greatest logit after the same
/// tokens.
pub(super) fn in_passes_of_prompts(device: &Device) {
    let (_guard, folder) = quantised();
    let dtype = dtype_on(device);
    let llama = open(&folder, device, dtype);
    let tokens = heldout_tokens(&llama);
    let lengths = [5, 150, 1, 64, 199, 2, 97];
    let mut sequences: Vec<Vec<u32>> = lengths
        .iter()
        .enumerate()
        .map(|(i, &length)| tokens[200 * i..][..length].to_vec())
        .collect();
    let options = RequestParams {
        max_new_tokens: 50,
        ..RequestParams::default()
    };
    let mut engine =
        Engine::new(llama.model.clone(), lengths.len()).unwrap_or_else(|error| panic!("{error}"));
    engine.set_prefill_chunk(100);
    let (mut added, mut steps) = (0, 0);
    while added < lengths.len() || engine.sequences() > 0 {
        // The first request is added alone, the others two at a time.
        while added < lengths.len().min(1 + 2 * (steps / 3)) {
            assert_eq!(
                engine
                    .add_request(&sequences[added], &options)
                    .unwrap_or_else(|error| panic!("{error}")),
                added
            );
            added += 1;
        }
        steps += 1;
        for StepOutput { slot, token, .. } in
            engine.step().unwrap_or_else(|error| panic!("{error}"))
        {
            sequences[slot].extend(token);
        }
    }
    let host = open(&folder, &Device::flex(), FloatDType::F32);
    let worst = worst_gap(&host.model, &sequences, &lengths, 50);
    assert!(worst < gap_of(dtype));
}

/// Returns the dtype in which prompts run on a device: f16 on tensor cores.
pub(super) fn dtype_on(device: &Device) -> FloatDType {
    if is_card(device) {
        FloatDType::F16
    } else {
        FloatDType::F32
    }
}

/// Returns the bound of [`worst_gap`] for a dtype.
pub(super) fn gap_of(dtype: FloatDType) -> f64 {
    if dtype == FloatDType::F16 { 0.05 } else { 1e-3 }
}

/// Returns the tokens of the held-out text.
pub(super) fn heldout_tokens(llama: &LanguageModel) -> Vec<u32> {
    let text = std::fs::read_to_string(example().join("heldout.txt"))
        .unwrap_or_else(|error| panic!("{error}"));
    llama
        .tokenizer()
        .and_then(|tokenizer| Ok(tokenizer.encode(&text)?))
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Returns by how much the logit of a new token is at most below the host's greatest logit after
/// the same tokens. `lengths` are the lengths of the prompts, which `new_tokens` follow.
pub(super) fn worst_gap(
    host: &Model,
    sequences: &[Vec<u32>],
    lengths: &[usize],
    new_tokens: usize,
) -> f64 {
    let (mut worst, mut others) = (0f64, 0);
    for (sequence, &length) in sequences.iter().zip(lengths) {
        assert_eq!(sequence.len(), length + new_tokens);
        let logits = logits(host, sequence);
        let vocab = logits.len() / sequence.len();
        for position in length..sequence.len() {
            let row = &logits[(position - 1) * vocab..][..vocab];
            let gap =
                row.iter().copied().fold(f64::MIN, f64::max) - row[sequence[position] as usize];
            worst = worst.max(gap);
            others += usize::from(gap > 0.0);
        }
    }
    println!(
        "{others} of {} tokens are not the host's, at most {worst:.4} below its greatest logit",
        new_tokens * lengths.len()
    );
    worst
}
