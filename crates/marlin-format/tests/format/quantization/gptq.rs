use marlin_format::checkpoint::{ConfigError, GptqFormat, GptqVersion, LayerFormat, Quantization};
use marlin_format::{GroupSize, QuantSpec};
use serde_json::{Value, json};

use super::{changed, expect_layers, expect_refused, expect_unsupported, read, try_read};

/// As AutoGPTQ wrote it, in 2023.
fn auto_gptq() -> Value {
    json!({
        "bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": true, "static_groups": false, "sym": true, "true_sequential": true,
        "model_name_or_path": null, "model_file_base_name": "model", "quant_method": "gptq"
    })
}

/// As GPTQModel writes it, with some layers in 8 bits and some as they were. The order of `dynamic` counts.
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

/// As transformers writes it, through Optimum.
fn optimum() -> Value {
    json!({
        "batch_size": 1, "bits": 4, "block_name_to_quantize": "model.layers", "cache_block_outputs": true, "damp_percent": 0.1,
        "dataset": "c4", "desc_act": false, "exllama_config": { "version": 1 }, "group_size": 128, "max_input_length": null,
        "model_seqlen": null, "module_name_preceding_first_block": null,
        "modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["mlp.experts"]],
        "pad_token_id": null, "quant_method": "gptq", "sym": true, "tokenizer": null, "true_sequential": true, "use_cuda_fp16": false
    })
}

#[test]
fn auto_gptq_says_one_way_for_all_layers_but_the_head() {
    let quantization = read(&auto_gptq());
    assert_eq!(quantization.to_string(), "gptq v1 int4 g128 act-order");
    let spec = QuantSpec::int4(GroupSize::G128);
    assert_eq!(
        quantization.layer("model.layers.3.self_attn.q_proj").unwrap(),
        LayerFormat::Gptq(GptqFormat { spec, version: GptqVersion::V1, act_order: true })
    );
    expect_layers(&quantization, &[("lm_head", "float"), ("language_model.lm_head", "float"), ("lm_head2", "gptq v1 int4 g128 act-order")]);
}

#[test]
fn fields_say_the_format() {
    let cases = [
        (json!({ "bits": 8, "group_size": -1, "desc_act": false }), "gptq v1 int8 channel"),
        (json!({ "group_size": 32, "sym": false }), "gptq v1 int4 g32 zero-points act-order"),
        (json!({ "sym": null, "desc_act": null }), "gptq v1 int4 g128"),
        (json!({ "checkpoint_format": "gptq" }), "gptq v1 int4 g128 act-order"),
        (json!({ "checkpoint_format": "gptq_v2", "format": "gptq" }), "gptq v2 int4 g128 act-order"),
        (json!({ "format": "GPTQ_V2", "group_size": 64 }), "gptq v2 int4 g64 act-order"),
        (json!({ "quant_method": "GPTQ" }), "gptq v1 int4 g128 act-order"),
        (json!({ "quant_method": null, "method": "gptq" }), "gptq v1 int4 g128 act-order"),
        (json!({ "checkpoint_format": "marlin", "desc_act": false }), "marlin int4 g128"),
        (json!({ "is_marlin_format": true, "checkpoint_format": "gptq", "desc_act": false }), "marlin int4 g128"),
        (json!({ "is_marlin_format": false }), "gptq v1 int4 g128 act-order"),
        (json!({ "quant_method": "marlin", "bits": null, "sym": null, "desc_act": null }), "marlin int4 g128"),
        // With one group, the order of rows does not matter.
        (json!({ "checkpoint_format": "marlin", "group_size": -1 }), "marlin int4 channel"),
        (json!({ "checkpoint_format": "marlin_24", "desc_act": false }), "gptq marlin_24 int4 g128"),
        (json!({ "checkpoint_format": "marlin_24", "bits": 8, "desc_act": false }), "gptq marlin_24 int8 g128"),
    ];
    for (fields, expected) in cases {
        let quantization = read(&changed(&auto_gptq(), fields.clone()));
        assert_eq!(quantization.to_string(), expected, "{fields}");
        expect_layers(&quantization, &[("model.layers.0.mlp.up_proj", expected), ("lm_head", "float")]);
    }
}

#[test]
fn of_dynamic_the_first_pattern_that_matches_counts() {
    let quantization = Quantization::from_config(GPTQ_MODEL.as_bytes()).unwrap().unwrap();
    expect_layers(
        &quantization,
        &[
            ("model.layers.0.self_attn.q_proj", "float"),
            ("model.layers.1.mlp.up_proj", "gptq v2 int4 g32 zero-points"),
            ("model.layers.1.self_attn.q_proj", "gptq v2 int8 g64 act-order"),
            ("model.layers.2.mlp.up_proj", "gptq v2 int4 g128"),
            ("model.layers.2.mlp.down_proj", "gptq v2 int4 channel"),
            ("model.layers.3.mlp.down_proj", "gptq v2 int4 g128"),
            ("model.layers.10.mlp.down_proj", "gptq v2 int4 g128"),
            // Patterns match from the start; of one key twice in an object, the later counts.
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
fn a_head_is_quantised_where_the_config_says_so() {
    let with = |fields: Value| read(&changed(&auto_gptq(), fields));
    expect_layers(&with(json!({ "lm_head": true })), &[("lm_head", "gptq v1 int4 g128 act-order")]);
    expect_layers(&with(json!({ "lm_head": false, "dynamic": { "+:lm_head": { "bits": 8 } } })), &[("lm_head", "float")]);
    expect_layers(
        &with(json!({ "lm_head": true, "dynamic": { "+:.*lm_head.*": { "bits": 8 } } })),
        &[("lm_head", "gptq v1 int8 g128 act-order"), ("model.layers.0.mlp.up_proj", "gptq v1 int4 g128 act-order")],
    );
    expect_layers(&with(json!({ "lm_head": true, "dynamic": { "-:lm_head": {} } })), &[("lm_head", "float")]);
    // The head lies in no block, so their lists do not concern it.
    let blocks = changed(&optimum(), json!({ "lm_head": true }));
    expect_layers(&read(&blocks), &[("lm_head", "gptq v1 int4 g128")]);
}

#[test]
fn modules_outside_the_listed_ones_are_not_quantised() {
    let quantization = read(&optimum());
    let int4 = "gptq v1 int4 g128";
    expect_layers(
        &quantization,
        &[
            ("model.layers.0.self_attn.q_proj", int4),
            ("model.layers.11.self_attn.k_proj", int4),
            ("model.layers.0.mlp.experts.3.up_proj", int4),
            ("model.layers.0.self_attn.o_proj", "float"),
            ("model.layers.0.cross_self_attn.q_proj", "float"),
            ("model.layers.0.self_attn.q_proj_2", "float"),
            ("vision.layers.0.self_attn.q_proj", "float"),
            ("model.layers_2.0.self_attn.q_proj", "float"),
            ("lm_head", "float"),
        ],
    );
    let flat = changed(&optimum(), json!({ "modules_in_block_to_quantize": ["self_attn.o_proj"], "block_name_to_quantize": null }));
    expect_layers(&read(&flat), &[("a.0.self_attn.o_proj", int4), ("a.0.self_attn.q_proj", "float"), ("self_attn.o_proj", int4)]);
    let empty = changed(&optimum(), json!({ "modules_in_block_to_quantize": [] }));
    expect_layers(&read(&empty), &[("model.layers.0.self_attn.o_proj", int4)]);
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    let refused = |fields: Value, field: &str, found: &str, expected: &str| {
        expect_unsupported(&changed(&auto_gptq(), fields), field, found, expected)
    };
    const FORMATS: &str = "`gptq`, `gptq_v2`, `marlin` or `marlin_24`";
    refused(json!({ "bits": 3 }), "bits", "3", "4 or 8");
    refused(json!({ "bits": "4" }), "bits", "\"4\"", "4 or 8");
    refused(json!({ "bits": 4.0 }), "bits", "4.0", "4 or 8");
    refused(json!({ "group_size": "128" }), "group_size", "\"128\"", "-1, 32, 64 or 128");
    refused(json!({ "sym": 1 }), "sym", "1", "true or false");
    refused(json!({ "desc_act": "yes" }), "desc_act", "\"yes\"", "true or false");
    refused(json!({ "lm_head": [] }), "lm_head", "[]", "true or false");
    refused(json!({ "checkpoint_format": "bitblas" }), "checkpoint_format", "\"bitblas\"", FORMATS);
    refused(json!({ "format": "gptq_p" }), "format", "\"gptq_p\"", FORMATS);
    refused(json!({ "format": 2 }), "format", "2", FORMATS);
    refused(json!({ "pack_dtype": "int16" }), "pack_dtype", "\"int16\"", "`int32`");
    refused(json!({ "rotation": "hadamard" }), "rotation", "\"hadamard\"", "null: no rotated activations");
    refused(json!({ "activation": { "dtype": "fp8" } }), "activation", "{\"dtype\":\"fp8\"}", "null: activations in 16 or 32 bits");
    refused(json!({ "dynamic": ["-:.*"] }), "dynamic", "[\"-:.*\"]", "an object");
    refused(json!({ "dynamic": { "+:.*up": true } }), "dynamic.+:.*up", "true", "an object");
    refused(json!({ "dynamic": { ".*up": { "bits": 2 } } }), "dynamic..*up.bits", "2", "4 or 8");
    refused(json!({ "block_name_to_quantize": { "a": 1 } }), "block_name_to_quantize", "{\"a\":1}", "a list of strings");
    refused(json!({ "modules_in_block_to_quantize": "a" }), "modules_in_block_to_quantize", "\"a\"", "a list of strings");
    refused(json!({ "modules_in_block_to_quantize": [["a"], 1] }), "modules_in_block_to_quantize", "[[\"a\"],1]", "a list of strings");
    refused(
        json!({ "quant_method": "bitsandbytes" }),
        "quant_method",
        "\"bitsandbytes\"",
        "`gptq`, `awq`, `compressed-tensors` or `auto-round`",
    );
    refused(json!({ "quant_method": 1 }), "quant_method", "1", "`gptq`, `awq`, `compressed-tensors` or `auto-round`");

    let marlin = changed(&auto_gptq(), json!({ "checkpoint_format": "marlin", "desc_act": false }));
    let refused =
        |fields: Value, field: &str, found: &str, expected: &str| expect_unsupported(&changed(&marlin, fields), field, found, expected);
    refused(json!({ "bits": 8 }), "bits", "8", "4 for Marlin");
    refused(json!({ "group_size": 64 }), "group_size", "64", "one group a channel or 128 for Marlin formats");
    refused(json!({ "sym": false }), "sym", "false", "true for Marlin formats");
    refused(json!({ "desc_act": true }), "desc_act", "true", "rows in their natural order for Marlin formats");

    for size in [0, 16, 256, -2] {
        expect_refused(
            &changed(&auto_gptq(), json!({ "group_size": size })),
            &format!(
                "the quantization config's `group_size`: group size {size} is not supported; use -1 (one group per output channel), 32, 64 or 128"
            ),
        );
    }
    for (field, expected) in [("bits", "4 or 8"), ("group_size", "-1, 32, 64 or 128")] {
        expect_refused(
            &changed(&auto_gptq(), json!({ field: null })),
            &format!("the quantization config has no `{field}`; expected {expected}"),
        );
    }
    // As MLX writes it.
    expect_refused(
        &json!({ "group_size": 64, "bits": 4 }),
        "the quantization config has no `quant_method`; expected `gptq`, `awq`, `compressed-tensors` or `auto-round`",
    );
}

#[test]
fn patterns_that_are_none_or_take_too_long_are_errors() {
    let with = |pattern: &str| try_read(&changed(&auto_gptq(), json!({ "dynamic": { pattern: {} } })));
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
    assert!(matches!(&error, ConfigError::Match { layer, .. } if layer.len() == 60), "{error}");
    expect_layers(&quantization, &[("ab", "float"), ("b", "gptq v1 int4 g128 act-order")]);
}

#[test]
fn as_many_names_as_there_are_and_so_many_patterns() {
    let dynamic = |count: usize, entry: &dyn Fn(usize) -> String| {
        let entries: serde_json::Map<String, Value> = (0..count).map(|index| (entry(index), json!({}))).collect();
        try_read(&changed(&auto_gptq(), json!({ "dynamic": entries })))
    };
    let pattern = |index: usize| format!(r"-:^model\.layers\.{index}\.mlp\..*$");
    expect_layers(&dynamic(4000, &pattern).unwrap(), &[("model.layers.3999.mlp.up_proj", "float")]);
    let start = std::time::Instant::now();
    let error = dynamic(100_000, &pattern).unwrap_err();
    assert!(matches!(error, ConfigError::TooManyPatterns { limit: 4096 }), "{error}");
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

#[test]
fn messages_show_the_beginning_of_a_pattern_and_none_of_its_control_characters() {
    for pattern in ["(".repeat(100_000), "\u{1b}[2J(".into()] {
        let error = try_read(&changed(&auto_gptq(), json!({ "dynamic": { pattern: {} } }))).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, ConfigError::Regex { .. }) && text.len() < 1000 && !text.contains('\u{1b}'), "{text}");
    }
}
