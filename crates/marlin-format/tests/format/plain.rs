use half::f16;
use marlin_format::{
    FormatError, GroupSize, PlainParts, PlainWeight, QuantSpec, ScaleDtype, Scales, WeightValue,
};

use crate::common::{all_specs, random_parts, random_weight, rng};

#[test]
fn dequantize_follows_the_formula() {
    let rng = &mut rng();
    for spec in all_specs() {
        for (k, act_order) in [
            (256, false),
            (256, true),
            (33, true),
            (200, false),
            (344, true),
        ] {
            let n = 11;
            let weight = random_weight(rng, k, n, spec, act_order);
            let dequantized = weight.dequantize();
            for stored in 0..k {
                let natural = weight
                    .row_permutation()
                    .map_or(stored, |permutation| permutation[stored] as usize);
                for column in 0..n {
                    let group = stored / spec.scales.group.rows(k) * n + column;
                    let zero_point = weight
                        .zero_points()
                        .map_or(spec.value.midpoint(), |zero_points| zero_points[group]);
                    let expected = weight.scales().get(group)
                        * (f32::from(weight.q(stored, column)) - f32::from(zero_point));
                    assert_eq!(
                        dequantized[natural * n + column],
                        expected,
                        "{spec}, stored row {stored}, column {column}"
                    );
                }
            }
        }
    }
}

#[test]
fn scales_are_rounded_where_all_of_them_fit() {
    let parts = |scale| PlainParts {
        k: 1,
        n: 1,
        spec: QuantSpec::int4(GroupSize::Channel).with_scale_dtype(ScaleDtype::F32),
        qweight: [vec![0x8888_8880], vec![0x8888_8888; 7]].concat(),
        metadata: None,
        scales: Scales::F32(vec![scale]),
        zero_points: None,
        row_permutation: None,
    };
    let weight = |scale| PlainWeight::new(parts(scale)).unwrap();
    let rounded = weight(0.1).with_scales_in(ScaleDtype::F16);
    assert_eq!(
        (rounded.scales(), rounded.spec().scales.dtype),
        (&Scales::F16(vec![f16::from_f32(0.1)]), ScaleDtype::F16)
    );
    assert_eq!(weight(1e6).with_scales_in(ScaleDtype::F16), weight(1e6));
    assert_eq!(
        weight(1e6)
            .with_scales_in(ScaleDtype::BF16)
            .spec()
            .scales
            .dtype,
        ScaleDtype::BF16
    );
}

#[test]
fn a_small_weight_by_hand() {
    // K = 2, N = 1: q = 0 and 15, scale 0.5.
    let weight = PlainWeight::new(PlainParts {
        k: 2,
        n: 1,
        spec: QuantSpec::int4(GroupSize::Channel),
        qweight: [vec![0x8888_88f0], vec![0x8888_8888; 7]].concat(),
        metadata: None,
        scales: Scales::F16(vec![f16::from_f32(0.5)]),
        zero_points: None,
        row_permutation: Some(vec![1, 0]),
    })
    .unwrap();
    assert_eq!((weight.q(0, 0), weight.q(1, 0)), (0, 15));
    assert_eq!(weight.dequantize(), [3.5, -4.0]);
    assert_eq!(weight.size_bytes(), 8 * 4 + 2 + 2 * 4);
    assert_eq!(
        format!("{weight:?}"),
        "PlainWeight { k: 2, n: 1, spec: int4 channel f16, sparsity: dense, row_permutation: true, .. }"
    );
}

#[test]
fn a_small_weight_of_8_bits_by_hand() {
    // K = 5, N = 1: q = 0, 127, 128 and 255 in the first word, 129 in the second; scale 0.5.
    let parts = PlainParts {
        k: 5,
        n: 1,
        spec: QuantSpec::int8(GroupSize::Channel),
        qweight: [
            vec![0xff80_7f00],
            vec![0x8080_8080; 7],
            vec![0x8080_8081],
            vec![0x8080_8080; 7],
        ]
        .concat(),
        metadata: None,
        scales: Scales::F16(vec![f16::from_f32(0.5)]),
        zero_points: None,
        row_permutation: None,
    };
    let weight = PlainWeight::new(parts.clone()).unwrap();
    assert_eq!(weight.dequantize(), [-64.0, -0.5, 0.0, 63.5, 0.5]);
    assert_eq!(weight.size_bytes(), 16 * 4 + 2);
    let spec = parts.spec.with_zero_points();
    let weight = PlainWeight::new(PlainParts {
        spec,
        zero_points: Some(vec![255]),
        ..parts
    })
    .unwrap();
    assert_eq!(weight.dequantize(), [-127.5, -64.0, -63.5, 0.0, -63.0]);
}

#[test]
fn sizes_count_everything() {
    let rng = &mut rng();
    let (k, n) = (1024, 512);
    let mut bits = |spec, act_order| random_weight(rng, k, n, spec, act_order).bits_per_weight();
    // 4 bits per weight, 16 bits per group for the scale, 4 bits per group for the zero point, 32
    // bits per row for the permutation.
    assert_eq!(
        bits(QuantSpec::int4(GroupSize::G128), false),
        4.0 + 16.0 / 128.0
    );
    assert_eq!(
        bits(QuantSpec::int4(GroupSize::G32).with_zero_points(), false),
        4.0 + 20.0 / 32.0
    );
    assert_eq!(
        bits(QuantSpec::int8(GroupSize::G128), false),
        8.0 + 16.0 / 128.0
    );
    assert_eq!(
        bits(QuantSpec::int8(GroupSize::G32).with_zero_points(), false),
        8.0 + 24.0 / 32.0
    );
    assert_eq!(
        bits(QuantSpec::int4(GroupSize::Channel), true),
        4.0 + 16.0 / k as f64 + 32.0 / n as f64
    );
}

#[test]
fn parts_come_back() {
    let rng = &mut rng();
    for spec in all_specs() {
        let parts = random_parts(rng, 100, 9, spec, true);
        assert_eq!(PlainWeight::new(parts.clone()).unwrap().into_parts(), parts);
    }
}

#[test]
fn scales_convert() {
    for dtype in [ScaleDtype::F16, ScaleDtype::BF16] {
        let scales = Scales::from_f32(&[1.0, -0.5, 3.0e38], dtype);
        assert_eq!(
            (scales.dtype(), scales.len(), scales.is_empty()),
            (dtype, 3, false)
        );
        assert_eq!(scales.get(1), -0.5);
        assert_eq!(scales.get(2).is_infinite(), dtype == ScaleDtype::F16);
        assert_eq!(scales.as_bytes().len(), 6);
        assert_eq!(scales.to_f32()[..2], [1.0, -0.5]);
    }
    assert_eq!(
        Scales::from_f32(&[1.0], ScaleDtype::F16).as_bytes(),
        [0x00, 0x3c]
    );
    assert_eq!(
        Scales::from_f32(&[1.0], ScaleDtype::BF16).as_bytes(),
        [0x80, 0x3f]
    );
}

/// Tests every refusal: K = 64, N = 5, groups of 32 with zero points, with one fault at a time.
#[test]
fn inconsistent_parts_are_refused() {
    let rng = &mut rng();
    let (k, n) = (64, 5);
    let spec = QuantSpec::int4(GroupSize::G32).with_zero_points();
    let good = random_parts(rng, k, n, spec, true);
    let length = |what, expected, found| FormatError::Length {
        what,
        k,
        n,
        expected,
        found,
    };
    let refused = |change: &dyn Fn(&mut PlainParts), expected: FormatError| {
        let mut parts = good.clone();
        change(&mut parts);
        assert_eq!(PlainWeight::new(parts).unwrap_err(), expected);
    };

    refused(&|parts| parts.k = 0, FormatError::Empty { k: 0, n });
    refused(
        &|parts| parts.k = 65,
        FormatError::Length {
            what: "the packed weight",
            k: 65,
            n,
            expected: 72,
            found: 64,
        },
    );
    refused(
        &|parts| parts.n = usize::MAX,
        FormatError::TooLarge {
            k,
            n: usize::MAX,
            limit: QuantSpec::MAX_FEATURES,
        },
    );
    let (elements, limit) = (k << 30, QuantSpec::MAX_ELEMENTS);
    refused(
        &|parts| parts.n = 1 << 30,
        FormatError::TooManyElements {
            k,
            n: 1 << 30,
            elements,
            limit,
        },
    );
    refused(
        &|parts| parts.qweight.truncate(63),
        length("the packed weight", 64, 63),
    );
    refused(
        &|parts| parts.qweight.clear(),
        length("the packed weight", 64, 0),
    );
    refused(
        &|parts| parts.qweight[7] = 0x8888_8887,
        FormatError::Padding {
            word: 7,
            found: 0x8888_8887,
            bits: WeightValue::Int4,
        },
    );
    refused(
        &|parts| parts.scales = Scales::BF16(vec![half::bf16::ONE; 10]),
        FormatError::ScaleDtypeMismatch {
            expected: ScaleDtype::F16,
            found: ScaleDtype::BF16,
        },
    );
    refused(
        &|parts| parts.scales = Scales::F16(vec![f16::ONE; 9]),
        length("the scales", 10, 9),
    );
    refused(
        &|parts| {
            parts.scales = Scales::F16([vec![f16::ONE; 7], vec![f16::NEG_INFINITY; 3]].concat())
        },
        FormatError::NonFiniteScale {
            group: 1,
            column: 2,
            value: f32::NEG_INFINITY,
        },
    );
    refused(
        &|parts| parts.zero_points = None,
        FormatError::MissingZeroPoints,
    );
    refused(
        &|parts| parts.spec = parts.spec.with_zero_point(false.into()),
        FormatError::UnexpectedZeroPoints,
    );
    refused(
        &|parts| parts.zero_points = Some(vec![8; 11]),
        length("the zero points", 10, 11),
    );
    refused(
        &|parts| parts.zero_points = Some([vec![15; 6], vec![16; 4]].concat()),
        FormatError::ZeroPoint {
            group: 1,
            column: 1,
            found: 16,
            max: 15,
        },
    );
    refused(
        &|parts| parts.row_permutation = Some(vec![0]),
        length("the row permutation", 64, 1),
    );
    refused(
        &|parts| parts.row_permutation = Some((1..=64).collect()),
        FormatError::PermutationRange {
            position: 63,
            found: 64,
            last: 63,
        },
    );
    refused(
        &|parts| parts.row_permutation = Some([vec![3], (1..64).collect()].concat()),
        FormatError::PermutationDuplicate {
            position: 3,
            row: 3,
        },
    );
    assert!(PlainWeight::new(good.clone()).is_ok());
}

#[test]
fn padding_past_k_is_checked() {
    let rng = &mut rng();
    let cases = [
        (4, [(1, 1), (7, 7), (9, 1), (15, 7), (15, 8)]),
        (8, [(1, 1), (3, 3), (5, 1), (7, 3), (7, 4)]),
    ];
    for (bits, (k, slot)) in cases
        .into_iter()
        .flat_map(|(bits, cases)| cases.map(|case| (bits, case)))
    {
        let bits = WeightValue::try_from(bits).unwrap();
        let spec = QuantSpec::new(bits, GroupSize::Channel);
        let mut parts = random_parts(rng, k, 8, spec, false);
        let last = parts.qweight.len() - 1;
        // The slot past the last stands for none: the parts as they are.
        if slot < bits.per_word() {
            parts.qweight[last] ^= 1 << (bits.bits() * slot);
            let found = parts.qweight[last];
            assert_eq!(
                PlainWeight::new(parts).unwrap_err(),
                FormatError::Padding {
                    word: last,
                    found,
                    bits
                }
            );
        } else {
            assert!(PlainWeight::new(parts).is_ok());
        }
    }
}
