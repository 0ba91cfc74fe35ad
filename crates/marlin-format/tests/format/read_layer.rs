//! Tests of `read_layer` with all formats.

use std::collections::BTreeSet;

use marlin_format::checkpoint::{
    CheckpointError, Dtype, GptqFormat, GptqVersion, LayerFormat, Marlin24Names,
    PackQuantizedFormat, TensorData, compressed_tensors, read_layer,
};
use marlin_format::{GroupSize, PlainWeight, QuantSpec, WeightValue};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, RngExt};

use crate::common::{
    LAYER, all_specs, checkpoint, float_specs, message, random_weight, rng, sparse_weight,
};
use crate::{awq, fp4, fp8, gptq, marlin_files, marlin24};

/// Returns the same format with another spec.
fn with_spec(format: LayerFormat, spec: QuantSpec) -> LayerFormat {
    match format {
        LayerFormat::Gptq(format) => LayerFormat::Gptq(GptqFormat { spec, ..format }),
        LayerFormat::Awq(_) => LayerFormat::Awq(spec),
        LayerFormat::PackQuantized(format) => {
            LayerFormat::PackQuantized(PackQuantizedFormat { spec, ..format })
        }
        LayerFormat::Marlin(_) => LayerFormat::Marlin(spec),
        LayerFormat::Marlin24(_, names) => LayerFormat::Marlin24(spec, names),
        // Formats of floats have no other specs.
        other => other,
    }
}

/// Returns a layer in every format, in 4 and 8 bits where the format supports both, and in every
/// format of floats.
fn samples(rng: &mut StdRng) -> Vec<(LayerFormat, Vec<TensorData>)> {
    let mut samples = Vec::new();
    let group = GroupSize::G32;
    for bits in WeightValue::INTEGERS {
        for zero_points in [false, true] {
            let spec = QuantSpec::new(bits, group).with_zero_point(zero_points.into());
            let weight = random_weight(rng, 100, 20, spec, true);
            for version in [GptqVersion::V1, GptqVersion::V2] {
                let format = LayerFormat::Gptq(GptqFormat {
                    spec,
                    version,
                    act_order: true,
                });
                // The zero points that both versions can store: 1 to 14.
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
        let spec = QuantSpec::new(bits, GroupSize::G128);
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
    for format in fp8::FORMATS {
        samples.push((
            LayerFormat::Fp8(format),
            fp8::published(rng, 150, 140, format),
        ));
    }
    for format in fp4::FORMATS {
        samples.push((
            LayerFormat::Fp4(format),
            fp4::published(rng, 72, 20, format),
        ));
    }
    samples
}

/// Introduces one random fault.
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
                        Dtype::U8,
                        Dtype::F8_E4M3,
                        Dtype::F8_E8M0,
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

/// A layer that is read into the memory of another weight keeps none of that weight's values.
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
        let memory = large.qweight().as_ptr();
        checkpoint.recycle(large);
        checkpoint.recycle(small);
        let again = read_layer(&checkpoint, LAYER, &format).unwrap();
        assert_eq!(again.qweight().as_ptr(), memory, "{format}");
        assert_eq!(again, fresh, "{format}");
    }
}

/// Layers are read, joined and recycled in the memory of the first layer.
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
                .map(|weight| weight.qweight().as_ptr())
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

/// The formats of integers do not hold floats, even in tensors of the same shapes.
#[test]
fn integers_are_not_read_as_floats() {
    let rng = &mut rng();
    let mut refused = 0;
    for (format, tensors) in samples(rng) {
        for spec in float_specs() {
            let other = with_spec(format, spec);
            if other != format {
                let (_folder, checkpoint) = checkpoint(&tensors);
                let error = read_layer(&checkpoint, LAYER, &other).unwrap_err();
                assert!(message(&error).contains(LAYER), "{other}: {error}");
                refused += 1;
            }
        }
    }
    // GPTQ in eight samples, pack-quantized in four, 2:4 in four, Marlin in one, AWQ in two.
    assert_eq!(refused, 4 * (8 + 4 + 4 + 1 + 2));
}

/// A mutated layer is read as a consistent weight, or causes an error that names the layer, but
/// never a panic.
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
