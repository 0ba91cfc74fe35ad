//! Tests of overrides with a calibration-based quantiser.

use burn::tensor::Device;
use marlin_format::checkpoint::{
    Checkpoint, Dtype, LayerFormat, Quantization, compressed_tensors, read_layer,
};
use marlin_format::{GroupSize, QuantSpec};
use rand::RngExt;
use rand::rngs::StdRng;

use super::{SPEC, overrides, run};
use crate::tests::calibrate::{assert_same_bytes, config_of_64, stop_after};
use crate::tests::folder::logits;
use crate::tests::support::*;
use crate::{Calibration, FileFormat, Method, ModelConfig, ModelError, QuantizeOptions, RowOrder};

/// Overrides that give layers with the same inputs different specs.
const MIXED: [(&str, &str); 6] = [
    ("re:.*1.mlp.down_proj", "skip"),
    ("re:.*down_proj", "bits:8,group:g32"),
    ("re:.*k_proj", "group:channel"),
    ("model.layers.0.self_attn.v_proj", "skip"),
    ("re:.*v_proj", "bits:8"),
    ("re:.*up_proj", "group:g32"),
];

/// Returns the spec that `MIXED` gives a layer; `None` if the layer stays float.
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

fn gptq(config: &ModelConfig, order: RowOrder, rng: &mut StdRng) -> QuantizeOptions {
    let sample = |length| {
        (0..length)
            .map(|_| (rng.random::<f32>().powi(3) * config.vocab_size as f32) as u32)
            .collect()
    };
    let calibration = Calibration {
        samples: [40, 64, 33, 64].map(sample).to_vec(),
        device: Device::flex(),
        dtype: None,
        route_all: false,
    };
    QuantizeOptions {
        method: Method::Gptq {
            order,
            damping: 0.01,
            awq: false,
            calibration,
        },
        ..QuantizeOptions::default()
    }
}

/// Tests that every file format stores exactly the values that calibration chose for each layer,
/// and declares the layer's spec.
#[test]
fn folders_in_each_form_hold_what_the_walk_has_seen() {
    let mut rng = rng();
    let config = config_of_64();
    let (_a, source) = random_folder(&config, Dtype::F16, &mut rng);
    let tokens = random_tokens(20, config.vocab_size, &mut rng);
    for order in [RowOrder::WithinGroups, RowOrder::ActOrder] {
        let method = gptq(&config, order, &mut rng).method;
        let mut found = Vec::new();
        // Only the GPTQ format has readers that support act-order over groups.
        let formats = [FileFormat::Gptq, FileFormat::CompressedTensors];
        for format in formats
            .into_iter()
            .take(if order == RowOrder::ActOrder { 1 } else { 2 })
        {
            let (_parent, target) = temporary();
            let options = QuantizeOptions {
                format,
                overrides: overrides(&MIXED),
                method: method.clone(),
                ..QuantizeOptions::default()
            };
            // The run is stopped after all twelve layers and one tensor of the target.
            stop_after(13, &source, &target, &SPEC, &options);
            let partial = target.with_file_name("model.partial");
            let blocks = [0, 1]
                .map(|block| Checkpoint::open(partial.join(format!("block-{block:05}"))).unwrap());
            let seen = |layer: &str, spec: &QuantSpec| {
                let block = &blocks[usize::from(layer.starts_with("model.layers.1."))];
                compressed_tensors::to_plain(block, layer, spec)
                    .unwrap()
                    .dequantize()
            };
            let seen: Vec<(String, Vec<f32>)> = open(&source)
                .model
                .projections()
                .map(|(name, _)| name)
                .filter(|name| name != "lm_head")
                .flat_map(|name| match name.rsplit_once('.').unwrap() {
                    (parent, "qkv_proj") => ["q_proj", "k_proj", "v_proj"]
                        .map(|name| format!("{parent}.{name}"))
                        .to_vec(),
                    (parent, "gate_up_proj") => ["gate_proj", "up_proj"]
                        .map(|name| format!("{parent}.{name}"))
                        .to_vec(),
                    _ => vec![name],
                })
                .filter_map(|name| mixed(&name).map(|spec| (name.clone(), seen(&name, &spec))))
                .collect();
            assert_eq!(seen.len(), 12);

            let report = run(&source, &target, &options).unwrap();
            assert_eq!(
                report.excluded,
                [
                    "model.layers.0.self_attn.v_proj",
                    "model.layers.1.mlp.down_proj"
                ]
            );
            assert!(
                report
                    .quantized
                    .iter()
                    .all(|layer| mixed(&layer.name) == Some(layer.spec) && layer.loss.is_some())
            );
            let (checkpoint, quantization) = (
                Checkpoint::open(&target).unwrap(),
                Quantization::read(&target).unwrap().unwrap(),
            );
            for name in &report.excluded {
                assert_eq!(quantization.layer(name).unwrap(), LayerFormat::Float);
            }
            for (name, expected) in seen {
                let format = quantization.layer(&name).unwrap();
                let weight = read_layer(&checkpoint, &name, &format).unwrap();
                assert_eq!(
                    (Some(weight.spec()), weight.dequantize() == expected),
                    (mixed(&name), true),
                    "{name}, {format}"
                );
            }
            found.push(logits(&open(&target).model, &tokens));
        }
        assert_eq!(found.first(), found.last(), "{order:?}");
    }
}

/// Tests that a layer's values do not depend on the specs of other layers with the same inputs. The
/// attention of the first block is compared, because its inputs are the same in all runs.
#[test]
fn layers_of_one_part_share_their_second_moments() {
    let mut rng = rng();
    let config = config_of_64();
    let (_a, source) = random_folder(&config, Dtype::F32, &mut rng);
    let options = gptq(&config, RowOrder::WithinGroups, &mut rng);
    let quantized = |entries: &[(&str, &str)]| {
        let (parent, target) = temporary();
        run(
            &source,
            &target,
            &QuantizeOptions {
                overrides: overrides(entries),
                ..options.clone()
            },
        )
        .unwrap();
        let checkpoint = Checkpoint::open(&target).unwrap();
        (parent, checkpoint)
    };
    let (_b, plain) = quantized(&[]);
    let (_c, int8) = quantized(&[("re:", "bits:8,group:g32")]);
    let (_d, mixed) = quantized(&[("re:.*k_proj", "bits:8,group:g32")]);
    let values = |checkpoint: &Checkpoint, name: &str, spec| {
        compressed_tensors::to_plain(
            checkpoint,
            &format!("model.layers.0.self_attn.{name}"),
            &spec,
        )
        .unwrap()
        .dequantize()
    };
    for name in ["q_proj", "v_proj"] {
        assert!(
            values(&mixed, name, SPEC) == values(&plain, name, SPEC),
            "{name}"
        );
    }
    let eight = QuantSpec::int8(GroupSize::G32);
    assert!(values(&mixed, "k_proj", eight) == values(&int8, "k_proj", eight));
}

#[test]
fn a_stopped_run_goes_on_with_the_same_overrides_alone() {
    let mut rng = rng();
    let config = config_of_64();
    let ((_a, source), (_b, whole), (_c, resumed)) = (temporary(), temporary(), temporary());
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F16,
    );
    let options = QuantizeOptions {
        overrides: overrides(&MIXED),
        ..gptq(&config, RowOrder::WithinGroups, &mut rng)
    };
    run(&source, &whole, &options).unwrap();
    // The run is stopped in the first block, and twice in the second. Layers of a finished block
    // count again.
    for steps in [3, 9, 7] {
        stop_after(steps, &source, &resumed, &SPEC, &options);
    }
    let other = QuantizeOptions {
        overrides: overrides(&MIXED[1..]),
        ..options.clone()
    };
    let Err(ModelError::OtherRun { argument, .. }) = run(&source, &resumed, &other) else {
        panic!("other overrides")
    };
    assert_eq!(argument, "overrides");
    run(&source, &resumed, &options).unwrap();
    assert_same_bytes(&whole, &resumed);
}

/// A block without layers to quantise has no files in the folder of a stopped run.
#[test]
fn a_block_that_is_skipped_stays_float() {
    let mut rng = rng();
    let config = config_of_64();
    let ((_a, source), (_b, target)) = (temporary(), temporary());
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F16,
    );
    let options = QuantizeOptions {
        overrides: overrides(&[("re:model.layers.0.*", "skip")]),
        ..gptq(&config, RowOrder::default(), &mut rng)
    };
    stop_after(2, &source, &target, &SPEC, &options);
    let report = run(&source, &target, &options).unwrap();
    assert_eq!((report.quantized.len(), report.excluded.len()), (7, 7));
    assert!(
        report
            .quantized
            .iter()
            .all(|layer| layer.name.starts_with("model.layers.1.") && layer.loss.is_some())
    );
    open(&target);
}
