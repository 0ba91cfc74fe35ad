//! Tests that `quantize --method gptq`, killed at random moments or run with a full disk, resumes
//! and writes the same bytes.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Instant;

use rand::RngExt;

use crate::support::{Folder, args, calibrated, command, heldout, succeed, succeed_json};

/// The number of times that a test kills the program.
const KILLS: u32 = 10;

/// Returns arguments of `quantize` with calibration on a few samples.
fn gptq(source: &Path, target: &Path) -> Vec<OsString> {
    let mut args = calibrated(source, target, &heldout(), 16, 64);
    let mixed = "re:.*(k|down)_proj=bits:8";
    args.extend(args!["--method", "gptq", "--override", mixed, "--json"]);
    args
}

/// Returns the names and contents of the files in a folder.
fn contents(dir: &Path) -> BTreeMap<OsString, Vec<u8>> {
    let entries = dir.read_dir().unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| (entry.file_name(), fs::read(entry.path()).unwrap()))
        .collect()
}

/// Asserts that the files of a folder have the expected names and bytes.
#[track_caller]
fn assert_same(found: &Path, expected: &BTreeMap<OsString, Vec<u8>>) {
    let found = contents(found);
    assert!(
        found.keys().eq(expected.keys()),
        "{:?}, {:?}",
        found.keys(),
        expected.keys()
    );
    for (name, bytes) in &found {
        assert!(bytes == &expected[name], "{name:?}");
    }
}

/// Asserts that the folder beside the source has exactly these names.
#[track_caller]
fn expect_beside(folder: &Folder, expected: &[&str]) {
    let mut found = folder.leftovers();
    found.sort();
    assert_eq!(found, expected);
}

#[test]
fn a_run_that_is_killed_again_and_again_ends_with_the_same_bytes() {
    let mut rng = marlin_testing::rng();
    let folder = Folder::with_config(serde_json::json!({
        "num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1
    }));
    let whole = folder.beside("whole");
    let start = Instant::now();
    let report = succeed_json(&gptq(&folder.source, &whole));
    let mut length = start.elapsed();
    for layer in report["quantized"].as_array().unwrap() {
        let found = &layer["calibration"];
        assert_eq!(
            (&found["layer"], found["fell_back"].as_bool()),
            (&layer["name"], Some(false))
        );
        let numbers = ["tokens", "loss", "damping"].map(|field| found[field].as_f64().unwrap());
        assert!(
            numbers.iter().all(|&number| number > 0.0) && found["dead"].as_u64().is_some(),
            "{found}"
        );
    }
    let expected = contents(&whole);

    let args = gptq(&folder.source, &folder.target);
    let run_file = folder.beside("target.partial").join("run.json");
    let (mut kills, mut complete) = (0, 0);
    while kills < KILLS {
        // One kill in each tenth of a run's length, from early to late.
        let part = (f64::from(kills) + rng.random::<f64>()) / f64::from(KILLS);
        let moment = length.mul_f64(part);
        let mut child = command(&args).spawn().unwrap();
        sleep(moment);
        child.kill().unwrap();
        let status = child.wait().unwrap();
        println!("{part:.2} of {length:?}: {status}");
        if status.success() {
            // The work of earlier runs let this run finish before the kill. That is correct, too;
            // the kill is tried again on a run from the beginning.
            assert_same(&folder.target, &expected);
            fs::remove_dir_all(&folder.target).unwrap();
            complete += 1;
            // Other tests may have made the first run slow.
            length = length.mul_f64(0.8);
            assert!(complete < 3 * KILLS, "runs are never killed");
        } else {
            assert!(status.code().is_none(), "{status}");
            kills += 1;
            // The kill met a run that had removed its partial folder, whose target is complete. The
            // next run would refuse to write into it.
            if folder.target.exists() && !run_file.exists() {
                assert_same(&folder.target, &expected);
                fs::remove_dir_all(&folder.target).unwrap();
            }
        }
    }
    if !folder.target.exists() || run_file.exists() {
        succeed(&args);
    }
    assert_same(&folder.target, &expected);
    expect_beside(&folder, &["target", "whole"]);
}

/// A limit on file sizes stands for a full disk: in both cases the system refuses to write in the
/// middle of a file.
#[cfg(target_os = "linux")]
#[test]
fn a_run_on_a_full_disk_names_the_file_and_goes_on_later() {
    let folder = Folder::tiny();
    let whole = folder.beside("whole");
    succeed(&gptq(&folder.source, &whole));
    let expected = contents(&whole);
    let args = gptq(&folder.source, &folder.target);
    // The limit is in units of 512 bytes. 50 kB hold no block of the model; 1 MB holds each of its
    // blocks but not the target.
    for (limit, kept) in [(100, 0), (2000, 2)] {
        let script = format!("trap '' XFSZ; ulimit -f {limit}; exec \"$@\"");
        let program = command(&args);
        let mut limited = std::process::Command::new("sh");
        limited
            .args(["-c", &script, "sh"])
            .arg(program.get_program())
            .args(program.get_args());
        limited
            .envs(
                program
                    .get_envs()
                    .filter_map(|(name, value)| Some((name, value?))),
            )
            .env_remove("RUST_LOG");
        let output = limited.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(
            stderr.contains("cannot write")
                && stderr.contains("model.safetensors")
                && stderr.contains("File too large"),
            "{stderr}"
        );
        assert!(!folder.target.exists());
        let blocks = folder
            .beside("target.partial")
            .read_dir()
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        let blocks: Vec<OsString> = blocks.filter(|name| name != "run.json").collect();
        assert_eq!(blocks.len(), kept, "{blocks:?}");
    }
    succeed(&args);
    assert_same(&folder.target, &expected);
    expect_beside(&folder, &["target", "whole"]);
}
