//! Helpers for tests: random weights and folders.

use half::{bf16, f16};
use marlin_format::checkpoint::{
    Checkpoint, CheckpointError, CheckpointWriter, Dtype, LayerFormat, TensorData, TensorSpec,
    layer_tensors, read_layer,
};
use marlin_format::layout::PlainLayout;
pub use marlin_format::with_causes as message;
use marlin_format::{
    FormatError, GroupSize, PlainParts, PlainWeight, QuantSpec, ScaleDtype, Scales, WeightValue,
};
pub use marlin_testing::rng;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use tempfile::TempDir;

/// The name of the layer that tests write and read.
pub const LAYER: &str = "model.layers.0.mlp.up_proj";

/// Writes a folder with these tensors. The folder is deleted when the returned `TempDir` is
/// dropped.
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

/// Creates a tensor of [`LAYER`].
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
pub fn packed(values: &[u8], columns: usize, bits: WeightValue) -> Vec<u32> {
    let word = |values: &[u8]| {
        values
            .iter()
            .enumerate()
            .fold(0, |word, (i, &q)| word | u32::from(q) << (bits.bits() * i))
    };
    values
        .chunks(columns)
        .flat_map(|row| row.chunks(bits.per_word()).map(word))
        .collect()
}

/// Returns the values of a weight with its rows in their natural order, `[K, N]`.
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

/// Returns the group of each natural row.
pub fn natural_groups(weight: &PlainWeight) -> Vec<i32> {
    let mut groups = vec![0; weight.k()];
    for stored in 0..weight.k() {
        let natural = weight
            .row_permutation()
            .map_or(stored, |permutation| permutation[stored] as usize);
        groups[natural] = (stored / weight.spec().scales.group.rows(weight.k())) as i32;
    }
    groups
}

/// `cases` random cases. A failing one is printed whole, so nothing is kept on disk.
pub fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(marlin_testing::seed()),
        ..ProptestConfig::default()
    }
}

/// Returns every spec of integers.
pub fn all_specs() -> impl Iterator<Item = QuantSpec> {
    WeightValue::INTEGERS.into_iter().flat_map(|bits| {
        GroupSize::INTEGERS.into_iter().flat_map(move |group| {
            [false, true].into_iter().flat_map(move |zero_points| {
                [ScaleDtype::F16, ScaleDtype::BF16, ScaleDtype::F32].map(|scale_dtype| {
                    QuantSpec::new(bits, group)
                        .with_zero_point((zero_points).into())
                        .with_scale_dtype(scale_dtype)
                })
            })
        })
    })
}

/// Returns the specs of floats.
pub fn float_specs() -> [QuantSpec; 4] {
    [
        QuantSpec::fp8(),
        QuantSpec::fp8_blocks(),
        QuantSpec::nvfp4(),
        QuantSpec::mxfp4(),
    ]
}

pub fn any_spec() -> impl Strategy<Value = QuantSpec> {
    prop::sample::select(all_specs().collect::<Vec<_>>())
}

/// Generates K and N of any size below 300, and a spec. Half of the values of K are rounded up to
/// whole groups.
pub fn any_problem() -> impl Strategy<Value = (usize, usize, QuantSpec)> {
    (1..300usize, 1..300usize, any_spec(), any::<bool>()).prop_map(|(k, n, spec, whole)| {
        let k = if whole {
            k.next_multiple_of(spec.scales.group.rows(k))
        } else {
            k
        };
        (k, n, spec)
    })
}

/// Generates the same problems, half of them with floats.
pub fn any_problem_with_floats() -> impl Strategy<Value = (usize, usize, QuantSpec)> {
    let specs = prop::option::of(prop::sample::select(float_specs().to_vec()));
    (any_problem(), specs).prop_map(|((k, n, spec), floats)| (k, n, floats.unwrap_or(spec)))
}

/// Generates the same problems with 4 bits only, for formats that support no other width.
pub fn any_int4_problem() -> impl Strategy<Value = (usize, usize, QuantSpec)> {
    any_problem().prop_map(|(k, n, spec)| (k, n, spec.with_value(WeightValue::Int4)))
}

pub fn random_parts(
    rng: &mut StdRng,
    k: usize,
    n: usize,
    spec: QuantSpec,
    act_order: bool,
) -> PlainParts {
    let max = spec.value.max();
    let q: Vec<u8> = (0..k * n)
        .map(|_| rng.random_range(0..=max))
        .map(|code| if spec.value.is_nan(code) { 0 } else { code })
        .collect();
    let groups = spec.scales.group.count(k) * n;
    let scales: Vec<f32> = (0..groups).map(|_| rng.random_range(0.001..0.1)).collect();
    let mut permutation: Vec<u32> = (0..k as u32).collect();
    permutation.shuffle(rng);
    PlainParts {
        k,
        n,
        spec,
        qweight: PlainLayout::new(k, n, spec.value).pack_with(|row, column| q[row * n + column]),
        metadata: None,
        scales: Scales::from_f32(&scales, spec.scales.dtype),
        zero_points: spec
            .has_zero_points()
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

/// Returns a dense weight in which at least two of every four rows are zero, at random.
pub fn sparse_weight(rng: &mut StdRng, k: usize, n: usize, spec: QuantSpec) -> PlainWeight {
    let weight = random_weight(rng, k, n, spec, false);
    let layout = weight.layout();
    let mut parts = weight.into_parts();
    for row in (0..k).step_by(4) {
        for column in 0..n {
            let group = row / spec.scales.group.rows(k);
            let zero = parts
                .zero_points
                .as_ref()
                .map_or(spec.value.midpoint(), |zeros| zeros[group * n + column]);
            let first = rng.random_range(0..4);
            let second = (first + rng.random_range(1..4)) % 4;
            for pruned in [first, second]
                .into_iter()
                .chain(rng.random_bool(0.1).then(|| rng.random_range(0..4)))
            {
                layout
                    .index(row + pruned, column)
                    .write(&mut parts.qweight, zero);
            }
        }
    }
    PlainWeight::new(parts).unwrap()
}

/// Checks that a weight written by `tensors_of` is the same when read again. For an act-order
/// weight, the order of rows within a group may change once. The scale dtype is that of the file,
/// independent of `format`.
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

/// Returns `count` scales 1, 2, 3, ..., which are all different below 256 (bf16) or 2048 (f16).
pub fn numbered_scales(count: usize, dtype: ScaleDtype) -> Scales {
    match dtype {
        ScaleDtype::F16 => Scales::F16((1..=count).map(|i| f16::from_f32(i as f32)).collect()),
        ScaleDtype::BF16 => Scales::BF16((1..=count).map(|i| bf16::from_f32(i as f32)).collect()),
        ScaleDtype::F32 => Scales::F32((1..=count).map(|i| i as f32).collect()),
    }
}

/// Checks that an error names a tensor of [`LAYER`] that is missing.
#[track_caller]
pub fn expect_missing(error: &CheckpointError, name: &str) {
    assert!(
        matches!(error, CheckpointError::MissingTensor { tensor, .. } if *tensor == format!("{LAYER}.{name}")),
        "{error}"
    );
}

/// Checks that an error is about the first scale, which is not finite.
#[track_caller]
pub fn expect_first_scale_refused(error: &CheckpointError) {
    let CheckpointError::Weight { source, .. } = error else {
        panic!("{error}")
    };
    let is_first = matches!(
        source,
        FormatError::NonFiniteScale {
            group: 0,
            column: 0,
            ..
        }
    );
    assert!(is_first, "{error}");
}

/// Checks that all tensors of a folder belong to [`LAYER`], and that its weight is as expected.
#[track_caller]
pub fn expect_layer(tensors: &[TensorData], format: &LayerFormat, expected: &PlainWeight) {
    let (_folder, checkpoint) = checkpoint(tensors);
    assert_eq!(&read_layer(&checkpoint, LAYER, format).unwrap(), expected);
    let mut names = layer_tensors(&checkpoint, LAYER, format);
    names.sort();
    assert_eq!(names, checkpoint.names().collect::<Vec<_>>());
}

/// Checks a weight of floats value by value. `code(row, column)` and `scale(row, column)` are those
/// of a row, an output feature, and a column, an input feature, of the file.
pub fn expect_floats(
    weight: &PlainWeight,
    [n, k]: [usize; 2],
    code: impl Fn(usize, usize) -> u8,
    scale: impl Fn(usize, usize) -> f32,
) {
    assert_eq!((weight.n(), weight.k()), (n, k));
    let (value, found) = (weight.spec().value, weight.dequantize());
    for row in 0..n {
        for column in 0..k {
            let code = code(row, column);
            assert_eq!(weight.q(column, row), code, "row {row}, column {column}");
            let expected = value.decode(code) * scale(row, column);
            assert_eq!(
                found[column * n + row].to_bits(),
                expected.to_bits(),
                "row {row}, column {column}"
            );
        }
    }
}
