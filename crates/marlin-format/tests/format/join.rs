//! Tests of joined weights.

use marlin_format::{GroupSize, JoinError, PlainParts, PlainWeight, QuantSpec, ScaleDtype};

use crate::common::{all_specs, random_parts, random_weight, rng};

/// Returns random weights with these N, all with the same row permutation.
fn parts(k: usize, columns: &[usize], spec: QuantSpec, act_order: bool) -> Vec<PlainWeight> {
    let rng = &mut rng();
    let permutation = random_parts(rng, k, 1, spec, act_order).row_permutation;
    let mut part = |&n: &usize| {
        let parts = PlainParts {
            row_permutation: permutation.clone(),
            ..random_parts(rng, k, n, spec, false)
        };
        PlainWeight::new(parts).unwrap()
    };
    columns.iter().map(&mut part).collect()
}

fn join(parts: &[PlainWeight]) -> Result<PlainWeight, JoinError> {
    PlainWeight::join(&parts.iter().collect::<Vec<_>>())
}

#[test]
fn columns_stay_what_they_are() {
    // Values of N that fill words of zero points and padded columns, and values that do not.
    for columns in [vec![11, 1, 20], vec![8, 16], vec![7], vec![3, 8, 5, 24]] {
        for spec in all_specs() {
            for (k, act_order) in [
                (128, false),
                (128, true),
                (256, true),
                (200, false),
                (344, true),
            ] {
                let parts = parts(k, &columns, spec, act_order);
                let joined = join(&parts).unwrap();
                let n: usize = columns.iter().sum();
                assert_eq!((joined.k(), joined.n(), joined.spec()), (k, n, spec));
                assert_eq!(joined.row_permutation(), parts[0].row_permutation());
                let values = joined.dequantize();
                let mut start = 0;
                for part in &parts {
                    for (row, expected) in part.dequantize().chunks(part.n()).enumerate() {
                        assert_eq!(
                            &values[row * n + start..][..part.n()],
                            expected,
                            "{spec}, {columns:?}, row {row}, column {start}"
                        );
                    }
                    start += part.n();
                }
            }
        }
    }
}

#[test]
fn rows_that_do_not_fill_a_word_are_joined() {
    let spec = QuantSpec::int4(GroupSize::Channel).with_zero_points();
    let parts = parts(13, &[9, 2], spec, true);
    let joined = join(&parts).unwrap();
    for (row, values) in joined.dequantize().chunks(11).enumerate() {
        let expected = [
            &parts[0].dequantize()[row * 9..][..9],
            &parts[1].dequantize()[row * 2..][..2],
        ]
        .concat();
        assert_eq!(values, expected, "row {row}");
    }
}

#[test]
fn what_differs_stays_apart() {
    let rng = &mut rng();
    let spec = QuantSpec::int4(GroupSize::G32);
    let first = random_weight(rng, 64, 5, spec, false);
    assert_eq!(join(&[]), Err(JoinError::Empty));
    let longer = random_weight(rng, 96, 5, spec, false);
    assert_eq!(
        join(&[first.clone(), longer]),
        Err(JoinError::InputFeatures {
            part: 1,
            expected: 64,
            found: 96
        })
    );
    for found in [
        QuantSpec::int4(GroupSize::G64),
        spec.with_zero_points(),
        spec.with_scale_dtype(ScaleDtype::BF16),
    ] {
        let other = random_weight(rng, 64, 5, found, false);
        let error = join(&[first.clone(), first.clone(), other]).expect_err("another format");
        assert_eq!(
            error,
            JoinError::Spec {
                part: 2,
                expected: spec,
                found
            }
        );
        assert!(
            error.to_string().contains(&found.to_string())
                && error.to_string().contains(&spec.to_string()),
            "{error}"
        );
    }
    let (sorted, other) = (
        random_weight(rng, 64, 5, spec, true),
        random_weight(rng, 64, 5, spec, true),
    );
    assert_eq!(
        join(&[first, sorted.clone()]),
        Err(JoinError::RowOrder { part: 1 })
    );
    assert_eq!(join(&[sorted, other]), Err(JoinError::RowOrder { part: 1 }));
}
