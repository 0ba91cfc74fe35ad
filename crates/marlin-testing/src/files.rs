use std::fs;
use std::path::{Path, PathBuf};

/// The environment variable with the folder that holds the files, by their paths in the repository.
const VARIABLE: &str = "MARLIN_TEST_FILES";

/// The variable with which `cargo xtask book --update` asks for pages to be written.
const UPDATE: &str = "BURN_MARLIN_UPDATE_BOOK";

/// Returns the path of a file or folder, given by its path in the repository. The file is searched
/// in the folder that `MARLIN_TEST_FILES` names, then beside the executable, as in the folder that
/// `cargo xtask pack-gpu` makes. Otherwise the path is in the checkout in which the tests were
/// built.
pub fn repository_file(path: &str) -> PathBuf {
    if let Some(folder) = std::env::var_os(VARIABLE) {
        return Path::new(&folder).join(path);
    }
    let beside = std::env::current_exe()
        .ok()
        .and_then(|executable| Some(executable.parent()?.join(path)));
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path);
    beside.filter(|beside| beside.exists()).unwrap_or(checkout)
}

/// Checks that a page of the book is what `expected` makes of it, or writes it if
/// `cargo xtask book --update` runs the test.
///
/// # Panics
/// Panics if the page is another one.
#[track_caller]
pub fn expect_page(page: &str, expected: impl FnOnce(&str) -> String) {
    let path = repository_file("book/src").join(page);
    let found = fs::read_to_string(&path).unwrap_or_default();
    let expected = expected(&found);
    if std::env::var_os(UPDATE).is_some() {
        fs::write(&path, expected).unwrap();
        return;
    }
    assert!(
        found == expected,
        "{} is not that of today's program; `cargo xtask book --update` writes it anew",
        path.display()
    );
}
