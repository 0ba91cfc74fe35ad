//! Tests of the patterns of `dynamic`: their precedence, and the patterns that are refused.

use marlin_format::checkpoint::{ConfigError, Quantization};
use serde_json::{Value, json};

use super::auto_gptq;
use crate::quantization::{changed, expect_layers, try_read};

/// A config as written by GPTQModel, with some layers in 8 bits and some not quantised. The order
/// of the entries in `dynamic` matters.
const GPTQ_MODEL: &str = r#"{ "quantization_config": {
    "bits": 4, "checkpoint_format": "gptq_v2", "desc_act": false, "format": "gptq_v2", "group_size": 128, "lm_head": true,
    "meta": { "act_group_aware": true, "damp_percent": 0.05, "quantizer": ["gptqmodel:4.2.5"], "uri": "https://github.com/modelcloud/gptqmodel" },
    "method": "gptq", "pack_dtype": "int32", "quant_method": "gptq", "sym": true, "true_sequential": true,
    "dynamic": {
        "-:.*\\.layers\\.0\\..*": {},
        ".*\\.layers\\.1\\.mlp\\..*": { "group_size": 32, "sym": false },
        "+:.*\\.layers\\.1\\..*": { "bits": 8, "group_size": 64, "desc_act": true },
        "+:.*\\.layers\\.(?:[01])\\.self_attn\\..*": { "bits": 8 },
        "+:^(?!.*down_proj).*layers\\.2\\.": { "mse": 2.4 },
        "+:model\\.layers\\.2\\.mlp\\.down_proj$": { "group_size": -1 },
        "layers\\.2": { "bits": 2, "checkpoint_format": "gptq", "bits": 4 }
    }
} }"#;

#[test]
fn of_dynamic_the_first_pattern_that_matches_counts() {
    let quantization = Quantization::from_config(GPTQ_MODEL.as_bytes())
        .unwrap()
        .unwrap();
    expect_layers(
        &quantization,
        &[
            ("model.layers.0.self_attn.q_proj", "float"),
            ("model.layers.1.mlp.up_proj", "gptq v2 int4 g32 zero-points"),
            (
                "model.layers.1.self_attn.q_proj",
                "gptq v2 int8 g64 act-order",
            ),
            ("model.layers.2.mlp.up_proj", "gptq v2 int4 g128"),
            ("model.layers.2.mlp.down_proj", "gptq v2 int4 channel"),
            ("model.layers.3.mlp.down_proj", "gptq v2 int4 g128"),
            ("model.layers.10.mlp.down_proj", "gptq v2 int4 g128"),
            // Patterns match from the start of a name. Of two entries with the same key, the later
            // one takes effect.
            ("layers.2.mlp.down_proj", "gptq v1 int4 g128"),
            ("lm_head", "gptq v2 int4 g128"),
        ],
    );
    assert_eq!(
        quantization.to_string(),
        "gptq v2 int4 g128 and gptq v1 int4 g128 and gptq v2 int4 channel and gptq v2 int8 g128 and gptq v2 int8 g64 act-order and \
         gptq v2 int4 g32 zero-points"
    );
}

#[test]
fn patterns_that_are_none_or_take_too_long_are_errors() {
    let with = |pattern: &str| {
        try_read(&changed(
            &auto_gptq(),
            json!({ "dynamic": { pattern: {} } }),
        ))
    };
    for pattern in ["(", "+:(?:a{1000}){1000}", "-:(?<name"] {
        let error = with(pattern).unwrap_err();
        let expected = pattern.trim_start_matches(['+', '-', ':']);
        assert!(
            matches!(&error, ConfigError::Regex { field, pattern: found, .. } if found == expected && field == &format!("dynamic.{pattern}")),
            "{error}"
        );
    }
    let quantization = with("-:((a+)\\2?)+b").unwrap();
    let error = quantization.layer(&"a".repeat(60)).unwrap_err();
    assert!(
        matches!(&error, ConfigError::Match { layer, .. } if layer.len() == 60),
        "{error}"
    );
    expect_layers(
        &quantization,
        &[("ab", "float"), ("b", "gptq v1 int4 g128 act-order")],
    );
}

#[test]
fn as_many_names_as_there_are_and_so_many_patterns() {
    let dynamic = |count: usize, entry: &dyn Fn(usize) -> String| {
        let entries: serde_json::Map<String, Value> =
            (0..count).map(|index| (entry(index), json!({}))).collect();
        try_read(&changed(&auto_gptq(), json!({ "dynamic": entries })))
    };
    let pattern = |index: usize| format!(r"-:^model\.layers\.{index}\.mlp\..*$");
    expect_layers(
        &dynamic(4000, &pattern).unwrap(),
        &[("model.layers.3999.mlp.up_proj", "float")],
    );
    let start = std::time::Instant::now();
    let error = dynamic(100_000, &pattern).unwrap_err();
    assert!(
        matches!(error, ConfigError::TooManyPatterns { limit: 4096 }),
        "{error}"
    );
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

#[test]
fn messages_show_the_beginning_of_a_pattern_and_none_of_its_control_characters() {
    for pattern in ["(".repeat(100_000), "\u{1b}[2J(".into()] {
        let error = try_read(&changed(
            &auto_gptq(),
            json!({ "dynamic": { pattern: {} } }),
        ))
        .unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, ConfigError::Regex { .. })
                && text.len() < 1000
                && !text.contains('\u{1b}'),
            "{text}"
        );
    }
}
