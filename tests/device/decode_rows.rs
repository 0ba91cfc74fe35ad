//! The kernels of a decode step that compute row by row, compared with f64, on outputs filled with
//! NaN.

mod caches;
mod few_columns;

use crate::kernels::{buffer, bytes, client, values, words};
use crate::setup::{Named, computes, float_dtype, is_cpu_runtime, trial};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;
use libtest_mimic::Trial;
use marlin_kernels::matmul::float::FloatOperands;
use marlin_kernels::matmul::lm_head;
use marlin_kernels::{ActivationDtype, Epilogue, FloatProblem, Target};
use marlin_nn::kernels::{
    EmbedArgs, GatedArgs, RmsNormArgs, RowsShape, SequenceState, SequenceStatus, embed, gated,
    rms_norm,
};
use marlin_nn::log_likelihoods;
use marlin_testing::{random_values, relative_error, relative_error_of_terms};
use marlin_tests::{self as data, round, tolerance};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    tests.push(trial(
        device,
        "decode::log_likelihoods_agree_with_f64",
        move |device| likelihoods(device, seed),
    ));
    if device.name == "flex" {
        return;
    }
    tests.push(trial(
        device,
        "decode::a_dtype_is_taken_where_burn_computes_in_it",
        dtypes,
    ));
    tests.push(trial(
        device,
        "decode::rms_norm_agrees_with_f64",
        move |device| norms(device, seed),
    ));
    tests.push(trial(
        device,
        "decode::gates_agree_with_f64",
        move |device| gates(device, seed),
    ));
    tests.push(trial(
        device,
        "decode::embed_copies_the_rows_of_tokens",
        move |device| embeddings(device, seed),
    ));
    tests.push(trial(
        device,
        "decode::head_agrees_with_f64",
        move |device| heads(device, seed),
    ));
    tests.push(trial(
        device,
        "decode::few_columns_agree_with_f64",
        move |device| few_columns::agrees(device, seed),
    ));
    tests.push(trial(
        device,
        "decode::write_cache_writes_its_positions_alone",
        move |device| caches::caches(device, seed),
    ));
}

const DTYPES: [ActivationDtype; 3] = [
    ActivationDtype::F32,
    ActivationDtype::F16,
    ActivationDtype::BF16,
];

/// Returns shapes for vector loads of every width, and for rows with fewer and more elements than a
/// block has threads.
fn shapes(device: &Device) -> Vec<RowsShape> {
    let all = [(1, 64), (3, 100), (2, 33), (1, 4096), (5, 896), (2, 14_336)];
    let few = if is_cpu_runtime(device) { 3 } else { all.len() };
    let dtypes = DTYPES.into_iter().filter(|&dtype| computes(device, dtype));
    dtypes
        .flat_map(|dtype| {
            all[..few].iter().map(move |&(rows, features)| RowsShape {
                rows,
                features,
                dtype,
            })
        })
        .collect()
}

/// Draws values that are exact in a dtype, and returns the values and their bytes.
fn random(elements: usize, dtype: ActivationDtype, rng: &mut StdRng) -> (Vec<f64>, Vec<u8>) {
    let bytes = bytes(&random_values(elements, 3.0, rng), dtype);
    (values(&bytes, dtype), bytes)
}

/// Creates a buffer with the given content, and returns its handle and a launch argument for it.
fn output(client: &Client, content: &[u8], elements: usize) -> (Handle, BufferArg) {
    let handle = client.create_from_slice(content);
    // SAFETY: the buffer was made from as many bytes as `elements` of its dtype take.
    let arg = unsafe { BufferArg::from_raw_parts(handle.clone(), elements) };
    (handle, arg)
}

fn poisoned(client: &Client, elements: usize, dtype: ActivationDtype) -> (Handle, BufferArg) {
    output(client, &bytes(&vec![f32::NAN; elements], dtype), elements)
}

fn read(client: &Client, handle: Handle, dtype: ActivationDtype) -> Vec<f64> {
    values(
        &client
            .read_one(handle)
            .unwrap_or_else(|error| panic!("{error}")),
        dtype,
    )
}

fn check(shape: &RowsShape, found: &[f64], expected: &[f64], seed: u64) {
    let error = relative_error(found, expected);
    assert!(
        error <= tolerance(shape.dtype),
        "{shape}, seed {seed}: relative error {error:e}"
    );
}

/// Checks log-likelihoods of rows with fewer and more logits than a block has threads and with
/// large logits, of rows without a token, and of tokens outside the vocabulary.
fn likelihoods(device: &Device, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    for dtype in DTYPES
        .into_iter()
        .filter(|&dtype| computes(device, dtype))
        .map(|dtype| DType::from(float_dtype(dtype)))
    {
        for (rows, vocab) in [(1, 1), (3, 2), (7, 255), (5, 257), (4, 32_000)] {
            let mut logits = random_values(rows * vocab, 20.0, &mut rng);
            // The exponentials of the first row are all out of range.
            logits[..vocab].iter_mut().for_each(|logit| *logit += 500.0);
            let mut tokens: Vec<i32> = (0..rows)
                .map(|_| rng.random_range(0..vocab as i32))
                .collect();
            if rows > 3 {
                (tokens[1], tokens[2]) = (-1, vocab as i32);
            }
            let data = TensorData::new(logits, [rows, vocab]).convert_dtype(dtype);
            let exact: Vec<f64> = data.iter::<f64>().collect();
            let on_device = Tensor::<2>::from_data(data, (device, dtype));
            let of_tokens = Tensor::<1, Int>::from_data(
                TensorData::new(tokens.clone(), [rows]),
                (device, DType::I32),
            );
            let found = log_likelihoods(on_device, of_tokens).into_data();
            assert_eq!(found.dtype(), DType::F32);
            for ((found, logits), token) in found.iter::<f64>().zip(exact.chunks(vocab)).zip(tokens)
            {
                if token == vocab as i32 {
                    assert!(
                        found.is_nan(),
                        "{found} for a token outside of the vocabulary"
                    );
                    continue;
                }
                let best = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = logits.iter().map(|logit| (logit - best).exp()).sum();
                let expected = if token < 0 {
                    0.0
                } else {
                    logits[token as usize] - best - total.ln()
                };
                let error = (found - expected).abs();
                assert!(
                    error <= 1e-4 * (1.0 + expected.abs()),
                    "{rows} x {vocab} {dtype:?}, seed {seed}: {found} where {expected} is exact"
                );
            }
        }
    }
}

/// Vulkan converts bf16 without computing in it, and a kernel that adds there gives zeros.
fn dtypes(device: &Device) {
    for dtype in DTYPES {
        assert_eq!(
            dtype.expect_on(&client(device)).is_ok(),
            device.supports_dtype(float_dtype(dtype)),
            "{dtype}"
        );
    }
}

fn norms(device: &Device, seed: u64) {
    let client = client(device);
    let mut rng = StdRng::seed_from_u64(seed);
    for shape in shapes(device) {
        let RowsShape {
            rows,
            features,
            dtype,
        } = shape;
        for with_residual in [false, true] {
            let (x, x_bytes) = random(rows * features, dtype, &mut rng);
            let (added, residual_bytes) = random(rows * features, dtype, &mut rng);
            let (weight, weight_bytes) = random(features, dtype, &mut rng);
            let (out, out_arg) = poisoned(&client, rows * features, dtype);
            let (residual, residual_arg) = output(&client, &residual_bytes, rows * features);
            let args = RmsNormArgs {
                x: buffer(&client, &x_bytes, rows * features),
                residual: with_residual.then_some(residual_arg),
                weight: buffer(&client, &weight_bytes, features),
                out: out_arg,
            };
            rms_norm(&client, &shape, 1e-5, args)
                .unwrap_or_else(|error| panic!("{shape}: {error}"));

            // The norm is computed from the rounded sum.
            let sum = read(&client, residual, dtype);
            let exact: Vec<f64> = x
                .iter()
                .zip(&added)
                .map(|(x, added)| if with_residual { x + added } else { *added })
                .collect();
            check(&shape, &sum, &exact, seed);
            let normalised = if with_residual { sum } else { x };
            let expected: Vec<f64> = normalised
                .chunks(features)
                .flat_map(|row| {
                    let mean = row.iter().map(|value| value * value).sum::<f64>() / features as f64;
                    row.iter()
                        .zip(&weight)
                        .map(move |(value, weight)| value / (mean + 1e-5).sqrt() * weight)
                })
                .collect();
            check(&shape, &read(&client, out, dtype), &expected, seed);
        }
    }
}

fn gates(device: &Device, seed: u64) {
    let client = client(device);
    let mut rng = StdRng::seed_from_u64(seed);
    for shape in shapes(device) {
        let RowsShape {
            rows,
            features,
            dtype,
        } = shape;
        // Some gates and ups are above the limit of the clamped SwiGLU.
        let gate_up: Vec<f32> = (0..2 * rows * features)
            .map(|_| round(rng.random_range(-10.0..10.0), dtype))
            .collect();
        for epilogue in [Epilogue::SwiGlu, Epilogue::ClampedSwiGlu] {
            let (out, out_arg) = poisoned(&client, rows * features, dtype);
            let args = GatedArgs {
                gate_up: buffer(&client, &bytes(&gate_up, dtype), 2 * rows * features),
                out: out_arg,
            };
            gated(&client, &shape, epilogue, args)
                .unwrap_or_else(|error| panic!("{shape}: {error}"));
            let expected: Vec<f64> = gate_up
                .chunks(2 * features)
                .flat_map(|row| {
                    let (gates, ups) = row.split_at(features);
                    let pairs = gates.iter().zip(ups);
                    pairs
                        .map(|(&gate, &up)| data::gated(epilogue, f64::from(gate), f64::from(up)).0)
                })
                .collect();
            check(&shape, &read(&client, out, dtype), &expected, seed);
        }
    }
}

fn heads(device: &Device, seed: u64) {
    let client = client(device);
    let mut rng = StdRng::seed_from_u64(seed);
    // The counts are one row, a few rows, numbers around multiples of eight, and the maximum.
    let counts = [1, 2, 4, 7, 8, 9, 17, 33, usize::MAX];
    for (count, shape) in shapes(device)
        .into_iter()
        .flat_map(|shape| counts.map(|count| (count, shape)))
    {
        let RowsShape {
            features, dtype, ..
        } = shape;
        // On a card, one shape has so many columns that they take many blocks.
        let columns = if features == 4096 && !is_cpu_runtime(device) {
            1_027
        } else {
            37
        };
        let problem = |m| FloatProblem {
            m,
            k: features,
            n: columns,
            dtype,
        };
        let kernel_of = |rows| lm_head::plan(&problem(rows), &Target::of(&client));
        let most = (1..=64)
            .take_while(|&rows| kernel_of(rows).is_some())
            .count();
        let rows = if count == usize::MAX { most } else { count };
        let Some(kernel) = kernel_of(rows) else {
            continue;
        };
        let shape = RowsShape { rows, ..shape };
        let (x, x_bytes) = random(rows * features, dtype, &mut rng);
        let (weight, weight_bytes) = random(columns * features, dtype, &mut rng);
        let (out, out_arg) = poisoned(&client, rows * columns, dtype);
        let operands = FloatOperands {
            x: buffer(&client, &x_bytes, x.len()),
            weight: buffer(&client, &weight_bytes, weight.len()),
            bias: None,
            out: out_arg,
        };
        lm_head::launch(&client, &problem(rows), kernel, operands)
            .unwrap_or_else(|error| panic!("{shape}: {error}"));
        // Only some of the columns are checked, because the sums of all would take minutes.
        let places = || {
            (0..rows).flat_map(|row| {
                (0..columns)
                    .step_by(columns.div_ceil(64))
                    .map(move |column| (row, column))
            })
        };
        let sum = |values: &dyn Fn(f64) -> f64| -> Vec<f64> {
            let terms = |(row, column)| {
                (0..features).map(move |i| (row * features + i, column * features + i))
            };
            places()
                .map(|place| terms(place).map(|(i, j)| values(x[i] * weight[j])).sum())
                .collect()
        };
        let (expected, squares) = (sum(&|term| term), sum(&|term| term * term));
        let magnitude: Vec<f64> = squares.into_iter().map(f64::sqrt).collect();
        let out = read(&client, out, dtype);
        assert!(
            out.iter().all(|value| value.is_finite()),
            "{shape}, seed {seed}: an output was not written"
        );
        let found: Vec<f64> = places()
            .map(|(row, column)| out[row * columns + column])
            .collect();
        let error = relative_error_of_terms(&found, &expected, &magnitude);
        assert!(
            error <= tolerance(dtype),
            "{shape}, seed {seed}: relative error {error:e}"
        );
    }
}

fn embeddings(device: &Device, seed: u64) {
    let client = client(device);
    let mut rng = StdRng::seed_from_u64(seed);
    let vocab = 50;
    for shape in shapes(device) {
        let RowsShape {
            rows,
            features,
            dtype,
        } = shape;
        let (table, table_bytes) = random(vocab * features, dtype, &mut rng);
        // Rows with the last token, idle rows, and rows with a token outside the vocabulary.
        let row = |token, state| SequenceState {
            token,
            status: state,
            ..SequenceState::IDLE
        };
        let state: Vec<SequenceState> = (0..rows)
            .map(|i| {
                [
                    row(49, SequenceStatus::At(7)),
                    row(3, SequenceStatus::Idle),
                    row(50, SequenceStatus::At(0)),
                ][i % 3]
            })
            .collect();
        let (out, out_arg) = poisoned(&client, rows * features, dtype);
        let args = EmbedArgs {
            table: buffer(&client, &table_bytes, vocab * features),
            row_state: words(
                &client,
                state
                    .iter()
                    .flat_map(|row| row.to_words())
                    .map(|word| word as u32),
            ),
            out: out_arg,
        };
        embed(&client, &shape, vocab, args).unwrap_or_else(|error| panic!("{shape}: {error}"));
        let found = read(&client, out, dtype);
        for (row, found) in found.chunks(features).enumerate() {
            let expected = if row % 3 == 0 {
                &table[49 * features..]
            } else {
                &vec![0.0; features]
            };
            assert!(found == expected, "{shape}, seed {seed}: row {row}");
        }
    }
}
