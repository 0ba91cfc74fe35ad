use serde_json::{Value, json};

use super::{changed, expect_layers, expect_refused, expect_unsupported, read};

const INT4: &str = "gptq v1 int4 g128";

/// Returns a config as written by AutoRound.
fn published() -> Value {
    json!({
        "act_bits": 16, "act_data_type": "float", "amp": true, "autoround_version": "0.8.0", "batch_size": 8, "bits": 4,
        "block_name_to_quantize": "model.layers", "data_type": "int", "enable_quanted_input": true, "gradient_accumulate_steps": 1,
        "group_size": 128, "iters": 200, "lr": 0.005, "nsamples": 128, "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round",
        "seqlen": 2048, "sym": true
    })
}

#[test]
fn the_packing_says_the_format() {
    let cases = [
        (json!({}), INT4),
        (json!({ "packing_format": null }), INT4),
        (json!({ "packing_format": "auto_round:gptq" }), INT4),
        (
            json!({ "packing_format": "auto_round:gptqmodel", "sym": false }),
            "gptq v2 int4 g128 zero-points",
        ),
        (
            json!({ "packing_format": "auto_round", "sym": false }),
            "gptq v2 int4 g128 zero-points",
        ),
        (
            json!({ "packing_format": "auto_round:auto_awq", "sym": false }),
            "awq int4 g128 zero-points",
        ),
        (
            json!({ "packing_format": "auto_round:auto_awq" }),
            "awq int4 g128 zero-points",
        ),
        (
            json!({ "bits": 8, "group_size": -1, "sym": null }),
            "gptq v1 int8 channel",
        ),
        (
            json!({ "act_bits": null, "data_type": null, "quant_method": "intel/auto-round" }),
            INT4,
        ),
    ];
    for (fields, expected) in cases {
        let quantization = read(&changed(&published(), fields));
        assert_eq!(quantization.to_string(), expected);
        expect_layers(
            &quantization,
            &[
                ("model.layers.0.mlp.up_proj", expected),
                ("lm_head", "float"),
            ],
        );
    }
}

/// Returns a config of 4-bit floats as written by AutoRound.
fn mx_fp() -> Value {
    let floats = json!({
        "act_bits": 4, "act_data_type": "mx_fp", "act_dynamic": true, "act_group_size": 32, "act_sym": true, "data_type": "mx_fp",
        "group_size": 32, "packing_format": "auto_round:llm_compressor"
    });
    changed(&published(), floats)
}

/// Floats have the tensors of compressed-tensors, and their activations may be quantised.
#[test]
fn the_data_type_says_the_kind_of_floats() {
    let (mx, nv) = (
        "mxfp4-pack-quantized e2m1 g32",
        "nvfp4-pack-quantized e2m1 g16",
    );
    let nv_fp =
        json!({ "data_type": "nv_fp", "act_data_type": "nv_fp4_with_static_gs", "group_size": 16 });
    for (fields, expected) in [
        (json!({}), mx),
        (json!({ "data_type": "mx_fp_rceil", "sym": null }), mx),
        (nv_fp, nv),
    ] {
        let quantization = read(&changed(&mx_fp(), fields));
        expect_layers(
            &quantization,
            &[
                ("model.layers.0.mlp.up_proj", expected),
                ("lm_head", "float"),
            ],
        );
    }
    let extra = json!({ "extra_config": {
        "model.layers.0.mlp.up_proj": { "bits": 16, "act_bits": 16, "data_type": "float" },
        "model.layers.0.mlp.gate_proj": { "data_type": "nv_fp", "group_size": 16 }
    } });
    expect_layers(
        &read(&changed(&mx_fp(), extra)),
        &[
            ("model.layers.0.mlp.up_proj", "float"),
            ("model.layers.0.mlp.gate_proj", nv),
            ("model.layers.0.mlp.down_proj", mx),
        ],
    );
}

#[test]
fn layers_outside_the_blocks_are_not_quantised() {
    let inside = [
        ("model.layers.1.up_proj", INT4),
        ("model.layers.11.up_proj", INT4),
    ];
    for blocks in [
        json!("model.layers"),
        json!(["model.layers"]),
        json!("model.layers, visual.blocks"),
    ] {
        let quantization = read(&changed(
            &published(),
            json!({ "block_name_to_quantize": blocks }),
        ));
        expect_layers(&quantization, &inside);
        expect_layers(
            &quantization,
            &[
                ("model.layers_2.0.up_proj", "float"),
                ("model.projector", "float"),
                ("lm_head", "float"),
            ],
        );
    }
    let listed = json!({ "block_name_to_quantize": null, "to_quant_block_names": [["model.layers.1", "model.layers.2"]] });
    expect_layers(
        &read(&changed(&published(), listed)),
        &[
            ("model.layers.1.up_proj", INT4),
            ("model.layers.11.up_proj", "float"),
        ],
    );
    for nothing in [Value::Null, json!(""), json!([])] {
        let all = read(&changed(
            &published(),
            json!({ "block_name_to_quantize": nothing }),
        ));
        expect_layers(&all, &[("a.0.up_proj", INT4), ("lm_head", "float")]);
    }
}

#[test]
fn extra_config_overrides_names_before_patterns() {
    let extra = json!({ "extra_config": {
        "lm_head": { "bits": 8, "group_size": 32, "sym": true, "data_type": "int", "act_bits": 16, "super_bits": null },
        "model.projector": { "bits": 4 },
        "model.layers.0.mlp.gate": { "bits": 16, "act_bits": 16 },
        "model.layers.0.mlp.up_proj": { "group_size": 64 },
        ".*mlp\\.down_proj.*": { "bits": 8 },
        "layers\\.0\\.mlp.*": { "sym": false }
    } });
    let quantization = read(&changed(&published(), extra));
    expect_layers(
        &quantization,
        &[
            ("lm_head", "gptq v1 int8 g32"),
            ("model.projector", INT4),
            ("model.projector_2", "float"),
            ("model.layers.0.mlp.gate", "float"),
            (
                "model.layers.0.mlp.gate_proj",
                "gptq v1 int4 g128 zero-points",
            ),
            ("model.layers.0.mlp.up_proj", "gptq v1 int4 g64"),
            ("model.layers.0.mlp.down_proj", "gptq v1 int8 g128"),
            ("model.layers.1.mlp.up_proj", INT4),
            ("visual.layers.0.mlp.down_proj", "float"),
        ],
    );
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    let refused = |fields: Value, field: &str, found: &str, expected: &str| {
        expect_unsupported(&changed(&published(), fields), field, found, expected)
    };
    const PACKINGS: &str =
        "`auto_round:auto_gptq`, `auto_round:auto_awq`, `auto_round:gptqmodel` or `auto_round`";
    refused(json!({ "bits": 2 }), "bits", "2", "4 or 8");
    refused(json!({ "bits": "4" }), "bits", "\"4\"", "an integer");
    refused(
        json!({ "bits": 8, "packing_format": "auto_round:auto_awq" }),
        "bits",
        "8",
        "4 for AWQ",
    );
    for kind in ["fp", "mx_int", "nvfp4_v2"] {
        refused(
            json!({ "data_type": kind }),
            "data_type",
            &format!("\"{kind}\""),
            "`int`, `mx_fp` or `nv_fp`",
        );
    }
    for (fields, field, found, expected) in [
        (json!({ "bits": 8 }), "bits", "8", "4 for floats, or 16"),
        (
            json!({ "group_size": 16 }),
            "group_size",
            "16",
            "32 for `mx_fp`",
        ),
        (
            json!({ "data_type": "nv_fp" }),
            "group_size",
            "32",
            "16 for `nv_fp`",
        ),
        (json!({ "sym": false }), "sym", "false", "true for floats"),
        (
            json!({ "packing_format": "auto_round:auto_gptq" }),
            "packing_format",
            "\"auto_round:auto_gptq\"",
            "`auto_round:llm_compressor` for floats",
        ),
    ] {
        expect_unsupported(&changed(&mx_fp(), fields), field, found, expected);
    }
    refused(
        json!({ "act_bits": 8 }),
        "act_bits",
        "8",
        "16 or more: activations in 16 or 32 bits",
    );
    refused(
        json!({ "packing_format": "auto_round:llm_compressor" }),
        "packing_format",
        "\"auto_round:llm_compressor\"",
        PACKINGS,
    );
    refused(
        json!({ "rotation_config": { "R1": true } }),
        "rotation_config",
        "{\"R1\":true}",
        "null: no rotated activations",
    );
    refused(
        json!({ "block_name_to_quantize": 3 }),
        "block_name_to_quantize",
        "3",
        "a list of strings",
    );
    refused(
        json!({ "extra_config": { "lm_head": 16 } }),
        "extra_config.lm_head",
        "16",
        "an object",
    );
    refused(
        json!({ "extra_config": { "lm_head": { "bits": 3 } } }),
        "extra_config.lm_head.bits",
        "3",
        "4 or 8",
    );
    expect_refused(
        &changed(&published(), json!({ "group_size": null })),
        "the quantization config has no `group_size`; expected -1, 32, 64 or 128",
    );
    expect_refused(
        &changed(
            &published(),
            json!({ "packing_format": null, "sym": false }),
        ),
        &format!("the quantization config has no `packing_format`; expected {PACKINGS}"),
    );
    expect_refused(
        &changed(&published(), json!({ "bits": null })),
        "the quantization config has no `bits`; expected 4 or 8",
    );
}
