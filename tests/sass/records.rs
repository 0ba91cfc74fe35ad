//! Checks that each figure in `benches/records` names a routine, and warns if the kernel or the
//! sources have changed since.

use crate::ledger::Ledger;
use crate::sources::WORKSPACE;
use crate::{CARDS, root};
use libtest_mimic::{Failed, Trial};
use serde_json::Value;
use source_digest::{Routine, step_digest};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Returns one test of all records, which does not need NVIDIA's compiler. Rows of changed kernels
/// are only a warning, as a new run needs the card.
pub fn trial() -> Trial {
    Trial::test("records::name_their_routines", || {
        check().map_err(Failed::from)
    })
}

fn check() -> Result<(), String> {
    let paths = paths()?;
    if paths.is_empty() {
        return Err("benches/records has no record".into());
    }
    let mut texts = BTreeSet::new();
    for card in CARDS {
        texts.extend(
            Ledger::read(card)
                .map_err(|error| error.to_string())?
                .rows
                .into_values()
                .map(|row| row.text),
        );
    }
    let step = step_digest(WORKSPACE.as_ref().map_err(Clone::clone)?)
        .map_err(|error| error.to_string())?;
    for path in paths {
        let stale = stale_rows(&rows(&path)?, &step, &texts)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        for (routine, count) in stale {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            println!(
                "warning: {name}: {count} rows are of another `{routine}` than this; `cargo xtask bench --help` says how to repeat them"
            );
        }
    }
    Ok(())
}

/// Returns the paths of the records with times of a card's kernels. The records of the host
/// processor, of the device tests, of servers, of the perplexities of model families and of the
/// accuracy of formats have no such times.
pub fn paths() -> Result<Vec<PathBuf>, String> {
    let folder = root().join("benches/records");
    let entries =
        std::fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let is_of_a_card = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.ends_with(".json")
            && !["accuracy-", "device-", "host-", "family-", "serve-"]
                .iter()
                .any(|other| name.starts_with(other))
    };
    let mut paths: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(is_of_a_card)
        .collect();
    paths.sort();
    Ok(paths)
}

/// Returns the rows of a record.
pub fn rows(path: &Path) -> Result<Vec<Value>, String> {
    let error = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = std::fs::read_to_string(path).map_err(|source| error(&source))?;
    let record: Value = serde_json::from_str(&text).map_err(|source| error(&source))?;
    record["rows"]
        .as_array()
        .cloned()
        .ok_or_else(|| error(&"no rows"))
}

/// Returns the number of stale rows for each routine: those of a kernel or of a step whose digest
/// has changed, and those without a digest.
fn stale_rows(
    rows: &[Value],
    step: &str,
    texts: &BTreeSet<String>,
) -> Result<BTreeMap<String, usize>, String> {
    let mut stale = BTreeMap::new();
    for (number, row) in rows.iter().enumerate() {
        let routine = row["routine"]
            .as_str()
            .ok_or(format!("row {number} has no routine"))?;
        let is_current = match routine {
            "step" => row["digest"] == step,
            name if Routine::named(name).is_some() => row["text"]
                .as_str()
                .is_some_and(|text| texts.contains(text)),
            name => return Err(format!("row {number} is of `{name}`, which is no routine")),
        };
        if !is_current {
            *stale.entry(routine.to_owned()).or_insert(0) += 1;
        }
    }
    Ok(stale)
}
