//! Decoding of several requests with the shipped model: the device's tokens are compared with those
//! of Flex, and graphs are replayed.

mod e4m3_cache;
mod prompts;
pub mod requests;
mod served;
mod suppressed;
mod threads;

use crate::llama::quantised;
use crate::setup::{Named, is_card, is_cpu_runtime, trial};
use burn::tensor::{Device, FloatDType};
use libtest_mimic::Trial;
use marlin_lm::{
    BatchEngine, CacheFormat, CompiledAhead, Engine, LanguageModel, OpenOptions, Pages,
    RequestParams, Sampling, StepOutput, StopReason,
};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(
        device,
        "engine::a_small_model_goes_on_on_another_thread",
        threads::small_on_other_threads,
    ));
    tests.push(trial(
        device,
        "engine::sequences_go_on_as_on_the_host",
        as_on_the_host,
    ));
    tests.push(trial(
        device,
        "engine::long_runs_keep_memory_and_text",
        long_run,
    ));
    tests.push(trial(
        device,
        "engine::the_same_seed_gives_the_same_tokens",
        same_seed,
    ));
    // CubeCL's CPU runtime takes minutes for the shipped model; a test with a small model covers
    // that runtime.
    if device.name == "cpu" {
        return;
    }
    if device.name == "cuda" {
        tests.push(trial(
            device,
            "engine::kernels_compiled_ahead_give_the_same_tokens",
            compiled_ahead,
        ));
        tests.push(trial(device, KERNELS_TEST, kernels_of_a_pass));
        tests.push(trial(
            device,
            "engine::all_kernels_of_a_server_are_compiled_ahead",
            all_compiled_ahead,
        ));
    }
    tests.push(trial(
        device,
        "engine::a_cache_in_e4m3_keeps_the_perplexity",
        e4m3_cache::perplexity,
    ));
    tests.push(trial(
        device,
        "engine::suppressed_tokens_are_those_of_the_host",
        suppressed::as_on_the_host,
    ));
    tests.push(trial(
        device,
        "engine::it_goes_on_on_another_thread",
        threads::on_other_threads,
    ));
    tests.push(trial(
        device,
        "engine::sequences_go_on_while_a_long_prompt_is_read",
        prompts::while_read,
    ));
    tests.push(trial(
        device,
        "engine::sequences_go_on_in_passes_of_prompts",
        prompts::in_passes_of_prompts,
    ));
    tests.push(trial(
        device,
        "engine::a_server_goes_on_as_on_the_host",
        served::over_few_pages,
    ));
    tests.push(trial(
        device,
        "engine::a_masked_step_goes_on_without_an_ended_request",
        served::without_an_ended_request,
    ));
}

/// Decodes rounds of sequences up to the end of the cache in the same slots. Checks that every
/// round gives the same tokens and that memory does not grow after the second round.
fn long_run(device: &Device) {
    let (_guard, folder) = quantised();
    let is_card = is_card(device);
    // Steps on the host take a thousand times longer.
    let (slots, max_len, rounds) = if is_card { (64, 512, 4) } else { (2, 48, 3) };
    let dtype = if is_card && device.supports_dtype(FloatDType::F16) {
        FloatDType::F16
    } else {
        FloatDType::F32
    };
    let options = OpenOptions {
        dtype: Some(dtype),
        max_len: Some(max_len),
        with_tokenizer: true,
        ..OpenOptions::default()
    };
    let llama =
        LanguageModel::open(&folder, device, &options).unwrap_or_else(|error| panic!("{error}"));
    let mut engine =
        Engine::new(llama.model.clone(), slots).unwrap_or_else(|error| panic!("{error}"));
    let sampling = Sampling {
        temperature: 1.0,
        top_k: Some(100),
        top_p: 0.99,
        min_p: 1e-3,
        repetition_penalty: 1.05,
        ..Sampling::GREEDY
    };
    let (mut total, mut first, mut memory) = (0, Vec::new(), Vec::new());
    for _ in 0..rounds {
        for seed in 0..slots as u64 {
            let prompt = [1 + seed as u32, 2, 3, 4];
            let options = RequestParams {
                sampling,
                seed,
                ..RequestParams::default()
            };
            engine
                .add_request(&prompt, &options)
                .unwrap_or_else(|error| panic!("{error}"));
        }
        let mut tokens = vec![Vec::new(); slots];
        while engine.sequences() > 0 {
            for StepOutput { slot, token, end } in
                engine.step().unwrap_or_else(|error| panic!("{error}"))
            {
                tokens[slot].extend(token);
                assert!(
                    matches!(end, None | Some(Ok(StopReason::CacheFull))),
                    "{end:?}"
                );
            }
        }
        // The last token is chosen at the last position and has no position itself.
        assert!(
            tokens.iter().all(|tokens| tokens.len() == max_len - 4 + 1),
            "sequences end at the window"
        );
        total += tokens.iter().map(Vec::len).sum::<usize>();
        if first.is_empty() {
            first.clone_from(&tokens);
        }
        assert!(tokens == first, "the same seeds give other tokens");
        memory.push(device.memory_pool_usage().map(|usage| usage.bytes_in_use));
    }
    assert_eq!(
        total,
        if is_card { 130_304 } else { 270 },
        "tokens of all rounds"
    );
    assert_eq!(
        memory[0].is_some(),
        *device != Device::flex(),
        "every device except Flex reports its memory"
    );
    assert!(
        memory[1..].iter().all(|bytes| *bytes == memory[1]),
        "memory grows: {memory:?}"
    );
}

fn open(folder: &Path, device: &Device, dtype: FloatDType) -> LanguageModel {
    let options = OpenOptions {
        dtype: Some(dtype),
        max_len: Some(256),
        with_tokenizer: true,
        ..OpenOptions::default()
    };
    LanguageModel::open(folder, device, &options).unwrap_or_else(|error| panic!("{error}"))
}

/// The prompts, which have different lengths in tokens.
const PROMPTS: [&str; 5] = [
    "fn main() {",
    "/// Returns the ",
    "use std::",
    "impl<T> Iterator for",
    "a",
];

/// Returns the tokens decoded after each prompt: `new_tokens` for the first prompt, three fewer for
/// each further prompt.
fn decode(llama: &LanguageModel, sampling: Sampling, new_tokens: usize) -> Vec<Vec<u32>> {
    decode_with(llama, new_tokens, |index| RequestParams {
        sampling,
        seed: index as u64,
        max_new_tokens: 0,
        ..RequestParams::default()
    })
}

/// The same with the options of each prompt, but for the number of tokens. The first three are
/// added together; the others later, while a slot is free.
fn decode_with(
    llama: &LanguageModel,
    new_tokens: usize,
    options: impl Fn(usize) -> RequestParams,
) -> Vec<Vec<u32>> {
    let mut engine = Engine::new(llama.model.clone(), 4).unwrap_or_else(|error| panic!("{error}"));
    let tokenizer = llama.tokenizer().unwrap_or_else(|error| panic!("{error}"));
    let request = |(index, prompt): (usize, &&str)| {
        let prompt = tokenizer
            .encode(prompt)
            .unwrap_or_else(|error| panic!("{error}"));
        let options = RequestParams {
            max_new_tokens: new_tokens - 3 * index,
            ..options(index)
        };
        (prompt, options)
    };
    let requests: Vec<_> = PROMPTS.iter().enumerate().map(request).collect();
    let tokens = requests::run(&mut engine, 4, 3, &requests);
    assert_eq!(
        engine.is_captured(),
        records_graphs(&llama.model.device()),
        "steps replayed as graphs"
    );
    tokens
}

/// Returns true if the runtime of a device records graphs; Flex and CubeCL's CPU runtime do not.
fn records_graphs(device: &Device) -> bool {
    marlin_nn::has_kernels(device) && !is_cpu_runtime(device)
}

/// Returns the number of tokens after the first prompt. CubeCL's CPU runtime takes a second for a
/// step of the shipped model.
fn new_tokens(device: &Device) -> usize {
    if is_cpu_runtime(device) { 16 } else { 40 }
}

fn as_on_the_host(device: &Device) {
    let (_guard, folder) = quantised();
    let new_tokens = new_tokens(device);
    let tokens_on = |device: &Device| {
        decode(
            &open(&folder, device, FloatDType::F32),
            Sampling::GREEDY,
            new_tokens,
        )
    };
    let found = tokens_on(device);
    assert_eq!(
        found.iter().map(Vec::len).collect::<Vec<_>>(),
        [0, 3, 6, 9, 12].map(|fewer| new_tokens - fewer)
    );
    assert_eq!(found, tokens_on(&Device::flex()));
}

fn same_seed(device: &Device) {
    let (_guard, folder) = quantised();
    let llama = open(
        &folder,
        device,
        if device.supports_dtype(FloatDType::F16) {
            FloatDType::F16
        } else {
            FloatDType::F32
        },
    );
    let sampling = Sampling {
        temperature: 0.8,
        top_k: Some(40),
        top_p: 0.95,
        repetition_penalty: 1.1,
        ..Sampling::GREEDY
    };
    let tokens_with = |sampling| decode(&llama, sampling, new_tokens(device));
    let first = tokens_with(sampling);
    assert_eq!(tokens_with(sampling), first);
    let hot = Sampling {
        temperature: 1.5,
        ..sampling
    };
    assert_ne!(tokens_with(hot), first);
}

/// The name of the test that runs in a process of its own.
const KERNELS_TEST: &str = "engine::the_kernels_of_a_pass_are_those_compiled_ahead";
/// The environment variable with the folder to which CubeCL writes each kernel that a server loads.
const LOADED_KERNELS: &str = "CUBECL_CUDA_DUMP_PTX";

/// Checks that [`Engine::compile_ahead`] compiles exactly the kernels that the passes of
/// [`Engine::warm_up`] launch. The check runs in another process, because CubeCL finds the folder
/// for kernels in the environment.
fn kernels_of_a_pass(device: &Device) {
    if let Some(folder) = std::env::var_os(LOADED_KERNELS) {
        return compare_kernels(device, Path::new(&folder));
    }
    let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let program = std::env::current_exe().unwrap_or_else(|error| panic!("{error}"));
    let output = Command::new(program)
        .args(["--device", "cuda", "--exact"])
        .arg(format!("cuda::{KERNELS_TEST}"))
        .env(LOADED_KERNELS, folder.path())
        .output()
        .unwrap_or_else(|error| panic!("{error}"));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Compares the kernels that are compiled ahead with those of a prompt and of a step, which the
/// card's own server loads as it launches them for the first time.
fn compare_kernels(device: &Device, folder: &Path) {
    let (_guard, model) = quantised();
    let llama = open(&model, device, FloatDType::F16);
    let mut engine = Engine::new(llama.model.clone(), 4).unwrap_or_else(|error| panic!("{error}"));
    device.sync().unwrap_or_else(|error| panic!("{error}"));
    let of_loading = take_files(folder);
    engine.compile_ahead(30);
    let ahead = take_files(folder);
    engine.warm_up(30);
    device.sync().unwrap_or_else(|error| panic!("{error}"));
    let launched = take_files(folder);
    let missing: Vec<_> = launched.difference(&ahead).collect();
    let unused: Vec<_> = ahead
        .difference(&launched)
        .filter(|kernel| !of_loading.contains(*kernel))
        .collect();
    assert!(
        missing.is_empty() && unused.is_empty() && !launched.is_empty(),
        "of {} kernels launched, not compiled ahead: {missing:#?}; compiled ahead and not launched: {unused:#?}",
        launched.len()
    );
}

/// Returns the names of the files in a folder, and removes the files.
fn take_files(folder: &Path) -> BTreeSet<OsString> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{error}"));
    entries
        .map(|entry| {
            let entry = entry.unwrap_or_else(|error| panic!("{error}"));
            fs::remove_file(entry.path()).unwrap_or_else(|error| panic!("{error}"));
            entry.file_name()
        })
        .collect()
}

/// Checks that all operations of a step and of a prompt run on additional servers of the card, and
/// do not change the state of the card's own server.
fn compiled_ahead(device: &Device) {
    let (_guard, folder) = quantised();
    let llama = open(
        &folder,
        device,
        if device.supports_dtype(FloatDType::F16) {
            FloatDType::F16
        } else {
            FloatDType::F32
        },
    );
    let mut engine = Engine::new(llama.model.clone(), 4).unwrap_or_else(|error| panic!("{error}"));
    let compiled = engine.compile_ahead(30);
    assert!(
        compiled.operations > 0 && compiled.failed == 0,
        "{compiled:?}"
    );
    let found = decode(&llama, Sampling::GREEDY, 40);
    assert_eq!(
        engine.compile_ahead(1).failed,
        0,
        "operations that could not run"
    );
    assert_eq!(decode(&llama, Sampling::GREEDY, 40), found);
}

/// Checks that all kernels of a server run on additional servers of the card, and that the number
/// of the set depends on the engine's passes and not on its pages.
fn all_compiled_ahead(device: &Device) {
    let (_guard, folder) = quantised();
    let llama = open(&folder, device, FloatDType::F16);
    let engine = |slots: usize, count: usize, format: CacheFormat| {
        let pages = Pages { count, size: 64 };
        BatchEngine::new(llama.model.clone(), slots, pages, format)
            .unwrap_or_else(|error| panic!("{error}"))
    };
    let mut first = engine(4, 40, CacheFormat::E4m3);
    let CompiledAhead { operations, failed } = first.compile_all();
    assert!(operations > 20 && failed == 0, "{failed} of {operations}");
    let of = |engine: BatchEngine| engine.kernel_set().unwrap_or_default();
    let set = of(first);
    assert_eq!(of(engine(4, 90, CacheFormat::E4m3)), set);
    assert_ne!(of(engine(8, 40, CacheFormat::E4m3)), set);
    assert_ne!(of(engine(4, 40, CacheFormat::Activations)), set);
}
