//! Tests of `kernels`.

use std::path::Path;

use crate::support::{Folder, args, cells, command, succeed, succeed_json};

#[test]
fn kernels_name_what_runs_each_layer_and_why() {
    let folder = Folder::tiny_quantized();
    let kernels = succeed_json(&args![
        "kernels",
        &folder.target,
        "--device",
        "flex",
        "--rows",
        "1,8,9,512",
        "--json"
    ]);
    let rows = kernels.as_array().unwrap();
    // q, k and v are one matmul, and so are gate and up: four matmuls in each layer, and the head.
    assert_eq!(rows.len(), (2 * 4 + 1) * 4);
    let (head, layers): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row["layer"] == "lm_head");
    assert_eq!(
        head.iter()
            .map(|row| row["kernel"].as_str().unwrap())
            .collect::<Vec<_>>(),
        ["host", "host", "Burn's matmul", "Burn's matmul"]
    );
    // The norms before the layers' inputs, except the first norm, are part of their matmuls.
    let after_norm = layers
        .iter()
        .filter(|row| row["prologue"] == "norm before")
        .count();
    assert_eq!(after_norm, 3 * 4);
    // SwiGLU is part of the matmul of gate and up.
    let with_swiglu: Vec<_> = layers
        .iter()
        .filter(|row| row["epilogue"] == "SwiGLU after")
        .collect();
    assert_eq!(with_swiglu.len(), 2 * 4);
    assert!(
        with_swiglu
            .iter()
            .all(|row| row["layer"].as_str().unwrap().ends_with("gate_up_proj")),
        "{with_swiglu:?}"
    );
    for row in layers {
        // The kernel is the same for any number of rows.
        assert_eq!(row["kernel"], "host", "{row}");
        assert!(row["reason"].as_str().unwrap().contains("Flex"), "{row}");
        assert_eq!(row["format"], "int4 g128 f16");
    }
    let row = rows
        .iter()
        .find(|row| row["layer"] == "model.layers.1.mlp.gate_up_proj")
        .unwrap();
    assert_eq!([&row["k"], &row["n"]], [256, 1024]);

    // The two layers differ only in the norm before the first one: their other three matmuls share
    // a line for each of the two M.
    let print = |more: Option<&str>| {
        let mut args = args!["kernels", &folder.target, "--device", "flex"];
        args.extend(more.map(Into::into));
        succeed(&args)
    };
    let folded = print(None);
    let rows: Vec<_> = folded.lines().map(cells).collect();
    assert_eq!(rows.len(), 1 + (2 + 3 + 1) * 2, "{folded}");
    assert_eq!(
        rows[0],
        [
            "layer", "count", "K", "N", "M", "format", "prologue", "epilogue", "kernel", "reason"
        ]
    );
    for m in ["1", "512"] {
        let row = [
            "model.layers.0..1.self_attn.o_proj",
            "2",
            "256",
            "256",
            m,
            "int4 g128 f16",
            "none",
            "none",
            "host",
        ];
        assert_eq!(
            rows.iter().filter(|cells| cells.starts_with(&row)).count(),
            1,
            "{row:?} in {folded}"
        );
    }
    let all = print(Some("--all"));
    let rows: Vec<_> = all.lines().map(cells).collect();
    assert_eq!(rows.len(), 1 + (8 + 1) * 2, "{all}");
    assert_eq!(
        rows[0],
        [
            "layer", "K", "N", "M", "format", "prologue", "epilogue", "kernel", "reason"
        ]
    );
    for layer in [
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.self_attn.o_proj",
    ] {
        let row = [
            layer,
            "256",
            "256",
            "512",
            "int4 g128 f16",
            "none",
            "none",
            "host",
        ];
        assert_eq!(
            rows.iter().filter(|cells| cells.starts_with(&row)).count(),
            1,
            "{row:?} in {all}"
        );
    }

    let float = succeed_json(&args![
        "kernels",
        &folder.source,
        "--device",
        "flex",
        "--json"
    ]);
    for row in float.as_array().unwrap() {
        assert_eq!(
            row["kernel"],
            if row["rows"] == 1 {
                "host"
            } else {
                "Burn's matmul"
            }
        );
        assert!(row["reason"].as_str().unwrap().contains("float"));
    }
}

#[test]
fn a_kernel_cache_that_cannot_be_written_is_a_warning() {
    let folder = Folder::tiny();
    let kernels = |cache: &Path| {
        let output = command(&args!["kernels", &folder.source, "--device", "cpu"])
            .env("BURN_MARLIN_CACHE", cache)
            .output()
            .unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let cache = folder.beside("cache");
    assert_eq!(kernels(&cache), "");
    assert!(cache.is_dir());
    let file = folder.beside("file");
    std::fs::write(&file, "").unwrap();
    let warning = kernels(&file);
    assert!(
        warning.contains("compiled kernels are not kept") && warning.contains("BURN_MARLIN_CACHE"),
        "{warning}"
    );
}
