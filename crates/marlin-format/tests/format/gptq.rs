use half::f16;
use marlin_format::checkpoint::gptq::{quantization_config, tensor_specs, tensors_of};
use marlin_format::checkpoint::{
    CheckpointError, Dtype, GptqFormat, GptqVersion, LayerFormat, TensorData, TensorSpec, layer_tensors, read_layer,
};
use marlin_format::{Bits, FormatError, GroupSize, PlainWeight, QuantSpec, ScaleDtype, Scales};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::json;

use crate::common::{
    LAYER, any_problem, cases, checkpoint, comes_back, message, natural_groups, natural_values, packed, random_weight, rng, tensor, words,
};

fn format(spec: QuantSpec, version: GptqVersion) -> LayerFormat {
    LayerFormat::Gptq(GptqFormat { spec, version, act_order: false })
}

fn read(tensors: &[TensorData], format: &LayerFormat) -> Result<PlainWeight, CheckpointError> {
    let (_folder, checkpoint) = checkpoint(tensors);
    read_layer(&checkpoint, LAYER, format)
}

/// The tensors that GPTQModel writes, value by value: `qweight` along K, `qzeros` along N with `stored` for each zero point.
pub fn published(weight: &PlainWeight, stored: impl Fn(u8) -> u8) -> Vec<TensorData> {
    let (k, n, spec) = (weight.k(), weight.n(), weight.spec());
    let (bits, groups) = (spec.bits, spec.group.count(k));
    let (values, per_word) = (natural_values(weight), spec.bits.per_word());
    let mut qweight = vec![0u32; k.div_ceil(per_word) * n];
    for (i, &q) in values.iter().enumerate() {
        let (row, column) = (i / n, i % n);
        qweight[row / per_word * n + column] |= u32::from(q) << (bits.count() * (row % per_word));
    }
    let zero_points = weight.zero_points().map_or(vec![bits.midpoint(); groups * n], <[u8]>::to_vec);
    let zero_points: Vec<u8> = zero_points.into_iter().map(stored).collect();
    vec![
        tensor("qweight", Dtype::I32, &[k.div_ceil(per_word), n], &words(&qweight)),
        tensor("qzeros", Dtype::I32, &[groups, n.div_ceil(per_word)], &words(&packed(&zero_points, n, bits))),
        tensor("scales", spec.scale_dtype.into(), &[groups, n], weight.scales().as_bytes()),
        tensor("g_idx", Dtype::I32, &[k], bytemuck::cast_slice(&natural_groups(weight))),
    ]
}

proptest! {
    #![proptest_config(cases(60))]

    /// This crate writes version 2 as published, and reads it back.
    #[test]
    fn weights_come_back((k, n, spec) in any_problem(), act_order: bool, seed: u64) {
        let weight = random_weight(&mut StdRng::seed_from_u64(seed), k, n, spec, act_order);
        let tensors = tensors_of(LAYER, &weight);
        prop_assert_eq!(&tensors, &published(&weight, |zero_point| zero_point));
        let specs: Vec<TensorSpec> = tensors.iter().map(|tensor| tensor.spec.clone()).collect();
        prop_assert_eq!(specs, tensor_specs(LAYER, k, n, &spec));

        comes_back(&weight, &format(spec.with_scale_dtype(ScaleDtype::F16), GptqVersion::V2), tensors_of)?;
    }

    /// Version 1 is version 2 less 1 in every value of a word of zero points, those of 0 with a borrow.
    #[test]
    fn version_1_comes_back((k, n, spec) in any_problem(), act_order: bool, seed: u64) {
        let weight = random_weight(&mut StdRng::seed_from_u64(seed), k, n, spec, act_order);
        let mut tensors = published(&weight, |zero_point| zero_point);
        let ones = if spec.bits == Bits::Four { 0x1111_1111 } else { 0x0101_0101 };
        for word in tensors[1].bytes.as_chunks_mut().0 {
            *word = u32::from_le_bytes(*word).wrapping_sub(ones).to_le_bytes();
        }
        let back = read(&tensors, &format(spec, GptqVersion::V1)).unwrap();
        prop_assert_eq!(back.zero_points(), weight.zero_points());
        prop_assert_eq!(back.dequantize(), weight.dequantize());
    }

    /// Without `g_idx` rows lie in their natural order, and K fills the words.
    #[test]
    fn group_index_may_be_absent((k, n, spec) in any_problem(), seed: u64) {
        let k = k.next_multiple_of(spec.bits.per_word());
        let weight = random_weight(&mut StdRng::seed_from_u64(seed), k, n, spec, false);
        let tensors = tensors_of(LAYER, &weight);
        prop_assert_eq!(read(&tensors[..3], &format(spec, GptqVersion::V2)).unwrap(), weight);
    }
}

/// K = 32, N = 8, one group of q = 0 in every place and scales of 1: the weights are the zero points, negated.
fn zero_points_of(word: u32, spec: QuantSpec, version: GptqVersion) -> Result<Vec<f32>, CheckpointError> {
    let words_of_zero_points: &[u32] = if spec.bits == Bits::Four { &[word] } else { &[word, word] };
    let per_word = spec.bits.per_word();
    let tensors = [
        tensor("qweight", Dtype::I32, &[32 / per_word, 8], &vec![0; 4 * 8 * 32 / per_word]),
        tensor("qzeros", Dtype::I32, &[1, 8 / per_word], &words(words_of_zero_points)),
        tensor("scales", Dtype::F16, &[1, 8], Scales::from_f32(&[1.0; 8], ScaleDtype::F16).as_bytes()),
    ];
    read(&tensors, &format(spec, version)).map(|weight| weight.dequantize()[..8].iter().map(|value| -value).collect())
}

#[test]
fn zero_points_at_the_edges() {
    let asymmetric = QuantSpec::int4(GroupSize::Channel).with_zero_points();
    // Zero points 0, 7, 8, 15, 15, 8, 7, 0, lowest nibble first.
    assert_eq!(zero_points_of(0x078f_f870, asymmetric, GptqVersion::V2).unwrap(), [0.0, 7.0, 8.0, 15.0, 15.0, 8.0, 7.0, 0.0]);
    // 1, 7, 8, 15, 15, 8, 7, 1: all but the lowest hold one less.
    assert_eq!(zero_points_of(0x067e_e760, asymmetric, GptqVersion::V1).unwrap(), [1.0, 7.0, 8.0, 15.0, 15.0, 8.0, 7.0, 1.0]);

    // Zero points 0, 8, 8, 8, 8, 8, 8, 8, of which the 0 borrows from the 8 above it; several, of which the highest borrows from nothing; nothing but 0.
    let eights = [0.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0];
    for (word, expected) in [
        (0x7777_776f, eights),
        (0x0888_8880u32.wrapping_sub(0x1111_1111), [0.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 0.0]),
        (0xeeee_eeef, [0.0; 8]),
    ] {
        assert_eq!(zero_points_of(word, asymmetric, GptqVersion::V1).unwrap(), expected, "{word:#x}");
        // Said to be symmetric, they do not count.
        assert_eq!(zero_points_of(word, QuantSpec::int4(GroupSize::Channel), GptqVersion::V1).unwrap(), [8.0; 8]);
    }
    assert_eq!(zero_points_of(0x7777_776f, asymmetric, GptqVersion::V2).unwrap()[0], 15.0);

    let asymmetric = QuantSpec::int8(GroupSize::Channel).with_zero_points();
    let edges = [0.0, 127.0, 128.0, 255.0];
    assert_eq!(zero_points_of(0xff80_7f00, asymmetric, GptqVersion::V2).unwrap(), [edges, edges].concat());
    let edges = [1.0, 127.0, 128.0, 255.0];
    assert_eq!(zero_points_of(0xfe7f_7e00, asymmetric, GptqVersion::V1).unwrap(), [edges, edges].concat());
    let edges = [0.0, 127.0, 0.0, 255.0];
    assert_eq!(zero_points_of(0xff00_7f00u32.wrapping_sub(0x0101_0101), asymmetric, GptqVersion::V1).unwrap(), [edges, edges].concat());
    // Symmetric files of version 1 store 127, some 128; neither counts.
    for stored in [0x7f7f_7f7f, 0x8080_8080, 0] {
        assert_eq!(zero_points_of(stored, QuantSpec::int8(GroupSize::Channel), GptqVersion::V1).unwrap(), [128.0; 8]);
    }
}

/// The contents of `g_idx` count, not the config's declaration.
#[test]
fn group_index_is_judged_by_content() {
    let (k, n) = (128, 16);
    let spec = QuantSpec::int4(GroupSize::G32);
    let weight = random_weight(&mut rng(), k, n, spec, false);
    let read = |group_index: &[i32], group, act_order| {
        let mut tensors = tensors_of(LAYER, &weight);
        tensors[3] = tensor("g_idx", Dtype::I32, &[group_index.len()], bytemuck::cast_slice(group_index));
        if group == GroupSize::Channel {
            tensors[1] = tensor("qzeros", Dtype::I32, &[1, 2], &[0; 8]);
            tensors[2] = tensor("scales", Dtype::F16, &[1, n], &[0; 32]);
        }
        let spec = QuantSpec { group, ..spec };
        read(&tensors, &LayerFormat::Gptq(GptqFormat { spec, version: GptqVersion::V1, act_order }))
    };

    let natural: Vec<i32> = (0..128).map(|row| row / 32).collect();
    for group_index in [natural.clone(), vec![0; 128], vec![-1; 128]] {
        for act_order in [false, true] {
            assert_eq!(read(&group_index, GroupSize::G32, act_order).unwrap(), weight);
        }
    }
    let alternating: Vec<i32> = (0..128).map(|row| 3 - row % 4).collect();
    for act_order in [false, true] {
        let read = read(&alternating, GroupSize::G32, act_order).unwrap();
        let expected: Vec<u32> = (0..4).flat_map(|group| (0..32).map(move |i| 4 * i + 3 - group)).collect();
        assert_eq!(read.row_permutation().unwrap(), expected);
        assert_eq!(natural_values(&read), natural_values(&weight));
        assert_eq!(natural_groups(&read), alternating);
    }
    // One group over all of K: no order changes a weight.
    assert!(read(&alternating, GroupSize::Channel, true).unwrap().row_permutation().is_none());

    let changed = |row: usize, group: i32| {
        let mut group_index = alternating.clone();
        group_index[row] = group;
        group_index
    };
    for (group_index, problem) in [
        (changed(5, 4), "row 5 is in group 4, but there are 4 groups"),
        (changed(5, i32::MIN), "row 5 is in group -2147483648"),
        (changed(5, 3), "group 2 has 31 rows; of K = 128 in groups of 32 it must have 32"),
    ] {
        let error = read(&group_index, GroupSize::G32, true).unwrap_err();
        assert!(matches!(error, CheckpointError::Values { .. }), "{error}");
        assert!(message(&error).contains(problem) && message(&error).contains(&format!("{LAYER}.g_idx")), "{error}");
    }
    // Declared and absent: which group a row is in is not known. One group has no order.
    let format = |group| LayerFormat::Gptq(GptqFormat { spec: QuantSpec { group, ..spec }, version: GptqVersion::V2, act_order: true });
    let error = self::read(&tensors_of(LAYER, &weight)[..3], &format(GroupSize::G32)).unwrap_err();
    assert!(matches!(&error, CheckpointError::MissingTensor { tensor, .. } if tensor.ends_with("g_idx")), "{error}");
    let channel = random_weight(&mut rng(), k, n, QuantSpec::int4(GroupSize::Channel), false);
    assert_eq!(self::read(&tensors_of(LAYER, &channel)[..3], &format(GroupSize::Channel)).unwrap(), channel);
}

#[test]
fn inconsistent_layers_are_refused() {
    let (k, n) = (64, 12);
    let spec = QuantSpec::int4(GroupSize::G32).with_zero_points();
    let good = tensors_of(LAYER, &random_weight(&mut rng(), k, n, spec, true));
    let read = |change: &dyn Fn(&mut Vec<TensorData>), spec: QuantSpec| {
        let mut tensors = good.clone();
        change(&mut tensors);
        read(&tensors, &format(spec, GptqVersion::V2)).map(|_| ())
    };
    read(&|_| (), spec).unwrap();
    // Symmetric weights have zero points in their files, or none: they do not count.
    read(&|_| (), QuantSpec::int4(GroupSize::G32)).unwrap();
    read(&|tensors| drop(tensors.remove(1)), QuantSpec::int4(GroupSize::G32)).unwrap();

    for (i, name) in ["qweight", "qzeros", "scales"].into_iter().enumerate() {
        let error = read(&|tensors| drop(tensors.remove(i)), spec).unwrap_err();
        assert!(matches!(&error, CheckpointError::MissingTensor { tensor, .. } if tensor == &format!("{LAYER}.{name}")), "{error}");
        assert!(message(&error).contains("is the download complete"), "{error}");
        let error = read(&|tensors| tensors[i] = tensor(name, Dtype::I32, &[2, 5], &[0; 40]), spec).unwrap_err();
        assert!(
            matches!(&error, CheckpointError::Shape { found, expected, .. } if found == &[2, 5] && expected != found),
            "{name}: {error}"
        );
        let retyped = |tensors: &mut Vec<TensorData>| tensors[i].spec.dtype = if name == "scales" { Dtype::I16 } else { Dtype::F32 };
        let error = read(&retyped, spec).unwrap_err();
        assert!(matches!(&error, CheckpointError::Dtype { tensor, .. } if tensor.ends_with(name)), "{name}: {error}");
    }
    for (i, name, expected) in [(0, "qweight", "[K / values in a word, N]"), (3, "g_idx", "[K]")] {
        let error = read(&|tensors| tensors[i] = tensor(name, Dtype::I32, &[1, 1, 1], &[0; 4]), spec).unwrap_err();
        assert!(message(&error).contains(&format!("its shape is [1, 1, 1]; expected {expected}")), "{error}");
    }
    let error = read(&|tensors| tensors[3].spec.dtype = Dtype::F32, spec).unwrap_err();
    assert!(matches!(&error, CheckpointError::Dtype { tensor, .. } if tensor.ends_with("g_idx")), "{error}");
    // A g_idx that is too short for `qweight`.
    let error = read(&|tensors| tensors[3] = tensor("g_idx", Dtype::I32, &[32], &[0; 128]), spec).unwrap_err();
    assert!(matches!(&error, CheckpointError::Shape { expected, .. } if expected == &[4, 12]), "{error}");

    for group in [GroupSize::G64, GroupSize::G128] {
        let error = read(&|_| (), QuantSpec::int4(group).with_zero_points()).unwrap_err();
        assert!(
            matches!(&error, CheckpointError::Shape { tensor, expected, .. } if tensor.ends_with("scales") && expected == &[1, 12]),
            "{error}"
        );
    }
    let error = read(&|_| (), QuantSpec::int8(GroupSize::G32).with_zero_points()).unwrap_err();
    assert!(matches!(&error, CheckpointError::Shape { tensor, .. } if tensor.ends_with("qweight")), "{error}");
    let error = read(&|tensors| tensors[0] = tensor("qweight", Dtype::I32, &[8, 0], &[]), spec).unwrap_err();
    assert!(matches!(&error, CheckpointError::Weight { source: FormatError::Empty { .. }, .. }), "{error}");
    let infinite = |tensors: &mut Vec<TensorData>| tensors[2].bytes[..2].copy_from_slice(&f16::NEG_INFINITY.to_le_bytes());
    let error = read(&infinite, spec).unwrap_err();
    assert!(matches!(error, CheckpointError::Weight { source: FormatError::NonFiniteScale { group: 0, column: 0, .. }, .. }), "{error}");

    let (_folder, checkpoint) = checkpoint(&good);
    let error = read_layer(&checkpoint, LAYER, &LayerFormat::Float).unwrap_err();
    assert!(message(&error).contains(&format!("`{LAYER}` is not quantised")), "{error}");
    assert!(layer_tensors(&checkpoint, LAYER, &LayerFormat::Float).is_empty());
}

/// Scales in f32 are read where f16 or bf16 holds them all.
#[test]
fn f32_scales_are_held_in_the_narrowest_dtype_that_is_exact() {
    let spec = QuantSpec::int4(GroupSize::Channel);
    let weight = random_weight(&mut rng(), 32, 2, spec, false);
    let read = |scales: [f32; 2]| {
        let mut tensors = tensors_of(LAYER, &weight);
        tensors[2] = tensor("scales", Dtype::F32, &[1, 2], bytemuck::cast_slice(&scales));
        read(&tensors, &format(spec, GptqVersion::V2))
    };
    // Eleven bits, which f16 holds and bf16 does not.
    let fine = 1.0 + 2.0f32.powi(-10);
    for (scales, dtype) in [
        ([0.5, fine], ScaleDtype::F16),
        ([0.5, 2.0f32.powi(100)], ScaleDtype::BF16),
        ([0.5, 0.1], ScaleDtype::F32),
        ([fine, 2.0f32.powi(100)], ScaleDtype::F32),
    ] {
        let weight = read(scales).unwrap();
        assert_eq!((weight.spec().scale_dtype, weight.scales().to_f32()), (dtype, scales.to_vec()));
    }
    let error = read([0.5, f32::NAN]).unwrap_err();
    assert!(message(&error).contains("finite"), "{error}");
}

/// K = 344 in groups of 32, as GPTQModel writes it: 10 groups and one of 24 rows, which is the last however rows are ordered.
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

    // The first 24 rows in the last group, and every other row 24 rows later than it would be.
    let rotated: Vec<i32> = (0..k as i32).map(|row| if row < 24 { 10 } else { (row - 24) / 32 }).collect();
    let back = read(&rotated).unwrap();
    assert_eq!(back.row_permutation().unwrap(), (24..344).chain(0..24).collect::<Vec<u32>>());
    assert_eq!((natural_values(&back), natural_groups(&back)), (natural_values(&weight), rotated));

    // The same sizes the other way round: stored rows 0 to 31 would be of two groups.
    let first: Vec<i32> = (0..k as i32).map(|row| (row + 8) / 32).collect();
    let mut uneven = natural;
    uneven[0] = 10;
    for (group_index, problem) in [
        (first, "group 0 has 24 rows; of K = 344 in groups of 32 it must have 32"),
        (uneven, "group 0 has 31 rows; of K = 344 in groups of 32 it must have 32"),
    ] {
        let error = read(&group_index).unwrap_err();
        assert!(matches!(error, CheckpointError::Values { .. }) && message(&error).contains(problem), "{error}");
    }
}

#[test]
fn the_config_says_version_2() {
    let spec = QuantSpec::int8(GroupSize::Channel).with_zero_points();
    let config = quantization_config(
        &spec,
        true,
        false,
        &["model.layers.0.mlp.down_proj".into()],
        &[("a.b".into(), QuantSpec::int4(GroupSize::G32))],
    );
    assert_eq!(config["quant_method"], "gptq");
    assert_eq!(config["checkpoint_format"], "gptq_v2");
    assert_eq!((&config["bits"], &config["group_size"], &config["sym"]), (&json!(8), &json!(-1), &json!(false)));
    assert_eq!((&config["desc_act"], &config["lm_head"]), (&json!(true), &json!(false)));
    assert_eq!(config["dynamic"], json!({ r"-:^model\.layers\.0\.mlp\.down_proj$": {}, r"+:^a\.b$": { "bits": 4, "group_size": 32 } }));
}
