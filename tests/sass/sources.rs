//! The versions that the ledger's rows are made with, and tests of the digests of sources.

use crate::ledger::Versions;
use crate::root;
use libtest_mimic::{Failed, Trial};
use source_digest::{Error, Routine, Sources, workspace};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
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

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test(
            "sources::every_file_that_a_kernel_uses_is_in_its_digest",
            || every_file().map_err(Failed::from),
        ),
        Trial::test("sources::files_that_lists_by_hand_missed_are_in", || {
            missed_before().map_err(Failed::from)
        }),
    ]
}

/// Checks that every file of `ptx` with a function that a routine's own files call is in the
/// routine's digest.
///
/// The search ignores modules and imports. It takes the functions that the text of each file of
/// `ptx` defines, and looks for calls in the text of the routine's files.
fn every_file() -> Result<(), String> {
    let sources = WORKSPACE.as_ref().map_err(Clone::clone)?;
    let kernels = root().join("crates/marlin-kernels/src");
    let all: Vec<(PathBuf, String)> = rust_files(&kernels)
        .into_iter()
        .filter_map(|path| Some((path.clone(), fs::read_to_string(path).ok()?)))
        .collect();
    for (routine, folder) in [
        (Routine::MmaSync, "matmul/mma_sync"),
        (Routine::Wgmma, "matmul/wgmma"),
        (Routine::Gemv, "matmul/gemv"),
        (Routine::Head, "matmul/lm_head"),
    ] {
        let reached = routine
            .sources(sources)
            .map_err(|error| error.to_string())?;
        let files = reached.files();
        for (path, text) in all.iter().filter(|(path, _)| {
            path.starts_with(kernels.join(folder)) && files.contains(path.as_path())
        }) {
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            for (ptx, definitions) in all.iter().filter(|(other, _)| {
                other
                    .strip_prefix(&kernels)
                    .is_ok_and(|other| other.starts_with("ptx"))
            }) {
                for name in defined(definitions)
                    .into_iter()
                    .filter(|name| calls(code, name))
                {
                    if !files.contains(ptx.as_path()) {
                        return Err(format!(
                            "{} calls {name} of {}, which is not in the digest of {}",
                            path.display(),
                            ptx.display(),
                            routine.name()
                        ));
                    }
                }
            }
        }
    }
    Ok(())
}

/// Returns the names of the functions that a text defines at its top level.
fn defined(text: &str) -> Vec<&str> {
    text.lines()
        .filter_map(|line| {
            line.split_once("fn ")
                .filter(|(head, _)| head.is_empty() || head.starts_with("pub"))
        })
        .filter_map(|(_, rest)| rest.split(['(', '<']).next())
        .collect()
}

/// Returns true if a text calls a function.
fn calls(text: &str, name: &str) -> bool {
    text.match_indices(name).any(|(at, _)| {
        let before = text[..at]
            .chars()
            .next_back()
            .is_some_and(|c| c.is_alphanumeric() || c == '_');
        !before && text[at + name.len()..].starts_with(['(', ':'])
    })
}

/// Checks that the digests have the files that earlier, hand-written lists lacked although kernels
/// used them.
fn missed_before() -> Result<(), String> {
    let sources = WORKSPACE.as_ref().map_err(Clone::clone)?;
    let kernels = root().join("crates/marlin-kernels/src");
    let expected = [
        (Routine::Wgmma, "tile/cluster.rs"),
        (Routine::Wgmma, "ptx/cluster.rs"),
        (Routine::Wgmma, "ptx/griddepcontrol.rs"),
        (Routine::Gemv, "ptx/griddepcontrol.rs"),
        (Routine::Head, "planes.rs"),
        (Routine::Head, "pdl/mod.rs"),
    ];
    for (routine, file) in expected {
        let reached = routine
            .sources(sources)
            .map_err(|error| error.to_string())?;
        if !reached.files().contains(kernels.join(file).as_path()) {
            let found: Vec<_> = reached
                .files()
                .iter()
                .filter_map(|path| path.strip_prefix(root()).ok())
                .map(|path| path.display().to_string())
                .collect();
            return Err(format!(
                "{file} is not in the digest of {}, which has {}",
                routine.name(),
                found.join(", ")
            ));
        }
    }
    Ok(())
}

/// Returns every Rust file below a folder.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    entries
        .flat_map(|path| {
            if path.is_dir() {
                rust_files(&path)
            } else {
                vec![path]
            }
        })
        .filter(|path| path.extension().is_some_and(|end| end == "rs"))
        .collect()
}
