use serde_json::{Value, json};

use crate::tests::support::{config_of, json_of, with_fields};
use crate::{Architecture, ModelConfig, ModelConfigError, RopeScaling, YarnRopeScaling};

fn parse(architecture: Architecture, fields: Value) -> Result<ModelConfig, ModelConfigError> {
    ModelConfig::from_json(&json_of(architecture, fields).to_string())
}

fn refused(fields: Value) -> ModelConfigError {
    parse(Architecture::Llama, fields).expect_err("must be refused")
}

fn yarn(fields: Value) -> YarnRopeScaling {
    let scaling =
        json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24 });
    let scaling = with_fields(scaling, &fields);
    match config_of(Architecture::Qwen3, json!({ "rope_scaling": scaling })).rope_scaling {
        Some(RopeScaling::Yarn(scaling)) => scaling,
        other => panic!("{other:?}"),
    }
}

#[test]
fn rope_scaling_counts_over_rope_parameters() {
    let parameters =
        json!({ "rope_type": "llama3", "rope_theta": 5e5, "partial_rotary_factor": 0.4 });
    let scaling = json!({ "rope_type": "yarn", "factor": 4.0 });
    let both = config_of(
        Architecture::Llama,
        json!({ "rope_scaling": scaling, "rope_parameters": parameters }),
    );
    assert_eq!(
        both,
        config_of(Architecture::Llama, json!({ "rope_scaling": scaling }))
    );
    assert!(
        matches!(&both.rope_scaling, Some(RopeScaling::Yarn(yarn)) if yarn.original_max_position_embeddings == 96)
    );
    for none in [json!({}), Value::Null] {
        let one = config_of(
            Architecture::Llama,
            json!({ "rope_scaling": none, "rope_parameters": scaling }),
        );
        assert_eq!(one.rope_scaling, both.rope_scaling);
        assert_eq!(
            config_of(
                Architecture::Llama,
                json!({ "rope_scaling": scaling, "rope_parameters": none })
            ),
            both
        );
    }
}

#[test]
fn yarn_has_the_defaults_of_transformers_and_is_read_back() {
    let plain = yarn(json!({}));
    assert_eq!(
        (plain.beta_fast, plain.beta_slow, plain.truncate),
        (32.0, 1.0, true)
    );
    assert!((plain.attention_factor() - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-15);
    // Values that are false in Python count as absent, except for `truncate`.
    assert_eq!(
        yarn(json!({ "beta_fast": 0, "beta_slow": null, "mscale": null })),
        plain
    );
    assert!(!yarn(json!({ "truncate": null })).truncate);
    assert_eq!(yarn(json!({ "factor": null })).factor, 4.0);
    assert_eq!(
        yarn(json!({ "attention_factor": 2, "mscale": 3.0, "mscale_all_dim": 1.0 }))
            .attention_factor(),
        2.0
    );

    for fields in [
        json!({ "factor": 4.0 }),
        json!({ "factor": 3.5, "beta_fast": 5, "beta_slow": 0.5, "mscale": 0.0, "mscale_all_dim": 1.5, "truncate": false }),
        json!({ "factor": 3.5, "attention_factor": 0.5, "original_max_position_embeddings": 7 }),
    ] {
        let mut scaling = json!({ "rope_type": "yarn" });
        scaling
            .as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        let config = config_of(Architecture::Mistral, json!({ "rope_scaling": scaling }));
        assert_eq!(
            ModelConfig::from_json(&config.to_json().to_string()).unwrap(),
            config
        );
    }
}

#[test]
fn the_context_beside_the_scaling_counts() {
    let original = |architecture, beside: Value, own: Value| {
        let factors = [1.0; 5];
        let scaling = json!({ "type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 2.5, "original_max_position_embeddings": own });
        let config = config_of(
            architecture,
            json!({ "original_max_position_embeddings": beside, "rope_scaling": scaling }),
        );
        assert_eq!(
            ModelConfig::from_json(&config.to_json().to_string()).unwrap(),
            config
        );
        let Some(RopeScaling::LongRope(scaling)) = config.rope_scaling else {
            panic!("{:?}", config.rope_scaling)
        };
        assert_eq!(scaling.factor, Some(2.5));
        scaling.original_max_position_embeddings
    };
    assert_eq!(original(Architecture::Phi3, json!(8), json!(16)), 8);
    assert_eq!(original(Architecture::Phi3, Value::Null, json!(16)), 4096);
    assert_eq!(original(Architecture::Llama, json!(8), json!(16)), 8);
    assert_eq!(original(Architecture::Llama, Value::Null, json!(16)), 16);
    assert_eq!(original(Architecture::Llama, Value::Null, Value::Null), 96);
}

#[test]
fn key_heads_that_are_null_are_as_many_as_query_heads() {
    for architecture in Architecture::ALL {
        assert_eq!(
            config_of(architecture, json!({ "num_key_value_heads": null })).num_key_value_heads,
            6,
            "{architecture}"
        );
    }
}

#[test]
fn a_field_that_changes_logits_is_read_or_refused() {
    use ModelConfigError as E;
    let with = |field: &str, value: Value| {
        let mut scaling = json!({ "rope_type": "yarn", "factor": 4.0 });
        scaling[field] = value;
        parse(Architecture::Llama, json!({ "rope_scaling": scaling }))
    };
    let plain = with("factor", json!(4.0)).unwrap();
    for (field, value) in [
        ("attn_factor", json!(0.5)),
        ("extrapolation_factor", json!(2)),
        ("apply_yarn_scaling", json!(false)),
        ("short_mscale", json!(1.0)),
        ("llama_4_scaling_beta", json!(0.1)),
        ("sliding_attention", json!({ "rope_type": "default" })),
    ] {
        let error = with(field, value).expect_err("must be refused");
        assert!(
            matches!(&error, E::UnreadRopeField { field: named, .. } if named == field),
            "{error}"
        );
    }
    for (field, value) in [
        ("attn_factor", json!(1)),
        ("apply_yarn_scaling", json!(true)),
        ("finetuned", json!(true)),
        ("low_freq_factor", json!(2.0)),
    ] {
        assert_eq!(with(field, value).unwrap(), plain, "{field}");
    }
    let error = refused(json!({ "rope_scaling": { "rope_type": "yarn", "factor": "four" } }));
    assert!(
        matches!(
            &error,
            E::RopeField {
                field: "factor",
                ..
            }
        ),
        "{error}"
    );
    assert!(matches!(
        refused(json!({ "rope_scaling": { "type": "yarn" } })),
        E::MissingRopeField {
            field: "factor",
            rope_type: "yarn"
        }
    ));
    for (field, value) in [
        ("factor", json!(0.0)),
        ("beta_fast", json!(-1.0)),
        ("attention_factor", json!(-2.0)),
        ("mscale", json!(-1e308)),
    ] {
        let both =
            json!({ "rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0, field: value });
        assert!(
            matches!(
                refused(json!({ "rope_scaling": both })),
                E::NotPositive { .. }
            ),
            "{field}"
        );
    }
    let base = refused(
        json!({ "rope_theta": 1.0, "rope_scaling": { "rope_type": "yarn", "factor": 4.0 } }),
    );
    assert!(
        matches!(
            base,
            E::Unsupported {
                field: "rope_theta",
                ..
            }
        ),
        "{base}"
    );
    let scaling = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0 });
    let llama3 =
        parse(Architecture::Phi3, json!({ "rope_scaling": scaling })).expect_err("not of Phi-3");
    assert!(
        matches!(
            llama3,
            E::NotOfArchitecture {
                field: "rope_type",
                architecture: Architecture::Phi3,
                ..
            }
        ),
        "{llama3}"
    );
}
