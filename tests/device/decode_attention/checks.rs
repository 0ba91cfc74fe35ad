//! Checks of the outputs of launches, of the cache that launches write, and of repeated launches.

use super::bench::{ARRIVAL_COUNTERS, Bench, KEYS, OUT, VALUES};
use super::operands::{Operands, reference};
use crate::kernels::{bytes, values};
use cubecl::client::Client;
use marlin_kernels::ActivationDtype;
use marlin_nn::kernels::SequenceStatus;
use marlin_nn::kernels::attention::AttentionShape;
use marlin_testing::relative_error_of_terms;
use marlin_tests::tolerance;

/// Checks a launch with one row for each sequence.
pub(super) fn check(
    client: &Client,
    shape: &AttentionShape,
    positions: &[Option<usize>],
    seed: u64,
) {
    let operands = Operands::random(shape, positions, seed);
    check_launch(Bench::new(client, shape, &operands), operands, seed);
}

/// Launches once, and checks the outputs, the entries written to the cache, and that nothing else
/// was written.
pub(super) fn check_launch(bench: Bench, mut operands: Operands, seed: u64) {
    let shape = &bench.shape;
    let before = [KEYS, VALUES].map(|cache| bench.read(cache));
    bench.launch();
    let name = format!(
        "{shape}, window {:?}, norms {:?}, {:?}, seed {seed}",
        shape.window, shape.norm_epsilon, bench.prompts
    );
    check_outputs(&bench, &mut operands, &name);
    assert!(
        bench.read(ARRIVAL_COUNTERS).iter().all(|&byte| byte == 0),
        "{name}: arrival_counters are left"
    );
    check_cache(&bench, &operands, before, &name);
}

/// Checks the outputs row by row, and writes each row's key and value to the cache of `operands`,
/// from which the following rows read.
pub(super) fn check_outputs(bench: &Bench, operands: &mut Operands, name: &str) {
    let shape = &bench.shape;
    let out = bench.floats(OUT);
    for (row, out) in out
        .chunks_exact(shape.heads * shape.cache.head_dim)
        .enumerate()
    {
        let SequenceStatus::At(position) = operands.rows[row].status else {
            assert!(
                out.iter().all(|value| value.is_nan()),
                "{name}: idle row {row} was written"
            );
            continue;
        };
        let (expected, magnitude) = reference(shape, operands, row, position as usize);
        let error = relative_error_of_terms(out, &expected, &magnitude);
        assert!(
            error <= tolerance(shape.dtype),
            "{name}: row {row} at {position}: relative error {error:e}"
        );
        operands.append(shape, row, position as usize);
    }
}

/// Checks that the cache has each token's rounded key and value, and otherwise equals `before`.
fn check_cache(bench: &Bench, operands: &Operands, before: [Vec<u8>; 2], name: &str) {
    let shape = &bench.shape;
    let each = bytes(&[0.0], shape.dtype).len();
    let epsilon = match shape.dtype {
        ActivationDtype::F32 => 1e-6,
        ActivationDtype::F16 => f64::from(half::f16::EPSILON),
        ActivationDtype::BF16 => f64::from(half::bf16::EPSILON),
    };
    for (part, mut expected) in before.into_iter().enumerate() {
        let found = bench.read([KEYS, VALUES][part]);
        for (row, state) in operands.rows.iter().enumerate() {
            let SequenceStatus::At(position) = state.status else {
                continue;
            };
            for head in 0..shape.cache.kv_heads {
                let slot = state.slot as usize;
                let start = operands.cache_index(shape, slot, head, position as usize) * each;
                let place = start..start + shape.cache.head_dim * each;
                let written = values(&found[place.clone()], shape.dtype);
                let exact = match part {
                    0 => operands.rotated(shape, row, 1, head, position as usize),
                    _ => operands
                        .head(shape, row, 2, head)
                        .iter()
                        .map(|&value| f64::from(value))
                        .collect(),
                };
                for (written, exact) in written.iter().zip(&exact) {
                    let allowed = if part == 0 {
                        epsilon * exact.abs() + 1e-6
                    } else {
                        0.0
                    };
                    let difference = (written - exact).abs();
                    assert!(
                        difference <= allowed,
                        "{name}: row {row} at {position}: {written} in the cache, {exact} expected"
                    );
                }
                expected[place.clone()].copy_from_slice(&found[place]);
            }
        }
        assert!(found == expected, "{name}: the cache has changed elsewhere");
    }
}

/// Launches a hundred times, and checks that every output has the bits of the first output.
pub(super) fn check_repeats(bench: &Bench, seed: u64) {
    bench.launch();
    let first = bench.read(OUT);
    for run in 1..100 {
        bench.launch();
        assert!(
            bench.read(OUT) == first,
            "{}, seed {seed}: run {run} differs",
            bench.shape
        );
    }
}
