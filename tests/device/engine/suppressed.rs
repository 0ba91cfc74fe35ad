//! Suppressed tokens, compared with those of Flex.

use super::{decode, decode_with, open};
use crate::llama::quantised;
use burn::tensor::{Device, FloatDType};
use marlin_lm::{RequestParams, Sampling, Suppression};

/// Checks sequences that each suppress other tokens, chosen from those that the host decodes
/// without suppression. Suppressed are one token, a stop token up to a minimum number of tokens,
/// and a word of one or three tokens. With a word of one token, a step starts before the host has
/// the tokens of the previous step.
pub(super) fn as_on_the_host(device: &Device) {
    let (_guard, folder) = quantised();
    let host = open(&folder, &Device::flex(), FloatDType::F32);
    let device = open(&folder, device, FloatDType::F32);
    let free = decode(&host, Sampling::GREEDY, 30);
    for word in [10..11, 9..12] {
        let options = |index: usize| {
            let (free, word) = (&free[index], word.clone());
            let suppression = match index {
                0 => Suppression::NONE,
                _ => Suppression {
                    suppress_tokens: vec![free[5]],
                    bad_words_ids: vec![free[word].to_vec()],
                    min_new_tokens: 8 + index,
                    min_length: 0,
                },
            };
            let stop_tokens = if index == 0 {
                Vec::new()
            } else {
                vec![free[2]]
            };
            RequestParams {
                suppression,
                stop_tokens,
                max_new_tokens: 0,
                ..RequestParams::default()
            }
        };
        let (found, expected) = (
            decode_with(&device, 30, options),
            decode_with(&host, 30, options),
        );
        assert_eq!(found, expected, "words of {} tokens", word.len());
        for (index, tokens) in found.iter().enumerate().skip(1) {
            let Suppression {
                suppress_tokens,
                bad_words_ids,
                min_new_tokens,
                ..
            } = options(index).suppression;
            let has_word = tokens
                .windows(word.len())
                .any(|run| run == bad_words_ids[0]);
            assert!(
                tokens.len() >= min_new_tokens
                    && !tokens.contains(&suppress_tokens[0])
                    && !has_word,
                "{index}: {tokens:?}"
            );
        }
        assert_eq!(found[0], free[0], "the sequence without suppressed tokens");
    }
}
