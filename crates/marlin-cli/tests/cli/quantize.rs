//! Tests of `quantize`: the specs and file formats that it writes, and their effect on a model's
//! perplexity.

use serde_json::{Value, json};

use crate::inspect::row;
use crate::support::{
    Folder, args, heldout, read_json, read_safetensors, shipped, succeed, succeed_json,
    write_safetensors,
};

#[test]
fn quantize_writes_a_folder_that_other_engines_load() {
    let folder = Folder::tiny();
    std::fs::copy(
        shipped().join("generation_config.json"),
        folder.source.join("generation_config.json"),
    )
    .unwrap();
    let text = succeed(&args!["quantize", &folder.source, &folder.target]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0],
        "14 layers to int4 g128 f16, 4.12 bits per weight, 0 skipped"
    );
    let target = folder.target.to_str().unwrap();
    assert!(
        lines[1].starts_with("4459.0 kB to 2708.2 kB in ") && lines[1].ends_with(target),
        "{text}"
    );
    assert_eq!(folder.leftovers(), ["target"]);

    let (source, config) = (
        read_json(&folder.source.join("config.json")),
        read_json(&folder.target.join("config.json")),
    );
    let quantization = &config["quantization_config"];
    assert_eq!(quantization["quant_method"], "compressed-tensors");
    assert_eq!(quantization["format"], "pack-quantized");
    assert_eq!(quantization["ignore"], json!(["lm_head"]));
    let weights = &quantization["config_groups"]["group_0"]["weights"];
    assert_eq!([&weights["num_bits"], &weights["group_size"]], [4, 128]);
    assert_eq!(weights["symmetric"], true);
    for (field, value) in source.as_object().unwrap() {
        assert_eq!(&config[field], value, "{field}");
    }
    for name in ["tokenizer.json", "generation_config.json"] {
        assert!(
            std::fs::read(folder.source.join(name)).unwrap()
                == std::fs::read(folder.target.join(name)).unwrap(),
            "{name}"
        );
    }
    assert!(folder.target.join("model.safetensors").is_file());
}

#[test]
fn quantize_reports_the_same_numbers_as_inspect() {
    let folder = Folder::tiny();
    let report = succeed_json(&args!["quantize", &folder.source, &folder.target, "--json"]);
    assert_eq!(report["format"], "int4 g128 f16");
    assert_eq!(report["excluded"], json!([]));
    assert!(report["seconds"].as_f64().unwrap() > 0.0);
    let layers = report["quantized"].as_array().unwrap();
    assert_eq!(layers.len(), 14);
    let (float, quantized) = (&folder.source, &folder.target);
    assert_eq!(
        report["source_bytes"],
        succeed_json(&args!["inspect", float, "--json"])["bytes"]
    );
    let quantized = succeed_json(&args!["inspect", quantized, "--json"]);
    assert_eq!(report["target_bytes"], quantized["bytes"]);
    for layer in layers {
        let row = row(&quantized, layer["name"].as_str().unwrap());
        assert_eq!(row["shape"], json!([layer["n"], layer["k"]]));
        assert_eq!(row["bits_per_weight"], layer["bits_per_weight"]);
    }
}

/// A weight takes 4 bits; each group adds a scale of 16 bits and a zero point of 4 bits.
#[test]
fn every_group_size_with_and_without_zero_points_is_written_and_runs() {
    let folder = Folder::tiny();
    for (group, rows, size) in [("channel", 256.0, -1), ("g32", 32.0, 32), ("g64", 64.0, 64)] {
        for zero_points in [false, true] {
            let target = folder.beside(&format!("{group}-{zero_points}"));
            let mut args = args![
                "quantize",
                &folder.source,
                &target,
                "--group",
                group,
                "--json"
            ];
            args.extend(zero_points.then(|| "--zero-points".into()));
            let report = succeed_json(&args);
            let suffix = if zero_points { " zero-points" } else { "" };
            assert_eq!(report["format"], format!("int4 {group}{suffix} f16"));

            let layer = "model.layers.0.self_attn.q_proj";
            let inspected = succeed_json(&args!["inspect", &target, "--json"]);
            let row = row(&inspected, layer);
            assert_eq!(
                row["format"],
                format!("pack-quantized {}", report["format"].as_str().unwrap())
            );
            assert_eq!(
                row["bits_per_weight"],
                4.0 + if zero_points { 20.0 } else { 16.0 } / rows
            );
            let config = read_json(&target.join("config.json"));
            let weights = &config["quantization_config"]["config_groups"]["group_0"]["weights"];
            assert_eq!(weights["symmetric"], !zero_points);
            assert_eq!(weights["group_size"].as_i64().unwrap_or(-1), size);
            succeed(&args![
                "logits", &target, "--device", "flex", "--ids", "1,2,3"
            ]);
        }
    }
}

/// A weight takes 8 bits; each group adds a scale of 16 bits and a zero point of 8 bits.
#[test]
fn eight_bits_are_written_and_run() {
    let folder = Folder::tiny();
    for (zero_points, bits_per_weight) in [(false, 8.0 + 16.0 / 64.0), (true, 8.0 + 24.0 / 64.0)] {
        let target = folder.beside(&format!("int8-{zero_points}"));
        let mut args = args![
            "quantize",
            &folder.source,
            &target,
            "--bits",
            "8",
            "--group",
            "g64",
            "--json"
        ];
        args.extend(zero_points.then(|| "--zero-points".into()));
        let report = succeed_json(&args);
        assert_eq!(
            report["format"],
            if zero_points {
                "int8 g64 zero-points f16"
            } else {
                "int8 g64 f16"
            }
        );
        let layers = report["quantized"].as_array().unwrap();
        assert_eq!(layers.len(), 14);
        assert!(
            layers
                .iter()
                .all(|layer| layer["bits_per_weight"] == bits_per_weight),
            "{report}"
        );
        let config = read_json(&target.join("config.json"));
        assert_eq!(
            config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"],
            8
        );
        let kernels = succeed_json(&args![
            "kernels", &target, "--device", "flex", "--rows", "1", "--json"
        ]);
        let packed = kernels
            .as_array()
            .unwrap()
            .iter()
            .filter(|row| row["format"] == report["format"] && row["kernel"] == "host")
            .count();
        // Four matmuls in each layer.
        assert_eq!(packed, 8, "{kernels}");

        let ids = "1,2,3";
        let logits = |dir: &std::path::Path| -> Vec<f64> {
            let result = succeed_json(&args!["logits", dir, "--device", "flex", "--ids", ids]);
            result["logits"]
                .as_array()
                .unwrap()
                .iter()
                .map(|logit| logit.as_f64().unwrap())
                .collect()
        };
        let (float, int8) = (logits(&folder.source), logits(&target));
        let difference: f64 = float
            .iter()
            .zip(&int8)
            .map(|(float, int8)| (float - int8).powi(2))
            .sum();
        let norm: f64 = float.iter().map(|float| float.powi(2)).sum();
        let error = (difference / norm).sqrt();
        println!("int8, zero points {zero_points}: relative error of the logits {error:.4}");
        assert!(error > 0.0 && error < 0.03, "{error}");
    }
}

/// Costs 2 s.
#[test]
fn a_head_in_eight_bits_costs_the_shipped_model_nothing() {
    let folder = Folder::tiny();
    let report = succeed_json(&args![
        "quantize",
        shipped(),
        &folder.target,
        "--group",
        "g32",
        "--head",
        "8",
        "--json"
    ]);
    let layers = report["quantized"].as_array().unwrap();
    let head = layers.iter().find(|layer| layer["name"] == "lm_head");
    assert_eq!(head.unwrap()["format"], "int8 g128 f16");
    let config = read_json(&folder.target.join("config.json"));
    assert_eq!(config["tie_word_embeddings"], false);
    assert_eq!(config["quantization_config"]["ignore"], json!([]));
    let without = folder.beside("float-head");
    succeed(&args!["quantize", shipped(), &without, "--group", "g32"]);
    let perplexity = |dir: &std::path::Path| {
        let found = succeed_json(&args![
            "perplexity",
            dir,
            "--text",
            heldout(),
            "--device",
            "flex",
            "--max-tokens",
            "2048",
            "--json"
        ]);
        found["perplexity"].as_f64().unwrap()
    };
    let (float, eight) = (perplexity(&without), perplexity(&folder.target));
    assert!((eight / float - 1.0).abs() < 0.002, "{float}, {eight}");
}

#[test]
fn gptq_files_are_written() {
    let folder = Folder::tiny();
    let exclude = "model.layers.0.mlp.down_proj";
    let report = succeed_json(&args![
        "quantize",
        &folder.source,
        &folder.target,
        "--format",
        "gptq",
        "--exclude",
        exclude,
        "--json"
    ]);
    assert_eq!(
        (
            &report["format"],
            report["quantized"].as_array().unwrap().len()
        ),
        (&json!("int4 g128 f16"), 13)
    );
    let quantization = &read_json(&folder.target.join("config.json"))["quantization_config"];
    assert_eq!(
        [
            &quantization["quant_method"],
            &quantization["checkpoint_format"]
        ],
        ["gptq", "gptq_v2"]
    );
    assert_eq!(
        [&quantization["bits"], &quantization["group_size"]],
        [4, 128]
    );
    let (header, _) = read_safetensors(&folder.target.join("model.safetensors"));
    assert_eq!(
        header["model.layers.1.mlp.down_proj.qweight"]["shape"],
        json!([512 / 8, 256])
    );
    assert_eq!(header[format!("{exclude}.weight")]["dtype"], "F16");
    let inspected = succeed_json(&args![
        "inspect",
        &folder.target,
        "--device",
        "flex",
        "--json"
    ]);
    assert_eq!(
        row(&inspected, "model.layers.1.mlp.down_proj")["format"],
        "gptq v2 int4 g128 f16"
    );
    assert_eq!(
        row(&inspected, &format!("{exclude}.weight"))["format"],
        "f16"
    );
    succeed(&args![
        "logits",
        &folder.target,
        "--device",
        "flex",
        "--ids",
        "1,2,3"
    ]);
}

/// Scales in f16 would round small weights to larger values; the program names the options that
/// represent them.
#[test]
fn scales_of_small_weights_are_bf16_or_f32() {
    let folder = Folder::tiny();
    let path = folder.source.join("model.safetensors");
    let (header, mut whole) = read_safetensors(&path);
    let place = header["model.layers.1.mlp.down_proj.weight"]["data_offsets"].clone();
    let [start, end] = [0, 1].map(|i| place[i].as_u64().unwrap() as usize);
    // The smallest positive number of f16: its scale is the number divided by 7.5.
    whole[start..end]
        .as_chunks_mut()
        .0
        .iter_mut()
        .for_each(|bytes| *bytes = [1, 0]);
    write_safetensors(&path, &header, &whole);
    let report = succeed(&args!["quantize", &folder.source, &folder.target]);
    assert!(
        report.contains("1 layers have weights too small for f16 scales: --scales bf16"),
        "{report}"
    );
    for scales in ["bf16", "f32"] {
        let target = folder.beside(scales);
        let report = succeed_json(&args![
            "quantize",
            &folder.source,
            &target,
            "--scales",
            scales,
            "--json"
        ]);
        assert!(
            report["quantized"]
                .as_array()
                .unwrap()
                .iter()
                .all(|layer| layer["underflows"] == 0),
            "{report}"
        );
        let inspected = succeed_json(&args!["inspect", &target, "--device", "flex", "--json"]);
        assert_eq!(
            row(&inspected, "model.layers.1.mlp.down_proj")["quantized"]["scales"],
            scales
        );
    }
}

#[test]
fn excluded_layers_stay_as_they_are() {
    let folder = Folder::tiny();
    let exclude = [
        "--exclude",
        "model.layers.0.mlp.down_proj",
        "--exclude",
        "re:.*self_attn",
    ];
    let mut args = args!["quantize", &folder.source, &folder.target, "--json"];
    args.extend(exclude.map(Into::into));
    let report = succeed_json(&args);
    assert_eq!(report["quantized"].as_array().unwrap().len(), 5);
    let excluded = report["excluded"].as_array().unwrap();
    assert_eq!(excluded.len(), 9);
    let inspected = succeed_json(&args!["inspect", &folder.target, "--json"]);
    for layer in excluded {
        assert_eq!(
            row(&inspected, &format!("{}.weight", layer.as_str().unwrap()))["format"],
            "f16"
        );
    }
    assert_eq!(
        row(&inspected, "model.layers.1.mlp.down_proj")["format"],
        "pack-quantized int4 g128 f16"
    );

    let kernels = succeed_json(&args![
        "kernels",
        &folder.target,
        "--device",
        "flex",
        "--rows",
        "1",
        "--json"
    ]);
    let is_float =
        |row: &&Value| row["reason"] == "the weight is a float tensor" && row["layer"] != "lm_head";
    let dense: Vec<&str> = kernels
        .as_array()
        .unwrap()
        .iter()
        .filter(is_float)
        .map(|row| row["layer"].as_str().unwrap())
        .collect();
    let expected = [
        "0.self_attn.qkv_proj",
        "0.self_attn.o_proj",
        "0.mlp.down_proj",
        "1.self_attn.qkv_proj",
        "1.self_attn.o_proj",
    ];
    assert_eq!(dense, expected.map(|name| format!("model.layers.{name}")));
}

#[test]
fn four_bits_cost_the_shipped_model_little_and_eight_next_to_nothing() {
    let folder = Folder::shipped_quantized();
    let eight = folder.beside("int8");
    succeed(&args!["quantize", shipped(), &eight, "--bits", "8"]);
    let measure = |dir: &std::path::Path| {
        let text = heldout();
        let result = succeed_json(&args![
            "perplexity",
            dir,
            "--device",
            "flex",
            "--text",
            &text,
            "--max-tokens",
            "2048",
            "--json"
        ]);
        assert_eq!([&result["tokens"], &result["window"]], [4 * 511, 512]);
        let (perplexity, nll) = (
            result["perplexity"].as_f64().unwrap(),
            result["nll"].as_f64().unwrap(),
        );
        assert!(
            (perplexity.ln() - nll).abs() < 1e-9 && result["seconds"].as_f64().unwrap() > 0.0,
            "{result}"
        );
        perplexity
    };
    let (float, quantized, eight) = (
        measure(&shipped()),
        measure(&folder.target),
        measure(&eight),
    );
    println!("perplexity {float} in float, {quantized} in 4 bits, {eight} in 8");
    assert!((3.0..5.0).contains(&float), "{float}");
    assert!(
        quantized > float && quantized <= 1.08 * float,
        "{quantized} in 4 bits, {float} in float"
    );
    assert!(
        (eight / float - 1.0).abs() < 0.005,
        "{eight} in 8 bits, {float} in float"
    );
}
