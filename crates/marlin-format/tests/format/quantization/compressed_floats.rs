use marlin_format::checkpoint::{Fp4Format, Fp8Config, Fp8Format, LayerFormat};
use marlin_testing::with_fields;
use serde_json::{Value, json};

use super::{changed_at, expect_layers, expect_refused, expect_unsupported, read};

const LAYER: &str = "model.layers.0.mlp.up_proj";

/// Returns a config as written by llm-compressor for the scheme `FP8_DYNAMIC`.
fn fp8() -> Value {
    json!({
        "config_groups": {
            "group_0": {
                "format": "float-quantized",
                "input_activations": {
                    "actorder": null, "block_structure": null, "dynamic": true, "group_size": null, "num_bits": 8, "observer": null,
                    "observer_kwargs": {}, "strategy": "token", "symmetric": true, "type": "float"
                },
                "output_activations": null,
                "targets": ["Linear"],
                "weights": {
                    "actorder": null, "block_structure": null, "dynamic": false, "group_size": null, "num_bits": 8, "observer": "minmax",
                    "observer_kwargs": {}, "strategy": "channel", "symmetric": true, "type": "float"
                }
            }
        },
        "format": "float-quantized", "ignore": ["lm_head"], "kv_cache_scheme": null, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "version": "0.12.2"
    })
}

/// Returns the `weights` of FP4.
fn fp4(size: u32, strategy: &str) -> Value {
    json!({
        "num_bits": 4, "type": "float", "symmetric": true, "group_size": size, "strategy": strategy, "dynamic": false,
        "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": null
    })
}

/// Returns [`fp8`] with other `weights` in another format.
fn with(format: &str, weights: Value) -> Value {
    let config = changed_at(&fp8(), "/config_groups/group_0/weights", weights);
    changed_at(&config, "/config_groups/group_0/format", json!(format))
}

#[test]
fn fields_say_the_format() {
    let format = |config: &Value| read(config).layer(LAYER).unwrap();
    let of = |blocks| {
        LayerFormat::Fp8(Fp8Format {
            config: Fp8Config::CompressedTensors,
            blocks,
            activations: true,
        })
    };
    assert_eq!(format(&fp8()), of(false));
    expect_layers(
        &read(&fp8()),
        &[
            (LAYER, "float-quantized e4m3 channel W8A8"),
            ("lm_head", "float"),
        ],
    );
    for (weights, blocks) in [
        (json!({ "strategy": "tensor" }), false),
        (json!({ "strategy": "channel", "group_size": -1 }), false),
        (json!({}), false),
        (
            json!({ "strategy": "block", "block_structure": [128, 128] }),
            true,
        ),
        (
            json!({ "strategy": "block", "block_structure": "128x128" }),
            true,
        ),
        (
            json!({ "symmetric": null, "dynamic": null, "actorder": "static" }),
            false,
        ),
    ] {
        let fields = json!({ "num_bits": 8, "type": "float", "symmetric": true, "dynamic": false });
        let fields = with_fields(fields, &weights);
        for name in ["float-quantized", "naive-quantized"] {
            assert_eq!(format(&with(name, fields.clone())), of(blocks), "{fields}");
        }
    }
    let nv = LayerFormat::Fp4(Fp4Format::NvFp4Packed);
    let mx = LayerFormat::Fp4(Fp4Format::MxFp4Packed);
    assert_eq!(
        format(&with("nvfp4-pack-quantized", fp4(16, "tensor_group"))),
        nv
    );
    assert_eq!(format(&with("mxfp4-pack-quantized", fp4(32, "group"))), mx);
    assert_eq!(nv.to_string(), "nvfp4-pack-quantized e2m1 g16");
    assert_eq!(mx.to_string(), "mxfp4-pack-quantized e2m1 g32");
}

/// Activations of 8-bit floats are declared, be they dynamic or static.
#[test]
fn activations_of_floats_are_accepted() {
    const W8A16: &str = "float-quantized e4m3 channel";
    const W8A8: &str = "float-quantized e4m3 channel W8A8";
    for (activations, expected) in [
        (Value::Null, W8A16),
        (
            json!({ "num_bits": 8, "type": "float", "dynamic": false, "strategy": "tensor" }),
            W8A8,
        ),
        (
            json!({ "num_bits": 4, "type": "float", "dynamic": "local", "strategy": "tensor_group", "group_size": 16 }),
            W8A16,
        ),
        (
            json!({ "num_bits": 8, "type": "float", "dynamic": true, "strategy": "group", "group_size": 128 }),
            W8A8,
        ),
    ] {
        let pointer = "/config_groups/group_0/input_activations";
        let config = changed_at(&fp8(), pointer, activations);
        expect_layers(&read(&config), &[(LAYER, expected)]);
    }
}

/// Each group of `mixed-precision` has a format of its own. Of two groups with the same target, the
/// later one takes effect; a name takes precedence over a pattern, and a pattern over a class.
#[test]
fn groups_may_have_formats_of_their_own() {
    let group = |targets: Value, format: &str, weights: Value| json!({ "targets": targets, "format": format, "weights": weights });
    let of_fp8 = json!({ "num_bits": 8, "type": "float", "strategy": "channel" });
    let config = json!({
        "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"],
        "config_groups": {
            "a": group(json!(["Linear"]), "nvfp4-pack-quantized", fp4(16, "tensor_group")),
            "b": group(json!(["re:.*self_attn.*"]), "float-quantized", of_fp8.clone()),
            "c": group(
                json!(["re:.*mlp.*", "model.layers.0.self_attn.o_proj"]), "pack-quantized",
                json!({ "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32 })
            ),
            "d": group(json!(["re:.*mlp.*"]), "mxfp4-pack-quantized", fp4(32, "group")),
        }
    });
    let quantization = read(&config);
    expect_layers(
        &quantization,
        &[
            (
                "model.layers.0.self_attn.q_proj",
                "float-quantized e4m3 channel",
            ),
            ("model.layers.0.self_attn.o_proj", "pack-quantized int4 g32"),
            (LAYER, "mxfp4-pack-quantized e2m1 g32"),
            ("model.layers.0.other", "nvfp4-pack-quantized e2m1 g16"),
            ("lm_head", "float"),
        ],
    );
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    const WEIGHTS: &str = "config_groups.group_0.weights";
    let refused = |config: &Value, field: &str, found: Value, expected: &str| {
        let pointer = format!("/config_groups/group_0/weights/{field}");
        let config = changed_at(config, &pointer, found.clone());
        let field = format!("{WEIGHTS}.{field}");
        expect_unsupported(&config, &field, &found.to_string(), expected);
    };
    let nv = with("nvfp4-pack-quantized", fp4(16, "tensor_group"));
    let mx = with("mxfp4-pack-quantized", fp4(32, "group"));
    for (config, bits, sizes) in [
        (
            &fp8(),
            "8 for `float-quantized`",
            "null for `float-quantized`",
        ),
        (
            &nv,
            "4 for `nvfp4-pack-quantized`",
            "16 for `nvfp4-pack-quantized`",
        ),
        (
            &mx,
            "4 for `mxfp4-pack-quantized`",
            "32 for `mxfp4-pack-quantized`",
        ),
    ] {
        refused(config, "num_bits", json!(6), bits);
        refused(config, "group_size", json!(64), sizes);
        refused(config, "symmetric", json!(false), "true for floats");
        refused(config, "dynamic", json!(true), "false");
        refused(
            config,
            "actorder",
            json!("group"),
            "`weight` or null for floats",
        );
    }
    refused(
        &nv,
        "group_size",
        json!(32),
        "16 for `nvfp4-pack-quantized`",
    );
    refused(
        &mx,
        "group_size",
        json!(16),
        "32 for `mxfp4-pack-quantized`",
    );
    refused(
        &nv,
        "strategy",
        json!("group"),
        "`tensor_group` for `nvfp4-pack-quantized`",
    );
    refused(
        &mx,
        "strategy",
        json!("tensor_group"),
        "`group` for `mxfp4-pack-quantized`",
    );
    refused(
        &fp8(),
        "strategy",
        json!("group"),
        "`tensor`, `channel` or `block` for `float-quantized`",
    );
    let blocks = changed_at(
        &fp8(),
        "/config_groups/group_0/weights/strategy",
        json!("block"),
    );
    refused(&blocks, "block_structure", json!([128, 64]), "[128, 128]");
    refused(&blocks, "block_structure", json!([1, 32]), "[128, 128]");
    expect_refused(
        &blocks,
        &format!("the quantization config has no `{WEIGHTS}.block_structure`; expected [128, 128]"),
    );
    for (field, expected) in [
        ("type", "`float`"),
        ("num_bits", "4 for `nvfp4-pack-quantized`"),
        ("strategy", "`tensor_group` for `nvfp4-pack-quantized`"),
        ("group_size", "16 for `nvfp4-pack-quantized`"),
    ] {
        let pointer = format!("/config_groups/group_0/weights/{field}");
        let config = changed_at(&nv, &pointer, Value::Null);
        // Without `type`, weights count as integers, whose activations are refused first.
        let config = changed_at(
            &config,
            "/config_groups/group_0/input_activations",
            Value::Null,
        );
        let expected =
            format!("the quantization config has no `{WEIGHTS}.{field}`; expected {expected}");
        expect_refused(&config, &expected);
    }

    // Integers in a format of floats, and beside quantised activations.
    let int8 = json!({ "num_bits": 8, "type": "int", "strategy": "channel", "symmetric": true });
    let group = |format: &str, weights: &Value, activations: Value| {
        let config = with(format, weights.clone());
        changed_at(
            &config,
            "/config_groups/group_0/input_activations",
            activations,
        )
    };
    for format in ["naive-quantized", "float-quantized"] {
        expect_unsupported(
            &group(format, &int8, Value::Null),
            &format!("{WEIGHTS}.type"),
            "\"int\"",
            "`float`",
        );
    }
    let activations = json!({ "num_bits": 8, "type": "float" });
    let field = "config_groups.group_0.input_activations";
    for format in ["int-quantized", "pack-quantized"] {
        expect_unsupported(
            &group(format, &int8, activations.clone()),
            field,
            &activations.to_string(),
            "null: activations in 16 or 32 bits",
        );
    }
    let activations = json!({ "num_bits": 8, "type": "int" });
    let weights = fp8()["config_groups"]["group_0"]["weights"].clone();
    expect_unsupported(
        &group("float-quantized", &weights, activations.clone()),
        field,
        &activations.to_string(),
        "floats or null beside weights of floats",
    );
    let output = json!({ "num_bits": 8, "type": "float" });
    expect_unsupported(
        &changed_at(
            &fp8(),
            "/config_groups/group_0/output_activations",
            output.clone(),
        ),
        "config_groups.group_0.output_activations",
        &output.to_string(),
        "null: activations in 16 or 32 bits",
    );
}
