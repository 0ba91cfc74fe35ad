//! The Marlin kernel, launched on raw buffers: every tile and format, shapes at tile edges, outputs
//! filled with NaN.

mod bench;
mod errors;

use crate::setup::{Named, trial};
pub use bench::{Bench, problem};
use burn::tensor::Device;
use libtest_mimic::Trial;
use marlin_format::{GroupSize, QuantSpec, ScaleDtype, WeightValue};
use marlin_kernels::device::CLUSTER_CAPABILITY;
use marlin_kernels::tile::{self, Launch};
use marlin_kernels::{ActivationDtype, Card, ClustersAtOnce, Epilogue};
use marlin_tests::{Case, Operands, ROWS, cases};

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    if device.name != "cuda" {
        return;
    }
    for (value, group) in WeightValue::ALL
        .into_iter()
        .flat_map(|value| value.groups().iter().map(move |&group| (value, group)))
    {
        for dtype in [ActivationDtype::F16, ActivationDtype::BF16] {
            add_tiles(tests, device, value, group, dtype, seed);
        }
    }
    for spec in split_specs() {
        let (value, group) = (spec.value, spec.scales.group);
        let name = format!("marlin::swiglu_agrees_with_f64::{value}::{group}");
        tests.push(trial(device, &name, move |device| {
            swiglu(device, spec, seed)
        }));
    }
    tests.push(trial(
        device,
        "marlin::the_driver_says_how_many_clusters_fit",
        clusters_fit,
    ));
    tests.push(trial(
        device,
        "marlin::wrong_operands_are_refused",
        move |device| errors::refusals(device, seed),
    ));
    // After the fault, nothing else runs on the device. `--ignored` runs this test in a separate
    // process.
    tests.push(
        trial(
            device,
            "marlin::a_fault_is_an_error_at_the_next_sync",
            errors::fault,
        )
        .with_ignored_flag(true),
    );
}

/// Adds the tests of all tiles of a format. They compile the same kernels, so that `run.sh` gives
/// each format a process.
fn add_tiles(
    tests: &mut Vec<Trial>,
    device: &Named,
    value: WeightValue,
    group: GroupSize,
    dtype: ActivationDtype,
    seed: u64,
) {
    let mut add = |name: &str, body: Box<dyn Fn(&Device) + Send>| {
        let name = format!("marlin::tiles::{value}_{group}_{dtype}::{name}");
        tests.push(trial(device, &name, body));
    };
    add(
        "agree_with_f64",
        Box::new(move |device| every_tile(device, value, group, dtype, seed)),
    );
    let is_of_format = |spec: &QuantSpec| {
        let of_spec = ActivationDtype::from(spec.scales.dtype);
        (spec.value, spec.scales.group, of_spec) == (value, group, dtype)
    };
    // Each number of rows has its own test, so that each test is short enough for a sanitizer.
    for spec in split_specs().filter(is_of_format) {
        for m in ROWS.into_iter().filter(|&m| m <= 129) {
            add(
                &format!("split_columns_agree_with_f64::{m}"),
                Box::new(move |device| split_columns(device, spec, m, seed)),
            );
        }
    }
    if dtype != ActivationDtype::F16 {
        return;
    }
    if group == group_of(value, GroupSize::G64) {
        add(
            "waves_agree_with_f64",
            Box::new(move |device| waves(device, value, seed)),
        );
    }
    if group == group_of(value, GroupSize::G128) {
        add(
            "large_sums_do_not_overflow",
            Box::new(move |device| large_sums(device, value, seed)),
        );
        for m in [1, 16, 64] {
            add(
                &format!("a_thousand_runs_give_the_same_bits::{m}"),
                Box::new(move |device| repeats(device, value, m, seed)),
            );
        }
    }
}

/// Returns the group size `wanted`, or the smallest that a kind of values can have.
fn group_of(value: WeightValue, wanted: GroupSize) -> GroupSize {
    let groups = value.groups();
    let smallest = groups.last().copied().unwrap_or(wanted);
    groups
        .iter()
        .copied()
        .find(|&group| group == wanted)
        .unwrap_or(smallest)
}

fn takes(case: &Case) -> bool {
    case.activations != ActivationDtype::F32 && case.problem().scales == case.activations
}

fn every_tile(
    device: &Device,
    bits: WeightValue,
    group: GroupSize,
    dtype: ActivationDtype,
    seed: u64,
) {
    let bench = Bench::new(device);
    let mut ran = 0;
    let is_of_test = |case: &Case| {
        (case.spec.value, case.spec.scales.group, case.activations) == (bits, group, dtype)
    };
    for case in cases()
        .iter()
        .filter(|case| takes(case) && is_of_test(case))
    {
        let operands = Operands::random(case, seed);
        for launch in tile::launches(&problem(case), &bench.card) {
            bench.check(case, &operands, launch, seed);
            ran += 1;
        }
    }
    assert!(ran > 75, "only {ran} launches");
}

/// The formats tested with split columns: the scale is applied to the weights, to the sum of each
/// group, or to the output.
const SPLIT: [(WeightValue, GroupSize, bool, ScaleDtype); 9] = [
    (WeightValue::Int4, GroupSize::G128, false, ScaleDtype::F16),
    (WeightValue::Int4, GroupSize::G32, true, ScaleDtype::BF16),
    (
        WeightValue::Int4,
        GroupSize::Channel,
        false,
        ScaleDtype::BF16,
    ),
    (WeightValue::Int8, GroupSize::G128, false, ScaleDtype::F16),
    (WeightValue::Int8, GroupSize::G32, true, ScaleDtype::BF16),
    (WeightValue::E2m1, GroupSize::G16, false, ScaleDtype::F16),
    (WeightValue::E2m1, GroupSize::G32, false, ScaleDtype::BF16),
    (
        WeightValue::E4m3,
        GroupSize::Channel,
        false,
        ScaleDtype::F16,
    ),
    (WeightValue::E4m3, GroupSize::G128, false, ScaleDtype::BF16),
];

fn split_specs() -> impl Iterator<Item = QuantSpec> {
    SPLIT
        .into_iter()
        .map(|(value, group, zero_points, scales)| {
            QuantSpec::new(value, group)
                .with_zero_point(zero_points.into())
                .with_scale_dtype(scales)
        })
}

/// Returns the launch with `blocks` blocks. A launch on clusters is returned unchanged, because its
/// tiles fix the number of blocks.
fn with_blocks(launch: Launch, blocks: usize) -> Launch {
    if launch.tile.is_clustered() {
        launch
    } else {
        Launch { blocks, ..launch }
    }
}

/// Checks long columns on few blocks and on all, so that a tile is computed by one, two or many
/// blocks, and a block computes parts of many tiles.
fn split_columns(device: &Device, spec: QuantSpec, m: usize, seed: u64) {
    let bench = Bench::new(device);
    // The second K has an odd number of chunks, and a last group of 24 rows.
    for (k, sparsity) in [4096, 4120].into_iter().flat_map(|k| {
        spec.value
            .sparsities()
            .iter()
            .map(move |&sparsity| (k, sparsity))
    }) {
        let case = Case {
            m,
            k,
            n: 328,
            spec,
            activations: ActivationDtype::from(spec.scales.dtype),
            permuted: false,
            sparsity,
        };
        let operands = Operands::random(&case, seed);
        for launch in tile::launches(&problem(&case), &bench.card) {
            for blocks in [1, 2, 7, launch.blocks / 2, launch.blocks] {
                bench.check(&case, &operands, with_blocks(launch, blocks.max(1)), seed);
            }
        }
    }
}

/// Checks the numbers of concurrent clusters that the driver reports: at least the assumed numbers
/// for small clusters, and at most as many as fit on the multiprocessors.
fn clusters_fit(device: &Device) {
    let Card {
        capability,
        multiprocessors,
        clusters,
        ..
    } = Bench::new(device).card;
    let assumed = ClustersAtOnce::assumed(multiprocessors);
    if capability < CLUSTER_CAPABILITY {
        assert_eq!(clusters, assumed, "a card without clusters is not asked");
        return;
    }
    assert_ne!(clusters, assumed, "the driver did not answer");
    for blocks in 1..=ClustersAtOnce::MOST_BLOCKS {
        let (found, least) = (
            clusters.of(blocks),
            if blocks <= 2 { assumed.of(blocks) } else { 1 },
        );
        assert!(
            (least..=multiprocessors / blocks).contains(&found),
            "{found} clusters of {blocks} blocks on {multiprocessors} multiprocessors"
        );
    }
    assert_eq!(
        clusters.of(0) + clusters.of(ClustersAtOnce::MOST_BLOCKS + 1),
        0
    );
}

/// Checks many tiles on few blocks, where a block computes most of its tiles whole. Waves have the
/// full number of blocks of rows, and the last wave has fewer.
fn waves(device: &Device, value: WeightValue, seed: u64) {
    let bench = Bench::new(device);
    let mut ran = 0;
    for &sparsity in value.sparsities() {
        let spec = QuantSpec::new(value, group_of(value, GroupSize::G64));
        let case = Case {
            m: 1300,
            k: 320,
            n: 840,
            spec,
            activations: ActivationDtype::F16,
            permuted: false,
            sparsity,
        };
        let operands = Operands::random(&case, seed);
        for launch in tile::launches(&problem(&case), &bench.card)
            .into_iter()
            .filter(|launch| launch.tile.has_waves())
        {
            for blocks in [1, 3, 7, 20] {
                bench.check(&case, &operands, Launch { blocks, ..launch }, seed);
                ran += 1;
            }
        }
    }
    assert!(
        bench.card.capability != 90 || ran >= 4 * value.sparsities().len(),
        "only {ran} launches"
    );
}

/// Checks gates and ups in one matmul with SwiGLU: every tile that supports them, on few blocks and
/// on all. Rows lie at the edges of tiles, and waves have more tiles than blocks.
fn swiglu(device: &Device, spec: QuantSpec, seed: u64) {
    let bench = Bench::new(device);
    let mut ran = 0;
    for (m, sparsity) in [1, 7, 9, 17, 33, 65, 129, 700].into_iter().flat_map(|m| {
        spec.value
            .sparsities()
            .iter()
            .map(move |&sparsity| (m, sparsity))
    }) {
        let (k, n) = if m > 600 { (328, 1280) } else { (2072, 768) };
        let case = Case {
            m,
            k,
            n,
            spec,
            activations: ActivationDtype::from(spec.scales.dtype),
            permuted: false,
            sparsity,
        };
        let operands = Operands::random(&case, seed);
        for launch in tile::launches(&problem(&case).with_epilogue(Epilogue::SwiGlu), &bench.card) {
            let mut check = |epilogue, blocks| {
                let launch = with_blocks(launch, blocks);
                bench.check_gated(&case, epilogue, &operands, launch, seed);
                ran += 1;
            };
            for blocks in [1, 3, 7, launch.blocks] {
                check(Epilogue::SwiGlu, blocks);
            }
            check(Epilogue::ClampedSwiGlu, launch.blocks);
        }
    }
    assert!(ran > 100, "only {ran} launches");
}

/// Checks sums whose first half of K exceeds the largest f16 by far, and whose second half cancels
/// it.
fn large_sums(device: &Device, value: WeightValue, seed: u64) {
    let bench = Bench::new(device);
    for &sparsity in value.sparsities() {
        let spec = QuantSpec::new(value, group_of(value, GroupSize::G128));
        let case = Case {
            m: 16,
            k: 16384,
            n: 64,
            spec,
            activations: ActivationDtype::F16,
            permuted: false,
            sparsity,
        };
        let mut operands = Operands::random(&case, seed);
        // Weights are up to 17 times as large with 8-bit integers, and 56 times with e4m3.
        let size = match value {
            WeightValue::Int4 | WeightValue::E2m1 => 1800.0,
            WeightValue::Int8 => 106.0,
            WeightValue::E4m3 => 30.0,
        };
        let half = case.k / 2;
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
fn repeats(device: &Device, value: WeightValue, m: usize, seed: u64) {
    let bench = Bench::new(device);
    for &sparsity in value.sparsities() {
        let spec = QuantSpec::new(value, group_of(value, GroupSize::G128));
        let case = Case {
            m,
            k: 8192,
            n: 832,
            spec,
            activations: ActivationDtype::F16,
            permuted: false,
            sparsity,
        };
        let operands = Operands::random(&case, seed);
        let problem = problem(&case);
        let planned =
            tile::plan(&problem, &bench.card).unwrap_or_else(|| panic!("{case}: no plan"));
        let operands = bench.upload(&case, &operands);
        for launch in tile::launches(&problem, &bench.card) {
            let plan = bench.plan(launch);
            let first = bench.run_uploaded(&problem, &operands, &plan);
            for run in 1..if launch == planned { 1000 } else { 50 } {
                assert!(
                    bench.run_uploaded(&problem, &operands, &plan) == first,
                    "{case}, {launch:?}, seed {seed}: run {run} gives other bits"
                );
            }
        }
    }
}
