//! Builds all tests and runs their binaries. As many binaries run at a time as there are cores.
//!
//! Cargo runs one binary after the other, and the device tests use one thread most of the time,
//! because they share a device. The device tests on the CPU runtime therefore run as two processes.

use crate::process::{Error, build_messages, show, target};
use serde_json::Value;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

/// The name of the binary of the device tests, which runs once for each device.
const DEVICE: &str = "device";
/// The devices that every machine has, the slower one first, and the number of processes that run
/// the tests of each device. A process runs one test after the other.
const DEVICES: [(&str, usize); 2] = [("cpu", 2), ("flex", 1)];
/// The name of the binary that compiles kernels, which runs longest after the device tests.
const PROOF: &str = "sass";
/// The names of the binaries that run alone after all others, because their tests measure times.
const ALONE: [&str; 1] = ["hostile"];

/// A test binary.
struct Binary {
    /// The name of the cargo target.
    name: String,
    /// The file of the binary.
    path: PathBuf,
    /// The folder of the package, in which cargo runs the binary.
    folder: PathBuf,
}

/// One run of a test binary.
struct Job {
    name: String,
    command: Command,
}

/// Builds the tests of the workspace and runs them. `variable` is the name and the value of an
/// environment variable of the binary `sass`.
///
/// # Errors
/// Returns an error if a test fails; the output of its binary has then been printed.
pub fn run_tests(variable: Option<(&str, &Path)>) -> Result<(), Error> {
    // Not `--all-targets`, which builds test binaries of targets with `test = false`, too.
    let messages = build_messages(&["test", "--workspace", "--no-run"], &[])?;
    let binaries: Vec<Binary> = messages.lines().filter_map(binary).collect();
    let jobs = binaries
        .iter()
        .flat_map(|binary| jobs(binary, variable))
        .collect::<Vec<Job>>();
    let (alone, mut jobs): (Vec<Job>, Vec<Job>) = jobs
        .into_iter()
        .partition(|job| ALONE.contains(&job.name.as_str()));
    // The longest jobs run first, so that no core waits for them at the end.
    jobs.sort_by_key(|job| !(job.name.starts_with(DEVICE) || job.name == PROOF));
    let logs = target().join("test-logs");
    fs::create_dir_all(&logs).map_err(Error::file(&logs))?;
    let (waiting, failures) = (Mutex::new(jobs.into_iter()), Mutex::new(Vec::new()));
    let next = || {
        waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .next()
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while let Some(job) = next() {
                    if let Err(error) = run(job, &logs) {
                        failures
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .push(error);
                    }
                }
            });
        }
    });
    let mut failures = failures
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    failures.extend(alone.into_iter().filter_map(|job| run(job, &logs).err()));
    match failures.into_iter().next() {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// Returns the test binary that a message of cargo names; `None` if the message names no test
/// binary.
fn binary(message: &str) -> Option<Binary> {
    let message: Value = serde_json::from_str(message).ok()?;
    let path = PathBuf::from(message["executable"].as_str()?);
    let folder = Path::new(message["manifest_path"].as_str()?)
        .parent()?
        .to_path_buf();
    let is_test = message["profile"]["test"].as_bool()?;
    let target = &message["target"];
    let (name, kind) = (target["name"].as_str()?, target["kind"][0].as_str()?);
    let package = folder.file_name()?.to_string_lossy().into_owned();
    let name = match kind {
        "test" => name.to_owned(),
        kind => format!("{package} ({kind})"),
    };
    is_test.then_some(Binary { name, path, folder })
}

/// Returns the runs of a binary.
fn jobs(binary: &Binary, variable: Option<(&str, &Path)>) -> Vec<Job> {
    let command = || {
        let mut command = Command::new(&binary.path);
        command
            .current_dir(&binary.folder)
            .env("CARGO_MANIFEST_DIR", &binary.folder);
        command
    };
    if binary.name == DEVICE {
        let on = |(device, parts)| {
            (1..=parts).map(move |part| {
                let partition = format!("{part}/{parts}");
                let mut command = command();
                command.args(["--device", device, "--partition", &partition]);
                Job {
                    name: format!("{DEVICE} {device} {partition}"),
                    command,
                }
            })
        };
        return DEVICES.into_iter().flat_map(on).collect();
    }
    let mut command = command();
    if let Some((name, value)) = variable.filter(|_| binary.name == PROOF) {
        command.env(name, value);
    }
    vec![Job {
        name: binary.name.clone(),
        command,
    }]
}

/// Runs a job with its output in a file, and prints its result; if the job fails, prints the whole
/// output.
fn run(job: Job, logs: &Path) -> Result<(), Error> {
    let Job { name, mut command } = job;
    let log = logs.join(format!("{}.log", name.replace([' ', '/'], "-")));
    let [out, err] = [File::create(&log), File::options().append(true).open(&log)]
        .map(|file| file.map_err(Error::file(&log)));
    command.stdin(Stdio::null()).stdout(out?).stderr(err?);
    let clock = Instant::now();
    let status = command.status().map_err(|source| Error::Start {
        command: show(&command),
        source,
    })?;
    let seconds = clock.elapsed().as_secs_f64();
    let output = fs::read_to_string(&log).map_err(Error::file(&log))?;
    if !status.success() {
        println!("{output}\n--- {name}: failed after {seconds:.1} s");
        return Err(Error::Failed {
            command: show(&command),
            status,
        });
    }
    let is_remark = |line: &&str| {
        ["warning:", "proof:", "test result:"]
            .iter()
            .any(|start| line.starts_with(start))
    };
    let remarks: Vec<&str> = output.lines().filter(is_remark).collect();
    println!("--- {name}: ok in {seconds:.1} s\n{}", remarks.join("\n"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_binaries_of_tests_run() {
        let message = |test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/tests/Cargo.toml","target":{{"kind":["test"],"name":"device"}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let found = binary(&message(true, r#""/w/target/device-1""#));
        assert!(
            matches!(&found, Some(Binary { name, folder, .. }) if name == "device" && folder == Path::new("/w/tests"))
        );
        assert!(binary(&message(false, r#""/w/target/device-1""#)).is_none());
        assert!(binary(&message(true, "null")).is_none());
        let jobs = found.map(|binary| jobs(&binary, None)).unwrap_or_default();
        assert_eq!(
            jobs.iter()
                .map(|job| show(&job.command))
                .collect::<Vec<_>>(),
            [("cpu", "1/2"), ("cpu", "2/2"), ("flex", "1/1")].map(|(device, part)| format!(
                "/w/target/device-1 --device {device} --partition {part}"
            ))
        );
    }
}
