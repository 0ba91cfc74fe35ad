use marlin_format::checkpoint::LayerFormat;
use marlin_format::{GroupSize, QuantSpec};
use serde_json::{Value, json};

use super::{changed, expect_layers, expect_refused, expect_unsupported, read};

const INT4: &str = "awq int4 g128 zero-points";

/// Returns a config as written by AutoAWQ.
fn auto_awq() -> Value {
    json!({ "bits": 4, "group_size": 128, "modules_to_not_convert": null, "quant_method": "awq", "version": "gemm", "zero_point": true })
}

/// Returns a config as written by transformers, with the fields of its kernels.
fn transformers() -> Value {
    json!({
        "backend": "autoawq", "bits": 4, "do_fuse": false, "exllama_config": null, "fuse_max_seq_len": null, "group_size": 128,
        "modules_to_fuse": null, "modules_to_not_convert": ["visual", "mlp.gate.", "re.*_skipped", "layers.(0|1)"], "quant_method": "awq",
        "version": "GEMM", "zero_point": true
    })
}

#[test]
fn fields_say_the_format() {
    let quantization = read(&auto_awq());
    assert_eq!(quantization.to_string(), INT4);
    let spec = QuantSpec::int4(GroupSize::G128).with_zero_points();
    assert_eq!(
        quantization.layer("model.layers.0.mlp.up_proj").unwrap(),
        LayerFormat::Awq(spec)
    );
    let cases = [
        (json!({ "zero_point": false }), "awq int4 g128"),
        (json!({ "zero_point": null }), INT4),
        (json!({ "zero_point": null, "sym": true }), "awq int4 g128"),
        (json!({ "version": null }), INT4),
        (
            json!({ "version": null, "format": "gemm", "checkpoint_format": "gemm" }),
            INT4,
        ),
        (
            json!({ "group_size": null, "q_group_size": 64 }),
            "awq int4 g64 zero-points",
        ),
        (
            json!({ "bits": null, "w_bit": 4, "group_size": -1 }),
            "awq int4 channel zero-points",
        ),
    ];
    for (fields, expected) in cases {
        let quantization = read(&changed(&auto_awq(), fields.clone()));
        expect_layers(
            &quantization,
            &[
                ("model.layers.0.mlp.up_proj", expected),
                ("lm_head", "float"),
            ],
        );
    }
    expect_layers(
        &read(&changed(&auto_awq(), json!({ "lm_head": true }))),
        &[("lm_head", INT4)],
    );
}

#[test]
fn modules_to_not_convert_are_parts_of_names_or_patterns() {
    expect_layers(
        &read(&transformers()),
        &[
            ("visual.blocks.0.attn.qkv", "float"),
            ("model.visual_2.q_proj", "float"),
            ("model.layers.3.mlp.gate.w", "float"),
            ("model.layers.3.mlp.gate_proj", INT4),
            // Patterns match from the start of a name to the end of a module's name.
            ("re_a_skipped.q_proj", "float"),
            ("re_a_skipped", "float"),
            ("re_a_skipped_not.q_proj", INT4),
            ("model.re_skipped", INT4),
            ("layers.1.mlp.up_proj", "float"),
            ("layers.11.mlp.up_proj", INT4),
            ("model.layers.11.mlp.up_proj", INT4),
        ],
    );
    // GPTQModel writes AWQ with its own overrides.
    let dynamic = changed(
        &auto_awq(),
        json!({ "dynamic": { "-:.*down": {}, "+:.*up": { "group_size": 32 } } }),
    );
    expect_layers(
        &read(&dynamic),
        &[
            ("layers.0.down_proj", "float"),
            ("layers.0.up_proj", "awq int4 g32 zero-points"),
            ("layers.0.o_proj", INT4),
        ],
    );
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    let refused = |fields: Value, field: &str, found: &str, expected: &str| {
        expect_unsupported(&changed(&auto_awq(), fields), field, found, expected)
    };
    for version in ["gemv", "GEMV_FAST", "marlin", "exllama"] {
        refused(
            json!({ "version": version }),
            "version",
            &format!("\"{version}\""),
            "`gemm`",
        );
    }
    refused(
        json!({ "version": null, "format": "gemv" }),
        "format",
        "\"gemv\"",
        "`gemm`",
    );
    refused(
        json!({ "backend": "llm-awq" }),
        "backend",
        "\"llm-awq\"",
        "the packing of AutoAWQ",
    );
    refused(json!({ "bits": 8 }), "bits", "8", "4 for AWQ");
    refused(json!({ "bits": null, "w_bit": 3 }), "w_bit", "3", "4 or 8");
    refused(
        json!({ "bits": null, "w_bit": 8 }),
        "w_bit",
        "8",
        "4 for AWQ",
    );
    refused(
        json!({ "zero_point": "true" }),
        "zero_point",
        "\"true\"",
        "true or false",
    );
    refused(
        json!({ "modules_to_not_convert": "visual" }),
        "modules_to_not_convert",
        "\"visual\"",
        "a list of strings",
    );
    expect_refused(
        &changed(&auto_awq(), json!({ "modules_to_not_convert": ["a(*"] })),
        "the quantization config's `modules_to_not_convert` has `(?:a(*)(?:(?<=\\.)|(?=\\.|$))`, which is not a regular expression this \
         version can use; correct it: Parsing error at position 5: Target of repeat operator is invalid",
    );
    expect_refused(
        &changed(&auto_awq(), json!({ "group_size": null })),
        "the quantization config has no `group_size`; expected -1, 32, 64 or 128",
    );
}
