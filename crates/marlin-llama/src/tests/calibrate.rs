//! Quantisers that look at data, from folder to folder.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use burn::tensor::Device;
use marlin_format::checkpoint::{Checkpoint, CheckpointError, Dtype};
use marlin_format::{FormatError, GroupSize, QuantSpec, Sparsity};
use marlin_quant::QuantError;
use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::json;

use super::folder::logits;
use super::support::*;
use crate::config::read_json;
use crate::quantize::hidden::ROOM;
use crate::quantize::resume::Partial;
use crate::{
    Architecture, Calibration, ChatTemplate, Evaluation, FileFormat, LlamaConfig, LlamaError, Method, QuantizeOptions, QuantizeProgress,
    QuantizeReport, RowOrder, SampleOptions, Tokenizer, calibration_samples, evaluate, quantize_folder,
};

pub(super) const SPEC: QuantSpec = QuantSpec::int4(GroupSize::G32);

pub(super) fn config_of_64() -> LlamaConfig {
    config_with(json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96 }))
}

/// Samples of different lengths, of a few tokens that come again and again as those of a text do.
pub(super) fn samples(config: &LlamaConfig, rng: &mut StdRng) -> Vec<Vec<u32>> {
    let lengths = [1, 40, 17, 40, 64, 64, 33];
    lengths.iter().map(|&length| (0..length).map(|_| (rng.random::<f32>().powi(3) * config.vocab_size as f32) as u32).collect()).collect()
}

pub(super) fn gptq(samples: &[Vec<u32>]) -> QuantizeOptions {
    let calibration = Calibration { samples: samples.to_vec(), device: Device::flex(), dtype: None };
    let method = Method::Gptq { order: RowOrder::WithinGroups, damping: 0.01, awq: false, calibration };
    QuantizeOptions { method, ..QuantizeOptions::default() }
}

pub(super) fn run(source: &Path, target: &Path, options: &QuantizeOptions) -> Result<QuantizeReport, LlamaError> {
    quantize_folder(source, target, &SPEC, options, |_| ControlFlow::Continue(()))
}

/// Runs until `steps` are done, and stops.
#[track_caller]
pub(super) fn stop_after(steps: usize, source: &Path, target: &Path, spec: &QuantSpec, options: &QuantizeOptions) {
    let mut done = 0;
    let error = quantize_folder(source, target, spec, options, |_| {
        done += 1;
        if done == steps { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(error, Err(LlamaError::Stopped)), "{steps}");
}

/// Checks that two folders have the same weights and config, byte for byte.
#[track_caller]
pub(super) fn assert_same_bytes(expected: &Path, found: &Path) {
    for file in ["model.safetensors", "config.json"] {
        assert!(fs::read(expected.join(file)).unwrap() == fs::read(found.join(file)).unwrap(), "{file}");
    }
}

/// The mean divergence of the next tokens of a quantised folder from those of the float one.
pub(super) fn divergence(source: &Path, target: &Path, samples: &[Vec<u32>]) -> f64 {
    let (float, quantized) = (open(source), open(target));
    let tokens: Vec<u32> = samples.concat();
    let found = evaluate(&[&float.model, &quantized.model], &[&tokens], 32, |_, _| {}).unwrap().all;
    assert!(found[0].against.is_none());
    found[1].against.as_ref().unwrap().divergence.mean
}

#[test]
fn gptq_is_nearer_to_the_float_model_than_rounding() {
    let mut rng = rng();
    for architecture in Architecture::ALL {
        let config = config_of(architecture, json!({ "hidden_size": 64, "intermediate_size": 96 }));
        let ((_a, source), (_b, rounded), (_c, calibrated)) = (temporary(), temporary(), temporary());
        write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F32);
        let samples = samples(&config, &mut rng);
        quantize_folder(&source, &rounded, &SPEC, &QuantizeOptions::default(), |_| ControlFlow::Continue(())).unwrap();
        let report = run(&source, &calibrated, &gptq(&samples)).unwrap();
        let tokens = samples.iter().map(Vec::len).sum::<usize>();
        for layer in &report.quantized {
            let loss = layer.loss.as_ref().unwrap();
            assert_eq!((&loss.layer, loss.tokens, loss.fell_back), (&layer.name, tokens, false));
            assert!(loss.loss.is_some_and(|loss| loss > 0.0));
        }
        assert!(!calibrated.with_file_name("model.partial").exists());
        let [before, after] = [&rounded, &calibrated].map(|target| divergence(&source, target, &samples));
        println!("{architecture}: divergence {before:.4} rounded, {after:.4} by GPTQ");
        assert!(after < 0.8 * before, "{architecture}: {after} of {before}");
    }
}

#[test]
fn forms_and_orders_hold_what_the_walk_has_seen() {
    let mut rng = rng();
    let config = config_of_64();
    let (_a, source) = temporary();
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F16);
    let samples = samples(&config, &mut rng);
    let tokens = random_tokens(20, config.vocab_size, &mut rng);
    let of = |order, format| {
        let (_parent, target) = temporary();
        let mut options = QuantizeOptions { format, exclude: vec!["re:.*o_proj".into()], ..gptq(&samples) };
        if let Method::Gptq { order: asked, .. } = &mut options.method {
            *asked = order;
        }
        let report = run(&source, &target, &options).unwrap();
        assert_eq!((report.quantized.len(), report.excluded.len()), (12, 2));
        logits(&open(&target).model, &tokens)
    };
    for order in [RowOrder::Natural, RowOrder::WithinGroups] {
        assert_eq!(of(order, FileFormat::CompressedTensors), of(order, FileFormat::Gptq), "{order:?}");
    }
}

/// Over groups it is a permutation, which readers of compressed-tensors refuse; of one group a channel the files have nothing of it.
#[test]
fn act_order_is_written_where_readers_take_it_alone() {
    let mut rng = rng();
    let config = config_of_64();
    let (_a, source) = temporary();
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F16);
    let (samples, tokens) = (samples(&config, &mut rng), random_tokens(20, config.vocab_size, &mut rng));
    let of = |format, spec: QuantSpec, sparsity| {
        let (parent, target) = temporary();
        let mut options = QuantizeOptions { format, sparsity, ..gptq(&samples) };
        if let Method::Gptq { order, .. } = &mut options.method {
            *order = RowOrder::ActOrder;
        }
        let report = quantize_folder(&source, &target, &spec, &options, |_| ControlFlow::Continue(()));
        assert_eq!((target.exists(), target.with_file_name("model.partial").exists()), (report.is_ok(), false));
        report.map(|_| (parent, target))
    };
    let channel = QuantSpec::int4(GroupSize::Channel);
    let Err(LlamaError::ActOrderGroups { layer, groups }) = of(FileFormat::CompressedTensors, SPEC, Sparsity::Dense) else {
        panic!("act-order over groups")
    };
    assert_eq!(groups, if layer.ends_with("down_proj") { 3 } else { 2 });
    for format in [FileFormat::CompressedTensors, FileFormat::Gptq, FileFormat::Marlin24] {
        let error = of(format, channel, Sparsity::TwoFour);
        assert!(matches!(error, Err(LlamaError::Quantize { source: FormatError::SparsePermuted, .. })), "{format:?}");
    }

    let folders = [FileFormat::CompressedTensors, FileFormat::Gptq].map(|format| of(format, channel, Sparsity::Dense).unwrap());
    let found: Vec<Vec<f32>> = folders.iter().map(|(_, target)| logits(&open(target).model, &tokens)).collect();
    assert_eq!(found[0], found[1]);
    let [(_, packed), (_, gptq)] = &folders;
    assert!(Checkpoint::open(packed).unwrap().names().all(|name| !name.ends_with("g_idx")));
    let config_of = |target: &Path| read_json(&target.join("config.json")).unwrap()["quantization_config"].clone();
    assert_eq!(config_of(packed)["config_groups"]["group_0"]["weights"]["actorder"], json!(null));
    assert_eq!(config_of(gptq)["desc_act"], json!(false));
    // And yet the order counted.
    let (_b, natural) = temporary();
    let mut options = self::gptq(&samples);
    if let Method::Gptq { order, .. } = &mut options.method {
        *order = RowOrder::Natural;
    }
    quantize_folder(&source, &natural, &channel, &options, |_| ControlFlow::Continue(())).unwrap();
    assert_ne!(logits(&open(&natural).model, &tokens), found[0]);
}

#[test]
fn sparsegpt_is_nearer_than_magnitude() {
    let mut rng = rng();
    let config = config_of_64();
    let ((_a, source), (_b, magnitude), (_c, calibrated)) = (temporary(), temporary(), temporary());
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F32);
    let samples = samples(&config, &mut rng);
    run(&source, &magnitude, &QuantizeOptions { sparsity: Sparsity::TwoFour, ..QuantizeOptions::default() }).unwrap();
    let report = run(&source, &calibrated, &QuantizeOptions { sparsity: Sparsity::TwoFour, ..gptq(&samples) }).unwrap();
    assert!(report.quantized.iter().all(|layer| layer.sparsity == Sparsity::TwoFour));
    let [before, after] = [&magnitude, &calibrated].map(|target| divergence(&source, target, &samples));
    println!("divergence {before:.4} by magnitude, {after:.4} by SparseGPT");
    assert!(after < 0.8 * before, "{after} of {before}");
}

#[test]
fn a_stopped_run_goes_on_to_the_same_bytes() {
    let mut rng = rng();
    let config = config_of_64();
    let ((_a, source), (_b, whole), (_c, resumed)) = (temporary(), temporary(), temporary());
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F16);
    let options = gptq(&samples(&config, &mut rng));
    run(&source, &whole, &options).unwrap();
    // Stopped after each layer of the first block and of the second, and when both are done.
    for stop in 1..=16 {
        stop_after(stop, &source, &resumed, &SPEC, &options);
        assert!(!resumed.exists());
    }
    // What a killed run leaves.
    fs::create_dir(resumed.with_file_name("model.partial").join(".block-00001.x1")).unwrap();
    let mut again = options.clone();
    if let Method::Gptq { damping, .. } = &mut again.method {
        *damping = 0.02;
    }
    let Err(LlamaError::OtherRun { argument, before, now, .. }) = run(&source, &resumed, &again) else { panic!("another damping") };
    assert_eq!((argument.as_str(), before.as_str(), now.as_str()), ("damping", "0.01", "0.02"));
    let partial = resumed.with_file_name("model.partial");
    let arguments = read_json(&partial.join("run.json")).unwrap().as_object().cloned().unwrap();
    let report = run(&source, &resumed, &options).unwrap();
    assert!(report.quantized.iter().all(|layer| layer.loss.is_some()));
    assert_same_bytes(&whole, &resumed);
    assert!(!partial.exists());

    // What a run leaves that is killed when its target is complete. JSON may round a loss by a unit in its last place.
    let kept: QuantizeReport = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    let nothing = |_: QuantizeProgress<'_>| panic!("nothing is left to do");
    for format in [FileFormat::Gptq, FileFormat::CompressedTensors] {
        fs::create_dir_all(partial.join("block-00001")).unwrap();
        Partial::new(&resumed, arguments.clone()).keep_report(format, &report).unwrap();
        let found = quantize_folder(&source, &resumed, &SPEC, &options, nothing);
        if format == options.format {
            assert_eq!(found.unwrap(), kept);
            assert!(!partial.exists());
        } else {
            assert!(matches!(found, Err(LlamaError::Checkpoint(CheckpointError::TargetNotEmpty { .. }))), "{found:?}");
        }
        assert_same_bytes(&whole, &resumed);
    }
}

#[test]
fn hidden_states_on_the_host_give_the_same_bytes() {
    let mut rng = rng();
    let config = config_of_64();
    let ((_a, source), (_b, expected)) = (temporary(), temporary());
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F32);
    let samples = samples(&config, &mut rng);
    // With a float layer, past which no sums take the hidden states.
    let options = QuantizeOptions { exclude: vec!["re:.*1.self_attn.o_proj".into()], ..gptq(&samples) };
    run(&source, &expected, &options).unwrap();
    let bytes = 4 * config.hidden_size * samples.iter().map(Vec::len).sum::<usize>();
    // None on the device, some, all of one model, and some of the other.
    for room in [0, bytes / 2, bytes, bytes + bytes / 3] {
        let (_parent, target) = temporary();
        ROOM.set(Some(room));
        run(&source, &target, &options).unwrap();
        ROOM.set(None);
        assert_same_bytes(&expected, &target);
    }
}

#[test]
fn samples_that_do_not_fit_are_refused() {
    let mut rng = rng();
    let config = config_of_64();
    let ((_a, source), (_b, target)) = (temporary(), temporary());
    let mut weights = random_weights(&config, &mut rng);
    write_folder(&source, &config, &weights, Dtype::F32);
    let refused = |samples: &[Vec<u32>]| run(&source, &target, &gptq(samples)).expect_err("samples that do not fit");
    assert!(matches!(refused(&[vec![1, 71]]), LlamaError::Token { token: 71, position: 1, vocab_size: 71 }));
    assert!(matches!(refused(&[vec![1], vec![]]), LlamaError::SampleLength { sample: 1, tokens: 0, limit: 96 }));
    assert!(matches!(refused(&[vec![1; 97]]), LlamaError::SampleLength { sample: 0, tokens: 97, .. }));
    // A layer whose inputs overflow.
    let (_c, broken) = temporary();
    let (_, norm) = weights.get_mut("model.layers.1.input_layernorm.weight").unwrap();
    norm[3] = f32::INFINITY;
    write_folder(&broken, &config, &weights, Dtype::F32);
    let error = run(&broken, &target, &gptq(&samples(&config, &mut rng))).expect_err("infinite activations");
    let LlamaError::Calibrate { layer, source: QuantError::NonFiniteBatch { batch: 0 } } = &error else { panic!("{error:?}") };
    assert_eq!(layer, "model.layers.1.self_attn.q_proj");
    // Few tokens: rounded, and said so.
    let (_d, target) = temporary();
    let report = run(&source, &target, &gptq(&[vec![1, 2, 3]])).unwrap();
    assert!(report.quantized.iter().all(|layer| layer.loss.as_ref().is_some_and(|loss| loss.fell_back)));
    assert!(Checkpoint::open(&target).is_ok());
}

#[test]
fn samples_are_parts_of_documents() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), byte_level_tokenizer().to_string()).unwrap();
    let tokenizer = Tokenizer::open(&dir.path().join("tokenizer.json")).unwrap();
    let file = |name: &str, text: &str| {
        fs::write(dir.path().join(name), text).unwrap();
        dir.path().join(name)
    };
    let options = SampleOptions { samples: 3, max_len: 40, seed: 1 };
    let take = |files: &[std::path::PathBuf], options: &SampleOptions| calibration_samples(files, &tokenizer, None, options);
    // 1 + 100 tokens: two whole samples, and one of 21.
    let text = file("a.txt", &"0123456789".repeat(10));
    let mut found = take(std::slice::from_ref(&text), &options).unwrap();
    assert_eq!(take(std::slice::from_ref(&text), &options).unwrap(), found, "the same seed");
    found.sort_by_key(Vec::len);
    assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [21, 40, 40]);
    // A long text is the same in pieces; a rest of 5 tokens is left out.
    let long = file("b.txt", &"a line of text\n".repeat(20_000));
    let all = take(&[long], &SampleOptions { samples: 7_500, max_len: 40, seed: 0 }).unwrap();
    assert_eq!(all.iter().map(Vec::len).sum::<usize>(), 300_000);
    let documents = file("c.jsonl", &format!("{}\n\n{}\n", json!({ "text": "x".repeat(50) }), json!({ "text": "y".repeat(20) })));
    let mut found = take(&[documents], &SampleOptions { samples: 2, ..options }).unwrap();
    found.sort_by_key(Vec::len);
    assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [21, 40]);

    let error = take(&[text], &SampleOptions { samples: 4, ..options }).expect_err("too little text");
    assert!(matches!(error, LlamaError::FewSamples { asked: 4, found: 3, max_len: 40 }));
    for line in ["{}", "text", r#"{"text": 3}"#, r#"{"messages": [{"role": "user", "content": "Hello"}]}"#] {
        let error = take(&[file("d.jsonl", &format!("\n{line}"))], &options).expect_err(line);
        assert!(matches!(error, LlamaError::CalibrationLine { line: 2, .. }), "{line}: {error}");
    }
}

/// A conversation in each of the forms that files have, against its text as the template's author would write it.
#[test]
fn conversations_in_every_form_are_used() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), byte_level_tokenizer().to_string()).unwrap();
    let tokenizer = Tokenizer::open(&dir.path().join("tokenizer.json")).unwrap();
    let template = "{% for message in messages %}{% if message.role == 'critic' %}{{ raise_exception('no critic') }}{% endif %}<{{ message.role }}>{{ message.content }}\
                    {% for call in message.tool_calls %}[{{ call.function.name }} {{ call.function.arguments.city }}]{% endfor %}{% endfor %}";
    let template = ChatTemplate::compile(template, "chat_template.jinja".into(), Default::default()).unwrap();
    let take = |text: &str, samples| {
        let file = dir.path().join("chat.jsonl");
        fs::write(&file, text).unwrap();
        calibration_samples(&[file], &tokenizer, Some(&template), &SampleOptions { samples, max_len: 200, seed: 0 })
    };
    let line = |messages: serde_json::Value| json!({ "messages": messages }).to_string();
    let call = |arguments: serde_json::Value| json!([{ "type": "function", "function": { "name": "weather", "arguments": arguments } }]);
    let question = json!({ "role": "user", "content": "What is the weather?" });
    let answer = |message: serde_json::Value| line(json!([question, message]));
    let asked = "<user>What is the weather?<assistant>";
    let used = [
        (answer(json!({ "role": "assistant", "content": "It rains." })), format!("{asked}It rains.")),
        (
            answer(json!({ "role": "assistant", "content": [{ "type": "text", "text": "It " }, { "type": "text", "text": "rains." }] })),
            format!("{asked}It rains."),
        ),
        (
            answer(json!({ "role": "assistant", "content": null, "tool_calls": call(json!("{\"city\": \"Oslo\"}")) })),
            format!("{asked}[weather Oslo]"),
        ),
        (answer(json!({ "role": "assistant", "tool_calls": call(json!({ "city": "Bergen" })) })), format!("{asked}[weather Bergen]")),
    ];
    for (line, expected) in &used {
        for mark in ["", "\u{feff}"] {
            let found = take(&format!("{mark}{line}\n"), 1).unwrap();
            assert_eq!(found, [tokenizer.encode_rendered(expected).unwrap()], "{line}");
        }
    }
    // What the model does not take is left out, and others are used.
    let image = answer(json!({ "role": "assistant", "content": [{ "type": "image_url", "image_url": "https://example.org/a.png" }] }));
    let critic = answer(json!({ "role": "critic", "content": "Well." }));
    let text = [&image, &used[0].0, &critic, &used[2].0].map(String::as_str).join("\n");
    assert_eq!(take(&text, 2).unwrap().len(), 2);
    assert!(matches!(take(&text, 3), Err(LlamaError::FewSamples { asked: 3, found: 2, .. })));
    for message in [json!({ "content": "no role" }), json!({ "role": "user" }), json!({ "role": "user", "content": 3 })] {
        let error = take(&line(json!([message])), 1).expect_err("no message");
        assert!(matches!(error, LlamaError::CalibrationLine { line: 1, .. }), "{message}: {error}");
    }
}

#[test]
fn evaluation_agrees_with_perplexity() {
    let mut rng = rng();
    let (config, other) = (config_of_64(), config());
    let ((_a, source), (_b, target), (_c, foreign)) = (temporary(), temporary(), temporary());
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F32);
    write_folder(
        &foreign,
        &LlamaConfig { vocab_size: 70, ..other.clone() },
        &random_weights(&LlamaConfig { vocab_size: 70, ..other }, &mut rng),
        Dtype::F32,
    );
    run(&source, &target, &QuantizeOptions::default()).unwrap();
    let (float, quantized) = (open(&source), open(&target));
    let tokens = random_tokens(75, config.vocab_size, &mut rng);
    let models = [&*float.model, &float.model, &quantized.model];
    let [first, second] = [&tokens[..40], &tokens[40..]];
    let found = evaluate(&models, &[&tokens], 16, |_, _| {}).unwrap();
    assert_eq!(found.texts, std::slice::from_ref(&found.all));
    let found = found.all;
    for (model, found) in [&float, &float, &quantized].into_iter().zip(&found) {
        let expected = crate::perplexity(&model.model, &tokens, 16, |_| {}).unwrap();
        assert!((found.nll.mean - expected.nll).abs() < 1e-6 && found.tokens == expected.tokens);
    }
    // A model beside itself.
    let same = found[1].against.as_ref().unwrap();
    assert_eq!((same.nll_change.mean, same.agreement.mean, same.agreement.error, same.differ), (0.0, 1.0, 0.0, 0));
    assert!(same.divergence.mean.abs() < 1e-7);
    let rounded = found[2].against.as_ref().unwrap();
    assert!((rounded.nll_change.mean - (found[2].nll.mean - found[0].nll.mean)).abs() < 1e-9);
    assert!(rounded.divergence.mean > 0.0 && rounded.divergence.error > 0.0);
    assert_eq!(rounded.differ, ((1.0 - rounded.agreement.mean) * found[2].tokens as f64).round() as usize);

    // Texts by themselves and together: 15 + 15 + 7 tokens are predicted of the first, 15 + 15 + 2 of the second.
    let mut progress = Vec::new();
    let both = evaluate(&models, &[first, second], 16, |done, total| progress.push((done, total))).unwrap();
    assert_eq!(progress.last(), Some(&(75, 75)));
    for (index, text) in [first, second].into_iter().enumerate() {
        let alone = evaluate(&models, &[text], 16, |_, _| {}).unwrap().all;
        assert_eq!(both.texts[index], alone);
        assert_eq!(alone[0].tokens, [37, 32][index]);
    }
    for (model, all) in both.all.iter().enumerate() {
        let sum: f64 = both.texts.iter().map(|text| text[model].nll.mean * text[model].tokens as f64).sum();
        assert_eq!(all.tokens, 69);
        assert!((all.nll.mean - sum / 69.0).abs() < 1e-9);
        let differ = |found: &Evaluation| found.against.as_ref().map_or(0, |against| against.differ);
        assert_eq!(differ(all), both.texts.iter().map(|text| differ(&text[model])).sum::<usize>());
    }

    let error = evaluate(&[&float.model, &open(&foreign).model], &[&tokens, &tokens[..1]], 16, |_, _| {});
    assert!(matches!(error, Err(LlamaError::TextTooShort { tokens: 1 })));
    let low: Vec<u32> = tokens.iter().map(|token| token % 70).collect();
    let error = evaluate(&[&float.model, &open(&foreign).model], &[&low], 16, |_, _| {});
    assert!(matches!(error, Err(LlamaError::Vocabulary { expected: 71, found: 70 })));
}
