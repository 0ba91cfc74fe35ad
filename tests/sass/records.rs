//! The figures in `benches/records`: checks that each names a routine, and warns if the sources of the routine have changed since.

use libtest_mimic::{Failed, Trial};
use marlin_kernels::inspect::{Routine, digest};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Returns one test of all records, which does not need NVIDIA's compiler. Rows of changed routines are only a warning, as a new run needs the card.
pub fn trial() -> Trial {
    Trial::test("records::name_their_routines", || check().map_err(Failed::from))
}

fn check() -> Result<(), String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/records");
    let entries = std::fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut paths: Vec<PathBuf> =
        entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).filter(|path| is_of_a_card(path)).collect();
    paths.sort();
    if paths.is_empty() {
        return Err(format!("{} has no record", folder.display()));
    }
    for path in paths {
        let stale = stale_rows(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        for (routine, rows) in stale {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            println!(
                "warning: {name}: {rows} rows are of other sources of `{routine}` than these; `cargo xtask bench --help` says how to repeat them"
            );
        }
    }
    Ok(())
}

/// Returns true if a file has times of a card's kernels; those of the processor, and perplexities of families, have none.
fn is_of_a_card(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.ends_with(".json") && !["host-", "family-"].iter().any(|other| name.starts_with(other))
}

/// Returns the number of rows of a record for each routine whose sources have changed since.
fn stale_rows(path: &Path) -> Result<BTreeMap<String, usize>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let record: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    let rows = record["rows"].as_array().ok_or("no rows")?;
    let mut stale = BTreeMap::new();
    for (number, row) in rows.iter().enumerate() {
        let of = |key: &str| row[key].as_str().ok_or(format!("row {number} has no {key}"));
        let (routine, found) = (of("routine")?, of("digest")?);
        let current = match routine {
            "step" => marlin_decode::kernels::digest(),
            "ladder" => ladder::source::digest(),
            name => Routine::named(name).map(digest).ok_or(format!("row {number} is of `{name}`, which is no routine"))?,
        };
        if found != current {
            *stale.entry(routine.to_owned()).or_insert(0) += 1;
        }
    }
    Ok(stale)
}
