//! Float folder to quantised folder.

use std::ops::ControlFlow;
use std::path::Path;

use burn::tensor::{Device, FloatDType};
use marlin_format::checkpoint::{
    Checkpoint, CheckpointError, CheckpointWriter, Dtype, GptqVersion, LayerFormat, Quantization, TensorSpec, compressed_tensors,
    read_layer,
};
use marlin_format::{FormatError, GroupSize, QuantSpec, ScaleDtype, Sparsity};
use rand::RngExt;
use serde_json::json;

use super::folder::logits;
use super::support::*;
use crate::{
    Architecture, FileFormat, Llama, LlamaConfig, LlamaError, OpenOptions, Projection, QuantizeOptions, QuantizeReport, quantize_folder,
};

const SPEC: QuantSpec = QuantSpec::int4(GroupSize::G32);

fn config_of_64() -> LlamaConfig {
    config_with(json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96 }))
}

fn quantize(source: &Path, target: &Path, spec: QuantSpec, exclude: &[&str]) -> Result<QuantizeReport, LlamaError> {
    quantize_as(FileFormat::CompressedTensors, source, target, spec, exclude)
}

fn quantize_as(format: FileFormat, source: &Path, target: &Path, spec: QuantSpec, exclude: &[&str]) -> Result<QuantizeReport, LlamaError> {
    let options = QuantizeOptions { format, exclude: exclude.iter().map(ToString::to_string).collect(), ..QuantizeOptions::default() };
    quantize_folder(source, target, &spec, &options, |_| ControlFlow::Continue(()))
}

#[test]
fn a_quantised_folder_opens_and_computes_what_rounding_gives() {
    let mut rng = rng();
    let config = config_of_64();
    let weights = random_weights(&config, &mut rng);
    let (int8, zero_points) = (QuantSpec::int8(GroupSize::G32), SPEC.with_zero_points().with_scale_dtype(ScaleDtype::BF16));
    // The errors of 4 and of 8 bits in so small a model.
    let cases =
        [(SPEC, 0.6), (zero_points, 0.6), (QuantSpec::int4(GroupSize::Channel), 0.6), (int8, 0.04), (int8.with_zero_points(), 0.04)];
    for (spec, limit) in cases {
        let ((_a, source), (_b, target), (_c, rounded)) = (temporary(), temporary(), temporary());
        write_folder(&source, &config, &weights, Dtype::BF16);
        std::fs::write(source.join("tokenizer.json"), byte_level_tokenizer().to_string()).unwrap();
        std::fs::write(source.join("generation_config.json"), r#"{"eos_token_id": 9}"#).unwrap();
        std::fs::write(source.join("README.md"), "not copied").unwrap();
        let mut progress = Vec::new();
        let report = quantize_folder(&source, &target, &spec, &QuantizeOptions::default(), |step| {
            progress.push((step.tensor.to_string(), step.done, step.total));
            ControlFlow::Continue(())
        })
        .unwrap();
        assert_eq!((report.quantized.len(), report.excluded.len()), (14, 0));
        assert!(report.target_bytes < report.source_bytes);
        assert_eq!(progress.len(), weights.len());
        assert!(
            progress
                .iter()
                .enumerate()
                .all(|(i, (name, done, total))| (*done, *total) == (i + 1, weights.len()) && weights.contains_key(name))
        );
        let mut files: Vec<_> = target.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        files.sort();
        assert_eq!(files, ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]);

        // What is not a projection is there bit for bit; projections are what the host dequantises.
        let (before, after) = (Checkpoint::open(&source).unwrap(), Checkpoint::open(&target).unwrap());
        let mut dequantized = Weights::new();
        for (name, (shape, _)) in &weights {
            let values = match name.strip_suffix(".weight").filter(|layer| layer.ends_with("_proj")) {
                None => {
                    assert_eq!(after.tensor(name).unwrap().bytes(), before.tensor(name).unwrap().bytes());
                    after.tensor(name).unwrap().to_f32().unwrap()
                }
                Some(layer) => {
                    let plain = compressed_tensors::to_plain(&after, layer, &spec).unwrap();
                    let (k, n, values) = (plain.k(), plain.n(), plain.dequantize());
                    (0..n * k).map(|i| values[i % k * n + i / k]).collect()
                }
            };
            dequantized.insert(name.clone(), (shape.clone(), values));
        }
        write_folder(&rounded, &config, &dequantized, Dtype::F32);

        let llama = open(&target);
        assert_eq!(llama.generation.eos_token_ids, [9]);
        assert!(matches!(llama.model.layers[0].mlp.down_proj, Projection::Quant(_)));
        assert!(matches!(llama.model.lm_head, Some(Projection::Dense(_))));
        let tokens = random_tokens(8, config.vocab_size, &mut rng);
        let expected: Vec<f64> = logits(&open(&rounded).model, &tokens).into_iter().map(f64::from).collect();
        assert!(relative_error(&logits(&llama.model, &tokens), &expected) < 1e-4, "{spec}");
        let float: Vec<f64> = logits(&open(&source).model, &tokens).into_iter().map(f64::from).collect();
        let error = relative_error(&logits(&llama.model, &tokens), &float);
        println!("{spec}: relative error of quantisation {error:.2}");
        assert!(error < limit, "{spec}: {error}");
    }
}

#[test]
fn a_quantised_model_runs_in_half_precision() {
    let mut rng = rng();
    let config = config_of_64();
    let ((_a, source), (_b, target)) = (temporary(), temporary());
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F16);
    quantize(&source, &target, SPEC, &[]).unwrap();
    let half = Llama::open(&target, &Device::flex(), &OpenOptions { dtype: None, ..options() }).unwrap().model;
    assert_eq!(half.dtype(), FloatDType::F16);
    let tokens = random_tokens(8, config.vocab_size, &mut rng);
    let expected: Vec<f64> = logits(&open(&target).model, &tokens).into_iter().map(f64::from).collect();
    assert!(relative_error(&logits(&half, &tokens), &expected) < 0.02);
}

/// As the walk of a quantiser that looks at data, rounding counts the groups whose scales underflow.
#[test]
fn layers_of_small_weights_are_counted() {
    let config = config_of_64();
    let mut weights = random_weights(&config, &mut rng());
    // GPTQ adds what the residual stream lacks to layers that feed it: it is none of those.
    let small = "model.layers.1.mlp.up_proj";
    let (_, values) = weights.get_mut(&format!("{small}.weight")).unwrap();
    values.iter_mut().for_each(|value| *value *= 1e-9);
    let (_a, source) = temporary();
    write_folder(&source, &config, &weights, Dtype::F32);
    let gptq = super::calibrate::gptq(&super::calibrate::samples(&config, &mut rng()));
    for options in [QuantizeOptions::default(), gptq] {
        for (scales, expected) in [(ScaleDtype::F16, 96 * 2), (ScaleDtype::BF16, 0), (ScaleDtype::F32, 0)] {
            let (_b, target) = temporary();
            let spec = SPEC.with_scale_dtype(scales);
            let report = quantize_folder(&source, &target, &spec, &options, |_| ControlFlow::Continue(())).unwrap();
            for layer in &report.quantized {
                assert_eq!(layer.underflows, if layer.name == small { expected } else { 0 }, "{}, {scales}", layer.name);
            }
        }
    }
}

#[test]
fn excluded_layers_stay_float() {
    let config = config_of_64();
    let ((_a, source), (_b, target)) = (temporary(), temporary());
    write_folder(&source, &config, &random_weights(&config, &mut rng()), Dtype::F16);
    let report = quantize(&source, &target, SPEC, &["model.layers.0.self_attn.q_proj", "re:.*down_proj$"]).unwrap();
    assert_eq!(report.excluded, ["model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]);
    assert_eq!(report.quantized.len(), 11);
    let model = open(&target).model;
    let dense = |projection: &Projection| matches!(projection, Projection::Dense(_));
    // A float q beside 4-bit k and v is not joined with them.
    let [q, k, v] = model.layers[0].self_attn.qkv_proj.projections() else { panic!("three projections") };
    assert!(dense(q) && !dense(k) && !dense(v) && dense(&model.layers[1].mlp.down_proj));
    assert!(model.layers[1].self_attn.qkv_proj.joined().is_some_and(|joined| !dense(joined)));
    assert!(model.layers[0].mlp.gate_up_proj.joined().is_some_and(|joined| !dense(joined)));
    let names: Vec<String> = model.projections().map(|(name, _)| name).take(6).collect();
    let attention = ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| format!("model.layers.0.self_attn.{name}"));
    assert_eq!(names[..4], attention);
    assert_eq!(names[4..], ["model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"]);
}

/// Both forms hold the same values, and declare every layer's format.
#[test]
fn gptq_files_hold_the_same_weights() {
    let config = config_of_64();
    let (exclude, excluded) = (["re:.*0.self_attn.q_proj"], "model.layers.0.self_attn.q_proj");
    for spec in [SPEC, SPEC.with_zero_points(), QuantSpec::int8(GroupSize::Channel), QuantSpec::int8(GroupSize::G32).with_zero_points()] {
        let ((_a, source), (_b, packed), (_c, target)) = (temporary(), temporary(), temporary());
        write_folder(&source, &config, &random_weights(&config, &mut rng()), Dtype::F16);
        quantize(&source, &packed, spec, &exclude).unwrap();
        let report = quantize_as(FileFormat::Gptq, &source, &target, spec, &exclude).unwrap();
        assert_eq!((report.quantized.len(), &report.excluded[..]), (13, &[excluded.to_string()][..]));
        let (packed, checkpoint) = (Checkpoint::open(&packed).unwrap(), Checkpoint::open(&target).unwrap());
        let quantization = Quantization::read(&target).unwrap().unwrap();
        for layer in &report.quantized {
            let format = quantization.layer(&layer.name).unwrap();
            let LayerFormat::Gptq(gptq) = format else { panic!("{}: {format}", layer.name) };
            assert_eq!((gptq.spec, gptq.version, gptq.act_order), (spec, GptqVersion::V2, false));
            let weight = read_layer(&checkpoint, &layer.name, &format).unwrap();
            assert_eq!(weight, compressed_tensors::to_plain(&packed, &layer.name, &spec).unwrap(), "{}", layer.name);
        }
        for name in [excluded, "lm_head"] {
            assert_eq!(quantization.layer(name).unwrap(), LayerFormat::Float, "{name}");
            let name = format!("{name}.weight");
            assert_eq!(checkpoint.tensor(&name).unwrap().bytes(), packed.tensor(&name).unwrap().bytes());
        }
        let again = temporary().1;
        assert!(
            matches!(quantize(&target, &again, spec, &[]), Err(LlamaError::AlreadyQuantized { path }) if path.ends_with("config.json"))
        );
        std::fs::copy(source.join("config.json"), target.join("config.json")).unwrap();
        let error = quantize(&target, &again, spec, &[]).unwrap_err();
        assert!(matches!(&error, LlamaError::AlreadyQuantized { path } if path.ends_with("model.safetensors")), "{error}");
    }

    let config = config_with(json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 84 }));
    let ((_a, source), (_b, target)) = (temporary(), temporary());
    write_folder(&source, &config, &random_weights(&config, &mut rng()), Dtype::F16);
    let channel = QuantSpec::int4(GroupSize::Channel);
    let error = quantize_as(FileFormat::Gptq, &source, &target, channel, &[]).unwrap_err();
    let LlamaError::GptqShape { layer, multiple: 8, k: 84, n: 64 } = &error else { panic!("{error}") };
    assert_eq!(layer, "model.layers.0.mlp.down_proj");
    assert!(!target.exists());
    quantize_as(FileFormat::Gptq, &source, &target, channel, &["re:.*mlp"]).unwrap();
}

/// As GPTQModel has it from 7.0 on: gate and up as two tensors, q, k and v as one.
#[test]
fn gptq_files_of_phi3_have_gate_and_up_apart() {
    let config =
        config_of(Architecture::Phi3, json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96 }));
    let ((_a, source), (_b, packed), (_c, target), (_d, mixed)) = (temporary(), temporary(), temporary(), temporary());
    let mut rng = rng();
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F32);
    quantize(&source, &packed, SPEC, &[]).unwrap();
    let report = quantize_as(FileFormat::Gptq, &source, &target, SPEC, &[]).unwrap();
    let names: Vec<&str> = report.quantized.iter().map(|layer| layer.name.as_str()).filter(|name| name.contains("layers.0")).collect();
    let expected = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.o_proj", "self_attn.qkv_proj"];
    assert_eq!(names, expected.map(|name| format!("model.layers.0.{name}")));
    let tokens = random_tokens(8, config.vocab_size, &mut rng);
    let (of_packed, of_gptq) = (open(&packed).model, open(&target).model);
    let expected: Vec<f64> = logits(&of_packed, &tokens).into_iter().map(f64::from).collect();
    assert!(relative_error(&logits(&of_gptq, &tokens), &expected) < 1e-6);
    assert!(of_gptq.layers[0].mlp.gate_up_proj.joined().is_some());

    // One of the two in float: a matmul each, under the names of the file.
    let report = quantize_as(FileFormat::Gptq, &source, &mixed, SPEC, &["re:.*gate_proj"]).unwrap();
    assert_eq!(report.excluded, [0, 1].map(|layer| format!("model.layers.{layer}.mlp.gate_proj")));
    let model = open(&mixed).model;
    let names: Vec<String> = model.projections().map(|(name, _)| name).take(5).collect();
    let expected = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];
    assert_eq!(names, expected.map(|name| format!("model.layers.0.{name}")));
    let [gate, up] = model.layers[0].mlp.gate_up_proj.projections() else { panic!("two projections") };
    assert!(matches!((gate, up), (Projection::Dense(_), Projection::Quant(_))));
    let float: Vec<f64> = logits(&open(&source).model, &tokens).into_iter().map(f64::from).collect();
    assert!(relative_error(&logits(&model, &tokens), &float) < 0.6);
}

/// `down_proj` has 96 rows: a group of 64 and one of 32. GPTQ's form has it as compressed-tensors' does.
#[test]
fn the_last_group_may_be_incomplete() {
    let mut rng = rng();
    let config = config_of_64();
    let spec = QuantSpec::int4(GroupSize::G64).with_zero_points();
    let ((_a, source), (_b, packed), (_c, target)) = (temporary(), temporary(), temporary());
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F16);
    let report = quantize(&source, &packed, spec, &[]).unwrap();
    assert_eq!((report.quantized.len(), report.excluded.len()), (14, 0));
    quantize_as(FileFormat::Gptq, &source, &target, spec, &[]).unwrap();
    let weight = compressed_tensors::to_plain(&Checkpoint::open(&packed).unwrap(), "model.layers.1.mlp.down_proj", &spec).unwrap();
    assert_eq!((weight.k(), weight.n(), weight.scales().len()), (96, 64, 2 * 64));
    let tokens = random_tokens(8, config.vocab_size, &mut rng);
    let expected = logits(&open(&packed).model, &tokens);
    assert_eq!(logits(&open(&target).model, &tokens), expected);
    let float: Vec<f64> = logits(&open(&source).model, &tokens).into_iter().map(f64::from).collect();
    assert!(relative_error(&expected, &float) < 0.6);
}

/// Pruned, a folder computes the same in every form, and the form that stores two of every four weights is the smallest.
#[test]
fn a_pruned_folder_is_the_same_in_every_form() {
    let mut rng = rng();
    let config =
        config_with(json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 64 }));
    let spec = QuantSpec::int4(GroupSize::G128);
    let (_parent, source) = temporary();
    write_folder(&source, &config, &random_weights(&config, &mut rng), Dtype::F16);
    let tokens = random_tokens(8, config.vocab_size, &mut rng);
    // Their N of 32 is half a tile of marlin-24.
    let too_narrow = || vec!["re:.*k_proj".into(), "re:.*v_proj".into()];
    let pruned = |format| {
        let (parent, target) = temporary();
        let options = QuantizeOptions { format, sparsity: Sparsity::TwoFour, exclude: too_narrow(), ..QuantizeOptions::default() };
        let report = quantize_folder(&source, &target, &spec, &options, |_| ControlFlow::Continue(())).unwrap();
        assert!(report.quantized.iter().all(|layer| layer.sparsity == Sparsity::TwoFour));
        (parent, target, report)
    };
    let (_a, sparse, of_sparse) = pruned(FileFormat::Marlin24);
    let expected = logits(&open(&sparse).model, &tokens);
    for format in [FileFormat::CompressedTensors, FileFormat::Gptq] {
        let (_b, dense, of_dense) = pruned(format);
        assert_eq!(logits(&open(&dense).model, &tokens), expected, "{format:?}");
        for (sparse, dense) in of_sparse.quantized.iter().zip(&of_dense.quantized) {
            assert!(sparse.bits_per_weight == dense.bits_per_weight - 1.0, "{sparse:?}, {dense:?}");
        }
        // What is 2:4 is found in every form.
        let (checkpoint, quantization) = (Checkpoint::open(&dense).unwrap(), Quantization::read(&dense).unwrap().unwrap());
        let layer = "model.layers.1.mlp.up_proj";
        let weight = read_layer(&checkpoint, layer, &quantization.layer(layer).unwrap()).unwrap();
        assert_eq!(weight.sparsity(), Sparsity::TwoFour);
    }
    let float: Vec<f64> = logits(&open(&source).model, &tokens).into_iter().map(f64::from).collect();
    // Half of random weights are more than half of what they compute.
    let error = relative_error(&expected, &float);
    assert!((0.01..2.0).contains(&error), "{error}");

    // Not pruned, the form has no place for the layers.
    let (_c, target) = temporary();
    let options = QuantizeOptions { format: FileFormat::Marlin24, exclude: too_narrow(), ..QuantizeOptions::default() };
    let error = quantize_folder(&source, &target, &spec, &options, |_| ControlFlow::Continue(())).expect_err("dense weights");
    assert!(matches!(&error, LlamaError::Quantize { source: FormatError::NotTwoFour { .. }, .. }), "{error}");
    assert!(!target.exists());
}

#[test]
fn what_cannot_be_quantised_is_refused() {
    let config = config_of_64();
    let mut weights = random_weights(&config, &mut rng());
    let ((_a, source), (_b, target), (_c, again)) = (temporary(), temporary(), temporary());
    write_folder(&source, &config, &weights, Dtype::F16);
    assert!(matches!(quantize(&source, &target, SPEC, &["re:("]), Err(LlamaError::QuantizationConfig { .. })));
    quantize(&source, &target, SPEC, &[]).unwrap();
    assert!(matches!(quantize(&source, &target, SPEC, &[]), Err(LlamaError::Checkpoint(CheckpointError::TargetNotEmpty { .. }))));
    assert!(matches!(quantize(&target, &again, SPEC, &[]), Err(LlamaError::AlreadyQuantized { path }) if path.ends_with("config.json")));
    // The config by itself does not have it.
    std::fs::copy(source.join("config.json"), target.join("config.json")).unwrap();
    assert!(
        matches!(quantize(&target, &again, SPEC, &[]), Err(LlamaError::AlreadyQuantized { path }) if path.ends_with("model.safetensors"))
    );

    let name = "model.layers.1.mlp.up_proj";
    weights.get_mut(&format!("{name}.weight")).unwrap().1[70] = f32::NAN;
    let (_d, broken) = temporary();
    write_folder(&broken, &config, &weights, Dtype::F32);
    let error = quantize(&broken, &again, SPEC, &[]).expect_err("NaN");
    // Element 70 of [N, K = 64] is input 6 of output 1.
    let LlamaError::Quantize { layer, source: FormatError::NonFiniteWeight { row: 6, column: 1, .. } } = error else { panic!("{error}") };
    assert_eq!(layer, name);
    assert!(!again.exists());
}

/// Writes a folder whose projections, 2:4, are in compressed-tensors' `sparse-24-bitmask`.
fn write_bitmask_folder(dir: &Path, config: &LlamaConfig, weights: &Weights) {
    let mut tensors: Vec<(TensorSpec, Vec<u8>)> = Vec::new();
    for (name, (shape, values)) in weights {
        let Some(layer) = name.strip_suffix("_proj.weight") else {
            tensors.push((TensorSpec::new(name, Dtype::F32, shape.as_slice()), bytes(values, Dtype::F32)));
            continue;
        };
        let (n, k) = (shape[0], shape[1]);
        let stored: Vec<f32> = values.iter().copied().filter(|&value| value != 0.0).collect();
        assert_eq!(stored.len(), n * k / 2);
        let mask = values.chunks(k).flat_map(|row| {
            row.chunks(8).map(|eight| eight.iter().enumerate().fold(0, |mask, (i, &value)| mask | u8::from(value != 0.0) << i))
        });
        let extents = [n, k].iter().flat_map(|&extent| (extent as i64).to_le_bytes()).collect();
        let spec = |tensor: &str, dtype, shape: [usize; 2]| TensorSpec::new(format!("{layer}_proj.{tensor}"), dtype, shape);
        tensors.push((spec("shape", Dtype::I64, [2, 1]), extents));
        tensors.push((spec("compressed", Dtype::F32, [n, k / 2]), bytes(&stored, Dtype::F32)));
        tensors.push((spec("bitmask", Dtype::U8, [n, k.div_ceil(8)]), mask.collect()));
    }
    let mut json = config.to_json();
    json["compression_config"] =
        json!({ "quant_method": "compressed-tensors", "format": "dense", "sparsity_config": { "format": "sparse-24-bitmask" } });
    let mut writer = CheckpointWriter::create(dir).unwrap();
    writer.write_file("config.json", json.to_string().as_bytes()).unwrap();
    writer.declare(tensors.iter().map(|(spec, _)| spec.clone())).unwrap();
    tensors.iter().for_each(|(spec, bytes)| writer.write_tensor(&spec.name, bytes).unwrap());
    writer.finish().unwrap();
}

#[test]
fn float_weights_with_a_bitmask_are_as_those_with_zeros() {
    let mut rng = rng();
    let config = config_of_64();
    let mut weights = random_weights(&config, &mut rng);
    for (_, (_, values)) in weights.iter_mut().filter(|(name, _)| name.ends_with("_proj.weight")) {
        for four in values.chunks_exact_mut(4) {
            let first = rng.random_range(0..3);
            let kept = [first, rng.random_range(first + 1..4)];
            (0..4).for_each(|i| four[i] = if kept.contains(&i) { four[i] + 1.0_f32.copysign(four[i]) } else { 0.0 });
        }
    }
    let ((_a, dense), (_b, bitmask)) = (temporary(), temporary());
    write_folder(&dense, &config, &weights, Dtype::F32);
    write_bitmask_folder(&bitmask, &config, &weights);
    let tokens = random_tokens(10, config.vocab_size, &mut rng);
    assert_eq!(logits(&open(&bitmask).model, &tokens), logits(&open(&dense).model, &tokens));

    let quantized = [&dense, &bitmask].map(|source| {
        let (parent, target) = temporary();
        let report = quantize(source, &target, SPEC, &[]).unwrap();
        assert!(report.quantized.iter().filter(|layer| layer.k.is_multiple_of(32)).all(|layer| layer.sparsity == Sparsity::TwoFour));
        (parent, target)
    });
    let [dense, bitmask] = quantized.each_ref().map(|(_, target)| Checkpoint::open(target).unwrap());
    assert!(dense.names().eq(bitmask.names()));
    assert!(dense.names().all(|name| dense.tensor(name).unwrap().bytes() == bitmask.tensor(name).unwrap().bytes()));
    let config = std::fs::read_to_string(quantized[1].1.join("config.json")).unwrap();
    assert!(config.contains("quantization_config") && !config.contains("compression_config"), "{config}");
}
