//! The matmuls of experts in every tile, on outputs filled with NaN.

use super::host::HostRouting;
use super::operands::{Experts, Launched, Spread, case};
use super::{routed, router};
use crate::kernels::{buffer, values, weight_buffers};
use crate::marlin::Bench;
use marlin_format::{GroupSize, QuantSpec, WeightValue};
use marlin_kernels::experts::{
    ExpertOperands, RouteOperands, RouterScores, Routing, launches, multiply, route, tile_plan,
};
use marlin_kernels::tile::{BLOCK_ROWS, Launch, RowOrder};
use marlin_kernels::{ActivationDtype, Epilogue, KernelError, QuantProblem};
use marlin_testing::relative_error_of_terms;
use marlin_tests::tolerance;

/// Checks every tile with experts: gathered and sorted, with every epilogue, with experts of no,
/// one and many rows, K and N at the edges of tiles and chunks, on few blocks and on all.
pub fn every_tile(bench: &Bench, spec: QuantSpec, seed: u64) {
    let router = router(9, 2, RouterScores::Softmax, true);
    let mut ran = 0;
    for (tokens, spread, [k, n]) in [
        (1, Spread::Random, [1032, 768]),
        (7, Spread::Random, [520, 768]),
        (45, Spread::Random, [264, 1408]),
        (70, Spread::First, [328, 328]),
        (400, Spread::Random, [264, 512]),
    ] {
        let case = case(spec, [tokens, k, n]);
        let experts = Experts::random(case, router.experts, seed);
        let weight = experts.tensors();
        let logits = spread.logits(&router, tokens, seed);
        for block_rows in BLOCK_ROWS {
            let host = HostRouting::new(&router, &logits, None, 1.0, block_rows);
            let routing = routed(
                bench,
                router,
                block_rows,
                &logits,
                ActivationDtype::F32,
                None,
                1.0,
            );
            for epilogue in Epilogue::ALL {
                let problem = experts.problem(&routing, epilogue);
                let (expected, magnitude) = experts.expected(&host, epilogue);
                for order in [RowOrder::Gathered, RowOrder::Sorted] {
                    let uploaded = experts.upload(bench, &weight, &experts.x(order, &host));
                    for launch in launches(&problem, order, &bench.card)
                        .into_iter()
                        .filter(|launch| launch.tile.rows() == block_rows)
                    {
                        for blocks in [1, 7, launch.blocks] {
                            let launch = Launch { blocks, ..launch };
                            let launched = Launched {
                                order,
                                epilogue,
                                launch,
                                routing: &routing,
                            };
                            let found = experts.run(bench, &uploaded, &launched);
                            let found = values(&found, case.activations);
                            let error = relative_error_of_terms(&found, &expected, &magnitude);
                            assert!(
                                error <= tolerance(case.activations),
                                "{problem}, {order:?}, {launch:?}, seed {seed}: relative error {error:e}"
                            );
                            ran += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(ran > 75, "only {ran} launches");
}

/// Checks that the planned tiles give the same bits in 1000 runs, with a routing made anew.
pub fn repeats(bench: &Bench, seed: u64) {
    let spec = QuantSpec::new(WeightValue::Int4, GroupSize::G128);
    let router = router(16, 4, RouterScores::Softmax, true);
    let case = case(spec, [24, 2048, 768]);
    let experts = Experts::random(case, router.experts, seed);
    let weight = experts.tensors();
    let logits = Spread::Random.logits(&router, case.m, seed);
    let dtype = ActivationDtype::F32;
    let problem = QuantProblem::new(
        case.m * router.top_k,
        experts.descriptor(),
        case.activations,
    );
    let of_layer = tile_plan(&problem, &problem, case.m, &bench.card)
        .unwrap_or_else(|| panic!("{problem}: no plan"));
    let host = HostRouting::new(&router, &logits, None, 1.0, of_layer.block_rows);
    let uploaded = experts.upload(bench, &weight, &experts.x(RowOrder::Gathered, &host));
    let run = || {
        let routing = routed(
            bench,
            router,
            of_layer.block_rows,
            &logits,
            dtype,
            None,
            1.0,
        );
        let launched = Launched {
            order: RowOrder::Gathered,
            epilogue: Epilogue::None,
            launch: of_layer.gate_up,
            routing: &routing,
        };
        experts.run(bench, &uploaded, &launched)
    };
    let first = run();
    for i in 1..1000 {
        assert!(
            run() == first,
            "{problem}, seed {seed}: run {i} gives other bits"
        );
    }
}

/// Checks the messages of routers and matmuls that are refused.
pub fn refusals(bench: &Bench, seed: u64) {
    for (experts, top_k) in [(8, 0), (8, 9), (64, 33), (1025, 8)] {
        let router = router(experts, top_k, RouterScores::Softmax, true);
        assert_eq!(
            router.check(),
            Err(KernelError::Router { experts, top_k }),
            "{router:?}"
        );
    }
    let good = router(9, 2, RouterScores::Softmax, true);
    let operands = RouteOperands {
        logits: buffer(&bench.client, &[0; 36], 9),
        dtype: ActivationDtype::F32,
        correction: None,
        factor: 1.0,
    };
    let refused = route(&bench.client, good, 1, 0, operands);
    assert!(
        matches!(refused, Err(KernelError::Shape { .. })),
        "blocks of no rows"
    );
    let spec = QuantSpec::new(WeightValue::Int4, GroupSize::G128);
    let case = case(spec, [3, 256, 256]);
    let experts = Experts::random(case, good.experts, seed);
    let logits = Spread::Random.logits(&good, case.m, seed);
    let weight = experts.tensors();
    let refused = |problem: &QuantProblem, order, launch: &Launch, routing: &Routing, x: usize| {
        let zeros = |count: usize| buffer(&bench.client, &vec![0; 2 * count], count);
        let operands = ExpertOperands {
            x: zeros(x),
            weight: weight_buffers(&bench.client, &experts.descriptor(), weight.as_ref()),
            bias: None,
            out: zeros(problem.m * problem.outputs()),
        };
        multiply(&bench.client, problem, order, launch, routing, operands)
            .err()
            .unwrap_or_else(|| panic!("{problem}, {order:?}: not refused"))
            .to_string()
    };
    let dtype = ActivationDtype::F32;
    let routing = routed(bench, good, 16, &logits, dtype, None, 1.0);
    let problem = experts.problem(&routing, Epilogue::None);
    let gathered = RowOrder::Gathered;
    let launch = launches(&problem, gathered, &bench.card)
        .into_iter()
        .find(|launch| launch.tile.rows() == 16)
        .unwrap_or_else(|| panic!("{problem}: no launch of 16 rows"));
    let x = case.m * case.k;
    for (message, part) in [
        (
            refused(&problem, gathered, &launch, &routing, x - 8),
            "activations: 760 elements",
        ),
        (
            refused(&problem, RowOrder::Sorted, &launch, &routing, x),
            "activations: 768 elements",
        ),
        (
            refused(&problem, RowOrder::InOrder, &launch, &routing, x),
            "gather or sort",
        ),
        (
            refused(
                &QuantProblem {
                    m: problem.m + 1,
                    ..problem
                },
                gathered,
                &launch,
                &routing,
                x,
            ),
            "another number of experts or rows",
        ),
        (
            refused(
                &problem,
                gathered,
                &launch,
                &routed(bench, good, 32, &logits, dtype, None, 1.0),
                x,
            ),
            "a launch of",
        ),
        (
            refused(
                &problem.with_scales(ActivationDtype::F32),
                gathered,
                &launch,
                &routing,
                x,
            ),
            "scales in f32",
        ),
    ] {
        assert!(message.contains(part), "`{message}` does not say `{part}`");
    }
}
