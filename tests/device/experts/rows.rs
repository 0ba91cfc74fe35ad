//! The kernels for few rows of experts, against f64, with outputs filled with NaN.

use super::layer::{Layer, layer_tolerance};
use super::operands::stacked;
use super::router;
use crate::kernels::{Uploaded, args, bytes, uploaded_weight, values};
use crate::marlin::Bench;
use cubecl::prelude::BufferArg;
use marlin_format::{GroupSize, QuantSpec, WeightLayout, WeightTensors};
use marlin_kernels::experts::{
    LayerOperands, LayerPlan, RouteOperands, RouterScores, RowPlan, layer, row_plan,
};
use marlin_kernels::matmul::gemv::CLUSTERS;
use marlin_kernels::{ActivationDtype, QuantProblem};
use marlin_testing::relative_error;
use marlin_tests::Operands;
use rand::SeedableRng;
use rand::rngs::StdRng;

/// The first compute capability with clusters of blocks.
const CLUSTERS_FROM: u32 = 90;

/// Checks layers of one to ten tokens with weights of a format: experts with one row, with many and
/// with none, one to eight experts of a token, K at the edges of steps and of chunks, N at those of
/// tiles, and every number of blocks that split K.
pub fn agree(bench: &Bench, spec: QuantSpec, seed: u64) {
    if bench.card.capability < CLUSTERS_FROM {
        return;
    }
    let activations = ActivationDtype::from(spec.scales.dtype);
    let mut ran = 0;
    for (i, (router, tokens, [hidden, intermediate])) in [
        (router(8, 2, RouterScores::Sigmoid, true), 2, [200, 192]),
        (router(9, 8, RouterScores::Softmax, true), 1, [1032, 256]),
        (router(40, 4, RouterScores::Softmax, false), 3, [520, 192]),
        (router(5, 1, RouterScores::Softmax, true), 10, [264, 704]),
        (router(33, 7, RouterScores::Sigmoid, false), 2, [328, 192]),
        (router(12, 3, RouterScores::Softmax, true), 1, [264, 192]),
        (router(12, 5, RouterScores::Softmax, true), 1, [264, 192]),
        (router(12, 6, RouterScores::Softmax, true), 1, [264, 192]),
    ]
    .into_iter()
    .enumerate()
    {
        let sizes = [hidden, intermediate];
        let case = Layer::random(router, sizes, spec, false, activations, seed);
        let [x, logits] = case.inputs(tokens, &mut StdRng::seed_from_u64(seed));
        let expected = case.expected(&x, &logits);
        let [gate_up, down] = case.problems(tokens);
        let planned = row_plan(&gate_up, &down, tokens, &bench.card)
            .unwrap_or_else(|| panic!("{gate_up}: no plan"));
        // Every number of blocks once, since each is a kernel of its own.
        let of_gate_up = CLUSTERS.map(|gate_up| RowPlan { gate_up, ..planned });
        let of_down = CLUSTERS.map(|down| RowPlan { down, ..planned });
        let others = of_gate_up.into_iter().chain(of_down).filter(|_| i == 0);
        // A cluster has at most eight blocks.
        let fits = |plan: &RowPlan| 2 * plan.gate_up <= 8 && router.top_k * plan.down <= 8;
        for plan in [planned].into_iter().chain(others.filter(fits)) {
            let found = run(bench, &case, &plan, &x, &logits);
            let error = relative_error(&found, &expected);
            assert!(
                error <= layer_tolerance(activations),
                "{tokens} tokens, {router:?}, {gate_up}, {plan:?}, seed {seed}: relative error \
                 {error:e}"
            );
            ran += 1;
        }
    }
    assert_eq!(ran, 14, "launches");
}

/// Checks layers of many experts, whose logits a lane loads four at a time, and logits in f32.
pub fn many_experts(bench: &Bench, seed: u64) {
    if bench.card.capability < CLUSTERS_FROM {
        return;
    }
    for (router, dtype) in [
        (router(128, 8, RouterScores::Softmax, true), None),
        (router(256, 8, RouterScores::Softmax, false), None),
        (router(128, 8, RouterScores::Sigmoid, true), None),
        (
            router(33, 4, RouterScores::Softmax, true),
            Some(ActivationDtype::F32),
        ),
    ] {
        let spec = QuantSpec::int4(GroupSize::G64);
        let activations = ActivationDtype::from(spec.scales.dtype);
        let case = Layer::random(router, [136, 128], spec, false, activations, seed);
        let [x, logits] = case.inputs(3, &mut StdRng::seed_from_u64(seed));
        let expected = case.expected(&x, &logits);
        let [gate_up, down] = case.problems(3);
        let plan = row_plan(&gate_up, &down, 3, &bench.card)
            .unwrap_or_else(|| panic!("{gate_up}: no plan"));
        let dtype = dtype.unwrap_or(activations);
        let uploaded = UploadedLayer::with_logits(bench, &case, &x, &logits, dtype);
        let found = run_uploaded(bench, &case, &plan, &uploaded, 3);
        let error = relative_error(&found, &expected);
        assert!(
            error <= layer_tolerance(activations),
            "{router:?}, logits in {dtype}, seed {seed}: relative error {error:e}"
        );
    }
}

/// Checks layers whose logits have four values alone: of equal logits, the expert with the lower
/// index comes first, as on the host.
pub fn ties(bench: &Bench, seed: u64) {
    if bench.card.capability < CLUSTERS_FROM {
        return;
    }
    for (experts, top_k, tokens) in [(16, 4, 3), (128, 8, 3), (33, 7, 2), (256, 8, 1)] {
        let router = router(experts, top_k, RouterScores::Softmax, true);
        let spec = QuantSpec::int4(GroupSize::G64);
        let activations = ActivationDtype::from(spec.scales.dtype);
        let case = Layer::random(router, [136, 128], spec, false, activations, seed);
        let [x, mut logits] = case.inputs(tokens, &mut StdRng::seed_from_u64(seed));
        for logit in &mut logits {
            *logit = (2.0 * *logit).floor() / 2.0;
        }
        let expected = case.expected(&x, &logits);
        let [gate_up, down] = case.problems(tokens);
        let plan = row_plan(&gate_up, &down, tokens, &bench.card)
            .unwrap_or_else(|| panic!("{gate_up}: no plan"));
        for dtype in [activations, ActivationDtype::F32] {
            let uploaded = UploadedLayer::with_logits(bench, &case, &x, &logits, dtype);
            let found = run_uploaded(bench, &case, &plan, &uploaded, tokens);
            let error = relative_error(&found, &expected);
            assert!(
                error <= layer_tolerance(activations),
                "{router:?}, logits in {dtype}, seed {seed}: relative error {error:e}"
            );
        }
    }
}

/// Checks that a token's logits that are not finite make its outputs NaN, and no other token's.
pub fn not_finite(bench: &Bench, seed: u64) {
    if bench.card.capability < CLUSTERS_FROM {
        return;
    }
    let router = router(16, 4, RouterScores::Softmax, true);
    let spec = QuantSpec::int4(GroupSize::G64);
    let activations = ActivationDtype::from(spec.scales.dtype);
    let case = Layer::random(router, [256, 128], spec, false, activations, seed);
    let [x, mut logits] = case.inputs(3, &mut StdRng::seed_from_u64(seed));
    let [gate_up, down] = case.problems(3);
    let plan =
        row_plan(&gate_up, &down, 3, &bench.card).unwrap_or_else(|| panic!("{gate_up}: no plan"));
    let finite = run(bench, &case, &plan, &x, &logits);
    logits[router.experts + 5] = f32::NAN;
    let found = run(bench, &case, &plan, &x, &logits);
    for (token, (found, finite)) in found.chunks(256).zip(finite.chunks(256)).enumerate() {
        let is_right = if token == 1 {
            found.iter().all(|value| value.is_nan())
        } else {
            found == finite
        };
        assert!(is_right, "token {token}, seed {seed}");
    }
}

/// Checks that 1000 runs give the same bits.
pub fn repeats(bench: &Bench, seed: u64) {
    if bench.card.capability < CLUSTERS_FROM {
        return;
    }
    let router = router(8, 4, RouterScores::Softmax, true);
    let spec = QuantSpec::int4(GroupSize::G128);
    let activations = ActivationDtype::from(spec.scales.dtype);
    let case = Layer::random(router, [1024, 256], spec, false, activations, seed);
    let [x, logits] = case.inputs(4, &mut StdRng::seed_from_u64(seed));
    let [gate_up, down] = case.problems(4);
    let plan =
        row_plan(&gate_up, &down, 4, &bench.card).unwrap_or_else(|| panic!("{gate_up}: no plan"));
    let uploaded = UploadedLayer::new(bench, &case, &x, &logits);
    let first = run_uploaded(bench, &case, &plan, &uploaded, 4);
    for i in 1..1000 {
        let found = run_uploaded(bench, &case, &plan, &uploaded, 4);
        assert!(found == first, "seed {seed}: run {i} gives other bits");
    }
}

impl Layer {
    /// Returns the matmuls of gates and ups, and of down.
    fn problems(&self, tokens: usize) -> [QuantProblem; 2] {
        let problem = |of: &[Operands]| {
            let weight = of[0]
                .weight
                .descriptor()
                .in_layout(WeightLayout::Tile)
                .with_experts(self.router.experts);
            QuantProblem::new(tokens * self.router.top_k, weight, self.activations)
        };
        [
            problem(&self.gate_up).with_epilogue(self.epilogue),
            problem(&self.down),
        ]
    }
}

/// The operands of a layer on the device.
struct UploadedLayer {
    x: Uploaded,
    logits: Uploaded,
    logits_dtype: ActivationDtype,
    correction: Option<Uploaded>,
    gate_up: WeightTensors<Uploaded>,
    down: WeightTensors<Uploaded>,
    biases: Option<[Uploaded; 2]>,
}

impl UploadedLayer {
    fn new(bench: &Bench, case: &Layer, x: &[f32], logits: &[f32]) -> Self {
        Self::with_logits(bench, case, x, logits, case.activations)
    }

    fn with_logits(
        bench: &Bench,
        case: &Layer,
        x: &[f32],
        logits: &[f32],
        logits_dtype: ActivationDtype,
    ) -> Self {
        let client = &bench.client;
        let floats =
            |values: &[f32], dtype| Uploaded::new(client, &bytes(values, dtype), values.len());
        let [gate_up, down] = case.problems(logits.len() / case.router.experts);
        let weight = |problem: &QuantProblem, of: &[Operands]| {
            uploaded_weight(client, &problem.weight, stacked(of).as_ref())
        };
        let biases = |of: &[Operands]| {
            let values: Vec<f32> = of.iter().flat_map(|of| &of.bias).copied().collect();
            floats(&values, case.activations)
        };
        let correction = case.correction.as_ref();
        Self {
            x: floats(x, case.activations),
            logits: floats(logits, logits_dtype),
            logits_dtype,
            correction: correction.map(|values| floats(values, ActivationDtype::F32)),
            gate_up: weight(&gate_up, &case.gate_up),
            down: weight(&down, &case.down),
            biases: case
                .has_biases
                .then(|| [&case.gate_up, &case.down].map(|of| biases(of))),
        }
    }
}

/// Runs a layer on an output filled with NaN.
fn run(bench: &Bench, case: &Layer, plan: &RowPlan, x: &[f32], logits: &[f32]) -> Vec<f64> {
    let uploaded = UploadedLayer::new(bench, case, x, logits);
    run_uploaded(
        bench,
        case,
        plan,
        &uploaded,
        logits.len() / case.router.experts,
    )
}

fn run_uploaded(
    bench: &Bench,
    case: &Layer,
    plan: &RowPlan,
    uploaded: &UploadedLayer,
    tokens: usize,
) -> Vec<f64> {
    let (client, dtype) = (&bench.client, case.activations);
    let [gate_up, down] = case.problems(tokens);
    let elements = tokens * case.hidden;
    let poison = client.create_from_slice(&bytes(&vec![f32::NAN; elements], dtype));
    let bias = |which: usize| uploaded.biases.as_ref().map(|biases| biases[which].arg());
    let operands = LayerOperands {
        x: uploaded.x.arg(),
        route: RouteOperands {
            logits: uploaded.logits.arg(),
            dtype: uploaded.logits_dtype,
            correction: uploaded.correction.as_ref().map(Uploaded::arg),
            factor: case.factor as f32,
        },
        gate_up: args(&uploaded.gate_up),
        gate_up_bias: bias(0),
        down: args(&uploaded.down),
        down_bias: bias(1),
        // SAFETY: the buffer was made for as many elements.
        out: unsafe { BufferArg::from_raw_parts(poison.clone(), elements) },
    };
    let plan = LayerPlan::Rows(*plan);
    layer(client, case.router, &gate_up, &down, &plan, operands)
        .unwrap_or_else(|error| panic!("{gate_up}, {plan:?}: {error}"));
    let out = client
        .read_one(poison)
        .unwrap_or_else(|error| panic!("{gate_up}, {plan:?}: {error}"));
    values(&out, dtype)
}
