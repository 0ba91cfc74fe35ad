use half::f16;
use marlin_format::checkpoint::compressed_tensors::{contains, tensor_specs, tensors_of, to_plain};
use marlin_format::checkpoint::{
    CheckpointError, Dtype, LayerFormat, PackQuantizedFormat, TensorData, TensorSpec,
};
use marlin_format::{FormatError, GroupSize, QuantSpec, ScaleDtype, Scales};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::common::{
    LAYER, any_problem, cases, checkpoint, comes_back, expect_first_scale_refused, message,
    random_weight, rng, tensor, words,
};

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn weights_come_back((k, n, spec) in any_problem(), act_order: bool, seed: u64) {
        let weight = random_weight(&mut StdRng::seed_from_u64(seed), k, n, spec, act_order);
        let tensors = tensors_of(LAYER, &weight);
        let specs: Vec<TensorSpec> = tensors.iter().map(|tensor| tensor.spec.clone()).collect();
        prop_assert_eq!(specs, tensor_specs(LAYER, k, n, &spec, act_order));
        let (_folder, checkpoint) = checkpoint(&tensors);
        prop_assert!(contains(&checkpoint, LAYER) && !contains(&checkpoint, "model"));
        let format = PackQuantizedFormat { spec: spec.with_scale_dtype(ScaleDtype::F16), act_order };
        comes_back(&weight, &LayerFormat::PackQuantized(format), tensors_of)?;
    }

    /// Checks every value against the format's description, read from the bytes without this crate.
    #[test]
    fn tensors_hold_what_the_format_says((k, n, spec) in any_problem(), act_order: bool, seed: u64) {
        let weight = random_weight(&mut StdRng::seed_from_u64(seed), k, n, spec, act_order);
        let dequantized = weight.dequantize();
        let tensors = tensors_of(LAYER, &weight);
        let find = |name: &str| tensors.iter().find(|tensor| tensor.spec.name == format!("{LAYER}.{name}"));
        let from_bytes = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect::<Vec<_>>();
        let ints = |name| find(name).map(|tensor| from_bytes(&tensor.bytes));
        let (packed, zero_points, group_index) = (ints("weight_packed").unwrap(), ints("weight_zero_point"), ints("weight_g_idx"));
        let scales = &find("weight_scale").unwrap().bytes;
        let groups = spec.scales.group.count(k);
        prop_assert_eq!(group_index.is_some(), act_order && groups > 1);
        prop_assert_eq!(&find("weight_shape").unwrap().bytes, &[(n as u64).to_le_bytes(), (k as u64).to_le_bytes()].concat());

        let (per_word, max) = (spec.value.per_word(), u32::from(spec.value.max()));
        let value_of = |word: u32, i: usize| (word >> (spec.value.bits() * (i % per_word))) & max;
        for column in 0..n {
            for row in 0..k {
                let group = group_index.as_ref().map_or(row / spec.scales.group.rows(k), |index| index[row] as usize);
                let at = column * groups + group;
                let half = || scales.as_chunks::<2>().0[at];
                let scale = match spec.scales.dtype {
                    ScaleDtype::F16 => f16::from_le_bytes(half()).to_f32(),
                    ScaleDtype::BF16 => f32::from_bits(u32::from(u16::from_le_bytes(half())) << 16),
                    ScaleDtype::F32 => f32::from_le_bytes(scales.as_chunks::<4>().0[at]),
                };
                let zero_point = match &zero_points {
                    Some(words) => value_of(words[column / per_word * groups + group], column),
                    None => max / 2 + 1,
                };
                let q = value_of(packed[column * k.div_ceil(per_word) + row / per_word], row);
                prop_assert_eq!(dequantized[row * n + column], scale * (q as f32 - zero_point as f32));
            }
            for padding in k..k.next_multiple_of(per_word) {
                prop_assert_eq!(value_of(packed[column * k.div_ceil(per_word) + padding / per_word], padding), 0);
            }
        }
    }
}

/// Reads a layer of K = 9, N = 2, channel-wise, with zero points, from hand-written bytes.
#[test]
fn a_small_layer_by_hand() {
    let tensors = [
        tensor(
            "weight_packed",
            Dtype::I32,
            &[2, 2],
            &words(&[0x7654_3210, 0x0000_0008, 0xffff_ffff, 0xffff_fff0]),
        ),
        tensor(
            "weight_scale",
            Dtype::BF16,
            &[2, 1],
            &[0x80, 0x3f, 0x00, 0x3f],
        ),
        tensor(
            "weight_shape",
            Dtype::I64,
            &[2],
            bytemuck::cast_slice(&[2i64, 9]),
        ),
        tensor(
            "weight_zero_point",
            Dtype::I32,
            &[1, 1],
            &words(&[0x0000_00f1]),
        ),
    ];
    let (_folder, checkpoint) = checkpoint(&tensors);
    let weight = to_plain(
        &checkpoint,
        LAYER,
        &QuantSpec::int4(GroupSize::Channel).with_zero_points(),
    )
    .unwrap();
    assert_eq!(
        (weight.k(), weight.n(), weight.zero_points().unwrap()),
        (9, 2, &[1, 15][..])
    );
    assert_eq!(weight.spec().scales.dtype, ScaleDtype::BF16);
    let columns = |column: usize| {
        weight
            .dequantize()
            .into_iter()
            .skip(column)
            .step_by(2)
            .collect::<Vec<f32>>()
    };
    assert_eq!(columns(0), [-1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    assert_eq!(columns(1), [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -7.5]);
    // What the file has past K is not padding of ours.
    assert_eq!(weight.qweight()[weight.layout().columns() + 1], 0x8888_8880);
}

/// Returns the tensors of a layer with N = 1, two groups, whose scales are 1 and 2, and the group of
/// each of its rows.
fn one_column(q: &[u32], group_index: &[i32]) -> [TensorData; 4] {
    let (k, scales) = (
        group_index.len(),
        Scales::from_f32(&[1.0, 2.0], ScaleDtype::F16),
    );
    let (shape, group_index) = ([1, k as i64], bytemuck::cast_slice(group_index));
    [
        tensor("weight_packed", Dtype::I32, &[1, q.len()], &words(q)),
        tensor("weight_scale", Dtype::F16, &[1, 2], scales.as_bytes()),
        tensor(
            "weight_shape",
            Dtype::I64,
            &[2],
            bytemuck::cast_slice(&shape),
        ),
        tensor("weight_g_idx", Dtype::I32, &[k], group_index),
    ]
}

/// Reads K = 64, N = 1, groups of 32: even rows in group 1, odd rows in group 0.
#[test]
fn activation_order_sorts_rows() {
    let q: Vec<u32> = (0..8)
        .map(|word| if word < 4 { 0x7654_3210 } else { 0xfedc_ba98 })
        .collect();
    let read = |group_index: &[i32], group| {
        let (_folder, checkpoint) = checkpoint(&one_column(&q, group_index));
        to_plain(&checkpoint, LAYER, &QuantSpec::int4(group))
    };

    let alternating: Vec<i32> = (0..64).map(|row| 1 - row % 2).collect();
    let weight = read(&alternating, GroupSize::G32).unwrap();
    let expected: Vec<u32> = (0..32)
        .map(|i| 2 * i + 1)
        .chain((0..32).map(|i| 2 * i))
        .collect();
    assert_eq!(weight.row_permutation().unwrap(), expected);
    for (row, value) in weight.dequantize().into_iter().enumerate() {
        let q = (row % 8 + if row < 32 { 0 } else { 8 }) as f32;
        assert_eq!(
            value,
            (q - 8.0) * if row % 2 == 0 { 2.0 } else { 1.0 },
            "row {row}"
        );
    }

    let natural: Vec<i32> = (0..64).map(|row| row / 32).collect();
    assert!(
        read(&natural, GroupSize::G32)
            .unwrap()
            .row_permutation()
            .is_none()
    );
    assert!(
        read(&[-1; 64], GroupSize::G32)
            .unwrap()
            .row_permutation()
            .is_none()
    );

    let mut uneven = natural.clone();
    uneven[40] = 0;
    for (group_index, problem) in [
        (
            uneven,
            "group 0 has 33 rows; of K = 64 in groups of 32 it must have 32",
        ),
        (
            [&natural[..63], &[2]].concat(),
            "row 63 is in group 2, but there are 2 groups",
        ),
        ([&natural[..63], &[-1]].concat(), "row 63 is in group -1"),
        (vec![i32::MIN; 64], "row 0 is in group -2147483648"),
    ] {
        let error = read(&group_index, GroupSize::G32).unwrap_err();
        assert!(matches!(error, CheckpointError::Values { .. }));
        assert!(
            message(&error).contains(problem) && message(&error).contains("weight_g_idx"),
            "{error}"
        );
    }
}

/// Tests K = 40, N = 1, groups of 32: the last group has 8 rows, at any position.
#[test]
fn only_the_last_group_may_be_incomplete() {
    let read = |group_index: &[i32]| {
        let tensors = one_column(&[0x9999_9999; 5], group_index);
        let (_folder, checkpoint) = checkpoint(&tensors);
        to_plain(&checkpoint, LAYER, &QuantSpec::int4(GroupSize::G32))
    };
    // Every q is 9, so that a weight equals the scale of its group.
    let scales = |of_group: &dyn Fn(usize) -> i32| -> Vec<f32> {
        (0..40).map(|row| (of_group(row) + 1) as f32).collect()
    };
    let index = |of_group: &dyn Fn(usize) -> i32| -> Vec<i32> { (0..40).map(of_group).collect() };
    let natural = |row: usize| (row / 32) as i32;
    let every_fifth = |row: usize| i32::from(row.is_multiple_of(5));
    assert_eq!(
        read(&index(&natural)).unwrap().dequantize(),
        scales(&natural)
    );
    assert_eq!(
        read(&index(&every_fifth)).unwrap().dequantize(),
        scales(&every_fifth)
    );
    let error = read(&index(&|row| i32::from(row >= 8))).unwrap_err();
    assert!(
        message(&error).contains("group 0 has 8 rows; of K = 40 in groups of 32 it must have 32"),
        "{error}"
    );
}

#[test]
fn inconsistent_layers_are_refused() {
    let (k, n) = (64, 12);
    let spec = QuantSpec::int4(GroupSize::G32).with_zero_points();
    let good = tensors_of(LAYER, &random_weight(&mut rng(), k, n, spec, true));
    let read = |change: &dyn Fn(&mut Vec<TensorData>), spec: QuantSpec| {
        let mut tensors = good.clone();
        change(&mut tensors);
        let (_folder, checkpoint) = checkpoint(&tensors);
        to_plain(&checkpoint, LAYER, &spec).map(|_| ())
    };
    read(&|_| (), spec).unwrap();

    for (i, name) in [
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
    ]
    .into_iter()
    .enumerate()
    {
        let error = read(&|tensors| drop(tensors.remove(i)), spec).unwrap_err();
        let tensor_missing = format!("has no tensor `{LAYER}.{name}`");
        assert!(
            matches!(
                &error,
                CheckpointError::MissingTensor { .. } | CheckpointError::MissingZeroPoints { .. }
            ),
            "{error}"
        );
        assert!(message(&error).contains(&tensor_missing), "{error}");
        let error = read(
            &|tensors| tensors[i] = tensor(name, Dtype::I32, &[0, 7], &[]),
            spec,
        )
        .unwrap_err();
        assert!(
            matches!(&error, CheckpointError::Shape { found, .. } if found == &[0, 7]),
            "{name}: {error}"
        );
        let retyped = |tensors: &mut Vec<TensorData>| {
            let TensorData {
                spec: TensorSpec { shape, .. },
                ..
            } = &tensors[i];
            let shape = shape.clone();
            tensors[i] = tensor(
                name,
                Dtype::U32,
                &shape,
                &vec![0; 4 * shape.iter().product::<usize>()],
            );
        };
        let error = read(&retyped, spec).unwrap_err();
        assert!(
            matches!(
                &error,
                CheckpointError::Dtype {
                    found: Dtype::U32,
                    ..
                }
            ),
            "{name}: {error}"
        );
    }
    let error = read(
        &|tensors| tensors[4] = tensor("weight_g_idx", Dtype::I32, &[1], &[0; 4]),
        spec,
    )
    .unwrap_err();
    assert!(matches!(error, CheckpointError::Shape { .. }), "{error}");

    let symmetric = QuantSpec::int4(GroupSize::G32);
    let error = read(&|_| (), symmetric).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::UnexpectedZeroPoints { tensor, .. } if tensor.ends_with("weight_zero_point")),
        "{error}"
    );
    assert!(matches!(
        read(&|_| (), QuantSpec::int4(GroupSize::G64).with_zero_points()).unwrap_err(),
        CheckpointError::Shape { .. }
    ));
    assert!(matches!(
        read(&|_| (), QuantSpec::int4(GroupSize::G128)).unwrap_err(),
        CheckpointError::Shape { .. }
    ));

    let shape = |extents: [i64; 2]| {
        move |tensors: &mut Vec<TensorData>| {
            tensors[2].bytes = bytemuck::cast_slice(&extents).to_vec()
        }
    };
    assert!(matches!(
        read(&shape([12, -64]), spec).unwrap_err(),
        CheckpointError::Values { .. }
    ));
    assert!(matches!(
        read(&shape([0, 64]), spec).unwrap_err(),
        CheckpointError::Weight {
            source: FormatError::Empty { .. },
            ..
        }
    ));
    assert!(matches!(
        read(&shape([12, 1 << 40]), spec).unwrap_err(),
        CheckpointError::Weight {
            source: FormatError::TooLarge { .. },
            ..
        }
    ));
    assert!(matches!(
        read(&shape([64, 12]), QuantSpec::int4(GroupSize::Channel)).unwrap_err(),
        CheckpointError::Shape { .. }
    ));
    let infinite = |tensors: &mut Vec<TensorData>| {
        tensors[1].bytes[..2].copy_from_slice(&f16::INFINITY.to_le_bytes())
    };
    let error = read(&infinite, spec).unwrap_err();
    expect_first_scale_refused(&error);
}
