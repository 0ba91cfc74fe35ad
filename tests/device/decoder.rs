//! Decode of several sequences with the shipped model: the device's tokens against those of Flex, and replayed graphs.

use crate::llama::{example, logits, quantised};
use crate::setup::{Named, is_card, is_cpu_runtime, trial};
use burn::tensor::{Device, FloatDType};
use libtest_mimic::Trial;
use marlin_llama::{Decoded, Decoder, Llama, LlamaConfig, LlamaModel, OpenOptions, Sampling, SequenceOptions, StopReason, Suppression};
use std::path::Path;
use std::sync::Arc;
use std::thread;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(device, "decoder::a_small_model_goes_on_on_another_thread", small_on_other_threads));
    tests.push(trial(device, "decoder::sequences_go_on_as_on_the_host", as_on_the_host));
    tests.push(trial(device, "decoder::long_runs_keep_memory_and_text", long_run));
    tests.push(trial(device, "decoder::the_same_seed_gives_the_same_tokens", same_seed));
    // CubeCL's CPU runtime takes minutes for the shipped model; there the small model covers this.
    if device.name == "cpu" {
        return;
    }
    if device.name == "cuda" {
        tests.push(trial(device, "decoder::kernels_compiled_ahead_give_the_same_tokens", compiled_ahead));
    }
    tests.push(trial(device, "decoder::suppressed_tokens_are_those_of_the_host", suppressed));
    tests.push(trial(device, "decoder::it_goes_on_on_another_thread", on_other_threads));
    tests.push(trial(device, "decoder::sequences_go_on_while_a_long_prompt_is_read", while_read));
    tests.push(trial(device, "decoder::sequences_go_on_in_passes_of_prompts", in_passes_of_prompts));
}

/// Decodes rounds of sequences up to the end of the cache in the same slots, and checks that every round gives the same tokens and that memory does not
/// grow after the second.
fn long_run(device: &Device) {
    let (_guard, folder) = quantised();
    let is_card = is_card(device);
    // The host's steps take a thousand times longer.
    let (slots, max_len, rounds) = if is_card { (64, 512, 4) } else { (2, 48, 3) };
    let dtype = if is_card && device.supports_dtype(FloatDType::F16) { FloatDType::F16 } else { FloatDType::F32 };
    let options = OpenOptions { dtype: Some(dtype), max_len: Some(max_len), with_tokenizer: true, head: None };
    let llama = Llama::open(&folder, device, &options).unwrap_or_else(|error| panic!("{error}"));
    let mut decoder = Decoder::new(llama.model.clone(), slots).unwrap_or_else(|error| panic!("{error}"));
    let sampling = Sampling { temperature: 1.0, top_k: Some(100), top_p: 0.99, min_p: 1e-3, repetition_penalty: 1.05 };
    let (mut total, mut first, mut memory) = (0, Vec::new(), Vec::new());
    for _ in 0..rounds {
        for seed in 0..slots as u64 {
            let prompt = [1 + seed as u32, 2, 3, 4];
            let options =
                SequenceOptions { sampling, suppression: Suppression::NONE, seed, stop_tokens: Vec::new(), max_new_tokens: usize::MAX };
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
    assert_eq!(total, if is_card { 130_304 } else { 270 }, "tokens of all rounds");
    assert_eq!(memory[0].is_some(), *device != Device::flex(), "every device except Flex reports its memory");
    assert!(memory[1..].iter().all(|bytes| *bytes == memory[1]), "memory grows: {memory:?}");
}

fn open(folder: &Path, device: &Device, dtype: FloatDType) -> Llama {
    let options = OpenOptions { dtype: Some(dtype), max_len: Some(256), with_tokenizer: true, head: None };
    Llama::open(folder, device, &options).unwrap_or_else(|error| panic!("{error}"))
}

/// Prompts of different lengths in tokens.
const PROMPTS: [&str; 5] = ["fn main() {", "/// Returns the ", "use std::", "impl<T> Iterator for", "a"];

/// Returns the tokens that follow each prompt, the first `new_tokens`, the next three less, and so on.
fn decode(llama: &Llama, sampling: Sampling, new_tokens: usize) -> Vec<Vec<u32>> {
    decode_with(llama, new_tokens, |index| SequenceOptions {
        sampling,
        suppression: Suppression::NONE,
        seed: index as u64,
        stop_tokens: Vec::new(),
        max_new_tokens: 0,
    })
}

/// The same with the options of each prompt, but for the number of tokens. The first three join together; the others join later, while a slot is free.
fn decode_with(llama: &Llama, new_tokens: usize, options: impl Fn(usize) -> SequenceOptions) -> Vec<Vec<u32>> {
    let mut decoder = Decoder::new(llama.model.clone(), 4).unwrap_or_else(|error| panic!("{error}"));
    let tokenizer = llama.tokenizer().unwrap_or_else(|error| panic!("{error}"));
    let mut tokens = vec![Vec::new(); PROMPTS.len()];
    let mut of_slot = [0; 4];
    let mut waiting = PROMPTS.iter().enumerate();
    for step in 0.. {
        while decoder.sequences() < if step == 0 { 3 } else { 4 }
            && let Some((index, prompt)) = waiting.next()
        {
            let prompt = tokenizer.encode(prompt).unwrap_or_else(|error| panic!("{error}"));
            let options = SequenceOptions { max_new_tokens: new_tokens - 3 * index, ..options(index) };
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

/// Returns true if the runtime of a device records graphs; CubeCL's CPU runtime does not.
fn records_graphs(device: &Device) -> bool {
    marlin_decode::has_kernels(device) && !is_cpu_runtime(device)
}

fn as_on_the_host(device: &Device) {
    let (_guard, folder) = quantised();
    let found = decode(&open(&folder, device, FloatDType::F32), Sampling::GREEDY, 40);
    let expected = decode(&open(&folder, &Device::flex(), FloatDType::F32), Sampling::GREEDY, 40);
    assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [40, 37, 34, 31, 28]);
    assert_eq!(found, expected);
}

/// Sequences that each suppress other tokens: of what the host chooses without that one token, a stop token up to a number of tokens, and either a word of one
/// token, with which steps start before the host has the tokens of the last one, or one of three.
fn suppressed(device: &Device) {
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
            let stop_tokens = if index == 0 { Vec::new() } else { vec![free[2]] };
            SequenceOptions { sampling: Sampling::GREEDY, suppression, seed: 0, stop_tokens, max_new_tokens: 0 }
        };
        let (found, expected) = (decode_with(&device, 30, options), decode_with(&host, 30, options));
        assert_eq!(found, expected, "words of {} tokens", word.len());
        for (index, tokens) in found.iter().enumerate().skip(1) {
            let Suppression { suppress_tokens, bad_words_ids, min_new_tokens, .. } = options(index).suppression;
            let has_word = tokens.windows(word.len()).any(|run| run == bad_words_ids[0]);
            assert!(tokens.len() >= min_new_tokens && !tokens.contains(&suppress_tokens[0]) && !has_word, "{index}: {tokens:?}");
        }
        assert_eq!(found[0], free[0], "the sequence without suppressed tokens");
    }
}

fn same_seed(device: &Device) {
    let (_guard, folder) = quantised();
    let llama = open(&folder, device, if device.supports_dtype(FloatDType::F16) { FloatDType::F16 } else { FloatDType::F32 });
    let sampling = Sampling { temperature: 0.8, top_k: Some(40), top_p: 0.95, repetition_penalty: 1.1, ..Sampling::GREEDY };
    let first = decode(&llama, sampling, 40);
    assert_eq!(decode(&llama, sampling, 40), first);
    assert_ne!(decode(&llama, Sampling { temperature: 1.5, ..sampling }, 40), first);
}

/// Checks that all operations of a step and of a prompt run on further servers of the card, and leave its own as it was.
fn compiled_ahead(device: &Device) {
    let (_guard, folder) = quantised();
    let llama = open(&folder, device, if device.supports_dtype(FloatDType::F16) { FloatDType::F16 } else { FloatDType::F32 });
    let mut decoder = Decoder::new(llama.model.clone(), 4).unwrap_or_else(|error| panic!("{error}"));
    let compiled = decoder.compile_ahead(30);
    assert!(compiled.operations > 0 && compiled.failed == 0, "{compiled:?}");
    let found = decode(&llama, Sampling::GREEDY, 40);
    assert_eq!(decoder.compile_ahead(1).failed, 0, "operations that could not run");
    assert_eq!(decode(&llama, Sampling::GREEDY, 40), found);
}

fn on_other_threads(device: &Device) {
    let (_guard, folder) = quantised();
    let llama = open(&folder, device, FloatDType::F32);
    let tokenizer = llama.tokenizer().unwrap_or_else(|error| panic!("{error}"));
    let prompts = PROMPTS.map(|prompt| tokenizer.encode(prompt).unwrap_or_else(|error| panic!("{error}")));
    assert_same_on_other_threads(&llama.model, &prompts, 30);
}

/// A model of one layer with random weights, and few tokens: CubeCL's CPU runtime compiles kernels for each length.
fn small_on_other_threads(device: &Device) {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "eos_token_id": 2,
    });
    let config = LlamaConfig::from_json(&config.to_string()).unwrap_or_else(|error| panic!("{error}"));
    let model = LlamaModel::random(&config, 64, FloatDType::F32, None, device).unwrap_or_else(|error| panic!("{error}"));
    assert_same_on_other_threads(&Arc::new(model), &[vec![1, 2, 3], vec![5; 3]], 5);
}

/// Checks that a decoder made on another thread than the model, and moved to a new thread every few steps, gives the same tokens as on one thread, and
/// still replays graphs.
fn assert_same_on_other_threads(model: &Arc<LlamaModel>, prompts: &[Vec<u32>], max_new_tokens: usize) {
    let options =
        SequenceOptions { sampling: Sampling::GREEDY, suppression: Suppression::NONE, seed: 0, stop_tokens: Vec::new(), max_new_tokens };
    let join = |decoder: &mut Decoder, index: usize| {
        let slot = decoder.join(&prompts[index], &options).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(slot, index);
    };
    let steps = |decoder: &mut Decoder, tokens: &mut [Vec<u32>]| {
        for _ in 0..2 {
            for Decoded { slot, token, .. } in decoder.step().unwrap_or_else(|error| panic!("{error}")) {
                tokens[slot].extend(token);
            }
        }
    };
    let run = |threads: bool| {
        let mut tokens = vec![Vec::new(); prompts.len()];
        let new = || Decoder::new(model.clone(), prompts.len()).unwrap_or_else(|error| panic!("{error}"));
        let on_thread = |decoder: &mut Decoder, tokens: &mut Vec<Vec<u32>>| match threads {
            true => thread::scope(|scope| {
                scope.spawn(|| steps(decoder, tokens));
            }),
            false => steps(decoder, tokens),
        };
        let mut decoder = if threads {
            thread::scope(|scope| scope.spawn(new).join()).unwrap_or_else(|_| panic!("a decoder cannot be made on another thread"))
        } else {
            new()
        };
        for index in 0..prompts.len() {
            join(&mut decoder, index);
            on_thread(&mut decoder, &mut tokens);
        }
        while decoder.sequences() > 0 {
            on_thread(&mut decoder, &mut tokens);
        }
        assert_eq!(decoder.is_captured(), records_graphs(&model.device()), "steps replayed as graphs");
        tokens
    };
    let expected = run(false);
    assert!(expected.iter().all(|tokens| tokens.len() == max_new_tokens), "{expected:?}");
    assert_eq!(run(true), expected);
}

/// Checks that a running sequence gets a token in every step while long prompts are read, and that all sequences continue as they do without the others.
fn while_read(device: &Device) {
    let (_guard, folder) = quantised();
    let options = OpenOptions { dtype: Some(FloatDType::F32), max_len: None, with_tokenizer: true, head: None };
    let llama = Llama::open(&folder, device, &options).unwrap_or_else(|error| panic!("{error}"));
    let text = std::fs::read_to_string(example().join("heldout.txt")).unwrap_or_else(|error| panic!("{error}"));
    let tokens = llama.tokenizer().and_then(|tokenizer| Ok(tokenizer.encode(&text)?)).unwrap_or_else(|error| panic!("{error}"));
    let long = llama.model.max_len() - 40;
    let prompts = [&tokens[..5], &tokens[..long], &tokens[long..2 * long]];
    let options = SequenceOptions {
        sampling: Sampling::GREEDY,
        suppression: Suppression::NONE,
        seed: 0,
        stop_tokens: Vec::new(),
        max_new_tokens: 20,
    };
    let alone = |prompt: &[u32]| {
        let mut decoder = Decoder::new(llama.model.clone(), 1).unwrap_or_else(|error| panic!("{error}"));
        decoder.join(prompt, &options).unwrap_or_else(|error| panic!("{error}"));
        let mut tokens = Vec::new();
        while decoder.sequences() > 0 {
            tokens.extend(decoder.step().unwrap_or_else(|error| panic!("{error}")).into_iter().filter_map(|decoded| decoded.token));
        }
        tokens
    };
    let mut decoder = Decoder::new(llama.model.clone(), 3).unwrap_or_else(|error| panic!("{error}"));
    let mut tokens = vec![Vec::new(); 3];
    let mut steps = 0;
    while steps == 0 || decoder.sequences() > 0 {
        let joining = match steps {
            0 => &prompts[..1],
            3 => &prompts[1..],
            _ => &[],
        };
        for prompt in joining {
            decoder.join(prompt, &options).unwrap_or_else(|error| panic!("{error}"));
        }
        steps += 1;
        for Decoded { slot, token, .. } in decoder.step().unwrap_or_else(|error| panic!("{error}")) {
            tokens[slot].extend(token);
        }
        assert_eq!(tokens[0].len(), steps.min(20), "a token each step");
        // The first prompt is read in the step after it joined, the second in the one after that; with look-ahead each has its token one step later.
        assert!(steps < 6 || (!tokens[1].is_empty() && (steps < 7 || !tokens[2].is_empty())), "{tokens:?} after {steps} steps");
    }
    assert_eq!(tokens, prompts.map(alone));
}

/// Sequences that join while others run, their prompts in chunks of 100 tokens. In f16 on tensor cores all run in the passes of the prompts, where a token that is
/// nearly as likely as the host's may be chosen: each must be within 0.05 of the host's greatest logit after the same tokens.
fn in_passes_of_prompts(device: &Device) {
    let (_guard, folder) = quantised();
    let dtype = if is_card(device) { FloatDType::F16 } else { FloatDType::F32 };
    let llama = open(&folder, device, dtype);
    let text = std::fs::read_to_string(example().join("heldout.txt")).unwrap_or_else(|error| panic!("{error}"));
    let tokens = llama.tokenizer().and_then(|tokenizer| Ok(tokenizer.encode(&text)?)).unwrap_or_else(|error| panic!("{error}"));
    let lengths = [5, 150, 1, 64, 199, 2, 97];
    let mut sequences: Vec<Vec<u32>> = lengths.iter().enumerate().map(|(i, &length)| tokens[200 * i..][..length].to_vec()).collect();
    let options = SequenceOptions {
        sampling: Sampling::GREEDY,
        suppression: Suppression::NONE,
        seed: 0,
        stop_tokens: Vec::new(),
        max_new_tokens: 50,
    };
    let mut decoder = Decoder::new(llama.model.clone(), lengths.len()).unwrap_or_else(|error| panic!("{error}"));
    decoder.set_prefill_chunk(100);
    let (mut joined, mut steps) = (0, 0);
    while joined < lengths.len() || decoder.sequences() > 0 {
        // The first alone, the others two at a time.
        while joined < lengths.len().min(1 + 2 * (steps / 3)) {
            assert_eq!(decoder.join(&sequences[joined], &options).unwrap_or_else(|error| panic!("{error}")), joined);
            joined += 1;
        }
        steps += 1;
        for Decoded { slot, token, .. } in decoder.step().unwrap_or_else(|error| panic!("{error}")) {
            sequences[slot].extend(token);
        }
    }
    let host = open(&folder, &Device::flex(), FloatDType::F32);
    let (mut worst, mut others) = (0f64, 0);
    for (sequence, length) in sequences.iter().zip(lengths) {
        assert_eq!(sequence.len(), length + 50);
        let logits = logits(&host.model, sequence);
        let vocab = logits.len() / sequence.len();
        for position in length..sequence.len() {
            let row = &logits[(position - 1) * vocab..][..vocab];
            let gap = row.iter().copied().fold(f64::MIN, f64::max) - row[sequence[position] as usize];
            worst = worst.max(gap);
            others += usize::from(gap > 0.0);
        }
    }
    println!("{others} of {} tokens are not the host's, at most {worst:.4} below its greatest logit", 50 * lengths.len());
    assert!(worst < if dtype == FloatDType::F16 { 0.05 } else { 1e-3 });
}
