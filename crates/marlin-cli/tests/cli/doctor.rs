//! Tests of `doctor`.

use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Folder, args, command, succeed, succeed_json};

/// Runs `doctor` for a folder on Flex and returns its exit code, its faults, and standard error.
fn doctor(dir: &Path) -> (Option<i32>, Vec<Value>, String) {
    let output = command(&args!["doctor", dir, "--device", "flex", "--json"])
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let faults = section(&report, "folder")["checks"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|check| check["status"] == "error")
        .cloned()
        .collect();
    let stderr = String::from_utf8(output.stderr).unwrap();
    (output.status.code(), faults, stderr)
}

fn section<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["sections"]
        .as_array()
        .unwrap()
        .iter()
        .find(|section| section["name"] == name)
        .unwrap_or_else(|| panic!("no section {name} in {report}"))
}

fn check<'a>(report: &'a Value, section_name: &str, name: &str) -> &'a Value {
    section(report, section_name)["checks"]
        .as_array()
        .unwrap()
        .iter()
        .find(|check| check["name"] == name)
        .unwrap_or_else(|| panic!("no {name} in {report}"))
}

/// Asserts that `doctor` finds a fault of a folder: exit code 1, and a message and what to do that
/// have these words.
#[track_caller]
fn assert_fault(dir: &Path, message: &[&str], fix: &str) {
    let (code, faults, stderr) = doctor(dir);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(
        stderr.contains("error: ") && stderr.contains("check"),
        "{stderr}"
    );
    let is_it = |fault: &&Value| {
        let text = fault["message"].as_str().unwrap();
        message.iter().all(|word| text.contains(word))
            && fault["fix"].as_str().unwrap().contains(fix)
    };
    assert!(faults.iter().any(|fault| is_it(&fault)), "{faults:?}");
}

/// Returns the version of a package in the repository's lock file.
fn locked(package: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.lock");
    let lock = std::fs::read_to_string(path).unwrap();
    let mut lines = lock
        .lines()
        .skip_while(|line| *line != format!("name = \"{package}\""));
    let version = lines.nth(1).unwrap();
    version
        .trim_start_matches("version = ")
        .trim_matches('"')
        .into()
}

#[test]
fn doctor_prints_a_line_for_each_check() {
    let text = succeed(&args!["doctor"]);
    let headings: Vec<_> = text.lines().filter(|line| !line.starts_with(' ')).collect();
    assert_eq!(headings, ["program", "cuda", "vulkan", "cpu", "caches"]);
    let mut checks = 0;
    for line in text.lines().filter(|line| line.starts_with(' ')) {
        let status = line.split_whitespace().next().unwrap();
        assert!(["ok", "warning"].contains(&status), "{line}");
        assert_eq!(line.contains("; fix: "), status == "warning", "{line}");
        checks += 1;
    }
    assert!(checks >= 16, "{text}");

    let report = succeed_json(&args!["doctor", "--json"]);
    let count = |status: &str| {
        let sections = report["sections"].as_array().unwrap().iter();
        sections
            .flat_map(|section| section["checks"].as_array().unwrap())
            .filter(|check| check["status"] == status)
            .count()
    };
    assert_eq!(report["errors"], 0);
    assert_eq!(report["warnings"], count("warning"));
}

#[test]
fn doctor_knows_the_versions_that_it_is_built_from() {
    let report = succeed_json(&args!["doctor", "--json"]);
    let version = |name: &str| check(&report, "program", name)["message"].clone();
    assert_eq!(version("burn-marlin"), env!("CARGO_PKG_VERSION"));
    assert_eq!(version("Burn"), locked("burn"));
    assert_eq!(version("CubeCL"), locked("cubecl"));
    assert_eq!(version("runtimes"), "cuda,vulkan,cpu,flex");
    let cores = check(&report, "cpu", "cores")["message"].as_str().unwrap();
    assert!(cores.parse::<usize>().unwrap() > 0);
}

/// Tests nothing on machines with a driver.
#[test]
fn a_missing_driver_is_a_warning_with_the_command_that_installs_it() {
    let report = succeed_json(&args!["doctor", "--json"]);
    let driver = check(&report, "cuda", "driver");
    if driver["status"] == "ok" {
        return;
    }
    assert_eq!(driver["status"], "warning");
    let words = |field: &str| driver[field].as_str().unwrap().to_owned();
    assert!(words("message").contains("libcuda"), "{driver}");
    assert!(
        words("fix").contains("nvidia") || words("fix").contains("ubuntu-drivers"),
        "{driver}"
    );
    for name in ["nvrtc", "headers"] {
        assert_ne!(check(&report, "cuda", name)["status"], "error");
    }
    assert_ne!(
        check(&report, "program", "default device")["message"],
        "cuda"
    );
}

#[test]
fn the_kernel_cache_is_found_writable_or_off() {
    let parent = tempfile::tempdir().unwrap();
    let kernels = |cache: &Path| {
        let output = command(&args!["doctor", "--json"])
            .env("BURN_MARLIN_CACHE", cache)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let report = serde_json::from_slice(&output.stdout).unwrap();
        check(&report, "caches", "kernels").clone()
    };
    let folder = parent.path().join("cache");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("x.db"), [0; 1234]).unwrap();
    let found = kernels(&folder);
    assert_eq!(found["status"], "ok");
    let message = found["message"].as_str().unwrap();
    assert!(
        message.contains(folder.to_str().unwrap()) && message.contains("1234 B, writable"),
        "{found}"
    );

    let file = parent.path().join("file");
    std::fs::write(&file, "").unwrap();
    let found = kernels(&file);
    assert_eq!(found["status"], "warning");
    let message = found["message"].as_str().unwrap();
    assert!(
        message.contains(file.to_str().unwrap()) && message.contains("cannot be written"),
        "{found}"
    );
    assert!(
        found["fix"].as_str().unwrap().contains("BURN_MARLIN_CACHE"),
        "{found}"
    );

    let found = kernels(Path::new("off"));
    assert!(found["status"] == "ok" && found["message"].as_str().unwrap().starts_with("off"));
}

#[test]
fn a_good_folder_has_no_faults() {
    let folder = Folder::tiny_quantized();
    let args = args!["doctor", &folder.target, "--device", "flex"];
    let text = succeed(&args);
    for words in [
        "LlamaForCausalLM, 2 blocks, 64 positions",
        "4096 tokens",
        "14 quantised layers",
        "every file and tensor",
    ] {
        assert!(text.contains(words), "`{words}` is not in: {text}");
    }
    let report = succeed_json(&[args, args!["--json"]].concat());
    let template = check(&report, "folder", "chat template");
    assert!(template["message"].as_str().unwrap().starts_with("none"));
    assert_eq!(report["errors"], 0);
    // With a chat template, and on the device that is chosen by default.
    let folder = Folder::shipped_with_template("{{ messages[0].content }}");
    let report = succeed_json(&args!["doctor", &folder.source, "--json"]);
    let template = check(&report, "folder", "chat template");
    assert_eq!(template["message"], "tokenizer_config.json");
}

#[test]
fn a_missing_tokenizer_is_a_fault() {
    let folder = Folder::tiny();
    std::fs::remove_file(folder.source.join("tokenizer.json")).unwrap();
    assert_fault(
        &folder.source,
        &["tokenizer.json"],
        "hf download REPO 'tokenizer.json' --local-dir",
    );
}

#[test]
fn a_truncated_file_is_a_fault() {
    let folder = Folder::tiny();
    let path = folder.source.join("model.safetensors");
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 100).unwrap();
    assert_fault(
        &folder.source,
        &["model.safetensors", "truncated"],
        "hf download REPO 'model.safetensors' --local-dir",
    );
}

#[test]
fn a_missing_shard_is_a_fault() {
    let folder = Folder::tiny();
    let (first, second) = (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    );
    std::fs::rename(
        folder.source.join("model.safetensors"),
        folder.source.join(first),
    )
    .unwrap();
    let index = json!({ "weight_map": {
        "model.norm.weight": first, "model.embed_tokens.weight": second,
    }});
    std::fs::write(
        folder.source.join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    assert_fault(
        &folder.source,
        &[second, "is missing"],
        &format!("hf download REPO '{second}' --local-dir"),
    );
}

#[test]
fn a_folder_that_is_not_there_is_a_fault_with_every_part() {
    let folder = Folder::tiny();
    let (code, faults, _) = doctor(&folder.beside("missing"));
    assert_eq!(code, Some(1));
    assert_eq!(faults.len(), 3, "config, tokenizer, weights: {faults:?}");
}
