//! Tests that invalid input is refused, with an error message that has the expected names and
//! numbers.

use std::ops::ControlFlow;
use std::path::Path;

use burn::tensor::{Device, FloatDType};
use marlin_format::checkpoint::Dtype;
use serde_json::json;

use super::support::*;
use crate::{LanguageModel, Model, ModelConfig, ModelError, OpenOptions, TextError, save_float};

fn open_error(dir: &Path, options: &OpenOptions) -> ModelError {
    LanguageModel::open(dir, &Device::flex(), options).expect_err("must be refused")
}

/// Returns the messages of an error and of its causes.
fn message(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source())
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}

#[track_caller]
fn assert_says(error: &ModelError, words: &[&str]) {
    let message = message(error);
    for word in words {
        assert!(message.contains(word), "`{word}` is not in `{message}`");
    }
}

/// Writes the folder of a valid model whose config and weights `change` has modified.
fn folder(
    change: impl FnOnce(&mut ModelConfig, &mut Weights),
) -> (tempfile::TempDir, std::path::PathBuf) {
    let mut config = config();
    let mut weights = random_weights(&config, &mut rng());
    change(&mut config, &mut weights);
    let (parent, dir) = temporary();
    write_folder(&dir, &config, &weights, Dtype::F32);
    (parent, dir)
}

#[test]
fn missing_files_are_named() {
    let (parent, dir) = temporary();
    assert_says(
        &open_error(&dir, &options()),
        &["cannot read", "config.json"],
    );
    drop(parent);

    let (_parent, dir) = folder(|_, _| {});
    let with_tokenizer = OpenOptions {
        with_tokenizer: true,
        ..options()
    };
    assert_says(
        &open_error(&dir, &with_tokenizer),
        &["cannot read", "tokenizer.json"],
    );
    std::fs::write(dir.join("tokenizer.json"), "{\"version\": 3}").unwrap();
    let error = open_error(&dir, &with_tokenizer);
    assert!(matches!(
        error,
        ModelError::Text(TextError::Tokenizer { .. })
    ));
    assert_says(&error, &["tokenizer.json"]);
    std::fs::remove_file(dir.join("model.safetensors")).unwrap();
    assert_says(&open_error(&dir, &options()), &["model.safetensors"]);
}

#[test]
fn the_folder_of_an_adapter_is_named() {
    let (_parent, dir) = temporary();
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("adapter_config.json"), "{}").unwrap();
    assert_says(
        &open_error(&dir, &options()),
        &["LoRA adapter", dir.to_str().unwrap()],
    );
}

/// Reading a pipe would block, and reading a device would never end.
#[cfg(unix)]
#[test]
fn only_regular_files_of_a_sensible_size_are_read() {
    use std::os::unix::fs::symlink;
    let with_tokenizer = OpenOptions {
        with_tokenizer: true,
        ..options()
    };
    for name in [
        "config.json",
        "generation_config.json",
        "quantize_config.json",
        "tokenizer.json",
    ] {
        let (_parent, dir) = folder(|_, _| {});
        let path = dir.join(name);
        let put: [&dyn Fn(); 4] = [
            &|| symlink("/dev/zero", &path).unwrap(),
            &|| {
                assert!(
                    std::process::Command::new("mkfifo")
                        .arg(&path)
                        .status()
                        .unwrap()
                        .success()
                )
            },
            &|| std::fs::create_dir(&path).unwrap(),
            &|| symlink(&path, &path).unwrap(),
        ];
        for put in put {
            _ = std::fs::remove_file(&path);
            _ = std::fs::remove_dir(&path);
            put();
            assert_says(&open_error(&dir, &with_tokenizer), &["cannot read", name]);
        }
        std::fs::remove_file(&path).unwrap();
        std::fs::File::create(&path)
            .unwrap()
            .set_len(257 << 20)
            .unwrap();
        assert_says(
            &open_error(&dir, &with_tokenizer),
            &[name, "is it the right one?"],
        );
    }
}

#[test]
fn a_token_that_only_the_tokenizer_has_is_refused_in_a_prompt() {
    let (_parent, dir) = folder(|_, _| {});
    std::fs::write(
        dir.join("tokenizer.json"),
        byte_level_tokenizer().to_string(),
    )
    .unwrap();
    let options = OpenOptions {
        with_tokenizer: true,
        ..options()
    };
    let llama = LanguageModel::open(&dir, &Device::flex(), &options).unwrap();
    let prompt = llama.tokenizer().unwrap().encode_rendered("AB").unwrap();
    let options = llama.default_options(2);
    assert_eq!(
        llama
            .generate_from(prompt, &options, |_| ControlFlow::Continue(()))
            .unwrap()
            .prompt_tokens,
        2
    );
    let error = llama
        .generate("AB", &options, |_| ControlFlow::Continue(()))
        .expect_err("the token that starts texts is none of the model's");
    assert!(matches!(
        error,
        ModelError::Text(TextError::TokenOutsideVocabulary {
            id: 256,
            vocab_size: 71,
            ..
        })
    ));
    assert_says(&error, &["tokenizer.json", "`<s>`", "256", "71"]);
}

#[test]
fn missing_surplus_and_misshaped_tensors_are_named() {
    let name = "model.layers.1.self_attn.k_proj.weight";
    let (_parent, dir) = folder(|_, weights| _ = weights.remove(name));
    assert_says(
        &open_error(&dir, &options()),
        &[name, dir.to_str().unwrap()],
    );

    let (_parent, dir) =
        folder(|_, weights| _ = weights.insert(name.into(), (vec![13, 36], vec![0.0; 13 * 36])));
    assert_says(
        &open_error(&dir, &options()),
        &["model.safetensors", name, "[13, 36]", "[12, 36]"],
    );

    let (_parent, dir) = folder(|_, weights| {
        weights.insert(
            "model.layers.0.self_attn.q_proj.bias".into(),
            (vec![36], vec![1.0; 36]),
        );
        weights.insert(
            "model.layers.2.input_layernorm.weight".into(),
            (vec![36], vec![0.0; 36]),
        );
    });
    let error = open_error(&dir, &options());
    assert!(matches!(error, ModelError::SurplusTensors { count: 2, .. }));
    assert_says(
        &error,
        &["2 tensors", "model.layers.0.self_attn.q_proj.bias"],
    );
    // A bias of zeros has no effect and is accepted.
    let (_parent, dir) = folder(|_, weights| {
        _ = weights.insert(
            "model.layers.0.self_attn.q_proj.bias".into(),
            (vec![36], vec![0.0; 36]),
        )
    });
    assert!(LanguageModel::open(&dir, &Device::flex(), &options()).is_ok());

    let (_parent, dir) = folder(|config, _| config.tie_word_embeddings = false);
    open(&dir);
    let (_parent, dir) = folder(|_, weights| _ = weights.remove("lm_head.weight"));
    assert_says(&open_error(&dir, &options()), &["lm_head.weight"]);
}

#[test]
fn another_dtype_in_a_file_is_refused() {
    let (_parent, dir) = folder(|_, _| {});
    let data = [0u8; 36 * 8];
    let view = safetensors::tensor::TensorView::new(Dtype::F64, vec![1, 36], &data).unwrap();
    let config = config_with(json!({ "vocab_size": 1 }));
    std::fs::write(dir.join("config.json"), config.to_json().to_string()).unwrap();
    std::fs::write(
        dir.join("model.safetensors"),
        safetensors::serialize([("model.embed_tokens.weight", view)], None).unwrap(),
    )
    .unwrap();
    assert_says(
        &open_error(&dir, &options()),
        &["model.embed_tokens.weight", "F64", "F16, BF16 or F32"],
    );
}

#[test]
fn configs_are_refused_with_the_file_name() {
    let (_parent, dir) = folder(|_, _| {});
    let write = |json: serde_json::Value| {
        std::fs::write(dir.join("config.json"), json.to_string()).unwrap()
    };
    write(config_json(
        json!({ "architectures": ["Gemma2ForCausalLM"] }),
    ));
    assert_says(
        &open_error(&dir, &options()),
        &[
            "config.json",
            "Gemma2ForCausalLM",
            "LlamaForCausalLM",
            "Phi3ForCausalLM",
        ],
    );
    write(config_json(
        json!({ "quantization_config": { "quant_method": "bitsandbytes" } }),
    ));
    assert_says(
        &open_error(&dir, &options()),
        &[
            "config.json",
            "quant_method",
            "bitsandbytes",
            "gptq",
            "compressed-tensors",
            "modelopt",
        ],
    );
    // A file with float weights, beside a config that declares 4-bit weights.
    let quantization = marlin_format::checkpoint::compressed_tensors::QuantizationConfig::new(
        marlin_format::QuantSpec::int4(marlin_format::GroupSize::Channel),
        vec!["lm_head".into()],
    );
    write(config_json(
        json!({ "quantization_config": quantization.unwrap().to_json() }),
    ));
    assert_says(
        &open_error(&dir, &options()),
        &["model.layers.0.self_attn.q_proj.weight_"],
    );

    write(config_json(json!({})));
    std::fs::write(dir.join("generation_config.json"), "[1").unwrap();
    assert_says(&open_error(&dir, &options()), &["generation_config.json"]);
    std::fs::write(
        dir.join("generation_config.json"),
        r#"{"do_sample": true, "top_p": 1.5}"#,
    )
    .unwrap();
    assert_says(
        &open_error(&dir, &options()),
        &["generation_config.json", "top_p is 1.5"],
    );
}

#[test]
fn lengths_beyond_the_model_are_refused_with_both_numbers() {
    let (_parent, dir) = folder(|_, _| {});
    for asked in [0, 97] {
        let error = open_error(
            &dir,
            &OpenOptions {
                max_len: Some(asked),
                ..options()
            },
        );
        assert!(matches!(error, ModelError::MaxLen { limit: 96, .. }));
        assert_says(&error, &[&asked.to_string(), "96"]);
    }
}

#[test]
fn a_model_that_cannot_be_saved_leaves_nothing() {
    let config = config();
    let mut model = Model::new(&config, &Device::flex());
    let (_parent, dir) = temporary();
    assert!(matches!(
        save_float(&model, &config, &dir, FloatDType::F64),
        Err(ModelError::SaveDtype {
            found: FloatDType::F64
        })
    ));

    let norm = model.layers[1].mixer_norm.weight.val();
    model.layers[1].mixer_norm.weight = crate::model::loaded(norm.slice_fill(3..4, 1e5));
    let error = save_float(&model, &config, &dir, FloatDType::F16)
        .expect_err("1e5 is above the largest f16");
    assert!(matches!(
        error,
        ModelError::NotRepresentable {
            index: 3,
            dtype: FloatDType::F16,
            ..
        }
    ));
    assert_says(&error, &["model.layers.1.input_layernorm.weight", "100000"]);
    assert_eq!(dir.parent().unwrap().read_dir().unwrap().count(), 0);

    save_float(&model, &config, &dir, FloatDType::BF16).unwrap();
    let error =
        save_float(&model, &config, &dir, FloatDType::BF16).expect_err("the folder is there");
    assert_says(&error, &[dir.to_str().unwrap(), "not empty"]);
}

#[test]
#[should_panic(expected = "97 tokens after 0 do not fit the 96 positions")]
fn a_sequence_longer_than_the_model_panics_with_both_numbers() {
    let model = Model::new(&config(), &Device::flex());
    model.forward_full(crate::tokens::token_tensor(
        &[1; 97],
        [1, 97],
        &Device::flex(),
    ));
}
