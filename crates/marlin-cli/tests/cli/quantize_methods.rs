//! Tests of `quantize` with calibration and with pruning.

use serde_json::{Value, json};

use crate::inspect::row;
use crate::support::{
    Folder, args, calibrated, heldout, read_safetensors, run_with_input, succeed, succeed_json,
};

#[test]
fn awq_writes_the_norms_that_it_divides() {
    let folder = Folder::tiny();
    let calibrate = |target: &std::path::Path, method: &[&str]| {
        let mut args = calibrated(&folder.source, target, &heldout(), 4, 64);
        args.push("--json".into());
        args.extend(method.iter().map(std::ffi::OsString::from));
        succeed_json(&args)
    };
    let place = |dir: &std::path::Path| {
        let (header, _) = read_safetensors(&dir.join("model.safetensors"));
        let offsets = &header["model.layers.1.input_layernorm.weight"]["data_offsets"];
        let [start, end] = [0, 1].map(|index| offsets[index].as_u64().unwrap() as usize);
        start..end
    };
    let norm = |dir: &std::path::Path| {
        read_safetensors(&dir.join("model.safetensors")).1[place(dir)].to_vec()
    };
    // A few features are 20 times as large as the others, so that scaling reduces the error for any
    // weights.
    let file = folder.source.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for value in bytes[data..][place(&folder.source)]
        .as_chunks_mut::<2>()
        .0
        .iter_mut()
        .step_by(16)
    {
        // 20 in f16.
        *value = 0x4d00u16.to_le_bytes();
    }
    std::fs::write(&file, bytes).unwrap();
    for (index, method) in [&["--method", "awq"][..], &["--method", "gptq", "--awq"]]
        .into_iter()
        .enumerate()
    {
        let target = folder.beside(&format!("awq-{index}"));
        let report = calibrate(&target, method);
        let layers = report["quantized"].as_array().unwrap();
        assert!(
            layers.len() == 14
                && layers
                    .iter()
                    .all(|layer| layer["calibration"]["tokens"] == 256),
            "{report}"
        );
        assert_ne!(norm(&target), norm(&folder.source));
        succeed(&args![
            "logits", &target, "--device", "flex", "--ids", "1,2,3"
        ]);
    }
}

/// The document is larger than the worker's memory allows in one call of the tokenizer.
#[test]
fn a_document_of_ten_megabytes_is_calibrated_on() {
    let folder = Folder::tiny();
    let file = folder.beside("long.jsonl");
    std::fs::write(
        &file,
        json!({ "text": "fn main() { println!(\"a line of text\"); }\n".repeat(240_000) })
            .to_string(),
    )
    .unwrap();
    let mut args = calibrated(&folder.source, &folder.target, &file, 8, 32);
    args.extend(args!["--method", "gptq", "--json"]);
    let report = succeed_json(&args);
    assert!(
        report["quantized"]
            .as_array()
            .unwrap()
            .iter()
            .all(|layer| layer["calibration"]["tokens"] == 256),
        "{report}"
    );
}

#[test]
fn a_pruned_model_stores_two_of_every_four_weights() {
    let folder = Folder::tiny();
    let report = succeed_json(&args![
        "quantize",
        &folder.source,
        &folder.target,
        "--sparse24",
        "--json"
    ]);
    assert_eq!(report["format"], "int4 g128 f16 2:4");
    let layers = report["quantized"].as_array().unwrap();
    // Four bits for every weight, including the zeros that readers of compressed-tensors expect,
    // and a scale of 16 bits for 128 weights.
    assert!(
        layers
            .iter()
            .all(|layer| layer["sparsity"] == "2:4"
                && layer["bits_per_weight"] == 4.0 + 16.0 / 128.0),
        "{report}"
    );
    let inspected = succeed_json(&args![
        "inspect",
        &folder.target,
        "--device",
        "flex",
        "--json"
    ]);
    let layer = row(&inspected, "model.layers.1.mlp.down_proj");
    assert_eq!(
        [&layer["format"], &layer["quantized"]["sparsity"]],
        ["pack-quantized int4 g128 f16 2:4", "2:4"]
    );
    assert_eq!(layer["bits_per_weight"], 3.125);
    succeed(&args![
        "generate",
        &folder.target,
        "--device",
        "flex",
        "--prompt",
        "Once",
        "--max-new-tokens",
        "2"
    ]);

    // Two bits for every weight, and one of metadata, store the same model, in a format that few
    // readers support.
    let kept = folder.beside("kept");
    let run = run_with_input(
        &args![
            "quantize",
            &folder.source,
            &kept,
            "--sparse24",
            "--format",
            "marlin-24",
            "--json"
        ],
        &[],
    );
    assert!(
        run.code == Some(0) && run.stderr.contains("0.15 on and vLLM read no marlin-24"),
        "{}",
        run.stderr
    );
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    assert!(
        report["quantized"]
            .as_array()
            .unwrap()
            .iter()
            .all(|layer| layer["bits_per_weight"] == 3.125),
        "{report}"
    );
    let inspected = succeed_json(&args!["inspect", &kept, "--device", "flex", "--json"]);
    assert_eq!(
        row(&inspected, "model.layers.1.mlp.down_proj")["format"],
        "marlin-24 int4 g128 f16 2:4"
    );
    let [sparse, dense] = [&folder.target, &kept]
        .map(|dir| succeed(&args!["logits", dir, "--device", "flex", "--ids", "1,2,3"]));
    assert_eq!(sparse, dense);
}
