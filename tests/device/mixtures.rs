//! Models with experts: the golden folders of all formats on the device, and their decoding by an
//! engine.

use crate::engine::requests;
use crate::layer::values;
use crate::setup::{Named, computes, is_card, is_cpu_runtime, trial};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use libtest_mimic::Trial;
use marlin_kernels::ActivationDtype;
use marlin_lm::{Engine, LanguageModel, Model, OpenOptions, RequestParams, Sampling};
use marlin_testing::{GoldenFolder, GoldenTensors, relative_error};

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
fn folders() -> Vec<GoldenFolder> {
    let mut folders = GoldenFolder::all();
    folders.retain(|golden| golden.config().get("num_experts_per_tok").is_some());
    assert!(folders.len() > 10, "{} folders", folders.len());
    folders
}

fn open(golden: &GoldenFolder, device: &Device, dtype: FloatDType) -> LanguageModel {
    let options = OpenOptions {
        dtype: Some(dtype),
        with_tokenizer: false,
        ..OpenOptions::default()
    };
    LanguageModel::open(golden.dir(), device, &options).unwrap_or_else(|error| panic!("{error}"))
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
    for golden in folders.filter(|golden| !is_slow || golden.name == ACT_ORDER) {
        let name = &golden.name;
        let expected = GoldenTensors::read(&golden.expected());
        let (tokens, (_, expected)) = (expected.tokens(), expected.floats("logits"));
        for (dtype, tolerance) in [(ActivationDtype::F32, 3e-3), (ActivationDtype::F16, 2e-2)] {
            if !computes(device, dtype) {
                continue;
            }
            let model = open(&golden, device, crate::setup::float_dtype(dtype)).model;
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
    let mut folders = folders();
    folders.retain(|golden| {
        [ACT_ORDER, "moe-ct-mxfp4", "arch-mixtral", GPT_OSS].contains(&&*golden.name)
    });
    let mut checked = 0;
    for golden in &folders {
        let model = open(golden, device, dtype).model;
        let vocab = model.config().vocab_size as u32;
        let mut engine = Engine::new(model.clone(), 4).unwrap_or_else(|error| panic!("{error}"));
        let prompts: Vec<Vec<u32>> = (0..6u32)
            .map(|prompt| {
                (0..(3 + 2 * prompt) * if golden.name == GPT_OSS { 5 } else { 1 })
                    .map(|i| (5 * i + 7 * prompt + 3) % vocab)
                    .collect()
            })
            .collect();
        let request = |(index, prompt)| {
            let options = RequestParams {
                sampling: Sampling::GREEDY,
                max_new_tokens: 8 + index,
                ..RequestParams::default()
            };
            (prompt, options)
        };
        let requests: Vec<_> = prompts.into_iter().enumerate().map(request).collect();
        let found = requests::run(&mut engine, 4, 4, &requests);
        for ((prompt, _), tokens) in requests.iter().zip(&found) {
            let sequence = &[&prompt[..], tokens].concat();
            assert!(sequence.len() > prompt.len(), "{sequence:?}");
            let all = logits(&model, sequence);
            for (place, &token) in sequence.iter().enumerate().skip(prompt.len()) {
                let of_token = &all[(place - 1) * vocab as usize..][..vocab as usize];
                let best = of_token.iter().copied().fold(f64::MIN, f64::max);
                let found = of_token[token as usize];
                assert!(
                    best - found <= 2e-2 * best.abs().max(1.0),
                    "{}: token {token} at {place} has a logit of {found}, and the best {best}",
                    golden.name
                );
                checked += 1;
            }
        }
    }
    assert!(checked > 100, "{checked} tokens");
}
