//! Models with experts: the golden folders of all formats on the device, and their decoding by an
//! engine.

use crate::layer::values;
use crate::setup::{Named, computes, is_card, is_cpu_runtime, trial};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use libtest_mimic::Trial;
use marlin_kernels::ActivationDtype;
use marlin_lm::{Engine, LanguageModel, Model, OpenOptions, RequestParams, Sampling, StepOutput};
use marlin_testing::{relative_error, repository_file};
use safetensors::SafeTensors;
use std::path::PathBuf;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(
        device,
        "mixtures::golden_folders_give_the_logits_of_transformers",
        golden_logits,
    ));
    // CubeCL's CPU runtime takes a minute to compile the kernels of all shapes.
    if device.name == "cpu" {
        return;
    }
    tests.push(trial(
        device,
        "mixtures::an_engine_chooses_the_tokens_of_whole_passes",
        engine,
    ));
}

/// The folder with act-order and zero points, and an expert that all tokens have.
const ACT_ORDER: &str = "moe-gptq-int4-g32-asym-act-order";

/// The folder of gpt-oss, with a window that is longer than the prompts of others.
const GPT_OSS: &str = "moe-gpt-oss-mxfp4";

/// Returns the golden folders of models with experts.
fn folders() -> Vec<PathBuf> {
    let golden = repository_file("tests/golden");
    let entries = golden.read_dir().unwrap_or_else(|error| panic!("{error}"));
    let mut folders: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap_or_else(|error| panic!("{error}")).path())
        .filter(|path| {
            let config = std::fs::read_to_string(path.join("config.json")).unwrap_or_default();
            config.contains("num_experts_per_tok")
        })
        .collect();
    folders.sort();
    assert!(folders.len() > 10, "{} folders", folders.len());
    folders
}

fn open(folder: &PathBuf, device: &Device, dtype: FloatDType) -> LanguageModel {
    let options = OpenOptions {
        dtype: Some(dtype),
        with_tokenizer: false,
        ..OpenOptions::default()
    };
    LanguageModel::open(folder, device, &options).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the logits [seq, vocab] of whole sequences.
fn logits(model: &Model, tokens: &[u32]) -> Vec<f64> {
    let ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    let ids = Tensor::<2, Int>::from_data(
        TensorData::new(ids, [1, tokens.len()]),
        (&model.device(), DType::I32),
    );
    values(model.forward_full(ids).cast(FloatDType::F32))
}

/// The fraction of tokens for which rounding may choose other experts: none of the five tokens of
/// most folders. Of the 320 of `arch-gpt-oss`, matmuls of inputs in TF32, which cards take for f32,
/// change the experts of one in transformers, and its logits by 40 %; the other tokens' errors are
/// 6e-4.
const OTHER_EXPERTS: f64 = 0.02;

/// Compares the logits of each token with those of transformers in f32. In f16 weights of some
/// formats and all activations are rounded; a wrong expert gives an error above 0.1.
fn golden_logits(device: &Device) {
    let is_slow = is_cpu_runtime(device);
    let folders = folders().into_iter();
    for folder in folders.filter(|folder| !is_slow || folder.ends_with(ACT_ORDER)) {
        let name = folder.display();
        let bytes = std::fs::read(folder.join("expected.safetensors"))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let expected = SafeTensors::deserialize(&bytes).unwrap_or_else(|error| panic!("{error}"));
        let tensor = |tensor| {
            expected
                .tensor(tensor)
                .unwrap_or_else(|error| panic!("{error}"))
        };
        let tokens: Vec<u32> = tensor("input_ids")
            .data()
            .as_chunks::<8>()
            .0
            .iter()
            .map(|&bytes| i64::from_le_bytes(bytes) as u32)
            .collect();
        let expected: Vec<f32> = tensor("logits")
            .data()
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&bytes| f32::from_le_bytes(bytes))
            .collect();
        for (dtype, tolerance) in [(ActivationDtype::F32, 3e-3), (ActivationDtype::F16, 2e-2)] {
            if !computes(device, dtype) {
                continue;
            }
            let model = open(&folder, device, crate::setup::float_dtype(dtype)).model;
            let vocab = model.config().vocab_size;
            let found = logits(&model, &tokens);
            let errors = found
                .chunks(vocab)
                .zip(expected.chunks(vocab))
                .map(|(found, expected)| relative_error(found, expected));
            let wrong: Vec<f64> = errors.filter(|error| *error > tolerance).collect();
            assert!(
                wrong.len() as f64 <= OTHER_EXPERTS * tokens.len() as f64,
                "{name} in {dtype}: of {} tokens {} have relative errors of {wrong:?}",
                tokens.len(),
                wrong.len()
            );
        }
    }
}

/// Decodes sequences that join and leave, so that the routing changes with every step of a recorded
/// graph. Each chosen token must have the largest logit of a pass over its whole sequence, or one
/// that is as large as rounding allows.
fn engine(device: &Device) {
    let dtype = match computes(device, ActivationDtype::F16) && is_card(device) {
        true => FloatDType::F16,
        false => FloatDType::F32,
    };
    let folders = folders();
    let quantised = folders.iter().filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        [ACT_ORDER, "moe-ct-mxfp4", "arch-mixtral", GPT_OSS].contains(&&*name)
    });
    let mut checked = 0;
    for folder in quantised {
        let model = open(folder, device, dtype).model;
        let vocab = model.config().vocab_size as u32;
        let mut engine = Engine::new(model.clone(), 4).unwrap_or_else(|error| panic!("{error}"));
        let prompts: Vec<Vec<u32>> = (0..6u32)
            .map(|prompt| {
                (0..(3 + 2 * prompt) * if folder.ends_with(GPT_OSS) { 5 } else { 1 })
                    .map(|i| (5 * i + 7 * prompt + 3) % vocab)
                    .collect()
            })
            .collect();
        let mut sequences = prompts.clone();
        let (mut waiting, mut of_slot) = (0..prompts.len(), [0; 4]);
        loop {
            while engine.sequences() < 4
                && let Some(index) = waiting.next()
            {
                let options = RequestParams {
                    sampling: Sampling::GREEDY,
                    max_new_tokens: 8 + index,
                    ..RequestParams::default()
                };
                let slot = engine
                    .add_request(&prompts[index], &options)
                    .unwrap_or_else(|error| panic!("{error}"));
                of_slot[slot] = index;
            }
            if engine.sequences() == 0 {
                break;
            }
            for StepOutput { slot, token, end } in
                engine.step().unwrap_or_else(|error| panic!("{error}"))
            {
                sequences[of_slot[slot]].extend(token);
                assert!(!matches!(end, Some(Err(_))), "{end:?}");
            }
        }
        for (prompt, sequence) in prompts.iter().zip(&sequences) {
            assert!(sequence.len() > prompt.len(), "{sequence:?}");
            let all = logits(&model, sequence);
            for (place, &token) in sequence.iter().enumerate().skip(prompt.len()) {
                let of_token = &all[(place - 1) * vocab as usize..][..vocab as usize];
                let best = of_token.iter().copied().fold(f64::MIN, f64::max);
                let found = of_token[token as usize];
                assert!(
                    best - found <= 2e-2 * best.abs().max(1.0),
                    "{}: token {token} at {place} has a logit of {found}, and the best {best}",
                    folder.display()
                );
                checked += 1;
            }
        }
    }
    assert!(checked > 100, "{checked} tokens");
}
