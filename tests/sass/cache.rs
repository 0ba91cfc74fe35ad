//! A cache of the texts whose machine code has passed every rule, by digest, so that they are not compiled again; and of the sources that texts
//! are made of, so that they are not even made.

use crate::toolchain::Toolchain;
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The sources that check the machine code: after a change in them, every text is compiled again.
const RULES: [&str; 4] = [include_str!("listing.rs"), include_str!("rules.rs"), include_str!("decode.rs"), include_str!("ladder.rs")];

/// A folder of empty files, each named by the digest of a text, the card, the toolchain and the rules.
pub struct Cache {
    folder: PathBuf,
    toolchain: String,
}

impl Cache {
    /// Returns the cache of a toolchain, in cargo's build folder.
    pub fn new(toolchain: &Toolchain) -> Self {
        Self { folder: Path::new(env!("CARGO_TARGET_TMPDIR")).join("proof"), toolchain: toolchain.version().to_owned() }
    }

    /// Returns the file of the text that the kernels' sources make of a configuration. It changes with any line of them and of the lock file.
    pub fn entry_of_sources(&self, config: &str, arch: &str) -> PathBuf {
        static SOURCES: LazyLock<String> = LazyLock::new(sources);
        self.file([SOURCES.as_str(), config, arch].into_iter())
    }

    /// Returns the file of a text. CubeCL writes declarations in an order that changes from run to run, so the digest is computed from the sorted lines.
    pub fn entry(&self, text: &str, arch: &str) -> PathBuf {
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        self.file([arch].into_iter().chain(lines))
    }

    fn file<'a>(&'a self, parts: impl Iterator<Item = &'a str>) -> PathBuf {
        let mut digest = Sha256::new();
        for part in RULES.into_iter().chain([self.toolchain.as_str()]).chain(parts) {
            digest.update(part);
            digest.update([0]);
        }
        self.folder.join(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    }

    /// Returns true if a text has passed before.
    pub fn has(entry: &Path) -> bool {
        entry.exists()
    }

    /// Records that a text has passed. Errors are ignored: the text is then compiled again in the next run.
    pub fn add(entry: &Path) {
        if let Some(folder) = entry.parent() {
            let _ = fs::create_dir_all(folder).and_then(|()| fs::write(entry, ""));
        }
    }
}

/// Every source of the crate with the kernels, and the lock file, which has CubeCL's version. Files that cannot be read make a text of their own: an entry
/// of it is found only by runs that cannot read them either.
fn sources() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut paths = vec![root.join("Cargo.lock")];
    let mut folders = vec![root.join("crates/marlin-kernels/src"), root.join("crates/marlin-format/src/layout")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() { folders.push(path) } else { paths.push(path) }
        }
    }
    paths.sort();
    paths.iter().map(|path| fs::read_to_string(path).unwrap_or_else(|error| format!("{}: {error}", path.display()))).collect()
}
