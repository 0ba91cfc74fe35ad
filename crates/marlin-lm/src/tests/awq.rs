//! Tests of AWQ from a float folder to a quantised folder.

use std::ops::ControlFlow;
use std::path::Path;

use burn::tensor::Device;
use marlin_format::checkpoint::{Checkpoint, Dtype};
use marlin_format::{GroupSize, QuantSpec, Sparsity};
use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::json;

use super::calibrate::{
    SPEC, assert_same_bytes, config_of_64, divergence, gptq, has_seen, run, samples, stop_after,
};
use super::folder::logits;
use super::support::*;
use crate::{
    Architecture, Calibration, FileFormat, Method, ModelConfig, ModelError, QuantizeOptions,
    quantize_folder,
};

fn awq(samples: &[Vec<u32>]) -> QuantizeOptions {
    let calibration = Calibration {
        samples: samples.to_vec(),
        device: Device::flex(),
        dtype: None,
        route_all: false,
    };
    QuantizeOptions {
        method: Method::Awq { calibration },
        ..QuantizeOptions::default()
    }
}

/// Returns options for GPTQ on inputs that AWQ has scaled.
fn awq_gptq(samples: &[Vec<u32>]) -> QuantizeOptions {
    let mut options = gptq(samples);
    if let Method::Gptq { awq, .. } = &mut options.method {
        *awq = true;
    }
    options
}

/// Returns weights with a few large channels in the inputs of every layer. The layer's weights for
/// these channels are small, as in trained models.
fn with_large_channels(config: &ModelConfig, rng: &mut StdRng) -> Weights {
    const TIMES: f32 = 24.0;
    let mut weights = random_weights(config, rng);
    let (query, key_value, head_dim) = (
        config.query_size(),
        config.key_value_size(),
        config.head_dim,
    );
    let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
    let apart = config.architecture != Architecture::Phi3;
    let qkv: &[&str] = if apart {
        &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    } else {
        &["self_attn.qkv_proj"]
    };
    let gate_up: &[&str] = if apart {
        &["mlp.gate_proj", "mlp.up_proj"]
    } else {
        &["mlp.gate_up_proj"]
    };
    let (first_value, first_up) = if apart {
        (0, 0)
    } else {
        (query + key_value, intermediate)
    };
    let shared = config.num_attention_heads / config.num_key_value_heads;
    let value_of =
        move |feature: usize| feature / head_dim / shared * head_dim + feature % head_dim;
    // The tensor that produces the channels, its first row that produces a channel, and the number
    // of channels; the layers that read the channels, and the channel of each input feature.
    type Channel<'a> = &'a dyn Fn(usize) -> usize;
    let pairs: [(&str, usize, usize, &[&str], Channel<'_>); 4] = [
        ("input_layernorm", 0, hidden, qkv, &|feature| feature),
        (
            qkv[qkv.len() - 1],
            first_value,
            key_value,
            &["self_attn.o_proj"],
            &value_of,
        ),
        ("post_attention_layernorm", 0, hidden, gate_up, &|feature| {
            feature
        }),
        (
            gate_up[gate_up.len() - 1],
            first_up,
            intermediate,
            &["mlp.down_proj"],
            &|feature| feature,
        ),
    ];
    for layer in 0..config.num_hidden_layers {
        let name = |rest: &str| format!("model.layers.{layer}.{rest}");
        // The inputs of experts are not scaled.
        let is_mixture = config.experts_of(layer).is_some();
        let pairs = pairs.into_iter().take(if is_mixture { 2 } else { 4 });
        for (origin, first, channels, layers, channel_of) in pairs {
            let start = rng.random_range(0..8);
            let is_large = |channel: usize| channel % 20 == start;
            let (shape, values) = weights.get_mut(&name(&format!("{origin}.weight"))).unwrap();
            let width = values.len() / shape[0];
            let rows = values
                .chunks_exact_mut(width)
                .skip(first)
                .take(channels)
                .enumerate();
            rows.filter(|(channel, _)| is_large(*channel))
                .for_each(|(_, row)| row.iter_mut().for_each(|value| *value *= TIMES));
            if let Some((_, bias)) = weights.get_mut(&name(&format!("{origin}.bias"))) {
                let values = bias.iter_mut().skip(first).take(channels).enumerate();
                values
                    .filter(|(channel, _)| is_large(*channel))
                    .for_each(|(_, value)| *value *= TIMES);
            }
            for layer in layers {
                let (shape, values) = weights.get_mut(&name(&format!("{layer}.weight"))).unwrap();
                let row = values
                    .chunks_exact_mut(shape[1])
                    .flat_map(|row| row.iter_mut().enumerate());
                row.filter(|(feature, _)| is_large(channel_of(*feature)))
                    .for_each(|(_, value)| *value /= TIMES);
            }
        }
    }
    weights
}

/// Returns the values of a tensor in a folder.
fn values(dir: &Path, name: &str) -> Vec<f32> {
    Checkpoint::open(dir)
        .unwrap()
        .tensor(name)
        .unwrap()
        .to_f32()
        .unwrap()
}

/// Returns a config of every architecture, with all biases that the architecture supports.
fn configs() -> Vec<ModelConfig> {
    let of = |architecture| {
        let bias = matches!(architecture, Architecture::Llama | Architecture::Qwen3);
        let fields = json!({ "hidden_size": 64, "intermediate_size": 96, "attention_bias": bias, "mlp_bias": architecture == Architecture::Llama });
        config_of(architecture, fields)
    };
    Architecture::ALL.into_iter().map(of).collect()
}

/// Rounding to 8 bits loses little, and scaling alone does not change the model's outputs.
#[test]
fn scaled_models_compute_what_the_float_model_does() {
    let mut rng = rng();
    let spec = QuantSpec::int8(GroupSize::G32);
    for config in configs() {
        let ((_a, source), (_b, target)) = (temporary(), temporary());
        let architecture = config.architecture;
        write_folder(
            &source,
            &config,
            &with_large_channels(&config, &mut rng),
            Dtype::F32,
        );
        let samples = samples(&config, &mut rng);
        quantize_folder(&source, &target, &spec, &awq(&samples), |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
        let tokens = random_tokens(30, config.vocab_size, &mut rng);
        let [expected, found] = [&source, &target].map(|dir| logits(&open(dir).model, &tokens));
        let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
        let is_mixture = config.experts.is_some();
        let error = if is_mixture {
            median_error(&found, &expected, config.vocab_size)
        } else {
            relative_error(&found, &expected)
        };
        println!("{architecture}: {error:.4}");
        assert!(error < 0.05, "{architecture}: {error}");
        // Every norm is scaled, and the inputs of every `o_proj` and `down_proj`; in a mixture
        // those of attention.
        let scaled = Checkpoint::open(&target).unwrap();
        for layer in 0..config.num_hidden_layers {
            let is_mixture = config.experts_of(layer).is_some();
            let norms = ["input_layernorm", "post_attention_layernorm"];
            for norm in norms.into_iter().take(if is_mixture { 1 } else { 2 }) {
                let name = format!("model.layers.{layer}.{norm}.weight");
                assert_ne!(
                    values(&source, &name),
                    values(&target, &name),
                    "{architecture}: {name}"
                );
            }
            let projections = ["self_attn.o_proj", "mlp.down_proj"];
            for projection in projections.into_iter().take(if is_mixture { 1 } else { 2 }) {
                let layer = format!("model.layers.{layer}.{projection}");
                let plain =
                    marlin_format::checkpoint::compressed_tensors::to_plain(&scaled, &layer, &spec)
                        .unwrap();
                let (found, float) = (
                    plain.dequantize(),
                    values(&source, &format!("{layer}.weight")),
                );
                let (k, n) = (plain.k(), plain.n());
                let float: Vec<f64> = (0..k * n)
                    .map(|i| f64::from(float[i % n * k + i / n]))
                    .collect();
                assert!(
                    relative_error(&found, &float) > 0.1,
                    "{architecture}: {layer}"
                );
            }
        }
    }
}

#[test]
fn awq_is_nearer_to_the_float_model_than_rounding() {
    let mut rng = rng();
    for config in configs() {
        let ((_a, source), (_b, clipped), (_c, scaled), (_d, both)) =
            (temporary(), temporary(), temporary(), temporary());
        write_folder(
            &source,
            &config,
            &with_large_channels(&config, &mut rng),
            Dtype::F32,
        );
        let samples = samples(&config, &mut rng);
        let rounding = QuantizeOptions {
            method: Method::Round { clipping: true },
            ..QuantizeOptions::default()
        };
        run(&source, &clipped, &rounding).unwrap();
        let report = run(&source, &scaled, &awq(&samples)).unwrap();
        let tokens = samples.iter().map(Vec::len).sum::<usize>();
        assert!(report.quantized.iter().all(|layer| {
            layer
                .loss
                .as_ref()
                .is_some_and(|loss| has_seen(loss, tokens))
        }));
        run(&source, &both, &awq_gptq(&samples)).unwrap();
        let [clipped, scaled, both] =
            [&clipped, &scaled, &both].map(|target| divergence(&source, target, &samples));
        println!(
            "{}: divergence {clipped:.4} clipped, {scaled:.4} by AWQ, {both:.4} by AWQ and GPTQ",
            config.architecture
        );
        assert!(
            scaled < 0.8 * clipped && both < 0.8 * clipped,
            "{}: {scaled} and {both} of {clipped}",
            config.architecture
        );
    }
}

#[test]
fn a_stopped_run_with_scales_goes_on_to_the_same_bytes() {
    let mut rng = rng();
    let config = config_with(
        json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96, "attention_bias": true }),
    );
    let (_a, source) = temporary();
    write_folder(
        &source,
        &config,
        &with_large_channels(&config, &mut rng),
        Dtype::F16,
    );
    let samples = samples(&config, &mut rng);
    for options in [awq(&samples), awq_gptq(&samples)] {
        let ((_b, whole), (_c, resumed)) = (temporary(), temporary());
        run(&source, &whole, &options).unwrap();
        for stop in [2, 5, 9] {
            stop_after(stop, &source, &resumed, &SPEC, &options);
        }
        let Err(ModelError::OtherRun { argument, .. }) = run(&source, &resumed, &gptq(&samples))
        else {
            panic!("a run without scales")
        };
        assert_eq!(argument, "awq");
        run(&source, &resumed, &options).unwrap();
        assert_same_bytes(&whole, &resumed);
    }
}

#[test]
fn layers_that_stay_float_are_not_scaled() {
    let mut rng = rng();
    let config = config_with(
        json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96, "attention_bias": true }),
    );
    let (_a, source) = temporary();
    write_folder(
        &source,
        &config,
        &with_large_channels(&config, &mut rng),
        Dtype::F16,
    );
    let samples = samples(&config, &mut rng);
    // Each case: the excluded layer, the tensors that therefore stay unchanged, and the tensors
    // that are still scaled.
    let norms = ["input_layernorm.weight", "post_attention_layernorm.weight"];
    let value_bias = "self_attn.v_proj.bias";
    let cases: [(&str, &[&str], &[&str]); 4] = [
        (
            "k_proj",
            &[norms[0], "self_attn.k_proj.weight"],
            &[norms[1], value_bias],
        ),
        (
            "v_proj",
            &[norms[0], value_bias, "self_attn.v_proj.weight"],
            &[norms[1]],
        ),
        ("o_proj", &[value_bias, "self_attn.o_proj.weight"], &norms),
        (
            "up_proj",
            &[norms[1], "mlp.up_proj.weight"],
            &[norms[0], value_bias],
        ),
    ];
    for (excluded, kept, scaled) in cases {
        let (_b, target) = temporary();
        run(
            &source,
            &target,
            &QuantizeOptions {
                exclude: vec![format!("re:.*{excluded}")],
                ..awq(&samples)
            },
        )
        .unwrap();
        for layer in 0..config.num_hidden_layers {
            let name = |rest: &&str| format!("model.layers.{layer}.{rest}");
            for name in kept.iter().map(name) {
                assert_eq!(
                    values(&source, &name),
                    values(&target, &name),
                    "{excluded}: {name}"
                );
            }
            for name in scaled.iter().map(name) {
                assert_ne!(
                    values(&source, &name),
                    values(&target, &name),
                    "{excluded}: {name}"
                );
            }
        }
        let [clipped, found] = {
            let (_c, clipped) = temporary();
            let method = Method::Round { clipping: true };
            run(
                &source,
                &clipped,
                &QuantizeOptions {
                    method,
                    exclude: vec![format!("re:.*{excluded}")],
                    ..QuantizeOptions::default()
                },
            )
            .unwrap();
            [&clipped, &target].map(|target| divergence(&source, target, &samples))
        };
        assert!(found < clipped, "{excluded}: {found} of {clipped}");
    }
}

#[test]
fn forms_hold_the_same_scaled_model() {
    let mut rng = rng();
    let config = config_of(
        Architecture::Phi3,
        json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96 }),
    );
    let (_a, source) = temporary();
    write_folder(
        &source,
        &config,
        &with_large_channels(&config, &mut rng),
        Dtype::F16,
    );
    let samples = samples(&config, &mut rng);
    let tokens = random_tokens(20, config.vocab_size, &mut rng);
    let of = |format| {
        let (_parent, target) = temporary();
        run(
            &source,
            &target,
            &QuantizeOptions {
                format,
                ..awq(&samples)
            },
        )
        .unwrap();
        logits(&open(&target).model, &tokens)
    };
    assert_eq!(of(FileFormat::CompressedTensors), of(FileFormat::Gptq));
}

#[test]
fn pruned_layers_are_scaled_too() {
    let mut rng = rng();
    let config = config_of_64();
    let ((_a, source), (_b, magnitude), (_c, scaled)) = (temporary(), temporary(), temporary());
    write_folder(
        &source,
        &config,
        &with_large_channels(&config, &mut rng),
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
        &scaled,
        &QuantizeOptions {
            sparsity: Sparsity::TwoFour,
            ..awq_gptq(&samples)
        },
    )
    .unwrap();
    assert!(
        report
            .quantized
            .iter()
            .all(|layer| layer.sparsity == Sparsity::TwoFour)
    );
    let [before, after] = [&magnitude, &scaled].map(|target| divergence(&source, target, &samples));
    println!("divergence {before:.4} by magnitude, {after:.4} by AWQ and SparseGPT");
    assert!(after < 0.8 * before, "{after} of {before}");
}
