use serde_json::json;

use super::*;

fn fields(config: Value) -> Vec<String> {
    not_applied(config.as_object().unwrap())
}

#[test]
fn fields_that_are_not_applied_are_named_unless_they_change_nothing() {
    // Defaults as transformers 5.24 writes them, fields that are applied, and fields that do not
    // concern the choice of a token.
    let neutral = json!({
        "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "num_beams": 1,
        "num_return_sequences": 1, "encoder_repetition_penalty": 1.0, "guidance_scale": null, "remove_invalid_values": false,
        "begin_suppress_tokens": [], "sequence_bias": {}, "forced_bos_token_id": null, "penalty_alpha": 0, "top_h": null, "token_healing": false,
        "temperature": 0.6, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "suppress_tokens": [1], "bad_words_ids": [[2]],
        "min_new_tokens": 3, "min_length": 4, "max_length": 4096, "max_new_tokens": 512, "pad_token_id": 0, "use_cache": true,
        "length_penalty": 0.5, "early_stopping": true, "transformers_version": "5.24.0", "unknown": 7,
    });
    assert_eq!(fields(neutral), [""; 0]);
    for (field, value) in [
        ("begin_suppress_tokens", json!([220])),
        ("constraints", json!([{}])),
        ("dola_layers", json!("high")),
        ("encoder_no_repeat_ngram_size", json!(2)),
        ("encoder_repetition_penalty", json!(1.5)),
        ("epsilon_cutoff", json!(3e-4)),
        ("eta_cutoff", json!(3e-4)),
        ("exponential_decay_length_penalty", json!([10, 1.1])),
        ("force_words_ids", json!([[1]])),
        ("forced_bos_token_id", json!(0)),
        ("forced_eos_token_id", json!([2])),
        ("guidance_scale", json!(1.5)),
        ("max_time", json!(0.5)),
        ("no_repeat_ngram_size", json!(3)),
        ("num_beams", json!(4)),
        ("num_return_sequences", json!(2)),
        ("penalty_alpha", json!(0.6)),
        ("remove_invalid_values", json!(true)),
        ("sequence_bias", json!([[[1], 2.0]])),
        ("stop_strings", json!("\n")),
        ("token_healing", json!(true)),
        ("top_h", json!(0.4)),
        ("typical_p", json!(0.95)),
        ("watermarking_config", json!({ "bias": 2.0 })),
    ] {
        assert_eq!(
            fields(json!({ "top_k": 3, field: value })),
            [format!("{field}: {value}")]
        );
    }
    assert_eq!(
        fields(json!({ "typical_p": 0.5, "num_beams": 2 })),
        ["num_beams: 2", "typical_p: 0.5"]
    );
}
