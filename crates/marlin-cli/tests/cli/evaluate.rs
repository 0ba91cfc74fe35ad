//! Tests of `evaluate`: several texts, and plots.

use std::ffi::OsString;
use std::fs;

use serde_json::json;

use crate::support::{
    Folder, args, cells, heldout, refuse, run_with_input, shipped, succeed, succeed_json,
};

/// Returns the arguments that evaluate the shipped model on tokens of the held-out text.
fn on_heldout(tokens: &str) -> Vec<OsString> {
    args![
        "evaluate",
        shipped(),
        "--device",
        "flex",
        "--text",
        heldout(),
        "--max-tokens",
        tokens
    ]
}

#[test]
fn texts_have_their_results_and_all_of_them_together() {
    let folder = Folder::shipped_quantized();
    let text = fs::read_to_string(heldout()).unwrap();
    let [first, second] = [&text[..4000], &text[8000..10_000]];
    let texts = ["first.txt", "second.txt"].map(|name| folder.beside(name));
    fs::write(&texts[0], first).unwrap();
    fs::write(&texts[1], second).unwrap();
    let of = |texts: &[&std::path::PathBuf], more: &[&str]| {
        let mut args = args![
            "evaluate",
            shipped(),
            "--with",
            &folder.target,
            "--device",
            "flex",
            "--window",
            "128"
        ];
        texts
            .iter()
            .for_each(|text| args.extend(args!["--text", text]));
        args.extend(more.iter().map(Into::into));
        args
    };
    let both = succeed_json(&of(&[&texts[0], &texts[1]], &["--json"]));
    let alone = texts
        .each_ref()
        .map(|text| succeed_json(&of(&[text], &["--json"])));
    for (text, alone) in alone.iter().enumerate() {
        assert_eq!(both["texts"][text], alone["texts"][0]);
        assert_eq!(
            (&alone["texts"][0]["models"], &alone["texts"][0]["tokens"]),
            (&alone["models"], &alone["tokens"])
        );
    }
    let [tokens, nll] = [
        |of: &serde_json::Value| of["tokens"].as_f64().unwrap(),
        |of: &serde_json::Value| of["models"][1]["nll"]["mean"].as_f64().unwrap(),
    ];
    let all = tokens(&both);
    assert_eq!(all, tokens(&alone[0]) + tokens(&alone[1]));
    let mean = alone
        .iter()
        .map(|alone| nll(alone) * tokens(alone))
        .sum::<f64>()
        / all;
    assert!((nll(&both) - mean).abs() < 1e-9);

    let table = succeed(&of(&[&texts[0], &texts[1]], &[]));
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(cells(lines[0])[..3], ["text", "model", "size"]);
    let of_texts: Vec<&str> = lines[1..7].iter().map(|line| cells(line)[0]).collect();
    let names = [
        texts[0].to_str().unwrap(),
        texts[1].to_str().unwrap(),
        "all together",
    ];
    assert_eq!(
        of_texts,
        names.iter().flat_map(|name| [*name; 2]).collect::<Vec<_>>()
    );
    assert_eq!(
        lines[7],
        format!("over {all} tokens of 2 texts in windows of 128; standard errors by window")
    );
    let table = succeed(&of(&[&texts[0]], &[]));
    assert_eq!(cells(table.lines().next().unwrap())[..2], ["model", "size"]);

    fs::write(&texts[1], "").unwrap();
    refuse(
        &of(&[&texts[0], &texts[1]], &[]),
        &["second.txt", "0 tokens"],
    );
}

#[test]
fn one_window_has_no_standard_error() {
    let folder = Folder::shipped_quantized();
    let mut args = on_heldout("64");
    args.extend(args!["--with", &folder.target]);
    let table = succeed(&args);
    assert!(!table.contains('±'), "{table}");
    let last = table.lines().last().unwrap();
    assert!(
        last.ends_with("; one window has no standard error"),
        "{table}"
    );
}

#[test]
fn plots_are_drawn_as_svg_and_png() {
    let folder = Folder::shipped_quantized();
    let (svg, png) = (folder.beside("plot.svg"), folder.beside("plot.PNG"));
    let mut args = on_heldout("1024");
    args.extend(args!["--with", &folder.target]);
    args.extend(args!["--json", "--plot", &svg, "--plot", &png]);
    let found = succeed_json(&args);
    assert_eq!(found["models"][1]["dir"], json!(folder.target));
    let text = fs::read_to_string(&svg).unwrap();
    for words in [
        "perplexity",
        "size of all tensors (kB)",
        "model (reference)",
        "target",
        "1022 tokens in windows of 512",
    ] {
        assert!(text.contains(words), "`{words}` is not in {text}");
    }
    assert!(fs::read(&png).unwrap().starts_with(b"\x89PNG\r\n"));

    let missing = folder.beside("missing").join("plot.svg");
    let mut args = on_heldout("64");
    args.extend(args!["--plot", &missing]);
    let run = run_with_input(&args, b"");
    assert_eq!(run.code, Some(1));
    // The computed results are printed even if the plot cannot be written.
    assert!(
        run.stdout.contains("over 63 tokens") && run.stderr.contains("missing/plot.svg"),
        "{}{}",
        run.stdout,
        run.stderr
    );
}

#[test]
fn a_plot_of_another_ending_is_refused_before_anything_runs() {
    for name in ["plot.pdf", "plot", "svg"] {
        let run = run_with_input(
            &args![
                "evaluate",
                "no-such-folder",
                "--text",
                "no-such-text",
                "--plot",
                name
            ],
            b"",
        );
        assert_eq!(run.code, Some(2), "{}", run.stderr);
        assert!(
            run.stderr.contains(name) && run.stderr.contains("`.svg` or a `.png`"),
            "{}",
            run.stderr
        );
    }
}
