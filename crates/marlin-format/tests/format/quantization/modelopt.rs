use marlin_format::checkpoint::{Fp4Format, Fp8Config, Fp8Format, LayerFormat, Quantization};
use serde_json::{Value, json};

use super::{changed, changed_at, expect_layers, expect_refused, expect_unsupported, read};

const LAYER: &str = "model.layers.0.mlp.up_proj";
const FP8: &str = "modelopt fp8 e4m3 channel W8A8";
const NVFP4: &str = "modelopt nvfp4 e2m1 g16";
const ALGORITHMS: &str = "`FP8`, `FP8_PER_CHANNEL_PER_TOKEN`, `NVFP4`, `W4A16_NVFP4` or, for the whole config, `MIXED_PRECISION`";

/// Returns a `hf_quant_config.json` as written by ModelOpt.
fn own_file() -> Value {
    json!({
        "producer": { "name": "modelopt", "version": "0.23.0" },
        "quantization": {
            "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
            "exclude_modules": ["lm_head", "model.layers.1*", "*.k_proj", "model.layers.2.mlp", "model.layers.3.mlp.?ate_proj"]
        }
    })
}

/// Returns the `quantization_config` of a `config.json` as written by ModelOpt.
fn in_config() -> Value {
    json!({
        "config_groups": { "group_0": {
            "input_activations": { "dynamic": false, "num_bits": 8, "type": "float" },
            "weights": { "dynamic": false, "num_bits": 8, "type": "float" },
            "targets": ["Linear"]
        } },
        "ignore": ["lm_head"], "quant_algo": "FP8", "kv_cache_scheme": { "dynamic": false, "num_bits": 8, "type": "float" },
        "producer": { "name": "modelopt", "version": "0.29.0" }, "quant_method": "modelopt"
    })
}

#[test]
fn both_files_say_the_algorithm() {
    let own = Quantization::from_quantize_config(own_file().to_string().as_bytes()).unwrap();
    assert_eq!(
        own.layer(LAYER).unwrap(),
        LayerFormat::Fp4(Fp4Format::ModelOptNvFp4)
    );
    let fp8 = LayerFormat::Fp8(Fp8Format {
        config: Fp8Config::ModelOpt,
        blocks: false,
        activations: true,
    });
    assert_eq!(read(&in_config()).layer(LAYER).unwrap(), fp8);
    expect_layers(&read(&in_config()), &[(LAYER, FP8), ("lm_head", "float")]);
    for (fields, expected) in [
        (json!({ "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN" }), FP8),
        (json!({ "quant_algo": "NVFP4" }), NVFP4),
        (
            json!({ "quant_algo": "W4A16_NVFP4", "group_size": 16 }),
            NVFP4,
        ),
        (
            json!({ "quant_method": "modelopt_fp4", "quant_algo": "NVFP4" }),
            NVFP4,
        ),
        (
            json!({ "quant_algo": null, "quantization": { "quant_algo": "NVFP4" } }),
            NVFP4,
        ),
    ] {
        expect_layers(&read(&changed(&in_config(), fields)), &[(LAYER, expected)]);
    }
}

/// Excluded modules are matched as a shell matches file names, and by the layers in them.
#[test]
fn excluded_modules_have_wildcards() {
    let own = Quantization::from_quantize_config(own_file().to_string().as_bytes()).unwrap();
    expect_layers(
        &own,
        &[
            ("lm_head", "float"),
            ("lm_head_2", NVFP4),
            ("model.layers.1.mlp.up_proj", "float"),
            ("model.layers.11.mlp.up_proj", "float"),
            ("model.layers.0.self_attn.k_proj", "float"),
            ("model.layers.0.self_attn.q_proj", NVFP4),
            ("model.layers.2.mlp.up_proj", "float"),
            ("model.layers.3.mlp.gate_proj", "float"),
            ("model.layers.3.mlp.up_proj", NVFP4),
        ],
    );
    // A dot of an entry is a dot.
    let dots = changed(&in_config(), json!({ "ignore": ["model.layers.0.*"] }));
    expect_layers(
        &read(&dots),
        &[(LAYER, "float"), ("model-layers.0.mlp.up_proj", FP8)],
    );
}

#[test]
fn layers_may_have_algorithms_of_their_own() {
    let mixed = json!({
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "exclude_modules": ["*.o_proj"],
        "quantized_layers": {
            "model.layers.0.self_attn.q_proj": { "quant_algo": "FP8" },
            "model.layers.0.self_attn.o_proj": { "quant_algo": "FP8" },
            "model.layers.0.mlp.up_proj": { "quant_algo": "NVFP4", "group_size": 16 }
        }
    });
    expect_layers(
        &read(&mixed),
        &[
            ("model.layers.0.self_attn.q_proj", FP8),
            ("model.layers.0.self_attn.o_proj", "float"),
            (LAYER, NVFP4),
            ("model.layers.0.mlp.down_proj", "float"),
        ],
    );
    let pointer = "/quantized_layers/model.layers.0.mlp.up_proj/quant_algo";
    expect_unsupported(
        &changed_at(&mixed, pointer, json!("W4A8_AWQ")),
        "quantized_layers.model.layers.0.mlp.up_proj.quant_algo",
        "\"W4A8_AWQ\"",
        ALGORITHMS,
    );
    expect_refused(
        &changed(&mixed, json!({ "quantized_layers": null })),
        "the quantization config has no `quantized_layers`; expected an object",
    );
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    for algorithm in [
        "INT4_AWQ",
        "NVFP4_AWQ",
        "NVFP4_SVD",
        "FP8_PB_WO",
        "MXFP8",
        "nvfp4",
    ] {
        expect_unsupported(
            &changed(&in_config(), json!({ "quant_algo": algorithm })),
            "quant_algo",
            &format!("\"{algorithm}\""),
            ALGORITHMS,
        );
    }
    expect_unsupported(
        &changed(
            &in_config(),
            json!({ "quant_algo": "NVFP4", "group_size": 32 }),
        ),
        "group_size",
        "32",
        "16 for NVFP4",
    );
    expect_unsupported(
        &changed(&in_config(), json!({ "ignore": "lm_head" })),
        "ignore",
        "\"lm_head\"",
        "a list of strings",
    );
    expect_refused(
        &changed(&in_config(), json!({ "quant_algo": null })),
        &format!("the quantization config has no `quant_algo`; expected {ALGORITHMS}"),
    );
    let nested = changed_at(&own_file(), "/quantization/quant_algo", Value::Null);
    let error = Quantization::from_quantize_config(nested.to_string().as_bytes()).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("the quantization config has no `quantization.quant_algo`; expected {ALGORITHMS}")
    );
}
