//! The record of the last complete run of the device tests on each kind of device:
//! `benches/records/device-tests.json`.

use super::git;
use crate::process::{Error, root};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The kinds of device that no other check runs on.
const DEVICES: [&str; 2] = ["cuda", "vulkan"];
/// The paths in which a change may affect what a device runs: the code that generates and launches
/// kernels, and the versions of its dependencies.
const DEVICE_CODE: [&str; 6] = [
    "crates/burn-marlin/src",
    "crates/marlin-nn/src",
    "crates/marlin-kernels/src",
    "crates/marlin-lm/src",
    "crates/marlin-quant/src",
    "Cargo.lock",
];

/// A run, in the form that `run.sh` prints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Run {
    device: String,
    commit: String,
    uncommitted_changes: bool,
    card: String,
    date: String,
    passed: usize,
    failed: usize,
    seconds: u64,
    /// The number of cores of the machine; `None` in older records, as `jobs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cores: Option<usize>,
    /// The number of processes at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    jobs: Option<usize>,
}

/// The last run of each kind of device.
type Runs = BTreeMap<String, Run>;

fn path() -> PathBuf {
    root().join("benches/records/device-tests.json")
}

fn read(path: &Path) -> Result<Runs, Error> {
    if !path.exists() {
        return Ok(Runs::new());
    }
    let text = fs::read_to_string(path).map_err(Error::file(path))?;
    serde_json::from_str(&text).map_err(|error| {
        Error::Needs(format!(
            "{}: no record of device tests: {error}",
            path.display()
        ))
    })
}

/// Records the run in `output`, a file with the output of `run.sh`, as the last run of its kind of
/// device. The last line of JSON in the file is the run.
pub fn record(output: &Path) -> Result<(), Error> {
    let text = fs::read_to_string(output).map_err(Error::file(output))?;
    let run =
        last_run(&text).map_err(|why| Error::Needs(format!("{}: {why}", output.display())))?;
    let path = path();
    let mut runs = read(&path)?;
    println!("xtask: {}, in {}", summary(&run), path.display());
    runs.insert(run.device.clone(), run);
    let text =
        serde_json::to_string_pretty(&runs).map_err(|error| Error::Needs(error.to_string()))?;
    fs::write(&path, text + "\n").map_err(Error::file(&path))
}

pub(super) fn last_run(text: &str) -> Result<Run, String> {
    let line = text
        .lines()
        .rev()
        .find(|line| line.starts_with('{'))
        .ok_or("has no line of JSON, which run.sh prints after a whole run")?;
    serde_json::from_str(line)
        .map_err(|error| format!("its last line of JSON is no run of device tests: {error}"))
}

/// Prints the result of the last complete run for each kind of device, and how many commits ago it
/// was.
pub fn print_last_runs() {
    let runs = read(&path());
    for device in DEVICES {
        let line = match &runs {
            Ok(runs) => runs.get(device).map_or_else(
                || {
                    format!(
                        "device tests on {device}: no whole run is recorded; `cargo xtask pack-gpu` packs them for a machine with a card"
                    )
                },
                |run| format!("{}, {}", summary(run), age(&run.commit, |args| git(args).ok())),
            ),
            Err(error) => error.to_string(),
        };
        println!("xtask: {line}");
    }
}

fn summary(run: &Run) -> String {
    let Run {
        device,
        card,
        date,
        passed,
        failed,
        seconds,
        cores,
        jobs,
        commit,
        ..
    } = run;
    let commit = commit.get(..12).unwrap_or(commit);
    let machine = match (cores, jobs) {
        (Some(cores), Some(jobs)) => format!(" on {cores} cores, {jobs} processes at a time,"),
        _ => String::new(),
    };
    let changes = if run.uncommitted_changes {
        " with uncommitted changes"
    } else {
        ""
    };
    format!(
        "device tests on {device} ({card}, {date}): {passed} passed, {failed} failed in {seconds} s{machine} at {commit}{changes}"
    )
}

/// Describes how many commits ago a commit was, from the history that `git` returns.
fn age(commit: &str, git: impl Fn(&[&str]) -> Option<String>) -> String {
    let range = format!("{commit}..HEAD");
    let count = |paths: &[&str]| {
        git(&[&["rev-list", "--count", &range, "--"][..], paths].concat())?
            .parse::<usize>()
            .ok()
    };
    match (count(&[]), count(&DEVICE_CODE)) {
        (Some(0), _) => "the commit that is checked out".into(),
        (Some(all), Some(of_device_code)) => {
            format!("{all} commits ago, of which {of_device_code} touched device code")
        }
        _ => "of which git does not say how many commits ago it was".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"device": "cuda", "commit": "0123456789abcdef", "uncommitted_changes": false, "card": "NVIDIA H100 80GB HBM3", "date": "2026-11-27", "passed": 170, "failed": 1, "seconds": 312, "cores": 16, "jobs": 12}"#;

    #[test]
    fn the_last_line_of_json_is_the_run() {
        let earlier = LINE.replace("170", "3");
        let run = last_run(&format!("ok 1.0 s layer\n{earlier}\n{LINE}\n\n")).unwrap();
        assert_eq!((run.passed, run.failed, run.seconds), (170, 1, 312));
        assert!(
            last_run("ok 1.0 s layer\n")
                .unwrap_err()
                .contains("no line of JSON")
        );
        assert!(
            last_run("{\"device\": \"cuda\"}")
                .unwrap_err()
                .contains("no run of device tests")
        );
        assert_eq!(
            summary(&run),
            "device tests on cuda (NVIDIA H100 80GB HBM3, 2026-11-27): 170 passed, 1 failed in 312 s on 16 cores, 12 processes at a time, at 0123456789ab"
        );
    }

    #[test]
    fn the_age_is_told_where_there_is_a_history() {
        let found = age("0123", |args| {
            assert_eq!(args[..4], ["rev-list", "--count", "0123..HEAD", "--"]);
            Some(if args.len() == 4 {
                "7".into()
            } else {
                "2".into()
            })
        });
        assert_eq!(found, "7 commits ago, of which 2 touched device code");
        assert_eq!(
            age("0123", |_| Some("0".into())),
            "the commit that is checked out"
        );
        assert_eq!(
            age("0123", |_| None),
            "of which git does not say how many commits ago it was"
        );
    }

    #[test]
    fn what_is_called_device_code_exists() {
        for path in DEVICE_CODE {
            assert!(root().join(path).exists(), "{path}");
        }
        assert!(read(&path()).is_ok());
    }
}
