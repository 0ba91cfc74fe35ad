//! Mixtures of experts on raw buffers: the routing against the host's, the matmuls of experts in
//! every tile with outputs filled with NaN, and the weighted sums.

mod host;
mod layer;
mod operands;
mod replays;
mod routing;
mod rows;
mod stacks;
mod tiles;

use crate::kernels::{buffer, bytes, values};
use crate::marlin::Bench;
use crate::setup::{Named, trial};
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;
use host::HostRouting;
use libtest_mimic::Trial;
use marlin_format::{GroupSize, QuantSpec, ScaleDtype, WeightValue};
use marlin_kernels::ActivationDtype;
use marlin_kernels::device::MIN_CAPABILITY;
use marlin_kernels::experts::{RouteOperands, Router, RouterScores, Routing, combine, route};
use marlin_testing::relative_error_of_terms;
use marlin_tests::{round, tolerance};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    layer::add(tests, device, seed);
    stacks::add(tests, device);
    if device.name != "cuda" {
        return;
    }
    for (name, router) in ROUTERS {
        let name = format!("experts::routing_equals_the_hosts::{name}");
        tests.push(on_card(device, &name, move |bench| {
            routing::routing(bench, router, seed)
        }));
    }
    tests.push(on_card(
        device,
        "experts::a_logit_that_is_not_finite_makes_its_token_nan",
        move |bench| routing::not_finite(bench, seed),
    ));
    for (value, group, zero_points, dtype) in FORMATS {
        let spec = QuantSpec::new(value, group)
            .with_zero_point(zero_points.into())
            .with_scale_dtype(dtype);
        let name = format!("experts::every_tile_agrees_with_f64::{value}::{group}");
        tests.push(on_card(device, &name, move |bench| {
            tiles::every_tile(bench, spec, seed)
        }));
        if group != GroupSize::Channel {
            let name = format!("experts::few_rows_agree_with_f64::{value}::{group}");
            tests.push(on_card(device, &name, move |bench| {
                rows::agree(bench, spec, seed)
            }));
        }
    }
    tests.push(on_card(
        device,
        "experts::weighted_sums_agree_with_f64",
        move |bench| sums(bench, seed),
    ));
    tests.push(on_card(
        device,
        "experts::a_thousand_runs_give_the_same_bits",
        move |bench| tiles::repeats(bench, seed),
    ));
    tests.push(on_card(
        device,
        "experts::few_rows_of_many_experts_agree_with_f64",
        move |bench| rows::many_experts(bench, seed),
    ));
    tests.push(on_card(
        device,
        "experts::ties_of_few_rows_are_broken_as_on_the_host",
        move |bench| rows::ties(bench, seed),
    ));
    tests.push(trial(
        device,
        "experts::replays_follow_the_routing",
        move |device| replays::follow_the_routing(device, seed),
    ));
    tests.push(on_card(
        device,
        "experts::a_logit_that_is_not_finite_makes_a_row_nan",
        move |bench| rows::not_finite(bench, seed),
    ));
    tests.push(on_card(
        device,
        "experts::a_thousand_runs_of_few_rows_give_the_same_bits",
        move |bench| rows::repeats(bench, seed),
    ));
    tests.push(on_card(
        device,
        "experts::wrong_operands_are_refused",
        move |bench| tiles::refusals(bench, seed),
    ));
}

/// Returns a test that passes without a check on cards without tiles.
fn on_card(device: &Named, name: &str, body: impl FnOnce(&Bench) + Send + 'static) -> Trial {
    trial(device, name, move |device| {
        let bench = Bench::new(device);
        if bench.card.capability >= MIN_CAPABILITY {
            body(&bench);
        }
    })
}

const fn router(experts: usize, top_k: usize, scores: RouterScores, normalises: bool) -> Router {
    Router {
        experts,
        top_k,
        scores,
        normalises,
    }
}

const ROUTERS: [(&str, Router); 7] = [
    ("mixtral", router(8, 2, RouterScores::Softmax, true)),
    ("qwen3", router(128, 8, RouterScores::Softmax, true)),
    ("qwen2", router(60, 4, RouterScores::Softmax, false)),
    ("sigmoid", router(256, 8, RouterScores::Sigmoid, true)),
    ("sums", router(33, 3, RouterScores::Sigmoid, false)),
    ("one", router(5, 1, RouterScores::Softmax, false)),
    ("all", router(32, 32, RouterScores::Softmax, true)),
];

/// The formats of experts: scales are applied to the weights, to the sum of each group, or to the
/// output.
const FORMATS: [(WeightValue, GroupSize, bool, ScaleDtype); 8] = [
    (WeightValue::Int4, GroupSize::G128, false, ScaleDtype::F16),
    (WeightValue::Int4, GroupSize::G32, true, ScaleDtype::BF16),
    (WeightValue::Int4, GroupSize::Channel, true, ScaleDtype::F16),
    (WeightValue::Int8, GroupSize::G64, true, ScaleDtype::BF16),
    (WeightValue::E2m1, GroupSize::G16, false, ScaleDtype::F16),
    (WeightValue::E2m1, GroupSize::G32, false, ScaleDtype::BF16),
    (
        WeightValue::E4m3,
        GroupSize::Channel,
        false,
        ScaleDtype::BF16,
    ),
    (WeightValue::E4m3, GroupSize::G128, false, ScaleDtype::F16),
];

/// Logits of tokens, rounded to a dtype; with few distinct values, so that there are ties.
fn logits(router: &Router, tokens: usize, dtype: ActivationDtype, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    let distinct = seed.is_multiple_of(2);
    let value = |_| {
        let value: f32 = rng.random_range(-4.0..4.0);
        round(if distinct { value } else { value.round() }, dtype)
    };
    (0..tokens * router.experts).map(value).collect()
}

/// Routes tokens on the device.
fn routed(
    bench: &Bench,
    router: Router,
    block_rows: usize,
    logits: &[f32],
    dtype: ActivationDtype,
    correction: Option<&[f32]>,
    factor: f32,
) -> Routing {
    let operands = RouteOperands {
        logits: buffer(&bench.client, &bytes(logits, dtype), logits.len()),
        dtype,
        correction: correction.map(|values| {
            buffer(
                &bench.client,
                &bytes(values, ActivationDtype::F32),
                values.len(),
            )
        }),
        factor,
    };
    let count = logits.len() / router.experts;
    route(&bench.client, router, count, block_rows, operands)
        .unwrap_or_else(|error| panic!("{router:?}: {error}"))
}

fn read(bench: &Bench, handle: &Handle) -> Vec<u8> {
    bench
        .client
        .read_one(handle.clone())
        .unwrap_or_else(|error| panic!("a table of a routing: {error}"))
        .to_vec()
}

fn read_words(bench: &Bench, handle: &Handle) -> Vec<u32> {
    let bytes = read(bench, handle);
    let words = bytes.as_chunks::<4>().0.iter();
    words.map(|word| u32::from_le_bytes(*word)).collect()
}

/// Checks weighted sums against f64, with and without a tensor beside them.
fn sums(bench: &Bench, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    for dtype in [
        ActivationDtype::F16,
        ActivationDtype::BF16,
        ActivationDtype::F32,
    ] {
        for (tokens, features) in [(1, 2048), (3, 2884), (300, 40), (2, 7)] {
            let router = router(60, 4, RouterScores::Softmax, false);
            let logits = logits(&router, tokens, dtype, seed & !1);
            let host = HostRouting::new(&router, &logits, None, 1.0, 16);
            let found = routed(bench, router, 16, &logits, dtype, None, 1.0);
            let mut values_of = |count: usize| -> Vec<f32> {
                (0..count)
                    .map(|_| round(rng.random_range(-1.0..1.0), dtype))
                    .collect()
            };
            let (rows, beside) = (
                values_of(found.rows() * features),
                values_of(tokens * features),
            );
            for with_beside in [false, true] {
                let client = &bench.client;
                let elements = tokens * features;
                let poison = client.create_from_slice(&bytes(&vec![f32::NAN; elements], dtype));
                combine(
                    client,
                    &found,
                    features,
                    dtype,
                    buffer(client, &bytes(&rows, dtype), rows.len()),
                    with_beside.then(|| buffer(client, &bytes(&beside, dtype), beside.len())),
                    // SAFETY: the buffer was made for as many elements.
                    unsafe { BufferArg::from_raw_parts(poison.clone(), elements) },
                )
                .unwrap_or_else(|error| panic!("{tokens} x {features}: {error}"));
                let out = values(&read(bench, &poison), dtype);
                let (mut expected, mut magnitude) = (Vec::new(), Vec::new());
                for token in 0..tokens {
                    for feature in 0..features {
                        let mut terms: Vec<f64> = (0..router.top_k)
                            .map(|choice| {
                                let at = token * router.top_k + choice;
                                let row = host.places[at] as usize;
                                host.weights[at] * f64::from(rows[row * features + feature])
                            })
                            .collect();
                        if with_beside {
                            terms.push(f64::from(beside[token * features + feature]));
                        }
                        expected.push(terms.iter().sum());
                        magnitude.push(terms.iter().map(|term| term * term).sum::<f64>().sqrt());
                    }
                }
                let error = relative_error_of_terms(&out, &expected, &magnitude);
                assert!(
                    error <= tolerance(dtype),
                    "{tokens} x {features} {dtype}, seed {seed}: relative error {error:e}"
                );
            }
        }
    }
}
