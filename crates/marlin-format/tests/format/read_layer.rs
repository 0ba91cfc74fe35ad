//! All formats through one door.

use std::collections::BTreeSet;

use marlin_format::checkpoint::{
    CheckpointError, Dtype, GptqFormat, GptqVersion, LayerFormat, Marlin24Names,
    PackQuantizedFormat, TensorData, compressed_tensors, read_layer,
};
use marlin_format::{Bits, GroupSize, PlainWeight, QuantSpec};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, RngExt};

use crate::common::{LAYER, all_specs, checkpoint, message, random_weight, rng, sparse_weight};
use crate::{awq, gptq, marlin_files, marlin24};

/// The same format of another spec.
fn with_spec(format: LayerFormat, spec: QuantSpec) -> LayerFormat {
    match format {
        LayerFormat::Gptq(format) => LayerFormat::Gptq(GptqFormat { spec, ..format }),
        LayerFormat::Awq(_) => LayerFormat::Awq(spec),
        LayerFormat::PackQuantized(format) => {
            LayerFormat::PackQuantized(PackQuantizedFormat { spec, ..format })
        }
        LayerFormat::Marlin(_) => LayerFormat::Marlin(spec),
        LayerFormat::Marlin24(_, names) => LayerFormat::Marlin24(spec, names),
        other => other,
    }
}

/// A layer in every format, of 4 and 8 bits where it has both.
fn samples(rng: &mut StdRng) -> Vec<(LayerFormat, Vec<TensorData>)> {
    let mut samples = Vec::new();
    let group = GroupSize::G32;
    for bits in Bits::ALL {
        for zero_points in [false, true] {
            let spec = QuantSpec {
                bits,
                zero_points,
                ..QuantSpec::int4(group)
            };
            let weight = random_weight(rng, 100, 20, spec, true);
            for version in [GptqVersion::V1, GptqVersion::V2] {
                let format = LayerFormat::Gptq(GptqFormat {
                    spec,
                    version,
                    act_order: true,
                });
                // 1 to 14: what both versions hold.
                samples.push((
                    format,
                    gptq::published(&weight, |zero_point| zero_point.clamp(1, 14)),
                ));
            }
            let format = LayerFormat::PackQuantized(PackQuantizedFormat {
                spec,
                act_order: true,
            });
            samples.push((format, compressed_tensors::tensors_of(LAYER, &weight)));
        }
        let spec = QuantSpec {
            bits,
            ..QuantSpec::int4(GroupSize::G128)
        };
        for names in [Marlin24Names::CompressedTensors, Marlin24Names::Gptq] {
            let weight = sparse_weight(rng, 288, 64, spec);
            samples.push((
                LayerFormat::Marlin24(spec, names),
                marlin24::published(&weight, names),
            ));
        }
    }
    let spec = QuantSpec::int4(group);
    samples.push((
        LayerFormat::Marlin(spec),
        marlin_files::published(&random_weight(rng, 80, 64, spec, false)),
    ));
    for spec in [spec, spec.with_zero_points()] {
        samples.push((
            LayerFormat::Awq(spec),
            awq::published(&random_weight(rng, 100, 24, spec, false)),
        ));
    }
    samples
}

/// One thing wrong, or another.
fn mutate(rng: &mut StdRng, format: &mut LayerFormat, tensors: &mut Vec<TensorData>) {
    let at = rng.random_range(0..tensors.len());
    let TensorData { spec, bytes } = &mut tensors[at];
    match rng.random_range(0..5) {
        0 => drop(tensors.remove(at)),
        1 => {
            *format = with_spec(
                *format,
                *all_specs().collect::<Vec<_>>().choose(rng).unwrap(),
            )
        }
        2 if !bytes.is_empty() => {
            let start = rng.random_range(0..bytes.len());
            let end = rng.random_range(start..=bytes.len());
            rng.fill_bytes(&mut bytes[start..end]);
        }
        _ => {
            match rng.random_range(0..4) {
                0 => {
                    spec.dtype = *[
                        Dtype::I32,
                        Dtype::I16,
                        Dtype::I64,
                        Dtype::F16,
                        Dtype::BF16,
                        Dtype::F32,
                    ]
                    .choose(rng)
                    .unwrap()
                }
                1 => spec.shape.push(rng.random_range(0..3)),
                2 => drop(spec.shape.pop()),
                _ => spec
                    .shape
                    .iter_mut()
                    .for_each(|extent| *extent = rng.random_range(0..=2 * *extent)),
            }
            bytes.resize(
                spec.shape.iter().product::<usize>() * spec.dtype.bitsize() / 8,
                0x5a,
            );
        }
    }
}

/// A layer read into the memory of another weight keeps none of its values.
#[test]
fn layers_go_into_recycled_memory() {
    let rng = &mut rng();
    for (format, tensors) in samples(rng) {
        let (_folder, checkpoint) = checkpoint(&tensors);
        let fresh = read_layer(&checkpoint, LAYER, &format).unwrap();
        let large = random_weight(
            rng,
            fresh.k() + 40,
            fresh.n() + 40,
            QuantSpec::int8(GroupSize::Channel),
            false,
        );
        let small = random_weight(rng, 9, 1, QuantSpec::int4(GroupSize::Channel), false);
        let memory = large.words().as_ptr();
        checkpoint.recycle(large);
        checkpoint.recycle(small);
        let again = read_layer(&checkpoint, LAYER, &format).unwrap();
        assert_eq!(again.words().as_ptr(), memory, "{format}");
        assert_eq!(again, fresh, "{format}");
    }
}

/// Layer after layer is read, joined and given back in the memory of the first.
#[test]
fn joined_layers_go_into_recycled_memory() {
    let rng = &mut rng();
    for (format, tensors) in samples(rng) {
        let (_folder, checkpoint) = checkpoint(&tensors);
        let fresh = read_layer(&checkpoint, LAYER, &format).unwrap();
        let expected = PlainWeight::join(&[&fresh, &fresh]).unwrap();
        let mut memory = BTreeSet::new();
        for layer in 0..5 {
            let parts = [(); 2].map(|()| read_layer(&checkpoint, LAYER, &format).unwrap());
            let joined = checkpoint.join(&[&parts[0], &parts[1]]).unwrap();
            assert_eq!(joined, expected, "{format}, layer {layer}");
            let used: Vec<_> = parts
                .iter()
                .chain([&joined])
                .map(|weight| weight.words().as_ptr())
                .collect();
            if layer == 0 {
                memory.extend(used);
            } else {
                assert!(
                    used.iter().all(|buffer| memory.contains(buffer)),
                    "{format}, layer {layer}: new memory"
                );
            }
            for weight in parts.into_iter().chain([joined]) {
                checkpoint.recycle(weight);
            }
        }
    }
}

/// Whatever is wrong with a layer, reading it is an error that names it, or a weight that holds
/// together; never a panic.
#[test]
fn mutated_layers_never_panic() {
    let rng = &mut rng();
    let (mut read, mut refused) = (0, 0);
    for _ in 0..30 {
        for (mut format, mut tensors) in samples(rng) {
            {
                let (_folder, checkpoint) = checkpoint(&tensors);
                read_layer(&checkpoint, LAYER, &format)
                    .unwrap_or_else(|error| panic!("{format}: {}", message(&error)));
            }
            for _ in 0..rng.random_range(1..3) {
                mutate(rng, &mut format, &mut tensors);
            }
            let (_folder, checkpoint) = checkpoint(&tensors);
            match read_layer(&checkpoint, LAYER, &format) {
                Ok(weight) => {
                    read += 1;
                    assert_eq!(weight.dequantize().len(), weight.k() * weight.n());
                }
                Err(error) => {
                    refused += 1;
                    assert!(!matches!(error, CheckpointError::Io { .. }), "{error}");
                    assert!(
                        message(&error).contains(LAYER),
                        "{format}: {}",
                        message(&error)
                    );
                }
            }
        }
    }
    assert!(read > 0 && refused > 0, "{read} read, {refused} refused");
}
