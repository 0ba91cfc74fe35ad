//! Tests of layers that overrides quantise differently from the rest.

mod calibrated;

use std::ops::ControlFlow;
use std::path::Path;

use marlin_format::checkpoint::{Dtype, Quantization};
use marlin_format::{FormatError, GroupSize, QuantSpec, Sparsity, WeightValue};
use serde_json::json;

use super::calibrate::config_of_64;
use super::folder::logits;
use super::support::*;
use crate::{
    Architecture, FileFormat, ModelError, Override, QuantizeOptions, QuantizeReport,
    quantize_folder,
};

const SPEC: QuantSpec = QuantSpec::int4(GroupSize::G64);

fn overrides(entries: &[(&str, &str)]) -> Vec<(String, Override)> {
    entries
        .iter()
        .map(|(pattern, change)| (pattern.to_string(), change.parse().unwrap()))
        .collect()
}

fn run(
    source: &Path,
    target: &Path,
    options: &QuantizeOptions,
) -> Result<QuantizeReport, ModelError> {
    quantize_with(source, target, &SPEC, options)
}

#[test]
fn overrides_are_read_and_shown() {
    let spec = |value, group| Override::Spec { value, group };
    for (text, expected) in [
        ("skip", Override::Skip),
        ("fp8", Override::Format(QuantSpec::fp8())),
        ("nvfp4", Override::Format(QuantSpec::nvfp4())),
        ("bits:8", spec(Some(WeightValue::Int8), None)),
        ("group:channel", spec(None, Some(GroupSize::Channel))),
        (
            "bits:4,group:g32",
            spec(Some(WeightValue::Int4), Some(GroupSize::G32)),
        ),
    ] {
        let found: Override = text.parse().unwrap();
        assert_eq!((found, found.to_string().as_str()), (expected, text));
    }
    assert_eq!(
        " group:g32, bits:4"
            .parse::<Override>()
            .unwrap()
            .to_string(),
        "bits:4,group:g32"
    );
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
        assert!(
            error.contains(reason) && error.contains("group:channel"),
            "{error}"
        );
    }
}

#[test]
fn marlin_24_holds_the_specs_that_it_has() {
    let mut rng = rng();
    let config = config_with(
        json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 64 }),
    );
    let (_a, source) = random_folder(&config, Dtype::F16, &mut rng);
    let tokens = random_tokens(8, config.vocab_size, &mut rng);
    let pruned = |format, entries: &[(&str, &str)]| {
        let (parent, target) = temporary();
        let entries = [&[("re:.*[kv]_proj", "skip")], entries].concat();
        let options = QuantizeOptions {
            format,
            sparsity: Sparsity::TwoFour,
            overrides: overrides(&entries),
            ..QuantizeOptions::default()
        };
        let report = quantize_folder(
            &source,
            &target,
            &QuantSpec::int4(GroupSize::G128),
            &options,
            |_| ControlFlow::Continue(()),
        );
        report.map(|_| (parent, target))
    };
    let entries = [
        ("re:.*down_proj", "bits:8"),
        ("re:.*up_proj", "group:channel"),
    ];
    let (_b, sparse) = pruned(FileFormat::Marlin24, &entries).unwrap();
    let (_c, dense) = pruned(FileFormat::CompressedTensors, &entries).unwrap();
    let quantization = Quantization::read(&sparse).unwrap().unwrap();
    for (layer, expected) in [
        ("mlp.down_proj", "int8 g128"),
        ("mlp.up_proj", "int4 channel"),
        ("mlp.gate_proj", "int4 g128"),
    ] {
        let found = quantization
            .layer(&format!("model.layers.1.{layer}"))
            .unwrap()
            .to_string();
        assert!(
            found.starts_with(&format!("marlin-24 {expected}")),
            "{layer}: {found}"
        );
    }
    assert_eq!(
        logits(&open(&sparse).model, &tokens),
        logits(&open(&dense).model, &tokens)
    );
    let error = pruned(FileFormat::Marlin24, &[("re:.*down_proj", "group:g32")])
        .map(drop)
        .expect_err("groups of 32");
    let ModelError::Quantize {
        layer,
        source: FormatError::Marlin24Spec { found },
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(
        (layer.as_str(), *found),
        (
            "model.layers.0.mlp.down_proj",
            QuantSpec::int4(GroupSize::G32)
        )
    );
}

/// A pattern may match the layer's name in the model or its name in the file.
#[test]
fn layers_of_gptq_files_of_phi3_have_both_names() {
    let config = config_of(
        Architecture::Phi3,
        json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96 }),
    );
    let (_a, source) = random_folder(&config, Dtype::F32, &mut rng());
    let specs = |entries: &[(&str, &str)]| {
        let (_parent, target) = temporary();
        let options = QuantizeOptions {
            format: FileFormat::Gptq,
            overrides: overrides(entries),
            ..QuantizeOptions::default()
        };
        let report = run(&source, &target, &options).unwrap();
        let spec = |name: &str| {
            report
                .quantized
                .iter()
                .find(|layer| layer.name.ends_with(name))
                .unwrap()
                .spec
                .to_string()
        };
        (
            spec("0.mlp.gate_proj"),
            spec("0.mlp.up_proj"),
            open(&target).model.layers[0]
                .mlp()
                .unwrap()
                .gate_up_proj
                .joined()
                .is_some(),
        )
    };
    let [int8, int4, smaller] = ["int8 g64 f16", "int4 g64 f16", "int4 g32 f16"].map(String::from);
    assert_eq!(specs(&[("re:.*gate_proj", "bits:8")]), (int8, int4, false));
    assert_eq!(
        specs(&[("re:.*gate_up_proj", "group:g32")]),
        (smaller.clone(), smaller, true)
    );
}

#[test]
fn overrides_and_exclusions_of_no_layer_are_refused() {
    let config = config_of_64();
    let ((_a, source), (_b, target)) = (temporary(), temporary());
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng()),
        Dtype::F16,
    );
    let quantize = |entries: &[(&str, &str)], exclude: &[&str]| {
        let exclude = exclude.iter().map(ToString::to_string).collect();
        run(
            &source,
            &target,
            &QuantizeOptions {
                overrides: overrides(entries),
                exclude,
                ..QuantizeOptions::default()
            },
        )
    };
    // Norms and the lm_head are not layers that can be quantised. A name must be complete, and a
    // regular expression must match from the start of a name.
    for pattern in ["re:.*norm", "lm_head", "down_proj", "re:down_proj", ""] {
        let error =
            quantize(&[("re:.*down_proj", "bits:8"), (pattern, "skip")], &[]).expect_err(pattern);
        assert!(
            matches!(&error, ModelError::PatternOfNone { option: "override", pattern: found } if found == pattern),
            "{error}"
        );
    }
    // Tensors that are never quantised may be excluded.
    for pattern in [
        "down_proj",
        "re:down_proj",
        "",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.2.mlp.down_proj",
    ] {
        let error = quantize(
            &[],
            &["lm_head", "re:.*norm", "model.embed_tokens", pattern],
        )
        .expect_err(pattern);
        assert!(
            matches!(&error, ModelError::PatternOfNone { option: "exclude", pattern: found } if found == pattern),
            "{error}"
        );
    }
    assert!(matches!(
        quantize(&[("re:(", "skip")], &[]),
        Err(ModelError::QuantizationConfig { .. })
    ));
    assert!(!target.exists());
    // An override is accepted even if an earlier one takes precedence for all its layers. Excluded
    // layers are not quantised.
    let entries = [
        ("re:.*down_proj", "bits:8"),
        ("model.layers.0.mlp.down_proj", "skip"),
    ];
    let report = quantize(
        &entries,
        &["model.layers.1.mlp.down_proj", "lm_head", "model.norm"],
    )
    .unwrap();
    assert_eq!(report.excluded, ["model.layers.1.mlp.down_proj"]);
    let of_eight: Vec<_> = report
        .quantized
        .iter()
        .filter(|layer| layer.spec.value == WeightValue::Int8)
        .map(|layer| layer.name.as_str())
        .collect();
    assert_eq!(of_eight, ["model.layers.0.mlp.down_proj"]);
}
