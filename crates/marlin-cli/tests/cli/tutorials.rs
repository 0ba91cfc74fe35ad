//! The tutorials of the book, run as they are written.

use std::fs;
use std::path::Path;
use std::process::Command;

/// Returns the commands of a page: the contents of its `sh` blocks.
fn commands(page: &str) -> String {
    let blocks = page.split("\n```sh\n").skip(1);
    blocks
        .map(|block| block.split("\n```").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}

/// Runs the commands of a tutorial from an empty folder beside the repository. Returns what they
/// print.
fn run(page: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("book/src").join(page)).unwrap();
    let guard = tempfile::tempdir().unwrap();
    let folder = guard.path().join("empty");
    fs::create_dir(&folder).unwrap();
    let clone = guard.path().join("burn-marlin");
    std::os::unix::fs::symlink(root.canonicalize().unwrap(), clone).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_burn-marlin"));
    let path = format!(
        "{}:{}",
        program.parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
    let output = Command::new("sh")
        .args(["-e", "-c", &commands(&page)])
        .current_dir(&folder)
        .env("PATH", path)
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{stdout}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(folder.join("sizes.svg").is_file());
    stdout
}

/// Costs about 40 s of a core, most of it GPTQ's.
#[test]
fn a_model_is_quantised_and_compared() {
    let printed = run("tutorial-quantise.md");
    let change = |model: &str| -> f64 {
        let line = printed
            .lines()
            .rfind(|line| line.split_whitespace().next() == Some(model))
            .unwrap_or_else(|| panic!("no row of {model}: {printed}"));
        let change = line.split_whitespace().find(|word| {
            word.starts_with(['+', '-']) && word[1..].starts_with(|c: char| c.is_ascii_digit())
        });
        change.unwrap().parse().unwrap()
    };
    // What the page says of the three models.
    let (int8, int4, gptq) = (change("int8"), change("int4"), change("gptq"));
    assert!(int8.abs() < 0.3, "{printed}");
    assert!(3.0 < int4 && int4 < 8.0, "{printed}");
    assert!(0.0 < gptq && gptq < 0.6 * int4, "{printed}");
}
