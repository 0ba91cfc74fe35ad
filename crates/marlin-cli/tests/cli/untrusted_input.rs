//! Tests of malicious folders: each is refused with an error, quickly and without much memory.
//! `inspect` finds every fault.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use marlin_format::checkpoint::compressed_tensors::QuantizationConfig;
use marlin_format::{GroupSize, QuantSpec};
use serde_json::{Value, json};

use crate::support::{
    Folder, args, command, faults, read_json, read_safetensors, succeed, write_safetensors,
};

/// The longest time that a refusal may take. A worker stops a template or a tokenizer after four
/// seconds; the rest is for a busy machine.
const MOST_TIME: Duration = Duration::from_secs(10);
/// The most memory that the program itself may take. Its workers have a limit of their own.
const MOST_MEMORY: usize = 1 << 30;

/// Runs the program with arguments that it must refuse, with an error that has all of `words`.
#[track_caller]
fn refuse_soon(args: &[OsString], input: &[u8], words: &[&str]) {
    let start = Instant::now();
    let mut child = command(args).spawn().unwrap();
    // A program that refuses its arguments does not read.
    let _ = std::io::Write::write_all(&mut child.stdin.take().unwrap(), input);
    let mut peak = 0;
    let status = loop {
        peak = peak.max(peak_memory(&child));
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > MOST_TIME {
            child.kill().unwrap();
            panic!("{args:?} took more than {MOST_TIME:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut stderr = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut stderr)
        .unwrap();
    assert_eq!(status.code(), Some(1), "{args:?}: {status}, {stderr}");
    for word in words {
        assert!(
            stderr.contains(word),
            "{args:?}: `{word}` is not in: {stderr}"
        );
    }
    assert!(
        !stderr.contains('\u{1b}') && stderr.len() < 10_000,
        "{args:?}: {stderr:?}"
    );
    assert!(peak < MOST_MEMORY, "{args:?} had {peak} bytes");
}

/// Returns `VmHWM`, the peak memory of a process, in bytes; 0 if the system does not report it.
fn peak_memory(child: &Child) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|size| size.trim().trim_end_matches(" kB").parse::<usize>().ok())
        .map_or(0, |kilobytes| kilobytes * 1024)
}

fn generate(dir: &Path) -> Vec<OsString> {
    args![
        "generate",
        dir,
        "--device",
        "flex",
        "--prompt",
        "Once",
        "--max-new-tokens",
        "2"
    ]
}

fn chat(dir: &Path) -> Vec<OsString> {
    args!["chat", dir, "--device", "flex", "--max-new-tokens", "2"]
}

fn inspect(dir: &Path) -> Vec<OsString> {
    args!["inspect", dir, "--device", "flex"]
}

/// Writes a file whose tensors are a hole of `bytes` bytes. Returns false if the file system does
/// not support holes.
fn write_hole(path: &Path, header: &Value, bytes: usize) -> bool {
    write_safetensors(path, header, &[]);
    extend(path, bytes)
}

/// Adds a hole of `bytes` bytes to a file. Returns false if the file system does not support holes.
fn extend(path: &Path, bytes: usize) -> bool {
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() + bytes as u64)
        .is_ok()
}

#[cfg(unix)]
fn link(target: impl AsRef<Path>, path: &Path) {
    let _ = fs::remove_file(path);
    std::os::unix::fs::symlink(target, path).unwrap();
}

#[cfg(unix)]
fn pipe(path: &Path) {
    let _ = fs::remove_file(path);
    assert!(
        std::process::Command::new("mkfifo")
            .arg(path)
            .status()
            .unwrap()
            .success()
    );
}

#[cfg(unix)]
#[test]
fn files_that_never_end_or_never_begin_are_refused() {
    for name in [
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "model.safetensors",
        "quantize_config.json",
    ] {
        let folder = Folder::tiny();
        let path = folder.source.join(name);
        link("/dev/zero", &path);
        refuse_soon(
            &generate(&folder.source),
            b"",
            &[name, "not a regular file"],
        );
        pipe(&path);
        refuse_soon(
            &generate(&folder.source),
            b"",
            &[name, "not a regular file"],
        );
        faults(&folder.source, &[name, "not a regular file"]);
        link(name, &path);
        // A link to itself has the effect of a missing file; for weights and optional files the
        // report differs.
        if ["config.json", "tokenizer.json"].contains(&name) {
            refuse_soon(&generate(&folder.source), b"", &[name]);
        }
    }
}

#[cfg(unix)]
#[test]
fn links_to_what_is_not_of_the_folder_are_refused() {
    for name in [
        "tokenizer.json",
        "config.json",
        "model.safetensors",
        "chat_template.jinja",
    ] {
        let folder = Folder::tiny();
        let (path, secret) = (folder.source.join(name), folder.beside("secret"));
        if path.exists() {
            fs::rename(&path, &secret).unwrap();
        } else {
            fs::write(&secret, "the secret").unwrap();
        }
        link("../secret", &path);
        refuse_soon(
            &chat(&folder.source),
            b"Hello\n",
            &[name, "secret", "outside of the folder"],
        );
        faults(&folder.source, &[name, "outside of the folder"]);
    }
}

#[test]
fn what_a_header_declares_is_not_allocated() {
    let folder = Folder::tiny();
    let path = folder.source.join("model.safetensors");
    let (mut header, _) = read_safetensors(&path);
    // An embedding of 256 GB, whose data is only a hole in the file.
    let (vocab, hidden) = (1usize << 20, 1usize << 16);
    header = json!({ "model.embed_tokens.weight": { "dtype": "F32", "shape": [vocab, hidden], "data_offsets": [0, vocab * hidden * 4] },
        "__metadata__": header["__metadata__"] });
    if !write_hole(&path, &header, vocab * hidden * 4) {
        println!("the file system of temporary files has no holes");
        return;
    }
    folder.edit_config(|config| {
        config["vocab_size"] = vocab.into();
        config["hidden_size"] = hidden.into();
    });
    refuse_soon(
        &generate(&folder.source),
        b"",
        &["274877906944 bytes", "free"],
    );
    // `inspect` reads only a sample of the embedding: the pages of the file that it reads count as
    // its memory.
    refuse_soon(
        &inspect(&folder.source),
        b"",
        &["274877906944 bytes", "model.layers.0.mlp.down_proj.weight"],
    );

    // The same tensor twice, the second as the head, which is compared with the embedding if the
    // config ties them.
    let bytes = vocab * hidden * 4;
    let mut twice = header.clone();
    twice["lm_head.weight"] =
        json!({ "dtype": "F32", "shape": [vocab, hidden], "data_offsets": [bytes, 2 * bytes] });
    write_hole(&path, &twice, 2 * bytes);
    refuse_soon(&inspect(&folder.source), b"", &["549755813888 bytes"]);

    // 100 quantised layers, each of which would fit in memory; the model has two of them.
    let (n, words) = (1usize << 15, 1usize << 13);
    let (packed, all) = (n * words * 4, n * words * 4 + n * 4);
    let mut layers = json!({});
    for layer in 0..100 {
        let (name, start) = (format!("model.layers.{layer}.mlp.up_proj"), layer * all);
        layers[format!("{name}.weight_packed")] =
            json!({ "dtype": "I32", "shape": [n, words], "data_offsets": [start, start + packed] });
        layers[format!("{name}.weight_scale")] = json!({ "dtype": "F32", "shape": [n, 1], "data_offsets": [start + packed, start + all] });
    }
    write_hole(&path, &layers, 100 * all);
    let quantization = QuantizationConfig::new(QuantSpec::int4(GroupSize::Channel), vec![])
        .unwrap()
        .to_json();
    folder.edit_config(|config| config["quantization_config"] = quantization);
    refuse_soon(
        &inspect(&folder.source),
        b"",
        &["free", "model.norm.weight"],
    );
    folder.edit_config(|config| {
        drop(
            config
                .as_object_mut()
                .unwrap()
                .remove("quantization_config"),
        )
    });

    // A matrix with a bitmask, whose values would take more memory than the machine has.
    let data = [(n as i64).to_le_bytes(), (1i64 << 22).to_le_bytes()].concat();
    let (values, mask) = (n << 23, n << 19);
    let name = "model.layers.0.mlp.up_proj";
    let matrix = json!({
        format!("{name}.shape"): { "dtype": "I64", "shape": [2], "data_offsets": [0, 16] },
        format!("{name}.compressed"): { "dtype": "F32", "shape": [n, 1 << 21], "data_offsets": [16, 16 + values] },
        format!("{name}.bitmask"): { "dtype": "U8", "shape": [n, 1 << 19], "data_offsets": [16 + values, 16 + values + mask] },
    });
    write_safetensors(&path, &matrix, &data);
    extend(&path, values + mask);
    refuse_soon(
        &inspect(&folder.source),
        b"",
        &["up_proj", "takes 549755813888 bytes of memory"],
    );

    // A layer that is to be quantised.
    let name = "model.layers.0.mlp.up_proj.weight";
    header = json!({ name: header["model.embed_tokens.weight"] });
    write_hole(&path, &header, vocab * hidden * 4);
    refuse_soon(
        &args!["quantize", &folder.source, &folder.target],
        b"",
        &["up_proj", "68719476736 elements"],
    );
}

#[test]
fn positions_that_do_not_fit_the_memory_are_refused() {
    let folder = Folder::tiny();
    folder.edit_config(|config| config["max_position_embeddings"] = json!(1 << 30));
    let args = args![
        "generate",
        &folder.source,
        "--device",
        "flex",
        "--prompt",
        "Once",
        "--max-len",
        "1073741824"
    ];
    refuse_soon(&args, b"", &["1073741824 positions", "free", "max_len"]);
    succeed(&args![
        "generate",
        &folder.source,
        "--device",
        "flex",
        "--prompt",
        "Once",
        "--max-len",
        "64",
        "--max-new-tokens",
        "2"
    ]);
}

#[test]
fn templates_that_would_take_the_program_down_are_refused() {
    let signs = format!("{{{{ {}1 }}}}", "-".repeat(20_000));
    let cases: [(&str, &str); 5] = [
        (
            "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
            "nested",
        ),
        (&signs, "nested"),
        ("{{ 'a\nb' | indent(100000000000) }}", "memory"),
        (
            "{{ [1, 2, 3][:9223372036854775807:-1] }}{{ raise_exception('\u{1b}[2Jno') }}",
            "chat template",
        ),
        (
            "{% set ns = namespace(a='a') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
            "memory",
        ),
    ];
    for (template, word) in cases {
        let folder = Folder::shipped_with_template(template);
        refuse_soon(
            &chat(&folder.source),
            b"Hello\n",
            &["tokenizer_config.json", word],
        );
        faults(&folder.source, &["tokenizer_config.json", word]);
    }
}

#[test]
fn tokenizers_that_would_take_the_program_down_are_refused() {
    let doubling = json!({ "type": "Replace", "pattern": { "String": "e" }, "content": "ee" });
    let cases: [(&str, Value); 3] = [
        (
            "normalizer",
            json!({ "type": "Precompiled", "precompiled_charsmap": "AAAAAAAA//////////8=" }),
        ),
        (
            "normalizer",
            json!({ "type": "Sequence", "normalizers": vec![doubling; 40] }),
        ),
        (
            "post_processor",
            json!({ "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "<none>", "type_id": 0 } }],
            "pair": [], "special_tokens": {} }),
        ),
    ];
    for (field, value) in cases {
        let folder = Folder::tiny();
        let path = folder.source.join("tokenizer.json");
        let mut tokenizer = read_json(&path);
        tokenizer[field] = value;
        fs::write(&path, tokenizer.to_string()).unwrap();
        refuse_soon(&generate(&folder.source), b"", &["tokenizer.json"]);
        faults(&folder.source, &["tokenizer.json"]);
    }
}

#[test]
fn configs_without_bounds_are_refused() {
    let folder = Folder::tiny();
    let gptq = |dynamic: Value| json!({ "quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic });
    let patterns: serde_json::Map<String, Value> = (0..100_000)
        .map(|index| (format!("-:.*{index}$"), json!({})))
        .collect();
    folder.edit_config(|config| config["quantization_config"] = gptq(patterns.into()));
    refuse_soon(
        &generate(&folder.source),
        b"",
        &["config.json", "4096 patterns"],
    );
    let long = format!("\u{1b}[31m{}(", "a".repeat(100_000));
    folder.edit_config(|config| config["quantization_config"] = gptq(json!({ long: {} })));
    refuse_soon(
        &generate(&folder.source),
        b"",
        &["config.json", "regular expression"],
    );
}

#[test]
fn inspect_finds_every_fault() {
    let folder = Folder::tiny_quantized();
    let dir = &folder.target;
    succeed(&args!["inspect", dir, "--device", "flex"]);
    // A scale that is not a number, a missing tensor, an additional tensor, a norm of another
    // shape, a broken template, another tokenizer.
    let path = dir.join("model.safetensors");
    let (mut header, mut data) = read_safetensors(&path);
    let offset = header["model.layers.0.mlp.up_proj.weight_scale"]["data_offsets"][0]
        .as_u64()
        .unwrap() as usize;
    data[offset..offset + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
    let header_object = header.as_object_mut().unwrap();
    let norm = header_object
        .remove("model.layers.1.input_layernorm.weight")
        .unwrap();
    header_object.insert("model.layers.9.input_layernorm.weight".into(), norm);
    header["model.norm.weight"]["shape"] = json!([2, 128]);
    write_safetensors(&path, &header, &data);
    fs::write(dir.join("chat_template.jinja"), "{% for %}").unwrap();
    fs::write(
        dir.join("generation_config.json"),
        r#"{"do_sample": true, "top_p": 7.0}"#,
    )
    .unwrap();
    fs::write(dir.join("tokenizer.json"), "{}").unwrap();
    let found = faults(dir, &[]);
    for words in [
        ["model.layers.0.mlp.up_proj", "finite"],
        ["model.layers.1.input_layernorm.weight", "no tensor"],
        ["model.layers.9.input_layernorm.weight", "does not have"],
        ["model.norm.weight", "[2, 128]"],
        ["chat_template.jinja", "syntax error"],
        ["generation_config.json", "top_p"],
        ["tokenizer.json", "tokenizer"],
    ] {
        assert!(
            found
                .iter()
                .any(|fault| words.iter().all(|word| fault.contains(word))),
            "{words:?} is not in {found:#?}"
        );
    }
    assert_eq!(found.len(), 7, "{found:#?}");

    let run =
        crate::support::run_with_input(&args!["inspect", dir, "--device", "flex", "--json"], b"");
    let json: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(
        (run.code, json["faults"].as_array().unwrap().len()),
        (Some(1), 7)
    );
}
