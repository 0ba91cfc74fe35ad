use marlin_format::checkpoint::{Fp8Config, Fp8Format, LayerFormat};
use serde_json::{Value, json};

use super::{changed, expect_layers, expect_unsupported, read};

const LAYER: &str = "model.layers.0.mlp.up_proj";
const BLOCKS: &str = "fp8 e4m3 g128 W8A8";

/// Returns a config as in Qwen's checkpoints.
fn published() -> Value {
    json!({
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate", "model.layers.2", "visual"]
    })
}

#[test]
fn fields_say_the_format() {
    let format = |config: &Value| read(config).layer(LAYER).unwrap();
    let of = |config, blocks| {
        LayerFormat::Fp8(Fp8Format {
            config,
            blocks,
            activations: true,
        })
    };
    for fields in [
        json!({}),
        json!({ "fmt": null, "activation_scheme": null }),
        json!({ "activation_scheme": "static", "scale_fmt": "ue8m0" }),
        json!({ "scale_fmt": "float", "expert_dtype": "fp8", "dequantize": false }),
    ] {
        assert_eq!(
            format(&changed(&published(), fields)),
            of(Fp8Config::Fp8, true)
        );
    }
    assert_eq!(
        format(&changed(&published(), json!({ "weight_block_size": null }))),
        of(Fp8Config::Fp8, false)
    );
    // As written by AutoFP8.
    let auto_fp8 = json!({ "quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head", "model.layers.3.mlp.up_proj"] });
    let rows = "fp8 e4m3 channel W8A8";
    expect_layers(
        &read(&auto_fp8),
        &[
            (LAYER, rows),
            ("model.layers.3.mlp.up_proj", "float"),
            ("model.layers.3.mlp.up_proj_2", rows),
        ],
    );
    let fbgemm = json!({
        "quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["model.layers.0.self_attn.q_proj", "lm_head"]
    });
    expect_layers(
        &read(&fbgemm),
        &[
            (LAYER, "fbgemm_fp8 e4m3 channel W8A8"),
            ("model.layers.0.self_attn.q_proj", "float"),
        ],
    );
}

/// An entry is a name, a module, the end of a name, or a pattern; the output head needs none.
#[test]
fn listed_modules_are_not_quantised() {
    expect_layers(
        &read(&published()),
        &[
            (LAYER, BLOCKS),
            ("lm_head", "float"),
            ("model.layers.1.mlp.gate", "float"),
            ("model.layers.1.mlp.gate_proj", BLOCKS),
            ("model.layers.2.self_attn.q_proj", "float"),
            ("model.layers.20.self_attn.q_proj", BLOCKS),
            ("visual.blocks.0.fc", "float"),
        ],
    );
    let lists = json!({ "modules_to_not_convert": ["mlp.up_proj", "model.layers.*.self_attn", r"re.*\.gate$"] });
    expect_layers(
        &read(&changed(&published(), lists)),
        &[
            (LAYER, "float"),
            ("model.layers.0.mlp.down_proj", BLOCKS),
            ("model.layers.7.self_attn.q_proj", "float"),
            ("model.layers.7.self_attn_2.q_proj", BLOCKS),
            ("lm_head", "float"),
        ],
    );
    let none = json!({ "modules_to_not_convert": null });
    expect_layers(
        &read(&changed(&published(), none)),
        &[("model.layers.2.mlp.up_proj", BLOCKS), ("lm_head", "float")],
    );
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    for (field, found, expected) in [
        ("weight_block_size", json!([128, 64]), "[128, 128] or null"),
        ("weight_block_size", json!([1, 32]), "[128, 128] or null"),
        ("weight_block_size", json!(128), "[128, 128] or null"),
        ("fmt", json!("e5m2"), "`e4m3`"),
        ("fmt", json!(3), "`e4m3`"),
        ("scale_fmt", json!("e8"), "`float` or `ue8m0`"),
        ("activation_scheme", json!("token"), "`dynamic` or `static`"),
        (
            "modules_to_not_convert",
            json!("lm_head"),
            "a list of strings",
        ),
        ("modules_to_not_convert", json!([1]), "a list of strings"),
    ] {
        let config = changed(&published(), json!({ field: found }));
        expect_unsupported(&config, field, &found.to_string(), expected);
    }
    let fbgemm = json!({ "quant_method": "fbgemm_fp8", "modules_to_not_convert": {} });
    expect_unsupported(&fbgemm, "modules_to_not_convert", "{}", "a list of strings");
}
