//! Tests of configs of gpt-oss.

use serde_json::{Value, json};

use super::parse;
use crate::Architecture;
use crate::config::{ModelConfig, ModelConfigError, RopeScaling, WindowLayers};
use crate::tests::support::with_fields;

/// The `config.json` of gpt-oss-20b with four of its 24 layers.
const GPT_OSS: &str = r#"{
    "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 4, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999,
    "quantization_config": { "modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4" }, "rms_norm_eps": 1e-05,
    "rope_scaling": { "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": false },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false,
    "transformers_version": "4.55.0.dev0", "use_cache": true, "vocab_size": 201088
}"#;

fn changed(fields: Value) -> Result<ModelConfig, ModelConfigError> {
    let json = serde_json::from_str(GPT_OSS).unwrap();
    parse(&with_fields(json, &fields))
}

#[test]
fn the_published_config_is_read_and_written() {
    let config = ModelConfig::from_json(GPT_OSS).unwrap();
    assert_eq!(config.architecture, Architecture::GptOss);
    let windows: Vec<Option<usize>> = (0..4).map(|layer| config.window_of(layer)).collect();
    assert_eq!(windows, [Some(128), None, Some(128), None]);
    let experts = config.experts.as_ref().unwrap();
    assert_eq!(
        (experts.count, experts.top_k, experts.intermediate_size),
        (32, 4, 2880)
    );
    assert!(experts.normalises && config.attention_bias);
    assert_eq!(config.positions(), 131_072);
    let Some(RopeScaling::Yarn(yarn)) = &config.rope_scaling else {
        panic!("{:?}", config.rope_scaling)
    };
    assert!((yarn.attention_factor() - 1.346_573_6).abs() < 1e-6);
    assert_eq!(parse(&config.to_json()).unwrap(), config);
}

#[test]
fn absent_fields_have_the_values_of_the_class() {
    let minimal = json!({
        "architectures": ["GptOssForCausalLM"], "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 4, "num_attention_heads": 64, "num_local_experts": 32,
    });
    let published = ModelConfig::from_json(GPT_OSS).unwrap();
    let expected = ModelConfig {
        eos_token_ids: Vec::new(),
        ..published
    };
    assert_eq!(parse(&minimal).unwrap(), expected);
    // A config that says so has no scaling.
    let plain = json!({ "rope_scaling": { "rope_type": "default" } });
    let config = changed(plain).unwrap();
    assert_eq!(config.rope_scaling, None);
    assert_eq!(parse(&config.to_json()).unwrap(), config);
}

#[test]
fn what_no_kernel_computes_is_refused() {
    for (fields, expected) in [
        (json!({ "swiglu_limit": 5.0 }), "swiglu_limit"),
        (json!({ "swiglu_alpha": 1.5 }), "swiglu_alpha"),
        (
            json!({ "layer_types": ["full_attention", "sliding_attention"] }),
            "sliding_attention",
        ),
        (json!({ "num_experts_per_tok": 33 }), "33"),
    ] {
        let message = changed(fields).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    let mut config = ModelConfig::from_json(GPT_OSS).unwrap();
    let window = config.sliding_window.as_mut().unwrap();
    window.layers = WindowLayers::From(1);
    assert!(config.validate().is_err());
}
