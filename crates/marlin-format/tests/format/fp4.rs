//! Tests of FP4 layers, against a reader that goes value by value.

use marlin_format::checkpoint::{
    CheckpointError, Dtype, Fp4Format, LayerFormat, TensorData, compressed_tensors, read_layer,
};
use marlin_format::{GroupSize, PlainWeight, WeightValue};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::common::{LAYER, checkpoint, expect_floats, expect_layer, message, rng, tensor};

/// The formats of published files.
pub const FORMATS: [Fp4Format; 3] = [
    Fp4Format::NvFp4Packed,
    Fp4Format::MxFp4Packed,
    Fp4Format::ModelOptNvFp4,
];
/// The scale of the whole weight in files of NVFP4.
const WHOLE: f32 = 0.3;

/// Returns the names of the tensors of values and of the scale of the weight.
fn names(format: Fp4Format) -> (&'static str, Option<&'static str>) {
    match format {
        Fp4Format::NvFp4Packed => ("weight_packed", Some("weight_global_scale")),
        Fp4Format::MxFp4Packed => ("weight_packed", None),
        Fp4Format::ModelOptNvFp4 => ("weight", Some("weight_scale_2")),
    }
}

fn whole(name: &str, value: f32) -> TensorData {
    tensor(name, Dtype::F32, &[1], &value.to_le_bytes())
}

/// Returns the tensors of a random layer.
pub fn published(rng: &mut StdRng, k: usize, n: usize, format: Fp4Format) -> Vec<TensorData> {
    let groups = format.spec().scales.group.count(k);
    let (weight, scale_of_weight) = names(format);
    let (dtype, codes) = match format {
        Fp4Format::MxFp4Packed => (Dtype::U8, 100..130),
        _ => (Dtype::F8_E4M3, 0..0x7f),
    };
    let values: Vec<u8> = (0..n * k / 2).map(|_| rng.random()).collect();
    let scales: Vec<u8> = (0..n * groups)
        .map(|_| rng.random_range(codes.clone()))
        .collect();
    [
        tensor(weight, Dtype::U8, &[n, k / 2], &values),
        tensor("weight_scale", dtype, &[n, groups], &scales),
    ]
    .into_iter()
    .chain(scale_of_weight.map(|name| whole(name, WHOLE)))
    .collect()
}

fn read(tensors: &[TensorData], format: Fp4Format) -> Result<PlainWeight, CheckpointError> {
    let (_folder, checkpoint) = checkpoint(tensors);
    read_layer(&checkpoint, LAYER, &LayerFormat::Fp4(format))
}

/// Returns the scale that a code stands for.
fn scale(format: Fp4Format, code: u8) -> f32 {
    match format {
        Fp4Format::NvFp4Packed => WeightValue::E4m3.decode(code) / WHOLE,
        Fp4Format::MxFp4Packed => (f64::from(code) - 127.0).exp2() as f32,
        Fp4Format::ModelOptNvFp4 => WeightValue::E4m3.decode(code) * WHOLE,
    }
}

fn expect_weight(weight: &PlainWeight, tensors: &[TensorData], format: Fp4Format) {
    let (n, k) = (weight.n(), weight.k());
    assert_eq!(weight.spec(), format.spec());
    let groups = format.spec().scales.group.count(k);
    let rows = format.spec().scales.group.rows(k);
    let code = |row: usize, column: usize| {
        tensors[0].bytes[row * k / 2 + column / 2] >> (4 * (column % 2)) & 15
    };
    let scale =
        |row: usize, column: usize| scale(format, tensors[1].bytes[row * groups + column / rows]);
    expect_floats(weight, [n, k], code, scale);
}

/// Reads weights around the edges of words, groups and the transposition's tiles.
#[test]
fn weights_are_those_of_the_files() {
    let rng = &mut rng();
    for (n, k) in [
        (1, 2),
        (3, 16),
        (5, 6),
        (130, 72),
        (17, 1058),
        (600, 32),
        (9, 1024),
    ] {
        for format in FORMATS {
            let tensors = published(rng, k, n, format);
            let weight = read(&tensors, format).unwrap();
            assert_eq!((weight.n(), weight.k()), (n, k));
            expect_weight(&weight, &tensors, format);
        }
    }
}

/// Floats of compressed-tensors are also read by their spec alone.
#[test]
fn compressed_tensors_are_read_by_spec() {
    for format in [Fp4Format::NvFp4Packed, Fp4Format::MxFp4Packed] {
        let (_folder, checkpoint) = checkpoint(&published(&mut rng(), 64, 8, format));
        let read = |spec| compressed_tensors::to_plain(&checkpoint, LAYER, &spec);
        let expected = read_layer(&checkpoint, LAYER, &LayerFormat::Fp4(format)).unwrap();
        assert_eq!(read(format.spec()).unwrap(), expected);
        let channel = format.spec().with_group(GroupSize::Channel);
        let error = message(&read(channel).unwrap_err());
        let expected = "is e2m1 channel f32 in compressed-tensors, but compressed-tensors holds FP8, MXFP4 or NVFP4 weights";
        assert!(error.contains(expected), "{error}");
    }
}

/// Reads every code of a scale that is not refused, zeros included, and both dtypes of e8m0.
#[test]
fn every_scale_is_its_number() {
    for (format, dtypes, codes) in [
        (Fp4Format::NvFp4Packed, &[Dtype::F8_E4M3][..], 0x7f),
        (Fp4Format::ModelOptNvFp4, &[Dtype::F8_E4M3], 0x7f),
        (Fp4Format::MxFp4Packed, &[Dtype::U8, Dtype::F8_E8M0], 0xff),
    ] {
        let rows = format.spec().scales.group.rows(0);
        for &dtype in dtypes {
            let k = codes * rows;
            let mut tensors = published(&mut rng(), k, 1, format);
            let numbers: Vec<u8> = (0..codes as u8).collect();
            tensors[1] = tensor("weight_scale", dtype, &[1, codes], &numbers);
            // The largest scale times the largest value is finite.
            tensors[0].bytes.fill(0x12);
            expect_weight(&read(&tensors, format).unwrap(), &tensors, format);
        }
    }
    // The code of -0 in e4m3.
    let mut tensors = published(&mut rng(), 16, 1, Fp4Format::NvFp4Packed);
    tensors[1].bytes.fill(0x80);
    let weight = read(&tensors, Fp4Format::NvFp4Packed).unwrap();
    assert!(weight.dequantize().iter().all(|&value| value == 0.0));
    // A weight of zeros has a factor of 0.
    let mut tensors = published(&mut rng(), 16, 1, Fp4Format::ModelOptNvFp4);
    tensors[2].bytes.fill(0);
    let weight = read(&tensors, Fp4Format::ModelOptNvFp4).unwrap();
    assert!(weight.dequantize().iter().all(|&value| value == 0.0));
}

/// Scales of activations and of caches belong to a layer and are not used.
#[test]
fn other_tensors_of_a_layer_are_not_used() {
    for (format, others) in [
        (Fp4Format::NvFp4Packed, &["input_global_scale"][..]),
        (Fp4Format::MxFp4Packed, &["input_global_scale"]),
        (
            Fp4Format::ModelOptNvFp4,
            &["input_scale", "k_scale", "v_scale"],
        ),
    ] {
        let mut tensors = published(&mut rng(), 32, 8, format);
        let expected = read(&tensors, format).unwrap();
        tensors.extend(others.iter().map(|name| whole(name, 0.5)));
        expect_layer(&tensors, &LayerFormat::Fp4(format), &expected);
    }
}

#[test]
fn inconsistent_layers_are_refused() {
    let rng = &mut rng();
    let (n, k) = (6, 72);
    let refused = |tensors: &[TensorData], format, expected: &str| {
        let found = message(&read(tensors, format).expect_err(expected));
        assert!(
            found.contains(LAYER) && found.contains(expected),
            "{found}\nhas no\n{expected}"
        );
    };
    for format in FORMATS {
        let good = published(rng, k, n, format);
        let changed = |at: usize, tensor: TensorData| {
            let mut tensors = good.clone();
            tensors[at] = tensor;
            tensors
        };
        let (weight, scale_of_weight) = names(format);
        for (at, name) in [weight, "weight_scale"]
            .into_iter()
            .chain(scale_of_weight)
            .enumerate()
        {
            let mut tensors = good.clone();
            tensors.remove(at);
            refused(&tensors, format, &format!("has no tensor `{LAYER}.{name}`"));
        }

        // The groups of another format, and a part of a group too few.
        let groups = format.spec().scales.group.count(k);
        let dtype = good[1].spec.dtype;
        for other in [k.div_ceil(16), k.div_ceil(32), k / 16, k.div_ceil(64)] {
            if other != groups {
                let scales = tensor("weight_scale", dtype, &[n, other], &vec![64; n * other]);
                let expected = format!("has shape [{n}, {other}]; expected [{n}, {groups}]");
                refused(&changed(1, scales), format, &expected);
            }
        }
        let bytes = vec![64; 2 * n * groups];
        let scales = tensor("weight_scale", Dtype::F16, &[n, groups], &bytes);
        let expected = match format {
            Fp4Format::MxFp4Packed => "is F16; expected U8 or F8_E8M0",
            _ => "is F16; expected F8_E4M3",
        };
        refused(&changed(1, scales), format, expected);
        let values = tensor(weight, Dtype::I32, &[n, k / 8], &good[0].bytes);
        refused(
            &changed(0, values),
            format,
            "is I32; expected U8, because the config says that the layer is quantised",
        );
        let values = tensor(weight, Dtype::U8, &[n * k / 2], &good[0].bytes);
        refused(&changed(0, values), format, "expected [N, K/2]");
        let values = tensor(weight, Dtype::U8, &[n, 0], &[]);
        refused(&changed(0, values), format, "has no elements");

        let bad_codes: &[(u8, &str)] = match format {
            Fp4Format::MxFp4Packed => &[(0xff, "NaN")],
            _ => &[(0x7f, "NaN"), (0xff, "NaN"), (0xb8, "-")],
        };
        for &(code, shown) in bad_codes {
            let mut tensors = good.clone();
            tensors[1].bytes[2 * groups + 1] = code;
            let expected = format!("the scale of group 1, output feature 2 is {shown}");
            refused(&tensors, format, &expected);
        }
        let Some(name) = scale_of_weight else {
            continue;
        };
        for (value, shown) in [
            (f32::NAN, "NaN"),
            (f32::INFINITY, "inf"),
            (-1.0, "-1"),
            (0.0, "0"),
        ] {
            // A weight of zeros may have a factor of 0, but 0 does not divide.
            if format == Fp4Format::NvFp4Packed || value != 0.0 {
                let expected = format!("the scale of the weight is {shown}; it must be finite");
                refused(&changed(2, whole(name, value)), format, &expected);
            }
        }
        let two = tensor(name, Dtype::F32, &[2], &[1; 8]);
        refused(
            &changed(2, two),
            format,
            "its shape is [2]; expected [1] or []",
        );
        // 448 divided or multiplied so is infinite in f32.
        let extreme = match format {
            Fp4Format::NvFp4Packed => 1e-37,
            _ => 1e37,
        };
        let mut tensors = changed(2, whole(name, extreme));
        tensors[1].bytes.fill(0x7e);
        refused(
            &tensors,
            format,
            "the scale of group 0, output feature 0 is inf",
        );
    }
}
