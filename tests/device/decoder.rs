//! Decode of several sequences with the shipped model: what the device chooses against what Flex does, and graphs that are replayed.

use crate::llama::quantised;
use crate::setup::{Named, trial};
use burn::tensor::{Device, FloatDType};
use libtest_mimic::Trial;
use marlin_llama::{Decoded, Decoder, Llama, OpenOptions, Sampling, SequenceOptions};
use std::path::Path;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    // As the tests of the model: too slow to compile for CubeCL's CPU runtime.
    if device.name == "cpu" {
        return;
    }
    tests.push(trial(device, "decoder::sequences_go_on_as_on_the_host", as_on_the_host));
    tests.push(trial(device, "decoder::the_same_seed_gives_the_same_tokens", same_seed));
}

fn open(folder: &Path, device: &Device, dtype: FloatDType) -> Llama {
    let options = OpenOptions { dtype: Some(dtype), max_len: Some(256), with_tokenizer: true, head: None };
    Llama::open(folder, device, &options).unwrap_or_else(|error| panic!("{error}"))
}

/// Prompts of different lengths.
const PROMPTS: [&str; 5] = ["fn main() {", "/// Returns the ", "use std::", "impl<T> Iterator for", "a"];

/// What each prompt goes on with: the first three join together, one of them leaves, the others follow.
fn decode(llama: &Llama, sampling: Sampling, new_tokens: usize) -> Vec<Vec<u32>> {
    let mut decoder = Decoder::new(&llama.model, 4).unwrap_or_else(|error| panic!("{error}"));
    let tokenizer = llama.tokenizer().unwrap_or_else(|error| panic!("{error}"));
    let mut tokens = vec![Vec::new(); PROMPTS.len()];
    let mut of_slot = [0; 4];
    let mut waiting = PROMPTS.iter().enumerate();
    for step in 0.. {
        while decoder.sequences() < if step == 0 { 3 } else { 4 }
            && let Some((index, prompt)) = waiting.next()
        {
            let prompt = tokenizer.encode(prompt).unwrap_or_else(|error| panic!("{error}"));
            let options = SequenceOptions { sampling, seed: index as u64, stop_tokens: Vec::new(), max_new_tokens: new_tokens - 3 * index };
            let slot = decoder.join(&prompt, &options).unwrap_or_else(|error| panic!("{error}"));
            of_slot[slot] = index;
        }
        if decoder.sequences() == 0 {
            break;
        }
        for Decoded { slot, token, end } in decoder.step().unwrap_or_else(|error| panic!("{error}")) {
            tokens[of_slot[slot]].extend(token);
            assert!(!matches!(end, Some(Err(_))), "{end:?}");
        }
    }
    let graphs = burn_marlin::decode::is_fused(&llama.model.device());
    assert_eq!(decoder.is_captured(), graphs, "steps replayed as graphs");
    tokens
}

fn as_on_the_host(device: &Device) {
    let (_guard, folder) = quantised();
    let found = decode(&open(&folder, device, FloatDType::F32), Sampling::GREEDY, 40);
    let expected = decode(&open(&folder, &Device::flex(), FloatDType::F32), Sampling::GREEDY, 40);
    assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [40, 37, 34, 31, 28]);
    assert_eq!(found, expected);
}

fn same_seed(device: &Device) {
    let (_guard, folder) = quantised();
    let llama = open(&folder, device, if device.supports_dtype(FloatDType::F16) { FloatDType::F16 } else { FloatDType::F32 });
    let sampling = Sampling { temperature: 0.8, top_k: Some(40), top_p: 0.95, repetition_penalty: 1.1 };
    let first = decode(&llama, sampling, 40);
    assert_eq!(decode(&llama, sampling, 40), first);
    assert_ne!(decode(&llama, Sampling { temperature: 1.5, ..sampling }, 40), first);
}
