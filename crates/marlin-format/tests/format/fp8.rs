//! Tests of FP8 layers, against a reader that goes value by value.

use half::{bf16, f16};
use marlin_format::checkpoint::{
    CheckpointEntry, CheckpointError, Dtype, Fp8Config, Fp8Format, LayerFormat, Quantization,
    TensorData, TensorSpec, compressed_tensors, entries, read_layer,
};
use marlin_format::{FormatError, PlainWeight, QuantSpec, WeightValue};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::common::{LAYER, checkpoint, expect_floats, expect_layer, message, rng, tensor};

const BLOCKS: Fp8Format = Fp8Format {
    config: Fp8Config::Fp8,
    blocks: true,
    activations: true,
};
const ROWS: Fp8Format = Fp8Format {
    config: Fp8Config::CompressedTensors,
    blocks: false,
    activations: false,
};
/// The formats of published files.
pub const FORMATS: [Fp8Format; 6] = [
    ROWS,
    Fp8Format {
        blocks: true,
        ..ROWS
    },
    BLOCKS,
    Fp8Format {
        blocks: false,
        ..BLOCKS
    },
    Fp8Format {
        config: Fp8Config::FbgemmFp8,
        blocks: false,
        activations: true,
    },
    Fp8Format {
        config: Fp8Config::ModelOpt,
        blocks: false,
        activations: true,
    },
];

fn bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// Returns random codes without NaN.
fn codes(rng: &mut StdRng, count: usize) -> Vec<u8> {
    (0..count)
        .map(|_| rng.random())
        .map(|code: u8| if code & 0x7f == 0x7f { 0 } else { code })
        .collect()
}

/// Returns the name of the tensor of scales.
fn scale_name(format: Fp8Format) -> &'static str {
    match format {
        Fp8Format {
            config: Fp8Config::Fp8,
            blocks: true,
            ..
        } => "weight_scale_inv",
        _ => "weight_scale",
    }
}

/// Returns the shape of the tensor of scales.
fn scale_shape(format: Fp8Format, k: usize, n: usize) -> [usize; 2] {
    match format.blocks {
        true => [n.div_ceil(128), k.div_ceil(128)],
        false => [n, 1],
    }
}

/// Returns the tensors of a random layer with scales in f32.
pub fn published(rng: &mut StdRng, k: usize, n: usize, format: Fp8Format) -> Vec<TensorData> {
    let shape = scale_shape(format, k, n);
    let scales: Vec<f32> = (0..shape[0] * shape[1])
        .map(|_| rng.random_range(0.001..0.1))
        .collect();
    vec![
        tensor("weight", Dtype::F8_E4M3, &[n, k], &codes(rng, n * k)),
        tensor(scale_name(format), Dtype::F32, &shape, &bytes(&scales)),
    ]
}

fn read(tensors: &[TensorData], format: Fp8Format) -> Result<PlainWeight, CheckpointError> {
    let (_folder, checkpoint) = checkpoint(tensors);
    read_layer(&checkpoint, LAYER, &LayerFormat::Fp8(format))
}

/// Checks a weight value by value; `scale(row, column)` is the scale of the file's row and column.
fn expect_weight(
    weight: &PlainWeight,
    codes: &[u8],
    [n, k]: [usize; 2],
    scale: impl Fn(usize, usize) -> f32,
) {
    assert_eq!(weight.spec().value, WeightValue::E4m3);
    expect_floats(weight, [n, k], |row, column| codes[row * k + column], scale);
}

/// Reads weights around the edges of words, blocks and the transposition's tiles.
#[test]
fn weights_are_those_of_the_files() {
    let rng = &mut rng();
    for (n, k) in [
        (1, 1),
        (3, 5),
        (16, 128),
        (130, 129),
        (257, 384),
        (128, 7),
        (9, 1030),
    ] {
        for format in FORMATS {
            let tensors = published(rng, k, n, format);
            let weight = read(&tensors, format).unwrap();
            assert_eq!(weight.spec(), format.spec());
            let scales: Vec<f32> = tensors[1]
                .bytes
                .as_chunks()
                .0
                .iter()
                .map(|&bytes| f32::from_le_bytes(bytes))
                .collect();
            let columns = k.div_ceil(128);
            expect_weight(
                &weight,
                &tensors[0].bytes,
                [n, k],
                |row, column| match format.blocks {
                    true => scales[row / 128 * columns + column / 128],
                    false => scales[row],
                },
            );
        }
    }
}

/// Reads scales in all dtypes, and in all shapes without blocks.
#[test]
fn scales_have_several_dtypes_and_shapes() {
    let rng = &mut rng();
    let (n, k) = (3, 200);
    let values = tensor("weight", Dtype::F8_E4M3, &[n, k], &codes(rng, n * k));
    let numbers = [0.5f32, 2.0, 0.25];
    let stored = |dtype, count: usize| -> Vec<u8> {
        let numbers = numbers[..count].iter();
        match dtype {
            Dtype::F32 => numbers.flat_map(|number| number.to_le_bytes()).collect(),
            Dtype::F16 => numbers
                .flat_map(|&number| f16::from_f32(number).to_le_bytes())
                .collect(),
            Dtype::BF16 => numbers
                .flat_map(|&number| bf16::from_f32(number).to_le_bytes())
                .collect(),
            _ => numbers
                .map(|number| (number.to_bits() >> 23) as u8)
                .collect(),
        }
    };
    for (shape, count) in [(&[][..], 1), (&[1], 1), (&[n], n), (&[n, 1], n)] {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            let scales = tensor("weight_scale", dtype, shape, &stored(dtype, count));
            let weight = read(&[values.clone(), scales], ROWS).unwrap();
            assert_eq!(weight.spec(), QuantSpec::fp8());
            expect_weight(&weight, &values.bytes, [n, k], |row, _| {
                numbers[if count == 1 { 0 } else { row }]
            });
        }
    }
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F8_E8M0] {
        let scales = tensor("weight_scale_inv", dtype, &[1, 2], &stored(dtype, 2));
        let weight = read(&[values.clone(), scales], BLOCKS).unwrap();
        assert_eq!(
            weight.spec(),
            QuantSpec::fp8_blocks().with_fp8_activations(true)
        );
        expect_weight(&weight, &values.bytes, [n, k], |_, column| {
            numbers[column / 128]
        });
    }
    // Under `quant_method: fp8`, either name.
    let format = Fp8Format {
        blocks: false,
        ..BLOCKS
    };
    let scales = tensor("weight_scale_inv", Dtype::F32, &[], &bytes(&[2.0]));
    expect_weight(
        &read(&[values.clone(), scales], format).unwrap(),
        &values.bytes,
        [n, k],
        |_, _| 2.0,
    );
}

/// Scales of activations, of caches, and zero points of 0 belong to a layer and are not used.
#[test]
fn other_tensors_of_a_layer_are_not_used() {
    let rng = &mut rng();
    for (config, others) in [
        (
            Fp8Config::CompressedTensors,
            &["input_scale", "weight_zero_point"][..],
        ),
        (
            Fp8Config::Fp8,
            &["input_scale", "activation_scale", "k_scale", "v_scale"],
        ),
        (Fp8Config::FbgemmFp8, &["input_scale_ub"]),
        (Fp8Config::ModelOpt, &["input_scale", "k_scale", "v_scale"]),
    ] {
        let format = Fp8Format {
            config,
            blocks: false,
            activations: false,
        };
        let mut tensors = published(rng, 40, 8, format);
        let expected = read(&tensors, format).unwrap();
        for &name in others {
            let value = if name == "weight_zero_point" {
                0.0f32
            } else {
                1.0
            };
            tensors.push(tensor(name, Dtype::F32, &[1], &value.to_le_bytes()));
        }
        expect_layer(&tensors, &LayerFormat::Fp8(format), &expected);
    }
}

/// A config declares FP8 for every layer, but norms and embeddings are float.
#[test]
fn float_tensors_are_no_layers() {
    let mut tensors = published(&mut rng(), 40, 8, BLOCKS);
    let norm = TensorSpec::new("model.norm.weight", Dtype::BF16, [8]);
    tensors.push(TensorData {
        spec: norm,
        bytes: vec![0; 16],
    });
    let (_folder, checkpoint) = checkpoint(&tensors);
    let config =
        br#"{ "quantization_config": { "quant_method": "fp8", "weight_block_size": [128, 128] } }"#;
    let quantization = Quantization::from_config(config).unwrap().unwrap();
    let found = entries(&checkpoint, Some(&quantization)).unwrap();
    assert_eq!(
        found,
        [
            CheckpointEntry::Layer {
                name: LAYER.into(),
                format: LayerFormat::Fp8(BLOCKS),
                tensors: vec![
                    format!("{LAYER}.weight"),
                    format!("{LAYER}.weight_scale_inv")
                ],
            },
            CheckpointEntry::Tensor {
                name: "model.norm.weight".into()
            }
        ]
    );
}

#[test]
fn inconsistent_layers_are_refused() {
    let rng = &mut rng();
    let (n, k) = (130, 260);
    let refused = |tensors: &[TensorData], format, expected: &str| {
        let error = read(tensors, format).expect_err(expected);
        let found = message(&error);
        assert!(
            found.contains(LAYER) && found.contains(expected),
            "{found}\nhas no\n{expected}"
        );
        error
    };
    let [values, scales] = <[_; 2]>::try_from(published(rng, k, n, BLOCKS)).unwrap();
    let [_, rows] = <[_; 2]>::try_from(published(rng, k, n, ROWS)).unwrap();

    for code in [0x7f, 0xff] {
        let mut nan = values.clone();
        nan.bytes[5 * k + 257] = code;
        let error = refused(&[nan, scales.clone()], BLOCKS, "row 257, column 5 is NaN");
        let CheckpointError::Weight { source, .. } = error else {
            panic!("{error}");
        };
        let expected = FormatError::NanValue {
            value: WeightValue::E4m3,
            row: 257,
            column: 5,
        };
        assert_eq!(source, expected);
    }
    for (scale, shown) in [
        (f32::NAN, "NaN"),
        (f32::INFINITY, "inf"),
        (f32::NEG_INFINITY, "-inf"),
        (-0.5, "-0.5"),
    ] {
        let mut bad = scales.clone();
        // The last block of both axes: group 2 of K, and features from 128 on.
        bad.bytes[5 * 4..][..4].copy_from_slice(&scale.to_le_bytes());
        refused(
            &[values.clone(), bad],
            BLOCKS,
            &format!(
                "the scale of group 2, output feature 128 is {shown}; scales must be finite and not negative"
            ),
        );
        let mut bad = rows.clone();
        bad.bytes[7 * 4..][..4].copy_from_slice(&scale.to_le_bytes());
        refused(
            &[values.clone(), bad],
            ROWS,
            &format!("the scale of group 0, output feature 7 is {shown}"),
        );
    }
    // Code 255 of e8m0 is NaN.
    let nan = tensor(
        "weight_scale_inv",
        Dtype::F8_E8M0,
        &[2, 3],
        &[127, 127, 255, 1, 1, 1],
    );
    refused(
        &[values.clone(), nan],
        BLOCKS,
        "the scale of group 2, output feature 0 is NaN",
    );

    refused(
        std::slice::from_ref(&values),
        BLOCKS,
        "has no tensor `model.layers.0.mlp.up_proj.weight_scale_inv`",
    );
    refused(
        std::slice::from_ref(&values),
        ROWS,
        "has no tensor `model.layers.0.mlp.up_proj.weight_scale`",
    );
    refused(
        std::slice::from_ref(&scales),
        BLOCKS,
        "has no tensor `model.layers.0.mlp.up_proj.weight`",
    );
    refused(
        &[values.clone(), scales.clone(), rows.clone()],
        BLOCKS,
        "there is also a `model.layers.0.mlp.up_proj.weight_scale`; a weight has one tensor of scales",
    );
    for shape in [&[3, 2][..], &[2, 2, 1], &[6], &[2, 4]] {
        let count: usize = shape.iter().product();
        let other = tensor(
            "weight_scale_inv",
            Dtype::F32,
            shape,
            &bytes(&vec![1.0; count]),
        );
        refused(
            &[values.clone(), other],
            BLOCKS,
            &format!("has shape {shape:?}; expected [2, 3]"),
        );
    }
    for shape in [&[1, 130][..], &[2], &[260], &[130, 2], &[0]] {
        let count: usize = shape.iter().product();
        let other = tensor("weight_scale", Dtype::F32, shape, &bytes(&vec![1.0; count]));
        refused(
            &[values.clone(), other],
            ROWS,
            &format!("has shape {shape:?}; expected [130, 1]"),
        );
    }
    let other = tensor("weight_scale", Dtype::I32, &[n, 1], &rows.bytes);
    refused(
        &[values.clone(), other],
        ROWS,
        "is I32; expected F16, BF16, F32 or F8_E8M0",
    );
    for dtype in [Dtype::F8_E5M2, Dtype::U8] {
        let other = tensor("weight", dtype, &[n, k], &values.bytes);
        refused(
            &[other, rows.clone()],
            ROWS,
            "expected F8_E4M3, because the config",
        );
    }
    let float = tensor("weight", Dtype::BF16, &[n, k / 2], &values.bytes);
    refused(
        &[float],
        BLOCKS,
        "is BF16; expected F8_E4M3, because the config",
    );
    let flat = tensor("weight", Dtype::F8_E4M3, &[n * k], &values.bytes);
    refused(&[flat, rows.clone()], ROWS, "expected [N, K]");
    let empty = tensor("weight", Dtype::F8_E4M3, &[0, k], &[]);
    refused(&[empty, rows.clone()], ROWS, "has no elements");
    let zero_points = tensor("weight_zero_point", Dtype::I8, &[2], &[0, 1]);
    let error = refused(
        &[values, rows, zero_points],
        ROWS,
        "but the config says that weights are symmetric",
    );
    assert!(matches!(
        error,
        CheckpointError::UnexpectedZeroPoints { .. }
    ));
}

/// Floats of compressed-tensors are also read by their spec alone.
#[test]
fn compressed_tensors_are_read_by_spec() {
    for format in [FORMATS[0], FORMATS[1]] {
        let (_folder, checkpoint) = checkpoint(&published(&mut rng(), 200, 140, format));
        let expected = read_layer(&checkpoint, LAYER, &LayerFormat::Fp8(format)).unwrap();
        let found = compressed_tensors::to_plain(&checkpoint, LAYER, &format.spec()).unwrap();
        assert_eq!(found, expected);
    }
}

/// A scale of 0 is that of a group of zeros.
#[test]
fn scales_may_be_zero() {
    let mut tensors = published(&mut rng(), 20, 4, ROWS);
    tensors[1].bytes[..4].fill(0);
    let weight = read(&tensors, ROWS).unwrap();
    assert!(
        weight
            .dequantize()
            .iter()
            .step_by(4)
            .all(|&value| value == 0.0)
    );
}
