mod group_index;
mod zero_points;

use half::f16;
use marlin_format::checkpoint::gptq::{quantization_config, tensor_specs, tensors_of};
use marlin_format::checkpoint::{
    CheckpointError, Dtype, GptqFormat, GptqVersion, LayerFormat, TensorData, TensorSpec,
    layer_tensors, read_layer,
};
use marlin_format::{FormatError, GroupSize, PlainWeight, QuantSpec, ScaleDtype, WeightValue};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::json;

use crate::common::{
    LAYER, any_problem, cases, checkpoint, comes_back, expect_first_scale_refused, expect_missing,
    message, natural_groups, natural_values, packed, random_weight, rng, tensor, words,
};

fn format(spec: QuantSpec, version: GptqVersion) -> LayerFormat {
    LayerFormat::Gptq(GptqFormat {
        spec,
        version,
        act_order: false,
    })
}

fn read(tensors: &[TensorData], format: &LayerFormat) -> Result<PlainWeight, CheckpointError> {
    let (_folder, checkpoint) = checkpoint(tensors);
    read_layer(&checkpoint, LAYER, format)
}

/// Returns the tensors that GPTQModel writes, value by value: `qweight` packed along K, `qzeros`
/// packed along N with `stored` applied to each zero point.
pub fn published(weight: &PlainWeight, stored: impl Fn(u8) -> u8) -> Vec<TensorData> {
    let (k, n, spec) = (weight.k(), weight.n(), weight.spec());
    let (bits, groups) = (spec.value, spec.scales.group.count(k));
    let (values, per_word) = (natural_values(weight), spec.value.per_word());
    let mut qweight = vec![0u32; k.div_ceil(per_word) * n];
    for (i, &q) in values.iter().enumerate() {
        let (row, column) = (i / n, i % n);
        qweight[row / per_word * n + column] |= u32::from(q) << (bits.bits() * (row % per_word));
    }
    let zero_points = weight
        .zero_points()
        .map_or(vec![bits.midpoint(); groups * n], <[u8]>::to_vec);
    let zero_points: Vec<u8> = zero_points.into_iter().map(stored).collect();
    vec![
        tensor(
            "qweight",
            Dtype::I32,
            &[k.div_ceil(per_word), n],
            &words(&qweight),
        ),
        tensor(
            "qzeros",
            Dtype::I32,
            &[groups, n.div_ceil(per_word)],
            &words(&packed(&zero_points, n, bits)),
        ),
        tensor(
            "scales",
            spec.scales.dtype.into(),
            &[groups, n],
            weight.scales().as_bytes(),
        ),
        tensor(
            "g_idx",
            Dtype::I32,
            &[k],
            bytemuck::cast_slice(&natural_groups(weight)),
        ),
    ]
}

proptest! {
    #![proptest_config(cases(60))]

    /// Checks that this crate writes version 2 as published, and reads it.
    #[test]
    fn weights_come_back((k, n, spec) in any_problem(), act_order: bool, seed: u64) {
        let weight = random_weight(&mut StdRng::seed_from_u64(seed), k, n, spec, act_order);
        let tensors = tensors_of(LAYER, &weight);
        prop_assert_eq!(&tensors, &published(&weight, |zero_point| zero_point));
        let specs: Vec<TensorSpec> = tensors.iter().map(|tensor| tensor.spec.clone()).collect();
        prop_assert_eq!(specs, tensor_specs(LAYER, k, n, &spec));

        comes_back(&weight, &format(spec.with_scale_dtype(ScaleDtype::F16), GptqVersion::V2), tensors_of)?;
    }

    /// Checks version 1, which is version 2 minus 1 in every value of a word of zero points. A zero
    /// point of 0 borrows.
    #[test]
    fn version_1_comes_back((k, n, spec) in any_problem(), act_order: bool, seed: u64) {
        let weight = random_weight(&mut StdRng::seed_from_u64(seed), k, n, spec, act_order);
        let mut tensors = published(&weight, |zero_point| zero_point);
        let ones = if spec.value == WeightValue::Int4 { 0x1111_1111 } else { 0x0101_0101 };
        for word in tensors[1].bytes.as_chunks_mut().0 {
            *word = u32::from_le_bytes(*word).wrapping_sub(ones).to_le_bytes();
        }
        let back = read(&tensors, &format(spec, GptqVersion::V1)).unwrap();
        prop_assert_eq!(back.zero_points(), weight.zero_points());
        prop_assert_eq!(back.dequantize(), weight.dequantize());
    }

    /// Checks that rows without `g_idx` are in their natural order. K fills the words.
    #[test]
    fn group_index_may_be_absent((k, n, spec) in any_problem(), seed: u64) {
        let k = k.next_multiple_of(spec.value.per_word());
        let weight = random_weight(&mut StdRng::seed_from_u64(seed), k, n, spec, false);
        let tensors = tensors_of(LAYER, &weight);
        prop_assert_eq!(read(&tensors[..3], &format(spec, GptqVersion::V2)).unwrap(), weight);
    }
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
    // Symmetric weights may have zero points in their files, which are ignored.
    read(&|_| (), QuantSpec::int4(GroupSize::G32)).unwrap();
    read(
        &|tensors| drop(tensors.remove(1)),
        QuantSpec::int4(GroupSize::G32),
    )
    .unwrap();

    for (i, name) in ["qweight", "qzeros", "scales"].into_iter().enumerate() {
        let error = read(&|tensors| drop(tensors.remove(i)), spec).unwrap_err();
        expect_missing(&error, name);
        assert!(
            message(&error).contains("is the download complete"),
            "{error}"
        );
        let error = read(
            &|tensors| tensors[i] = tensor(name, Dtype::I32, &[2, 5], &[0; 40]),
            spec,
        )
        .unwrap_err();
        assert!(
            matches!(&error, CheckpointError::Shape { found, expected, .. } if found == &[2, 5] && expected != found),
            "{name}: {error}"
        );
        let retyped = |tensors: &mut Vec<TensorData>| {
            tensors[i].spec.dtype = if name == "scales" {
                Dtype::I16
            } else {
                Dtype::F32
            }
        };
        let error = read(&retyped, spec).unwrap_err();
        assert!(
            matches!(&error, CheckpointError::Dtype { tensor, .. } if tensor.ends_with(name)),
            "{name}: {error}"
        );
    }
    for (i, name, expected) in [
        (0, "qweight", "[K / values in a word, N]"),
        (3, "g_idx", "[K]"),
    ] {
        let error = read(
            &|tensors| tensors[i] = tensor(name, Dtype::I32, &[1, 1, 1], &[0; 4]),
            spec,
        )
        .unwrap_err();
        assert!(
            message(&error).contains(&format!("its shape is [1, 1, 1]; expected {expected}")),
            "{error}"
        );
    }
    let error = read(&|tensors| tensors[3].spec.dtype = Dtype::F32, spec).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Dtype { tensor, .. } if tensor.ends_with("g_idx")),
        "{error}"
    );
    // A `g_idx` that is too short for `qweight`.
    let error = read(
        &|tensors| tensors[3] = tensor("g_idx", Dtype::I32, &[32], &[0; 128]),
        spec,
    )
    .unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Shape { expected, .. } if expected == &[4, 12]),
        "{error}"
    );

    for group in [GroupSize::G64, GroupSize::G128] {
        let error = read(&|_| (), QuantSpec::int4(group).with_zero_points()).unwrap_err();
        assert!(
            matches!(&error, CheckpointError::Shape { tensor, expected, .. } if tensor.ends_with("scales") && expected == &[1, 12]),
            "{error}"
        );
    }
    let error = read(&|_| (), QuantSpec::int8(GroupSize::G32).with_zero_points()).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Shape { tensor, .. } if tensor.ends_with("qweight")),
        "{error}"
    );
    let error = read(
        &|tensors| tensors[0] = tensor("qweight", Dtype::I32, &[8, 0], &[]),
        spec,
    )
    .unwrap_err();
    assert!(
        matches!(
            &error,
            CheckpointError::Weight {
                source: FormatError::Empty { .. },
                ..
            }
        ),
        "{error}"
    );
    let infinite = |tensors: &mut Vec<TensorData>| {
        tensors[2].bytes[..2].copy_from_slice(&f16::NEG_INFINITY.to_le_bytes())
    };
    let error = read(&infinite, spec).unwrap_err();
    expect_first_scale_refused(&error);

    let (_folder, checkpoint) = checkpoint(&good);
    let error = read_layer(&checkpoint, LAYER, &LayerFormat::Float).unwrap_err();
    assert!(
        message(&error).contains(&format!("`{LAYER}` is not quantised")),
        "{error}"
    );
    assert!(layer_tensors(&checkpoint, LAYER, &LayerFormat::Float).is_empty());
}

/// F32 scales are converted where f16 or bf16 represents all of them exactly.
#[test]
fn f32_scales_are_held_in_the_narrowest_dtype_that_is_exact() {
    let spec = QuantSpec::int4(GroupSize::Channel);
    let weight = random_weight(&mut rng(), 32, 2, spec, false);
    let read = |scales: [f32; 2]| {
        let mut tensors = tensors_of(LAYER, &weight);
        tensors[2] = tensor("scales", Dtype::F32, &[1, 2], bytemuck::cast_slice(&scales));
        read(&tensors, &format(spec, GptqVersion::V2))
    };
    // A value with eleven significant bits, which f16 represents and bf16 does not.
    let fine = 1.0 + 2.0f32.powi(-10);
    for (scales, dtype) in [
        ([0.5, fine], ScaleDtype::F16),
        ([0.5, 2.0f32.powi(100)], ScaleDtype::BF16),
        ([0.5, 0.1], ScaleDtype::F32),
        ([fine, 2.0f32.powi(100)], ScaleDtype::F32),
    ] {
        let weight = read(scales).unwrap();
        assert_eq!(
            (weight.spec().scales.dtype, weight.scales().to_f32()),
            (dtype, scales.to_vec())
        );
    }
    let error = read([0.5, f32::NAN]).unwrap_err();
    assert!(message(&error).contains("finite"), "{error}");
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
    assert_eq!(
        (&config["bits"], &config["group_size"], &config["sym"]),
        (&json!(8), &json!(-1), &json!(false))
    );
    assert_eq!(
        (&config["desc_act"], &config["lm_head"]),
        (&json!(true), &json!(false))
    );
    assert_eq!(
        config["dynamic"],
        json!({ r"-:^model\.layers\.0\.mlp\.down_proj$": {}, r"+:^a\.b$": { "bits": 4, "group_size": 32 } })
    );
}
