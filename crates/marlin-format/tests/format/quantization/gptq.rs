mod dynamic;

use marlin_format::checkpoint::{GptqFormat, GptqVersion, LayerFormat};
use marlin_format::{GroupSize, QuantSpec};
use serde_json::{Value, json};

use super::{changed, expect_layers, expect_refused, expect_unsupported, read};

/// Returns a config as written by AutoGPTQ in 2023.
fn auto_gptq() -> Value {
    json!({
        "bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": true, "static_groups": false, "sym": true, "true_sequential": true,
        "model_name_or_path": null, "model_file_base_name": "model", "quant_method": "gptq"
    })
}

/// Returns a config as written by transformers through Optimum.
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
        quantization
            .layer("model.layers.3.self_attn.q_proj")
            .unwrap(),
        LayerFormat::Gptq(GptqFormat {
            spec,
            version: GptqVersion::V1,
            act_order: true
        })
    );
    expect_layers(
        &quantization,
        &[
            ("lm_head", "float"),
            ("language_model.lm_head", "float"),
            ("lm_head2", "gptq v1 int4 g128 act-order"),
        ],
    );
}

#[test]
fn fields_say_the_format() {
    let cases = [
        (
            json!({ "bits": 8, "group_size": -1, "desc_act": false }),
            "gptq v1 int8 channel",
        ),
        (
            json!({ "group_size": 32, "sym": false }),
            "gptq v1 int4 g32 zero-points act-order",
        ),
        (
            json!({ "sym": null, "desc_act": null }),
            "gptq v1 int4 g128",
        ),
        (
            json!({ "checkpoint_format": "gptq" }),
            "gptq v1 int4 g128 act-order",
        ),
        (
            json!({ "checkpoint_format": "gptq_v2", "format": "gptq" }),
            "gptq v2 int4 g128 act-order",
        ),
        (
            json!({ "format": "GPTQ_V2", "group_size": 64 }),
            "gptq v2 int4 g64 act-order",
        ),
        (
            json!({ "quant_method": "GPTQ" }),
            "gptq v1 int4 g128 act-order",
        ),
        (
            json!({ "quant_method": null, "method": "gptq" }),
            "gptq v1 int4 g128 act-order",
        ),
        (
            json!({ "checkpoint_format": "marlin", "desc_act": false }),
            "marlin int4 g128",
        ),
        (
            json!({ "is_marlin_format": true, "checkpoint_format": "gptq", "desc_act": false }),
            "marlin int4 g128",
        ),
        (
            json!({ "is_marlin_format": false }),
            "gptq v1 int4 g128 act-order",
        ),
        (
            json!({ "quant_method": "marlin", "bits": null, "sym": null, "desc_act": null }),
            "marlin int4 g128",
        ),
        // With a single group, the order of rows does not matter.
        (
            json!({ "checkpoint_format": "marlin", "group_size": -1 }),
            "marlin int4 channel",
        ),
        (
            json!({ "checkpoint_format": "marlin_24", "desc_act": false }),
            "gptq marlin_24 int4 g128",
        ),
        (
            json!({ "checkpoint_format": "marlin_24", "bits": 8, "desc_act": false }),
            "gptq marlin_24 int8 g128",
        ),
    ];
    for (fields, expected) in cases {
        let quantization = read(&changed(&auto_gptq(), fields.clone()));
        assert_eq!(quantization.to_string(), expected, "{fields}");
        expect_layers(
            &quantization,
            &[
                ("model.layers.0.mlp.up_proj", expected),
                ("lm_head", "float"),
            ],
        );
    }
}

#[test]
fn a_head_is_quantised_where_the_config_says_so() {
    let with = |fields: Value| read(&changed(&auto_gptq(), fields));
    expect_layers(
        &with(json!({ "lm_head": true })),
        &[("lm_head", "gptq v1 int4 g128 act-order")],
    );
    expect_layers(
        &with(json!({ "lm_head": false, "dynamic": { "+:lm_head": { "bits": 8 } } })),
        &[("lm_head", "float")],
    );
    expect_layers(
        &with(json!({ "lm_head": true, "dynamic": { "+:.*lm_head.*": { "bits": 8 } } })),
        &[
            ("lm_head", "gptq v1 int8 g128 act-order"),
            ("model.layers.0.mlp.up_proj", "gptq v1 int4 g128 act-order"),
        ],
    );
    expect_layers(
        &with(json!({ "lm_head": true, "dynamic": { "-:lm_head": {} } })),
        &[("lm_head", "float")],
    );
    // The output head is in no block, so the lists of blocks do not affect it.
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
    let flat = changed(
        &optimum(),
        json!({ "modules_in_block_to_quantize": ["self_attn.o_proj"], "block_name_to_quantize": null }),
    );
    expect_layers(
        &read(&flat),
        &[
            ("a.0.self_attn.o_proj", int4),
            ("a.0.self_attn.q_proj", "float"),
            ("self_attn.o_proj", int4),
        ],
    );
    let empty = changed(&optimum(), json!({ "modules_in_block_to_quantize": [] }));
    expect_layers(&read(&empty), &[("model.layers.0.self_attn.o_proj", int4)]);
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    const METHODS: &str = "`gptq`, `awq`, `compressed-tensors`, `auto-round`, `fp8`, `fbgemm_fp8`, `modelopt` or `mxfp4`";
    let refused = |fields: Value, field: &str, found: &str, expected: &str| {
        expect_unsupported(&changed(&auto_gptq(), fields), field, found, expected)
    };
    const FORMATS: &str = "`gptq`, `gptq_v2`, `marlin` or `marlin_24`";
    refused(json!({ "bits": 3 }), "bits", "3", "4 or 8");
    refused(json!({ "bits": "4" }), "bits", "\"4\"", "4 or 8");
    refused(json!({ "bits": 4.0 }), "bits", "4.0", "4 or 8");
    refused(
        json!({ "group_size": "128" }),
        "group_size",
        "\"128\"",
        "-1, 32, 64 or 128",
    );
    refused(json!({ "sym": 1 }), "sym", "1", "true or false");
    refused(
        json!({ "desc_act": "yes" }),
        "desc_act",
        "\"yes\"",
        "true or false",
    );
    refused(json!({ "lm_head": [] }), "lm_head", "[]", "true or false");
    refused(
        json!({ "checkpoint_format": "bitblas" }),
        "checkpoint_format",
        "\"bitblas\"",
        FORMATS,
    );
    refused(
        json!({ "format": "gptq_p" }),
        "format",
        "\"gptq_p\"",
        FORMATS,
    );
    refused(json!({ "format": 2 }), "format", "2", FORMATS);
    refused(
        json!({ "pack_dtype": "int16" }),
        "pack_dtype",
        "\"int16\"",
        "`int32`",
    );
    refused(
        json!({ "rotation": "hadamard" }),
        "rotation",
        "\"hadamard\"",
        "null: no rotated activations",
    );
    refused(
        json!({ "activation": { "dtype": "fp8" } }),
        "activation",
        "{\"dtype\":\"fp8\"}",
        "null: activations in 16 or 32 bits",
    );
    refused(
        json!({ "dynamic": ["-:.*"] }),
        "dynamic",
        "[\"-:.*\"]",
        "an object",
    );
    refused(
        json!({ "dynamic": { "+:.*up": true } }),
        "dynamic.+:.*up",
        "true",
        "an object",
    );
    refused(
        json!({ "dynamic": { ".*up": { "bits": 2 } } }),
        "dynamic..*up.bits",
        "2",
        "4 or 8",
    );
    refused(
        json!({ "block_name_to_quantize": { "a": 1 } }),
        "block_name_to_quantize",
        "{\"a\":1}",
        "a list of strings",
    );
    refused(
        json!({ "modules_in_block_to_quantize": "a" }),
        "modules_in_block_to_quantize",
        "\"a\"",
        "a list of strings",
    );
    refused(
        json!({ "modules_in_block_to_quantize": [["a"], 1] }),
        "modules_in_block_to_quantize",
        "[[\"a\"],1]",
        "a list of strings",
    );
    refused(
        json!({ "quant_method": "bitsandbytes" }),
        "quant_method",
        "\"bitsandbytes\"",
        METHODS,
    );
    refused(json!({ "quant_method": 1 }), "quant_method", "1", METHODS);

    let marlin = changed(
        &auto_gptq(),
        json!({ "checkpoint_format": "marlin", "desc_act": false }),
    );
    let refused = |fields: Value, field: &str, found: &str, expected: &str| {
        expect_unsupported(&changed(&marlin, fields), field, found, expected)
    };
    refused(json!({ "bits": 8 }), "bits", "8", "4 for Marlin");
    refused(
        json!({ "group_size": 64 }),
        "group_size",
        "64",
        "one group a channel or 128 for Marlin formats",
    );
    refused(
        json!({ "sym": false }),
        "sym",
        "false",
        "true for Marlin formats",
    );
    refused(
        json!({ "desc_act": true }),
        "desc_act",
        "true",
        "rows in their natural order for Marlin formats",
    );

    for size in [0, 16, 256, -2] {
        expect_unsupported(
            &changed(&auto_gptq(), json!({ "group_size": size })),
            "group_size",
            &size.to_string(),
            "-1, 32, 64 or 128",
        );
    }
    for (field, expected) in [("bits", "4 or 8"), ("group_size", "-1, 32, 64 or 128")] {
        expect_refused(
            &changed(&auto_gptq(), json!({ field: null })),
            &format!("the quantization config has no `{field}`; expected {expected}"),
        );
    }
    // A config as written by MLX.
    expect_refused(
        &json!({ "group_size": 64, "bits": 4 }),
        &format!("the quantization config has no `quant_method`; expected {METHODS}"),
    );
}
