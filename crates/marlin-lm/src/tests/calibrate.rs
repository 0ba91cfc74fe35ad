//! Tests of calibration-based quantisers from a float folder to a quantised folder.

mod orders;

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use burn::tensor::Device;
use marlin_format::checkpoint::{Checkpoint, CheckpointError, Dtype};
use marlin_format::{GroupSize, QuantSpec, Sparsity};
use marlin_quant::{LayerLoss, QuantError};
use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::json;

use super::support::*;
use crate::config::read_json;
use crate::quantize::hidden::BUDGET;
use crate::quantize::resume::Partial;
use crate::{
    Architecture, Calibration, FileFormat, Method, ModelConfig, ModelError, QuantizeOptions,
    QuantizeProgress, QuantizeReport, RowOrder, evaluate, quantize_folder,
};

pub(super) const SPEC: QuantSpec = QuantSpec::int4(GroupSize::G32);

pub(super) fn config_of_64() -> ModelConfig {
    config_with(
        json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96 }),
    )
}

/// Returns samples of different lengths, in which a few tokens are frequent, as in a text.
pub(super) fn samples(config: &ModelConfig, rng: &mut StdRng) -> Vec<Vec<u32>> {
    let lengths = [1, 40, 17, 40, 64, 64, 33];
    lengths
        .iter()
        .map(|&length| {
            (0..length)
                .map(|_| (rng.random::<f32>().powi(3) * config.vocab_size as f32) as u32)
                .collect()
        })
        .collect()
}

pub(super) fn gptq(samples: &[Vec<u32>]) -> QuantizeOptions {
    let calibration = Calibration {
        samples: samples.to_vec(),
        device: Device::flex(),
        dtype: None,
        route_all: false,
    };
    let method = Method::Gptq {
        order: RowOrder::WithinGroups,
        damping: 0.01,
        awq: false,
        calibration,
    };
    QuantizeOptions {
        method,
        ..QuantizeOptions::default()
    }
}

pub(super) fn run(
    source: &Path,
    target: &Path,
    options: &QuantizeOptions,
) -> Result<QuantizeReport, ModelError> {
    quantize_with(source, target, &SPEC, options)
}

/// Quantises a folder, and stops the run when `steps` steps are done.
#[track_caller]
pub(super) fn stop_after(
    steps: usize,
    source: &Path,
    target: &Path,
    spec: &QuantSpec,
    options: &QuantizeOptions,
) {
    let mut done = 0;
    let error = quantize_folder(source, target, spec, options, |_| {
        done += 1;
        if done == steps {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    assert!(matches!(error, Err(ModelError::Stopped)), "{steps}");
}

/// Checks that two folders have the same weights and config, byte for byte.
#[track_caller]
pub(super) fn assert_same_bytes(expected: &Path, found: &Path) {
    for file in ["model.safetensors", "config.json"] {
        assert!(
            fs::read(expected.join(file)).unwrap() == fs::read(found.join(file)).unwrap(),
            "{file}"
        );
    }
}

/// Returns the mean divergence of a quantised model's next-token distributions from those of the
/// float model.
pub(super) fn divergence(source: &Path, target: &Path, samples: &[Vec<u32>]) -> f64 {
    let (float, quantized) = (open(source), open(target));
    let tokens: Vec<u32> = samples.concat();
    let found = evaluate(&[&float.model, &quantized.model], &[&tokens], 32, |_, _| {})
        .unwrap()
        .all;
    assert!(found[0].against.is_none());
    found[1].against.as_ref().unwrap().divergence.mean
}

/// Returns true if a layer was calibrated with all tokens, or an expert with those that chose it.
/// An expert with few tokens is rounded.
pub(super) fn has_seen(loss: &LayerLoss, tokens: usize) -> bool {
    match loss.layer.contains(".experts.") {
        true => loss.tokens <= tokens && (!loss.fell_back || loss.tokens < 128),
        false => loss.tokens == tokens && !loss.fell_back,
    }
}

#[test]
fn gptq_is_nearer_to_the_float_model_than_rounding() {
    let mut rng = rng();
    for architecture in Architecture::ALL {
        let config = config_of(
            architecture,
            json!({ "hidden_size": 64, "intermediate_size": 96 }),
        );
        let ((_a, source), (_b, rounded), (_c, calibrated)) =
            (temporary(), temporary(), temporary());
        write_folder(
            &source,
            &config,
            &random_weights(&config, &mut rng),
            Dtype::F32,
        );
        let samples = samples(&config, &mut rng);
        quantize_folder(
            &source,
            &rounded,
            &SPEC,
            &QuantizeOptions::default(),
            |_| ControlFlow::Continue(()),
        )
        .unwrap();
        let report = run(&source, &calibrated, &gptq(&samples)).unwrap();
        let tokens = samples.iter().map(Vec::len).sum::<usize>();
        for layer in &report.quantized {
            let loss = layer.loss.as_ref().unwrap();
            assert_eq!(loss.layer, layer.name);
            assert!(has_seen(loss, tokens), "{loss:?}, {tokens} tokens");
            assert!(loss.loss.is_some_and(|loss| loss > 0.0) || loss.fell_back);
        }
        if let Some(experts) = &config.experts {
            let of_gates = report.quantized.iter().filter(|layer| {
                let (name, is_expert) = (&layer.name, layer.name.contains(".experts."));
                is_expert && (name.ends_with("up_proj") || name.ends_with("w3"))
            });
            let layers = (0..config.num_hidden_layers)
                .filter(|&layer| config.experts_of(layer).is_some())
                .count();
            let sum: usize = of_gates
                .filter_map(|layer| Some(layer.loss.as_ref()?.tokens))
                .sum();
            assert_eq!(sum, layers * experts.top_k * tokens, "{architecture}");
        }
        assert!(!calibrated.with_file_name("model.partial").exists());
        let [before, after] =
            [&rounded, &calibrated].map(|target| divergence(&source, target, &samples));
        println!("{architecture}: divergence {before:.4} rounded, {after:.4} by GPTQ");
        assert!(after < 0.8 * before, "{architecture}: {after} of {before}");
    }
}

#[test]
fn sparsegpt_is_nearer_than_magnitude() {
    let mut rng = rng();
    let config = config_of_64();
    let ((_a, source), (_b, magnitude), (_c, calibrated)) = (temporary(), temporary(), temporary());
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F32,
    );
    let samples = samples(&config, &mut rng);
    run(
        &source,
        &magnitude,
        &QuantizeOptions {
            sparsity: Sparsity::TwoFour,
            ..QuantizeOptions::default()
        },
    )
    .unwrap();
    let report = run(
        &source,
        &calibrated,
        &QuantizeOptions {
            sparsity: Sparsity::TwoFour,
            ..gptq(&samples)
        },
    )
    .unwrap();
    assert!(
        report
            .quantized
            .iter()
            .all(|layer| layer.sparsity == Sparsity::TwoFour)
    );
    let [before, after] =
        [&magnitude, &calibrated].map(|target| divergence(&source, target, &samples));
    println!("divergence {before:.4} by magnitude, {after:.4} by SparseGPT");
    assert!(after < 0.8 * before, "{after} of {before}");
}

#[test]
fn a_stopped_run_goes_on_to_the_same_bytes() {
    let mut rng = rng();
    let config = config_of_64();
    let ((_a, source), (_b, whole), (_c, resumed)) = (temporary(), temporary(), temporary());
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F16,
    );
    let options = gptq(&samples(&config, &mut rng));
    run(&source, &whole, &options).unwrap();
    // The run is stopped after each layer of the first block, after each layer of the second, and
    // when both blocks are done.
    for stop in 1..=16 {
        stop_after(stop, &source, &resumed, &SPEC, &options);
        assert!(!resumed.exists());
    }
    // The temporary folder of a block, as a killed run leaves it.
    fs::create_dir(
        resumed
            .with_file_name("model.partial")
            .join(".block-00001.x1"),
    )
    .unwrap();
    let mut again = options.clone();
    if let Method::Gptq { damping, .. } = &mut again.method {
        *damping = 0.02;
    }
    let Err(ModelError::OtherRun {
        argument,
        before,
        now,
        ..
    }) = run(&source, &resumed, &again)
    else {
        panic!("another damping")
    };
    assert_eq!(
        (argument.as_str(), before.as_str(), now.as_str()),
        ("damping", "0.01", "0.02")
    );
    let partial = resumed.with_file_name("model.partial");
    let arguments = read_json(&partial.join("run.json"))
        .unwrap()
        .as_object()
        .cloned()
        .unwrap();
    let report = run(&source, &resumed, &options).unwrap();
    assert!(report.quantized.iter().all(|layer| layer.loss.is_some()));
    assert_same_bytes(&whole, &resumed);
    assert!(!partial.exists());

    // The files of a run that was killed when its target was complete. JSON may round a loss by a
    // unit in its last place.
    let kept: QuantizeReport =
        serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    let nothing = |_: QuantizeProgress<'_>| panic!("nothing is left to do");
    for format in [FileFormat::Gptq, FileFormat::CompressedTensors] {
        fs::create_dir_all(partial.join("block-00001")).unwrap();
        Partial::new(&resumed, arguments.clone())
            .keep_report(format, &report)
            .unwrap();
        let found = quantize_folder(&source, &resumed, &SPEC, &options, nothing);
        if format == options.format {
            assert_eq!(found.unwrap(), kept);
            assert!(!partial.exists());
        } else {
            assert!(
                matches!(
                    found,
                    Err(ModelError::Checkpoint(
                        CheckpointError::TargetNotEmpty { .. }
                    ))
                ),
                "{found:?}"
            );
        }
        assert_same_bytes(&whole, &resumed);
    }
}

#[test]
fn hidden_states_on_the_host_give_the_same_bytes() {
    let mut rng = rng();
    let config = config_of_64();
    let ((_a, source), (_b, expected)) = (temporary(), temporary());
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F32,
    );
    let samples = samples(&config, &mut rng);
    // The excluded layer has no Hessian sums, whose computation otherwise updates the float hidden
    // states.
    let options = QuantizeOptions {
        exclude: vec!["re:.*1.self_attn.o_proj".into()],
        ..gptq(&samples)
    };
    run(&source, &expected, &options).unwrap();
    let bytes = 4 * config.hidden_size * samples.iter().map(Vec::len).sum::<usize>();
    // The device has room for no hidden states, for some, for all of one model, and for all of one
    // model and some of the other.
    for room in [0, bytes / 2, bytes, bytes + bytes / 3] {
        let (_parent, target) = temporary();
        BUDGET.set(Some(room));
        run(&source, &target, &options).unwrap();
        BUDGET.set(None);
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
    let refused = |samples: &[Vec<u32>]| {
        run(&source, &target, &gptq(samples)).expect_err("samples that do not fit")
    };
    assert!(matches!(
        refused(&[vec![1, 71]]),
        ModelError::Token {
            token: 71,
            position: 1,
            vocab_size: 71
        }
    ));
    assert!(matches!(
        refused(&[vec![1], vec![]]),
        ModelError::SampleLength {
            sample: 1,
            tokens: 0,
            limit: 96
        }
    ));
    assert!(matches!(
        refused(&[vec![1; 97]]),
        ModelError::SampleLength {
            sample: 0,
            tokens: 97,
            ..
        }
    ));
    // A layer with infinite inputs.
    let (_c, broken) = temporary();
    let (_, norm) = weights
        .get_mut("model.layers.1.input_layernorm.weight")
        .unwrap();
    norm[3] = f32::INFINITY;
    write_folder(&broken, &config, &weights, Dtype::F32);
    let error = run(&broken, &target, &gptq(&samples(&config, &mut rng)))
        .expect_err("infinite activations");
    let ModelError::Calibrate {
        layer,
        source: QuantError::NonFiniteBatch { batch: 0 },
    } = &error
    else {
        panic!("{error:?}")
    };
    assert_eq!(layer, "model.layers.1.self_attn.q_proj");
    // With too few tokens, layers are rounded to nearest, and the report says so.
    let (_d, target) = temporary();
    let report = run(&source, &target, &gptq(&[vec![1, 2, 3]])).unwrap();
    assert!(
        report
            .quantized
            .iter()
            .all(|layer| layer.loss.as_ref().is_some_and(|loss| loss.fell_back))
    );
    assert!(Checkpoint::open(&target).is_ok());
}

#[test]
fn every_expert_is_calibrated_with_all_tokens_if_asked() {
    let mut rng = rng();
    let config = config_of(
        Architecture::Qwen2Moe,
        json!({ "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1 }),
    );
    let ((_a, source), (_b, target)) = (temporary(), temporary());
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F32,
    );
    let samples = samples(&config, &mut rng);
    let tokens = samples.iter().map(Vec::len).sum::<usize>();
    let mut options = gptq(&samples);
    if let Method::Gptq { calibration, .. } = &mut options.method {
        calibration.route_all = true;
    }
    let report = run(&source, &target, &options).unwrap();
    assert_eq!(report.quantized.len(), 4 + 3 * 5 + 3);
    for layer in &report.quantized {
        let loss = layer.loss.as_ref().unwrap();
        assert_eq!((loss.tokens, loss.fell_back), (tokens, false), "{loss:?}");
    }
}
