use half::{bf16, f16};
use marlin_format::{FormatError, GroupSize, PlainWeight, QuantSpec, ScaleDtype, quantize_rtn};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::common::{all_specs, any_problem, cases, rng};

/// Returns weights with columns of every kind: mixed signs, positive, negative, tiny, zero.
fn random_weights(rng: &mut StdRng, k: usize, n: usize) -> Vec<f32> {
    let columns: Vec<(f32, f32)> = (0..n)
        .map(|_| match rng.random_range(0..6) {
            0 => (0.2, 0.9),
            1 => (-7.0, -6.9),
            2 => (-1e-3, 2e-3),
            3 => (0.0, f32::MIN_POSITIVE),
            _ => (-1.0, 1.0),
        })
        .collect();
    (0..k * n)
        .map(|i| columns[i % n])
        .map(|(low, high)| rng.random_range(low..high))
        .collect()
}

/// Returns the scale and zero point of an element.
fn group_of(weight: &PlainWeight, row: usize, column: usize) -> (f32, f32) {
    let group = row / weight.spec().scales.group.rows(weight.k()) * weight.n() + column;
    (
        weight.scales().get(group),
        weight
            .zero_points()
            .map_or(f32::from(weight.spec().value.midpoint()), |zero_points| {
                f32::from(zero_points[group])
            }),
    )
}

proptest! {
    #![proptest_config(cases(80))]

    #[test]
    fn every_weight_goes_to_its_nearest_level((k, n, spec) in any_problem(), seed: u64) {
        let values = random_weights(&mut StdRng::seed_from_u64(seed), k, n);
        let weight = quantize_rtn(&values, k, n, &spec).unwrap();
        prop_assert_eq!((weight.k(), weight.n(), weight.spec(), weight.row_permutation()), (k, n, spec, None));
        let dequantized = weight.dequantize();
        let top = spec.value.max();
        for row in 0..k {
            for column in 0..n {
                let (value, back) = (values[row * n + column], dequantized[row * n + column]);
                let (scale, zero_point) = group_of(&weight, row, column);
                let error = (value - back).abs();
                let level = |q: u8| scale * (f32::from(q) - zero_point);
                let nearest = (0..=top).map(|q| (value - level(q)).abs()).fold(f32::INFINITY, f32::min);
                // The rounding error of the division by the scale, whose quotient is at most about
                // `top`.
                let rounding = f32::from(top) * f32::EPSILON * scale;
                prop_assert!(error <= nearest + rounding, "row {row}, column {column}: {value} became {back}, {nearest} was possible");
                let q = weight.q(row, column);
                // At both ends the range may fall short: by half a step for the zero point, and by
                // the rounding of the scale times half of the steps (`top` or `top / 2`). A scale
                // that is subnormal in f16 has a larger rounding error.
                let bound = if (1..top).contains(&q) {
                    0.5
                } else if scale <= f16::MIN_POSITIVE.to_f32() {
                    f32::from(top) / 2.0 + 0.5
                } else {
                    let rounding = match spec.scales.dtype {
                        ScaleDtype::F16 => 1.0 / 2048.0,
                        ScaleDtype::BF16 => 1.0 / 256.0,
                        ScaleDtype::F32 => f32::EPSILON,
                    };
                    0.5 + f32::from(top) * rounding
                };
                prop_assert!(error <= bound * scale + rounding, "row {row}, column {column}: {value} became {back}, scale {scale}");
            }
        }
    }

    #[test]
    fn scales_are_those_of_the_range((k, n, spec) in any_problem(), seed: u64) {
        let values = random_weights(&mut StdRng::seed_from_u64(seed), k, n);
        let weight = quantize_rtn(&values, k, n, &spec).unwrap();
        let (rows, top) = (spec.scales.group.rows(k), f32::from(spec.value.max()));
        for group in 0..spec.scales.group.count(k) {
            for column in 0..n {
                let group_values = (group * rows..k.min((group + 1) * rows)).map(|row| values[row * n + column]);
                let (low, high) = group_values.fold((0.0f32, 0.0f32), |(low, high), value| (low.min(value), high.max(value)));
                let exact = if spec.has_zero_points() { (high - low) / top } else { high.max(-low) / (top / 2.0) };
                let found = weight.scales().get(group * n + column);
                let (relative, smallest) = match spec.scales.dtype {
                    ScaleDtype::F16 => (1.0 / 2048.0, f16::MIN_POSITIVE_SUBNORMAL.to_f32()),
                    ScaleDtype::BF16 => (1.0 / 256.0, bf16::MIN_POSITIVE_SUBNORMAL.to_f32()),
                    // The exact scale is computed in f32 as well, so the tolerance is one f32
                    // rounding.
                    ScaleDtype::F32 => (f32::EPSILON, f32::MIN_POSITIVE),
                };
                prop_assert!((found - exact).abs() <= exact * relative + smallest, "group {group}, column {column}: {found}, not {exact}");
                prop_assert!(found > 0.0);
            }
        }
    }
}

#[test]
fn symmetric_by_hand() {
    // max|w| / 7.5 = 1.
    let values = [7.5, -7.5, 0.0, 0.5, 1.5, -0.5, -1.5, 3.2];
    let weight = quantize_rtn(&values, 8, 1, &QuantSpec::int4(GroupSize::Channel)).unwrap();
    let q: Vec<u8> = (0..8).map(|row| weight.q(row, 0)).collect();
    assert_eq!(weight.scales().get(0), 1.0);
    // Ties go to even; 7.5 rounds to 8, above the range.
    assert_eq!(q, [15, 0, 8, 8, 10, 8, 6, 11]);
    assert_eq!(
        weight.dequantize(),
        [7.0, -8.0, 0.0, 0.0, 2.0, 0.0, -2.0, 3.0]
    );
}

#[test]
fn eight_bits_by_hand() {
    // max|w| / 127.5 = 1.
    let values = [127.5, -127.5, 0.0, 0.5, 1.5, -3.2, 100.4];
    let weight = quantize_rtn(&values, 7, 1, &QuantSpec::int8(GroupSize::Channel)).unwrap();
    let q: Vec<u8> = (0..7).map(|row| weight.q(row, 0)).collect();
    assert_eq!(q, [255, 0, 128, 128, 130, 125, 228]);
    assert_eq!(
        weight.dequantize(),
        [127.0, -128.0, 0.0, 0.0, 2.0, -3.0, 100.0]
    );

    // Columns: -100..=155 (scale 1, z 100); 0..=255 (z 0); -255..=0 (z 255).
    let values: Vec<f32> = (0..256)
        .flat_map(|i| [i as f32 - 100.0, i as f32, i as f32 - 255.0])
        .collect();
    let weight = quantize_rtn(
        &values,
        256,
        3,
        &QuantSpec::int8(GroupSize::Channel).with_zero_points(),
    )
    .unwrap();
    assert_eq!(weight.zero_points().unwrap(), [100, 0, 255]);
    assert_eq!(weight.dequantize(), values);
}

#[test]
fn zero_points_by_hand() {
    // Columns: -5..=10 (scale 1, z 5); 0..=15 (z 0); -15..=0 (z 15).
    let values: Vec<f32> = (0..16)
        .flat_map(|i| [i as f32 - 5.0, i as f32, i as f32 - 15.0])
        .collect();
    let weight = quantize_rtn(
        &values,
        16,
        3,
        &QuantSpec::int4(GroupSize::Channel).with_zero_points(),
    )
    .unwrap();
    assert_eq!(weight.zero_points().unwrap(), [5, 0, 15]);
    assert_eq!(weight.scales().to_f32(), [1.0; 3]);
    assert_eq!(weight.dequantize(), values);
}

/// K = 34: the last group has two rows, with a scale of their own.
#[test]
fn an_incomplete_group_by_hand() {
    let values = [[7.5; 32].as_slice(), &[0.75, -0.3]].concat();
    let weight = quantize_rtn(
        &values,
        34,
        1,
        &QuantSpec::int4(GroupSize::G32).with_scale_dtype(ScaleDtype::BF16),
    )
    .unwrap();
    let scale = bf16::from_f32(0.1).to_f32();
    assert_eq!(weight.scales().to_f32(), [1.0, scale]);
    assert_eq!(
        (weight.q(31, 0), weight.q(32, 0), weight.q(33, 0)),
        (15, 15, 5)
    );
    assert_eq!(weight.dequantize()[31..], [7.0, scale * 7.0, scale * -3.0]);
    let values = [[15.0; 32].as_slice(), &[1.5, -1.5]].concat();
    let weight = quantize_rtn(
        &values,
        34,
        1,
        &QuantSpec::int4(GroupSize::G32).with_zero_points(),
    )
    .unwrap();
    assert_eq!(weight.zero_points().unwrap(), [0, 8]);
}

#[test]
fn ranges_without_zero_are_extended_to_it() {
    let values: Vec<f32> = (0..32)
        .flat_map(|i| [10.0 + 0.01 * i as f32, -10.0 - 0.01 * i as f32])
        .collect();
    let weight = quantize_rtn(
        &values,
        32,
        2,
        &QuantSpec::int4(GroupSize::G32).with_zero_points(),
    )
    .unwrap();
    assert_eq!(weight.zero_points().unwrap(), [0, 15]);
    for (value, back) in values.iter().zip(weight.dequantize()) {
        assert!(
            (value - back).abs() < 10.31 / 15.0 / 2.0 + 0.01,
            "{value} became {back}"
        );
    }
}

#[test]
fn zeros_stay_zeros() {
    for spec in all_specs() {
        let weight = quantize_rtn(&[0.0; 128 * 3], 128, 3, &spec).unwrap();
        assert!(
            weight.dequantize().iter().all(|&value| value == 0.0),
            "{spec}"
        );
        // A zero of either sign, among nonzero values.
        let mut values = vec![0.25; 128 * 2];
        (values[6], values[9]) = (-0.0, 0.0);
        let back = quantize_rtn(&values, 128, 2, &spec).unwrap().dequantize();
        assert_eq!((back[6], back[9]), (0.0, 0.0), "{spec}");
    }
}

#[test]
fn tiny_and_huge_weights() {
    for spec in all_specs() {
        let smallest = match spec.scales.dtype {
            ScaleDtype::F16 => f16::MIN_POSITIVE_SUBNORMAL.to_f32(),
            ScaleDtype::BF16 => bf16::MIN_POSITIVE_SUBNORMAL.to_f32(),
            ScaleDtype::F32 => f32::MIN_POSITIVE,
        };
        // Small multiples of the smallest scale, whose own scale would be below it, are exact.
        let values: Vec<f32> = (0..128).map(|i| smallest * (i % 4) as f32).collect();
        let weight = quantize_rtn(&values, 128, 1, &spec).unwrap();
        assert_eq!(weight.scales().get(0), smallest, "{spec}");
        assert_eq!(weight.dequantize(), values, "{spec}");
    }
    let wide = [3.0e38f32, -3.0e38].repeat(64);
    for spec in all_specs() {
        let result = quantize_rtn(&wide, 128, 1, &spec);
        match spec.scales.dtype {
            ScaleDtype::F16 => assert!(
                matches!(
                    result,
                    Err(FormatError::ScaleOverflow {
                        row: 0,
                        column: 0,
                        ..
                    })
                ),
                "{spec}"
            ),
            ScaleDtype::BF16 | ScaleDtype::F32 => assert!(
                result
                    .unwrap()
                    .dequantize()
                    .iter()
                    .all(|value| value.abs() > 2.7e38),
                "{spec}"
            ),
        }
    }
}

/// Checks every group, whatever its magnitude: either the group is counted, or its values are
/// rounded as precisely as the bits allow. bf16 represents all scales that f16 cannot.
#[test]
fn groups_whose_scales_underflow_are_counted() {
    let mut rng = rng();
    let (k, n) = (96, 24);
    let mut counted = 0;
    for spec in all_specs() {
        let rows = spec.scales.group.rows(k);
        // From above what f16 holds down to below its smallest number, columns apart.
        let magnitudes: Vec<f32> = (0..n)
            .map(|column| 10.0f32.powf(-3.0 - 7.0 * column as f32 / n as f32))
            .collect();
        let values: Vec<f32> = (0..k * n)
            .map(|i| magnitudes[i % n] * rng.random_range(-1.0..1.0f32))
            .collect();
        let weight = quantize_rtn(&values, k, n, &spec).unwrap();
        let of_rest = |first: usize| {
            let only: Vec<f32> = values
                .iter()
                .enumerate()
                .map(|(i, &value)| {
                    if i % n == first % n && i / n / rows == first / n {
                        value
                    } else {
                        0.0
                    }
                })
                .collect();
            quantize_rtn(&only, k, n, &spec)
                .unwrap()
                .underflows(|| Ok::<_, FormatError>(only))
                .unwrap()
        };
        let back = weight.dequantize();
        let mut expected = 0;
        for group in 0..spec.scales.group.count(k) {
            for column in 0..n {
                let places = (group * rows..k.min((group + 1) * rows)).map(|row| row * n + column);
                let [low, high] = places.clone().fold([0.0f32; 2], |[low, high], i| {
                    [low.min(values[i]), high.max(values[i])]
                });
                let error = places
                    .map(|i| (values[i] - back[i]).abs())
                    .fold(0.0, f32::max);
                let count = of_rest(group * n + column);
                expected += count;
                // The limit is half a level for the rounding of values and half for the rounding of
                // the scale. Another half is for the zero point, or for the clamp of a symmetric
                // weight.
                let limit = 1.51 * spec.exact_scale(low, high);
                assert!(
                    count == 1 || error <= limit,
                    "{spec}, {low:e} to {high:e}: {error:e}, limit {limit:e}"
                );
                if high.max(-low) < 1e-8 && spec.scales.dtype == ScaleDtype::F16 {
                    assert_eq!(count, 1, "{spec}, {low:e} to {high:e}");
                }
            }
        }
        let found = weight
            .underflows(|| Ok::<_, FormatError>(values.clone()))
            .unwrap();
        assert_eq!(found, expected, "{spec}");
        assert!(
            spec.scales.dtype == ScaleDtype::F16 || found == 0,
            "{spec}: {found}"
        );
        counted += found;
    }
    println!("{counted} groups counted");
    assert!(counted > 0);
    // Zeros need no scale, and the float weight is not requested if f16 represents all scales.
    let spec = QuantSpec::int4(GroupSize::G32);
    assert_eq!(
        quantize_rtn(&[0.0; 64], 32, 2, &spec)
            .unwrap()
            .underflows(|| Ok::<_, FormatError>(vec![0.0; 64]))
            .unwrap(),
        0
    );
    let unread =
        || -> Result<Vec<f32>, FormatError> { panic!("the float weight is not looked at") };
    assert_eq!(
        quantize_rtn(&[1e-4; 64], 32, 2, &spec)
            .unwrap()
            .underflows(unread)
            .unwrap(),
        0
    );
}

#[test]
fn bad_weights_are_refused() {
    let spec = QuantSpec::int4(GroupSize::G32);
    let good = vec![1.0f32; 64 * 3];
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for spec in [spec, spec.with_zero_points()] {
            let mut values = good.clone();
            values[40 * 3 + 2] = value;
            match quantize_rtn(&values, 64, 3, &spec) {
                Err(FormatError::NonFiniteWeight {
                    row: 40,
                    column: 2,
                    value: found,
                }) => assert_eq!(found.to_bits(), value.to_bits()),
                other => panic!("{value}: {other:?}"),
            }
        }
    }
    let mut values = good.clone();
    values[33 * 3 + 1] = 65504.0 * 7.6;
    let error = quantize_rtn(&values, 64, 3, &spec).unwrap_err();
    assert!(
        matches!(
            error,
            FormatError::ScaleOverflow {
                row: 32,
                column: 1,
                dtype: ScaleDtype::F16,
                ..
            }
        ),
        "{error:?}"
    );
    assert!(
        error.to_string().contains("use bf16 scales")
            && error.to_string().contains("--scales bf16"),
        "{error}"
    );
    assert!(quantize_rtn(&values, 64, 3, &spec.with_scale_dtype(ScaleDtype::BF16)).is_ok());

    let length = FormatError::Length {
        what: "the weight",
        k: 64,
        n: 3,
        expected: 192,
        found: 191,
    };
    assert_eq!(quantize_rtn(&good[1..], 64, 3, &spec).unwrap_err(), length);
    assert_eq!(
        quantize_rtn(&[], 0, 3, &spec).unwrap_err(),
        FormatError::Empty { k: 0, n: 3 }
    );
}
