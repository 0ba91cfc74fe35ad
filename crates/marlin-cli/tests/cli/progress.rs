//! Tests of the progress that `quantize` writes where standard error is not a terminal.

use std::ffi::OsString;

use crate::support::{Folder, args, calibrated, heldout, run_with_input};

/// Runs `quantize` with more arguments, which must succeed. Returns the lines of standard error
/// and standard output.
fn quantize(more: &[&str]) -> (Vec<String>, String) {
    let folder = Folder::tiny();
    let mut args = match more.contains(&"--method") {
        true => calibrated(&folder.source, &folder.target, &heldout(), 4, 32),
        false => args!["quantize", &folder.source, &folder.target],
    };
    args.extend(more.iter().map(OsString::from));
    let run = run_with_input(&args, b"");
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    (run.stderr.lines().map(String::from).collect(), run.stdout)
}

/// Returns true if a text is a time, such as `12 s`, `1 min 48 s` or `2 h 5 min`.
fn is_time(text: &str) -> bool {
    let words: Vec<_> = text.split(' ').collect();
    words.len() >= 2
        && words.chunks(2).all(|pair| {
            pair.len() == 2
                && pair[0].parse::<u64>().is_ok()
                && ["h", "min", "s"].contains(&pair[1])
        })
}

#[test]
fn quantize_writes_a_line_for_each_block() {
    let methods = [
        &[][..],
        &["--json"],
        &["--exclude", "re:.*0.*up_proj"],
        &["--method", "gptq"],
        &["--method", "awq", "--json"],
        &["--method", "sparsegpt"],
    ];
    for more in methods {
        let (lines, stdout) = quantize(more);
        assert_eq!(lines.len(), 2, "{more:?}: {lines:?}");
        for (block, line) in (1..).zip(&lines) {
            let times = line.strip_prefix(&format!("block {block} of 2, "));
            let (passed, left) = times.unwrap().split_once(", ").unwrap();
            assert!(is_time(passed), "{line}");
            assert!(is_time(left.strip_suffix(" left").unwrap()), "{line}");
        }
        assert!(!stdout.contains("block "), "{stdout}");
    }
}

#[test]
fn quiet_writes_no_progress() {
    for more in [&["--quiet"][..], &["--method", "gptq", "--quiet", "--json"]] {
        let (lines, stdout) = quantize(more);
        assert!(lines.is_empty(), "{more:?}: {lines:?}");
        assert!(!stdout.is_empty());
    }
}
