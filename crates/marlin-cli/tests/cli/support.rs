//! Helpers that run the program, and the folders to run it on.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use burn::tensor::{Device, FloatDType};
use marlin_lm::{Model, ModelConfig, save_float};
use marlin_testing::with_fields;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Builds arguments from texts and references to paths.
macro_rules! args {
    ($($arg:expr),* $(,)?) => { Vec::from([$(std::ffi::OsString::from($arg)),*]) };
}
pub(crate) use args;

/// The result of a run of the program.
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Returns a command that runs the program with arguments, without environment variables that
/// change its output, and without the kernel cache.
pub fn command(args: &[OsString]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-marlin"));
    command
        .args(args)
        .env_remove("RUST_LOG")
        .env("BURN_MARLIN_CACHE", "off")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

pub fn run_with_input(args: &[OsString], input: &[u8]) -> Run {
    run_command(command(args), input)
}

/// Runs a command of the program with these bytes as its standard input.
pub fn run_command(mut command: Command, input: &[u8]) -> Run {
    let mut child = command.spawn().unwrap();
    // A program that refuses its arguments does not read; its output gives the reason.
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!stderr.contains("panicked at"), "{command:?}: {stderr}");
    Run {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr,
    }
}

/// Returns the arguments of `quantize` on Flex that calibrate on `samples` parts of a text, each of
/// up to `max_len` tokens.
pub fn calibrated(
    source: &Path,
    target: &Path,
    text: &Path,
    samples: usize,
    max_len: usize,
) -> Vec<OsString> {
    let [samples, max_len] = [samples, max_len].map(|count| count.to_string());
    args![
        "quantize",
        source,
        target,
        "--device",
        "flex",
        "--calibration",
        text,
        "--samples",
        samples,
        "--max-len",
        max_len
    ]
}

/// Runs the program, which must succeed, and returns its standard output.
#[track_caller]
pub fn succeed(args: &[OsString]) -> String {
    let run = run_with_input(args, b"");
    assert_eq!(run.code, Some(0), "{args:?}: {}", run.stderr);
    run.stdout
}

/// Runs the program, which must succeed, and returns its standard output as JSON.
#[track_caller]
pub fn succeed_json(args: &[OsString]) -> Value {
    serde_json::from_str(&succeed(args)).unwrap()
}

/// Runs the program with arguments that it must refuse: exit code 1, nothing on standard output,
/// and a message on standard error with all of `words`.
#[track_caller]
pub fn refuse(args: &[OsString], words: &[&str]) {
    let run = run_with_input(args, b"");
    assert_eq!(run.code, Some(1), "{args:?}: {}{}", run.stdout, run.stderr);
    assert_eq!(run.stdout, "", "{args:?}");
    assert!(
        run.stderr.starts_with("error: "),
        "{args:?}: {}",
        run.stderr
    );
    for word in words {
        assert!(
            run.stderr.contains(word),
            "{args:?}: `{word}` is not in: {}",
            run.stderr
        );
    }
}

/// Runs `inspect`, which must find faults: exit code 1, and on standard error a line for each fault
/// and all of `words`. Returns the faults.
#[track_caller]
pub fn faults(dir: &Path, words: &[&str]) -> Vec<String> {
    let run = run_with_input(&args!["inspect", dir, "--device", "flex"], b"");
    assert_eq!(run.code, Some(1), "{}{}", run.stdout, run.stderr);
    for word in words {
        assert!(
            run.stderr.contains(word),
            "`{word}` is not in: {}",
            run.stderr
        );
    }
    let faults: Vec<String> = run
        .stderr
        .lines()
        .filter_map(|line| line.strip_prefix("fault: "))
        .map(String::from)
        .collect();
    let count = format!("{} fault", faults.len());
    assert!(
        run.stderr
            .lines()
            .last()
            .is_some_and(|last| last.starts_with("error: ") && last.contains(&count)),
        "{}",
        run.stderr
    );
    faults
}

/// Returns the cells of a line of a table.
pub fn cells(line: &str) -> Vec<&str> {
    line.split("  ")
        .map(str::trim)
        .filter(|cell| !cell.is_empty())
        .collect()
}

/// Returns the folder of the trained model in the repository: 4096 tokens, hidden size 256, 512
/// positions.
pub fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/train-tiny-llama/model")
}

/// Returns the path of the held-out text, which the shipped model was not trained on.
pub fn heldout() -> PathBuf {
    shipped().join("../heldout.txt")
}

/// The lock that is held while random weights are drawn.
static DRAWING: Mutex<()> = Mutex::new(());

/// A temporary folder that contains only the model `source`.
pub struct Folder {
    parent: TempDir,
    /// The model.
    pub source: PathBuf,
    /// The folder for a quantised model.
    pub target: PathBuf,
}

impl Folder {
    fn empty() -> Self {
        let parent = tempfile::tempdir().unwrap();
        let (source, target) = (parent.path().join("source"), parent.path().join("target"));
        Self {
            parent,
            source,
            target,
        }
    }

    /// Creates a random model in f16 with the shipped tokenizer. Its projections have K = 256,
    /// except `down_proj`, which has K = 512.
    pub fn tiny() -> Self {
        Self::with_config(json!({}))
    }

    /// Creates the [`tiny`](Self::tiny) model with other fields in its config.
    pub fn with_config(fields: Value) -> Self {
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": true, "head_dim": 64,
        });
        let config: ModelConfig = serde_json::from_value(with_fields(config, &fields)).unwrap();
        let (folder, device) = (Self::empty(), Device::flex());
        // Flex has one generator for all threads.
        let drawing = DRAWING.lock().unwrap_or_else(PoisonError::into_inner);
        device.seed(marlin_testing::seed());
        save_float(
            &Model::new(&config, &device),
            &config,
            &folder.source,
            FloatDType::F16,
        )
        .unwrap();
        drop(drawing);
        std::fs::copy(
            shipped().join("tokenizer.json"),
            folder.source.join("tokenizer.json"),
        )
        .unwrap();
        folder
    }

    /// Creates the tiny model and quantises it to 4 bits, in `target`.
    pub fn tiny_quantized() -> Self {
        let folder = Self::tiny();
        succeed(&args!["quantize", &folder.source, &folder.target]);
        folder
    }

    /// Quantises the shipped model to 4 bits, in `target`; `source` does not exist.
    pub fn shipped_quantized() -> Self {
        let folder = Self::empty();
        succeed(&args!["quantize", shipped(), &folder.target]);
        folder
    }

    /// Copies the shipped model, with this chat template, to `source`.
    pub fn shipped_with_template(template: &str) -> Self {
        let folder = Self::empty();
        std::fs::create_dir(&folder.source).unwrap();
        for file in [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
        ] {
            std::fs::copy(shipped().join(file), folder.source.join(file)).unwrap();
        }
        let config = json!({ "chat_template": template, "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>" });
        std::fs::write(
            folder.source.join("tokenizer_config.json"),
            config.to_string(),
        )
        .unwrap();
        folder
    }

    /// Returns the names of the files beside the model, including hidden files.
    pub fn leftovers(&self) -> Vec<OsString> {
        let names = self
            .parent
            .path()
            .read_dir()
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        names.filter(|name| name != "source").collect()
    }

    /// Changes the config of the model at `source`.
    pub fn edit_config(&self, change: impl FnOnce(&mut Value)) {
        let path = self.source.join("config.json");
        let mut config = read_json(&path);
        change(&mut config);
        std::fs::write(path, config.to_string()).unwrap();
    }

    /// Returns a path beside the model.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.parent.path().join(name)
    }
}

pub fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Reads a safetensors file: returns the header, and the bytes of all tensors.
pub fn read_safetensors(path: &Path) -> (Value, Vec<u8>) {
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (
        serde_json::from_slice(&bytes[8..8 + length]).unwrap(),
        bytes[8 + length..].to_vec(),
    )
}

pub fn write_safetensors(path: &Path, header: &Value, data: &[u8]) {
    let header = header.to_string();
    let header = format!("{header:<width$}", width = header.len().next_multiple_of(8));
    std::fs::write(
        path,
        [
            &(header.len() as u64).to_le_bytes(),
            header.as_bytes(),
            data,
        ]
        .concat(),
    )
    .unwrap();
}
