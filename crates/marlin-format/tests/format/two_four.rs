//! Tests of 2:4 weights.

use std::collections::HashSet;

use marlin_format::layout::{MetadataLayout, PlainLayout, SparseLayout, WordIndex};
use marlin_format::{
    FormatError, GroupSize, PlainParts, PlainWeight, QuantSpec, Sparsity, WeightValue,
    check_two_four, prune_two_four, quantize_rtn, quantize_two_four,
};
use marlin_testing::random_values;
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::common::{all_specs, any_spec, cases, random_weight, rng, sparse_weight};

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn dense_and_sparse_are_one_weight(k in 1..100usize, n in 1..100usize, spec in any_spec(), seed: u64) {
        let weight = sparse_weight(&mut StdRng::seed_from_u64(seed), 4 * k, n, spec);
        let sparse = weight.to_two_four().unwrap().into_owned();
        prop_assert_eq!((sparse.k(), sparse.n(), sparse.spec(), sparse.sparsity()), (4 * k, n, spec, Sparsity::TwoFour));
        prop_assert_eq!(&sparse.clone().into_dense(), &weight);
        prop_assert_eq!(sparse.dequantize(), weight.dequantize());
        prop_assert_eq!(sparse.to_two_four().unwrap().into_owned(), sparse.clone());
        // Reads value by value, without arithmetic on whole words.
        let (metadata, layout) = (sparse.metadata().unwrap(), MetadataLayout::new(4 * k, n));
        prop_assert_eq!((metadata.len(), sparse.qweight().len()), (layout.words(), PlainLayout::new(2 * k, n, spec.value).words()));
        for four in 0..k {
            for column in 0..n {
                let nibble = layout.index(four, column).read(metadata);
                prop_assert!(MetadataLayout::is_valid(nibble));
                for (i, place) in [nibble & 3, nibble >> 2].into_iter().enumerate() {
                    prop_assert_eq!(sparse.q(2 * four + i, column), weight.q(4 * four + usize::from(place), column));
                }
            }
        }
    }

    #[test]
    fn pruning_keeps_the_two_largest_of_four(k in 1..50usize, n in 1..50usize, spec in any_spec(), seed: u64) {
        let rng = &mut StdRng::seed_from_u64(seed);
        let (k, values) = (4 * k, random_values(4 * k * n, 1.0, rng));
        let mut pruned = values.clone();
        prune_two_four(&mut pruned, k, n).unwrap();
        check_two_four(&pruned, k, n).unwrap();
        for (four, column) in (0..k / 4).flat_map(|four| (0..n).map(move |column| (four, column))) {
            let of = |from: &[f32]| [0, 1, 2, 3].map(|i| from[(4 * four + i) * n + column]);
            let (before, after) = (of(&values), of(&pruned));
            let kept: Vec<usize> = (0..4).filter(|&i| after[i] != 0.0).collect();
            prop_assert_eq!(kept.len(), 2);
            prop_assert!(kept.iter().all(|&i| after[i] == before[i]));
            let least = kept.iter().map(|&i| before[i].abs()).fold(f32::MAX, f32::min);
            prop_assert!((0..4).filter(|i| !kept.contains(i)).all(|i| before[i].abs() <= least));
        }
        // A weight that is already 2:4 stays unchanged.
        let mut again = pruned.clone();
        prune_two_four(&mut again, k, n).unwrap();
        prop_assert_eq!(&again, &pruned);
        let quantized = quantize_two_four(values, k, n, &spec).unwrap();
        prop_assert_eq!(quantized.sparsity(), Sparsity::TwoFour);
        prop_assert_eq!(quantized.into_dense(), quantize_rtn(&pruned, k, n, &spec).unwrap());
    }
}

/// Tests equal magnitudes, negative zeros, and groups of four with fewer than two nonzero values.
#[test]
fn pruning_at_the_edges() {
    let mut column = [
        1.0, -1.0, 1.0, 1.0, -0.0, 0.0, -0.0, 3.0, 0.0, 0.0, 0.0, 0.0,
    ];
    prune_two_four(&mut column, 12, 1).unwrap();
    assert_eq!(
        column,
        [1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    );
    let weight =
        quantize_two_four(column.to_vec(), 12, 1, &QuantSpec::int4(GroupSize::Channel)).unwrap();
    // The kept rows of each four: 0 and 1; row 3 and the first zero row, 0; 0 and 1, which are
    // zero.
    assert_eq!(weight.metadata().unwrap()[0], 0x4444_44c4);
    assert_eq!(
        prune_two_four(&mut [0.0; 6], 6, 1),
        Err(FormatError::SparseRows { k: 6 })
    );
    let found = check_two_four(&[1.0, 0.0, 2.0, 1.0, 0.0, 1.0, 4.0, 1.0], 4, 2);
    assert_eq!(
        found,
        Err(FormatError::NotTwoFour {
            row: 0,
            column: 0,
            found: 3
        })
    );
    let long =
        quantize_two_four(vec![1.0; 8], 4, 1, &QuantSpec::int4(GroupSize::Channel)).unwrap_err();
    assert!(
        matches!(
            long,
            FormatError::Length {
                expected: 4,
                found: 8,
                ..
            }
        ),
        "{long}"
    );
}

#[test]
fn parts_and_joined_weights_keep_their_values() {
    let rng = &mut rng();
    for spec in all_specs() {
        let weight = sparse_weight(rng, 520, 37, spec);
        let sparse = weight.to_two_four().unwrap().into_owned();
        for columns in [0..37, 3..30, 36..37] {
            let part = sparse.slice_n(columns.clone()).unwrap();
            assert_eq!(part.sparsity(), Sparsity::TwoFour);
            assert_eq!(
                part.into_dense(),
                weight.slice_n(columns).unwrap(),
                "{spec}"
            );
        }
        for rows in [0..520, 128..520, 384..388, 0..100] {
            let part = sparse.slice_k(rows.clone()).unwrap();
            assert_eq!(part.into_dense(), weight.slice_k(rows).unwrap(), "{spec}");
        }
        let parts = [0..5, 5..24, 24..37].map(|columns| sparse.slice_n(columns).unwrap());
        assert_eq!(
            PlainWeight::join(&parts.iter().collect::<Vec<_>>()).unwrap(),
            sparse,
            "{spec}"
        );
        // A dense part makes the whole weight dense.
        let dense = random_weight(rng, 520, 9, spec, false);
        let joined = PlainWeight::join(&[&parts[1], &dense]).unwrap();
        assert_eq!(
            joined.slice_n(0..19).unwrap(),
            weight.slice_n(5..24).unwrap(),
            "{spec}"
        );
        assert_eq!(joined.slice_n(19..28).unwrap(), dense, "{spec}");
    }
    let sparse = sparse_weight(rng, 64, 3, QuantSpec::int4(GroupSize::Channel))
        .to_two_four()
        .unwrap()
        .into_owned();
    assert_eq!(sparse.slice_k(2..64), Err(FormatError::SparseRows { k: 2 }));
    assert_eq!(sparse.slice_k(4..10), Err(FormatError::SparseRows { k: 6 }));
    assert_eq!(
        sparse.slice_k(12..40).unwrap().dequantize(),
        sparse.dequantize()[12 * 3..40 * 3]
    );
}

#[test]
fn weights_that_are_not_two_four_are_refused() {
    let rng = &mut rng();
    let spec = QuantSpec::int4(GroupSize::G32).with_zero_points();
    let mut parts = sparse_weight(rng, 96, 20, spec).into_parts();
    let zero = parts.zero_points.as_ref().unwrap()[20 + 7];
    let layout = PlainLayout::new(96, 20, spec.value);
    (36..39).for_each(|row| layout.index(row, 7).write(&mut parts.qweight, zero ^ 1));
    layout.index(39, 7).write(&mut parts.qweight, zero);
    let weight = PlainWeight::new(parts).unwrap();
    let error = weight.to_two_four().unwrap_err();
    assert_eq!(
        error,
        FormatError::NotTwoFour {
            row: 36,
            column: 7,
            found: 3
        }
    );
    assert!(
        error
            .to_string()
            .contains("rows 36 to 39 of column 7 have 3 values"),
        "{error}"
    );
    let odd = random_weight(rng, 30, 4, spec, false);
    assert_eq!(
        odd.to_two_four().map(|_| ()),
        Err(FormatError::SparseRows { k: 30 })
    );
    let ordered = random_weight(rng, 64, 4, spec, true);
    assert_eq!(
        ordered.to_two_four().map(|_| ()),
        Err(FormatError::SparsePermuted)
    );
}

#[test]
fn metadata_that_no_weight_has_are_refused() {
    let spec = QuantSpec::int8(GroupSize::G32);
    let good = sparse_weight(&mut rng(), 72, 5, spec)
        .to_two_four()
        .unwrap()
        .into_owned()
        .into_parts();
    let layout = MetadataLayout::new(72, 5);
    let with = |change: &dyn Fn(&mut PlainParts)| {
        let mut parts = good.clone();
        change(&mut parts);
        PlainWeight::new(parts).map(|_| ())
    };
    let nibble = |four: usize, column: usize, found: u8| {
        with(&move |parts| {
            layout
                .index(four, column)
                .write(parts.metadata.as_mut().unwrap(), found)
        })
    };
    assert_eq!(with(&|_| ()), Ok(()));
    for found in 0..16u8 {
        let expected = match found {
            4 | 8 | 9 | 12 | 13 | 14 => Ok(()),
            _ => Err(FormatError::Metadata {
                row: 64,
                column: 3,
                found,
            }),
        };
        assert_eq!(nibble(16, 3, found), expected);
    }
    // Invalid padding past K and past N.
    assert_eq!(
        nibble(18, 0, 8),
        Err(FormatError::Metadata {
            row: 72,
            column: 0,
            found: 8
        })
    );
    assert_eq!(
        nibble(0, 5, 9),
        Err(FormatError::Metadata {
            row: 0,
            column: 5,
            found: 9
        })
    );
    let error = with(&|parts| parts.metadata.as_mut().unwrap().truncate(23)).unwrap_err();
    assert_eq!(
        error,
        FormatError::Length {
            what: "the metadata",
            k: 72,
            n: 5,
            expected: 24,
            found: 23
        }
    );
    let error = with(&|parts| parts.row_permutation = Some((0..72).collect())).unwrap_err();
    assert_eq!(error, FormatError::SparsePermuted);
}

#[test]
fn every_nibble_of_the_metadata_is_one_place() {
    for (k, n) in [(4, 1), (128, 64), (132, 65), (400, 130)] {
        let layout = SparseLayout::new(k, n, WeightValue::Int4);
        let fours = layout.values().k_padded() / 2;
        let columns = layout.values().n_padded();
        let places: HashSet<WordIndex> = (0..fours)
            .flat_map(|four| (0..columns).map(move |column| layout.metadata_index(four, column)))
            .collect();
        assert_eq!(
            (places.len(), places.len()),
            (fours * columns, 8 * layout.metadata_words())
        );
        assert!(
            places.iter().all(
                |place| place.word < layout.metadata_words() && place.bits == WeightValue::Int4
            )
        );
    }
    let what = "the metadata";
    assert_eq!(
        SparseLayout::new(64, 9, WeightValue::Int8).pack_metadata(&[0; 3]),
        Err(FormatError::Length {
            what,
            k: 64,
            n: 9,
            expected: 32,
            found: 3
        })
    );
}
