//! The matmul of one row, with and without a norm before the matmul, on raw buffers: every format
//! and cluster size, shapes at tile edges, outputs filled with NaN.

mod operands;

use crate::kernels::{buffer, bytes, values};
use crate::marlin::{Bench, problem};
use crate::setup::{Named, trial};
use libtest_mimic::Trial;
use marlin_format::{GroupSize, QuantSpec, ScaleDtype, Sparsity, WeightValue};
use marlin_kernels::device::CLUSTER_CAPABILITY;
use marlin_kernels::matmul::gemv::{self, CLUSTERS};
use marlin_kernels::{
    ActivationDtype, Epilogue, Kernel, KernelError, NormOperands, Operands as LaunchOperands, Plan,
    Prologue, QuantProblem, Reason, launch,
};
use marlin_testing::relative_error_of_terms;
use marlin_tests::{Case, Operands, tolerance};
use operands::{EPSILON, GemvOperands, plan};

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    if device.name != "cuda" {
        return;
    }
    // One test for each width and group, so that several processes can share the compilation.
    for (bits, group) in WeightValue::ALL
        .into_iter()
        .flat_map(|bits| bits.groups().iter().map(move |&group| (bits, group)))
        .filter(|(_, group)| *group != GroupSize::Channel)
    {
        let name = format!("gemv::agrees_with_f64::{bits}::{group}");
        tests.push(on_clusters(device, &name, move |bench| {
            agrees(bench, bits, group, seed)
        }));
    }
    tests.push(on_clusters(
        device,
        "gemv::a_thousand_runs_give_the_same_bits",
        move |bench| repeats(bench, seed),
    ));
    tests.push(on_clusters(
        device,
        "gemv::wrong_operands_are_refused",
        move |bench| refusals(bench, seed),
    ));
}

/// Returns a test that passes without a check on cards without clusters, which the kernel needs. No
/// plan has the kernel on such cards.
fn on_clusters(device: &Named, name: &str, body: impl FnOnce(&Bench) + Send + 'static) -> Trial {
    trial(device, name, move |device| {
        let bench = Bench::new(device);
        if bench.card.capability >= CLUSTER_CAPABILITY {
            body(&bench);
        }
    })
}

/// Returns shapes [K, N] with one step along K and with many, with a K that ends within a step or a
/// group, and with an N that ends within a tile.
fn shapes(group: GroupSize) -> Vec<[usize; 2]> {
    let rows = group.rows(0);
    vec![
        [4096, 200],
        [2048 + 3 * rows, 64],
        [5 * rows, 63],
        [3 * rows, 65],
        [6272, 129],
        [5 * rows + 24, 40],
        [2 * rows - 8, 33],
    ]
}

/// Checks that an output is as in f64.
fn check(found: &[u8], (expected, magnitude): (&[f64], &[f64]), case: &Case, what: &str) {
    let error = relative_error_of_terms(&values(found, case.activations), expected, magnitude);
    assert!(
        error <= tolerance(case.activations),
        "{case}, {what}: relative error {error:e}"
    );
}

fn agrees(bench: &Bench, bits: WeightValue, group: GroupSize, seed: u64) {
    let (mut ran, mut without_norm) = (0, 0);
    let formats = [
        (false, ScaleDtype::F16),
        (true, ScaleDtype::F16),
        (false, ScaleDtype::BF16),
        (true, ScaleDtype::BF16),
    ];
    for (zero_points, scale_dtype) in formats
        .into_iter()
        .filter(|(zero_points, _)| bits.zero_points().contains(&(*zero_points).into()))
    {
        let spec = QuantSpec::new(bits, group)
            .with_zero_point(zero_points.into())
            .with_scale_dtype(scale_dtype);
        let of_shapes = |shapes: Vec<[usize; 2]>| {
            shapes.into_iter().flat_map(move |[k, n]| {
                bits.sparsities().iter().map(move |&sparsity| Case {
                    m: 1,
                    k,
                    n,
                    spec,
                    activations: scale_dtype.into(),
                    permuted: false,
                    sparsity,
                })
            })
        };
        // The kernel does not support a few formats, and without a norm a few others.
        let with_norm = |case: &Case| problem(case).with_prologue(Prologue::AddRmsNorm);
        let runs = |problem: &QuantProblem| gemv::plan(problem, &bench.card).is_some();
        for case in of_shapes(shapes(group)).filter(|case| runs(&with_norm(case))) {
            let row = GemvOperands::random(&case, seed);
            let expected = (&row.operands.expected[..], &row.operands.magnitude[..]);
            // Some cluster sizes have more warps than there are steps.
            for blocks in CLUSTERS {
                let what = format!("{blocks} blocks, seed {seed}");
                let [out, sum] = row.run(bench, &case, blocks, Epilogue::None);
                check(&out, expected, &case, &what);
                assert!(
                    sum == bytes(&row.sum, case.activations),
                    "{case}, {what}: the sum differs"
                );
                ran += 1;
            }
        }
        for case in of_shapes(shapes(group)).filter(|case| runs(&problem(case))) {
            let operands = Operands::random(&case, seed);
            let expected = (&operands.expected[..], &operands.magnitude[..]);
            for blocks in CLUSTERS.into_iter().filter(|&blocks| blocks > 1) {
                let plan = Plan::product(
                    Kernel::Gemv { blocks },
                    Reason::TensorCores { capability: 90 },
                );
                let found = bench.run_problem(&problem(&case), &case, &operands, &plan);
                let what = format!("without a norm, {blocks} blocks, seed {seed}");
                check(&found, expected, &case, &what);
                without_norm += 1;
            }
        }
        let k = 2048 + 3 * group.rows(0);
        let of_gates = of_shapes(vec![[k, 128], [k, 640]]);
        for case in of_gates.filter(|case| runs(&with_norm(case))) {
            let row = GemvOperands::random(&case, seed);
            // A gated epilogue doubles the cluster: eight blocks are four for gates and four for
            // ups.
            for (epilogue, blocks) in [Epilogue::SwiGlu, Epilogue::ClampedSwiGlu]
                .into_iter()
                .flat_map(|epilogue| [1, 2, 4].map(|blocks| (epilogue, blocks)))
            {
                let what = format!("{epilogue:?}, {blocks} blocks, seed {seed}");
                let (expected, magnitude) = row.operands.gated(&case, epilogue);
                let [out, sum] = row.run(bench, &case, blocks, epilogue);
                check(&out, (&expected, &magnitude), &case, &what);
                assert!(
                    sum == bytes(&row.sum, case.activations),
                    "{case}, {what}: the sum differs"
                );
            }
        }
    }
    // The numbers of dense and 2:4 formats that the kernel supports with a norm, and without.
    let [with, without] = match (group, bits) {
        (GroupSize::G32, WeightValue::Int4) => [3 + 2, 4 + 2],
        (GroupSize::G32, WeightValue::Int8) => [4 + 2, 3 + 2],
        (GroupSize::G64, WeightValue::Int4) => [4 + 4, 3 + 4],
        (GroupSize::G32, WeightValue::E2m1) => [2, 1],
        (_, WeightValue::E2m1 | WeightValue::E4m3) => [2; 2],
        _ => [4 + 4; 2],
    };
    assert_eq!(
        ran,
        with * 7 * 4,
        "formats, seven shapes, four cluster sizes"
    );
    assert_eq!(
        without_norm,
        without * 7 * 3,
        "formats without a norm, seven shapes, three cluster sizes"
    );
}

fn repeats(bench: &Bench, seed: u64) {
    for (bits, sparsity) in WeightValue::ALL.into_iter().flat_map(|bits| {
        bits.sparsities()
            .iter()
            .map(move |&sparsity| (bits, sparsity))
    }) {
        let group = match bits {
            WeightValue::E2m1 => GroupSize::G32,
            _ => GroupSize::G128,
        };
        let spec = QuantSpec::new(bits, group);
        let case = Case {
            m: 1,
            k: 8192,
            n: 832,
            spec,
            activations: ActivationDtype::F16,
            permuted: false,
            sparsity,
        };
        let row = GemvOperands::random(&case, seed);
        for blocks in CLUSTERS {
            let first = row.run(bench, &case, blocks, Epilogue::None);
            for run in 1..1000 / CLUSTERS.len() {
                assert!(
                    row.run(bench, &case, blocks, Epilogue::None) == first,
                    "{case}, {blocks} blocks, seed {seed}: run {run} gives other bits"
                );
            }
        }
    }
}

fn refusals(bench: &Bench, seed: u64) {
    let spec = QuantSpec::int4(GroupSize::G64);
    let case = Case {
        m: 1,
        k: 128,
        n: 64,
        spec,
        activations: ActivationDtype::F16,
        permuted: false,
        sparsity: Sparsity::Dense,
    };
    let operands = Operands::random(&case, seed);
    let run = |case: Case, features: usize, blocks: usize| {
        let zeros = |elements: usize| buffer(&bench.client, &vec![0; 2 * elements], elements);
        let made_for = Case {
            m: 1,
            permuted: false,
            activations: ActivationDtype::F16,
            spec,
            ..case
        };
        let norm = NormOperands {
            residual: zeros(features),
            weight: zeros(128),
            sum: zeros(128),
            epsilon: EPSILON,
        };
        let mut launched = LaunchOperands {
            x: zeros(128),
            norm: Some(norm),
            ..bench.operands(&made_for, &operands, zeros(case.m * 64))
        };
        if case.permuted {
            launched.weight.row_permutation = Some(zeros(128));
        }
        if case.spec != spec {
            // With groups of 128 a column has one group, not two.
            launched.weight.scales = zeros(64);
        }
        launch(
            &bench.client,
            &problem(&case).with_prologue(Prologue::AddRmsNorm),
            &plan(blocks, Epilogue::None),
            launched,
        )
    };
    let short = run(case, 127, 1);
    assert!(
        matches!(
            short,
            Err(KernelError::BufferLength {
                operand: "residual",
                ..
            })
        ),
        "{short:?}"
    );
    let floats = run(
        Case {
            activations: ActivationDtype::F32,
            ..case
        },
        128,
        1,
    );
    assert!(
        matches!(floats, Err(KernelError::DtypePair { .. })),
        "{floats:?}"
    );
    let column = QuantSpec::int4(GroupSize::G128);
    for (case, blocks) in [
        (Case { m: 2, ..case }, 1),
        (
            Case {
                permuted: true,
                ..case
            },
            1,
        ),
        (
            Case {
                spec: column,
                ..case
            },
            1,
        ),
        (case, 3),
        (case, 0),
    ] {
        let refused = run(case, 128, blocks);
        assert!(
            matches!(refused, Err(KernelError::NoGemv { .. })),
            "{refused:?}"
        );
    }
}
