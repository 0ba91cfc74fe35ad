//! Tests of inputs that the program refuses. The message names the file or tensor and both
//! conflicting values, and no file is left behind.

use std::ffi::OsString;
use std::path::Path;

use serde_json::json;

use crate::support::{
    Folder, args, faults, heldout, read_safetensors, refuse, run_with_input, shipped,
    write_safetensors,
};

/// Returns the arguments of every command that opens a model's weights.
fn commands(dir: &Path) -> Vec<Vec<OsString>> {
    vec![
        args!["generate", dir, "--device", "flex", "--prompt", "A"],
        args!["chat", dir, "--device", "flex"],
        args!["perplexity", dir, "--device", "flex", "--text", heldout()],
        args!["logits", dir, "--device", "flex", "--ids", "1"],
        args!["kernels", dir, "--device", "flex"],
    ]
}

#[test]
fn a_missing_folder_is_named() {
    let folder = Folder::tiny();
    let missing = folder.beside("missing");
    for args in commands(&missing) {
        refuse(&args, &["missing", "config.json", "No such file"]);
    }
    faults(&missing, &["missing", "model.safetensors"]);
    refuse(
        &args!["quantize", &missing, &folder.target],
        &["missing", "config.json"],
    );
    assert!(folder.leftovers().is_empty(), "{:?}", folder.leftovers());
}

#[test]
fn truncated_weights_are_refused_with_both_sizes() {
    let folder = Folder::tiny();
    let path = folder.source.join("model.safetensors");
    let (_, data) = read_safetensors(&path);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 100).unwrap();
    let (expected, found) = (data.len().to_string(), (data.len() - 100).to_string());
    let words = ["model.safetensors", "truncated", &expected, &found];
    for args in commands(&folder.source) {
        refuse(&args, &words);
    }
    faults(&folder.source, &words);
    refuse(&args!["quantize", &folder.source, &folder.target], &words);
    assert!(folder.leftovers().is_empty(), "{:?}", folder.leftovers());

    // The file is too short for the length of the header.
    file.set_len(5).unwrap();
    faults(&folder.source, &["model.safetensors", "5 bytes", "8 bytes"]);
}

#[test]
fn another_architecture_is_refused_with_both_names() {
    let folder = Folder::tiny();
    folder.edit_config(|config| config["architectures"] = json!(["Gemma2ForCausalLM"]));
    let words = ["config.json", "Gemma2ForCausalLM", "LlamaForCausalLM"];
    for args in commands(&folder.source) {
        refuse(&args, &words);
    }
    refuse(&args!["quantize", &folder.source, &folder.target], &words);
    assert!(folder.leftovers().is_empty(), "{:?}", folder.leftovers());

    std::fs::write(folder.source.join("config.json"), "{\"vocab_size\": 4096").unwrap();
    refuse(
        &args!["kernels", &folder.source, "--device", "flex"],
        &["config.json", "EOF", "line 1"],
    );
}

#[test]
fn a_larger_tokenizer_is_a_warning_and_a_text_with_a_token_that_the_model_lacks_is_refused() {
    let folder = Folder::with_config(json!({ "vocab_size": 1000 }));
    let generate = |prompt: &str| {
        run_with_input(
            &args![
                "generate",
                &folder.source,
                "--device",
                "flex",
                "--max-new-tokens",
                "2",
                "--prompt",
                prompt
            ],
            b"",
        )
    };
    for (prompt, code, words) in [
        ("A", 0, &["tokenizer.json", "4096", "1000"][..]),
        ("impl Iterator", 1, &["Iterator", "token 2794", "1000"][..]),
    ] {
        let run = generate(prompt);
        assert_eq!(
            run.code,
            Some(code),
            "{prompt}: {}{}",
            run.stdout,
            run.stderr
        );
        words.iter().for_each(|word| {
            assert!(
                run.stderr.contains(word),
                "{prompt}: `{word}` is not in: {}",
                run.stderr
            )
        });
    }
    std::fs::write(folder.source.join("tokenizer.json"), "{}").unwrap();
    refuse(&commands(&folder.source)[0], &["tokenizer.json"]);
}

#[test]
fn scales_that_are_no_numbers_are_refused() {
    let folder = Folder::tiny_quantized();
    let (path, layer) = (
        folder.target.join("model.safetensors"),
        "model.layers.1.self_attn.v_proj",
    );
    let (header, mut data) = read_safetensors(&path);
    let start = header[format!("{layer}.weight_scale")]["data_offsets"][0]
        .as_u64()
        .unwrap() as usize;
    // The scales are [N, groups], with two groups for each column.
    data[start + 2 * 5..][..2].copy_from_slice(&0x7e00u16.to_le_bytes());
    write_safetensors(&path, &header, &data);
    for args in commands(&folder.target) {
        refuse(&args, &[layer, "scale", "group 1, column 2", "NaN"]);
    }
}

#[test]
fn another_dtype_is_refused_with_both_names() {
    let folder = Folder::tiny_quantized();
    for (dir, tensor, found, expected) in [
        (
            &folder.source,
            "model.norm.weight",
            "I16",
            "F16, BF16 or F32",
        ),
        (
            &folder.target,
            "model.layers.0.mlp.up_proj.weight_packed",
            "F32",
            "I32",
        ),
        (
            &folder.target,
            "model.layers.0.mlp.up_proj.weight_scale",
            "I16",
            "F16, BF16 or F32",
        ),
    ] {
        let path = dir.join("model.safetensors");
        let (header, data) = read_safetensors(&path);
        let mut changed = header.clone();
        changed[tensor]["dtype"] = found.into();
        write_safetensors(&path, &changed, &data);
        refuse(
            &args!["logits", dir, "--device", "flex", "--ids", "1"],
            &["model.safetensors", tensor, found, expected],
        );
        write_safetensors(&path, &header, &data);
    }
}

#[test]
fn a_shape_that_contradicts_the_packed_weight_is_refused() {
    let folder = Folder::tiny_quantized();
    let (path, layer) = (
        folder.target.join("model.safetensors"),
        "model.layers.0.mlp.up_proj",
    );
    let (header, data) = read_safetensors(&path);
    let start = header[format!("{layer}.weight_shape")]["data_offsets"][0]
        .as_u64()
        .unwrap() as usize;
    for n in [513, -1, i64::MAX] {
        let mut data = data.clone();
        data[start..start + 8].copy_from_slice(&n.to_le_bytes());
        write_safetensors(&path, &header, &data);
        assert_eq!(
            faults(&folder.target, &["model.safetensors", layer]).len(),
            1
        );
        refuse(
            &args!["logits", &folder.target, "--device", "flex", "--ids", "1"],
            &[layer],
        );
    }
}

#[test]
fn prompts_that_do_not_fit_are_refused() {
    let model = shipped();
    let generate = |prompt: &str| {
        args![
            "generate",
            &model,
            "--device",
            "flex",
            "--max-len",
            "8",
            "--json",
            "--prompt",
            prompt
        ]
    };
    refuse(&generate(""), &["prompt has no tokens"]);
    refuse(
        &generate("a b c d e f g h i j k l m n o p"),
        &["the prompt has ", "room for 8"],
    );
    refuse(
        &args![
            "generate",
            &model,
            "--device",
            "flex",
            "--max-len",
            "513",
            "--prompt",
            "A"
        ],
        &["513", "512"],
    );
    refuse(
        &args![
            "generate",
            &model,
            "--device",
            "flex",
            "--max-len",
            "0",
            "--prompt",
            "A"
        ],
        &["0 positions", "512"],
    );
}

#[test]
fn sampling_outside_its_range_is_refused() {
    for (option, value) in [
        ("--temperature", "NaN"),
        ("--top-p", "1.5"),
        ("--top-k", "0"),
        ("--min-p", "-1"),
        ("--repetition-penalty", "-2"),
        ("--presence-penalty", "inf"),
        ("--frequency-penalty", "NaN"),
    ] {
        let option = format!("{option}={value}");
        refuse(
            &args![
                "generate",
                shipped(),
                "--device",
                "flex",
                "--prompt",
                "A",
                "--json",
                option
            ],
            &[value],
        );
    }
}

#[test]
fn token_ids_outside_the_vocabulary_or_the_cache_are_refused() {
    let logits = |ids: &str| {
        args![
            "logits",
            shipped(),
            "--device",
            "flex",
            "--max-len",
            "4",
            "--ids",
            ids
        ]
    };
    refuse(&logits("1,4096"), &["--ids", "4096"]);
    refuse(&logits("4294967295"), &["--ids", "4294967295", "4096"]);
    refuse(&logits("1,2,3,4,5"), &["--ids", "5 tokens", "cache of 4"]);
}

#[test]
fn texts_that_perplexity_cannot_use_are_refused() {
    let folder = Folder::tiny();
    let text = folder.beside("text.txt");
    let perplexity = |window: &str| {
        args![
            "perplexity",
            &folder.source,
            "--device",
            "flex",
            "--text",
            &text,
            "--window",
            window
        ]
    };
    refuse(&perplexity("8"), &["text.txt", "No such file"]);
    std::fs::write(&text, b"caf\xe9 au lait").unwrap();
    refuse(&perplexity("8"), &["text.txt", "not UTF-8"]);
    std::fs::write(&text, "").unwrap();
    refuse(&perplexity("8"), &["0 tokens", "2"]);
    std::fs::write(&text, "a text of a few words").unwrap();
    refuse(&perplexity("65"), &["65", "64"]);
    refuse(&perplexity("1"), &["window of 1"]);
}

#[test]
fn a_conversation_that_is_not_utf8_is_refused() {
    let run = run_with_input(&args!["chat", shipped(), "--device", "flex"], b"caf\xe9\n");
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(
        run.stderr.contains("error: the input could not be read") && run.stderr.contains("UTF-8"),
        "{}",
        run.stderr
    );
}

/// Checks anything only on a machine without an NVIDIA GPU; with one, the device is not refused.
#[test]
fn a_device_that_is_not_there_is_refused_by_name() {
    #[cfg(feature = "cuda")]
    let present = !burn::tensor::Device::enumerate(burn::tensor::DeviceType::Cuda).is_empty();
    #[cfg(not(feature = "cuda"))]
    let present = false;
    if !present {
        refuse(
            &args!["kernels", shipped(), "--device", "cuda"],
            &["--device cuda", "no such device"],
        );
    }
}

#[test]
fn arguments_that_do_not_parse_are_usage_errors() {
    for args in [
        args!["quantize", shipped(), "out", "--group", "g48"],
        args!["quantize", shipped(), "out", "--bits", "3"],
        args!["quantize", shipped(), "out", "--format", "awq"],
        args!["logits", shipped(), "--ids", "1,two"],
        args!["kernels", shipped(), "--device", "tpu"],
        args!["generate", shipped()],
    ] {
        let run = run_with_input(&args, b"");
        assert_eq!(run.code, Some(2), "{args:?}: {}", run.stderr);
        assert!(
            run.stderr.contains("--help") || run.stderr.contains("Usage"),
            "{}",
            run.stderr
        );
    }
}
