//! Tests of slices of a weight.

use marlin_format::{
    FormatError, GroupSize, PlainWeight, QuantSpec, WeightDescriptor, WeightValue,
};

use crate::common::{all_specs, random_weight, rng};

/// Returns the dequantised values of a range of rows and columns.
fn part(
    weight: &PlainWeight,
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
) -> Vec<f32> {
    let (values, n) = (weight.dequantize(), weight.n());
    rows.flat_map(|row| values[row * n + columns.start..row * n + columns.end].to_vec())
        .collect()
}

#[test]
fn columns_of_a_weight_keep_their_values() {
    let rng = &mut rng();
    for spec in all_specs() {
        for act_order in [false, true] {
            let weight = random_weight(rng, 200, 37, spec, act_order);
            for columns in [0..37, 0..1, 36..37, 8..16, 3..30] {
                let slice = weight.slice_n(columns.clone()).unwrap();
                assert_eq!(
                    (slice.k(), slice.n(), slice.spec()),
                    (200, columns.len(), spec)
                );
                assert_eq!(slice.dequantize(), part(&weight, 0..200, columns), "{spec}");
            }
            let joined = [0..5, 5..24, 24..37].map(|columns| weight.slice_n(columns).unwrap());
            assert_eq!(
                PlainWeight::join(&joined.iter().collect::<Vec<_>>()).unwrap(),
                weight,
                "{spec}"
            );
        }
    }
}

#[test]
fn rows_of_a_weight_keep_their_values() {
    let rng = &mut rng();
    for spec in all_specs() {
        let weight = random_weight(rng, 520, 9, spec, false);
        let starts = if spec.scales.group == GroupSize::Channel {
            [0, 3, 64]
        } else {
            [0, 128, 384]
        };
        for start in starts {
            for end in [start + 1, start + 100, 520] {
                let slice = weight.slice_k(start..end).unwrap();
                assert_eq!(
                    slice.dequantize(),
                    part(&weight, start..end, 0..9),
                    "{spec}, rows {start}..{end}"
                );
                assert_eq!(
                    slice.descriptor(),
                    WeightDescriptor::plain(spec, end - start, 9)
                );
            }
        }
    }
}

#[test]
fn slices_that_no_weight_has_are_refused() {
    let rng = &mut rng();
    let spec = QuantSpec::int4(GroupSize::G64);
    let weight = random_weight(rng, 256, 16, spec, false);
    assert_eq!(
        weight.slice_n(4..17),
        Err(FormatError::SliceRange {
            axis: "N",
            start: 4,
            end: 17,
            length: 16
        })
    );
    assert_eq!(
        weight.slice_n(4..4),
        Err(FormatError::SliceRange {
            axis: "N",
            start: 4,
            end: 4,
            length: 16
        })
    );
    assert_eq!(
        weight.slice_k(64..257),
        Err(FormatError::SliceRange {
            axis: "K",
            start: 64,
            end: 257,
            length: 256
        })
    );
    assert_eq!(
        weight.slice_k(32..64),
        Err(FormatError::SliceGroup {
            start: 32,
            group: GroupSize::G64
        })
    );
    let permuted = random_weight(rng, 256, 16, spec.with_value(WeightValue::Int8), true);
    assert_eq!(permuted.slice_k(0..64), Err(FormatError::SlicePermuted));
}
