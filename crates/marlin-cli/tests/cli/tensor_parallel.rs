//! `--tensor-parallel` on Flex, whose ranks are threads of the CPU.

use std::ffi::OsString;

use crate::support::{Folder, args, heldout, refuse, run_with_input, shipped, succeed_json};

/// Returns the arguments of a command on the shipped model in f32, in which one device and several
/// choose the same tokens, over `ranks` ranks.
fn on_ranks(command: &str, ranks: &str, more: &[&str]) -> Vec<OsString> {
    let mut args = args![
        command,
        shipped(),
        "--device",
        "flex",
        "--dtype",
        "f32",
        "--tensor-parallel",
        ranks
    ];
    args.extend(more.iter().map(OsString::from));
    args
}

#[test]
fn a_text_is_the_same_on_one_device_and_on_several() {
    let text = [
        "--prompt",
        "fn main() {",
        "--max-new-tokens",
        "24",
        "--temperature",
        "0",
        "--json",
    ];
    let [one, two, four] = ["1", "2", "4"]
        .map(|ranks| succeed_json(&on_ranks("generate", ranks, &text))["tokens"].clone());
    assert_eq!(one.as_array().unwrap().len(), 24);
    assert_eq!(one, two);
    assert_eq!(one, four);
}

#[test]
fn perplexity_and_evaluation_are_the_same_on_one_device_and_on_two() {
    let heldout = heldout();
    let text = [
        "--text",
        heldout.to_str().unwrap(),
        "--window",
        "64",
        "--max-tokens",
        "130",
        "--json",
    ];
    let perplexity = |ranks| {
        let found = succeed_json(&on_ranks("perplexity", ranks, &text));
        found["perplexity"].as_f64().unwrap()
    };
    let [one, two] = ["1", "2"].map(perplexity);
    assert!((one / two - 1.0).abs() < 1e-5, "{one}, {two}");
    let folder = Folder::shipped_quantized();
    let with = [&text[..], &["--with", folder.target.to_str().unwrap()]].concat();
    let found = succeed_json(&on_ranks("evaluate", "2", &with));
    assert!(found.to_string().contains("divergence"), "{found}");
}

#[test]
fn numbers_that_do_not_fit_are_refused() {
    let prompt = ["--prompt", "fn"];
    refuse(
        &on_ranks("generate", "3", &prompt),
        &["4 query heads", "3 devices", "1, 2, 4"],
    );
    refuse(&on_ranks("generate", "8", &prompt), &["4 query heads"]);
    for ranks in ["0", "257", "two"] {
        let run = run_with_input(&on_ranks("generate", ranks, &prompt), b"");
        assert_eq!(run.code, Some(2), "{}", run.stderr);
        assert!(run.stderr.contains("--tensor-parallel"), "{}", run.stderr);
    }
}

#[cfg(feature = "serve")]
#[test]
fn a_served_model_on_two_ranks_answers_as_generate_does() {
    use crate::serve::Server;
    use serde_json::{Value, json};

    let server = Server::start(&[
        "--dtype",
        "f32",
        "--tensor-parallel",
        "2",
        "--served-model-name",
        "tiny",
    ]);
    let prompts = ["fn main() {", "use std::", "/// Returns the number of"];
    // Three requests at once, which the server decodes together.
    let answers: Vec<(u16, String)> = std::thread::scope(|scope| {
        let server = &server;
        let ask = |prompt| {
            let request = json!({
                "model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0,
            });
            scope.spawn(move || server.ask("POST /v1/completions", Some(&request)))
        };
        let threads: Vec<_> = prompts.into_iter().map(ask).collect();
        let answers = threads.into_iter().map(|thread| thread.join().unwrap());
        answers.collect()
    });
    for (prompt, (status, answer)) in prompts.into_iter().zip(answers) {
        assert_eq!(status, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let text = [
            "--prompt",
            prompt,
            "--max-new-tokens",
            "12",
            "--temperature",
            "0",
            "--json",
        ];
        let generated = succeed_json(&on_ranks("generate", "1", &text));
        assert_eq!(answer["choices"][0]["text"], generated["text"], "{prompt}");
    }
}
