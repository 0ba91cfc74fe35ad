//! The Marlin layouts checked only against the PTX ISA: the values that each lane must hold for its `mma.m16n8k16` calls, from the ISA's tables, and
//! those that it gets from the packed words by the kernels' own masks. Nothing here uses the layouts' index functions.

use marlin_format::layout::{MarlinLayout, ScaleLayout, ZeroLayout};
use marlin_format::{GroupSize, PlainWeight, QuantSpec, ScaleDtype};

use crate::common::{numbered_scales, random_weight, rng};

/// Row and column of element `b<i>` of a lane's B fragment (16 x 8, `.f16`): PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating
/// point type", multiplicand B.
fn b_element(lane: usize, i: usize) -> (usize, usize) {
    let (group_id, thread_in_group) = (lane >> 2, lane % 4);
    let row = thread_in_group * 2 + (i & 1) + if i < 2 { 0 } else { 8 };
    (row, group_id)
}

/// Column of element `c<i>` of a lane's accumulator (16 x 8): the same section, accumulators C and D.
fn c_column(lane: usize, i: usize) -> usize {
    (lane % 4) * 2 + (i & 1)
}

/// The four nibbles of one B fragment as the kernels take them from a word: two f16x2 registers of (low, high) halves.
fn extract(word: u32, fragment: usize) -> [u8; 4] {
    let word = word >> (8 * fragment);
    let first = word & 0x000f_000f;
    let second = (word & 0x00f0_00f0) >> 4;
    [first as u8, (first >> 16) as u8, second as u8, (second >> 16) as u8]
}

fn check_tile(weight: &PlainWeight, words: &[u32], tile_row: usize, tile_column: usize, n_padded: usize) {
    let tile = &words[tile_row * 2 * n_padded + tile_column * 128..][..128];
    for lane in 0..32 {
        // One 16-byte load.
        let vector = &tile[4 * lane..4 * lane + 4];
        for (sub_tile, &word) in vector.iter().enumerate() {
            for fragment in 0..2 {
                let values = extract(word, fragment);
                for (i, value) in values.into_iter().enumerate() {
                    let (row, column) = b_element(lane, i);
                    let (row, column) = (16 * tile_row + row, 64 * tile_column + 16 * sub_tile + 8 * fragment + column);
                    let expected = if row < weight.k() && column < weight.n() { weight.q(row, column) } else { 8 };
                    assert_eq!(value, expected, "lane {lane}, word {sub_tile}, fragment {fragment}, b{i}: row {row}, column {column}");
                }
            }
        }
    }
}

#[test]
fn a_lane_holds_the_b_fragments_of_its_mma_calls() {
    let rng = &mut rng();
    for (k, n) in [(16, 64), (32, 128), (48, 192), (17, 65), (1, 1), (15, 63), (40, 200)] {
        let weight = random_weight(rng, k, n, QuantSpec::int4(GroupSize::Channel), false);
        let layout = MarlinLayout::new(k, n);
        let words = layout.pack(&weight).unwrap();
        for tile_row in 0..layout.k_padded() / 16 {
            for tile_column in 0..layout.n_padded() / 64 {
                check_tile(&weight, &words, tile_row, tile_column, layout.n_padded());
            }
        }
    }
}

/// Grouped scales multiply B fragments: a lane's eight scales of a 16 x 64 tile are one 16-byte load, in the order of its words and
/// fragments.
#[test]
fn a_lane_loads_the_scales_of_its_b_fragments() {
    let (k, n, groups) = (96, 192, 3);
    let scales = numbered_scales(groups * n, ScaleDtype::F16);
    let packed = ScaleLayout::new(&MarlinLayout::new(k, n), GroupSize::G32).pack(&scales).unwrap();
    for group in 0..groups {
        for tile_column in 0..n / 64 {
            for lane in 0..32 {
                // The lanes of one groupID load the same vector.
                let vector = group * n + 64 * tile_column + 8 * (lane >> 2);
                for sub_tile in 0..4 {
                    for fragment in 0..2 {
                        let (_, column) = b_element(lane, 0);
                        let column = 64 * tile_column + 16 * sub_tile + 8 * fragment + column;
                        assert_eq!(
                            packed.get(vector + 2 * sub_tile + fragment),
                            scales.get(group * n + column),
                            "lane {lane}, column {column}"
                        );
                    }
                }
            }
        }
    }
}

/// Channel-wise scales multiply accumulators: a lane's eight scales of four 16 x 8 accumulators are one 16-byte load.
#[test]
fn a_lane_loads_the_scales_of_its_accumulators() {
    let (k, n) = (64, 192);
    let scales = numbered_scales(n, ScaleDtype::BF16);
    let packed = ScaleLayout::new(&MarlinLayout::new(k, n), GroupSize::Channel).pack(&scales).unwrap();
    for block in 0..n / 32 {
        for lane in 0..32 {
            let vector = 32 * block + 8 * (lane % 4);
            for accumulator in 0..4 {
                for i in 0..4 {
                    let column = 32 * block + 8 * accumulator + c_column(lane, i);
                    assert_eq!(packed.get(vector + 2 * accumulator + (i & 1)), scales.get(column), "lane {lane}, c{i}, column {column}");
                }
            }
        }
    }
}

/// Row and column in the 16 x 16 matrix A of `mma.m16n8k16` of a lane's element `a{i}`, as the PTX ISA states them.
fn a_element(lane: usize, i: usize) -> (usize, usize) {
    let (group_id, thread_in_group) = (lane >> 2, lane % 4);
    let row = if i < 2 || (4..6).contains(&i) { group_id } else { group_id + 8 };
    let column = thread_in_group * 2 + (i & 1) + if i >= 4 { 8 } else { 0 };
    (row, column)
}

/// The word of a sub-tile is also one A fragment of the transposed weight: rows of A are columns of the weight.
#[test]
fn a_lane_holds_the_a_fragment_of_the_transposed_weight() {
    let (k, n) = (64, 128);
    let weight = random_weight(&mut rng(), k, n, QuantSpec::int4(GroupSize::Channel), false);
    let words = MarlinLayout::in_chunks(k, n).pack(&weight).unwrap();
    // The nibbles of a0..a7: a register's two values are four nibbles apart.
    let nibbles = [0, 4, 1, 5, 2, 6, 3, 7];
    for tile in 0..k / 16 * (n / 64) {
        let (tile_row, tile_column) = (tile / (n / 64), tile % (n / 64));
        for lane in 0..32 {
            for sub_tile in 0..4 {
                let word = words[tile * 128 + 4 * lane + sub_tile];
                for (i, nibble) in nibbles.into_iter().enumerate() {
                    let (row, column) = a_element(lane, i);
                    let expected = weight.q(16 * tile_row + column, 64 * tile_column + 16 * sub_tile + row);
                    assert_eq!((word >> (4 * nibble) & 15) as u8, expected, "tile {tile}, lane {lane}, word {sub_tile}, a{i}");
                }
            }
        }
    }
}

/// Zero points go with A fragments: a lane's eight zero points of a 16 x 64 tile are one word, in the order of its sub-tiles and rows of A.
#[test]
fn a_lane_loads_the_zero_points_of_its_a_fragments() {
    let (k, n, groups) = (96, 192, 3);
    let weight = random_weight(&mut rng(), k, n, QuantSpec::int4(GroupSize::G32).with_zero_points(), false);
    let zeros = weight.zero_points().unwrap();
    // K = 96 is padded to 128: a fourth group.
    let words = ZeroLayout::new(&MarlinLayout::in_chunks(k, n), GroupSize::G32).pack(zeros).unwrap();
    assert_eq!(words.len(), 4 * n / 8);
    for group in 0..groups {
        for tile_column in 0..n / 64 {
            for lane in 0..32 {
                let word = words[group * n / 8 + 8 * tile_column + (lane >> 2)];
                for sub_tile in 0..4 {
                    for half in 0..2 {
                        let (row, _) = a_element(lane, 2 * half);
                        let expected = zeros[group * n + 64 * tile_column + 16 * sub_tile + row];
                        assert_eq!(
                            (word >> (4 * (2 * sub_tile + half)) & 15) as u8,
                            expected,
                            "lane {lane}, sub-tile {sub_tile}, row {row}"
                        );
                    }
                }
            }
        }
    }
}
