use marlin_format::checkpoint::{
    CheckpointError, Dtype, LayerFormat, TensorData, layer_tensors, read_layer,
};
use marlin_format::layout::{MarlinLayout, ScaleLayout};
use marlin_format::{GroupSize, PlainWeight, QuantSpec, ScaleDtype};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::common::{
    LAYER, any_int4_problem, cases, checkpoint, expect_missing, message, random_weight, rng,
    tensor, words,
};

/// Returns the tensors of a Marlin file, in the layouts that `layouts.rs` compares with the
/// published packer.
pub fn published(weight: &PlainWeight) -> Vec<TensorData> {
    let (k, n, spec) = (weight.k(), weight.n(), weight.spec());
    let layout = MarlinLayout::new(k, n);
    let scales = ScaleLayout::new(&layout, spec.scales.group)
        .pack(weight.scales())
        .unwrap();
    vec![
        tensor(
            "B",
            Dtype::I32,
            &[k / 16, 2 * n],
            &words(&layout.pack(weight).unwrap()),
        ),
        tensor(
            "s",
            spec.scales.dtype.into(),
            &[spec.scales.group.count(k), n],
            scales.as_bytes(),
        ),
    ]
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn weights_come_back((k, n, spec) in any_int4_problem(), seed: u64) {
        let spec = spec.with_zero_point(false.into());
        let weight = random_weight(&mut StdRng::seed_from_u64(seed), k.next_multiple_of(16), n.next_multiple_of(64), spec, false);
        let (_folder, checkpoint) = checkpoint(&published(&weight));
        let format = LayerFormat::Marlin(spec.with_scale_dtype(ScaleDtype::F16));
        prop_assert_eq!(read_layer(&checkpoint, LAYER, &format).unwrap(), weight);
        prop_assert_eq!(layer_tensors(&checkpoint, LAYER, &format), [format!("{LAYER}.B"), format!("{LAYER}.s")]);
    }
}

#[test]
fn inconsistent_layers_are_refused() {
    let spec = QuantSpec::int4(GroupSize::G128);
    let good = published(&random_weight(&mut rng(), 256, 64, spec, false));
    let read = |change: &dyn Fn(&mut Vec<TensorData>), spec: QuantSpec| {
        let mut tensors = good.clone();
        change(&mut tensors);
        let (_folder, checkpoint) = checkpoint(&tensors);
        read_layer(&checkpoint, LAYER, &LayerFormat::Marlin(spec)).map(|_| ())
    };
    read(&|_| (), spec).unwrap();
    for (i, name) in ["B", "s"].into_iter().enumerate() {
        let error = read(&|tensors| drop(tensors.remove(i)), spec).unwrap_err();
        expect_missing(&error, name);
        let error = read(
            &|tensors| tensors[i].spec.dtype = if i == 0 { Dtype::F32 } else { Dtype::I16 },
            spec,
        )
        .unwrap_err();
        assert!(
            matches!(&error, CheckpointError::Dtype { tensor, .. } if tensor.ends_with(name)),
            "{error}"
        );
    }
    let error = read(
        &|tensors| tensors[1] = tensor("s", Dtype::F16, &[1, 64], &[0; 128]),
        spec,
    )
    .unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Shape { expected, .. } if expected == &[2, 64]),
        "{error}"
    );
    let error = read(
        &|tensors| tensors[0] = tensor("B", Dtype::I32, &[16, 32], &[0; 2048]),
        spec,
    )
    .unwrap_err();
    assert!(
        message(&error).contains("its shape is [16, 32]; expected [K/16, 2N], N a multiple of 64"),
        "{error}"
    );
    for spec in [spec.with_zero_points(), QuantSpec::int8(GroupSize::G128)] {
        let error = read(&|_| (), spec).unwrap_err();
        assert!(matches!(&error, CheckpointError::Spec { .. }), "{error}");
        assert!(
            message(&error).contains("Marlin holds symmetric 4-bit weights"),
            "{error}"
        );
    }
}
