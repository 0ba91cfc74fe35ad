//! Tests of the Marlin layouts against the PTX ISA only. The values that each lane must hold for
//! its `mma.m16n8k16` calls come from the ISA's tables. The values that the lane gets come from the
//! packed words, with the kernels' masks. These tests do not use the index functions of the
//! layouts.

use marlin_format::layout::{
    MarlinLayout, MetadataLayout, ScaleLayout, SparseLayout, ZeroLayout, gather_bits,
};
use marlin_format::{GroupSize, PlainWeight, QuantSpec, ScaleDtype, WeightValue};

use crate::common::{numbered_scales, random_weight, rng, sparse_weight};

/// Returns row and column of element `b<i>` of a lane's B fragment (16 x 8, `.f16`). Source: PTX
/// ISA, "Matrix Fragments for mma.m16n8k16 with floating point type", multiplicand B.
fn b_element(lane: usize, i: usize) -> (usize, usize) {
    let (group_id, thread_in_group) = (lane >> 2, lane % 4);
    let row = thread_in_group * 2 + (i & 1) + if i < 2 { 0 } else { 8 };
    (row, group_id)
}

/// Returns the column of element `c<i>` of a lane's accumulator (16 x 8). Source: the same section
/// of the PTX ISA, accumulators C and D.
fn c_column(lane: usize, i: usize) -> usize {
    (lane % 4) * 2 + (i & 1)
}

/// Extracts the four nibbles of one B fragment from a word as the kernels do: two f16x2 registers,
/// each with a low and a high half.
fn extract(word: u32, fragment: usize) -> [u8; 4] {
    let word = word >> (8 * fragment);
    let first = word & 0x000f_000f;
    let second = (word & 0x00f0_00f0) >> 4;
    [
        first as u8,
        (first >> 16) as u8,
        second as u8,
        (second >> 16) as u8,
    ]
}

fn check_tile(
    weight: &PlainWeight,
    words: &[u32],
    tile_row: usize,
    tile_column: usize,
    n_padded: usize,
) {
    let tile = &words[tile_row * 2 * n_padded + tile_column * 128..][..128];
    for lane in 0..32 {
        // One 16-byte load.
        let vector = &tile[4 * lane..4 * lane + 4];
        for (sub_tile, &word) in vector.iter().enumerate() {
            for fragment in 0..2 {
                let values = extract(word, fragment);
                for (i, value) in values.into_iter().enumerate() {
                    let (row, column) = b_element(lane, i);
                    let (row, column) = (
                        16 * tile_row + row,
                        64 * tile_column + 16 * sub_tile + 8 * fragment + column,
                    );
                    let expected = if row < weight.k() && column < weight.n() {
                        weight.q(row, column)
                    } else {
                        8
                    };
                    assert_eq!(
                        value, expected,
                        "lane {lane}, word {sub_tile}, fragment {fragment}, b{i}: row {row}, column {column}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_lane_holds_the_b_fragments_of_its_mma_calls() {
    let rng = &mut rng();
    for (k, n) in [
        (16, 64),
        (32, 128),
        (48, 192),
        (17, 65),
        (1, 1),
        (15, 63),
        (40, 200),
    ] {
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

/// Checks that grouped scales match B fragments: a lane's eight scales of a 16 x 64 tile are one
/// 16-byte load, in the order of the lane's words and fragments.
#[test]
fn a_lane_loads_the_scales_of_its_b_fragments() {
    let (k, n, groups) = (96, 192, 3);
    let scales = numbered_scales(groups * n, ScaleDtype::F16);
    let packed = ScaleLayout::new(&MarlinLayout::new(k, n), GroupSize::G32)
        .pack(&scales)
        .unwrap();
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

/// Checks that channel-wise scales match accumulators: a lane's eight scales of four 16 x 8
/// accumulators are one 16-byte load.
#[test]
fn a_lane_loads_the_scales_of_its_accumulators() {
    let (k, n) = (64, 192);
    let scales = numbered_scales(n, ScaleDtype::BF16);
    let packed = ScaleLayout::new(&MarlinLayout::new(k, n), GroupSize::Channel)
        .pack(&scales)
        .unwrap();
    for block in 0..n / 32 {
        for lane in 0..32 {
            let vector = 32 * block + 8 * (lane % 4);
            for accumulator in 0..4 {
                for i in 0..4 {
                    let column = 32 * block + 8 * accumulator + c_column(lane, i);
                    assert_eq!(
                        packed.get(vector + 2 * accumulator + (i & 1)),
                        scales.get(column),
                        "lane {lane}, c{i}, column {column}"
                    );
                }
            }
        }
    }
}

/// Returns row and column of a lane's element `a{i}` in the 16 x 16 matrix A of `mma.m16n8k16`,
/// according to the PTX ISA.
fn a_element(lane: usize, i: usize) -> (usize, usize) {
    let (group_id, thread_in_group) = (lane >> 2, lane % 4);
    let row = if i < 2 || (4..6).contains(&i) {
        group_id
    } else {
        group_id + 8
    };
    let column = thread_in_group * 2 + (i & 1) + if i >= 4 { 8 } else { 0 };
    (row, column)
}

/// Returns a lane's element `a{i}` for the 16 stored rows `step` and the columns from
/// `64 tile_column + 16 sub_tile` on. `words` are in rows of `columns` tiles.
///
/// In 4 bits, one word holds all elements; the two values of a register are four nibbles apart. In
/// 8 bits, the words at the same index in two tiles, one below the other, hold the elements. The
/// first word has registers 0 and 1, the second word has registers 2 and 3.
fn a_value(
    words: &[u32],
    columns: usize,
    [step, tile_column]: [usize; 2],
    lane: usize,
    sub_tile: usize,
    i: usize,
    bits: WeightValue,
) -> u8 {
    let word =
        |tile_row: usize| words[(tile_row * columns + tile_column) * 128 + 4 * lane + sub_tile];
    match bits {
        WeightValue::Int4 | WeightValue::E2m1 => {
            (word(step) >> (4 * [0, 4, 1, 5, 2, 6, 3, 7][i]) & 15) as u8
        }
        WeightValue::Int8 => (word(2 * step + i / 4) >> (8 * (i % 4)) & 255) as u8,
        // A word is a column: rows 2t and 2t + 1 in bytes 0 and 2, those 8 further on in 1 and 3.
        WeightValue::E4m3 => (word(2 * step + i / 2 % 2) >> (8 * (i % 2 * 2 + i / 4)) & 255) as u8,
    }
}

/// Checks that the words of a sub-tile (one word or two) are also one A fragment of the transposed
/// weight. Rows of A are columns of the weight.
#[test]
fn a_lane_holds_the_a_fragment_of_the_transposed_weight() {
    let (k, n) = (64, 128);
    for spec in [
        QuantSpec::int4(GroupSize::Channel),
        QuantSpec::int8(GroupSize::Channel),
        QuantSpec::nvfp4(),
        QuantSpec::fp8(),
    ] {
        let weight = random_weight(&mut rng(), k, n, spec, false);
        // Kernels convert the bits of floats in the order of `scatter_bits`.
        let words: Vec<u32> = MarlinLayout::in_chunks(k, n, spec.value)
            .pack(&weight)
            .unwrap()
            .into_iter()
            .map(|word| gather_bits(word, spec.value))
            .collect();
        for (step, tile_column) in
            (0..k / 16).flat_map(|step| (0..n / 64).map(move |column| (step, column)))
        {
            for lane in 0..32 {
                for (sub_tile, i) in (0..4).flat_map(|sub_tile| (0..8).map(move |i| (sub_tile, i)))
                {
                    let (row, column) = a_element(lane, i);
                    let expected =
                        weight.q(16 * step + column, 64 * tile_column + 16 * sub_tile + row);
                    let found = a_value(
                        &words,
                        n / 64,
                        [step, tile_column],
                        lane,
                        sub_tile,
                        i,
                        spec.value,
                    );
                    assert_eq!(
                        found, expected,
                        "{spec}, step {step}, lane {lane}, word {sub_tile}, a{i}"
                    );
                }
            }
        }
    }
}

/// Checks that zero points match A fragments. A lane's eight zero points of 64 columns are one word
/// (4 bits) or two consecutive words (8 bits), in the order of the sub-tiles and rows of A.
#[test]
fn a_lane_loads_the_zero_points_of_its_a_fragments() {
    let (k, n, groups) = (96, 192, 3);
    for spec in [
        QuantSpec::int4(GroupSize::G32),
        QuantSpec::int8(GroupSize::G32),
    ] {
        let weight = random_weight(&mut rng(), k, n, spec.with_zero_points(), false);
        let (zeros, bits) = (weight.zero_points().unwrap(), spec.value.bits());
        // K = 96 is padded to 128: a fourth group.
        let words = ZeroLayout::new(
            &MarlinLayout::in_chunks(k, n, spec.value),
            GroupSize::G32,
            spec.value,
        )
        .pack(zeros)
        .unwrap();
        assert_eq!(words.len(), 4 * n * bits / 32);
        for (group, tile_column) in
            (0..groups).flat_map(|group| (0..n / 64).map(move |column| (group, column)))
        {
            for lane in 0..32 {
                let first = (group * n / 8 + 8 * tile_column + (lane >> 2)) * bits / 4;
                for i in 0..8 {
                    let (row, _) = a_element(lane, 2 * (i % 2));
                    let expected = zeros[group * n + 64 * tile_column + 16 * (i / 2) + row];
                    let found = words[first + i * bits / 32] >> (i * bits % 32);
                    assert_eq!(
                        found as u8 & spec.value.max(),
                        expected,
                        "{spec}, lane {lane}, sub-tile {}, row {row}",
                        i / 2
                    );
                }
            }
        }
    }
}

/// Returns the metadata nibble that `mma.sp.m16n8k32` (.f16, .bf16) reads for row `row` of the 16 x
/// 32 matrix A and its columns `4 four..4 four + 4`. Source: PTX ISA, "Matrix Fragments for sparse
/// mma.m16n8k32 with .f16 and .bf16 types".
///
/// Of every four lanes, selector 0 reads the registers of the first two lanes, selector 1 those of
/// the last two. The first of these two lanes has columns 0 to 15, the second has columns 16 to 31.
/// The lower half of a register is row groupID, the upper half is row groupID + 8.
fn metadata_nibble(registers: &[u32; 32], selector: usize, row: usize, four: usize) -> u8 {
    let lane = 4 * (row % 8) + 2 * selector + four / 4;
    (registers[lane] >> (16 * (row / 8) + 4 * (four % 4)) & 15) as u8
}

/// Checks every `mma.sp` on 32 rows of K by 16 columns of a 2:4 weight. The kept values in the
/// lanes' A fragments, at the positions that the metadata name, must equal the weight.
#[test]
fn the_fragments_of_a_sparse_weight_and_its_metadata_are_the_weight() {
    let specs = [
        QuantSpec::int4(GroupSize::Channel),
        QuantSpec::int8(GroupSize::Channel),
    ];
    for (k, n, spec) in [(128, 64), (256, 192), (100, 65), (4, 1), (384, 128)]
        .into_iter()
        .flat_map(|(k, n)| specs.map(|spec| (k, n, spec)))
    {
        let weight = sparse_weight(&mut rng(), k, n, spec);
        let sparse = weight.to_two_four().unwrap();
        let layout = SparseLayout::new(k, n, spec.value);
        let words = layout.values().pack(&sparse).unwrap();
        let metadata = layout.pack_metadata(sparse.metadata().unwrap()).unwrap();
        let columns = layout.values().n_padded() / 64;
        let steps = layout.values().k_padded() / 16;
        assert_eq!(
            (words.len(), metadata.len()),
            (
                steps * columns * 32 * spec.value.bits(),
                layout.metadata_words()
            )
        );
        for (tile_row, tile_column) in
            (0..steps).flat_map(|row| (0..columns).map(move |column| (row, column)))
        {
            // 32 rows of K: half of a tile of metadata.
            let metadata = &metadata[(tile_row / 2 * columns + tile_column) * 128..][..128];
            for sub_tile in 0..4 {
                let registers: [u32; 32] = std::array::from_fn(|lane| {
                    metadata[4 * lane + 2 * (tile_row % 2) + sub_tile / 2]
                });
                let mut a = [[spec.value.midpoint(); 32]; 16];
                for lane in 0..32 {
                    for i in 0..8 {
                        let (row, kept) = a_element(lane, i);
                        let places = metadata_nibble(&registers, sub_tile % 2, row, kept / 2);
                        assert!(
                            MetadataLayout::is_valid(places),
                            "step {tile_row}, sub-tile {sub_tile}, row {row}: {places}"
                        );
                        let place = if kept % 2 == 0 {
                            places & 3
                        } else {
                            places >> 2
                        };
                        let value = a_value(
                            &words,
                            columns,
                            [tile_row, tile_column],
                            lane,
                            sub_tile,
                            i,
                            spec.value,
                        );
                        a[row][kept / 2 * 4 + usize::from(place)] = value;
                    }
                }
                for (row, values) in a.iter().enumerate() {
                    for (column, &value) in values.iter().enumerate() {
                        let (k_row, n_column) = (
                            32 * tile_row + column,
                            64 * tile_column + 16 * sub_tile + row,
                        );
                        let expected = if k_row < k && n_column < n {
                            weight.q(k_row, n_column)
                        } else {
                            spec.value.midpoint()
                        };
                        assert_eq!(
                            value, expected,
                            "{spec}, K = {k}, N = {n}, row {k_row}, column {n_column}"
                        );
                    }
                }
            }
        }
    }
}
