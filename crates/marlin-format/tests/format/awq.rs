use marlin_format::checkpoint::{
    CheckpointError, Dtype, LayerFormat, TensorData, layer_tensors, read_layer,
};
use marlin_format::{GroupSize, PlainWeight, QuantSpec, ScaleDtype, Scales, WeightValue};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::common::{
    LAYER, any_int4_problem, cases, checkpoint, expect_missing, message, natural_values, packed,
    random_weight, rng, tensor, words,
};

/// The column of each nibble of a word, as in AutoAWQ.
const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

fn interleaved(values: &[u8], n: usize) -> Vec<u8> {
    let reordered: Vec<u8> = (0..values.len())
        .map(|i| values[i / 8 * 8 + ORDER[i % 8]])
        .collect();
    words(&packed(&reordered, n, WeightValue::Int4))
}

pub fn published(weight: &PlainWeight) -> Vec<TensorData> {
    let (k, n, spec) = (weight.k(), weight.n(), weight.spec());
    let groups = spec.scales.group.count(k);
    let mut tensors = vec![
        tensor(
            "qweight",
            Dtype::I32,
            &[k, n / 8],
            &interleaved(&natural_values(weight), n),
        ),
        tensor(
            "scales",
            spec.scales.dtype.into(),
            &[groups, n],
            weight.scales().as_bytes(),
        ),
    ];
    if let Some(zero_points) = weight.zero_points() {
        tensors.push(tensor(
            "qzeros",
            Dtype::I32,
            &[groups, n / 8],
            &interleaved(zero_points, n),
        ));
    }
    tensors
}

fn read(tensors: &[TensorData], spec: QuantSpec) -> Result<PlainWeight, CheckpointError> {
    let (_folder, checkpoint) = checkpoint(tensors);
    read_layer(&checkpoint, LAYER, &LayerFormat::Awq(spec))
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn weights_come_back((k, n, spec) in any_int4_problem(), seed: u64) {
        let n = n.next_multiple_of(8);
        let weight = random_weight(&mut StdRng::seed_from_u64(seed), k, n, spec, false);
        let (_folder, checkpoint) = checkpoint(&published(&weight));
        let format = LayerFormat::Awq(spec.with_scale_dtype(ScaleDtype::F16));
        prop_assert_eq!(read_layer(&checkpoint, LAYER, &format).unwrap(), weight);
        prop_assert_eq!(layer_tensors(&checkpoint, LAYER, &format).len(), 2 + usize::from(spec.has_zero_points()));
    }
}

/// Reads a layer of K = 9, N = 8, channel-wise, from hand-written bytes.
#[test]
fn a_small_layer_by_hand() {
    let mut rows = vec![0x7531_6420; 8];
    rows.push(0xfedc_ba98);
    let tensors = [
        tensor("qweight", Dtype::I32, &[9, 1], &words(&rows)),
        tensor("qzeros", Dtype::I32, &[1, 1], &words(&[0x0000_0010])),
        tensor(
            "scales",
            Dtype::BF16,
            &[1, 8],
            Scales::from_f32(&[1.0; 8], ScaleDtype::BF16).as_bytes(),
        ),
    ];
    let weight = read(
        &tensors,
        QuantSpec::int4(GroupSize::Channel).with_zero_points(),
    )
    .unwrap();
    assert_eq!(
        (weight.k(), weight.n(), weight.zero_points().unwrap()),
        (9, 8, &[0, 0, 1, 0, 0, 0, 0, 0][..])
    );
    let dequantized = weight.dequantize();
    assert_eq!(dequantized[..8], [0.0, 1.0, 1.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    assert_eq!(
        dequantized[64..],
        [8.0, 12.0, 8.0, 13.0, 10.0, 14.0, 11.0, 15.0]
    );
    // Past K is padding.
    assert_eq!(weight.qweight()[9], 0x8888_888c);
}

#[test]
fn inconsistent_layers_are_refused() {
    let spec = QuantSpec::int4(GroupSize::G32).with_zero_points();
    let good = published(&random_weight(&mut rng(), 64, 16, spec, false));
    let changed = |change: &dyn Fn(&mut Vec<TensorData>), spec: QuantSpec| {
        let mut tensors = good.clone();
        change(&mut tensors);
        read(&tensors, spec).map(|_| ())
    };
    changed(&|_| (), spec).unwrap();

    for (i, name) in ["qweight", "scales"].into_iter().enumerate() {
        let error = changed(&|tensors| drop(tensors.remove(i)), spec).unwrap_err();
        expect_missing(&error, name);
    }
    for (i, name) in ["qweight", "scales", "qzeros"].into_iter().enumerate() {
        let error = changed(
            &|tensors| {
                tensors[i].spec.dtype = if name == "scales" {
                    Dtype::I16
                } else {
                    Dtype::F32
                }
            },
            spec,
        )
        .unwrap_err();
        assert!(
            matches!(&error, CheckpointError::Dtype { tensor, .. } if tensor.ends_with(name)),
            "{error}"
        );
    }
    for (i, name) in [(1, "scales"), (2, "qzeros")] {
        let error = changed(
            &|tensors| tensors[i] = tensor(name, Dtype::I32, &[3, 1], &[0; 12]),
            spec,
        )
        .unwrap_err();
        assert!(
            matches!(&error, CheckpointError::Shape { tensor, .. } if tensor.ends_with(name)),
            "{error}"
        );
    }

    // Zero points that are present against the config, and absent against the config.
    let error = changed(&|_| (), QuantSpec::int4(GroupSize::G32)).unwrap_err();
    assert!(
        matches!(error, CheckpointError::UnexpectedZeroPoints { .. }),
        "{error}"
    );
    assert!(
        message(&error).contains(&format!("{LAYER}.qzeros"))
            && message(&error).contains("`zero_point` true"),
        "{error}"
    );
    let error = changed(&|tensors| drop(tensors.remove(2)), spec).unwrap_err();
    assert!(
        matches!(error, CheckpointError::MissingZeroPoints { .. }),
        "{error}"
    );
    assert!(
        message(&error).contains(&format!("{LAYER}.qzeros"))
            && message(&error).contains("`zero_point` false"),
        "{error}"
    );

    let error = changed(&|_| (), QuantSpec::int4(GroupSize::G128).with_zero_points()).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Shape { expected, .. } if expected == &[1, 16]),
        "{error}"
    );
    let error = changed(&|_| (), QuantSpec::int8(GroupSize::G32).with_zero_points()).unwrap_err();
    assert!(matches!(&error, CheckpointError::Spec { .. }), "{error}");
    assert!(
        message(&error).contains("AWQ holds 4-bit weights") && message(&error).contains("int8 g32"),
        "{error}"
    );
    let error = changed(
        &|tensors| tensors[0] = tensor("qweight", Dtype::I32, &[64], &[0; 256]),
        spec,
    )
    .unwrap_err();
    assert!(
        message(&error).contains("its shape is [64]; expected [K, N/8]"),
        "{error}"
    );
}

/// GPTQModel writes `zero_point: false` for a symmetric layer, but stores its zero points.
#[test]
fn zero_points_of_a_symmetric_layer_may_be_there_if_each_is_8() {
    let spec = QuantSpec::int4(GroupSize::G32);
    let weight = random_weight(&mut rng(), 64, 16, spec, false);
    let mut tensors = published(&weight);
    let mut zero_points = vec![8; 2 * 16];
    tensors.push(tensor(
        "qzeros",
        Dtype::I32,
        &[2, 2],
        &interleaved(&zero_points, 16),
    ));
    assert_eq!(read(&tensors, spec).unwrap(), weight);

    zero_points[17] = 7;
    tensors[2] = tensor(
        "qzeros",
        Dtype::I32,
        &[2, 2],
        &interleaved(&zero_points, 16),
    );
    let error = read(&tensors, spec).unwrap_err();
    assert!(
        matches!(error, CheckpointError::UnexpectedZeroPoints { .. }),
        "{error}"
    );
}
