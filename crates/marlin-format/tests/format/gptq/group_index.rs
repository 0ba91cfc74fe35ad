//! Tests of the row order that `g_idx` declares.

use marlin_format::checkpoint::gptq::tensors_of;
use marlin_format::checkpoint::{CheckpointError, Dtype, GptqFormat, GptqVersion, LayerFormat};
use marlin_format::{GroupSize, QuantSpec};

use super::{format, published, read};
use crate::common::{LAYER, message, natural_groups, natural_values, random_weight, rng, tensor};

/// The contents of `g_idx` decide, not the declaration in the config.
#[test]
fn group_index_is_judged_by_content() {
    let (k, n) = (128, 16);
    let spec = QuantSpec::int4(GroupSize::G32);
    let weight = random_weight(&mut rng(), k, n, spec, false);
    let read = |group_index: &[i32], group, act_order| {
        let mut tensors = tensors_of(LAYER, &weight);
        tensors[3] = tensor(
            "g_idx",
            Dtype::I32,
            &[group_index.len()],
            bytemuck::cast_slice(group_index),
        );
        if group == GroupSize::Channel {
            tensors[1] = tensor("qzeros", Dtype::I32, &[1, 2], &[0; 8]);
            tensors[2] = tensor("scales", Dtype::F16, &[1, n], &[0; 32]);
        }
        let spec = spec.with_group(group);
        read(
            &tensors,
            &LayerFormat::Gptq(GptqFormat {
                spec,
                version: GptqVersion::V1,
                act_order,
            }),
        )
    };

    let natural: Vec<i32> = (0..128).map(|row| row / 32).collect();
    for group_index in [natural.clone(), vec![0; 128], vec![-1; 128]] {
        for act_order in [false, true] {
            assert_eq!(
                read(&group_index, GroupSize::G32, act_order).unwrap(),
                weight
            );
        }
    }
    let alternating: Vec<i32> = (0..128).map(|row| 3 - row % 4).collect();
    for act_order in [false, true] {
        let read = read(&alternating, GroupSize::G32, act_order).unwrap();
        let expected: Vec<u32> = (0..4)
            .flat_map(|group| (0..32).map(move |i| 4 * i + 3 - group))
            .collect();
        assert_eq!(read.row_permutation().unwrap(), expected);
        assert_eq!(natural_values(&read), natural_values(&weight));
        assert_eq!(natural_groups(&read), alternating);
    }
    // With one group over all of K, the order of rows does not matter.
    assert!(
        read(&alternating, GroupSize::Channel, true)
            .unwrap()
            .row_permutation()
            .is_none()
    );

    let changed = |row: usize, group: i32| {
        let mut group_index = alternating.clone();
        group_index[row] = group;
        group_index
    };
    for (group_index, problem) in [
        (changed(5, 4), "row 5 is in group 4, but there are 4 groups"),
        (changed(5, i32::MIN), "row 5 is in group -2147483648"),
        (
            changed(5, 3),
            "group 2 has 31 rows; of K = 128 in groups of 32 it must have 32",
        ),
    ] {
        let error = read(&group_index, GroupSize::G32, true).unwrap_err();
        assert!(matches!(error, CheckpointError::Values { .. }), "{error}");
        assert!(
            message(&error).contains(problem)
                && message(&error).contains(&format!("{LAYER}.g_idx")),
            "{error}"
        );
    }
    // An absent `g_idx` that the config declares: the group of a row is unknown. A single group
    // needs no `g_idx`.
    let format = |group| {
        LayerFormat::Gptq(GptqFormat {
            spec: spec.with_group(group),
            version: GptqVersion::V2,
            act_order: true,
        })
    };
    let error = self::read(&tensors_of(LAYER, &weight)[..3], &format(GroupSize::G32)).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::MissingTensor { tensor, .. } if tensor.ends_with("g_idx")),
        "{error}"
    );
    let channel = random_weight(&mut rng(), k, n, QuantSpec::int4(GroupSize::Channel), false);
    assert_eq!(
        self::read(
            &tensors_of(LAYER, &channel)[..3],
            &format(GroupSize::Channel)
        )
        .unwrap(),
        channel
    );
}

/// K = 344 in groups of 32, as written by GPTQModel: 10 whole groups and one group of 24 rows. The
/// incomplete group is the last one in any order of rows.
#[test]
fn only_the_last_group_may_be_incomplete() {
    let (k, n) = (344, 8);
    let spec = QuantSpec::int4(GroupSize::G32).with_zero_points();
    let weight = random_weight(&mut rng(), k, n, spec, false);
    let read = |group_index: &[i32]| {
        let mut tensors = published(&weight, |zero_point| zero_point);
        tensors[3] = tensor("g_idx", Dtype::I32, &[k], bytemuck::cast_slice(group_index));
        read(&tensors, &format(spec, GptqVersion::V2))
    };
    let natural: Vec<i32> = (0..k as i32).map(|row| row / 32).collect();
    assert_eq!(read(&natural).unwrap(), weight);

    // The first 24 rows are in the last group, and all other rows are shifted by 24 rows.
    let rotated: Vec<i32> = (0..k as i32)
        .map(|row| if row < 24 { 10 } else { (row - 24) / 32 })
        .collect();
    let back = read(&rotated).unwrap();
    assert_eq!(
        back.row_permutation().unwrap(),
        (24..344).chain(0..24).collect::<Vec<u32>>()
    );
    assert_eq!(
        (natural_values(&back), natural_groups(&back)),
        (natural_values(&weight), rotated)
    );

    // Here the first group is the incomplete one, so stored rows 0 to 31 would belong to two
    // groups.
    let first: Vec<i32> = (0..k as i32).map(|row| (row + 8) / 32).collect();
    let mut uneven = natural;
    uneven[0] = 10;
    for (group_index, problem) in [
        (
            first,
            "group 0 has 24 rows; of K = 344 in groups of 32 it must have 32",
        ),
        (
            uneven,
            "group 0 has 31 rows; of K = 344 in groups of 32 it must have 32",
        ),
    ] {
        let error = read(&group_index).unwrap_err();
        assert!(
            matches!(error, CheckpointError::Values { .. }) && message(&error).contains(problem),
            "{error}"
        );
    }
}
