//! The tutorials with a Rust program, run as they are written.
#![cfg(unix)]

use std::path::Path;

use marlin_testing::run_project_page;

/// Returns the first number after some words of a text.
#[track_caller]
fn number_after(text: &str, words: &str) -> f64 {
    let (_, after) = text
        .split_once(words)
        .unwrap_or_else(|| panic!("`{words}` is not in: {text}"));
    let end = after.find(|c: char| !c.is_ascii_digit() && c != '.');
    after[..end.unwrap_or(after.len())]
        .trim_end_matches('.')
        .parse()
        .unwrap_or_else(|_| panic!("no number after `{words}` in: {text}"))
}

/// Costs about 15 s of a core, most of it for drawing, rounding and writing the weights.
#[test]
fn memory_falls_when_a_model_is_converted() {
    let program = Path::new(env!("CARGO_BIN_EXE_convert"));
    let run = run_project_page("tutorial-convert.md", program);
    let printed = &run.stdout;
    assert!(
        printed.contains("24 of 24 linear layers quantised"),
        "{printed}"
    );
    let error = number_after(printed, "relative error of the output: ");
    assert!(0.01 < error && error < 0.2, "{printed}");
    let size = |name: &str| {
        run.folder
            .join("shrink")
            .join(name)
            .metadata()
            .unwrap()
            .len()
    };
    assert!(4 * size("int4.bpk") < size("f32.bpk"), "{printed}");
    if cfg!(target_os = "linux") {
        let f32 = number_after(printed, "f32: the process takes ");
        let int4 = number_after(printed, "int4: the process takes ");
        // The weights take 201 MB in f32 and 26 MB in 4 bits.
        assert!(f32 - int4 > 100_000.0, "{printed}");
    }
}

/// Costs about 30 s of a core, most of it the training's.
#[test]
fn adapters_learn_a_text() {
    let program = Path::new(env!("CARGO_BIN_EXE_lora"));
    let run = run_project_page("tutorial-lora.md", program);
    let printed = &run.stdout;
    let before = number_after(printed, "perplexity of the text: ");
    let after = number_after(printed, " before, ");
    assert!(after < before / 3.0, "{printed}");
    let again = number_after(printed, "loaded from the file: ");
    assert!((again - after).abs() <= 0.011, "{printed}");
}
