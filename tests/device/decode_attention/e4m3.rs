//! Attention over a cache in e4m3, and the kernels between such a cache and the workspace of
//! prompts.

use super::bench::{ARRIVAL_COUNTERS, Bench, KEYS, OUT, VALUES};
use super::operands::{Operands, reference};
use super::pages::with_pages;
use super::{dtypes, edges, shape};
use crate::kernels::{bytes, client, values};
use burn::tensor::Device;
use marlin_kernels::ActivationDtype;
use marlin_nn::kernels::attention::{AttentionPass, AttentionShape};
use marlin_nn::kernels::{SequenceStatus, store_codes, widen_codes};
use marlin_nn::{CacheFormat, CacheShape};
use marlin_testing::relative_error_of_terms;
use marlin_tests::tolerance;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// The order of the values in the bytes of a word.
const ORDER: [usize; 4] = [0, 2, 1, 3];
/// The largest value of e4m3, and the exponent of the bias that a scale contains.
const LARGEST: f64 = 448.0;
const BIAS: i32 = 8;

/// Returns the value of a code of e4m3 (OFP8 specification, table 1).
fn value_of(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// Returns the bytes of a position of a head: its values rounded to e4m3, and their scale.
fn row_of(values: &[f32]) -> Vec<u8> {
    let most = values
        .iter()
        .fold(0f32, |most, value| most.max(value.abs()));
    let mut row = vec![0; values.len() + 8];
    for (index, &value) in values.iter().enumerate() {
        let wanted = f64::from(value) * LARGEST / f64::from(most).max(1e-30);
        let distance = |code: &u8| (value_of(*code) - wanted.abs()).abs();
        let nearest = (0..0x7f).min_by(|a, b| distance(a).total_cmp(&distance(b)));
        let sign = if wanted < 0.0 { 0x80 } else { 0 };
        row[place(index)] = nearest.unwrap_or(0) | sign;
    }
    let scale = (f64::from(most) / LARGEST * 2f64.powi(BIAS)) as f32;
    row[values.len()..][..4].copy_from_slice(&scale.to_le_bytes());
    row
}

/// Returns the values of a row.
fn values_of(row: &[u8]) -> Vec<f64> {
    let head_dim = row.len() - 8;
    let scale = f32::from_le_bytes(row[head_dim..][..4].try_into().unwrap_or_default());
    (0..head_dim)
        .map(|index| value_of(row[place(index)]) * f64::from(scale) * 2f64.powi(-BIAS))
        .collect()
}

/// Returns the byte of a value in a row.
fn place(index: usize) -> usize {
    index / 4 * 4 + ORDER[index % 4]
}

/// Returns the number of bytes of a row.
fn row_bytes(shape: &AttentionShape) -> usize {
    shape.cache.head_dim + 8
}

/// Returns the cache of a shape, whose positions are in the dtype of activations, in e4m3.
fn in_e4m3(shape: &AttentionShape) -> AttentionShape {
    AttentionShape {
        cache: CacheShape {
            format: CacheFormat::E4m3,
            ..shape.cache
        },
        ..*shape
    }
}

/// Rounds a cache on the host to e4m3, and returns its bytes. Positions that hold NaN get a scale
/// of NaN.
fn round_cache(cache: &mut [f32], head_dim: usize) -> Vec<u8> {
    let mut found = Vec::new();
    for values in cache.chunks_exact_mut(head_dim) {
        if values[0].is_nan() {
            let mut row = vec![0x55; head_dim + 8];
            row[head_dim..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
            found.extend(row);
            continue;
        }
        let row = row_of(values);
        for (value, rounded) in values.iter_mut().zip(values_of(&row)) {
            *value = rounded as f32;
        }
        found.extend(row);
    }
    found
}

const HALVES: [ActivationDtype; 2] = [ActivationDtype::F16, ActivationDtype::BF16];

/// Checks decode steps at positions around the edges of tiles and splits.
pub(super) fn steps(device: &Device, is_card: bool, seed: u64) {
    let mut dtypes = dtypes(device, &HALVES);
    let max_len = if is_card { 2500 } else { 70 };
    let head_dims: &[usize] = if is_card {
        &[64, 80, 128, 256]
    } else {
        &[16, 24]
    };
    for (case, &head_dim) in head_dims.iter().enumerate() {
        for group in [1, 4] {
            let Some(dtype) = dtypes.next() else { return };
            let rows = if is_card { 12 } else { 6 };
            let plain = AttentionShape {
                window: (case == 1).then_some(70),
                has_sinks: group == 4,
                norm_epsilon: (case == 1).then_some(1e-6),
                ..shape(rows, [2 * group, 2], head_dim, max_len, dtype)
            };
            let wide = if case == 0 {
                plain
            } else {
                with_pages(16 << case, plain)
            };
            check_step(device, &wide, &edges(max_len), seed);
        }
    }
    // A single row, which is split into many parts.
    for position in edges(max_len) {
        let Some(dtype) = dtypes.next() else { return };
        let head_dim = if is_card { 128 } else { 16 };
        let wide = with_pages(64, shape(1, [8, 2], head_dim, max_len, dtype));
        check_step(device, &wide, &[position], seed);
    }
}

fn check_step(device: &Device, wide: &AttentionShape, positions: &[Option<usize>], seed: u64) {
    let (client, shape) = (client(device), in_e4m3(wide));
    let mut operands = Operands::random(wide, positions, seed);
    let head_dim = shape.cache.head_dim;
    let before = [
        round_cache(&mut operands.keys, head_dim),
        round_cache(&mut operands.values, head_dim),
    ];
    let mut bench = Bench::new(&client, wide, &operands);
    bench.shape = shape;
    for (buffer, codes) in [KEYS, VALUES].into_iter().zip(&before) {
        bench.buffers[buffer] = (client.create_from_slice(codes), codes.len() / 2);
    }
    bench.launch();
    let name = format!("{shape}, window {:?}, seed {seed}", shape.window);
    let out = bench.floats(OUT);
    for (row, out) in out.chunks_exact(shape.heads * head_dim).enumerate() {
        let SequenceStatus::At(position) = operands.rows[row].status else {
            assert!(out.iter().all(|value| value.is_nan()), "{name}: row {row}");
            continue;
        };
        let (expected, magnitude) = reference(wide, &operands, row, position as usize);
        let error = relative_error_of_terms(out, &expected, &magnitude);
        assert!(
            error <= tolerance(shape.dtype),
            "{name}: row {row} at {position}: relative error {error:e}"
        );
    }
    let counters = bench.read(ARRIVAL_COUNTERS);
    assert!(counters.iter().all(|&byte| byte == 0), "{name}: counters");
    let found = [KEYS, VALUES].map(|cache| bench.read(cache));
    check_rows(wide, &operands, before, found, &name);
}

/// Checks that the cache has the values of each row in e4m3, and otherwise equals `before`.
fn check_rows(
    wide: &AttentionShape,
    operands: &Operands,
    before: [Vec<u8>; 2],
    found: [Vec<u8>; 2],
    name: &str,
) {
    let bytes = row_bytes(wide);
    for (part, (mut expected, found)) in before.into_iter().zip(found).enumerate() {
        for (row, state) in operands.rows.iter().enumerate() {
            let SequenceStatus::At(position) = state.status else {
                continue;
            };
            for head in 0..wide.cache.kv_heads {
                let (slot, position) = (state.slot as usize, position as usize);
                let index = operands.cache_index(wide, slot, head, position) / wide.cache.head_dim;
                let place = index * bytes..(index + 1) * bytes;
                let exact: Vec<f64> = match part {
                    0 => operands.rotated(wide, row, 1, head, position),
                    _ => (operands.head(wide, row, 2, head).iter())
                        .map(|&value| f64::from(value))
                        .collect(),
                };
                check_row(&found[place.clone()], &exact, wide.dtype, name);
                expected[place.clone()].copy_from_slice(&found[place]);
            }
        }
        assert!(found == expected, "{name}: the cache has changed elsewhere");
    }
}

/// Checks that a row holds values to half a distance between values of e4m3, after they were
/// rounded to a dtype.
fn check_row(row: &[u8], exact: &[f64], dtype: ActivationDtype, name: &str) {
    let most = exact.iter().fold(0f64, |most, value| most.max(value.abs()));
    for (found, exact) in values_of(row).iter().zip(exact) {
        let distance = (exact.abs() / 16.0).max(most / LARGEST * 2f64.powi(-10));
        let allowed = distance * 1.01 + 2.0 * tolerance(dtype) * most;
        assert!(
            (found - exact).abs() <= allowed,
            "{name}: {found} in the cache, {exact} expected, of at most {most}"
        );
    }
}

/// Checks that the rows of prompts are written to the cache in e4m3, and that the positions that
/// they attend to are widened to the workspace.
pub(super) fn prompts(device: &Device, is_card: bool, seed: u64) {
    let sequences: &[(usize, usize)] = if is_card {
        &[(0, 63), (0, 1), (64, 65), (290, 12), (0, 130)]
    } else {
        &[(0, 9), (0, 1), (7, 5)]
    };
    let max_len = if is_card { 320 } else { 40 };
    let head_dims: &[usize] = if is_card { &[64, 80, 128] } else { &[16, 24] };
    let mut dtypes = dtypes(device, &HALVES);
    for (case, &head_dim) in head_dims.iter().enumerate() {
        let Some(dtype) = dtypes.next() else { return };
        let rows = sequences.iter().map(|(_, tokens)| tokens).sum::<usize>() + 3;
        let plain = AttentionShape {
            pass: AttentionPass::Prompt,
            window: (case == 1).then_some(11),
            ..shape(rows, [4, 2], head_dim, max_len, dtype)
        };
        let wide = if case == 0 {
            plain
        } else {
            with_pages(16 << case, plain)
        };
        check_prompts(device, &wide, sequences, seed);
    }
}

fn check_prompts(device: &Device, wide: &AttentionShape, sequences: &[(usize, usize)], seed: u64) {
    let (client, shape) = (client(device), in_e4m3(wide));
    let name = format!("{shape}, window {:?}, seed {seed}", shape.window);
    let mut operands = Operands::of_prompts(wide, sequences, seed);
    let head_dim = shape.cache.head_dim;
    let before = [
        round_cache(&mut operands.keys, head_dim),
        round_cache(&mut operands.values, head_dim),
    ];
    // The first kernel of a prompt writes keys and values to the workspace.
    let mut workspace = [operands.keys.clone(), operands.values.clone()];
    let mut fresh = operands.clone();
    for (row, state) in operands.rows.iter().enumerate() {
        if let SequenceStatus::At(position) = state.status {
            fresh.append(wide, row, position as usize);
        }
    }
    let mut rng = StdRng::seed_from_u64(seed);
    for (workspace, of_rows) in workspace.iter_mut().zip([&fresh.keys, &fresh.values]) {
        let earlier = workspace.clone();
        for ((value, &new), earlier) in workspace.iter_mut().zip(of_rows).zip(earlier) {
            let is_new = !new.is_nan() && earlier.is_nan();
            *value = if is_new {
                new
            } else {
                rng.random_range(-9.0..9.0)
            };
        }
    }
    let mut bench = Bench::new(&client, wide, &operands);
    let wide_buffers = workspace.map(|values| bytes(&values, shape.dtype));
    let wide_buffers =
        wide_buffers.map(|bytes| (client.create_from_slice(&bytes), bytes.len() / 2));
    for (buffer, codes) in [KEYS, VALUES].into_iter().zip(&before) {
        bench.buffers[buffer] = (client.create_from_slice(codes), codes.len() / 2);
    }
    bench.shape = shape;
    let args = || bench.e4m3_args(&wide_buffers);
    store_codes(&client, &shape, args()).unwrap_or_else(|error| panic!("{name}: {error}"));
    widen_codes(&client, &shape, args()).unwrap_or_else(|error| panic!("{name}: {error}"));
    let found = [KEYS, VALUES].map(|cache| bench.read(cache));
    check_rows(wide, &operands, before, found.clone(), &name);
    for (codes, (wide_buffer, _)) in found.iter().zip(&wide_buffers) {
        let read = client.read_one(wide_buffer.clone());
        let read = read.unwrap_or_else(|error| panic!("{name}: {error}"));
        let widened = values(&read, shape.dtype);
        for state in &operands.rows {
            let SequenceStatus::At(position) = state.status else {
                continue;
            };
            let first = (position as usize + 1).saturating_sub(shape.window.unwrap_or(usize::MAX));
            for (position, head) in (first..=position as usize)
                .flat_map(|position| (0..shape.cache.kv_heads).map(move |head| (position, head)))
            {
                let start = operands.cache_index(wide, state.slot as usize, head, position);
                let row = start / head_dim * row_bytes(wide);
                let expected = values_of(&codes[row..row + row_bytes(wide)]);
                let expected: Vec<f32> = expected.iter().map(|&value| value as f32).collect();
                let expected = values(&bytes(&expected, shape.dtype), shape.dtype);
                assert_eq!(
                    &widened[start..start + head_dim],
                    &expected[..],
                    "{name}: slot {}, position {position}, head {head}",
                    state.slot
                );
            }
        }
    }
}
