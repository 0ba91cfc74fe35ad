//! The Marlin kernel, launched on raw buffers: every tile and format, shapes at tile edges, outputs filled with NaN.

use crate::kernels::{buffer, bytes, client, must, values, weight_buffers};
use crate::setup::{Named, trial};
use burn::tensor::Device;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use libtest_mimic::Trial;
use marlin_format::{Bits, GroupSize, QuantSpec, ScaleDtype, Sparsity, WeightLayout, WeightTensors};
use marlin_kernels::device::CLUSTER_CAPABILITY;
use marlin_kernels::tile::{self, Launch};
use marlin_kernels::{
    ActivationDtype, Card, ClustersAtOnce, Epilogue, EpilogueStage, Kernel, KernelError, Operands as LaunchOperands, Plan, QuantProblem,
    Reason, launch,
};
use marlin_tests::{Case, Operands, ROWS, cases, relative_error, tolerance};

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    if device.name != "cuda" {
        return;
    }
    // One test for each width, group and dtype, so that several processes can share the compilation.
    for (bits, group) in Bits::ALL.into_iter().flat_map(|bits| GroupSize::ALL.map(|group| (bits, group))) {
        for dtype in [ActivationDtype::F16, ActivationDtype::BF16] {
            let name = format!("marlin::every_tile_agrees_with_f64::{bits}::{group}::{dtype}");
            tests.push(trial(device, &name, move |device| every_tile(device, bits, group, dtype, seed)));
        }
    }
    // And one for each number of rows, so that each is short enough for a sanitizer.
    for (bits, group, zero_points, scales) in SPLIT {
        for m in ROWS.into_iter().filter(|&m| m <= 129) {
            let name = format!("marlin::split_columns_agree_with_f64::{bits}::{group}::{m}");
            let spec = QuantSpec { bits, zero_points, ..QuantSpec::int4(group).with_scale_dtype(scales) };
            tests.push(trial(device, &name, move |device| split_columns(device, spec, m, seed)));
        }
    }
    for (bits, group, zero_points, scales) in SPLIT {
        let spec = QuantSpec { bits, zero_points, ..QuantSpec::int4(group).with_scale_dtype(scales) };
        let name = format!("marlin::swiglu_agrees_with_f64::{bits}::{group}");
        tests.push(trial(device, &name, move |device| swiglu(device, spec, seed)));
    }
    tests.push(trial(device, "marlin::the_driver_says_how_many_clusters_fit", clusters_fit));
    tests.push(trial(device, "marlin::waves_agree_with_f64", move |device| waves(device, seed)));
    tests.push(trial(device, "marlin::large_sums_do_not_overflow", move |device| large_sums(device, seed)));
    for m in [1, 16, 64] {
        let name = format!("marlin::a_thousand_runs_give_the_same_bits::{m}");
        tests.push(trial(device, &name, move |device| repeats(device, m, seed)));
    }
    tests.push(trial(device, "marlin::wrong_operands_are_refused", move |device| refusals(device, seed)));
    // After the fault, nothing else runs on the device: `--ignored` runs this test, in a process of its own.
    tests.push(trial(device, "marlin::a_fault_is_an_error_at_the_next_sync", fault).with_ignored_flag(true));
}

/// A client and its card.
pub struct Bench {
    pub client: Client,
    pub card: Card,
}

/// The problem of a case, with its weight in the tile layout.
pub fn problem(case: &Case) -> QuantProblem {
    case.problem().in_layout(WeightLayout::Tile)
}

impl Bench {
    pub fn new(device: &Device) -> Self {
        let client = client(device);
        let card = Card::of(&client).unwrap_or_else(|| panic!("the device is no NVIDIA card"));
        Self { client, card }
    }

    pub fn operands(&self, case: &Case, operands: &Operands, out: BufferArg) -> LaunchOperands {
        LaunchOperands {
            x: buffer(&self.client, &bytes(&operands.x, case.activations), operands.x.len()),
            norm: None,
            weight: weight_buffers(&self.client, &problem(case).weight, operands.tiles().as_ref()),
            bias: Some(buffer(&self.client, &bytes(&operands.bias, case.activations), case.n)),
            out,
        }
    }

    /// The plan of a launch.
    fn plan(&self, launch: Launch) -> Plan {
        Plan::product(Kernel::Marlin(launch), Reason::TensorCores { capability: self.card.capability })
    }

    /// Runs a case on an output filled with NaN, and returns the bytes of the output.
    fn run(&self, case: &Case, operands: &Operands, launch: Launch) -> Vec<u8> {
        self.run_problem(&problem(case), case, operands, &self.plan(launch))
    }

    /// Runs a problem, that of a case with or without an epilogue, in the same way.
    pub fn run_problem(&self, problem: &QuantProblem, case: &Case, operands: &Operands, plan: &Plan) -> Vec<u8> {
        let outputs = problem.m * problem.outputs();
        let poison = self.client.create_from_slice(&bytes(&vec![f32::NAN; outputs], case.activations));
        // SAFETY: the buffer was made for as many elements.
        let out = unsafe { BufferArg::from_raw_parts(poison.clone(), outputs) };
        launch(&self.client, problem, plan, self.operands(case, operands, out)).unwrap_or_else(|error| panic!("{problem}: {error}"));
        self.client.read_one(poison).unwrap_or_else(|error| panic!("{problem}, {plan:?}: {error}")).to_vec()
    }

    /// Runs a case with SwiGLU, and compares it with f64.
    fn check_swiglu(&self, case: &Case, operands: &Operands, launch: Launch, seed: u64) {
        let problem = problem(case).with_epilogue(Epilogue::SwiGlu);
        let plan = Plan { epilogue: EpilogueStage::InKernel, ..self.plan(launch) };
        let found = values(&self.run_problem(&problem, case, operands, &plan), case.activations);
        let (expected, magnitude) = operands.swiglu(case);
        let error = relative_error(&found, &expected, &magnitude);
        assert!(error <= tolerance(case.activations), "{problem}, {launch:?}, seed {seed}: relative error {error:e}");
    }

    fn check(&self, case: &Case, operands: &Operands, launch: Launch, seed: u64) {
        let found = values(&self.run(case, operands, launch), case.activations);
        let error = relative_error(&found, &operands.expected, &operands.magnitude);
        assert!(error <= tolerance(case.activations), "{case}, {launch:?}, seed {seed}: relative error {error:e}");
    }
}

fn takes(case: &Case) -> bool {
    case.activations != ActivationDtype::F32 && case.problem().scales == case.activations
}

fn every_tile(device: &Device, bits: Bits, group: GroupSize, dtype: ActivationDtype, seed: u64) {
    let bench = Bench::new(device);
    let mut ran = 0;
    let is_of_test = |case: &Case| (case.spec.bits, case.spec.group, case.activations) == (bits, group, dtype);
    for case in cases().iter().filter(|case| takes(case) && is_of_test(case)) {
        let operands = Operands::random(case, seed);
        for launch in tile::launches(&problem(case), &bench.card) {
            bench.check(case, &operands, launch, seed);
            ran += 1;
        }
    }
    assert!(ran > 75, "only {ran} launches");
}

/// The formats tested with split columns: the scale is applied to the weights, to the sum of each group, or to the output.
const SPLIT: [(Bits, GroupSize, bool, ScaleDtype); 5] = [
    (Bits::Four, GroupSize::G128, false, ScaleDtype::F16),
    (Bits::Four, GroupSize::G32, true, ScaleDtype::BF16),
    (Bits::Four, GroupSize::Channel, false, ScaleDtype::BF16),
    (Bits::Eight, GroupSize::G128, false, ScaleDtype::F16),
    (Bits::Eight, GroupSize::G32, true, ScaleDtype::BF16),
];

/// The same launch on `blocks` blocks; the tiles fix those of clusters.
fn with_blocks(launch: Launch, blocks: usize) -> Launch {
    if launch.tile.is_clustered() { launch } else { Launch { blocks, ..launch } }
}

/// Long columns on few blocks and on all, so that a tile is computed by one, two or many blocks, and a block computes parts of many tiles.
fn split_columns(device: &Device, spec: QuantSpec, m: usize, seed: u64) {
    let bench = Bench::new(device);
    // The second K has an odd number of chunks, and a last group of 24 rows.
    for (k, sparsity) in [4096, 4120].into_iter().flat_map(|k| Sparsity::ALL.map(|sparsity| (k, sparsity))) {
        let case = Case { m, k, n: 328, spec, activations: ActivationDtype::from(spec.scale_dtype), permuted: false, sparsity };
        let operands = Operands::random(&case, seed);
        for launch in tile::launches(&problem(&case), &bench.card) {
            for blocks in [1, 2, 7, launch.blocks / 2, launch.blocks] {
                bench.check(&case, &operands, with_blocks(launch, blocks.max(1)), seed);
            }
        }
    }
}

/// Clusters at once are asked of the driver: more of them than a card is assumed to have, and no more than its multiprocessors have room for.
fn clusters_fit(device: &Device) {
    let Card { capability, multiprocessors, clusters, .. } = Bench::new(device).card;
    let assumed = ClustersAtOnce::assumed(multiprocessors);
    if capability < CLUSTER_CAPABILITY {
        assert_eq!(clusters, assumed, "a card without clusters is not asked");
        return;
    }
    assert_ne!(clusters, assumed, "the driver did not answer");
    for blocks in 1..=ClustersAtOnce::MOST_BLOCKS {
        let (found, least) = (clusters.of(blocks), if blocks <= 2 { assumed.of(blocks) } else { 1 });
        assert!(
            (least..=multiprocessors / blocks).contains(&found),
            "{found} clusters of {blocks} blocks on {multiprocessors} multiprocessors"
        );
    }
    assert_eq!(clusters.of(0) + clusters.of(ClustersAtOnce::MOST_BLOCKS + 1), 0);
}

/// Many tiles on few blocks, which visit most of them whole: of all blocks of rows that are visited together, and of the fewer that are left.
fn waves(device: &Device, seed: u64) {
    let bench = Bench::new(device);
    let mut ran = 0;
    for (bits, sparsity) in Bits::ALL.into_iter().flat_map(|bits| Sparsity::ALL.map(|sparsity| (bits, sparsity))) {
        let spec = QuantSpec { bits, ..QuantSpec::int4(GroupSize::G64) };
        let case = Case { m: 1300, k: 320, n: 840, spec, activations: ActivationDtype::F16, permuted: false, sparsity };
        let operands = Operands::random(&case, seed);
        for launch in tile::launches(&problem(&case), &bench.card).into_iter().filter(|launch| launch.tile.has_waves()) {
            for blocks in [1, 3, 7, 20] {
                bench.check(&case, &operands, Launch { blocks, ..launch }, seed);
                ran += 1;
            }
        }
    }
    assert!(bench.card.capability != 90 || ran >= 24, "only {ran} launches");
}

/// Gates and ups in one matmul: every tile that takes them, on few blocks and on all, with rows at the edges of tiles, and more tiles than blocks in waves.
fn swiglu(device: &Device, spec: QuantSpec, seed: u64) {
    let bench = Bench::new(device);
    let mut ran = 0;
    for (m, sparsity) in [1, 7, 9, 17, 33, 65, 129, 700].into_iter().flat_map(|m| Sparsity::ALL.map(|sparsity| (m, sparsity))) {
        let (k, n) = if m > 600 { (328, 1280) } else { (2072, 768) };
        let case = Case { m, k, n, spec, activations: ActivationDtype::from(spec.scale_dtype), permuted: false, sparsity };
        let operands = Operands::random(&case, seed);
        for launch in tile::launches(&problem(&case).with_epilogue(Epilogue::SwiGlu), &bench.card) {
            for blocks in [1, 3, 7, launch.blocks] {
                bench.check_swiglu(&case, &operands, with_blocks(launch, blocks), seed);
                ran += 1;
            }
        }
    }
    assert!(ran > 100, "only {ran} launches");
}

/// Checks sums whose first half of K exceeds the largest f16 by far, and whose second half cancels it.
fn large_sums(device: &Device, seed: u64) {
    let bench = Bench::new(device);
    for (bits, sparsity) in Bits::ALL.into_iter().flat_map(|bits| Sparsity::ALL.map(|sparsity| (bits, sparsity))) {
        let spec = QuantSpec { bits, ..QuantSpec::int4(GroupSize::G128) };
        let case = Case { m: 16, k: 16384, n: 64, spec, activations: ActivationDtype::F16, permuted: false, sparsity };
        let mut operands = Operands::random(&case, seed);
        // Weights of 8 bits are up to 17 times as large.
        let (half, size) = (case.k / 2, if bits == Bits::Four { 1800.0 } else { 106.0 });
        for row in operands.x.chunks_mut(case.k) {
            for k in 0..half {
                row[half + k] = -size;
                row[k] = size;
            }
        }
        operands.recompute(&case);
        for launch in tile::launches(&problem(&case), &bench.card) {
            bench.check(&case, &operands, launch, seed);
        }
    }
}

/// Checks that the planned tile gives the same bits in 1000 runs, and each other tile in 50.
fn repeats(device: &Device, m: usize, seed: u64) {
    let bench = Bench::new(device);
    for (bits, sparsity) in Bits::ALL.into_iter().flat_map(|bits| Sparsity::ALL.map(|sparsity| (bits, sparsity))) {
        let spec = QuantSpec { bits, ..QuantSpec::int4(GroupSize::G128) };
        let case = Case { m, k: 8192, n: 832, spec, activations: ActivationDtype::F16, permuted: false, sparsity };
        let operands = Operands::random(&case, seed);
        let planned = tile::plan(&problem(&case), &bench.card).unwrap_or_else(|| panic!("{case}: no plan"));
        for launch in tile::launches(&problem(&case), &bench.card) {
            let first = bench.run(&case, &operands, launch);
            for run in 1..if launch == planned { 1000 } else { 50 } {
                assert!(bench.run(&case, &operands, launch) == first, "{case}, {launch:?}, seed {seed}: run {run} gives other bits");
            }
        }
    }
}

fn refusals(device: &Device, seed: u64) {
    let bench = Bench::new(device);
    let spec = QuantSpec::int4(GroupSize::Channel);
    let case = Case { m: 3, k: 72, n: 40, spec, activations: ActivationDtype::F16, permuted: false, sparsity: Sparsity::Dense };
    let operands = Operands::random(&case, seed);
    let planned = tile::plan(&problem(&case), &bench.card).unwrap_or_else(|| panic!("{case}: no plan"));
    let run = |case: &Case, outputs: usize| {
        let out = buffer(&bench.client, &vec![0; outputs * 2], outputs);
        let operands = bench.operands(&Case { n: 40, activations: ActivationDtype::F16, ..*case }, &operands, out);
        launch(&bench.client, &problem(case), &bench.plan(planned), operands)
    };
    let short = run(&case, case.m * case.n - 1);
    assert!(matches!(short, Err(KernelError::BufferLength { operand: "output", .. })), "{short:?}");
    let wide = run(&Case { n: 128, ..case }, case.m * 128);
    assert!(matches!(wide, Err(KernelError::BufferLength { operand: "words", .. })), "{wide:?}");
    let gated = problem(&Case { n: 128, ..case }).with_epilogue(Epilogue::SwiGlu);
    for stage in [EpilogueStage::After, EpilogueStage::InKernel] {
        let narrow = Launch { tile: tile::Tile { warps_n: 1, ..planned.tile }, ..planned };
        let plan = Plan { epilogue: stage, ..bench.plan(narrow) };
        let wide = Case { n: 128, ..case };
        let out = buffer(&bench.client, &vec![0; 3 * 64 * 2], 3 * 64);
        let refused = launch(&bench.client, &gated, &plan, bench.operands(&wide, &Operands::random(&wide, seed), out));
        assert!(matches!(refused, Err(KernelError::Epilogue { .. })), "{refused:?}");
    }
    let out = buffer(&bench.client, &vec![0; case.m * case.n * 2], case.m * case.n);
    let empty = bench.plan(Launch { blocks: 0, ..planned });
    let none = launch(&bench.client, &problem(&case), &empty, bench.operands(&case, &operands, out));
    assert!(matches!(none, Err(KernelError::Blocks { .. })), "{none:?}");
    let floats = run(&Case { activations: ActivationDtype::F32, ..case }, case.m * case.n);
    assert!(matches!(floats, Err(KernelError::DtypePair { .. })), "{floats:?}");
}

/// Checks that a read past a buffer is an error: the weight declares 1 GiB, and its buffer has 16 bytes.
fn fault(device: &Device) {
    let bench = Bench::new(device);
    let (k, n) = (65536, 32768);
    let case = Case {
        m: 1,
        k,
        n,
        spec: QuantSpec::int4(GroupSize::Channel),
        activations: ActivationDtype::F16,
        permuted: false,
        sparsity: Sparsity::Dense,
    };
    let planned = tile::plan(&problem(&case), &bench.card).unwrap_or_else(|| panic!("{case}: no plan"));
    let operands = LaunchOperands {
        x: buffer(&bench.client, &vec![0; k * 2], k),
        norm: None,
        weight: WeightTensors {
            // SAFETY: none. The kernel reads past the buffer, which is the fault that this test is about.
            words: unsafe { BufferArg::from_raw_parts(bench.client.empty(16), problem(&case).weight.tensors().words.elements()) },
            metadata: None,
            scales: buffer(&bench.client, &vec![0; n * 2], n),
            zero_points: None,
            row_permutation: None,
        },
        bias: None,
        out: buffer(&bench.client, &vec![0; n * 2], n),
    };
    must(&case, launch(&bench.client, &problem(&case), &bench.plan(planned), operands));
    match cubecl::future::block_on(bench.client.sync()) {
        Ok(()) => panic!("{case}: a read of 1 GiB past a buffer of 16 bytes was no fault"),
        Err(error) => println!("{error}"),
    }
}
