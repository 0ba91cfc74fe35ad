//! The figures in `benches/records` are of the kernels as they are now.

use libtest_mimic::{Failed, Trial};
use marlin_kernels::marlin::digest;
use std::path::{Path, PathBuf};

/// One test over all records; it needs no compiler of NVIDIA's.
pub fn trial() -> Trial {
    Trial::test("records::are_of_these_kernels", || check().map_err(Failed::from))
}

fn check() -> Result<(), String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/records");
    let current = digest();
    let entries = std::fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut records = 0;
    // Those of the processor have no figure of a card's kernels.
    let of_a_card = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.ends_with(".json") && !name.starts_with("host-")
    };
    for path in entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).filter(of_a_card) {
        let shown = path.display();
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{shown}: {error}"))?;
        let record: serde_json::Value = serde_json::from_str(&text).map_err(|error| format!("{shown}: {error}"))?;
        let found = record["digest"].as_str().unwrap_or("none");
        if found != current {
            return Err(format!(
                "{shown} has figures of kernels with the digest {found}; these have {current}. Run `cargo xtask bench kernels --record` on that card"
            ));
        }
        records += 1;
    }
    if records > 0 { Ok(()) } else { Err(format!("{} has no record", folder.display())) }
}
