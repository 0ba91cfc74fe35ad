use std::path::{Path, PathBuf};

/// The environment variable with the folder that has them, by their paths in the repository.
const VARIABLE: &str = "MARLIN_TEST_FILES";

/// Returns a file or folder by its path in the repository: below the folder that
/// `MARLIN_TEST_FILES` names, else beside the executable, as in the folder that `cargo xtask
/// pack-gpu` makes, else in the checkout that the tests were built in.
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
