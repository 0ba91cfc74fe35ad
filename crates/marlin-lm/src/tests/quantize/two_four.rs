//! Tests of folders that are pruned to 2:4, and of float folders that are 2:4 already.

use std::ops::ControlFlow;
use std::path::Path;

use marlin_format::checkpoint::{
    Checkpoint, CheckpointWriter, Dtype, Quantization, TensorSpec, read_layer,
};
use marlin_format::{FormatError, GroupSize, QuantSpec, Sparsity};
use rand::RngExt;
use serde_json::json;

use super::{SPEC, config_of_64, quantize};
use crate::tests::folder::logits;
use crate::tests::support::*;
use crate::{FileFormat, ModelConfig, ModelError, QuantizeOptions, quantize_folder};

/// Tests that a pruned model gives the same logits in every file format, and that marlin-24 takes
/// one bit per weight less than the other formats.
#[test]
fn a_pruned_folder_is_the_same_in_every_form() {
    let mut rng = rng();
    let config = config_with(
        json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 64 }),
    );
    let spec = QuantSpec::int4(GroupSize::G128);
    let (_parent, source) = random_folder(&config, Dtype::F16, &mut rng);
    let tokens = random_tokens(8, config.vocab_size, &mut rng);
    // The N of these layers, 32, is half a tile of marlin-24.
    let too_narrow = || vec!["re:.*k_proj".into(), "re:.*v_proj".into()];
    let pruned = |format| {
        let (parent, target) = temporary();
        let options = QuantizeOptions {
            format,
            sparsity: Sparsity::TwoFour,
            exclude: too_narrow(),
            ..QuantizeOptions::default()
        };
        let report = quantize_folder(&source, &target, &spec, &options, |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
        assert!(
            report
                .quantized
                .iter()
                .all(|layer| layer.sparsity == Sparsity::TwoFour)
        );
        (parent, target, report)
    };
    let (_a, sparse, of_sparse) = pruned(FileFormat::Marlin24);
    let expected = logits(&open(&sparse).model, &tokens);
    for format in [FileFormat::CompressedTensors, FileFormat::Gptq] {
        let (_b, dense, of_dense) = pruned(format);
        assert_eq!(logits(&open(&dense).model, &tokens), expected, "{format:?}");
        for (sparse, dense) in of_sparse.quantized.iter().zip(&of_dense.quantized) {
            assert!(
                sparse.bits_per_weight == dense.bits_per_weight - 1.0,
                "{sparse:?}, {dense:?}"
            );
        }
        // 2:4 weights are recognised in every file format.
        let (checkpoint, quantization) = (
            Checkpoint::open(&dense).unwrap(),
            Quantization::read(&dense).unwrap().unwrap(),
        );
        let layer = "model.layers.1.mlp.up_proj";
        let weight = read_layer(&checkpoint, layer, &quantization.layer(layer).unwrap()).unwrap();
        assert_eq!(weight.sparsity(), Sparsity::TwoFour);
    }
    let float: Vec<f64> = logits(&open(&source).model, &tokens)
        .into_iter()
        .map(f64::from)
        .collect();
    // The half of the random weights that is kept contributes more than half of the outputs.
    let error = relative_error(&expected, &float);
    assert!((0.01..2.0).contains(&error), "{error}");

    // marlin-24 cannot store layers that are not pruned.
    let (_c, target) = temporary();
    let options = QuantizeOptions {
        format: FileFormat::Marlin24,
        exclude: too_narrow(),
        ..QuantizeOptions::default()
    };
    let error = quantize_folder(&source, &target, &spec, &options, |_| {
        ControlFlow::Continue(())
    })
    .expect_err("dense weights");
    assert!(
        matches!(
            &error,
            ModelError::Quantize {
                source: FormatError::NotTwoFour { .. },
                ..
            }
        ),
        "{error}"
    );
    assert!(!target.exists());
}

/// Writes a folder whose projections are 2:4, in the `sparse-24-bitmask` format of
/// compressed-tensors.
fn write_bitmask_folder(dir: &Path, config: &ModelConfig, weights: &Weights) {
    let mut tensors: Vec<(TensorSpec, Vec<u8>)> = Vec::new();
    for (name, (shape, values)) in weights {
        let Some(layer) = name.strip_suffix("_proj.weight") else {
            tensors.push((
                TensorSpec::new(name, Dtype::F32, shape.as_slice()),
                bytes(values, Dtype::F32),
            ));
            continue;
        };
        let (n, k) = (shape[0], shape[1]);
        let stored: Vec<f32> = values
            .iter()
            .copied()
            .filter(|&value| value != 0.0)
            .collect();
        assert_eq!(stored.len(), n * k / 2);
        let mask = values.chunks(k).flat_map(|row| {
            row.chunks(8).map(|eight| {
                eight
                    .iter()
                    .enumerate()
                    .fold(0, |mask, (i, &value)| mask | u8::from(value != 0.0) << i)
            })
        });
        let extents = [n, k]
            .iter()
            .flat_map(|&extent| (extent as i64).to_le_bytes())
            .collect();
        let spec = |tensor: &str, dtype, shape: [usize; 2]| {
            TensorSpec::new(format!("{layer}_proj.{tensor}"), dtype, shape)
        };
        tensors.push((spec("shape", Dtype::I64, [2, 1]), extents));
        tensors.push((
            spec("compressed", Dtype::F32, [n, k / 2]),
            bytes(&stored, Dtype::F32),
        ));
        tensors.push((
            spec("bitmask", Dtype::U8, [n, k.div_ceil(8)]),
            mask.collect(),
        ));
    }
    let mut json = config.to_json();
    json["compression_config"] = json!({ "quant_method": "compressed-tensors", "format": "dense", "sparsity_config": { "format": "sparse-24-bitmask" } });
    let mut writer = CheckpointWriter::create(dir).unwrap();
    writer
        .write_file("config.json", json.to_string().as_bytes())
        .unwrap();
    writer
        .declare(tensors.iter().map(|(spec, _)| spec.clone()))
        .unwrap();
    tensors
        .iter()
        .for_each(|(spec, bytes)| writer.write_tensor(&spec.name, bytes).unwrap());
    writer.finish().unwrap();
}

#[test]
fn float_weights_with_a_bitmask_are_as_those_with_zeros() {
    let mut rng = rng();
    let config = config_of_64();
    let mut weights = random_weights(&config, &mut rng);
    for (_, (_, values)) in weights
        .iter_mut()
        .filter(|(name, _)| name.ends_with("_proj.weight"))
    {
        for four in values.chunks_exact_mut(4) {
            let first = rng.random_range(0..3);
            let kept = [first, rng.random_range(first + 1..4)];
            (0..4).for_each(|i| {
                four[i] = if kept.contains(&i) {
                    four[i] + 1.0_f32.copysign(four[i])
                } else {
                    0.0
                }
            });
        }
    }
    let ((_a, dense), (_b, bitmask)) = (temporary(), temporary());
    write_folder(&dense, &config, &weights, Dtype::F32);
    write_bitmask_folder(&bitmask, &config, &weights);
    let tokens = random_tokens(10, config.vocab_size, &mut rng);
    assert_eq!(
        logits(&open(&bitmask).model, &tokens),
        logits(&open(&dense).model, &tokens)
    );

    let quantized = [&dense, &bitmask].map(|source| {
        let (parent, target) = temporary();
        let report = quantize(source, &target, SPEC, &[]).unwrap();
        assert!(
            report
                .quantized
                .iter()
                .filter(|layer| layer.k.is_multiple_of(32))
                .all(|layer| layer.sparsity == Sparsity::TwoFour)
        );
        (parent, target)
    });
    let [dense, bitmask] = quantized
        .each_ref()
        .map(|(_, target)| Checkpoint::open(target).unwrap());
    assert!(dense.names().eq(bitmask.names()));
    assert!(
        dense.names().all(
            |name| dense.tensor(name).unwrap().bytes() == bitmask.tensor(name).unwrap().bytes()
        )
    );
    let config = std::fs::read_to_string(quantized[1].1.join("config.json")).unwrap();
    assert!(
        config.contains("quantization_config") && !config.contains("compression_config"),
        "{config}"
    );
}
