//! The program prints the text of `LanguageModel::generate`; a missing folder is an error that
//! names it.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use burn::tensor::Device;
use marlin_lm::{GenerateOptions, LanguageModel, OpenOptions, Sampling};

const PROMPT: &str = "/// Returns the number of ";

fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../train-tiny-llama/model")
}

fn program(model: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_generate-text"));
    command
        .arg(model)
        .args(["--prompt", PROMPT])
        .args(args)
        .output()
        .unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn greedy_text_is_that_of_the_library() {
    let output = program(
        &shipped(),
        &["--max-new-tokens", "20", "--temperature", "0"],
    );
    let report = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{report}");

    let llama = LanguageModel::open(shipped(), &Device::flex(), &OpenOptions::default())
        .unwrap_or_else(|error| panic!("{error}"));
    let options = GenerateOptions {
        sampling: Sampling::GREEDY,
        ..llama.default_options(20)
    };
    let expected = llama
        .generate(PROMPT, &options, |_| ControlFlow::Continue(()))
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(
        expected.tokens.len(),
        20,
        "the model stops earlier: take another prompt"
    );
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        format!("{PROMPT}{}\n", expected.text)
    );
    assert!(
        report.contains(" 20 tokens, ") && report.contains("first token after "),
        "{report}"
    );
}

#[test]
fn what_is_missing_is_named() {
    let missing = shipped().join("no-such-folder");
    let output = program(&missing, &[]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains(&*missing.to_string_lossy()), "{message}");
    assert!(output.stdout.is_empty());

    // The shipped model has no chat template.
    let output = program(&shipped(), &["--chat"]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("model has no chat template"), "{message}");
}
