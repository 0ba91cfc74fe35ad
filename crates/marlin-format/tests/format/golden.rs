//! Compares checkpoints written by the formats' own packers with the packers' own dequantisation:
//! `tests/golden`, whose README describes how the files are made.

use std::collections::BTreeMap;

use half::{bf16, f16};
use marlin_format::checkpoint::{
    Checkpoint, CheckpointEntry, Dtype, LayerFormat, Quantization, entries, layer_format,
    layer_tensors, read_layer,
};
use marlin_format::{PlainWeight, ScaleDtype};
use marlin_testing::{GoldenFolder, golden};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

/// Returns the bits of `weight` as `[N, K]` in `dtype`, little-endian. In f32 every product is
/// exact, so there is only one rounding, as in the packers.
fn bits(weight: &PlainWeight, dtype: Dtype) -> Vec<u8> {
    let values = weight.dequantize();
    let (k, n) = (weight.k(), weight.n());
    let natural = (0..n)
        .flat_map(|column| (0..k).map(move |row| row * n + column))
        .map(|index| values[index]);
    match dtype {
        Dtype::F16 => natural
            .flat_map(|value| f16::from_f32(value).to_le_bytes())
            .collect(),
        Dtype::BF16 => natural
            .flat_map(|value| bf16::from_f32(value).to_le_bytes())
            .collect(),
        Dtype::F32 => natural.flat_map(f32::to_le_bytes).collect(),
        _ => panic!("no packer computes in {dtype:?}"),
    }
}

/// Returns the fault of a layer, if any.
fn check(
    checkpoint: &Checkpoint,
    layer: &str,
    format: &LayerFormat,
    expected: &TensorView<'_>,
) -> Result<(), String> {
    let weight =
        read_layer(checkpoint, layer, format).map_err(|error| super::common::message(&error))?;
    if expected.shape() != [weight.n(), weight.k()] {
        return Err(format!(
            "is [{}, {}], expected {:?}",
            weight.n(),
            weight.k(),
            expected.shape()
        ));
    }
    let scales = match expected.dtype() {
        Dtype::BF16 => ScaleDtype::BF16,
        Dtype::F32 => ScaleDtype::F32,
        _ => ScaleDtype::F16,
    };
    if weight.spec().scales.dtype != scales {
        return Err(format!("has scales in {}", weight.spec().scales.dtype));
    }
    let found = bits(&weight, expected.dtype());
    let size = expected.dtype().bitsize() / 8;
    let wrong = found
        .chunks(size)
        .zip(expected.data().chunks(size))
        .filter(|(found, expected)| found != expected)
        .count();
    if wrong > 0 {
        return Err(format!("{wrong} of {} values differ", found.len() / size));
    }
    Ok(())
}

#[test]
fn weights_of_a_bitmask_are_as_the_packer_puts_them_back() {
    for name in ["ct-sparse24-bitmask-f16", "ct-sparse24-bitmask-bf16-shards"] {
        let dir = golden(name);
        let (checkpoint, expected) = (
            Checkpoint::open(&dir).unwrap(),
            Checkpoint::open(dir.join("expected.safetensors")).unwrap(),
        );
        let weights: Vec<&str> = expected
            .names()
            .filter(|name| name.ends_with(".weight"))
            .collect();
        assert_eq!(weights.len(), 7);
        for weight in weights {
            let (found, expected) = (
                checkpoint.tensor(weight).unwrap(),
                expected.tensor(weight).unwrap(),
            );
            assert_eq!(
                (found.dtype(), found.shape()),
                (expected.dtype(), expected.shape()),
                "{name}: {weight}"
            );
            assert!(
                found.bytes() == expected.bytes() && found.is_two_four(),
                "{name}: {weight}"
            );
        }
    }
}

#[test]
fn every_format_dequantises_as_its_packer_does() {
    let mut failures = Vec::new();
    let mut layers = 0;
    for golden in GoldenFolder::all() {
        let dir = golden.dir();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let quantization = Quantization::read(&dir).unwrap();
        let has_layers = quantization.as_ref().is_some_and(|found| !found.is_float());
        assert_eq!(has_layers, !golden.layers.is_empty(), "{}", golden.name);
        let Some(quantization) = quantization else {
            continue;
        };

        let expected = std::fs::read(golden.expected()).unwrap();
        let expected = SafeTensors::deserialize(&expected).unwrap();
        for (layer, text) in &golden.layers {
            layers += 1;
            let format = quantization.layer(layer).unwrap();
            if format.to_string() != *text {
                failures.push(format!(
                    "{}: {layer} is found to be {format}, expected {text}",
                    golden.name
                ));
                continue;
            }
            let expected = expected.tensor(&format!("{layer}.weight")).unwrap();
            if let Err(wrong) = check(&checkpoint, layer, &format, &expected) {
                failures.push(format!("{}: {layer}, {format}: {wrong}", golden.name));
            }
        }
    }
    assert!(layers > 200, "{layers} layers");
    assert!(
        failures.is_empty(),
        "{} of {layers} layers:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

#[test]
fn the_parts_of_a_checkpoint_are_its_layers_and_the_other_tensors() {
    for golden in GoldenFolder::all() {
        let dir = golden.dir();
        let (checkpoint, quantization) = (
            Checkpoint::open(&dir).unwrap(),
            Quantization::read(&dir).unwrap(),
        );
        let (mut layers, mut names) = (BTreeMap::new(), Vec::new());
        for part in entries(&checkpoint, quantization.as_ref()).unwrap() {
            match part {
                CheckpointEntry::Layer {
                    name,
                    format,
                    tensors,
                } => {
                    layers.insert(name, format.to_string());
                    names.extend(tensors);
                }
                CheckpointEntry::Tensor { name } => names.push(name),
            }
        }
        assert_eq!(layers, golden.layers, "{}", golden.name);
        names.sort();
        assert_eq!(
            names,
            checkpoint.names().collect::<Vec<_>>(),
            "{}",
            golden.name
        );
    }
}

#[test]
fn one_file_is_a_checkpoint_by_itself() {
    let dir = golden("plain-f32");
    let (whole, file) = (
        Checkpoint::open(&dir).unwrap(),
        Checkpoint::open(dir.join("model.safetensors")).unwrap(),
    );
    assert_eq!(file.dir(), dir);
    assert_eq!(
        file.names().collect::<Vec<_>>(),
        whole.names().collect::<Vec<_>>()
    );
    let logits = Checkpoint::open(golden("plain-bf16/expected.safetensors")).unwrap();
    assert_eq!(logits.names().collect::<Vec<_>>(), ["input_ids", "logits"]);
}

#[test]
fn every_tensor_belongs_to_a_layer_in_its_format() {
    for golden in GoldenFolder::all() {
        let dir = golden.dir();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let quantization = Quantization::read(&dir).unwrap();
        let mut left: Vec<&str> = checkpoint.names().collect();
        for layer in golden.layers.keys() {
            let format = quantization.as_ref().unwrap().layer(layer).unwrap();
            let tensors = layer_tensors(&checkpoint, layer, &format);
            assert!(!tensors.is_empty(), "{}: {layer}", golden.name);
            left.retain(|name| !tensors.iter().any(|tensor| tensor == name));
        }
        for name in left {
            let Some(layer) = name.strip_suffix(".weight") else {
                // Scales of an 8-bit KV cache are stored beside the layers.
                let of_cache = name.ends_with(".k_scale") || name.ends_with(".v_scale");
                let is_bias = name.ends_with(".bias") || name.ends_with("_proj_bias");
                // gpt-oss has scores of heads, and float experts in one tensor.
                let of_gpt_oss = name.ends_with(".sinks") || name.contains(".experts.");
                assert!(is_bias || of_cache || of_gpt_oss, "{}: {name}", golden.name);
                continue;
            };
            let format = layer_format(quantization.as_ref(), layer).unwrap();
            let linear =
                layer.ends_with("_proj") || layer == "lm_head" || layer.ends_with(".dense");
            assert!(
                !linear || format == LayerFormat::Float,
                "{}: {name} is there, and the config says {format}",
                golden.name
            );
        }
    }
}
