//! Layers that are quantised otherwise than the rest.

use std::ops::ControlFlow;
use std::path::Path;

use burn::tensor::Device;
use marlin_format::checkpoint::{Checkpoint, Dtype, LayerFormat, Quantization, compressed_tensors, read_layer};
use marlin_format::{Bits, FormatError, GroupSize, QuantSpec, Sparsity};
use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::json;

use super::calibrate::{assert_same_bytes, config_of_64, stop_after};
use super::folder::logits;
use super::support::*;
use crate::{
    Architecture, Calibration, FileFormat, LlamaConfig, LlamaError, Method, Override, QuantizeOptions, QuantizeReport, RowOrder,
    quantize_folder,
};

const SPEC: QuantSpec = QuantSpec::int4(GroupSize::G64);

fn overrides(entries: &[(&str, &str)]) -> Vec<(String, Override)> {
    entries.iter().map(|(pattern, change)| (pattern.to_string(), change.parse().unwrap())).collect()
}

/// Several of them for one part of a block, one after another and apart.
const MIXED: [(&str, &str); 6] = [
    ("re:.*1.mlp.down_proj", "skip"),
    ("re:.*down_proj", "bits:8,group:g32"),
    ("re:.*k_proj", "group:channel"),
    ("model.layers.0.self_attn.v_proj", "skip"),
    ("re:.*v_proj", "bits:8"),
    ("re:.*up_proj", "group:g32"),
];

/// The spec of a layer by `MIXED`; none if it stays float.
fn mixed(layer: &str) -> Option<QuantSpec> {
    match layer.strip_prefix("model.layers.").unwrap() {
        "1.mlp.down_proj" | "0.self_attn.v_proj" => None,
        "0.mlp.down_proj" => Some(QuantSpec::int8(GroupSize::G32)),
        "0.self_attn.k_proj" | "1.self_attn.k_proj" => Some(QuantSpec::int4(GroupSize::Channel)),
        "1.self_attn.v_proj" => Some(QuantSpec::int8(GroupSize::G64)),
        "0.mlp.up_proj" | "1.mlp.up_proj" => Some(QuantSpec::int4(GroupSize::G32)),
        _ => Some(SPEC),
    }
}

fn gptq(config: &LlamaConfig, order: RowOrder, rng: &mut StdRng) -> QuantizeOptions {
    let sample = |length| (0..length).map(|_| (rng.random::<f32>().powi(3) * config.vocab_size as f32) as u32).collect();
    let calibration = Calibration { samples: [40, 64, 33, 64].map(sample).to_vec(), device: Device::flex(), dtype: None };
    QuantizeOptions { method: Method::Gptq { order, damping: 0.01, awq: false, calibration }, ..QuantizeOptions::default() }
}

fn run(source: &Path, target: &Path, options: &QuantizeOptions) -> Result<QuantizeReport, LlamaError> {
    quantize_folder(source, target, &SPEC, options, |_| ControlFlow::Continue(()))
}

#[test]
fn overrides_are_read_and_shown() {
    let spec = |bits, group| Override::Spec { bits, group };
    for (text, expected) in [
        ("skip", Override::Skip),
        ("bits:8", spec(Some(Bits::Eight), None)),
        ("group:channel", spec(None, Some(GroupSize::Channel))),
        ("bits:4,group:g32", spec(Some(Bits::Four), Some(GroupSize::G32))),
    ] {
        let found: Override = text.parse().unwrap();
        assert_eq!((found, found.to_string().as_str()), (expected, text));
    }
    assert_eq!(" group:g32, bits:4".parse::<Override>().unwrap().to_string(), "bits:4,group:g32");
    for (text, reason) in [
        ("", "`` is no setting"),
        ("bits:3", "3"),
        ("bits:four", "`four` is no number"),
        ("group:g48", "g48"),
        ("bits:8,bits:8", "twice"),
        ("bits:8,skip", "no other settings"),
        ("sym:false", "`sym:false` is no setting"),
    ] {
        let error = text.parse::<Override>().unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains("group:channel"), "{error}");
    }
}

/// What is written in each form is, layer for layer, what the walk has put in place of the weights, and the forms say how each is quantised.
#[test]
fn folders_in_each_form_hold_what_the_walk_has_seen() {
    let mut rng = rng();
    let config = config_of_64();
    let (_a, source) = temporary();
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F16);
    let tokens = random_tokens(20, config.vocab_size, &mut rng);
    for order in [RowOrder::WithinGroups, RowOrder::ActOrder] {
        let method = gptq(&config, order, &mut rng).method;
        let mut found = Vec::new();
        // Of act-order over groups only GPTQ has readers.
        let formats = [FileFormat::Gptq, FileFormat::CompressedTensors];
        for format in formats.into_iter().take(if order == RowOrder::ActOrder { 1 } else { 2 }) {
            let (_parent, target) = temporary();
            let options = QuantizeOptions { format, overrides: overrides(&MIXED), method: method.clone(), ..QuantizeOptions::default() };
            // Twelve layers, and a tensor of the target.
            stop_after(13, &source, &target, &SPEC, &options);
            let partial = target.with_file_name("model.partial");
            let blocks = [0, 1].map(|block| Checkpoint::open(partial.join(format!("block-{block:05}"))).unwrap());
            let seen = |layer: &str, spec: &QuantSpec| {
                let block = &blocks[usize::from(layer.starts_with("model.layers.1."))];
                compressed_tensors::to_plain(block, layer, spec).unwrap().dequantize()
            };
            let seen: Vec<(String, Vec<f32>)> = open(&source)
                .model
                .projections()
                .map(|(name, _)| name)
                .filter(|name| name != "lm_head")
                .flat_map(|name| match name.rsplit_once('.').unwrap() {
                    (parent, "qkv_proj") => ["q_proj", "k_proj", "v_proj"].map(|name| format!("{parent}.{name}")).to_vec(),
                    (parent, "gate_up_proj") => ["gate_proj", "up_proj"].map(|name| format!("{parent}.{name}")).to_vec(),
                    _ => vec![name],
                })
                .filter_map(|name| mixed(&name).map(|spec| (name.clone(), seen(&name, &spec))))
                .collect();
            assert_eq!(seen.len(), 12);

            let report = run(&source, &target, &options).unwrap();
            assert_eq!(report.excluded, ["model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"]);
            assert!(report.quantized.iter().all(|layer| mixed(&layer.name) == Some(layer.spec) && layer.loss.is_some()));
            let (checkpoint, quantization) = (Checkpoint::open(&target).unwrap(), Quantization::read(&target).unwrap().unwrap());
            for name in &report.excluded {
                assert_eq!(quantization.layer(name).unwrap(), LayerFormat::Float);
            }
            for (name, expected) in seen {
                let format = quantization.layer(&name).unwrap();
                let weight = read_layer(&checkpoint, &name, &format).unwrap();
                assert_eq!((Some(weight.spec()), weight.dequantize() == expected), (mixed(&name), true), "{name}, {format}");
            }
            found.push(logits(&open(&target).model, &tokens));
        }
        assert_eq!(found.first(), found.last(), "{order:?}");
    }
}

/// Of the first block's attention, which sees the same in all runs, each layer is as if all were quantised as it is.
#[test]
fn layers_of_one_part_share_their_second_moments() {
    let mut rng = rng();
    let config = config_of_64();
    let (_a, source) = temporary();
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F32);
    let options = gptq(&config, RowOrder::WithinGroups, &mut rng);
    let quantized = |entries: &[(&str, &str)]| {
        let (parent, target) = temporary();
        run(&source, &target, &QuantizeOptions { overrides: overrides(entries), ..options.clone() }).unwrap();
        let checkpoint = Checkpoint::open(&target).unwrap();
        (parent, checkpoint)
    };
    let (_b, plain) = quantized(&[]);
    let (_c, int8) = quantized(&[("re:", "bits:8,group:g32")]);
    let (_d, mixed) = quantized(&[("re:.*k_proj", "bits:8,group:g32")]);
    let values = |checkpoint: &Checkpoint, name: &str, spec| {
        compressed_tensors::to_plain(checkpoint, &format!("model.layers.0.self_attn.{name}"), &spec).unwrap().dequantize()
    };
    for name in ["q_proj", "v_proj"] {
        assert!(values(&mixed, name, SPEC) == values(&plain, name, SPEC), "{name}");
    }
    let eight = QuantSpec::int8(GroupSize::G32);
    assert!(values(&mixed, "k_proj", eight) == values(&int8, "k_proj", eight));
}

#[test]
fn a_stopped_run_goes_on_with_the_same_overrides_alone() {
    let mut rng = rng();
    let config = config_of_64();
    let ((_a, source), (_b, whole), (_c, resumed)) = (temporary(), temporary(), temporary());
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F16);
    let options = QuantizeOptions { overrides: overrides(&MIXED), ..gptq(&config, RowOrder::WithinGroups, &mut rng) };
    run(&source, &whole, &options).unwrap();
    // In the first block, in the second, and when both are done.
    for steps in [3, 9, 7] {
        stop_after(steps, &source, &resumed, &SPEC, &options);
    }
    let other = QuantizeOptions { overrides: overrides(&MIXED[1..]), ..options.clone() };
    let Err(LlamaError::OtherRun { argument, .. }) = run(&source, &resumed, &other) else { panic!("other overrides") };
    assert_eq!(argument, "overrides");
    run(&source, &resumed, &options).unwrap();
    assert_same_bytes(&whole, &resumed);
}

#[test]
fn marlin_24_holds_the_specs_that_it_has() {
    let mut rng = rng();
    let config =
        config_with(json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 64 }));
    let (_a, source) = temporary();
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F16);
    let tokens = random_tokens(8, config.vocab_size, &mut rng);
    let pruned = |format, entries: &[(&str, &str)]| {
        let (parent, target) = temporary();
        let entries = [&[("re:.*[kv]_proj", "skip")], entries].concat();
        let options = QuantizeOptions { format, sparsity: Sparsity::TwoFour, overrides: overrides(&entries), ..QuantizeOptions::default() };
        let report = quantize_folder(&source, &target, &QuantSpec::int4(GroupSize::G128), &options, |_| ControlFlow::Continue(()));
        report.map(|_| (parent, target))
    };
    let entries = [("re:.*down_proj", "bits:8"), ("re:.*up_proj", "group:channel")];
    let (_b, sparse) = pruned(FileFormat::Marlin24, &entries).unwrap();
    let (_c, dense) = pruned(FileFormat::CompressedTensors, &entries).unwrap();
    let quantization = Quantization::read(&sparse).unwrap().unwrap();
    for (layer, expected) in [("mlp.down_proj", "int8 g128"), ("mlp.up_proj", "int4 channel"), ("mlp.gate_proj", "int4 g128")] {
        let found = quantization.layer(&format!("model.layers.1.{layer}")).unwrap().to_string();
        assert!(found.starts_with(&format!("marlin-24 {expected}")), "{layer}: {found}");
    }
    assert_eq!(logits(&open(&sparse).model, &tokens), logits(&open(&dense).model, &tokens));
    let error = pruned(FileFormat::Marlin24, &[("re:.*down_proj", "group:g32")]).map(drop).expect_err("groups of 32");
    let LlamaError::Quantize { layer, source: FormatError::Marlin24Spec { found } } = &error else { panic!("{error}") };
    assert_eq!((layer.as_str(), *found), ("model.layers.0.mlp.down_proj", QuantSpec::int4(GroupSize::G32)));
}

/// Patterns match the layer's name in the model, and that in the file.
#[test]
fn layers_of_gptq_files_of_phi3_have_both_names() {
    let config =
        config_of(Architecture::Phi3, json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96 }));
    let (_a, source) = temporary();
    write_folder(&source, &config, &random_weights(&config, &mut rng()), Dtype::F32);
    let specs = |entries: &[(&str, &str)]| {
        let (_parent, target) = temporary();
        let options = QuantizeOptions { format: FileFormat::Gptq, overrides: overrides(entries), ..QuantizeOptions::default() };
        let report = run(&source, &target, &options).unwrap();
        let spec = |name: &str| report.quantized.iter().find(|layer| layer.name.ends_with(name)).unwrap().spec.to_string();
        (spec("0.mlp.gate_proj"), spec("0.mlp.up_proj"), open(&target).model.layers[0].mlp.gate_up_proj.joined().is_some())
    };
    let [int8, int4, smaller] = ["int8 g64 f16", "int4 g64 f16", "int4 g32 f16"].map(String::from);
    assert_eq!(specs(&[("re:.*gate_proj", "bits:8")]), (int8, int4, false));
    assert_eq!(specs(&[("re:.*gate_up_proj", "group:g32")]), (smaller.clone(), smaller, true));
}

#[test]
fn overrides_and_exclusions_of_no_layer_are_refused() {
    let config = config_of_64();
    let ((_a, source), (_b, target)) = (temporary(), temporary());
    write_folder(&source, &config, &random_weights(&config, &mut rng()), Dtype::F16);
    let quantize = |entries: &[(&str, &str)], exclude: &[&str]| {
        let exclude = exclude.iter().map(ToString::to_string).collect();
        run(&source, &target, &QuantizeOptions { overrides: overrides(entries), exclude, ..QuantizeOptions::default() })
    };
    // Neither norms nor the head are layers that can be quantised, and a name is not a part of one.
    for pattern in ["re:.*norm", "lm_head", "down_proj", "re:down_proj", ""] {
        let error = quantize(&[("re:.*down_proj", "bits:8"), (pattern, "skip")], &[]).expect_err(pattern);
        assert!(matches!(&error, LlamaError::PatternOfNone { option: "override", pattern: found } if found == pattern), "{error}");
    }
    // What is never quantised may be excluded.
    for pattern in ["down_proj", "re:down_proj", "", "model.layers.0.mlp.down_proj.weight", "model.layers.2.mlp.down_proj"] {
        let error = quantize(&[], &["lm_head", "re:.*norm", "model.embed_tokens", pattern]).expect_err(pattern);
        assert!(matches!(&error, LlamaError::PatternOfNone { option: "exclude", pattern: found } if found == pattern), "{error}");
    }
    assert!(matches!(quantize(&[("re:(", "skip")], &[]), Err(LlamaError::QuantizationConfig { .. })));
    assert!(!target.exists());
    // One that never comes first has matched all the same; what is excluded is not quantised.
    let entries = [("re:.*down_proj", "bits:8"), ("model.layers.0.mlp.down_proj", "skip")];
    let report = quantize(&entries, &["model.layers.1.mlp.down_proj", "lm_head", "model.norm"]).unwrap();
    assert_eq!(report.excluded, ["model.layers.1.mlp.down_proj"]);
    let of_eight: Vec<_> =
        report.quantized.iter().filter(|layer| layer.spec.bits == Bits::Eight).map(|layer| layer.name.as_str()).collect();
    assert_eq!(of_eight, ["model.layers.0.mlp.down_proj"]);
}

/// A block without a layer to quantise has nothing in the rest of a run.
#[test]
fn a_block_that_is_skipped_stays_float() {
    let mut rng = rng();
    let config = config_of_64();
    let ((_a, source), (_b, target)) = (temporary(), temporary());
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F16);
    let options =
        QuantizeOptions { overrides: overrides(&[("re:model.layers.0.*", "skip")]), ..gptq(&config, RowOrder::default(), &mut rng) };
    stop_after(2, &source, &target, &SPEC, &options);
    let report = run(&source, &target, &options).unwrap();
    assert_eq!((report.quantized.len(), report.excluded.len()), (7, 7));
    assert!(report.quantized.iter().all(|layer| layer.name.starts_with("model.layers.1.") && layer.loss.is_some()));
    open(&target);
}
