//! Products of e4m3 by e4m3 (W8A8) on raw buffers: the rounding of rows of activations, with and
//! without a norm before it, and the tiles, with outputs filled with NaN.

use crate::kernels::{buffer, bytes, values};
use crate::marlin::{Bench, problem};
use crate::setup::{Named, trial};
use half::f16;
use libtest_mimic::Trial;
use marlin_format::{GroupSize, QuantSpec, ScaleDtype, Sparsity, WeightValue};
use marlin_kernels::device::{FP8_CAPABILITY, WGMMA_CAPABILITY};
use marlin_kernels::tile::{self, Launch, Product, Tile};
use marlin_kernels::{
    ActivationDtype, Epilogue, EpilogueStage, KernelError, NormOperands,
    Operands as LaunchOperands, Plan, Prologue, PrologueStage, QuantProblem, launch,
};
use marlin_testing::relative_error_of_terms;
use marlin_tests::{Case, Operands, round, tolerance};

/// The constant that the norm adds to the mean square.
const EPSILON: f32 = 1e-5;

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    if device.name != "cuda" {
        return;
    }
    for group in WeightValue::E4m3.groups().iter().copied() {
        for dtype in [ActivationDtype::F16, ActivationDtype::BF16] {
            let name = format!("fp8::tiles_agree_with_f64::{group}::{dtype}");
            tests.push(on_fp8(device, &name, move |bench| {
                tiles(bench, group, dtype, seed)
            }));
            let name = format!("fp8::a_norm_before_agrees_with_f64::{group}::{dtype}");
            tests.push(on_fp8(device, &name, move |bench| {
                norm(bench, group, dtype, seed)
            }));
        }
    }
    tests.push(on_fp8(
        device,
        "fp8::rows_that_are_zero_tiny_or_not_finite",
        move |bench| special_rows(bench, seed),
    ));
    tests.push(on_fp8(
        device,
        "fp8::a_thousand_runs_give_the_same_bits",
        move |bench| repeats(bench, seed),
    ));
    tests.push(on_fp8(
        device,
        "fp8::wrong_operands_are_refused",
        move |bench| refusals(bench, seed),
    ));
}

/// Returns a test that passes without a check on cards without products of e4m3, where no plan has
/// a tile of them.
fn on_fp8(device: &Named, name: &str, body: impl FnOnce(&Bench) + Send + 'static) -> Trial {
    trial(device, name, move |device| {
        let bench = Bench::new(device);
        if bench.card.capability >= FP8_CAPABILITY {
            body(&bench);
        }
    })
}

fn case(group: GroupSize, dtype: ActivationDtype, [m, k, n]: [usize; 3]) -> Case {
    let scales = match dtype {
        ActivationDtype::BF16 => ScaleDtype::BF16,
        _ => ScaleDtype::F16,
    };
    Case {
        m,
        k,
        n,
        spec: QuantSpec::new(WeightValue::E4m3, group).with_scale_dtype(scales),
        activations: dtype,
        permuted: false,
        sparsity: Sparsity::Dense,
    }
}

/// Returns the problem of a case with activations that may be rounded to e4m3.
fn fp8_problem(case: &Case) -> QuantProblem {
    let mut problem = problem(case);
    problem.weight.format.spec = problem.spec().with_fp8_activations(true);
    problem
}

/// Returns the launches with a tile of e4m3.
fn fp8_launches(problem: &QuantProblem, bench: &Bench) -> Vec<Launch> {
    let mut launches = tile::launches(problem, &bench.card);
    launches.retain(|launch| launch.tile.is_fp8());
    // The tile of compute capability 8.9, whose products are products of f16 on 9.0. It has as many
    // columns as a tile of 9.0.
    let is_possible = |launch: &Launch| launch.tile.columns() == MMA_TILE.columns();
    if bench.card.capability == WGMMA_CAPABILITY && launches.iter().any(is_possible) {
        launches.push(Launch {
            tile: MMA_TILE,
            blocks: bench.card.multiprocessors,
        });
    }
    launches
}

/// The tile of `mma.sync`, which cards with `wgmma` do not plan.
const MMA_TILE: Tile = Tile {
    batch_tiles: 6,
    warps_n: 4,
    warps_k: 1,
    cluster: 1,
    stages: 2,
    product: Product::Fp8MmaSync,
};

fn first_launch(problem: &QuantProblem, bench: &Bench) -> Launch {
    let launches = fp8_launches(problem, bench);
    launches
        .first()
        .copied()
        .unwrap_or_else(|| panic!("no tile of e4m3 for {problem}"))
}

/// Returns rows of activations that were rounded to e4m3, each with its scale.
fn rounded(x: &[f32], k: usize) -> Vec<f32> {
    let row = |row: &[f32]| {
        let largest = row.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let inverse = if largest < 1e-30 {
            0.0
        } else {
            448.0 / largest
        };
        let scale = largest / 448.0;
        let codes = row
            .iter()
            .map(|value| WeightValue::E4m3.encode(value * inverse));
        codes
            .map(|code| WeightValue::E4m3.decode(code) * scale)
            .collect::<Vec<f32>>()
    };
    x.chunks_exact(k).flat_map(row).collect()
}

/// Draws the operands of a case, with the expected product of rounded activations.
fn operands(case: &Case, seed: u64) -> Operands {
    let mut operands = Operands::random(case, seed);
    let x = operands.x.clone();
    operands.x = rounded(&x, case.k);
    operands.recompute(case);
    operands.x = x;
    operands
}

fn check(what: &str, found: &[u8], expected: &[f64], magnitude: &[f64], case: &Case, seed: u64) {
    let found = values(found, case.activations);
    let error = relative_error_of_terms(&found, expected, magnitude);
    assert!(
        error <= tolerance(case.activations),
        "{case}, {what}, seed {seed}: relative error {error:e}"
    );
}

/// Returns shapes [M, K, N] with rows and columns at the edges of tiles, one chunk along K and
/// many, and more tiles than blocks.
const SHAPES: [[usize; 3]; 10] = [
    [1, 128, 64],
    [48, 256, 130],
    [49, 1024, 640],
    [127, 384, 65],
    [128, 256, 256],
    [129, 1024, 257],
    [300, 128, 1],
    [256, 512, 192],
    [257, 4096, 328],
    [1300, 384, 1280],
];

fn tiles(bench: &Bench, group: GroupSize, dtype: ActivationDtype, seed: u64) {
    let mut ran = 0;
    for shape in SHAPES {
        let case = case(group, dtype, shape);
        let operands = operands(&case, seed);
        for epilogue in Epilogue::ALL {
            let problem = fp8_problem(&case).with_epilogue(epilogue);
            let (expected, magnitude) = match epilogue {
                Epilogue::None => (operands.expected.clone(), operands.magnitude.clone()),
                _ => operands.gated(&case, epilogue),
            };
            for launch in fp8_launches(&problem, bench) {
                for blocks in [1, 3, 7, launch.blocks] {
                    let launch = Launch { blocks, ..launch };
                    let plan = Plan {
                        epilogue: match epilogue {
                            Epilogue::None => EpilogueStage::None,
                            _ => EpilogueStage::InKernel,
                        },
                        ..bench.plan(launch)
                    };
                    let found = bench.run_problem(&problem, &case, &operands, &plan);
                    let what = format!("{epilogue:?}, {launch:?}");
                    check(&what, &found, &expected, &magnitude, &case, seed);
                    ran += 1;
                }
            }
        }
    }
    assert!(ran >= 4 * SHAPES.len(), "only {ran} launches");
}

/// A norm is computed together with the rounding.
fn norm(bench: &Bench, group: GroupSize, dtype: ActivationDtype, seed: u64) {
    // Runs of 16 that fill the units of a cube, are more, or are fewer.
    for [m, k, n] in [[129, 8192, 128], [65, 11008, 64], [130, 1152, 520]] {
        let case = case(group, dtype, [m, k, n]);
        let mut operands = Operands::random(&case, seed);
        let [residual, weight] = [(seed + 1, m * k), (seed + 2, k)].map(|(seed, count)| {
            let draw = Case {
                m: 1,
                n: 1,
                k: count,
                ..case
            };
            Operands::random(&draw, seed).x
        });
        let x = operands.x.clone();
        let sum: Vec<f32> = x
            .iter()
            .zip(&residual)
            .map(|(x, r)| round(x + r, dtype))
            .collect();
        // The root divides a row as a whole, and so does not change its codes.
        let weighted: Vec<f32> = sum
            .chunks_exact(k)
            .flat_map(|row| row.iter().zip(&weight).map(|(x, w)| x * w))
            .collect();
        operands.x = rounded(&weighted, k)
            .chunks_exact(k)
            .zip(sum.chunks_exact(k))
            .flat_map(|(row, sum)| {
                let square: f64 = sum.iter().map(|x| f64::from(*x).powi(2)).sum();
                let root = (square / k as f64 + f64::from(EPSILON)).sqrt();
                row.iter()
                    .map(move |x| (f64::from(*x) / root) as f32)
                    .collect::<Vec<f32>>()
            })
            .collect();
        operands.recompute(&case);
        operands.x = x;

        let problem = fp8_problem(&case).with_prologue(Prologue::AddRmsNorm);
        let plan = Plan {
            prologue: PrologueStage::InKernel,
            ..bench.plan(first_launch(&problem, bench))
        };
        let [out, sums] = [m * n, m * k].map(|elements| {
            let poison = bytes(&vec![f32::NAN; elements], dtype);
            (bench.client.create_from_slice(&poison), elements)
        });
        let arg = |(handle, elements): &(cubecl::server::Handle, usize)| {
            // SAFETY: the buffers were made for as many elements.
            unsafe { cubecl::prelude::BufferArg::from_raw_parts(handle.clone(), *elements) }
        };
        let launched = LaunchOperands {
            norm: Some(NormOperands {
                residual: buffer(&bench.client, &bytes(&residual, dtype), m * k),
                weight: buffer(&bench.client, &bytes(&weight, dtype), k),
                sum: arg(&sums),
                epsilon: EPSILON,
            }),
            ..bench.operands(&case, &operands, arg(&out))
        };
        launch(&bench.client, &problem, &plan, launched)
            .unwrap_or_else(|error| panic!("{problem}: {error}"));
        let read = |(handle, _): (cubecl::server::Handle, usize)| {
            bench
                .client
                .read_one(handle)
                .unwrap_or_else(|error| panic!("{problem}: {error:?}"))
                .to_vec()
        };
        assert!(
            read(sums) == bytes(&sum, dtype),
            "{problem}, seed {seed}: other sums"
        );
        check(
            "norm",
            &read(out),
            &operands.expected,
            &operands.magnitude,
            &case,
            seed,
        );
    }
}

/// A row of zeros gives the bias, rows of the smallest values are exact like others, and a row with
/// a value that is not finite is NaN as a whole, without a change of other rows.
fn special_rows(bench: &Bench, seed: u64) {
    let case = case(GroupSize::Channel, ActivationDtype::F16, [130, 256, 256]);
    let mut operands = Operands::random(&case, seed);
    let k = case.k;
    operands.x[..k].fill(0.0);
    for value in &mut operands.x[k..2 * k] {
        *value = value.signum() * f16::MIN_POSITIVE_SUBNORMAL.to_f32();
    }
    operands.x[2 * k + 5] = f32::INFINITY;
    operands.x[129 * k + 255] = f32::NAN;
    let x = operands.x.clone();
    operands.x = rounded(&x, k);
    for row in [2, 129] {
        operands.x[row * k..][..k].fill(0.0);
    }
    operands.recompute(&case);
    operands.x = x;
    let problem = fp8_problem(&case);
    for launch in fp8_launches(&problem, bench) {
        let found = bench.run_problem(&problem, &case, &operands, &bench.plan(launch));
        let mut outputs = values(&found, case.activations);
        for row in [2, 129] {
            let row = row * case.n..(row + 1) * case.n;
            assert!(
                outputs[row.clone()].iter().all(|value| value.is_nan()),
                "{problem}: a row with a value that is not finite is not NaN"
            );
            outputs[row.clone()].copy_from_slice(&operands.expected[row]);
        }
        let error = relative_error_of_terms(&outputs, &operands.expected, &operands.magnitude);
        assert!(
            error <= tolerance(case.activations),
            "{problem}, seed {seed}: relative error {error:e}"
        );
    }
}

fn repeats(bench: &Bench, seed: u64) {
    let case = case(GroupSize::G128, ActivationDtype::F16, [200, 1024, 640]);
    let operands = operands(&case, seed);
    let problem = fp8_problem(&case);
    for launch in fp8_launches(&problem, bench) {
        // Seven blocks divide the tiles among each other.
        let plan = bench.plan(Launch {
            blocks: 7,
            ..launch
        });
        let operands = bench.upload(&case, &operands);
        let first = bench.run_uploaded(&problem, &operands, &plan);
        for run in 1..1000 {
            let found = bench.run_uploaded(&problem, &operands, &plan);
            assert!(found == first, "{problem}: run {run} gave other bits");
        }
    }
}

/// A launch with a tile of e4m3 is refused for a weight whose activations are not rounded, for a K
/// that does not fill the chunks, for act-order, and for a norm without its operands.
fn refusals(bench: &Bench, seed: u64) {
    let whole = case(GroupSize::Channel, ActivationDtype::F16, [256, 256, 256]);
    let fp8 = first_launch(&fp8_problem(&whole), bench);
    let short = Case { k: 192, ..whole };
    let permuted = Case {
        permuted: true,
        ..whole
    };
    for (problem, case) in [
        (problem(&whole), whole),
        (fp8_problem(&short), short),
        (fp8_problem(&permuted), permuted),
    ] {
        assert_eq!(fp8_launches(&problem, bench), [], "{problem}");
        let operands = Operands::random(&case, seed);
        let plan = bench.plan(fp8);
        let out = bytes(&vec![0.0; case.m * case.n], case.activations);
        let out = buffer(&bench.client, &out, case.m * case.n);
        let refused = launch(
            &bench.client,
            &problem,
            &plan,
            bench.operands(&case, &operands, out),
        );
        assert!(
            matches!(refused, Err(KernelError::Fp8 { .. })),
            "{problem}: {refused:?}"
        );
    }
    let normed = fp8_problem(&whole).with_prologue(Prologue::AddRmsNorm);
    let operands = Operands::random(&whole, seed);
    let out = bytes(&vec![0.0; whole.m * whole.n], whole.activations);
    let out = buffer(&bench.client, &out, whole.m * whole.n);
    let refused = launch(
        &bench.client,
        &normed,
        &bench.plan(fp8),
        bench.operands(&whole, &operands, out),
    );
    assert!(
        matches!(refused, Err(KernelError::Presence { .. })),
        "{normed}: {refused:?}"
    );
}
