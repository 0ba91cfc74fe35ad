//! The layouts of scales and zero points beside the tile layout.

use marlin_format::layout::{MarlinLayout, ScaleLayout, ZeroLayout};
use marlin_format::{GroupSize, QuantSpec, ScaleDtype};

use crate::common::{numbered_scales, random_weight, rng};

/// Compares with the permutations in the published packer, which map new positions to old columns.
#[test]
fn scale_layout_is_the_published_permutation() {
    let grouped: Vec<usize> = (0..8)
        .flat_map(|i| (0..8).map(move |j| i + 8 * j))
        .collect();
    let single: Vec<usize> = (0..4)
        .flat_map(|i| [0, 1, 8, 9, 16, 17, 24, 25].map(move |j| 2 * i + j))
        .collect();
    for (k, group, permutation) in [
        (64, GroupSize::G32, grouped),
        (64, GroupSize::Channel, single.clone()),
        (128, GroupSize::G128, single),
    ] {
        let n = 128;
        let layout = ScaleLayout::new(&MarlinLayout::new(k, n), group);
        let scales = numbered_scales(group.count(k) * n, ScaleDtype::F16);
        let packed = layout.pack(&scales).unwrap();
        for (position, packed) in packed.to_f32().into_iter().enumerate() {
            let (row, position) = (position / n, position % n);
            let block = permutation.len();
            let column = position / block * block + permutation[position % block];
            assert_eq!(
                packed,
                scales.get(row * n + column),
                "{group}, row {row}, position {position}"
            );
        }
    }
}

#[test]
fn zero_points_pack_like_scales() {
    let layout = ScaleLayout::new(&MarlinLayout::new(64, 3), GroupSize::G32);
    let packed = layout.pack_values(&[1u8, 2, 3, 4, 5, 6]).unwrap();
    assert_eq!(
        (
            packed.len(),
            packed[layout.index(0, 2)],
            packed[layout.index(1, 0)]
        ),
        (128, 3, 4)
    );
    assert_eq!(layout.unpack_values(&packed).unwrap(), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn padding_of_k_adds_groups() {
    let layout = ScaleLayout::new(
        &MarlinLayout::new_padded(64, 64, 128, 64).unwrap(),
        GroupSize::G32,
    );
    assert_eq!(
        (
            layout.groups_padded(),
            layout.n_padded(),
            layout.len(),
            layout.is_empty()
        ),
        (4, 64, 256, false)
    );
    // A single group that becomes two with padding has the layout of two groups.
    let layout = ScaleLayout::new(
        &MarlinLayout::new_padded(64, 64, 128, 64).unwrap(),
        GroupSize::G64,
    );
    assert_eq!((layout.groups_padded(), layout.index(0, 1)), (2, 8));
}

/// Tests K = 344 in groups of 32: the eleventh group has 24 rows. The padding to chunks of 64 adds
/// 8 rows to this group, and a group of its own.
#[test]
fn an_incomplete_group_has_its_own_scales() {
    let rng = &mut rng();
    for (k, group, groups, padded) in [
        (344, GroupSize::G32, 11, 12),
        (200, GroupSize::G128, 2, 2),
        (320, GroupSize::G128, 3, 3),
        (72, GroupSize::G64, 2, 2),
        (33, GroupSize::G32, 2, 2),
    ] {
        let n = 70;
        let spec = if group == GroupSize::G32 {
            QuantSpec::int4(group)
        } else {
            QuantSpec::int8(group)
        }
        .with_zero_points();
        let marlin = MarlinLayout::in_chunks(k, n, spec.value);
        let weight = random_weight(rng, k, n, spec, false);
        let (scales, zeros) = (
            ScaleLayout::new(&marlin, group),
            ZeroLayout::new(&marlin, group, spec.value),
        );
        assert_eq!(
            (group.count(k), scales.groups_padded()),
            (groups, padded),
            "K = {k}, {group}"
        );
        let words = marlin.pack(&weight).unwrap();
        let packed_scales = scales.pack(weight.scales()).unwrap();
        let packed_zeros = zeros.pack(weight.zero_points().unwrap()).unwrap();
        // The padded weight as dequantised by a kernel, row by row: the weight, and finite numbers
        // past K.
        let dequantized = weight.dequantize();
        for row in 0..marlin.k_padded() {
            for column in 0..marlin.n_padded() {
                let g = row / group.rows(k);
                let scale = packed_scales.get(scales.index(g, column));
                let zero_point = zeros.index(g, column).read(&packed_zeros);
                let value = scale
                    * (f32::from(marlin.index(row, column).read(&words)) - f32::from(zero_point));
                match row < k && column < n {
                    true => assert_eq!(
                        value,
                        dequantized[row * n + column],
                        "K = {k}, {group}, row {row}, column {column}"
                    ),
                    false => assert!(
                        value.is_finite() && (column < n || value == 0.0),
                        "K = {k}, {group}, row {row}, column {column}"
                    ),
                }
            }
        }
    }
}
