//! Random weights and folders.

#[path = "../../../../tests/src/seed.rs"]
mod seed;

use half::{bf16, f16};
use marlin_format::checkpoint::{
    Checkpoint, CheckpointWriter, Dtype, LayerFormat, TensorData, TensorSpec, layer_tensors,
    read_layer,
};
use marlin_format::layout::PlainLayout;
use marlin_format::{Bits, GroupSize, PlainParts, PlainWeight, QuantSpec, ScaleDtype, Scales};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use tempfile::TempDir;

/// The layer that tests write and read.
pub const LAYER: &str = "model.layers.0.mlp.up_proj";

/// A folder with these tensors. It lasts as long as the first of the two.
pub fn checkpoint(tensors: &[TensorData]) -> (TempDir, Checkpoint) {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("model");
    let mut writer = CheckpointWriter::create(&dir).unwrap();
    writer
        .declare(tensors.iter().map(|tensor| tensor.spec.clone()))
        .unwrap();
    tensors.iter().for_each(|tensor| {
        writer
            .write_tensor(&tensor.spec.name, &tensor.bytes)
            .unwrap()
    });
    writer.finish().unwrap();
    (parent, Checkpoint::open(dir).unwrap())
}

/// A tensor of [`LAYER`].
pub fn tensor(name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> TensorData {
    TensorData {
        spec: TensorSpec::new(format!("{LAYER}.{name}"), dtype, shape),
        bytes: bytes.to_vec(),
    }
}

pub fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Values packed into words along the last axis of rows of `columns`, the first lowest; padding is
/// 0.
pub fn packed(values: &[u8], columns: usize, bits: Bits) -> Vec<u32> {
    let word = |values: &[u8]| {
        values
            .iter()
            .enumerate()
            .fold(0, |word, (i, &q)| word | u32::from(q) << (bits.count() * i))
    };
    values
        .chunks(columns)
        .flat_map(|row| row.chunks(bits.per_word()).map(word))
        .collect()
}

/// The values of a weight with its rows in their natural order, `[K, N]`.
pub fn natural_values(weight: &PlainWeight) -> Vec<u8> {
    let (k, n) = (weight.k(), weight.n());
    let mut values = vec![0; k * n];
    for stored in 0..k {
        let natural = weight
            .row_permutation()
            .map_or(stored, |permutation| permutation[stored] as usize);
        (0..n).for_each(|column| values[natural * n + column] = weight.q(stored, column));
    }
    values
}

/// The group of each natural row.
pub fn natural_groups(weight: &PlainWeight) -> Vec<i32> {
    let mut groups = vec![0; weight.k()];
    for stored in 0..weight.k() {
        let natural = weight
            .row_permutation()
            .map_or(stored, |permutation| permutation[stored] as usize);
        groups[natural] = (stored / weight.spec().group.rows(weight.k())) as i32;
    }
    groups
}

/// A random number generator, whose seed a failing test shows.
pub fn rng() -> StdRng {
    StdRng::seed_from_u64(seed::seed())
}

/// `cases` random cases. A failing one is printed whole, so nothing is kept on disk.
pub fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(seed::seed()),
        ..ProptestConfig::default()
    }
}

/// Every way to quantise.
pub fn all_specs() -> impl Iterator<Item = QuantSpec> {
    Bits::ALL.into_iter().flat_map(|bits| {
        GroupSize::ALL.into_iter().flat_map(move |group| {
            [false, true].into_iter().flat_map(move |zero_points| {
                [ScaleDtype::F16, ScaleDtype::BF16, ScaleDtype::F32].map(|scale_dtype| QuantSpec {
                    bits,
                    group,
                    zero_points,
                    scale_dtype,
                })
            })
        })
    })
}

pub fn any_spec() -> impl Strategy<Value = QuantSpec> {
    prop::sample::select(all_specs().collect::<Vec<_>>())
}

/// K and N of any size up to 300, and a spec; half of the K are rounded up to whole groups.
pub fn any_problem() -> impl Strategy<Value = (usize, usize, QuantSpec)> {
    (1..300usize, 1..300usize, any_spec(), any::<bool>()).prop_map(|(k, n, spec, whole)| {
        let k = if whole {
            k.next_multiple_of(spec.group.rows(k))
        } else {
            k
        };
        (k, n, spec)
    })
}

/// The same, only of 4 bits, for formats that hold no others.
pub fn any_int4_problem() -> impl Strategy<Value = (usize, usize, QuantSpec)> {
    any_problem().prop_map(|(k, n, spec)| {
        (
            k,
            n,
            QuantSpec {
                bits: Bits::Four,
                ..spec
            },
        )
    })
}

pub fn random_parts(
    rng: &mut StdRng,
    k: usize,
    n: usize,
    spec: QuantSpec,
    act_order: bool,
) -> PlainParts {
    let max = spec.bits.max();
    let q: Vec<u8> = (0..k * n).map(|_| rng.random_range(0..=max)).collect();
    let groups = spec.group.count(k) * n;
    let scales: Vec<f32> = (0..groups).map(|_| rng.random_range(0.001..0.1)).collect();
    let mut permutation: Vec<u32> = (0..k as u32).collect();
    permutation.shuffle(rng);
    PlainParts {
        k,
        n,
        spec,
        words: PlainLayout::new(k, n, spec.bits).pack_with(|row, column| q[row * n + column]),
        metadata: None,
        scales: Scales::from_f32(&scales, spec.scale_dtype),
        zero_points: spec
            .zero_points
            .then(|| (0..groups).map(|_| rng.random_range(0..=max)).collect()),
        row_permutation: act_order.then_some(permutation),
    }
}

pub fn random_weight(
    rng: &mut StdRng,
    k: usize,
    n: usize,
    spec: QuantSpec,
    act_order: bool,
) -> PlainWeight {
    PlainWeight::new(random_parts(rng, k, n, spec, act_order)).unwrap()
}

/// A dense weight of which two of every four rows are zero, at random; sometimes more.
pub fn sparse_weight(rng: &mut StdRng, k: usize, n: usize, spec: QuantSpec) -> PlainWeight {
    let weight = random_weight(rng, k, n, spec, false);
    let layout = weight.layout();
    let mut parts = weight.into_parts();
    for row in (0..k).step_by(4) {
        for column in 0..n {
            let group = row / spec.group.rows(k);
            let zero = parts
                .zero_points
                .as_ref()
                .map_or(spec.bits.midpoint(), |zeros| zeros[group * n + column]);
            let first = rng.random_range(0..4);
            let second = (first + rng.random_range(1..4)) % 4;
            for pruned in [first, second]
                .into_iter()
                .chain(rng.random_bool(0.1).then(|| rng.random_range(0..4)))
            {
                layout
                    .index(row + pruned, column)
                    .write(&mut parts.words, zero);
            }
        }
    }
    PlainWeight::new(parts).unwrap()
}

/// Written as `tensors_of` says and read again, a weight is the same; of an act-order one the order
/// of rows inside a group may change, once. The dtype of scales is the file's, whatever `format`
/// has.
pub fn comes_back(
    weight: &PlainWeight,
    format: &LayerFormat,
    tensors_of: impl Fn(&str, &PlainWeight) -> Vec<TensorData>,
) -> Result<(), TestCaseError> {
    let (_folder, written) = checkpoint(&tensors_of(LAYER, weight));
    let back = read_layer(&written, LAYER, format).unwrap();
    prop_assert_eq!(
        (back.k(), back.n(), back.spec()),
        (weight.k(), weight.n(), weight.spec())
    );
    prop_assert_eq!(back.dequantize(), weight.dequantize());
    if weight.row_permutation().is_none() {
        prop_assert_eq!(&back, weight);
    }
    let (_folder, again) = checkpoint(&tensors_of(LAYER, &back));
    prop_assert_eq!(read_layer(&again, LAYER, format).unwrap(), back);

    let mut tensors = layer_tensors(&written, LAYER, format);
    tensors.sort_unstable();
    prop_assert_eq!(tensors, written.names().collect::<Vec<_>>());
    Ok(())
}

/// `count` scales of 1, 2, 3, ...: all different while below 256 (bf16) or 2048 (f16).
pub fn numbered_scales(count: usize, dtype: ScaleDtype) -> Scales {
    match dtype {
        ScaleDtype::F16 => Scales::F16((1..=count).map(|i| f16::from_f32(i as f32)).collect()),
        ScaleDtype::BF16 => Scales::BF16((1..=count).map(|i| bf16::from_f32(i as f32)).collect()),
        ScaleDtype::F32 => Scales::F32((1..=count).map(|i| i as f32).collect()),
    }
}

/// An error and its causes, as one text.
pub fn message(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes
        .map(|error| error.to_string())
        .collect::<Vec<_>>()
        .join(": ")
}
