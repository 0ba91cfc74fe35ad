//! Weights of floats: their quantisation, values and errors.

use marlin_format::checkpoint::compressed_tensors;
use marlin_format::layout::PlainLayout;
use marlin_format::{
    FormatError, GroupSize, PlainParts, PlainWeight, QuantSpec, Scales, Sparsity, WeightDescriptor,
    WeightFormat, WeightValue, quantize_rtn,
};
use marlin_testing::seed;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

fn random(k: usize, n: usize, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut value = || rng.random_range(-1.0f32..1.0) * rng.random_range(0.0f32..0.1);
    (0..k * n).map(|_| value()).collect()
}

/// The columns of a group: each value with its scale and the stored value.
fn groups(weight: &[f32], quantized: &PlainWeight) -> Vec<(f32, Vec<(f32, f32)>)> {
    let (k, n) = (quantized.k(), quantized.n());
    let (rows, values) = (
        quantized.spec().scales.group.rows(k),
        quantized.dequantize(),
    );
    (0..quantized.scales().len())
        .map(|index| {
            let (group, column) = (index / n, index % n);
            let places = (group * rows..k.min((group + 1) * rows)).map(|row| row * n + column);
            let pairs = places.map(|place| (weight[place], values[place])).collect();
            (quantized.scales().get(index), pairs)
        })
        .collect()
}

#[test]
fn every_value_becomes_the_nearest_number_of_its_group() {
    let seed = seed();
    for (spec, k, n) in [
        (QuantSpec::fp8(), 200, 9),
        (QuantSpec::fp8_blocks(), 300, 9),
        (QuantSpec::mxfp4(), 100, 33),
        (QuantSpec::nvfp4(), 100, 33),
    ] {
        let weight = random(k, n, seed);
        let quantized = quantize_rtn(&weight, k, n, &spec).unwrap();
        let numbers: Vec<f32> = (0..=spec.value.max())
            .map(|code| spec.value.decode(code))
            .filter(|number| !number.is_nan())
            .collect();
        for (scale, pairs) in groups(&weight, &quantized) {
            for (exact, found) in pairs {
                let nearest = numbers
                    .iter()
                    .map(|number| (exact - number * scale).abs())
                    .fold(f32::INFINITY, f32::min);
                let error = (exact - found).abs();
                assert!(
                    error <= nearest * (1.0 + 1e-6),
                    "{spec}, seed {seed}: {exact} became {found} with scale {scale}"
                );
            }
        }
    }
}

#[test]
fn scales_are_those_of_the_format() {
    let seed = seed();
    let (k, n) = (128, 40);
    let weight = random(k, n, seed);
    let most = |pairs: &[(f32, f32)]| {
        pairs
            .iter()
            .fold(0f32, |most, (exact, _)| most.max(exact.abs()))
    };

    let mxfp4 = quantize_rtn(&weight, k, n, &QuantSpec::mxfp4()).unwrap();
    for (scale, pairs) in groups(&weight, &mxfp4) {
        let exponent = most(&pairs).log2().floor() as i32 - 2;
        assert_eq!(scale, 2f32.powi(exponent), "seed {seed}");
    }

    let nvfp4 = quantize_rtn(&weight, k, n, &QuantSpec::nvfp4()).unwrap();
    let all = weight
        .iter()
        .fold(0f32, |most, value| most.max(value.abs()));
    let tensor = all / (6.0 * 448.0);
    for (scale, pairs) in groups(&weight, &nvfp4) {
        let code = WeightValue::E4m3.encode(most(&pairs) / 6.0 / tensor);
        let expected = WeightValue::E4m3.decode(code) * tensor;
        assert!(
            (scale / expected - 1.0).abs() < 1e-6,
            "seed {seed}: {scale}, {expected}"
        );
    }

    let fp8 = quantize_rtn(&weight, k, n, &QuantSpec::fp8()).unwrap();
    for (scale, pairs) in groups(&weight, &fp8) {
        assert!(
            (scale * 448.0 / most(&pairs) - 1.0).abs() < 1e-6,
            "seed {seed}"
        );
    }
}

#[test]
fn zeros_and_tiny_weights_stay_finite() {
    for spec in [QuantSpec::fp8(), QuantSpec::mxfp4(), QuantSpec::nvfp4()] {
        for value in [0.0, 1e-30, f32::MIN_POSITIVE, 1e-42] {
            let mut weight = vec![value; 64 * 2];
            weight[0] = -value;
            let quantized = quantize_rtn(&weight, 64, 2, &spec).unwrap();
            let found = quantized.dequantize();
            for (found, exact) in found.iter().zip(&weight) {
                assert!(
                    found.is_finite() && (found - exact).abs() <= value.max(1e-37),
                    "{spec}: {exact} became {found}"
                );
            }
        }
    }
}

#[test]
fn other_formats_of_floats_are_refused() {
    let weight = random(64, 8, 1);
    let refused = |spec: QuantSpec| quantize_rtn(&weight, 64, 8, &spec).unwrap_err();
    assert_eq!(
        refused(QuantSpec::mxfp4().with_group(GroupSize::G128)).to_string(),
        "e2m1 values in groups of 128 are not supported; use 32 or 16"
    );
    assert_eq!(
        refused(QuantSpec::fp8().with_group(GroupSize::G16)).to_string(),
        "e4m3 values in groups of 16 are not supported; use all rows or 128"
    );
    assert_eq!(
        refused(QuantSpec::int4(GroupSize::G16)),
        FormatError::ValueGroup {
            value: WeightValue::Int4,
            group: GroupSize::G16
        }
    );
    assert_eq!(
        refused(QuantSpec::nvfp4().with_zero_points()),
        FormatError::FloatZeroPoints {
            value: WeightValue::E2m1
        }
    );
    let sparse = WeightFormat::dense(QuantSpec::nvfp4()).with_sparsity(Sparsity::TwoFour);
    assert_eq!(
        WeightDescriptor::plain(sparse, 64, 8).check(),
        Err(FormatError::SparseFloats {
            value: WeightValue::E2m1
        })
    );
}

#[test]
fn files_hold_floats_of_three_formats() {
    for (_, spec) in QuantSpec::FLOAT_FORMATS {
        assert_eq!(compressed_tensors::check(&spec), Ok(()));
    }
    assert_eq!(
        compressed_tensors::check(&QuantSpec::fp8_blocks()),
        Err(FormatError::UnwrittenGroup {
            value: WeightValue::E4m3,
            group: GroupSize::G128
        })
    );
}

#[test]
fn a_nan_is_refused_with_its_place() {
    let (k, n) = (10, 3);
    for code in [0x7f, 0xff] {
        for (row, column) in [(0, 0), (3, 1), (9, 2)] {
            let here = |r, c| (r, c) == (row, column);
            let qweight = PlainLayout::new(k, n, WeightValue::E4m3)
                .pack_with(|r, c| if here(r, c) { code } else { 0x7e });
            let found = PlainWeight::new(PlainParts {
                k,
                n,
                spec: QuantSpec::fp8(),
                qweight,
                metadata: None,
                scales: Scales::F32(vec![1.0; n]),
                zero_points: None,
                row_permutation: None,
            });
            assert_eq!(
                found,
                Err(FormatError::NanValue {
                    value: WeightValue::E4m3,
                    row,
                    column
                })
            );
        }
    }
}

#[test]
fn specs_of_floats_show_and_serialise() {
    for (spec, shown, json) in [
        (
            QuantSpec::nvfp4(),
            "e2m1 g16 f32",
            r#"{"bits":"e2m1","group":16,"zero_points":false,"scale_dtype":"f32"}"#,
        ),
        (
            QuantSpec::fp8(),
            "e4m3 channel f32",
            r#"{"bits":"e4m3","group":-1,"zero_points":false,"scale_dtype":"f32"}"#,
        ),
    ] {
        assert_eq!(spec.to_string(), shown);
        assert_eq!(serde_json::to_string(&spec).unwrap(), json);
        assert_eq!(serde_json::from_str::<QuantSpec>(json).unwrap(), spec);
    }
    let error = serde_json::from_str::<WeightValue>("\"e5m2\"").unwrap_err();
    assert!(
        error.to_string().contains("`e5m2` is not a kind of values"),
        "{error}"
    );
}
