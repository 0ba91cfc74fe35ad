//! Tests of files in the GPTQ format.

use marlin_format::checkpoint::{
    Checkpoint, Dtype, GptqVersion, LayerFormat, Quantization, compressed_tensors, read_layer,
};
use marlin_format::{GroupSize, QuantSpec};
use serde_json::json;

use super::{SPEC, config_of_64, quantize, quantize_as};
use crate::tests::folder::logits;
use crate::tests::support::*;
use crate::{Architecture, FileFormat, ModelError, Projection};

/// Tests that the GPTQ format and compressed-tensors store the same values, and that a GPTQ config
/// declares every layer's format.
#[test]
fn gptq_files_hold_the_same_weights() {
    let config = config_of_64();
    let (exclude, excluded) = (
        ["re:.*0.self_attn.q_proj"],
        "model.layers.0.self_attn.q_proj",
    );
    for spec in [
        SPEC,
        SPEC.with_zero_points(),
        QuantSpec::int8(GroupSize::Channel),
        QuantSpec::int8(GroupSize::G32).with_zero_points(),
    ] {
        let ((_a, source), (_b, packed), (_c, target)) = (temporary(), temporary(), temporary());
        write_folder(
            &source,
            &config,
            &random_weights(&config, &mut rng()),
            Dtype::F16,
        );
        quantize(&source, &packed, spec, &exclude).unwrap();
        let report = quantize_as(FileFormat::Gptq, &source, &target, spec, &exclude).unwrap();
        assert_eq!(
            (report.quantized.len(), &report.excluded[..]),
            (13, &[excluded.to_string()][..])
        );
        let (packed, checkpoint) = (
            Checkpoint::open(&packed).unwrap(),
            Checkpoint::open(&target).unwrap(),
        );
        let quantization = Quantization::read(&target).unwrap().unwrap();
        for layer in &report.quantized {
            let format = quantization.layer(&layer.name).unwrap();
            let LayerFormat::Gptq(gptq) = format else {
                panic!("{}: {format}", layer.name)
            };
            assert_eq!(
                (gptq.spec, gptq.version, gptq.act_order),
                (spec, GptqVersion::V2, false)
            );
            let weight = read_layer(&checkpoint, &layer.name, &format).unwrap();
            assert_eq!(
                weight,
                compressed_tensors::to_plain(&packed, &layer.name, &spec).unwrap(),
                "{}",
                layer.name
            );
        }
        for name in [excluded, "lm_head"] {
            assert_eq!(
                quantization.layer(name).unwrap(),
                LayerFormat::Float,
                "{name}"
            );
            let name = format!("{name}.weight");
            assert_eq!(
                checkpoint.tensor(&name).unwrap().bytes(),
                packed.tensor(&name).unwrap().bytes()
            );
        }
        let again = temporary().1;
        assert!(
            matches!(quantize(&target, &again, spec, &[]), Err(ModelError::AlreadyQuantized { path }) if path.ends_with("config.json"))
        );
        std::fs::copy(source.join("config.json"), target.join("config.json")).unwrap();
        let error = quantize(&target, &again, spec, &[]).unwrap_err();
        assert!(
            matches!(&error, ModelError::AlreadyQuantized { path } if path.ends_with("model.safetensors")),
            "{error}"
        );
    }

    let config = config_with(
        json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 84 }),
    );
    let ((_a, source), (_b, target)) = (temporary(), temporary());
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng()),
        Dtype::F16,
    );
    let channel = QuantSpec::int4(GroupSize::Channel);
    let error = quantize_as(FileFormat::Gptq, &source, &target, channel, &[]).unwrap_err();
    let ModelError::GptqShape {
        layer,
        multiple: 8,
        k: 84,
        n: 64,
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(layer, "model.layers.0.mlp.down_proj");
    assert!(!target.exists());
    quantize_as(FileFormat::Gptq, &source, &target, channel, &["re:.*mlp"]).unwrap();
}

/// Tests that gate and up are separate layers in the file, and q, k and v one layer, as in files of
/// GPTQModel from 7.0 on.
#[test]
fn gptq_files_of_phi3_have_gate_and_up_apart() {
    let config = config_of(
        Architecture::Phi3,
        json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96 }),
    );
    let ((_a, source), (_b, packed), (_c, target), (_d, mixed)) =
        (temporary(), temporary(), temporary(), temporary());
    let mut rng = rng();
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F32,
    );
    quantize(&source, &packed, SPEC, &[]).unwrap();
    let report = quantize_as(FileFormat::Gptq, &source, &target, SPEC, &[]).unwrap();
    let names: Vec<&str> = report
        .quantized
        .iter()
        .map(|layer| layer.name.as_str())
        .filter(|name| name.contains("layers.0"))
        .collect();
    let expected = [
        "mlp.down_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "self_attn.o_proj",
        "self_attn.qkv_proj",
    ];
    assert_eq!(names, expected.map(|name| format!("model.layers.0.{name}")));
    let tokens = random_tokens(8, config.vocab_size, &mut rng);
    let (of_packed, of_gptq) = (open(&packed).model, open(&target).model);
    let expected: Vec<f64> = logits(&of_packed, &tokens)
        .into_iter()
        .map(f64::from)
        .collect();
    assert!(relative_error(&logits(&of_gptq, &tokens), &expected) < 1e-6);
    assert!(
        of_gptq.layers[0]
            .mlp()
            .unwrap()
            .gate_up_proj
            .joined()
            .is_some()
    );

    // If gate is float, gate and up are two matmuls, with the names in the file.
    let report = quantize_as(FileFormat::Gptq, &source, &mixed, SPEC, &["re:.*gate_proj"]).unwrap();
    assert_eq!(
        report.excluded,
        [0, 1].map(|layer| format!("model.layers.{layer}.mlp.gate_proj"))
    );
    let model = open(&mixed).model;
    let names: Vec<String> = model.projections().map(|(name, _)| name).take(5).collect();
    let expected = [
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ];
    assert_eq!(names, expected.map(|name| format!("model.layers.0.{name}")));
    let [gate, up] = model.layers[0].mlp().unwrap().gate_up_proj.projections() else {
        panic!("two projections")
    };
    assert!(matches!(
        (gate, up),
        (Projection::Dense(_), Projection::Quant(_))
    ));
    check_dequantized(&model, &tokens);
}

/// `down_proj` has 96 rows: a group of 64 and one of 32. The GPTQ format stores the incomplete
/// group as compressed-tensors does.
#[test]
fn the_last_group_may_be_incomplete() {
    let mut rng = rng();
    let config = config_of_64();
    let spec = QuantSpec::int4(GroupSize::G64).with_zero_points();
    let ((_a, source), (_b, packed), (_c, target)) = (temporary(), temporary(), temporary());
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F16,
    );
    let report = quantize(&source, &packed, spec, &[]).unwrap();
    assert_eq!((report.quantized.len(), report.excluded.len()), (14, 0));
    quantize_as(FileFormat::Gptq, &source, &target, spec, &[]).unwrap();
    let weight = compressed_tensors::to_plain(
        &Checkpoint::open(&packed).unwrap(),
        "model.layers.1.mlp.down_proj",
        &spec,
    )
    .unwrap();
    assert_eq!(
        (weight.k(), weight.n(), weight.scales().len()),
        (96, 64, 2 * 64)
    );
    let tokens = random_tokens(8, config.vocab_size, &mut rng);
    let expected = logits(&open(&packed).model, &tokens);
    assert_eq!(logits(&open(&target).model, &tokens), expected);
    check_dequantized(&open(&packed).model, &tokens);
}
