use std::collections::HashSet;

use marlin_format::layout::{
    MarlinLayout, PlainLayout, ScaleLayout, WordIndex, ZeroLayout, gather_bits,
};
use marlin_format::{FormatError, GroupSize, QuantSpec, ScaleDtype, WeightValue};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::common::{
    any_problem, any_problem_with_floats, cases, numbered_scales, random_weight, rng,
};

/// Values of K and N around the edges of words and tiles.
const EDGES: [usize; 14] = [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 129];

#[test]
fn word_index_reads_and_writes_one_value() {
    let mut words = [0x1234_5678, 0x9abc_def0];
    let nibble = |word, slot| WordIndex {
        word,
        slot,
        bits: WeightValue::Int4,
    };
    assert_eq!(nibble(0, 0).read(&words), 0x8);
    assert_eq!(nibble(1, 7).read(&words), 0x9);
    nibble(1, 6).write(&mut words, 0xf5);
    assert_eq!(words, [0x1234_5678, 0x95bc_def0]);
    let byte = |word, slot| WordIndex {
        word,
        slot,
        bits: WeightValue::Int8,
    };
    assert_eq!(
        (byte(0, 0).read(&words), byte(1, 3).read(&words)),
        (0x78, 0x95)
    );
    byte(0, 2).write(&mut words, 0xfe);
    assert_eq!(words, [0x12fe_5678, 0x95bc_def0]);
}

#[test]
fn plain_layout_is_rows_of_eight_or_four() {
    let layout = PlainLayout::new(20, 10, WeightValue::Int4);
    assert_eq!(
        (layout.rows(), layout.columns(), layout.words()),
        (3, 16, 48)
    );
    assert_eq!(
        layout.index(0, 0),
        WordIndex {
            word: 0,
            slot: 0,
            bits: WeightValue::Int4
        }
    );
    assert_eq!(
        layout.index(7, 9),
        WordIndex {
            word: 9,
            slot: 7,
            bits: WeightValue::Int4
        }
    );
    assert_eq!(
        layout.index(17, 3),
        WordIndex {
            word: 2 * 16 + 3,
            slot: 1,
            bits: WeightValue::Int4
        }
    );
    let layout = PlainLayout::new(19, 10, WeightValue::Int8);
    assert_eq!(
        (layout.rows(), layout.columns(), layout.words()),
        (5, 16, 80)
    );
    assert_eq!(
        layout.index(7, 9),
        WordIndex {
            word: 16 + 9,
            slot: 3,
            bits: WeightValue::Int8
        }
    );
    for bits in WeightValue::ALL {
        let (k, n) = (19, 10);
        let layout = PlainLayout::new(k, n, bits);
        let q = |row: usize, column: usize| (37 * row + 53 * column) as u8 & bits.max();
        let words = layout.pack_with(q);
        for row in 0..layout.rows() * bits.per_word() {
            for column in 0..16 {
                let expected = if row < k && column < n {
                    q(row, column)
                } else {
                    bits.midpoint()
                };
                assert_eq!(
                    layout.index(row, column).read(&words),
                    expected,
                    "{bits}, row {row}, column {column}"
                );
            }
        }
    }
}

#[test]
fn every_nibble_of_a_marlin_tile_is_one_value() {
    for k in EDGES {
        for n in EDGES {
            let layout = MarlinLayout::new(k, n);
            assert_eq!((layout.k_padded() % 16, layout.n_padded() % 64), (0, 0));
            let places: HashSet<WordIndex> = (0..layout.k_padded())
                .flat_map(|row| (0..layout.n_padded()).map(move |column| layout.index(row, column)))
                .collect();
            assert_eq!(places.len(), layout.k_padded() * layout.n_padded());
            assert_eq!(places.len(), 8 * layout.words());
            assert!(
                places
                    .iter()
                    .all(|place| place.word < layout.words() && place.slot < 8)
            );
        }
    }
}

/// Compares with the permutation in the published packer: a list of 1024 positions in a tile of 16
/// x 64, sub-tile by sub-tile.
#[test]
fn marlin_layout_is_the_published_permutation() {
    let rng = &mut rng();
    let mut permutation = Vec::new();
    for lane in 0..32 {
        let column = lane / 4;
        let mut values = Vec::new();
        for block in [0, 1] {
            for row in [
                2 * (lane % 4),
                2 * (lane % 4) + 1,
                2 * (lane % 4 + 4),
                2 * (lane % 4 + 4) + 1,
            ] {
                values.push(16 * row + column + 8 * block);
            }
        }
        for sub_tile in 0..4 {
            permutation.extend([0, 2, 4, 6, 1, 3, 5, 7].map(|i| values[i] + 256 * sub_tile));
        }
    }

    let (k, n) = (48, 192);
    let weight = random_weight(rng, k, n, QuantSpec::int4(GroupSize::Channel), false);
    let words = MarlinLayout::new(k, n).pack(&weight).unwrap();
    assert_eq!(words.len(), k / 16 * 2 * n);
    for tile_row in 0..k / 16 {
        // Rearranges [16, N] to sub-tiles [N/16, 16, 16], then permutes in runs of 1024 and packs
        // eight values per word.
        let flat: Vec<u8> = (0..16 * n)
            .map(|i| weight.q(16 * tile_row + i % 256 / 16, i / 256 * 16 + i % 16))
            .collect();
        let permuted: Vec<u8> = (0..16 * n)
            .map(|i| flat[i / 1024 * 1024 + permutation[i % 1024]])
            .collect();
        for (i, word) in words[tile_row * 2 * n..][..2 * n].iter().enumerate() {
            let expected = (0..8).fold(0, |word, nibble| {
                word | u32::from(permuted[8 * i + nibble]) << (4 * nibble)
            });
            assert_eq!(*word, expected, "tile row {tile_row}, word {i}");
        }
    }
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn marlin_pack_and_unpack_are_inverse((k, n, spec) in any_problem_with_floats(), seed: u64) {
        let weight = random_weight(&mut StdRng::seed_from_u64(seed), k, n, spec, false);
        let in_chunks = MarlinLayout::in_chunks(k, n, spec.value);
        let layouts = match spec.value {
            WeightValue::Int4 => vec![MarlinLayout::new(k, n), in_chunks, MarlinLayout::new_padded(k, n, 128, 256).unwrap()],
            _ => vec![in_chunks],
        };
        for layout in layouts {
            let words = layout.pack(&weight).unwrap();
            prop_assert_eq!(words.len(), layout.words());
            prop_assert_eq!(layout.unpack(&words).unwrap(), weight.qweight());
            let words: Vec<u32> = words.iter().map(|&word| gather_bits(word, spec.value)).collect();
            let filled = layout.k_padded() * layout.n_padded() - k * n;
            let padding = (0..layout.k_padded())
                .flat_map(|row| (0..layout.n_padded()).map(move |column| (row, column)))
                .filter(|&(row, column)| (row >= k || column >= n) && layout.index(row, column).read(&words) == spec.value.midpoint());
            prop_assert_eq!(padding.count(), filled);
        }
    }

    #[test]
    fn scales_pack_and_unpack_are_inverse((k, n, spec) in any_problem_with_floats(), seed: u64) {
        let weight = random_weight(&mut StdRng::seed_from_u64(seed), k, n, spec, false);
        for marlin in [MarlinLayout::new(k, n), MarlinLayout::new_padded(k, n, 256, 128).unwrap()] {
            let layout = ScaleLayout::new(&marlin, spec.scales.group);
            let packed = layout.pack(weight.scales()).unwrap();
            prop_assert_eq!(packed.len(), layout.len());
            prop_assert_eq!(&layout.unpack(&packed).unwrap(), weight.scales());
            let zeros = packed.to_f32().iter().filter(|&&scale| scale == 0.0).count();
            prop_assert_eq!(zeros, layout.len() - weight.scales().len());
        }
    }
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn zero_points_pack_and_unpack_are_inverse((k, n, spec) in any_problem(), seed: u64) {
        let weight = random_weight(&mut StdRng::seed_from_u64(seed), k, n, spec.with_zero_points(), false);
        let zeros = weight.zero_points().unwrap();
        for marlin in [MarlinLayout::new(k, n), MarlinLayout::in_chunks(k, n, spec.value)] {
            let layout = ZeroLayout::new(&marlin, spec.scales.group, spec.value);
            let words = layout.pack(zeros).unwrap();
            prop_assert_eq!(words.len(), layout.words());
            prop_assert_eq!(layout.unpack(&words).unwrap(), zeros);
        }
    }
}

#[test]
fn wrong_sizes_are_refused() {
    let rng = &mut rng();
    for (axis, k_multiple, n_multiple, multiple, tile) in [
        ("K", 0, 64, 0, 16),
        ("K", 24, 64, 24, 16),
        ("N", 16, 0, 0, 64),
        ("N", 128, 96, 96, 64),
    ] {
        let error = MarlinLayout::new_padded(64, 64, k_multiple, n_multiple).unwrap_err();
        assert_eq!(
            error,
            FormatError::PadMultiple {
                axis,
                multiple,
                tile
            }
        );
    }

    let (k, n) = (20, 70);
    let layout = MarlinLayout::new(k, n);
    let weight = random_weight(rng, n, k, QuantSpec::int4(GroupSize::Channel), false);
    assert_eq!(
        layout.pack(&weight).unwrap_err(),
        FormatError::LayoutShape {
            k,
            n,
            found_k: n,
            found_n: k
        }
    );
    let wide = random_weight(rng, k, n, QuantSpec::int8(GroupSize::Channel), false);
    assert_eq!(
        layout.pack(&wide).unwrap_err(),
        FormatError::LayoutBits {
            expected: WeightValue::Int4,
            found: WeightValue::Int8
        }
    );
    let what = "the weight in Marlin layout";
    assert_eq!(
        layout.unpack(&[0; 3]).unwrap_err(),
        FormatError::Length {
            what,
            k,
            n,
            expected: 512,
            found: 3
        }
    );

    let scales = ScaleLayout::new(&layout, GroupSize::Channel);
    let short = numbered_scales(69, ScaleDtype::BF16);
    assert_eq!(
        scales.pack(&short).unwrap_err(),
        FormatError::Length {
            what: "the scales",
            k,
            n,
            expected: 70,
            found: 69
        }
    );
    let zeros = ZeroLayout::new(&layout, GroupSize::Channel, WeightValue::Int4);
    assert_eq!(
        zeros.pack(&[0; 69]).unwrap_err(),
        FormatError::Length {
            what: "the zero points",
            k,
            n,
            expected: 70,
            found: 69
        }
    );
    let what = "the zero points in Marlin layout";
    assert_eq!(
        zeros.unpack(&[0; 3]).unwrap_err(),
        FormatError::Length {
            what,
            k,
            n,
            expected: 16,
            found: 3
        }
    );
    let what = "the scales in Marlin layout";
    assert_eq!(
        scales.unpack(&short).unwrap_err(),
        FormatError::Length {
            what,
            k,
            n,
            expected: 128,
            found: 69
        }
    );
}
