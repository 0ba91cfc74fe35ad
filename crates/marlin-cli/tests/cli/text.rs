//! Tests of `generate`, `perplexity` and `logits`.

use std::ffi::OsString;
use std::io::Read;
use std::path::Path;

use serde_json::{Value, json};

use crate::chat::chat;
use crate::support::{
    Folder, args, command, heldout, refuse, run_with_input, shipped, succeed, succeed_json,
};

const PROMPT: &str = "Once upon a time";

/// Returns arguments of `generate` for a model and a fixed prompt.
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
        let result = succeed_json(&generate(
            dir,
            &[&greedy[..], &["--json", "--seed", "5"]].concat(),
        ));
        let text = result["text"].as_str().unwrap();
        assert_eq!(
            succeed(&generate(dir, &greedy)),
            format!("{PROMPT}{text}\n")
        );
        assert_eq!(result["prompt"], PROMPT);
        assert_eq!(result["tokens"].as_array().unwrap().len(), 24);
        assert_eq!(result["stop_reason"], "as many tokens as asked for");
        assert!(result["prompt_tokens"].as_u64().unwrap() > 0);
        assert!(
            result["prefill_seconds"].as_f64().unwrap() > 0.0
                && result["decode_seconds"].as_f64().unwrap() > 0.0
        );
        assert!(text.split_whitespace().count() > 4, "{text}");
    }
}

#[test]
fn speed_is_reported_beside_the_text() {
    let run = run_with_input(&generate(&shipped(), &["--max-new-tokens", "3"]), b"");
    assert_eq!(run.code, Some(0));
    let words = [
        "prefill: ",
        "decode: 2 tokens, ",
        " tokens/s; as many tokens as asked for",
    ];
    assert!(
        words.iter().all(|word| run.stderr.contains(word)),
        "{}",
        run.stderr
    );
    assert_eq!(
        run.stderr.lines().count(),
        1,
        "log lines of dependencies: {}",
        run.stderr
    );
}

#[test]
fn a_seed_gives_one_text_and_another_seed_another() {
    let tokens = |seed: &str| {
        let sampled = [
            "--temperature",
            "1",
            "--top-k",
            "1000",
            "--top-p",
            "1",
            "--repetition-penalty",
            "1.05",
            "--max-new-tokens",
            "24",
        ];
        succeed_json(&generate(
            &shipped(),
            &[&sampled[..], &["--json", "--seed", seed]].concat(),
        ))["tokens"]
            .clone()
    };
    let first = tokens("1");
    assert_eq!(first, tokens("1"));
    assert_ne!(first, tokens("2"));
}

#[test]
fn a_token_with_a_large_penalty_comes_once() {
    let repeats = |penalty: &[&str]| {
        let options = ["--temperature", "0", "--max-new-tokens", "64", "--json"];
        let printed = succeed_json(&generate(&shipped(), &[&options, penalty].concat()));
        let mut tokens: Vec<_> = printed["tokens"].as_array().unwrap().clone();
        let count = tokens.len();
        tokens.sort_by_key(Value::as_u64);
        tokens.dedup();
        count - tokens.len()
    };
    assert!(repeats(&[]) > 0);
    for option in ["--presence-penalty", "--frequency-penalty"] {
        assert_eq!(repeats(&[option, "1000"]), 0, "{option}");
    }
}

#[test]
fn min_p_of_1_is_greedy_and_fields_that_are_not_applied_are_named() {
    let folder = Folder::tiny();
    let tokens = |more: &[&str]| {
        succeed_json(&generate(
            &folder.source,
            &[more, &["--json", "--max-new-tokens", "12"]].concat(),
        ))["tokens"]
            .clone()
    };
    let write = |config: Value| {
        std::fs::write(
            folder.source.join("generation_config.json"),
            config.to_string(),
        )
        .unwrap()
    };
    let greedy = tokens(&["--temperature", "0"]);
    write(json!({ "do_sample": true, "top_k": 0, "min_p": 1.0 }));
    assert_eq!(tokens(&[]), greedy);
    assert_ne!(tokens(&["--min-p", "0"]), greedy);

    write(
        json!({ "do_sample": true, "top_k": 0, "typical_p": 0.9, "no_repeat_ngram_size": 3, "num_beams": 1 }),
    );
    let run = run_with_input(
        &generate(
            &folder.source,
            &["--min-p", "1", "--json", "--max-new-tokens", "12"],
        ),
        b"",
    );
    assert_eq!(
        serde_json::from_str::<Value>(&run.stdout).unwrap()["tokens"],
        greedy
    );
    let words = [
        "WARN",
        "generation_config.json",
        "typical_p: 0.9",
        "no_repeat_ngram_size: 3",
    ];
    assert!(
        words.iter().all(|word| run.stderr.contains(word)) && !run.stderr.contains("num_beams"),
        "{}",
        run.stderr
    );
}

#[test]
fn generation_ends_with_the_limit_or_the_cache() {
    let none = succeed_json(&generate(&shipped(), &["--max-new-tokens", "0", "--json"]));
    assert_eq!(none["tokens"].as_array().unwrap().len(), 0);
    assert_eq!(none["text"], "");

    let full = succeed_json(&generate(
        &shipped(),
        &["--max-len", "8", "--temperature", "0", "--json"],
    ));
    assert_eq!(full["stop_reason"], "the cache is full");
    // The last token is chosen from the logits of the eighth position and takes no position itself.
    assert_eq!(
        full["prompt_tokens"].as_u64().unwrap() + full["tokens"].as_array().unwrap().len() as u64,
        9
    );
}

/// A prompt may be longer than an argument, which Linux limits to 128 kB.
#[test]
fn a_prompt_comes_from_a_file_or_from_standard_input() {
    let folder = Folder::tiny();
    let with = |more: &[OsString]| {
        let mut args = args![
            "generate",
            shipped(),
            "--device",
            "flex",
            "--temperature",
            "0",
            "--max-new-tokens",
            "8"
        ];
        args.extend(more.iter().cloned());
        args
    };
    let prompt = "/// Returns the number of\n\t\"ü\"\n";
    let expected = succeed(&with(&args!["--prompt", prompt]));
    let path = folder.beside("prompt.txt");
    std::fs::write(&path, prompt).unwrap();
    assert_eq!(succeed(&with(&args!["--prompt-file", &path])), expected);
    let run = run_with_input(&with(&args!["--prompt-file", "-"]), prompt.as_bytes());
    assert_eq!(
        (run.code, run.stdout),
        (Some(0), expected),
        "{}",
        run.stderr
    );

    // The whole file is read: its 200 kB have more tokens than the model has positions.
    let long = "word ".repeat(40_000);
    std::fs::write(&path, &long).unwrap();
    refuse(
        &with(&args!["--prompt-file", &path]),
        &["the prompt has ", "512"],
    );
    let run = run_with_input(&with(&args!["--prompt-file", "-"]), long.as_bytes());
    assert!(
        run.code == Some(1) && run.stderr.contains("the prompt has "),
        "{}",
        run.stderr
    );

    std::fs::write(&path, b"caf\xe9").unwrap();
    refuse(
        &with(&args!["--prompt-file", &path]),
        &["prompt.txt", "not UTF-8"],
    );
    let run = run_with_input(&with(&args!["--prompt-file", "-"]), b"caf\xe9");
    assert!(
        run.code == Some(1) && run.stderr.contains("standard input: the text is not UTF-8"),
        "{}",
        run.stderr
    );
    refuse(
        &with(&args!["--prompt-file", folder.beside("missing.txt")]),
        &["missing.txt", "No such file"],
    );
    for both in [args!["--prompt-file", &path, "--prompt", "A"], args![]] {
        let run = run_with_input(&with(&both), b"");
        assert!(
            run.code == Some(2) && run.stderr.contains("--prompt"),
            "{}",
            run.stderr
        );
    }

    std::fs::write(&path, "Be brief.").unwrap();
    let chat = |more: &[OsString]| {
        let mut args = chat(&shipped(), &[]);
        args.extend(more.iter().cloned());
        let run = run_with_input(&args, b"Where is the dog?\n");
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        run.stdout
    };
    assert_eq!(
        chat(&args!["--system-file", &path]),
        chat(&args!["--system", "Be brief."])
    );
}

#[test]
fn the_text_ends_where_nobody_reads_it() {
    let args = generate(
        &shipped(),
        &[
            "--temperature",
            "0",
            "--repetition-penalty",
            "1.3",
            "--max-new-tokens",
            "400",
        ],
    );
    let mut child = command(&args)
        .env("RUST_LOG", "marlin_lm=debug")
        .spawn()
        .unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(
        !stderr.contains("error:") && !stderr.contains("decode: "),
        "{stderr}"
    );
    let end = stderr
        .lines()
        .find(|line| line.contains("the text ended"))
        .unwrap();
    assert!(end.contains("Stopped"), "{end}");
}

#[test]
fn perplexity_is_printed_with_its_tokens() {
    let args = args![
        "perplexity",
        shipped(),
        "--device",
        "flex",
        "--text",
        heldout(),
        "--window",
        "64",
        "--max-tokens",
        "130"
    ];
    let text = succeed(&args);
    let words: Vec<&str> = text.split_whitespace().collect();
    // Two windows of 64 tokens and one of 2; the first token of a window is not predicted.
    assert_eq!(
        [words[0], words[2], words[3], words[4]],
        ["perplexity", "over", "127", "tokens,"],
        "{text}"
    );
    assert!(words[1].parse::<f64>().unwrap() > 1.0, "{text}");
}

#[test]
fn logits_are_one_for_each_token_and_the_same_in_every_run() {
    let folder = Folder::tiny_quantized();
    for dir in [&folder.source, &folder.target] {
        for dtype in ["f32", "f16"] {
            let args = args![
                "logits",
                dir,
                "--device",
                "flex",
                "--dtype",
                dtype,
                "--ids",
                "17,4095,0,256"
            ];
            let text = succeed(&args);
            assert_eq!(text, succeed(&args), "{dtype}");
            let result: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(result["ids"], serde_json::json!([17, 4095, 0, 256]));
            let logits: Vec<f64> = result["logits"]
                .as_array()
                .unwrap()
                .iter()
                .map(|logit| logit.as_f64().unwrap())
                .collect();
            assert_eq!(logits.len(), 4096);
            assert!(
                logits.iter().all(|logit| logit.is_finite())
                    && logits.iter().any(|&logit| logit != logits[0])
            );
        }
    }
}
