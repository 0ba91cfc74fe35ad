//! The versions that the ledger's rows are made with.

use crate::ledger::Versions;
use crate::root;
use source_digest::{Error, Routine, Sources, workspace};
use std::collections::BTreeSet;
use std::fs;
use std::sync::LazyLock;

/// The crates with kernels, parsed once.
pub static WORKSPACE: LazyLock<Result<Sources, String>> =
    LazyLock::new(|| workspace(root()).map_err(|error| error.to_string()));

/// The modules and functions that decide whether a kernel passes. Functions that make CUDA texts
/// are not listed: a change of such a function changes the texts, which decide on their own what is
/// compiled.
const RULES: [&str; 5] = [
    "sass::rules",
    "sass::listing",
    "sass::decode::broken",
    "sass::ladder::broken",
    "sass::kernel::broken",
];

/// Returns the versions, without that of NVIDIA's compiler.
pub fn versions() -> Result<Versions, String> {
    let sources = WORKSPACE.as_ref().map_err(Clone::clone)?;
    let digest = |routine: Routine| Ok((routine, routine.sources(sources)?.digest()));
    let message = |error: Error| error.to_string();
    let proof = Sources::read(&[("sass", &root().join("tests/sass/main.rs"))]).map_err(message)?;
    Ok(Versions {
        cubecl: cubecl_versions()?,
        compiler: None,
        rules: proof.reached_from(&RULES).map_err(message)?.digest(),
        sources: Routine::ALL
            .into_iter()
            .map(digest)
            .collect::<Result<_, _>>()
            .map_err(message)?,
    })
}

/// Returns the version of CubeCL's crates in the lock file, or each crate's name with its version
/// if the versions differ.
fn cubecl_versions() -> Result<String, String> {
    let lock = root().join("Cargo.lock");
    let text = fs::read_to_string(&lock).map_err(|error| format!("{}: {error}", lock.display()))?;
    let quoted = |line: &str, key: &str| {
        line.strip_prefix(key)
            .map(|value| value.trim_matches('"').to_owned())
    };
    let lines: Vec<&str> = text.lines().collect();
    let pairs = lines
        .windows(2)
        .filter_map(|pair| Some((quoted(pair[0], "name = ")?, quoted(pair[1], "version = ")?)));
    let crates: Vec<(String, String)> = pairs
        .filter(|(name, _)| name.starts_with("cubecl"))
        .collect();
    let distinct: BTreeSet<&String> = crates.iter().map(|(_, version)| version).collect();
    Ok(match distinct.len() {
        1 => distinct.into_iter().next().cloned().unwrap_or_default(),
        _ => crates
            .iter()
            .map(|(name, version)| format!("{name} {version}"))
            .collect::<Vec<_>>()
            .join(" "),
    })
}
