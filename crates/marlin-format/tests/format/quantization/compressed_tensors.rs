use marlin_format::checkpoint::{LayerFormat, Marlin24Names, PackQuantizedFormat};
use marlin_format::{GroupSize, QuantSpec};
use serde_json::{Value, json};

use super::{changed, changed_at, expect_layers, expect_refused, expect_unsupported, read};

const INT4: &str = "pack-quantized int4 g128";
const FORMATS: &str = "`pack-quantized`, `marlin-24`, `float-quantized`, `nvfp4-pack-quantized` or `mxfp4-pack-quantized`";

/// Returns a config as written by llm-compressor.
fn published() -> Value {
    json!({
        "config_groups": {
            "group_0": {
                "format": null,
                "input_activations": null,
                "output_activations": null,
                "targets": ["Linear"],
                "weights": {
                    "actorder": null, "block_structure": null, "dynamic": false, "group_size": 128, "num_bits": 4, "observer": "minmax",
                    "observer_kwargs": {}, "strategy": "group", "symmetric": true, "type": "int"
                }
            }
        },
        "format": "pack-quantized",
        "global_compression_ratio": 1.89,
        "ignore": ["lm_head", "re:.*mlp\\.gate$"],
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.10.2"
    })
}

fn weights(bits: u32, group_size: Value) -> Value {
    let strategy = if group_size.is_null() {
        "channel"
    } else {
        "group"
    };
    json!({ "num_bits": bits, "group_size": group_size, "strategy": strategy, "symmetric": true, "type": "int", "dynamic": false })
}

/// Returns a `mixed-precision` config of three groups with different quantisation.
fn mixed() -> Value {
    json!({
        "config_groups": {
            "group_0": { "targets": ["Linear"], "weights": weights(4, json!(128)), "format": "pack-quantized" },
            "group_1": {
                "targets": ["re:.*self_attn\\.(q|k|v)_proj$", "re:.*down_proj"], "weights": weights(8, Value::Null), "format": "pack-quantized"
            },
            "group_2": { "targets": ["model.layers.0.mlp.down_proj"], "weights": weights(4, json!(128)), "format": "marlin-24" },
            "group_3": { "targets": ["re:.*o_proj"], "weights": null, "format": null }
        },
        "format": "mixed-precision",
        "ignore": ["lm_head", "re:^(?!model\\.layers).*", "model.layers.2.mlp.down_proj"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed"
    })
}

#[test]
fn one_group_for_all_linear_layers() {
    let quantization = read(&published());
    assert_eq!(quantization.to_string(), INT4);
    let spec = QuantSpec::int4(GroupSize::G128);
    assert_eq!(
        quantization.layer("model.layers.0.mlp.up_proj").unwrap(),
        LayerFormat::PackQuantized(PackQuantizedFormat {
            spec,
            act_order: false
        })
    );
    expect_layers(
        &quantization,
        &[
            ("lm_head", "float"),
            ("model.lm_head", INT4),
            ("layers.3.mlp.gate", "float"),
            ("layers.3.mlp.gate_proj", INT4),
            ("", INT4),
        ],
    );
}

#[test]
fn fields_say_the_format() {
    let group = "/config_groups/group_0";
    let cases = [
        ("weights/num_bits", json!(8), "pack-quantized int8 g128"),
        (
            "weights/symmetric",
            json!(false),
            "pack-quantized int4 g128 zero-points",
        ),
        ("weights/symmetric", Value::Null, INT4),
        ("weights/group_size", json!(32), "pack-quantized int4 g32"),
        ("weights/strategy", Value::Null, INT4),
        (
            "weights",
            json!({ "num_bits": 8, "group_size": -1 }),
            "pack-quantized int8 channel",
        ),
        (
            "weights",
            json!({ "num_bits": 4, "strategy": "channel", "symmetric": false }),
            "pack-quantized int4 channel zero-points",
        ),
        (
            "weights/actorder",
            json!("group"),
            "pack-quantized int4 g128 act-order",
        ),
        (
            "weights/actorder",
            json!("dynamic"),
            "pack-quantized int4 g128 act-order",
        ),
        (
            "weights/actorder",
            json!(true),
            "pack-quantized int4 g128 act-order",
        ),
        ("weights/actorder", json!("weight"), INT4),
        ("weights/actorder", json!("static"), INT4),
        ("weights/actorder", json!(false), INT4),
        ("format", json!("marlin-24"), "marlin-24 int4 g128"),
    ];
    for (field, value, expected) in cases {
        let quantization = read(&changed_at(
            &published(),
            &format!("{group}/{field}"),
            value,
        ));
        expect_layers(&quantization, &[("model.layers.0.mlp.up_proj", expected)]);
    }
    let sparse = read(&changed(
        &published(),
        json!({ "format": "marlin-24", "sparsity_config": { "format": "dense", "sparsity_structure": "2:4" } }),
    ));
    assert_eq!(
        sparse.layer("layers.0.up_proj").unwrap(),
        LayerFormat::Marlin24(
            QuantSpec::int4(GroupSize::G128),
            Marlin24Names::CompressedTensors
        )
    );
    let sparse = changed_at(
        &published(),
        "/config_groups/group_0",
        json!({ "targets": ["Linear"], "weights": weights(8, Value::Null), "format": "marlin-24" }),
    );
    expect_layers(
        &read(&sparse),
        &[("layers.0.up_proj", "marlin-24 int8 channel")],
    );
    // Older files do not name the method, and have the status `frozen`.
    assert_eq!(
        read(&changed(
            &published(),
            json!({ "quant_method": null, "quantization_status": "frozen" })
        ))
        .to_string(),
        INT4
    );
    assert_eq!(
        read(&changed(
            &published(),
            json!({ "ignore": null, "quantization_status": null })
        ))
        .layer("lm_head")
        .unwrap()
        .to_string(),
        INT4
    );
}

#[test]
fn of_targets_names_count_before_patterns_before_classes() {
    let quantization = read(&mixed());
    assert_eq!(
        quantization.to_string(),
        "pack-quantized int4 g128 and pack-quantized int8 channel and marlin-24 int4 g128"
    );
    let int8 = "pack-quantized int8 channel";
    expect_layers(
        &quantization,
        &[
            ("model.layers.0.self_attn.q_proj", int8),
            ("model.layers.0.self_attn.q_proj_2", INT4),
            ("model.layers.0.self_attn.o_proj", "float"),
            ("model.layers.0.mlp.up_proj", INT4),
            ("model.layers.0.mlp.down_proj", "marlin-24 int4 g128"),
            ("model.layers.1.mlp.down_proj", int8),
            ("model.layers.2.mlp.down_proj", "float"),
            ("vision.layers.0.self_attn.q_proj", "float"),
            ("lm_head", "float"),
        ],
    );
    // Without a class in `targets`, other layers are not quantised. Of two groups with the same
    // target, the later one takes effect. An ignored class selects every layer.
    let named = changed_at(
        &mixed(),
        "/config_groups/group_0/targets",
        json!(["re:.*down_proj", "LlamaAttention"]),
    );
    expect_layers(
        &read(&named),
        &[
            ("model.layers.0.mlp.up_proj", "float"),
            ("model.layers.1.mlp.down_proj", int8),
        ],
    );
    expect_layers(
        &read(&changed(&mixed(), json!({ "ignore": ["Linear"] }))),
        &[("model.layers.0.mlp.down_proj", "float")],
    );
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    let refused = |pointer: &str, value: Value, expected| {
        let (field, found) = (pointer[1..].replace('/', "."), value.to_string());
        expect_unsupported(
            &changed_at(&published(), pointer, value),
            &field,
            &found,
            expected,
        );
    };
    for format in [
        "int-quantized",
        "mxfp8-quantized",
        "mxfp6-pack-quantized",
        "dense",
    ] {
        refused("/format", json!(format), FORMATS);
        refused("/config_groups/group_0/format", json!(format), FORMATS);
    }
    refused("/format", json!(3), "a string");
    refused("/ignore", json!("lm_head"), "a list of strings");
    refused("/sparsity_config", json!([]), "an object");
    refused("/config_groups", json!([]), "an object");
    refused(
        "/config_groups",
        json!({}),
        "at least one group with targets",
    );
    refused("/config_groups/group_0", json!(["Linear"]), "an object");
    refused(
        "/config_groups/group_0/targets",
        json!("Linear"),
        "a list of strings",
    );
    refused("/config_groups/group_0/weights", json!(4), "an object");
    refused(
        "/config_groups/group_0/weights/num_bits",
        json!(2),
        "4 or 8",
    );
    refused(
        "/config_groups/group_0/weights/type",
        json!("float"),
        "`int`",
    );
    refused(
        "/config_groups/group_0/weights/dynamic",
        json!("local"),
        "false",
    );
    refused(
        "/config_groups/group_0/weights/symmetric",
        json!("yes"),
        "true or false",
    );
    refused(
        "/config_groups/group_0/weights/strategy",
        json!("block"),
        "`group` or `channel`",
    );
    refused(
        "/config_groups/group_0/weights/strategy",
        json!("tensor_group"),
        "`group` or `channel`",
    );
    refused(
        "/config_groups/group_0/weights/strategy",
        json!(1),
        "a string",
    );
    refused(
        "/config_groups/group_0/weights/actorder",
        json!("row"),
        "`group`, `weight` or null",
    );
    refused(
        "/config_groups/group_0/weights/group_size",
        json!("128"),
        "an integer",
    );
    refused(
        "/config_groups/group_0/input_activations",
        json!({ "num_bits": 8 }),
        "null: activations in 16 or 32 bits",
    );
    refused(
        "/config_groups/group_0/output_activations",
        json!({ "num_bits": 8 }),
        "null: activations in 16 or 32 bits",
    );
    for status in ["initialized", "calibration", "decompressed"] {
        refused("/quantization_status", json!(status), "`compressed`");
    }
    let unsupported = |fields: Value, field: &str, found: &str, expected: &str| {
        expect_unsupported(&changed(&published(), fields), field, found, expected)
    };
    unsupported(
        json!({ "sparsity_config": { "format": "sparse-24-bitmask" } }),
        "sparsity_config.format",
        "\"sparse-24-bitmask\"",
        "`dense`",
    );
    unsupported(
        json!({ "transform_config": { "config_groups": { "R1": { "type": "hadamard" } } } }),
        "transform_config.config_groups.R1",
        "{\"type\":\"hadamard\"}",
        "no transforms",
    );

    let sparse = changed(&published(), json!({ "format": "marlin-24" }));
    let refused = |field: &str, value: Value, expected| {
        let (pointer, found) = (
            format!("/config_groups/group_0/weights/{field}"),
            value.to_string(),
        );
        expect_unsupported(
            &changed_at(&sparse, &pointer, value),
            &pointer[1..].replace('/', "."),
            &found,
            expected,
        );
    };
    refused("symmetric", json!(false), "true for Marlin formats");
    refused(
        "actorder",
        json!("group"),
        "rows in their natural order for Marlin formats",
    );
    refused(
        "group_size",
        json!(32),
        "one group a channel or 128 for Marlin formats",
    );

    let missing = |pointer: &str, expected: &str| {
        let field = pointer[1..].replace('/', ".");
        let expected = format!("the quantization config has no `{field}`; expected {expected}");
        expect_refused(&changed_at(&published(), pointer, Value::Null), &expected);
    };
    missing("/format", FORMATS);
    missing("/config_groups", "an object");
    missing("/config_groups/group_0/targets", "a list of strings");
    missing("/config_groups/group_0/weights/num_bits", "4 or 8");
    missing("/config_groups/group_0/weights/group_size", "32, 64 or 128");
    expect_refused(
        &changed(
            &mixed(),
            json!({ "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights(4, json!(128)) } } }),
        ),
        &format!(
            "the quantization config has no `config_groups.group_0.format`; expected {FORMATS}"
        ),
    );
    expect_unsupported(
        &changed_at(
            &published(),
            "/config_groups/group_0/weights",
            json!({ "num_bits": 4, "strategy": "channel", "group_size": 128 }),
        ),
        "config_groups.group_0.weights.group_size",
        "128",
        "null where the strategy is `channel`",
    );
    expect_refused(
        &changed_at(
            &published(),
            "/config_groups/group_0/weights",
            json!({ "num_bits": 4 }),
        ),
        "the quantization config has no `config_groups.group_0.weights.strategy`; expected `group` or `channel`",
    );
    for size in [16, 256] {
        expect_unsupported(
            &changed_at(
                &published(),
                "/config_groups/group_0/weights/group_size",
                json!(size),
            ),
            "config_groups.group_0.weights.group_size",
            &size.to_string(),
            "-1, 32, 64 or 128",
        );
    }
}

#[test]
fn float_weights_may_be_stored_with_a_bitmask() {
    for format in ["dense", "sparse-24-bitmask"] {
        let config = json!({
            "format": "dense",
            "quant_method": "compressed-tensors",
            "sparsity_config": {
                "format": format, "global_sparsity": 0.5, "ignore": ["lm_head"], "registry_requires_subclass": false, "sparsity_structure": "2:4",
                "targets": ["Linear"]
            },
            "version": "0.10.2"
        });
        let quantization = read(&config);
        assert!(quantization.is_float());
        assert_eq!(
            quantization.layer("model.layers.0.mlp.up_proj").unwrap(),
            LayerFormat::Float
        );
    }
    assert!(!read(&published()).is_float());
    let config = json!({ "quant_method": "compressed-tensors", "sparsity_config": { "format": "sparse-bitmask" } });
    expect_unsupported(
        &config,
        "sparsity_config.format",
        "\"sparse-bitmask\"",
        "`dense` or `sparse-24-bitmask`",
    );
}
