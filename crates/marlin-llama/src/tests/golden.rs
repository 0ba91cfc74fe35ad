//! Whole models against the logits of Hugging Face's `transformers`, from `tests/golden`.

use std::path::{Path, PathBuf};

use burn::tensor::Device;
use safetensors::SafeTensors;
use serde_json::Value;

use super::model::full;
use super::support::*;
use crate::{Architecture, Llama, LlamaConfig, OpenOptions, RopeScaling};

/// Largest relative error in f32, of both sides together. A window or a norm left out gives above 0.01.
const TOLERANCE: f64 = 1e-5;

/// Largest relative error where the packer rounds its dequantised weights to this dtype, which we do not: four units of its rounding.
fn tolerance(dequantized_in: Option<&str>) -> f64 {
    match dequantized_in {
        Some("float16") => 4.0 / 2048.0,
        Some("bfloat16") => 4.0 / 256.0,
        _ => TOLERANCE,
    }
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

#[test]
fn logits_are_those_of_transformers() {
    let index: Value = serde_json::from_slice(&std::fs::read(golden().join("index.json")).unwrap()).unwrap();
    let mut architectures = Vec::new();
    for entry in index.as_array().unwrap() {
        let name = entry["name"].as_str().unwrap();
        // Of Marlin's and the 2:4 formats there are single layers, whose sizes no tiny model has. The BERT is for `burn_marlin`'s tests.
        if entry["logits"] != true || entry["architecture"] == "BertForSequenceClassification" {
            continue;
        }
        let dir = golden().join(name);
        // The texts are shorter than LongRoPE's original context, for which `transformers` takes the short factors.
        let max_len = match LlamaConfig::read(&dir.join("config.json")).unwrap().rope_scaling {
            Some(RopeScaling::LongRope(scaling)) => Some(scaling.original_max_position_embeddings),
            _ => None,
        };
        let model = Llama::open(&dir, &Device::flex(), &OpenOptions { max_len, ..options() }).unwrap().model;
        let bytes = std::fs::read(golden().join(entry["expected"].as_str().unwrap())).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        let ids = expected.tensor("input_ids").unwrap();
        let tokens: Vec<u32> = ids.data().as_chunks::<8>().0.iter().map(|&bytes| i64::from_le_bytes(bytes) as u32).collect();
        let logits = expected.tensor("logits").unwrap();
        assert_eq!(logits.shape(), [1, tokens.len(), model.config().vocab_size]);
        let logits: Vec<f64> = logits.data().as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes).into()).collect();
        let error = relative_error(&full(&model, &tokens, 1), &logits);
        println!("{name}: relative error {error:.1e}");
        assert!(error < tolerance(entry["dequantized_in"].as_str()), "{name}: {error}");
        architectures.push(model.config().architecture);
    }
    assert!(Architecture::ALL.iter().all(|architecture| architectures.contains(architecture)), "{architectures:?}");
}
