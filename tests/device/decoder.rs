//! Decode of several sequences with the shipped model: what the device chooses against what Flex does, and graphs that are replayed.

use crate::llama::quantised;
use crate::setup::{Named, is_card, trial};
use burn::tensor::{Device, FloatDType};
use libtest_mimic::Trial;
use marlin_llama::{Decoded, Decoder, Llama, OpenOptions, Sampling, SequenceOptions, StopReason};
use std::path::Path;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(device, "decoder::sequences_go_on_as_on_the_host", as_on_the_host));
    tests.push(trial(device, "decoder::long_runs_keep_memory_and_text", long_run));
    tests.push(trial(device, "decoder::the_same_seed_gives_the_same_tokens", same_seed));
}

/// Rounds of sequences up to the model's window, over the same slots: as many tokens as a day's work, and no more memory than after the first rounds.
fn long_run(device: &Device) {
    let (_guard, folder) = quantised();
    let is_card = is_card(device);
    // The host's steps take a thousand times longer.
    let (slots, max_len, rounds) = if is_card { (64, 512, 4) } else { (2, 48, 3) };
    let dtype = if is_card && device.supports_dtype(FloatDType::F16) { FloatDType::F16 } else { FloatDType::F32 };
    let options = OpenOptions { dtype: Some(dtype), max_len: Some(max_len), with_tokenizer: true, head: None };
    let llama = Llama::open(&folder, device, &options).unwrap_or_else(|error| panic!("{error}"));
    let mut decoder = Decoder::new(&llama.model, slots).unwrap_or_else(|error| panic!("{error}"));
    let sampling = Sampling { temperature: 1.0, top_k: Some(100), top_p: 0.99, repetition_penalty: 1.05 };
    let (mut total, mut first, mut memory) = (0, Vec::new(), Vec::new());
    for _ in 0..rounds {
        for seed in 0..slots as u64 {
            let prompt = [1 + seed as u32, 2, 3, 4];
            let options = SequenceOptions { sampling, seed, stop_tokens: Vec::new(), max_new_tokens: usize::MAX };
            decoder.join(&prompt, &options).unwrap_or_else(|error| panic!("{error}"));
        }
        let mut tokens = vec![Vec::new(); slots];
        while decoder.sequences() > 0 {
            for Decoded { slot, token, end } in decoder.step().unwrap_or_else(|error| panic!("{error}")) {
                tokens[slot].extend(token);
                assert!(matches!(end, None | Some(Ok(StopReason::CacheFull))), "{end:?}");
            }
        }
        // The last token is chosen at the last position, and has none itself.
        assert!(tokens.iter().all(|tokens| tokens.len() == max_len - 4 + 1), "sequences end at the window");
        total += tokens.iter().map(Vec::len).sum::<usize>();
        if first.is_empty() {
            first.clone_from(&tokens);
        }
        assert!(tokens == first, "the same seeds give other tokens");
        memory.push(device.memory_pool_usage().map(|usage| usage.bytes_in_use));
    }
    println!("{total} tokens; bytes in use after each round: {memory:?}");
    assert!(!is_card || total > 100_000, "{total} tokens");
    assert!(memory[1..].iter().all(|bytes| *bytes == memory[1]), "memory grows: {memory:?}");
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
    assert_eq!(decoder.is_captured(), records_graphs(&llama.model.device()), "steps replayed as graphs");
    tokens
}

/// CubeCL's CPU runtime records none.
fn records_graphs(device: &Device) -> bool {
    burn_marlin::decode::has_kernels(device) && *device != Device::cpu()
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
