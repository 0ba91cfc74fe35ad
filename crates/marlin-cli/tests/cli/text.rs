//! `generate`, `chat`, `perplexity`, `logits` and `kernels`.

use std::ffi::OsString;
use std::io::Read;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Folder, args, cells, command, heldout, refuse, run_with_input, shipped, succeed, succeed_json};

const PROMPT: &str = "Once upon a time";

/// Arguments of `generate` on the shipped model.
fn generate(dir: &Path, more: &[&str]) -> Vec<OsString> {
    let mut args = args!["generate", dir, "--device", "flex", "--prompt", PROMPT];
    args.extend(more.iter().map(OsString::from));
    args
}

#[test]
fn greedy_text_is_the_same_streamed_and_as_json() {
    let folder = Folder::shipped_quantized();
    for dir in [&shipped(), &folder.target] {
        let greedy = ["--temperature", "0", "--max-new-tokens", "24"];
        let result = succeed_json(&generate(dir, &[&greedy[..], &["--json", "--seed", "5"]].concat()));
        let text = result["text"].as_str().unwrap();
        assert_eq!(succeed(&generate(dir, &greedy)), format!("{PROMPT}{text}\n"));
        assert_eq!(result["prompt"], PROMPT);
        assert_eq!(result["tokens"].as_array().unwrap().len(), 24);
        assert_eq!(result["stop_reason"], "as many tokens as asked for");
        assert!(result["prompt_tokens"].as_u64().unwrap() > 0);
        assert!(result["prefill_seconds"].as_f64().unwrap() > 0.0 && result["decode_seconds"].as_f64().unwrap() > 0.0);
        assert!(text.split_whitespace().count() > 4, "{text}");
    }
}

#[test]
fn speed_is_reported_beside_the_text() {
    let run = run_with_input(&generate(&shipped(), &["--max-new-tokens", "3"]), b"");
    assert_eq!(run.code, Some(0));
    let words = ["prefill: ", "decode: 2 tokens, ", " tokens/s; as many tokens as asked for"];
    assert!(words.iter().all(|word| run.stderr.contains(word)), "{}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "log lines of dependencies: {}", run.stderr);
}

#[test]
fn a_seed_gives_one_text_and_another_seed_another() {
    let tokens = |seed: &str| {
        let sampled = ["--temperature", "1", "--top-k", "1000", "--top-p", "1", "--repetition-penalty", "1.05", "--max-new-tokens", "24"];
        succeed_json(&generate(&shipped(), &[&sampled[..], &["--json", "--seed", seed]].concat()))["tokens"].clone()
    };
    let first = tokens("1");
    assert_eq!(first, tokens("1"));
    assert_ne!(first, tokens("2"));
}

#[test]
fn min_p_of_1_is_greedy_and_fields_that_are_not_applied_are_named() {
    let folder = Folder::tiny();
    let tokens =
        |more: &[&str]| succeed_json(&generate(&folder.source, &[more, &["--json", "--max-new-tokens", "12"]].concat()))["tokens"].clone();
    let write = |config: Value| std::fs::write(folder.source.join("generation_config.json"), config.to_string()).unwrap();
    let greedy = tokens(&["--temperature", "0"]);
    write(json!({ "do_sample": true, "top_k": 0, "min_p": 1.0 }));
    assert_eq!(tokens(&[]), greedy);
    assert_ne!(tokens(&["--min-p", "0"]), greedy);

    write(json!({ "do_sample": true, "top_k": 0, "typical_p": 0.9, "no_repeat_ngram_size": 3, "num_beams": 1 }));
    let run = run_with_input(&generate(&folder.source, &["--min-p", "1", "--json", "--max-new-tokens", "12"]), b"");
    assert_eq!(serde_json::from_str::<Value>(&run.stdout).unwrap()["tokens"], greedy);
    let words = ["WARN", "generation_config.json", "typical_p: 0.9", "no_repeat_ngram_size: 3"];
    assert!(words.iter().all(|word| run.stderr.contains(word)) && !run.stderr.contains("num_beams"), "{}", run.stderr);
}

#[test]
fn generation_ends_with_the_limit_or_the_cache() {
    let none = succeed_json(&generate(&shipped(), &["--max-new-tokens", "0", "--json"]));
    assert_eq!(none["tokens"].as_array().unwrap().len(), 0);
    assert_eq!(none["text"], "");

    let full = succeed_json(&generate(&shipped(), &["--max-len", "8", "--temperature", "0", "--json"]));
    assert_eq!(full["stop_reason"], "the cache is full");
    // The last token is chosen from eight positions and needs none.
    assert_eq!(full["prompt_tokens"].as_u64().unwrap() + full["tokens"].as_array().unwrap().len() as u64, 9);
}

/// The program's answer to a conversation so far, by `generate`.
fn answer(dir: &Path, history: &str) -> String {
    let args = args!["generate", dir, "--device", "flex", "--prompt", history, "--temperature", "0", "--max-new-tokens", "12", "--json"];
    succeed_json(&args)["text"].as_str().unwrap().to_owned()
}

/// Arguments of `chat` with answers that do not depend on chance.
fn chat(dir: &Path, more: &[&str]) -> Vec<OsString> {
    let mut args = args!["chat", dir, "--device", "flex", "--temperature", "0", "--max-new-tokens", "12"];
    args.extend(more.iter().map(OsString::from));
    args
}

/// A prompt may be longer than an argument, of which Linux takes 128 kB.
#[test]
fn a_prompt_comes_from_a_file_or_from_standard_input() {
    let folder = Folder::tiny();
    let with = |more: &[OsString]| {
        let mut args = args!["generate", shipped(), "--device", "flex", "--temperature", "0", "--max-new-tokens", "8"];
        args.extend(more.iter().cloned());
        args
    };
    let prompt = "/// Returns the number of\n\t\"ü\"\n";
    let expected = succeed(&with(&args!["--prompt", prompt]));
    let path = folder.beside("prompt.txt");
    std::fs::write(&path, prompt).unwrap();
    assert_eq!(succeed(&with(&args!["--prompt-file", &path])), expected);
    let run = run_with_input(&with(&args!["--prompt-file", "-"]), prompt.as_bytes());
    assert_eq!((run.code, run.stdout), (Some(0), expected), "{}", run.stderr);

    // All of it is read: 200 kB are more tokens than the model has positions.
    let long = "word ".repeat(40_000);
    std::fs::write(&path, &long).unwrap();
    refuse(&with(&args!["--prompt-file", &path]), &["the prompt has ", "512"]);
    let run = run_with_input(&with(&args!["--prompt-file", "-"]), long.as_bytes());
    assert!(run.code == Some(1) && run.stderr.contains("the prompt has "), "{}", run.stderr);

    std::fs::write(&path, b"caf\xe9").unwrap();
    refuse(&with(&args!["--prompt-file", &path]), &["prompt.txt", "not UTF-8"]);
    let run = run_with_input(&with(&args!["--prompt-file", "-"]), b"caf\xe9");
    assert!(run.code == Some(1) && run.stderr.contains("standard input: the text is not UTF-8"), "{}", run.stderr);
    refuse(&with(&args!["--prompt-file", folder.beside("missing.txt")]), &["missing.txt", "No such file"]);
    for both in [args!["--prompt-file", &path, "--prompt", "A"], args![]] {
        let run = run_with_input(&with(&both), b"");
        assert!(run.code == Some(2) && run.stderr.contains("--prompt"), "{}", run.stderr);
    }

    std::fs::write(&path, "Be brief.").unwrap();
    let chat = |more: &[OsString]| {
        let mut args = chat(&shipped(), &[]);
        args.extend(more.iter().cloned());
        let run = run_with_input(&args, b"Where is the dog?\n");
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        run.stdout
    };
    assert_eq!(chat(&args!["--system-file", &path]), chat(&args!["--system", "Be brief."]));
}

#[test]
fn the_text_ends_where_nobody_reads_it() {
    let args = generate(&shipped(), &["--temperature", "0", "--repetition-penalty", "1.3", "--max-new-tokens", "400"]);
    let mut child = command(&args).env("RUST_LOG", "marlin_llama=debug").spawn().unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(!stderr.contains("error:") && !stderr.contains("decode: "), "{stderr}");
    let end = stderr.lines().find(|line| line.contains("the text ended")).unwrap();
    assert!(end.contains("Stopped"), "{end}");
}

#[test]
fn chat_remembers_the_turns_before() {
    let run = run_with_input(&chat(&shipped(), &["--system", "Be brief."]), b"Where is the dog?\nWhat did it eat?\n\nnot read\n");
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert_eq!(run.stderr.matches("no chat template").count(), 1, "{}", run.stderr);
    let answer = |history: &str| answer(&shipped(), history).split("\nUser:").next().unwrap().to_owned();
    let mut history = "System: Be brief.\nUser: Where is the dog?\nAssistant:".to_owned();
    let first = answer(&history);
    history.push_str(&format!("{first}\nUser: What did it eat?\nAssistant:"));
    let second = answer(&history);
    assert_eq!(run.stdout, format!("> {first}\n> {second}\n> "));
}

#[test]
fn chat_speaks_in_the_turns_of_the_models_template() {
    let template = "{{ bos_token }}{% for message in messages %}// {{ message.role }}\n{{ message.content }}\n{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}// assistant\n{% endif %}";
    let folder = Folder::shipped_with_template(template);
    let run = run_with_input(&chat(&folder.source, &["--system", "fn main() {"]), b"let x = 1;\nlet y = 2;\n");
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(!run.stderr.contains("no chat template"), "{}", run.stderr);
    let mut history = "<|endoftext|>// system\nfn main() {\n// user\nlet x = 1;\n// assistant\n".to_owned();
    let first = answer(&folder.source, &history);
    history.push_str(&format!("{first}\n<|endoftext|>// user\nlet y = 2;\n// assistant\n"));
    let second = answer(&folder.source, &history);
    assert_eq!(run.stdout, format!("> {first}\n> {second}\n> "));
}

#[test]
fn a_template_that_refuses_a_conversation_says_why() {
    let folder = Folder::shipped_with_template("{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}x");
    let run = run_with_input(&chat(&folder.source, &["--system", "Be brief."]), b"Hello\n");
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), "> "), "{}", run.stderr);
    assert!(run.stderr.contains("error: ") && run.stderr.contains("tokenizer_config.json"), "{}", run.stderr);
    assert!(run.stderr.contains("no system here"), "{}", run.stderr);

    std::fs::write(folder.source.join("chat_template.jinja"), "{% if %}").unwrap();
    let run = run_with_input(&chat(&folder.source, &[]), b"Hello\n");
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{}", run.stderr);
    assert!(run.stderr.contains("chat_template.jinja") && run.stderr.contains("syntax error"), "{}", run.stderr);
}

#[test]
fn perplexity_is_printed_with_its_tokens() {
    let args = args!["perplexity", shipped(), "--device", "flex", "--text", heldout(), "--window", "64", "--max-tokens", "130"];
    let text = succeed(&args);
    let words: Vec<&str> = text.split_whitespace().collect();
    // Two windows of 64 and one of 2, each without its first token.
    assert_eq!([words[0], words[2], words[3], words[4]], ["perplexity", "over", "127", "tokens,"], "{text}");
    assert!(words[1].parse::<f64>().unwrap() > 1.0, "{text}");
}

#[test]
fn logits_are_one_for_each_token_and_the_same_in_every_run() {
    let folder = Folder::tiny_quantized();
    for dir in [&folder.source, &folder.target] {
        for dtype in ["f32", "f16"] {
            let args = args!["logits", dir, "--device", "flex", "--dtype", dtype, "--ids", "17,4095,0,256"];
            let text = succeed(&args);
            assert_eq!(text, succeed(&args), "{dtype}");
            let result: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(result["ids"], serde_json::json!([17, 4095, 0, 256]));
            let logits: Vec<f64> = result["logits"].as_array().unwrap().iter().map(|logit| logit.as_f64().unwrap()).collect();
            assert_eq!(logits.len(), 4096);
            assert!(logits.iter().all(|logit| logit.is_finite()) && logits.iter().any(|&logit| logit != logits[0]));
        }
    }
}

#[test]
fn kernels_name_what_runs_each_layer_and_why() {
    let folder = Folder::tiny_quantized();
    let kernels = succeed_json(&args!["kernels", &folder.target, "--device", "flex", "--rows", "1,8,9,512", "--json"]);
    let rows = kernels.as_array().unwrap();
    // q, k, v are one matmul, and gate, up: four a layer, and the head.
    assert_eq!(rows.len(), (2 * 4 + 1) * 4);
    let (head, layers): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row["layer"] == "lm_head");
    assert_eq!(
        head.iter().map(|row| row["kernel"].as_str().unwrap()).collect::<Vec<_>>(),
        ["host", "host", "Burn's matmul", "Burn's matmul"]
    );
    // The norms before the layers' inputs, but for the first one, are part of their matmuls.
    let after_norm = layers.iter().filter(|row| row["prologue"] == "norm before").count();
    assert_eq!(after_norm, 3 * 4);
    // SwiGLU is part of gate and up's.
    let with_swiglu: Vec<_> = layers.iter().filter(|row| row["epilogue"] == "SwiGLU after").collect();
    assert_eq!(with_swiglu.len(), 2 * 4);
    assert!(with_swiglu.iter().all(|row| row["layer"].as_str().unwrap().ends_with("gate_up_proj")), "{with_swiglu:?}");
    for row in layers {
        // Whatever the rows.
        assert_eq!(row["kernel"], "host", "{row}");
        assert!(row["reason"].as_str().unwrap().contains("Flex"), "{row}");
        assert_eq!(row["format"], "int4 g128 f16");
    }
    let row = rows.iter().find(|row| row["layer"] == "model.layers.1.mlp.gate_up_proj").unwrap();
    assert_eq!([&row["k"], &row["n"]], [256, 1024]);

    // The two layers are equal but for the norm before the first one: their other three matmuls have a line each for both M.
    let print = |more: Option<&str>| {
        let mut args = args!["kernels", &folder.target, "--device", "flex"];
        args.extend(more.map(Into::into));
        succeed(&args)
    };
    let folded = print(None);
    let rows: Vec<_> = folded.lines().map(cells).collect();
    assert_eq!(rows.len(), 1 + (2 + 3 + 1) * 2, "{folded}");
    assert_eq!(rows[0], ["layer", "count", "K", "N", "M", "format", "prologue", "epilogue", "kernel", "reason"]);
    for m in ["1", "512"] {
        let row = ["model.layers.0..1.self_attn.o_proj", "2", "256", "256", m, "int4 g128 f16", "none", "none", "host"];
        assert_eq!(rows.iter().filter(|cells| cells.starts_with(&row)).count(), 1, "{row:?} in {folded}");
    }
    let all = print(Some("--all"));
    let rows: Vec<_> = all.lines().map(cells).collect();
    assert_eq!(rows.len(), 1 + (8 + 1) * 2, "{all}");
    assert_eq!(rows[0], ["layer", "K", "N", "M", "format", "prologue", "epilogue", "kernel", "reason"]);
    for layer in ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"] {
        let row = [layer, "256", "256", "512", "int4 g128 f16", "none", "none", "host"];
        assert_eq!(rows.iter().filter(|cells| cells.starts_with(&row)).count(), 1, "{row:?} in {all}");
    }

    let float = succeed_json(&args!["kernels", &folder.source, "--device", "flex", "--json"]);
    for row in float.as_array().unwrap() {
        assert_eq!(row["kernel"], if row["rows"] == 1 { "host" } else { "Burn's matmul" });
        assert!(row["reason"].as_str().unwrap().contains("float"));
    }
}

#[test]
fn a_kernel_cache_that_cannot_be_written_is_a_warning() {
    let folder = Folder::tiny();
    let kernels = |cache: &Path| {
        let output = command(&args!["kernels", &folder.source, "--device", "cpu"]).env("BURN_MARLIN_CACHE", cache).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let cache = folder.beside("cache");
    assert_eq!(kernels(&cache), "");
    assert!(cache.is_dir());
    let file = folder.beside("file");
    std::fs::write(&file, "").unwrap();
    let warning = kernels(&file);
    assert!(warning.contains("compiled kernels are not kept") && warning.contains("BURN_MARLIN_CACHE"), "{warning}");
}
