//! Tests of `advise`.

use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{Folder, args, refuse, run_with_input, shipped, succeed, succeed_json};

/// The names of the cards in the program's table.
const CARDS: [&str; 11] = [
    "a100-40gb",
    "a100-80gb",
    "a100-80gb-pcie",
    "rtx-3090",
    "rtx-4090",
    "l4",
    "l40s",
    "h100-80gb",
    "h100-80gb-pcie",
    "h200",
    "rtx-5090",
];

/// Returns a folder that contains only a config, with the shape of Llama 2 7B but for its layers.
fn llama(layers: usize) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": layers, "num_attention_heads": 32,
        "max_position_embeddings": 4096,
    });
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

/// Returns a folder that contains only a config, with the shape of Llama 2 7B.
fn llama_2_7b() -> TempDir {
    llama(32)
}

fn advise(dir: &Path, card: &str, more: &[&str]) -> Value {
    let mut args = args!["advise", dir, "--card", card, "--json"];
    args.extend(more.iter().map(Into::into));
    succeed_json(&args)
}

/// Returns the row of a format.
fn format<'a>(advice: &'a Value, name: &str) -> &'a Value {
    let rows = advice["formats"].as_array().unwrap();
    rows.iter().find(|row| row["format"] == name).unwrap()
}

#[test]
fn sizes_are_those_of_the_shipped_model() {
    let advice = advise(&shipped(), "l4", &[]);
    let inspected = succeed_json(&args!["inspect", shipped(), "--json"]);
    assert_eq!(advice["weights"], inspected["weights"]);
    assert_eq!(advice["tensor_bytes"], inspected["bytes"]);
    assert_eq!(format(&advice, "f16")["weight_bytes"], inspected["bytes"]);
    let folder = Folder::shipped_quantized();
    let inspected = succeed_json(&args!["inspect", &folder.target, "--json"]);
    // The files have 16 bytes more for each of the 35 layers: its shape.
    let bytes = inspected["bytes"].as_u64().unwrap() - 35 * 16;
    assert_eq!(format(&advice, "int4 g128")["weight_bytes"], bytes);
    // 512 positions of 2 heads of 64 features, in f16: keys and values of 5 blocks.
    assert_eq!(advice["cache_positions"], 512);
    assert_eq!(advice["cache_bytes_per_sequence"], 5 * 2 * 512 * 2 * 64 * 2);
}

#[test]
fn llama_2_7b_on_an_h200_is_measured() {
    let folder = llama_2_7b();
    let advice = advise(folder.path(), "h200", &[]);
    assert_eq!(advice["tensor_bytes"], Value::Null);
    assert_eq!(advice["weights"], 6_738_415_616_u64);
    let projections = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008_u64);
    let others = 2 * (2 * 32000 * 4096 + 65 * 4096_u64);
    // Bits of a weight, in 64ths of a byte: values, and scales of 2 bytes for each group.
    for (name, sixty_fourths) in [
        ("f16", 128),
        ("int8 g128", 65),
        ("int4 g32", 36),
        ("nvfp4", 40),
        ("mxfp4", 36),
        ("int4 g128", 33),
        ("int8 g128 2:4", 41),
        ("int4 g128 2:4", 25),
    ] {
        let bytes = projections * sixty_fourths / 64 + others;
        assert_eq!(format(&advice, name)["weight_bytes"], bytes, "{name}");
    }
    // 4096 positions of 32 heads of 128 features, in f16: keys and values of 32 layers.
    let cache = 32 * 2 * 4096 * 4096 * 2_u64;
    assert_eq!(advice["cache_bytes_per_sequence"], cache);

    let int4 = format(&advice, "int4 g128");
    let decode = int4["decode"].as_array().unwrap();
    let sequences: Vec<_> = decode.iter().map(|row| &row["sequences"]).collect();
    assert_eq!(sequences, [1, 8, 64]);
    for (row, milliseconds) in decode.iter().zip([1.372, 1.652, 3.890]) {
        assert_eq!(row["step"]["basis"], "measured", "{row}");
        assert_eq!(row["step"]["records"], json!(["decode-models-h200.log"]));
        assert_eq!(row["step"]["milliseconds"], milliseconds);
        let (sequences, rate) = (row["sequences"].as_f64(), row["tokens_per_second"].as_f64());
        assert!((rate.unwrap() - sequences.unwrap() * 1000.0 / milliseconds).abs() < 1e-6);
        assert_eq!(
            row["cache_bytes"],
            cache * row["sequences"].as_u64().unwrap()
        );
    }
    // 137 GB of caches do not fit beside the weights.
    assert_eq!(decode[1]["fits"], true);
    assert_eq!(decode[2]["fits"], false);
    // On two cards, each with half of the weights and of the caches.
    let cards: Vec<_> = decode.iter().map(|row| &row["cards"]).collect();
    assert_eq!(cards, [1, 1, 2]);
    assert_eq!(int4["most_sequences"], 63);
    assert_eq!(
        format(&advice, "int8 g128")["decode"][1]["step"]["basis"],
        "modelled"
    );
    assert_eq!(
        format(&advice, "int4 g32")["decode"][0]["step"]["basis"],
        "modelled"
    );
    assert_eq!(int4["first_token"]["basis"], "measured");
    assert_eq!(int4["first_token"]["milliseconds"], 3.547);

    let longer = advise(folder.path(), "h200", &["--prompt", "1000", "--batch", "3"]);
    let int4 = format(&longer, "int4 g128");
    assert_eq!(int4["first_token"]["basis"], "modelled");
    let decode = int4["decode"].as_array().unwrap();
    assert_eq!(decode.len(), 1);
    assert_eq!(decode[0]["step"]["basis"], "modelled");
}

#[test]
fn text_says_what_is_measured_and_ends_with_advice() {
    let folder = llama_2_7b();
    let text = succeed(&args![
        "advise",
        folder.path(),
        "--card",
        "h200",
        "--max-len",
        "1024"
    ]);
    for words in [
        "LlamaForCausalLM, 32 layers, 6738415616 weights; no tensors in the folder",
        "NVIDIA H200: 141.0 GB, of which 1000.0 MB are kept free",
        "cache of 1024 positions: 536.9 MB for each sequence",
        "measured decode-models-h200.log",
        "modelled from ",
        "accuracy of int4 g128: perplexity by GPTQ: +2.97, +1.44 and +0.20 %",
    ] {
        assert!(text.contains(words), "`{words}` is not in: {text}");
    }
    let last = text.lines().last().unwrap();
    assert!(
        last.starts_with("With 64 sequences on NVIDIA H200 the fastest format that fits is ")
            && last.contains("the most accurate is f16 ("),
        "{last}"
    );
    // A row of each format, and a row of decode of each format with 1, 8 and 64 sequences.
    for name in [
        "f16",
        "int8 g128",
        "fp8",
        "fp8 w8a8",
        "int4 g32",
        "nvfp4",
        "int4 g128",
        "mxfp4",
        "int8 g128 2:4",
        "int4 g128 2:4",
    ] {
        let rows = text
            .lines()
            .filter(|line| line.starts_with(&format!("{name}  ")))
            .count();
        assert_eq!(rows, 1 + 3, "{name}: {text}");
    }
}

#[test]
fn every_card_gives_advice() {
    let folder = llama_2_7b();
    for card in CARDS {
        let advice = advise(folder.path(), card, &["--batch", "1"]);
        assert_eq!(advice["card"]["name"], card);
        assert!(!advice["card"]["source"].as_str().unwrap().is_empty());
        let rows = advice["formats"].as_array().unwrap();
        // Tensor cores multiply FP8 from compute capability 8.9 on.
        let is_older = card.starts_with("a100") || card == "rtx-3090";
        assert_eq!(rows.len(), if is_older { 9 } else { 10 }, "{card}");
        for row in rows {
            let step = &row["decode"][0]["step"];
            let (floor, time) = (&step["floor_milliseconds"], &step["milliseconds"]);
            assert!(floor.as_f64().unwrap() < time.as_f64().unwrap(), "{row}");
            assert_eq!(row["decode"][0]["fits"], true, "{card}: {row}");
        }
    }
}

#[test]
fn nothing_fits_a_card_that_is_too_small() {
    // 320 layers are 65 billion weights.
    let folder = llama(320);
    let advice = advise(folder.path(), "l4", &[]);
    for row in advice["formats"].as_array().unwrap() {
        assert_eq!(row["most_sequences"], 0, "{row}");
        for decode in row["decode"].as_array().unwrap() {
            assert_eq!(decode["fits"], false, "{row}");
        }
    }
    // A quarter of 34 GB of weights and of 21 GB of cache fit 24 GB, a half does not; eight caches
    // do not fit eight cards.
    let decode = format(&advice, "int4 g128")["decode"].as_array().unwrap();
    let cards: Vec<_> = decode.iter().map(|row| &row["cards"]).collect();
    assert_eq!(cards, [&json!(4), &json!(null), &json!(null)]);
    let sentence = advice["advice"].as_str().unwrap();
    assert!(
        sentence.starts_with("No format fits NVIDIA L4"),
        "{sentence}"
    );
    assert!(
        sentence.contains("of these cards, with --tensor-parallel "),
        "{sentence}"
    );
}

#[test]
fn a_card_that_is_not_known_is_refused_with_all_names() {
    let run = run_with_input(&args!["advise", shipped(), "--card", "gtx-1080"], b"");
    assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""));
    for card in CARDS {
        assert!(run.stderr.contains(card), "{}", run.stderr);
    }
    for (option, value) in [("--batch", "0"), ("--batch", "129"), ("--prompt", "0")] {
        let args = args!["advise", shipped(), "--card", "l4", option, value];
        let run = run_with_input(&args, b"");
        assert_eq!(run.code, Some(2), "{}", run.stderr);
    }
}

#[test]
fn a_device_without_a_card_is_refused() {
    refuse(
        &args!["advise", shipped(), "--device", "flex"],
        &["NVIDIA", "Flex", "--card", "rtx-4090", "h200"],
    );
}

#[test]
fn lengths_beyond_the_model_are_refused() {
    let base = || args!["advise", shipped(), "--card", "l4"];
    let with = |more: &[&str]| [base(), more.iter().map(Into::into).collect()].concat();
    refuse(&with(&["--max-len", "513"]), &["513", "512"]);
    refuse(&with(&["--prompt", "512"]), &["--prompt", "512"]);
    refuse(
        &with(&["--max-len", "100", "--prompt", "100"]),
        &["--prompt", "100"],
    );
    succeed(&with(&["--prompt", "511"]));
}

#[test]
fn folders_that_are_broken_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let args = args!["advise", folder.path(), "--card", "l4"];
    refuse(&args, &["config.json"]);
    std::fs::write(folder.path().join("config.json"), "{").unwrap();
    refuse(&args, &["config.json"]);
    let folder = llama_2_7b();
    std::fs::write(folder.path().join("model.safetensors"), "x").unwrap();
    let args = args!["advise", folder.path(), "--card", "l4"];
    refuse(&args, &["model.safetensors"]);
}
