//! Tests of quantising a float folder to a new folder.

mod gptq_files;
mod head;
mod two_four;

use std::ops::ControlFlow;
use std::path::Path;

use burn::tensor::{Device, FloatDType};
use marlin_format::checkpoint::{
    Checkpoint, CheckpointError, Dtype, Quantization, layer_format, read_layer,
};
use marlin_format::{FormatError, GroupSize, QuantSpec, ScaleDtype, quantize_rtn};
use serde_json::json;

use super::folder::logits;
use super::support::*;
use crate::{
    FileFormat, LanguageModel, ModelConfig, ModelError, OpenOptions, Projection, QuantizeOptions,
    QuantizeReport, quantize_folder,
};

const SPEC: QuantSpec = QuantSpec::int4(GroupSize::G32);

fn config_of_64() -> ModelConfig {
    config_with(
        json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96 }),
    )
}

fn quantize(
    source: &Path,
    target: &Path,
    spec: QuantSpec,
    exclude: &[&str],
) -> Result<QuantizeReport, ModelError> {
    quantize_as(FileFormat::CompressedTensors, source, target, spec, exclude)
}

fn quantize_as(
    format: FileFormat,
    source: &Path,
    target: &Path,
    spec: QuantSpec,
    exclude: &[&str],
) -> Result<QuantizeReport, ModelError> {
    let options = QuantizeOptions {
        format,
        exclude: exclude.iter().map(ToString::to_string).collect(),
        ..QuantizeOptions::default()
    };
    quantize_with(source, target, &spec, &options)
}

#[test]
fn a_quantised_folder_opens_and_computes_what_rounding_gives() {
    let mut rng = rng();
    let config = config_of_64();
    let weights = random_weights(&config, &mut rng);
    let (int8, zero_points) = (
        QuantSpec::int8(GroupSize::G32),
        SPEC.with_zero_points().with_scale_dtype(ScaleDtype::BF16),
    );
    let specs = [
        SPEC,
        zero_points,
        QuantSpec::int4(GroupSize::Channel),
        int8,
        int8.with_zero_points(),
        QuantSpec::fp8(),
        QuantSpec::mxfp4(),
        QuantSpec::nvfp4(),
    ];
    for spec in specs {
        let ((_a, source), (_b, target), (_c, rounded)) = (temporary(), temporary(), temporary());
        write_folder(&source, &config, &weights, Dtype::BF16);
        std::fs::write(
            source.join("tokenizer.json"),
            byte_level_tokenizer().to_string(),
        )
        .unwrap();
        std::fs::write(
            source.join("generation_config.json"),
            r#"{"eos_token_id": 9}"#,
        )
        .unwrap();
        std::fs::write(source.join("README.md"), "not copied").unwrap();
        let mut progress = Vec::new();
        let report = quantize_folder(
            &source,
            &target,
            &spec,
            &QuantizeOptions::default(),
            |step| {
                progress.push((step.tensor.to_string(), step.done, step.total));
                ControlFlow::Continue(())
            },
        )
        .unwrap();
        assert_eq!((report.quantized.len(), report.excluded.len()), (14, 0));
        assert!(report.target_bytes < report.source_bytes);
        assert_eq!(progress.len(), weights.len());
        assert!(
            progress
                .iter()
                .enumerate()
                .all(
                    |(i, (name, done, total))| (*done, *total) == (i + 1, weights.len())
                        && weights.contains_key(name)
                )
        );
        let mut files: Vec<_> = target
            .read_dir()
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        assert_eq!(
            files,
            [
                "config.json",
                "generation_config.json",
                "model.safetensors",
                "tokenizer.json"
            ]
        );

        // Tensors other than projections are copied bit for bit. Projections are dequantised on the
        // host.
        let (before, after) = (
            Checkpoint::open(&source).unwrap(),
            Checkpoint::open(&target).unwrap(),
        );
        let quantization = Quantization::read(&target).unwrap();
        let mut dequantized = Weights::new();
        for (name, (shape, _)) in &weights {
            let values = match name
                .strip_suffix(".weight")
                .filter(|layer| layer.ends_with("_proj"))
            {
                None => {
                    assert_eq!(
                        after.tensor(name).unwrap().bytes(),
                        before.tensor(name).unwrap().bytes()
                    );
                    after.tensor(name).unwrap().to_f32().unwrap()
                }
                Some(layer) => {
                    let format = layer_format(quantization.as_ref(), layer).unwrap();
                    let plain = read_layer(&after, layer, &format).unwrap();
                    let (k, n, values) = (plain.k(), plain.n(), plain.dequantize());
                    let float = before.tensor(name).unwrap().to_f32().unwrap();
                    let float: Vec<f32> = (0..k * n).map(|i| float[i % n * k + i / n]).collect();
                    let rounded = quantize_rtn(&float, k, n, &spec).unwrap().dequantize();
                    let nearly = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * b.abs();
                    assert!(values.iter().zip(&rounded).all(nearly), "{spec}: {layer}");
                    (0..n * k).map(|i| values[i % k * n + i / k]).collect()
                }
            };
            dequantized.insert(name.clone(), (shape.clone(), values));
        }
        write_folder(&rounded, &config, &dequantized, Dtype::F32);

        let llama = open(&target);
        assert_eq!(llama.generation.eos_token_ids, [9]);
        assert!(matches!(
            llama.model.layers[0].mlp().unwrap().down_proj.joined(),
            Some(Projection::Quant(_))
        ));
        assert!(matches!(llama.model.lm_head, Some(Projection::Dense(_))));
        let tokens = random_tokens(8, config.vocab_size, &mut rng);
        let expected: Vec<f64> = logits(&open(&rounded).model, &tokens)
            .into_iter()
            .map(f64::from)
            .collect();
        assert!(
            relative_error(&logits(&llama.model, &tokens), &expected) < 1e-4,
            "{spec}"
        );
    }
}

#[test]
fn a_quantised_model_runs_in_half_precision() {
    let mut rng = rng();
    let config = config_of_64();
    let ((_a, source), (_b, target)) = (temporary(), temporary());
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F16,
    );
    quantize(&source, &target, SPEC, &[]).unwrap();
    let half = LanguageModel::open(
        &target,
        &Device::flex(),
        &OpenOptions {
            dtype: None,
            ..options()
        },
    )
    .unwrap()
    .model;
    assert_eq!(half.dtype(), FloatDType::F16);
    let tokens = random_tokens(8, config.vocab_size, &mut rng);
    let expected: Vec<f64> = logits(&open(&target).model, &tokens)
        .into_iter()
        .map(f64::from)
        .collect();
    assert!(relative_error(&logits(&half, &tokens), &expected) < 0.02);
}

/// Tests that rounding and a calibration-based quantiser count the groups whose scales underflow.
#[test]
fn layers_of_small_weights_are_counted() {
    let config = config_of_64();
    let mut weights = random_weights(&config, &mut rng());
    // GPTQ corrects the error of the residual stream in the layers that add to it, so that their
    // weights would not stay small. `up_proj` is not one of these layers.
    let small = "model.layers.1.mlp.up_proj";
    let (_, values) = weights.get_mut(&format!("{small}.weight")).unwrap();
    values.iter_mut().for_each(|value| *value *= 1e-9);
    let (_a, source) = temporary();
    write_folder(&source, &config, &weights, Dtype::F32);
    let gptq = super::calibrate::gptq(&super::calibrate::samples(&config, &mut rng()));
    for options in [QuantizeOptions::default(), gptq] {
        for (scales, expected) in [
            (ScaleDtype::F16, 96 * 2),
            (ScaleDtype::BF16, 0),
            (ScaleDtype::F32, 0),
        ] {
            let (_b, target) = temporary();
            let spec = SPEC.with_scale_dtype(scales);
            let report = quantize_folder(&source, &target, &spec, &options, |_| {
                ControlFlow::Continue(())
            })
            .unwrap();
            for layer in &report.quantized {
                assert_eq!(
                    layer.underflows,
                    if layer.name == small { expected } else { 0 },
                    "{}, {scales}",
                    layer.name
                );
            }
        }
    }
}

#[test]
fn excluded_layers_stay_float() {
    let config = config_of_64();
    let ((_a, source), (_b, target)) = (temporary(), temporary());
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng()),
        Dtype::F16,
    );
    let report = quantize(
        &source,
        &target,
        SPEC,
        &["model.layers.0.self_attn.q_proj", "re:.*down_proj$"],
    )
    .unwrap();
    assert_eq!(
        report.excluded,
        [
            "model.layers.0.mlp.down_proj",
            "model.layers.0.self_attn.q_proj",
            "model.layers.1.mlp.down_proj"
        ]
    );
    assert_eq!(report.quantized.len(), 11);
    let model = open(&target).model;
    let dense = |projection: &Projection| matches!(projection, Projection::Dense(_));
    // A float q is not joined with 4-bit k and v.
    let [q, k, v] = model.layers[0].attention().qkv_proj.projections() else {
        panic!("three projections")
    };
    assert!(
        dense(q)
            && !dense(k)
            && !dense(v)
            && dense(&model.layers[1].mlp().unwrap().down_proj.projections()[0])
    );
    assert!(
        model.layers[1]
            .attention()
            .qkv_proj
            .joined()
            .is_some_and(|joined| !dense(joined))
    );
    assert!(
        model.layers[0]
            .mlp()
            .unwrap()
            .gate_up_proj
            .joined()
            .is_some_and(|joined| !dense(joined))
    );
    let names: Vec<String> = model.projections().map(|(name, _)| name).take(6).collect();
    let attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
        .map(|name| format!("model.layers.0.self_attn.{name}"));
    assert_eq!(names[..4], attention);
    assert_eq!(
        names[4..],
        [
            "model.layers.0.mlp.gate_up_proj",
            "model.layers.0.mlp.down_proj"
        ]
    );
}

#[test]
fn what_cannot_be_quantised_is_refused() {
    let config = config_of_64();
    let mut weights = random_weights(&config, &mut rng());
    let ((_a, source), (_b, target), (_c, again)) = (temporary(), temporary(), temporary());
    write_folder(&source, &config, &weights, Dtype::F16);
    assert!(matches!(
        quantize(&source, &target, SPEC, &["re:("]),
        Err(ModelError::QuantizationConfig { .. })
    ));
    quantize(&source, &target, SPEC, &[]).unwrap();
    assert!(matches!(
        quantize(&source, &target, SPEC, &[]),
        Err(ModelError::Checkpoint(
            CheckpointError::TargetNotEmpty { .. }
        ))
    ));
    assert!(
        matches!(quantize(&target, &again, SPEC, &[]), Err(ModelError::AlreadyQuantized { path }) if path.ends_with("config.json"))
    );
    // If the config does not declare the quantisation, the tensors in the file show it.
    std::fs::copy(source.join("config.json"), target.join("config.json")).unwrap();
    assert!(
        matches!(quantize(&target, &again, SPEC, &[]), Err(ModelError::AlreadyQuantized { path }) if path.ends_with("model.safetensors"))
    );

    let name = "model.layers.1.mlp.up_proj";
    weights.get_mut(&format!("{name}.weight")).unwrap().1[70] = f32::NAN;
    let (_d, broken) = temporary();
    write_folder(&broken, &config, &weights, Dtype::F32);
    let error = quantize(&broken, &again, SPEC, &[]).expect_err("NaN");
    // Element 70 of [N, K = 64] is input 6 of output 1.
    let ModelError::Quantize {
        layer,
        source: FormatError::NonFiniteWeight {
            row: 6, column: 1, ..
        },
    } = error
    else {
        panic!("{error}")
    };
    assert_eq!(layer, name);
    assert!(!again.exists());
}
