use std::collections::HashSet;

use marlin_format::checkpoint::{
    CheckpointError, Dtype, LayerFormat, Marlin24Names, TensorData, layer_tensors, marlin24,
    read_layer,
};
use marlin_format::layout::Marlin24Layout;
use marlin_format::{
    FormatError, GroupSize, PlainWeight, QuantSpec, ScaleDtype, Scales, Sparsity, WeightValue,
};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::common::{
    LAYER, cases, checkpoint, expect_missing, message, natural_values, packed, random_weight, rng,
    sparse_weight, tensor, words,
};

const NAMES: [Marlin24Names; 2] = [Marlin24Names::CompressedTensors, Marlin24Names::Gptq];

/// Returns the tensors of the published packers, computed step by step as in their Python code.
pub fn published(weight: &PlainWeight, names: Marlin24Names) -> Vec<TensorData> {
    let (k, n, spec) = (weight.k(), weight.n(), weight.spec());
    let (bits, zero) = (spec.value, spec.value.midpoint());
    let values = natural_values(weight);

    // sparse_semi_structured_from_dense: keeps two of every four values in a row of [N, K], and
    // their indices.
    let (mut kept, mut metadata) = (vec![0; k / 2 * n], vec![0u16; n * k / 16]);
    for column in 0..n {
        for four in 0..k / 4 {
            let value = |i: usize| values[(4 * four + i) * n + column];
            let places = [0, 1, 2, 3].map(|i| value(i) != zero);
            let (first, second) = match places {
                [true, true, _, _] => (0, 1),
                [true, false, true, false] | [true, false, false, false] => (0, 2),
                [true, false, _, true] => (0, 3),
                [false, true, true, false] | [false, true, false, false] => (1, 2),
                [false, true, _, true] => (1, 3),
                [false, false, _, _] => (2, 3),
            };
            kept[(2 * four) * n + column] = value(first);
            kept[(2 * four + 1) * n + column] = value(second);
            metadata[column * (k / 16) + four / 4] |=
                ((first | second << 2) as u16) << (4 * (four % 4));
        }
    }
    // _calculate_meta_reordering_scatter_offsets, for 16-bit metadata.
    let mut reordered = vec![0u16; metadata.len()];
    for column in 0..n {
        for sixteen in 0..k / 16 {
            let row = column / 64 * 64
                + (column % 2) * 2
                + (column % 8) / 4
                + ((column % 32) % 4) / 2 * 32
                + ((column % 64) / 8) * 4;
            let top_right = usize::from(row % 2 == 0 && sixteen % 2 == 1);
            let bottom_left = usize::from(row % 2 == 1 && sixteen % 2 == 0);
            let (row, place) = (
                row + top_right - bottom_left,
                sixteen - top_right + bottom_left,
            );
            reordered[place / 2 * n * 2 + row * 2 + place % 2] =
                metadata[column * (k / 16) + sixteen];
        }
    }

    // get_permutations_24 and marlin_permute_weights.
    let interleave: &[usize] = if bits == WeightValue::Int4 {
        &[0, 2, 4, 6, 1, 3, 5, 7]
    } else {
        &[0, 2, 1, 3]
    };
    let mut permutation = Vec::new();
    for lane in 0..32 {
        let (column, mut values) = (lane / 4, Vec::new());
        for block in [0, 1] {
            for row in [
                2 * (lane % 4),
                2 * (lane % 4) + 1,
                2 * (lane % 4 + 4),
                2 * (lane % 4 + 4) + 1,
            ] {
                values.push(16 * row + column / 2 * 256 + 8 * (column % 2) + 4 * block);
            }
        }
        (0..4).for_each(|j| permutation.extend(values.iter().map(|value| value + j)));
    }
    let permutation: Vec<usize> = permutation
        .chunks(interleave.len())
        .flat_map(|chunk| interleave.iter().map(|&i| chunk[i]).collect::<Vec<_>>())
        .collect();
    let mut permuted = Vec::new();
    for tile_row in 0..k / 32 {
        let flat: Vec<u8> = (0..16 * n)
            .map(|i| kept[(16 * tile_row + i % 256 / 16) * n + i / 256 * 16 + i % 16])
            .collect();
        permuted.extend((0..16 * n).map(|i| flat[i / 1024 * 1024 + permutation[i % 1024]]));
    }

    // pack_scales_24: compressed-tensors compares the group size with the kept K, GPTQ with the
    // whole K.
    let k_compared = if names == Marlin24Names::Gptq {
        k
    } else {
        k / 2
    };
    let grouped = spec.scales.group.rows(k) < k_compared;
    let order: [usize; 8] = if grouped {
        [0, 4, 1, 5, 2, 6, 3, 7]
    } else {
        [0, 1, 2, 3, 4, 5, 6, 7]
    };
    let scales: Vec<f32> = (0..weight.scales().len())
        .map(|i| weight.scales().get(i / 8 * 8 + order[i % 8]))
        .collect();

    let [weight_name, metadata_name, scale_name] = match names {
        Marlin24Names::CompressedTensors => ["weight_packed", "meta", "scale_packed"],
        Marlin24Names::Gptq => ["B_24", "B_meta", "s"],
    };
    let scales = Scales::from_f32(&scales, spec.scales.dtype);
    vec![
        tensor(
            weight_name,
            Dtype::I32,
            &[k / 32, 16 * n / bits.per_word()],
            &words(&packed(&permuted, 16 * n, bits)),
        ),
        tensor(
            metadata_name,
            Dtype::I16,
            &[k / 32, 2 * n],
            bytemuck::cast_slice(&reordered),
        ),
        tensor(
            scale_name,
            spec.scales.dtype.into(),
            &[spec.scales.group.count(k), n],
            scales.as_bytes(),
        ),
    ]
}

fn any_sparse_problem() -> impl Strategy<Value = (usize, usize, QuantSpec)> {
    let group = prop::sample::select(vec![GroupSize::Channel, GroupSize::G128]);
    (
        1..20usize,
        1..4usize,
        group,
        prop::sample::select(WeightValue::INTEGERS.to_vec()),
    )
        .prop_map(|(k, n, group, bits)| (32 * k, 64 * n, QuantSpec::new(bits, group)))
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn weights_come_back((k, n, spec) in any_sparse_problem(), seed: u64) {
        let weight = sparse_weight(&mut StdRng::seed_from_u64(seed), k, n, spec);
        for names in NAMES {
            let (_folder, checkpoint) = checkpoint(&published(&weight, names));
            let format = LayerFormat::Marlin24(spec.with_scale_dtype(ScaleDtype::F16), names);
            let read = read_layer(&checkpoint, LAYER, &format).unwrap();
            prop_assert_eq!(read.sparsity(), Sparsity::TwoFour);
            prop_assert_eq!(&*read.to_dense(), &weight);
            prop_assert_eq!(layer_tensors(&checkpoint, LAYER, &format).len(), 3);
        }
    }
}

proptest! {
    #![proptest_config(cases(60))]

    /// Compares the metadata, too: if fewer than two values are nonzero, the same zero rows must be
    /// stored as by the packers.
    #[test]
    fn a_weight_is_written_as_the_packer_writes_it((k, n, spec) in any_sparse_problem(), seed: u64) {
        let weight = sparse_weight(&mut StdRng::seed_from_u64(seed), k, n, spec);
        let names = Marlin24Names::CompressedTensors;
        let theirs = published(&weight, names);
        let (_folder, folder) = checkpoint(&theirs);
        let read = read_layer(&folder, LAYER, &LayerFormat::Marlin24(spec, names)).unwrap();
        prop_assert_eq!(marlin24::tensors_of(LAYER, &read).unwrap(), theirs);
        let (_folder, folder) = checkpoint(&marlin24::tensors_of(LAYER, &weight).unwrap());
        let read = read_layer(&folder, LAYER, &LayerFormat::Marlin24(spec, names)).unwrap();
        prop_assert_eq!(&*read.to_dense(), &weight);
    }
}

#[test]
fn what_the_published_files_do_not_hold_is_refused() {
    let rng = &mut rng();
    let write = |weight: &PlainWeight| marlin24::tensors_of(LAYER, weight).map(|_| ());
    let spec = QuantSpec::int4(GroupSize::G128);
    assert_eq!(write(&sparse_weight(rng, 128, 64, spec)), Ok(()));
    for found in [QuantSpec::int4(GroupSize::G64), spec.with_zero_points()] {
        assert_eq!(
            write(&sparse_weight(rng, 128, 64, found)),
            Err(FormatError::Marlin24Spec { found })
        );
    }
    let found = QuantSpec::fp8();
    assert_eq!(
        marlin24::check(128, 64, &found),
        Err(FormatError::Marlin24Spec { found })
    );
    let error = write(&sparse_weight(rng, 144, 64, spec));
    assert_eq!(
        error,
        Err(FormatError::TileDoesNotDivide {
            axis: "K",
            extent: 144,
            tile: 32
        })
    );
    let error = write(&random_weight(rng, 128, 64, spec, false)).unwrap_err();
    assert!(matches!(error, FormatError::NotTwoFour { .. }), "{error}");
}

/// Tests two groups, whose scales only one of the packers permutes.
#[test]
fn two_groups_of_each_packer() {
    let spec = QuantSpec::int4(GroupSize::G128);
    let weight = sparse_weight(&mut rng(), 256, 64, spec);
    let [ours, theirs] = NAMES.map(|names| published(&weight, names)[2].bytes.clone());
    assert_ne!(ours, theirs);
    for names in NAMES {
        let (_folder, checkpoint) = checkpoint(&published(&weight, names));
        assert_eq!(
            read_layer(&checkpoint, LAYER, &LayerFormat::Marlin24(spec, names))
                .unwrap()
                .into_dense(),
            weight
        );
    }
}

#[test]
fn every_place_holds_one_value() {
    let (k, n) = (96, 128);
    for bits in WeightValue::INTEGERS {
        let layout = Marlin24Layout::new(k, n, bits).unwrap();
        let [rows, columns] = layout.shape();
        let places: HashSet<_> = (0..k / 2)
            .flat_map(|row| (0..n).map(move |column| layout.index(row, column)))
            .collect();
        assert_eq!(places.len(), k / 2 * n);
        assert_eq!(places.len(), rows * columns * bits.per_word());
        assert!(
            places
                .iter()
                .all(|place| place.word < rows * columns && place.slot < bits.per_word())
        );

        let [rows, columns] = layout.metadata_shape();
        let places: HashSet<_> = (0..k / 16)
            .flat_map(|sixteen| (0..n).map(move |column| layout.metadata_index(sixteen, column)))
            .collect();
        assert_eq!(
            (places.len(), places.into_iter().max()),
            (rows * columns, Some(rows * columns - 1))
        );
    }
    // As the table in the docs has them.
    let layout = Marlin24Layout::new(32, 64, WeightValue::Int4).unwrap();
    let columns = [0, 1, 2, 3, 4, 5, 6, 7, 8, 63];
    assert_eq!(
        columns.map(|column| layout.metadata_index(0, column)),
        [0, 4, 64, 68, 1, 5, 65, 69, 8, 125]
    );
    assert_eq!(
        columns.map(|column| layout.metadata_index(1, column)),
        [2, 6, 66, 70, 3, 7, 67, 71, 10, 127]
    );
    let error = Marlin24Layout::new(48, 64, WeightValue::Int4).unwrap_err();
    assert_eq!(
        error,
        FormatError::TileDoesNotDivide {
            axis: "K",
            extent: 48,
            tile: 32
        }
    );
}

#[test]
fn inconsistent_layers_are_refused() {
    let spec = QuantSpec::int4(GroupSize::G128);
    let names = Marlin24Names::CompressedTensors;
    let good = published(&sparse_weight(&mut rng(), 256, 64, spec), names);
    let read = |change: &dyn Fn(&mut Vec<TensorData>), spec: QuantSpec| {
        let mut tensors = good.clone();
        change(&mut tensors);
        let (_folder, checkpoint) = checkpoint(&tensors);
        read_layer(&checkpoint, LAYER, &LayerFormat::Marlin24(spec, names)).map(|_| ())
    };
    read(&|_| (), spec).unwrap();
    for (i, name) in ["weight_packed", "meta", "scale_packed"]
        .into_iter()
        .enumerate()
    {
        let error = read(&|tensors| drop(tensors.remove(i)), spec).unwrap_err();
        expect_missing(&error, name);
        let retyped = |tensors: &mut Vec<TensorData>| {
            tensors[i].spec.dtype = if i == 0 { Dtype::F32 } else { Dtype::U16 }
        };
        assert!(
            matches!(read(&retyped, spec).unwrap_err(), CheckpointError::Dtype { tensor, .. } if tensor.ends_with(name))
        );
    }
    for (i, name) in [(0, "weight_packed"), (2, "scale_packed")] {
        let error = read(
            &|tensors| tensors[i] = tensor(name, Dtype::I32, &[1, 1], &[0; 4]),
            spec,
        )
        .unwrap_err();
        assert!(
            matches!(&error, CheckpointError::Shape { tensor, .. } if tensor.ends_with(name)),
            "{error}"
        );
    }
    let error = read(
        &|tensors| tensors[1] = tensor("meta", Dtype::I16, &[8, 64], &[0; 1024]),
        spec,
    )
    .unwrap_err();
    assert!(
        matches!(
            &error,
            CheckpointError::Weight {
                source: FormatError::TileDoesNotDivide {
                    axis: "N",
                    extent: 32,
                    ..
                },
                ..
            }
        ),
        "{error}"
    );

    // The same row twice, and rows in descending order.
    for byte in [0x45, 0x14] {
        let error = read(&|tensors| tensors[1].bytes[77] = byte, spec).unwrap_err();
        assert!(matches!(&error, CheckpointError::Values { .. }), "{error}");
        assert!(
            message(&error).contains("meta")
                && message(&error).contains(&format!("byte 77 is {byte:#04x}")),
            "{error}"
        );
    }
    let error = read(&|_| (), spec.with_zero_points()).unwrap_err();
    assert!(matches!(&error, CheckpointError::Spec { .. }), "{error}");
    let error = read(&|_| (), QuantSpec::int8(GroupSize::G128)).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Shape { tensor, .. } if tensor.ends_with("weight_packed")),
        "{error}"
    );
}
