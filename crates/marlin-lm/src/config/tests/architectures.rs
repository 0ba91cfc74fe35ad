//! Tests of configs of the architectures other than Llama, and of the features that each does not
//! have.

use serde_json::{Value, json};

use super::parse;
use crate::Architecture;
use crate::architectures::ProjectionKind;
use crate::config::{ModelConfig, ModelConfigError, RopeScaling, SlidingWindow, WindowLayers};
use crate::tests::support::{config_of, config_with, json_of};

/// The `config.json` of Mistral 7B v0.1, Qwen 2.5 0.5B, Qwen 3 0.6B, Phi-3.5 mini and Seed-OSS 36B,
/// without fields that are not read, and with fewer factors.
pub(super) const OTHERS: [&str; 5] = [
    r#"{
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 32000
    }"#,
    r#"{
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
        "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_sliding_window": false, "vocab_size": 151936
    }"#,
    r#"{
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "use_sliding_window": false, "vocab_size": 151936
    }"#,
    r#"{
        "architectures": ["Phi3ForCausalLM"], "attention_bias": false, "bos_token_id": 1, "eos_token_id": 32000, "hidden_act": "silu",
        "hidden_size": 12, "intermediate_size": 8192, "max_position_embeddings": 131072, "model_type": "phi3", "num_attention_heads": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 2, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
        "rope_scaling": { "long_factor": [1.08, 1.11, 1.25], "short_factor": [1.0, 1.02, 1.03], "type": "longrope" }, "rope_theta": 10000.0,
        "sliding_window": 262144, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 32064
    }"#,
    r#"{
        "architectures": ["SeedOssForCausalLM"], "attention_bias": true, "attention_out_bias": false, "bos_token_id": 0, "eos_token_id": 2,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 524288,
        "mlp_bias": false, "model_type": "seed_oss", "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": { "rope_type": "default" }, "rope_theta": 10000000.0, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "vocab_size": 155136
    }"#,
];

#[test]
fn published_configs_of_other_architectures_are_read() {
    let [mistral, qwen2, qwen3, phi3, seed_oss] =
        OTHERS.map(|text| ModelConfig::from_json(text).unwrap());
    assert_eq!(
        (
            mistral.architecture,
            mistral.attention_bias,
            mistral.head_dim
        ),
        (Architecture::Mistral, false, 128)
    );
    assert_eq!(
        mistral.sliding_window,
        Some(SlidingWindow {
            size: 4096,
            layers: WindowLayers::From(0)
        })
    );
    assert_eq!(
        (
            qwen2.architecture,
            qwen2.attention_bias,
            qwen2
                .block(0)
                .projection(ProjectionKind::Output)
                .unwrap()
                .bias
        ),
        (Architecture::Qwen2, true, false)
    );
    assert_eq!(
        (
            qwen2.sliding_window,
            qwen2.head_dim,
            qwen2.tie_word_embeddings
        ),
        (None, 64, true)
    );
    assert_eq!(
        (qwen3.architecture, qwen3.query_size(), qwen3.attention_bias),
        (Architecture::Qwen3, 2048, false)
    );
    assert_eq!(
        (
            seed_oss.architecture,
            seed_oss.attention_bias,
            seed_oss.query_size(),
            seed_oss
                .block(0)
                .projection(ProjectionKind::Output)
                .unwrap()
                .bias
        ),
        (Architecture::SeedOss, true, 10_240, false)
    );
    assert_eq!(
        (phi3.architecture, phi3.window_of(31)),
        (Architecture::Phi3, Some(262_144))
    );
    let Some(RopeScaling::LongRope(scaling)) = &phi3.rope_scaling else {
        panic!("{:?}", phi3.rope_scaling)
    };
    assert_eq!(
        (
            scaling.short_factor.as_slice(),
            scaling.original_max_position_embeddings
        ),
        (&[1.0, 1.02, 1.03][..], 4096)
    );
    // The value sqrt(1 + ln 32 / ln 4096), as in Phi-3's own code.
    assert!(
        (scaling.attention_factor(131_072) - 1.190_238).abs() < 1e-6,
        "{}",
        scaling.attention_factor(131_072)
    );
    assert_eq!(scaling.attention_factor(4096), 1.0);

    for text in OTHERS {
        let config = ModelConfig::from_json(text).unwrap();
        let json = config.to_json();
        assert_eq!(parse(&json).unwrap(), config);
        let original: Value = serde_json::from_str(text).unwrap();
        for (field, value) in json.as_object().unwrap() {
            let same = |original: &Value| {
                original == value
                    || original
                        .as_f64()
                        .is_some_and(|number| value.as_f64() == Some(number))
            };
            // An unused window is not written, nor is a scaling that scales nothing.
            let is_unused = field == "sliding_window" || original[field]["rope_type"] == "default";
            assert!(
                original.get(field).is_none_or(same) || (is_unused && value.is_null()),
                "{field}"
            );
        }
    }
}

#[test]
fn what_a_config_leaves_out_is_as_in_its_class() {
    let least = |class: &str| {
        let sizes = json!({
            "architectures": [class], "vocab_size": 9, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 32
        });
        parse(&sizes).unwrap()
    };
    let mistral = least("MistralForCausalLM");
    assert_eq!(
        (
            mistral.num_key_value_heads,
            mistral.max_position_embeddings,
            mistral.window_of(0)
        ),
        (8, 131_072, Some(4096))
    );
    assert_eq!(least("Qwen3ForCausalLM").head_dim, 128);
    let qwen2 = least("Qwen2ForCausalLM");
    assert_eq!(
        (
            qwen2.head_dim,
            qwen2.max_position_embeddings,
            qwen2.sliding_window
        ),
        (2, 32_768, None)
    );
    let phi3 = least("Phi3ForCausalLM");
    assert_eq!(
        (
            phi3.num_key_value_heads,
            phi3.rms_norm_eps,
            phi3.max_position_embeddings
        ),
        (32, 1e-5, 4096)
    );
    assert_eq!(
        config_with(json!({ "architectures": [], "model_type": "qwen3" })).architecture,
        Architecture::Qwen3
    );

    let window = |fields: Value| config_of(Architecture::Mistral, fields).sliding_window;
    assert_eq!(
        (
            window(json!({})).unwrap().size,
            window(json!({ "sliding_window": null }))
        ),
        (4096, None)
    );
    let parameters =
        json!({ "rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.4 });
    let partial = config_of(Architecture::Phi3, json!({ "rope_parameters": parameters }));
    assert_eq!((partial.rotary_dim(), partial.rope_theta), (4, 5e5));
    let types = json!({ "use_sliding_window": true, "sliding_window": 8, "max_window_layers": 1, "layer_types": ["full_attention", "sliding_attention"] });
    assert_eq!(config_of(Architecture::Qwen2, types).window_of(1), Some(8));
}

#[test]
fn what_an_architecture_does_not_have_is_refused() {
    use ModelConfigError as E;
    let of = |architecture: Architecture, fields: Value| {
        parse(&json_of(architecture, fields)).expect_err("must be refused")
    };
    let found = of(
        Architecture::Qwen2,
        json!({ "layer_types": ["full_attention", "sliding_attention"] }),
    );
    assert!(
        matches!(
            &found,
            E::LayerType {
                layer: 1,
                expected: "full_attention",
                ..
            }
        ),
        "{found}"
    );
    assert!(matches!(
        of(Architecture::Mistral, json!({ "sliding_window": 0 })),
        E::Size {
            field: "sliding_window",
            found: 0
        }
    ));
    let partial = of(Architecture::Phi3, json!({ "partial_rotary_factor": 0.35 }));
    assert!(
        matches!(
            partial,
            E::RotaryDim {
                head_dim: 10,
                rotary_dim: 3
            }
        ),
        "{partial}"
    );
    assert!(matches!(
        of(Architecture::Phi3, json!({ "partial_rotary_factor": 1.5 })),
        E::RotaryDim { rotary_dim: 15, .. }
    ));
    let rope = |short: Value, original: usize| {
        let long = [1.0; 5];
        of(
            Architecture::Phi3,
            json!({ "original_max_position_embeddings": original, "rope_scaling": { "type": "su", "short_factor": short, "long_factor": long } }),
        )
    };
    assert!(matches!(
        rope(json!([1.0, 2.0]), 8),
        E::RopeFactors {
            field: "rope_scaling.short_factor",
            expected: 5,
            found: 2
        }
    ));
    assert!(matches!(
        rope(json!([1.0, 1.0, 0.0, 1.0, 1.0]), 8),
        E::NotPositive {
            field: "rope_scaling.short_factor",
            ..
        }
    ));
    assert!(matches!(
        rope(json!([1.0, 1.0, 1.0, 1.0, 1.0]), 0),
        E::Size {
            field: "rope_scaling.original_max_position_embeddings",
            ..
        }
    ));
    assert!(matches!(
        rope(json!([1.0, 1.0, 1.0, 1.0, 1.0]), 1),
        E::NotPositive {
            field: "rope_scaling.attention_factor",
            ..
        }
    ));
    assert!(matches!(
        rope(Value::Null, 8),
        E::MissingRopeField {
            field: "short_factor",
            rope_type: "longrope"
        }
    ));

    // Configs that are changed in Rust, after they are read.
    let changed = |architecture: Architecture, change: fn(&mut ModelConfig)| {
        let mut config = config_of(architecture, json!({ "sliding_window": null }));
        change(&mut config);
        config.validate().expect_err("must be refused")
    };
    let bias = changed(Architecture::Qwen2, |config| config.attention_bias = false);
    assert!(matches!(
        bias,
        E::NotOfArchitecture {
            field: "attention_bias",
            architecture: Architecture::Qwen2,
            ..
        }
    ));
    assert!(bias.to_string().contains("Qwen2ForCausalLM"), "{bias}");
    let bias = changed(Architecture::Mistral, |config| config.mlp_bias = true);
    assert!(matches!(
        bias,
        E::NotOfArchitecture {
            field: "mlp_bias",
            ..
        }
    ));
    let window = changed(Architecture::Llama, |config| {
        config.sliding_window = Some(SlidingWindow {
            size: 4,
            layers: WindowLayers::From(0),
        })
    });
    assert!(matches!(
        window,
        E::NotOfArchitecture {
            field: "sliding_window",
            ..
        }
    ));
    let window = changed(Architecture::Phi3, |config| {
        config.sliding_window = Some(SlidingWindow {
            size: 4,
            layers: WindowLayers::From(1),
        })
    });
    assert!(matches!(
        window,
        E::NotOfArchitecture {
            field: "max_window_layers",
            ..
        }
    ));
}
