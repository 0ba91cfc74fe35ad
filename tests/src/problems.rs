use crate::Case;
use marlin_format::{GroupSize, QuantSpec, ScaleDtype, Sparsity, WeightValue};
use marlin_kernels::ActivationDtype;

/// The numbers of rows of activations around the edges of every tile.
pub const ROWS: [usize; 18] = [
    1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 2048,
];

/// Returns shapes [K, N] for a group size: whole tiles, an N one above and one below a tile, an
/// incomplete last group, and for whole-column groups a K that fills neither a word nor a tile.
pub fn shapes(group: GroupSize) -> Vec<[usize; 2]> {
    let rows = group.rows(128);
    let mut shapes = vec![
        [rows, 64],
        [2 * rows, 63],
        [3 * rows, 65],
        [128, 128],
        [384, 1],
    ];
    shapes.extend_from_slice(match group {
        GroupSize::Channel => &[[1, 1], [7, 9], [9, 7], [15, 17], [129, 33]],
        // The last shape has one group, which the tile layout pads to two.
        // The second K ends within a group, the third within a step of 16 rows of padding.
        GroupSize::G16 => &[[344, 40], [24, 9], [1000, 8]],
        GroupSize::G32 => &[[344, 40], [33, 9], [32, 344]],
        GroupSize::G64 => &[[72, 65], [1000, 8]],
        // The first K ends in the second half of the last group, the second K after the first half
        // of the last group, and the third K within the only group.
        GroupSize::G128 => &[[200, 33], [320, 64], [100, 7]],
    });
    shapes
}

/// Returns the list of problems: every format with every shape of its group and varying rows, and
/// every number of rows in [`ROWS`] with each bit width.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut rows = ROWS.iter().copied().filter(|&m| m <= 129).cycle();
    let values_and_groups = WeightValue::ALL.into_iter().flat_map(|value| {
        let groups = value.groups().iter();
        groups.map(move |&group| QuantSpec::new(value, group))
    });
    for symmetric in values_and_groups {
        let value = symmetric.value;
        for spec in value
            .zero_points()
            .iter()
            .map(|&zero_point| symmetric.with_zero_point(zero_point))
        {
            for (activations, scales) in [
                (ActivationDtype::F32, ScaleDtype::F16),
                (ActivationDtype::F16, ScaleDtype::F16),
                (ActivationDtype::BF16, ScaleDtype::BF16),
            ] {
                let spec = spec.with_scale_dtype(scales);
                for [k, n] in shapes(spec.scales.group) {
                    for (permuted, sparsity) in [
                        (false, Sparsity::Dense),
                        (true, Sparsity::Dense),
                        (false, Sparsity::TwoFour),
                    ] {
                        let is_there = value.sparsities().contains(&sparsity);
                        if is_there && (sparsity == Sparsity::Dense || k.is_multiple_of(4)) {
                            let m = rows.next().unwrap_or(1);
                            cases.push(Case {
                                m,
                                k,
                                n,
                                spec,
                                activations,
                                permuted,
                                sparsity,
                            });
                        }
                    }
                }
            }
        }
    }
    for m in ROWS {
        let case = |(spec, sparsity)| Case {
            m,
            k: 256,
            n: 65,
            spec,
            activations: ActivationDtype::F16,
            permuted: false,
            sparsity,
        };
        let (int4, int8) = (
            QuantSpec::int4(GroupSize::G128),
            QuantSpec::int8(GroupSize::G128),
        );
        let [e2m1, e4m3] = [
            QuantSpec::new(WeightValue::E2m1, GroupSize::G16),
            QuantSpec::new(WeightValue::E4m3, GroupSize::Channel),
        ];
        cases.extend(
            [
                (int4, Sparsity::Dense),
                (int8, Sparsity::Dense),
                (int4, Sparsity::TwoFour),
                (e2m1, Sparsity::Dense),
                (e4m3, Sparsity::Dense),
            ]
            .map(case),
        );
    }
    // Models quantised in f32 have scales in f32. For tensor cores, a layer casts the scales to the
    // dtype of the activations.
    for activations in [ActivationDtype::F32, ActivationDtype::F16] {
        for spec in [
            QuantSpec::int4(GroupSize::G32).with_zero_points(),
            QuantSpec::int8(GroupSize::Channel),
            QuantSpec::fp8(),
            QuantSpec::nvfp4(),
        ] {
            let spec = spec.with_scale_dtype(ScaleDtype::F32);
            cases.extend([1, 9].map(|m| Case {
                m,
                k: 96,
                n: 65,
                spec,
                activations,
                permuted: m > 1,
                sparsity: Sparsity::Dense,
            }));
        }
    }
    cases
}
