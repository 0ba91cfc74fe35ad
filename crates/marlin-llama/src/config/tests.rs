use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::tests::support::{config_json, config_of, config_with};

fn parse(json: &Value) -> Result<LlamaConfig, LlamaConfigError> {
    LlamaConfig::from_json(&json.to_string())
}

fn refused(fields: Value) -> LlamaConfigError {
    parse(&config_json(fields)).expect_err("must be refused")
}

/// The `config.json` of Llama 2 7B, shortened by fields that are not read.
const LLAMA_2: &str = r#"{
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16", "use_cache": true, "vocab_size": 32000
}"#;

/// That of Llama 3.2 1B Instruct.
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
    let llama_2 = LlamaConfig::from_json(LLAMA_2).unwrap();
    assert_eq!((llama_2.head_dim, llama_2.num_key_value_heads, llama_2.rope_theta), (128, 32, 10_000.0));
    assert_eq!((llama_2.bos_token_id, llama_2.eos_token_ids.as_slice(), llama_2.dtype), (Some(1), &[2][..], Some(FloatDType::F16)));
    assert_eq!((llama_2.rope_scaling, llama_2.tie_word_embeddings), (None, false));

    let llama_3 = LlamaConfig::from_json(LLAMA_3_2).unwrap();
    assert_eq!((llama_3.query_size(), llama_3.key_value_size()), (2048, 512));
    assert_eq!((llama_3.eos_token_ids.as_slice(), llama_3.dtype), (&[128001, 128008, 128009][..], Some(FloatDType::BF16)));
    let scaling = Llama3RopeScaling { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192 };
    let scaling = RopeScaling::Llama3(scaling);
    assert_eq!((llama_3.rope_scaling, llama_3.rope_theta, llama_3.tie_word_embeddings), (Some(scaling), 500_000.0, true));
}

#[test]
fn what_is_written_is_read_back() {
    for config in
        [LlamaConfig::from_json(LLAMA_2).unwrap(), LlamaConfig::from_json(LLAMA_3_2).unwrap(), config_with(json!({ "dtype": "float32" }))]
    {
        let json = config.to_json();
        assert_eq!(json["architectures"], json!([config.architecture.class()]));
        assert_eq!(parse(&json).unwrap(), config);
    }
    let json = LlamaConfig::from_json(LLAMA_3_2).unwrap().to_json();
    let original: Value = serde_json::from_str(LLAMA_3_2).unwrap();
    for (field, value) in json.as_object().unwrap() {
        assert_eq!(original.get(field), Some(value), "{field}");
    }
}

#[test]
fn old_and_new_spellings_mean_the_same() {
    let scaling = json!({ "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64 });
    let with = |fields: Value| {
        let mut scaling = scaling.clone();
        scaling.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        scaling
    };
    let old = config_with(json!({ "rope_theta": 5e5, "rope_scaling": with(json!({ "type": "llama3" })) }));
    let new = config_with(json!({ "rope_parameters": with(json!({ "rope_type": "llama3", "rope_theta": 5e5 })) }));
    assert_eq!(old, new);
    assert!(new.rope_scaling.is_some());
    let plain = config_with(json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 5e5 } }));
    assert_eq!((plain.rope_scaling, plain.rope_theta), (None, 5e5));
    assert_eq!(config_with(json!({ "dtype": "torch.bfloat16" })).dtype, Some(FloatDType::BF16));
    assert_eq!(config_with(json!({ "torch_dtype": "bfloat16" })).dtype, Some(FloatDType::BF16));
    assert_eq!(config_with(json!({ "architectures": null })).hidden_size, 36);
}

#[test]
fn every_refusal_names_its_field() {
    use LlamaConfigError as E;
    assert!(
        matches!(refused(json!({ "architectures": ["MixtralForCausalLM"] })), E::Architecture { found } if found == "MixtralForCausalLM")
    );
    assert!(matches!(refused(json!({ "architectures": [], "model_type": "gpt2" })), E::Architecture { found } if found == "gpt2"));
    // Without a field of ours, and with what a terminal would obey.
    for text in [json!({ "architectures": ["GPT2LMHeadModel"], "n_embd": 768 }), json!({ "model_type": "mistral3", "text_config": {} })] {
        assert!(matches!(parse(&text).unwrap_err(), E::Architecture { .. }), "{text}");
    }
    let escaped = refused(json!({ "architectures": ["\u{1b}[2Jcleared"] })).to_string();
    assert!(!escaped.contains('\u{1b}') && escaped.contains("cleared"), "{escaped}");
    let nameless = refused(json!({ "architectures": null, "model_type": null })).to_string();
    assert!(nameless.contains("not named") && Architecture::ALL.iter().all(|known| nameless.contains(known.class())), "{nameless}");
    assert!(matches!(refused(json!({ "hidden_act": "gelu" })), E::Unsupported { field: "hidden_act", found, .. } if found == "gelu"));
    assert!(
        matches!(refused(json!({ "rope_scaling": { "type": "dynamic" } })), E::Unsupported { field: "rope_type", found, .. } if found == "dynamic")
    );
    assert!(matches!(
        refused(json!({ "rope_scaling": { "rope_type": "llama3" } })),
        E::MissingRopeField { field: "factor", rope_type: "llama3" }
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
        for size in [0, LlamaConfig::MAX_SIZE + 1] {
            let error = refused(json!({ field: size, "head_dim": 6 }));
            assert!(matches!(error, E::Size { field: named, found } if named == field && found == size), "{field} {size}: {error}");
        }
    }
    assert!(matches!(refused(json!({ "num_attention_heads": 0 })), E::Size { field: "num_attention_heads", found: 0 }));
    assert!(matches!(refused(json!({ "num_attention_heads": 5 })), E::HeadDim { hidden_size: 36, heads: 5 }));
    assert!(matches!(refused(json!({ "num_key_value_heads": 4 })), E::Heads { heads: 6, kv_heads: 4 }));
    assert!(matches!(refused(json!({ "head_dim": 7 })), E::RotaryDim { head_dim: 7, rotary_dim: 7 }));
    assert!(matches!(
        refused(json!({ "num_attention_heads": 1 << 20, "head_dim": 1 << 20 })),
        E::Size { field: "num_attention_heads * head_dim", .. }
    ));
    assert!(matches!(refused(json!({ "rms_norm_eps": 0.0 })), E::NotPositive { field: "rms_norm_eps", .. }));
    assert!(matches!(refused(json!({ "rope_theta": -1.0 })), E::NotPositive { field: "rope_theta", .. }));
    let scaling = |low: f64, factor: f64, original: usize| json!({ "rope_scaling": { "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": 4.0, "original_max_position_embeddings": original } });
    assert!(matches!(refused(scaling(4.0, 8.0, 64)), E::FrequencyFactors { .. }));
    assert!(matches!(refused(scaling(1.0, 0.0, 64)), E::NotPositive { field: "rope_scaling.factor", .. }));
    assert!(matches!(refused(scaling(1.0, 8.0, 0)), E::Size { field: "rope_scaling.original_max_position_embeddings", .. }));

    let mut json = config_json(json!({}));
    json.as_object_mut().unwrap().remove("hidden_size");
    let missing = parse(&json).expect_err("no hidden_size");
    assert!(std::error::Error::source(&missing).is_some_and(|cause| cause.to_string().contains("hidden_size")));
    assert!(matches!(refused(json!({ "vocab_size": -1 })), E::Json(_)));
    assert!(matches!(refused(json!({ "eos_token_id": "</s>" })), E::Json(_)));
    assert!(matches!(LlamaConfig::from_json("{"), Err(E::Json(_))));
}

/// JSON values of every kind, sizes at the edges among them.
fn value() -> impl Strategy<Value = Value> {
    let sizes = prop_oneof![Just(0u64), Just(1), Just(7), Just(1 << 30), Just((1 << 30) + 1), Just(u64::MAX), any::<u64>()];
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
            proptest::collection::btree_map(names, inner, 0..4)
                .prop_map(|map| map.into_iter().map(|(name, value)| (name.to_string(), value)).collect()),
        ]
    })
}

proptest! {
    /// Whatever a field holds, reading gives a config that is valid and reads back, or an error.
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

    /// Broken text is an error as well.
    #[test]
    fn cut_and_flipped_texts_never_panic(position in any::<proptest::sample::Index>(), byte in any::<u8>(), cut in any::<bool>()) {
        let mut text = LLAMA_3_2.as_bytes().to_vec();
        let position = position.index(text.len());
        if cut { text.truncate(position) } else { text[position] = byte }
        let _ = LlamaConfig::from_json(&String::from_utf8_lossy(&text));
    }
}

/// The `config.json` of Mistral 7B v0.1, Qwen 2.5 0.5B, Qwen 3 0.6B and Phi-3.5 mini, shortened by fields that are not read and by factors.
const OTHERS: [&str; 4] = [
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
];

#[test]
fn published_configs_of_other_architectures_are_read() {
    let [mistral, qwen2, qwen3, phi3] = OTHERS.map(|text| LlamaConfig::from_json(text).unwrap());
    assert_eq!((mistral.architecture, mistral.attention_bias, mistral.head_dim), (Architecture::Mistral, false, 128));
    assert_eq!(mistral.sliding_window, Some(SlidingWindow { size: 4096, first_layer: 0 }));
    assert_eq!((qwen2.architecture, qwen2.attention_bias, qwen2.output_bias()), (Architecture::Qwen2, true, false));
    assert_eq!((qwen2.sliding_window, qwen2.head_dim, qwen2.tie_word_embeddings), (None, 64, true));
    assert_eq!((qwen3.architecture, qwen3.query_size(), qwen3.attention_bias), (Architecture::Qwen3, 2048, false));
    assert_eq!((phi3.architecture, phi3.window_of(31)), (Architecture::Phi3, Some(262_144)));
    let Some(RopeScaling::LongRope(scaling)) = &phi3.rope_scaling else { panic!("{:?}", phi3.rope_scaling) };
    assert_eq!((scaling.short_factor.as_slice(), scaling.original_max_position_embeddings), (&[1.0, 1.02, 1.03][..], 4096));
    // sqrt(1 + ln 32 / ln 4096), as Phi-3's own code has it.
    assert!((scaling.attention_factor(131_072) - 1.190_238).abs() < 1e-6, "{}", scaling.attention_factor(131_072));
    assert_eq!(scaling.attention_factor(4096), 1.0);

    for text in OTHERS {
        let config = LlamaConfig::from_json(text).unwrap();
        let json = config.to_json();
        assert_eq!(parse(&json).unwrap(), config);
        let original: Value = serde_json::from_str(text).unwrap();
        for (field, value) in json.as_object().unwrap() {
            let same = |original: &Value| original == value || original.as_f64().is_some_and(|number| value.as_f64() == Some(number));
            // A window that is not used is not written.
            assert!(original.get(field).is_none_or(same) || (field == "sliding_window" && value.is_null()), "{field}");
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
    assert_eq!((mistral.num_key_value_heads, mistral.max_position_embeddings, mistral.window_of(0)), (8, 131_072, Some(4096)));
    assert_eq!(least("Qwen3ForCausalLM").head_dim, 128);
    let qwen2 = least("Qwen2ForCausalLM");
    assert_eq!((qwen2.head_dim, qwen2.max_position_embeddings, qwen2.sliding_window), (2, 32_768, None));
    let phi3 = least("Phi3ForCausalLM");
    assert_eq!((phi3.num_key_value_heads, phi3.rms_norm_eps, phi3.max_position_embeddings), (32, 1e-5, 4096));
    assert_eq!(config_with(json!({ "architectures": [], "model_type": "qwen3" })).architecture, Architecture::Qwen3);

    let window = |fields: Value| config_of(Architecture::Mistral, fields).sliding_window;
    assert_eq!((window(json!({})).unwrap().size, window(json!({ "sliding_window": null }))), (4096, None));
    let parameters = json!({ "rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.4 });
    let partial = config_of(Architecture::Phi3, json!({ "rope_parameters": parameters }));
    assert_eq!((partial.rotary_dim(), partial.rope_theta), (4, 5e5));
    let types = json!({ "use_sliding_window": true, "sliding_window": 8, "max_window_layers": 1, "layer_types": ["full_attention", "sliding_attention"] });
    assert_eq!(config_of(Architecture::Qwen2, types).window_of(1), Some(8));
}

#[test]
fn what_an_architecture_does_not_have_is_refused() {
    use LlamaConfigError as E;
    let of = |architecture: Architecture, fields: Value| {
        let mut json = config_json(json!({ "architectures": [architecture.class()], "head_dim": 10 }));
        json.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        parse(&json).expect_err("must be refused")
    };
    let found = of(Architecture::Qwen2, json!({ "layer_types": ["full_attention", "sliding_attention"] }));
    assert!(matches!(&found, E::LayerType { layer: 1, expected: "full_attention", .. }), "{found}");
    assert!(matches!(of(Architecture::Mistral, json!({ "sliding_window": 0 })), E::Size { field: "sliding_window", found: 0 }));
    let partial = of(Architecture::Phi3, json!({ "partial_rotary_factor": 0.35 }));
    assert!(matches!(partial, E::RotaryDim { head_dim: 10, rotary_dim: 3 }), "{partial}");
    assert!(matches!(of(Architecture::Phi3, json!({ "partial_rotary_factor": 1.5 })), E::RotaryDim { rotary_dim: 15, .. }));
    let rope = |short: Value, original: usize| {
        let long = [1.0; 5];
        of(
            Architecture::Phi3,
            json!({ "original_max_position_embeddings": original, "rope_scaling": { "type": "su", "short_factor": short, "long_factor": long } }),
        )
    };
    assert!(matches!(rope(json!([1.0, 2.0]), 8), E::RopeFactors { field: "rope_scaling.short_factor", expected: 5, found: 2 }));
    assert!(matches!(rope(json!([1.0, 1.0, 0.0, 1.0, 1.0]), 8), E::NotPositive { field: "rope_scaling.short_factor", .. }));
    assert!(matches!(rope(json!([1.0, 1.0, 1.0, 1.0, 1.0]), 0), E::Size { field: "rope_scaling.original_max_position_embeddings", .. }));
    assert!(matches!(rope(json!([1.0, 1.0, 1.0, 1.0, 1.0]), 1), E::NotPositive { field: "rope_scaling.attention_factor", .. }));
    assert!(matches!(rope(Value::Null, 8), E::MissingRopeField { field: "short_factor", rope_type: "longrope" }));

    // A config that was made in Rust.
    let changed = |architecture: Architecture, change: fn(&mut LlamaConfig)| {
        let mut config = config_of(architecture, json!({ "sliding_window": null }));
        change(&mut config);
        config.validate().expect_err("must be refused")
    };
    let bias = changed(Architecture::Qwen2, |config| config.attention_bias = false);
    assert!(matches!(bias, E::NotOfArchitecture { field: "attention_bias", architecture: Architecture::Qwen2, .. }));
    assert!(bias.to_string().contains("Qwen2ForCausalLM"), "{bias}");
    let bias = changed(Architecture::Mistral, |config| config.mlp_bias = true);
    assert!(matches!(bias, E::NotOfArchitecture { field: "mlp_bias", .. }));
    let window = changed(Architecture::Llama, |config| config.sliding_window = Some(SlidingWindow { size: 4, first_layer: 0 }));
    assert!(matches!(window, E::NotOfArchitecture { field: "sliding_window", .. }));
    let window = changed(Architecture::Phi3, |config| config.sliding_window = Some(SlidingWindow { size: 4, first_layer: 1 }));
    assert!(matches!(window, E::NotOfArchitecture { field: "max_window_layers", .. }));
}
