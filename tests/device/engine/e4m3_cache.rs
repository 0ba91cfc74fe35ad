//! Perplexity with a KV cache in e4m3, beside that with a cache in f16.

use super::open;
use super::prompts::heldout_tokens;
use crate::llama::quantised;
use burn::tensor::{Device, FloatDType};
use marlin_lm::{
    AllowedTokens, BatchEngine, BatchOutput, CacheFormat, DecodeToken, LanguageModel, ModelError,
    Pages, PromptPart, RequestParams,
};

const SEQUENCES: usize = 16;
/// The number of tokens of a prompt, the position at which its second part begins, and the number
/// of tokens that decode steps predict.
const PROMPT: usize = 100;
const SECOND_PART: usize = 40;
const PREDICTED: usize = 150;
const PAGE: usize = 64;

/// Predicts held-out tokens from prompts of two passes and decode steps. Elsewhere than on a card
/// with the attention of prompts on tensor cores, the format is refused.
pub(super) fn perplexity(device: &Device) {
    let (_guard, folder) = quantised();
    for dtype in [FloatDType::F16, FloatDType::BF16] {
        if !device.supports_dtype(dtype) {
            continue;
        }
        let llama = open(&folder, device, dtype);
        if !marlin_nn::has_flash_attention(device, dtype, llama.model.config().head_dim) {
            let pages = Pages {
                count: 1,
                size: PAGE,
            };
            let refused = BatchEngine::new(llama.model.clone(), 1, pages, CacheFormat::E4m3);
            assert!(matches!(refused.err(), Some(ModelError::E4m3Cache)));
            continue;
        }
        let [wide, e4m3] = [CacheFormat::Activations, CacheFormat::E4m3]
            .map(|format| measure(&llama, format).exp());
        let change = 100.0 * (e4m3 / wide - 1.0);
        println!(
            "{dtype:?}: perplexity {wide:.4}, with a cache in e4m3 {e4m3:.4} ({change:+.3} %)"
        );
        assert!(wide < 30.0, "{dtype:?}: perplexity {wide}");
        assert!(change.abs() < 0.5, "{dtype:?}: {change:+.3} %");
    }
}

/// Returns the mean negative log-likelihood of a token.
fn measure(llama: &LanguageModel, format: CacheFormat) -> f64 {
    let failed = |error: ModelError| -> ! { panic!("{format:?}: {error}") };
    let tokens = heldout_tokens(llama);
    let length = PROMPT + PREDICTED;
    let sequences: Vec<&[u32]> = tokens.chunks_exact(length).take(SEQUENCES).collect();
    let columns = length.div_ceil(PAGE);
    let pages = Pages {
        count: SEQUENCES * columns,
        size: PAGE,
    };
    let mut engine = BatchEngine::new(llama.model.clone(), SEQUENCES, pages, format)
        .unwrap_or_else(|error| failed(error));
    let page_table: Vec<Vec<u32>> = (0..sequences.len())
        .map(|slot| {
            (0..columns)
                .map(|page| (page * SEQUENCES + slot) as u32)
                .collect()
        })
        .collect();
    let vocab = llama.model.config().vocab_size;
    let only = |slot: usize, token: u32| {
        let mut words = vec![0; vocab.div_ceil(32)];
        words[token as usize / 32] |= 1 << (token % 32);
        AllowedTokens { slot, words }
    };
    for (slot, sequence) in sequences.iter().enumerate() {
        engine
            .add(
                slot,
                &sequence[..PROMPT],
                PROMPT,
                &RequestParams::default(),
                Some(0),
            )
            .unwrap_or_else(|error| failed(error));
    }
    let (mut sum, mut count) = (0.0, 0);
    let mut take = |outputs: Vec<BatchOutput>, position: usize| {
        for (output, sequence) in outputs.into_iter().zip(&sequences) {
            match output {
                BatchOutput::Token { token, logprobs } => {
                    assert_eq!(token, sequence[position]);
                    sum -= f64::from(logprobs.map_or(f32::NAN, |found| found.logprob));
                    count += 1;
                }
                BatchOutput::Computed => {}
                BatchOutput::Failed(error) => panic!("{format:?}: {error}"),
            }
        }
    };
    for (start, end) in [(0, SECOND_PART), (SECOND_PART, PROMPT)] {
        let parts: Vec<PromptPart<'_>> = sequences
            .iter()
            .enumerate()
            .map(|(slot, sequence)| PromptPart {
                slot,
                start,
                tokens: &sequence[start..end],
                pages: &page_table[slot],
                ends: end == PROMPT,
            })
            .collect();
        let allowed = match end {
            PROMPT => (sequences.iter().enumerate())
                .map(|(slot, sequence)| only(slot, sequence[PROMPT]))
                .collect(),
            _ => Vec::new(),
        };
        let step = engine.start(&parts, &[], allowed);
        let step = step.unwrap_or_else(|error| failed(error));
        take(
            engine.finish(step).unwrap_or_else(|error| failed(error)),
            end,
        );
    }
    for position in PROMPT..length - 1 {
        let rows: Vec<DecodeToken<'_>> = sequences
            .iter()
            .enumerate()
            .map(|(slot, sequence)| DecodeToken {
                slot,
                token: Some(sequence[position]),
                position,
                pages: &page_table[slot],
            })
            .collect();
        let allowed = (sequences.iter().enumerate())
            .map(|(slot, sequence)| only(slot, sequence[position + 1]))
            .collect();
        let step = engine.start(&[], &rows, allowed);
        let step = step.unwrap_or_else(|error| failed(error));
        take(
            engine.finish(step).unwrap_or_else(|error| failed(error)),
            position + 1,
        );
    }
    assert_eq!(count, sequences.len() * PREDICTED);
    sum / count as f64
}
