use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::repository_file;

/// A run of the commands of a page of the book.
pub struct PageRun {
    // Deletes the folder when the run is dropped.
    _parent: tempfile::TempDir,
    /// The folder in which the commands ran.
    pub folder: PathBuf,
    /// Everything that they printed to standard output.
    pub stdout: String,
}

/// Runs the commands of a page of the book, which are its `sh` blocks, in one shell that stops at
/// the first failure, after the commands `before`. They run in an empty folder beside a clone of
/// the repository, with the folder of `program` on the path, and no kernel is kept on disk.
///
/// # Panics
/// Panics if there is no such page, or if a command fails.
#[track_caller]
pub fn run_page(page: &str, before: &str, program: &Path) -> PageRun {
    let pages = repository_file("book/src").canonicalize().unwrap();
    let text = fs::read_to_string(pages.join(page)).unwrap();
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("empty");
    fs::create_dir(&folder).unwrap();
    let clone = pages.join("../..").canonicalize().unwrap();
    std::os::unix::fs::symlink(clone, parent.path().join("burn-marlin")).unwrap();
    let path = format!(
        "{}:{}",
        program.parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
    let script = format!("{before}\n{}", blocks(&text, "sh"));
    let output = Command::new("sh")
        .args(["-e", "-c", &script])
        .current_dir(&folder)
        .env("PATH", path)
        .env_remove("RUST_LOG")
        .env("BURN_MARLIN_CACHE", "off")
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{page}: {stdout}{stderr}");
    PageRun {
        _parent: parent,
        folder,
        stdout,
    }
}

/// Runs a page of the book that builds a project, as [`run_page`] does. The project is not
/// compiled: its `Cargo.toml` is the page's `toml` block, `cargo run` checks that cargo finds all
/// that it depends on, and runs the compiled `program` of this repository, whose source the page
/// shows.
///
/// # Panics
/// Panics if there is no such page, or if a command fails.
#[track_caller]
pub fn run_project_page(page: &str, program: &Path) -> PageRun {
    let file = repository_file("book/src").join(page);
    let manifest = blocks(&fs::read_to_string(file).unwrap(), "toml");
    let program_path = program.display();
    let before = format!(
        "cargo() {{
            if [ \"$1\" != run ]; then command cargo --offline \"$@\"; return; fi
            cat > Cargo.toml <<'END'
{manifest}
END
            command cargo --offline --quiet generate-lockfile
            '{program_path}'
        }}"
    );
    run_page(page, &before, program)
}

/// Returns the contents of all blocks of a language, in their order.
fn blocks(page: &str, language: &str) -> String {
    let fence = format!("\n```{language}\n");
    page.split(&fence)
        .skip(1)
        .map(|block| block.split("\n```").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}
