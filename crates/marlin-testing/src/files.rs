use std::path::{Path, PathBuf};

/// The environment variable with the folder that holds the files, by their paths in the repository.
const VARIABLE: &str = "MARLIN_TEST_FILES";

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
