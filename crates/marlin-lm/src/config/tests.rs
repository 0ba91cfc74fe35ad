mod architectures;
mod gpt_oss;

use proptest::prelude::*;
use serde_json::{Value, json};

use self::architectures::OTHERS;
use super::*;
use crate::tests::support::{config_json, config_with, with_fields};

fn parse(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    ModelConfig::from_json(&json.to_string())
}

fn refused(fields: Value) -> ModelConfigError {
    parse(&config_json(fields)).expect_err("must be refused")
}

/// The `config.json` of Llama 2 7B, without fields that are not read.
const LLAMA_2: &str = r#"{
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16", "use_cache": true, "vocab_size": 32000
}"#;

/// The `config.json` of Llama 3.2 1B Instruct.
const LLAMA_3_2: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": { "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3" },
    "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "vocab_size": 128256
}"#;

#[test]
fn published_configs_are_read() {
    let llama_2 = ModelConfig::from_json(LLAMA_2).unwrap();
    assert_eq!(
        (
            llama_2.head_dim,
            llama_2.num_key_value_heads,
            llama_2.rope_theta
        ),
        (128, 32, 10_000.0)
    );
    assert_eq!(
        (
            llama_2.bos_token_id,
            llama_2.eos_token_ids.as_slice(),
            llama_2.dtype
        ),
        (Some(1), &[2][..], Some(FloatDType::F16))
    );
    assert_eq!(
        (llama_2.rope_scaling, llama_2.tie_word_embeddings),
        (None, false)
    );

    let llama_3 = ModelConfig::from_json(LLAMA_3_2).unwrap();
    assert_eq!(
        (llama_3.query_size(), llama_3.key_value_size()),
        (2048, 512)
    );
    assert_eq!(
        (llama_3.eos_token_ids.as_slice(), llama_3.dtype),
        (&[128001, 128008, 128009][..], Some(FloatDType::BF16))
    );
    let scaling = Llama3RopeScaling {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    let scaling = RopeScaling::Llama3(scaling);
    assert_eq!(
        (
            llama_3.rope_scaling,
            llama_3.rope_theta,
            llama_3.tie_word_embeddings
        ),
        (Some(scaling), 500_000.0, true)
    );
}

#[test]
fn what_is_written_is_read_back() {
    for config in [
        ModelConfig::from_json(LLAMA_2).unwrap(),
        ModelConfig::from_json(LLAMA_3_2).unwrap(),
        config_with(json!({ "dtype": "float32" })),
    ] {
        let json = config.to_json();
        assert_eq!(json["architectures"], json!([config.architecture.class()]));
        assert_eq!(parse(&json).unwrap(), config);
    }
    let json = ModelConfig::from_json(LLAMA_3_2).unwrap().to_json();
    let original: Value = serde_json::from_str(LLAMA_3_2).unwrap();
    for (field, value) in json.as_object().unwrap() {
        assert_eq!(original.get(field), Some(value), "{field}");
    }
}

#[test]
fn old_and_new_spellings_mean_the_same() {
    let scaling = json!({ "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64 });
    let with = |fields: Value| with_fields(scaling.clone(), &fields);
    let old = config_with(
        json!({ "rope_theta": 5e5, "rope_scaling": with(json!({ "type": "llama3" })) }),
    );
    let new = config_with(
        json!({ "rope_parameters": with(json!({ "rope_type": "llama3", "rope_theta": 5e5 })) }),
    );
    assert_eq!(old, new);
    assert!(new.rope_scaling.is_some());
    let plain =
        config_with(json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 5e5 } }));
    assert_eq!((plain.rope_scaling, plain.rope_theta), (None, 5e5));
    assert_eq!(
        config_with(json!({ "dtype": "torch.bfloat16" })).dtype,
        Some(FloatDType::BF16)
    );
    assert_eq!(
        config_with(json!({ "torch_dtype": "bfloat16" })).dtype,
        Some(FloatDType::BF16)
    );
    assert_eq!(
        config_with(json!({ "architectures": null })).hidden_size,
        36
    );
}

#[test]
fn every_refusal_names_its_field() {
    use ModelConfigError as E;
    assert!(
        matches!(refused(json!({ "architectures": ["FalconForCausalLM"] })), E::Architecture { found } if found == "FalconForCausalLM")
    );
    assert!(
        matches!(refused(json!({ "architectures": [], "model_type": "gpt2" })), E::Architecture { found } if found == "gpt2")
    );
    // Configs without the required fields, and a class with control characters of a terminal.
    for text in [
        json!({ "architectures": ["GPT2LMHeadModel"], "n_embd": 768 }),
        json!({ "model_type": "mistral3", "text_config": {} }),
    ] {
        assert!(
            matches!(parse(&text).unwrap_err(), E::Architecture { .. }),
            "{text}"
        );
    }
    let escaped = refused(json!({ "architectures": ["\u{1b}[2Jcleared"] })).to_string();
    assert!(
        !escaped.contains('\u{1b}') && escaped.contains("cleared"),
        "{escaped}"
    );
    let nameless = refused(json!({ "architectures": null, "model_type": null })).to_string();
    assert!(
        nameless.contains("not named")
            && Architecture::ALL
                .iter()
                .all(|known| nameless.contains(known.class())),
        "{nameless}"
    );
    assert!(
        matches!(refused(json!({ "hidden_act": "gelu" })), E::Unsupported { field: "hidden_act", found, .. } if found == "gelu")
    );
    assert!(
        matches!(refused(json!({ "rope_scaling": { "type": "dynamic" } })), E::Unsupported { field: "rope_type", found, .. } if found == "dynamic")
    );
    assert!(matches!(
        refused(json!({ "rope_scaling": { "rope_type": "llama3" } })),
        E::MissingRopeField {
            field: "factor",
            rope_type: "llama3"
        }
    ));
    for field in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ] {
        for size in [0, ModelConfig::MAX_SIZE + 1] {
            let error = refused(json!({ field: size, "head_dim": 6 }));
            assert!(
                matches!(error, E::Size { field: named, found } if named == field && found == size),
                "{field} {size}: {error}"
            );
        }
    }
    assert!(matches!(
        refused(json!({ "num_attention_heads": 0 })),
        E::Size {
            field: "num_attention_heads",
            found: 0
        }
    ));
    assert!(matches!(
        refused(json!({ "num_attention_heads": 5 })),
        E::HeadDim {
            hidden_size: 36,
            heads: 5
        }
    ));
    assert!(matches!(
        refused(json!({ "num_key_value_heads": 4 })),
        E::Heads {
            heads: 6,
            kv_heads: 4
        }
    ));
    assert!(matches!(
        refused(json!({ "head_dim": 7 })),
        E::RotaryDim {
            head_dim: 7,
            rotary_dim: 7
        }
    ));
    assert!(matches!(
        refused(json!({ "num_attention_heads": 1 << 20, "head_dim": 1 << 20 })),
        E::Size {
            field: "num_attention_heads * head_dim",
            ..
        }
    ));
    assert!(matches!(
        refused(json!({ "rms_norm_eps": 0.0 })),
        E::NotPositive {
            field: "rms_norm_eps",
            ..
        }
    ));
    assert!(matches!(
        refused(json!({ "rope_theta": -1.0 })),
        E::NotPositive {
            field: "rope_theta",
            ..
        }
    ));
    let scaling = |low: f64, factor: f64, original: usize| json!({ "rope_scaling": { "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": 4.0, "original_max_position_embeddings": original } });
    assert!(matches!(
        refused(scaling(4.0, 8.0, 64)),
        E::FrequencyFactors { .. }
    ));
    assert!(matches!(
        refused(scaling(1.0, 0.0, 64)),
        E::NotPositive {
            field: "rope_scaling.factor",
            ..
        }
    ));
    assert!(matches!(
        refused(scaling(1.0, 8.0, 0)),
        E::Size {
            field: "rope_scaling.original_max_position_embeddings",
            ..
        }
    ));

    let mut json = config_json(json!({}));
    json.as_object_mut().unwrap().remove("hidden_size");
    let missing = parse(&json).expect_err("no hidden_size");
    assert!(
        std::error::Error::source(&missing)
            .is_some_and(|cause| cause.to_string().contains("hidden_size"))
    );
    assert!(matches!(refused(json!({ "vocab_size": -1 })), E::Json(_)));
    assert!(matches!(
        refused(json!({ "eos_token_id": "</s>" })),
        E::Json(_)
    ));
    assert!(matches!(ModelConfig::from_json("{"), Err(E::Json(_))));
}

/// Generates JSON values of every kind, including sizes at the limits.
fn value() -> impl Strategy<Value = Value> {
    let sizes = prop_oneof![
        Just(0u64),
        Just(1),
        Just(7),
        Just(1 << 30),
        Just((1 << 30) + 1),
        Just(u64::MAX),
        any::<u64>()
    ];
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        sizes.prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z0-9]{0,8}".prop_map(Value::from),
        proptest::sample::select(vec!["yarn", "llama3", "longrope"]).prop_map(Value::from),
    ];
    scalar.prop_recursive(2, 8, 4, |inner| {
        let names = proptest::sample::select(vec![
            "rope_type",
            "type",
            "factor",
            "rope_theta",
            "low_freq_factor",
            "high_freq_factor",
            "short_factor",
            "long_factor",
            "original_max_position_embeddings",
            "beta_fast",
            "attention_factor",
            "mscale",
            "truncate",
        ]);
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map(names, inner, 0..4).prop_map(|map| map
                .into_iter()
                .map(|(name, value)| (name.to_string(), value))
                .collect()),
        ]
    })
}

proptest! {
    /// Checks that reading a config with any values in two fields gives an error, or a valid config
    /// that can be written and read back.
    #[test]
    fn mutated_configs_never_panic(which in any::<proptest::sample::Index>(), index in any::<proptest::sample::Index>(), other in any::<proptest::sample::Index>(), value in value(), second in value()) {
        let texts: Vec<&str> = [LLAMA_2, LLAMA_3_2].into_iter().chain(OTHERS).collect();
        let mut json: Value = serde_json::from_str(texts[which.index(texts.len())]).unwrap();
        let fields: Vec<String> = json.as_object().unwrap().keys().cloned().chain(["rope_parameters", "original_max_position_embeddings", "dtype", "sliding_window", "layer_types", "partial_rotary_factor"].map(String::from)).collect();
        json[index.get(&fields)] = value;
        json[other.get(&fields)] = second;
        if let Ok(config) = parse(&json) {
            prop_assert!(config.validate().is_ok());
            prop_assert_eq!(parse(&config.to_json()).unwrap(), config);
        }
    }

    /// Checks that reading a broken text does not panic.
    #[test]
    fn cut_and_flipped_texts_never_panic(position in any::<proptest::sample::Index>(), byte in any::<u8>(), cut in any::<bool>()) {
        let mut text = LLAMA_3_2.as_bytes().to_vec();
        let position = position.index(text.len());
        if cut { text.truncate(position) } else { text[position] = byte }
        let _ = ModelConfig::from_json(&String::from_utf8_lossy(&text));
    }
}
