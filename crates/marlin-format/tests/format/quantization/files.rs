use std::fs;

use marlin_format::checkpoint::{CheckpointError, ConfigError, Quantization};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::expect_layers;
use crate::common::message;

/// Creates a folder with these files.
fn folder(files: &[(&str, &str)]) -> TempDir {
    let dir = TempDir::new().unwrap();
    for (name, text) in files {
        fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn read(files: &[(&str, &str)]) -> Option<String> {
    Quantization::read(folder(files).path())
        .unwrap()
        .map(|quantization| quantization.to_string())
}

fn config(fields: Value) -> String {
    json!({ "model_type": "llama", "quantization_config": fields }).to_string()
}

const FLOAT: &str = r#"{ "model_type": "llama", "quantization_config": null }"#;
const GPTQ: &str = r#"{ "bits": 4, "group_size": 64, "desc_act": true, "model_file_base_name": "gptq_model-4bit-64g" }"#;

#[test]
fn a_folder_of_floats_has_none() {
    assert_eq!(read(&[]), None);
    assert_eq!(read(&[("config.json", FLOAT)]), None);
    assert_eq!(
        read(&[("config.json", r#"{ "text_config": { "hidden_size": 8 } }"#)]),
        None
    );
}

#[test]
fn the_quantization_config_is_found_where_files_have_it() {
    let awq = json!({ "quant_method": "awq", "bits": 4, "group_size": 128 });
    let expected = Some("awq int4 g128 zero-points".to_string());
    assert_eq!(read(&[("config.json", &config(awq.clone()))]), expected);
    assert_eq!(
        read(&[(
            "config.json",
            &json!({ "compression_config": awq }).to_string()
        )]),
        expected
    );
    assert_eq!(
        read(&[(
            "config.json",
            &json!({ "text_config": { "quantization_config": awq } }).to_string()
        )]),
        expected
    );
    // The model's config takes precedence over other files.
    assert_eq!(
        read(&[
            ("config.json", &config(awq)),
            ("quantize_config.json", GPTQ)
        ]),
        expected
    );
}

#[test]
fn a_file_of_its_own_counts_where_the_config_says_nothing() {
    let expected = Some("gptq v1 int4 g64 act-order".to_string());
    assert_eq!(
        read(&[("config.json", FLOAT), ("quantize_config.json", GPTQ)]),
        expected
    );
    assert_eq!(
        read(&[("quantize_config.json", GPTQ), ("quant_config.json", "{")]),
        expected
    );
    let awq = r#"{ "zero_point": true, "q_group_size": 128, "w_bit": 4, "version": "GEMM" }"#;
    assert_eq!(
        read(&[("config.json", FLOAT), ("quant_config.json", awq)]),
        Some("awq int4 g128 zero-points".into())
    );
    let modelopt = r#"{ "producer": { "name": "modelopt" }, "quantization": { "quant_algo": "FP8", "exclude_modules": [] } }"#;
    assert_eq!(
        read(&[("config.json", FLOAT), ("hf_quant_config.json", modelopt)]),
        Some("modelopt fp8 e4m3 channel W8A8".into())
    );
    let quantization = Quantization::from_quantize_config(GPTQ.as_bytes()).unwrap();
    expect_layers(
        &quantization,
        &[
            ("lm_head", "float"),
            ("model.layers.0.mlp.up_proj", "gptq v1 int4 g64 act-order"),
        ],
    );
}

#[test]
fn errors_name_the_file() {
    let three_bits = config(json!({ "quant_method": "gptq", "bits": 3, "group_size": 128 }));
    for (name, text, expected) in [
        (
            "config.json",
            "{",
            "the config is not valid JSON: EOF while parsing an object at line 1 column 1",
        ),
        (
            "config.json",
            "[]",
            "the quantization config's `quantization_config` is []; this version reads an object: use a checkpoint quantised so, or a float one",
        ),
        (
            "config.json",
            &three_bits,
            "the quantization config's `bits` is 3; this version reads 4 or 8: use a checkpoint quantised so, or a float one",
        ),
        (
            "quantize_config.json",
            "{}",
            "the quantization config has no `group_size`; expected -1, 32, 64 or 128",
        ),
    ] {
        let dir = folder(&[(name, text)]);
        let error = Quantization::read(dir.path()).unwrap_err();
        let path = dir.path().join(name);
        assert!(
            matches!(&error, CheckpointError::Config { path: found, .. } if *found == path),
            "{error:?}"
        );
        assert_eq!(
            message(&error),
            format!("the quantisation that {} says: {expected}", path.display())
        );
    }
    let dir = TempDir::new().unwrap();
    fs::create_dir(dir.path().join("config.json")).unwrap();
    assert!(matches!(
        Quantization::read(dir.path()).unwrap_err(),
        CheckpointError::Io { action: "read", .. }
    ));
}

#[test]
fn long_values_are_cut_and_deep_ones_refused() {
    let error =
        Quantization::from_config(config(json!({ "quant_method": "é".repeat(10_000) })).as_bytes())
            .unwrap_err();
    assert!(error.to_string().len() < 700, "{error}");
    let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(matches!(
        Quantization::from_config(deep.as_bytes()).unwrap_err(),
        ConfigError::Json(_)
    ));
}
