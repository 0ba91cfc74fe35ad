//! The pages of the book whose commands are those of the program, run as they are written.

use std::path::Path;

use marlin_testing::{PageRun, run_page};

use crate::support::{heldout, read_json, shipped};

/// Runs the commands of a page, with this program on the path.
fn run(page: &str, before: &str) -> PageRun {
    run_page(page, before, Path::new(env!("CARGO_BIN_EXE_burn-marlin")))
}

/// Runs the commands of a how-to guide, which has the shipped model and a text in its folder.
fn run_guide(page: &str) -> PageRun {
    let [model, text] = [shipped(), heldout()].map(|path| path.canonicalize().unwrap());
    let before = format!(
        "cp -r '{}' model\nhead -c 20000 '{}' > text.txt",
        model.display(),
        text.display()
    );
    run(page, &before)
}

/// Returns the change of a model's perplexity, in per cent, from the last table of `evaluate`.
#[track_caller]
fn change(printed: &str, model: &str) -> f64 {
    let line = printed
        .lines()
        .rfind(|line| {
            line.split_whitespace().next() == Some(model) && line.split_whitespace().count() > 5
        })
        .unwrap_or_else(|| panic!("no row of {model}: {printed}"));
    let change = line.split_whitespace().find(|word| {
        word.starts_with(['+', '-']) && word[1..].starts_with(|c: char| c.is_ascii_digit())
    });
    change.unwrap().parse().unwrap()
}

/// Costs about 40 s of a core, most of it GPTQ's.
#[test]
fn a_model_is_quantised_and_compared() {
    let run = run("tutorial-quantise.md", "");
    let printed = &run.stdout;
    assert!(run.folder.join("sizes.svg").is_file());
    // What the page says of the three models.
    let [int8, int4, gptq] = ["int8", "int4", "gptq"].map(|model| change(printed, model));
    assert!(int8.abs() < 0.3, "{printed}");
    assert!(3.0 < int4 && int4 < 8.0, "{printed}");
    assert!(0.0 < gptq && gptq < 0.6 * int4, "{printed}");
}

#[test]
fn a_published_checkpoint_is_run() {
    let run = run("tutorial-published.md", "");
    let printed = &run.stdout;
    for words in [
        "gptq v2 int4 g64 f16",
        "35 quantised layers",
        "every file and tensor; room on ",
        "impl<T> Iterator for ",
        "model.layers.0..4.mlp.gate_up_proj",
    ] {
        assert!(printed.contains(words), "`{words}` is not in: {printed}");
    }
    for name in ["awq.json", "auto-round.json", "ct.json", "gptq.json"] {
        let logits = read_json(&run.folder.join(name))["logits"].clone();
        let logits = logits.as_array().unwrap();
        assert!(logits.len() >= 32, "{name}: {logits:?}");
    }
}

/// Costs about 7 s of a core, most of it the evaluation's.
#[test]
fn a_model_is_pruned() {
    let run = run("tutorial-sparse.md", "");
    let printed = &run.stdout;
    assert!(printed.contains("int4 g128 f16 2:4"), "{printed}");
    // What the page says of the two models.
    let [pruned, trained] = ["pruned", "trained"].map(|model| change(printed, model));
    assert!(pruned > 100.0, "{printed}");
    assert!(trained.abs() < 15.0, "{printed}");
    let size = |folder: &str| {
        let file = run.folder.join(folder).join("model.safetensors");
        file.metadata().unwrap().len()
    };
    assert!(size("small") < size("trained") && size("trained") < size("model"));
}

/// Costs about 7 s of a core, most of it the evaluations'.
#[test]
fn a_format_is_chosen() {
    let run = run_guide("choose-format.md");
    let printed = &run.stdout;
    assert!(
        printed.contains("the fastest format that fits is "),
        "{printed}"
    );
    let evaluated = ["int8", "g128", "g32", "mixed"].map(|model| change(printed, model));
    let [int8, g128, g32, mixed] = evaluated;
    assert!(int8.abs() < 1.0 && g32 < g128 && mixed < g128, "{printed}");
}

/// Costs about 23 s of a core, most of it GPTQ's.
#[test]
fn a_quantised_model_is_published() {
    let run = run_guide("publish.md");
    let report = read_json(&run.folder.join("evaluation.json"));
    assert!(report.to_string().contains("model-W4A16"), "{report}");
    for name in [
        "sizes.svg",
        "model-W4A16/tokenizer.json",
        "model-W4A16/config.json",
    ] {
        assert!(run.folder.join(name).is_file(), "{name}");
    }
}

#[test]
fn a_refusal_is_debugged() {
    let run = run_guide("debug-refusal.md");
    let printed = &run.stdout;
    // Of the folder without a tokenizer, as the page shows it.
    for words in [
        "error    fault          cannot read ../burn-marlin/tests/golden/awq-gemm-g64",
        "fix: hf download REPO 'tokenizer.json' --local-dir",
        "exit status 1",
    ] {
        assert!(printed.contains(words), "`{words}` is not in: {printed}");
    }
    let report = read_json(&run.folder.join("report.json"));
    assert!(report["sections"].is_array(), "{report}");
}

#[test]
fn tensors_of_a_folder_are_listed_for_a_key_map() {
    let printed = run("load-module.md", "").stdout;
    assert!(
        printed.contains("bert.encoder.layer.0.output.dense"),
        "{printed}"
    );
}

/// The commands of the README, which run in the clone. Costs about 10 s of a core, most of it the
/// evaluation's.
#[test]
fn the_commands_of_the_readme_run() {
    let before = "cargo() { :; }\nln -s ../burn-marlin/examples examples\nmkdir target";
    let run = run("../../README.md", before);
    let printed = &run.stdout;
    assert!(printed.contains("impl<T> Iterator for "), "{printed}");
    assert!(printed.contains("35 layers to int4 g128 f16"), "{printed}");
    assert!(
        change(printed, "target/tiny-int4").abs() < 10.0,
        "{printed}"
    );
}
