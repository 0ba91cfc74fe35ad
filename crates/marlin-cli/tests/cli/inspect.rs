//! Tests of `inspect`.

use serde_json::{Value, json};

use crate::support::{Folder, args, cells, command, shipped, succeed, succeed_json};

/// The number of weights in the projections of the tiny model; `OTHERS` is the number of its other
/// weights.
const PROJECTIONS: usize = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256);
const OTHERS: usize = 4096 * 256 + 5 * 256;

/// Returns the row of a tensor in the JSON of `inspect`.
pub(crate) fn row<'a>(inspected: &'a Value, name: &str) -> &'a Value {
    inspected["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["name"] == name)
        .unwrap_or_else(|| panic!("no row {name}"))
}

#[test]
fn inspect_counts_weights_and_bytes() {
    let folder = Folder::tiny_quantized();
    let float = succeed_json(&args!["inspect", &folder.source, "--json"]);
    assert_eq!(float["weights"], PROJECTIONS + OTHERS);
    assert_eq!(float["bytes"], 2 * (PROJECTIONS + OTHERS));
    assert_eq!(float["bits_per_weight"], 16.0);
    assert_eq!(float["tensors"].as_array().unwrap().len(), 2 * 9 + 2);
    let layer = "model.layers.1.self_attn.k_proj";
    let expected = json!({
        "name": format!("{layer}.weight"), "format": "f16", "shape": [128, 256], "bytes": 2 * 128 * 256, "bits_per_weight": 16.0
    });
    assert_eq!(row(&float, &format!("{layer}.weight")), &expected);

    let quantized = succeed_json(&args![
        "inspect",
        &folder.target,
        "--device",
        "flex",
        "--json"
    ]);
    assert_eq!(quantized["weights"], PROJECTIONS + OTHERS);
    // The shape takes 16 bytes in each layer.
    let bytes = 2 * OTHERS + PROJECTIONS * 33 / 64 + 14 * 16;
    assert_eq!(quantized["bytes"], bytes);
    let bits = quantized["bits_per_weight"].as_f64().unwrap();
    assert!(
        (bits - bytes as f64 * 8.0 / (PROJECTIONS + OTHERS) as f64).abs() < 1e-9,
        "{bits}"
    );
    let mut found = row(&quantized, layer).clone();
    let reason = found["quantized"]["reason"].take();
    assert!(
        reason.as_str().is_some_and(|reason| !reason.is_empty()),
        "{reason}"
    );
    let expected = json!({
        "name": layer, "format": "pack-quantized int4 g128 f16", "shape": [128, 256], "bytes": 128 * 256 * 33 / 64 + 16,
        "bits_per_weight": 4.125,
        "quantized": {
            "bits": 4, "group": 128, "scales": "f16", "zero_points": false, "act_order": false, "sparsity": "dense", "kernel": "host", "reason": null
        }
    });
    assert_eq!(found, expected);
    assert_eq!(
        row(&quantized, "model.embed_tokens.weight")["bits_per_weight"],
        16.0
    );
}

#[test]
fn inspect_prints_equal_layers_in_one_line_and_the_total() {
    let folder = Folder::tiny_quantized();
    let text = succeed(&args!["inspect", &folder.target, "--device", "flex"]);
    let lines: Vec<&str> = text.lines().collect();
    // Nine tensors of each of the two layers, the embedding and the last norm.
    assert_eq!(lines.len(), 1 + 9 + 2 + 1, "{text}");
    assert_eq!(
        cells(lines[0]),
        [
            "tensor or layer",
            "count",
            "format",
            "shape",
            "size each",
            "bits per weight",
            "kernel",
            "reason"
        ]
    );
    let line = lines
        .iter()
        .find(|line| line.starts_with("model.layers.0..1.mlp.down_proj "))
        .unwrap();
    assert_eq!(
        cells(line)[1..7],
        [
            "2",
            "pack-quantized int4 g128 f16",
            "256 x 512",
            "67.6 kB",
            "4.12",
            "host"
        ]
    );
    let norm = lines
        .iter()
        .find(|line| line.starts_with("model.norm.weight "))
        .unwrap();
    assert_eq!(cells(norm)[1..], ["1", "f16", "256", "512 B", "16.00"]);
    assert!(
        lines
            .last()
            .unwrap()
            .starts_with(&format!("{} weights in 2708.2 kB: ", PROJECTIONS + OTHERS)),
        "{text}"
    );
}

#[test]
fn inspect_all_prints_a_line_for_each_tensor_and_the_total() {
    let folder = Folder::tiny_quantized();
    let text = succeed(&args![
        "inspect",
        &folder.target,
        "--device",
        "flex",
        "--all"
    ]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 1 + 2 * 9 + 2 + 1, "{text}");
    assert_eq!(
        cells(lines[0]),
        [
            "tensor or layer",
            "format",
            "shape",
            "size",
            "bits per weight",
            "kernel",
            "reason"
        ]
    );
    for layer in 0..2 {
        let line = lines
            .iter()
            .find(|line| line.starts_with(&format!("model.layers.{layer}.mlp.down_proj ")))
            .unwrap();
        assert_eq!(
            cells(line)[1..6],
            [
                "pack-quantized int4 g128 f16",
                "256 x 512",
                "67.6 kB",
                "4.12",
                "host"
            ]
        );
    }
    assert!(
        lines
            .last()
            .unwrap()
            .starts_with(&format!("{} weights in 2708.2 kB: ", PROJECTIONS + OTHERS)),
        "{text}"
    );
}

#[test]
fn inspect_keeps_layers_of_another_format_apart() {
    let folder = Folder::with_config(json!({ "num_hidden_layers": 12 }));
    succeed(&args![
        "quantize",
        &folder.source,
        &folder.target,
        "--exclude",
        "model.layers.3.mlp.up_proj"
    ]);
    let text = succeed(&args!["inspect", &folder.target, "--device", "flex"]);
    let lines = text
        .lines()
        .map(cells)
        .filter(|cells| cells[0].contains("mlp.up_proj"));
    let lines: Vec<[&str; 3]> = lines.map(|cells| [cells[0], cells[1], cells[2]]).collect();
    let int4 = "pack-quantized int4 g128 f16";
    let expected = [
        ["model.layers.0..2.mlp.up_proj", "3", int4],
        ["model.layers.4..11.mlp.up_proj", "8", int4],
        ["model.layers.3.mlp.up_proj.weight", "1", "f16"],
    ];
    assert_eq!(lines.len(), expected.len(), "{text}");
    assert!(expected.iter().all(|line| lines.contains(line)), "{text}");
    assert!(
        text.contains("model.layers.0..11.mlp.down_proj ") && !text.contains("model.layers.10."),
        "{text}"
    );
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let model = shipped();
    for args in [
        args!["inspect", &model],
        args![
            "generate",
            &model,
            "--device",
            "flex",
            "--prompt",
            "Once",
            "--max-new-tokens",
            "2"
        ],
    ] {
        let mut child = command(&args).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        assert!(
            !stderr.contains("panicked") && !stderr.contains("error"),
            "{stderr}"
        );
    }
}
