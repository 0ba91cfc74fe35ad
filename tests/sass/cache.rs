//! A cache of the texts whose machine code has passed every rule, by digest, so that they are not compiled again.

use crate::toolchain::Toolchain;
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};

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

    /// Returns the file of a text. CubeCL writes declarations in an order that changes from run to run, so the digest is computed from the sorted lines.
    pub fn entry(&self, text: &str, arch: &str) -> PathBuf {
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        let mut digest = Sha256::new();
        for part in RULES.into_iter().chain([self.toolchain.as_str(), arch]).chain(lines) {
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
