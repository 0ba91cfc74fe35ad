//! Kernels of recorded passes that overlap through programmatic dependent launch (PDL). Tokens are
//! compared with those of ordinary edges, and a kernel that does not wait must read stale data.

use crate::engine::requests;
use crate::kernels::client;
use crate::llama::quantised;
use crate::setup::{Named, trial};
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor, capture};
use burn_marlin::experts::{QuantExperts, Router, RouterScores};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use libtest_mimic::Trial;
use marlin_format::{GroupSize, QuantSpec, WeightFormat};
use marlin_kernels::pdl::{launch_dependents, make_edge_programmatic, record_ordinary_edges, wait};
use marlin_kernels::ptx::{F4, global_address, global_address_mut, ld_global_16, st_global_16};
use marlin_kernels::{ActivationDtype, Target};
use marlin_lm::{Engine, LanguageModel, Model, ModelConfig, OpenOptions, RequestParams, Sampling};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    if device.name != "cuda" {
        return;
    }
    tests.push(trial(
        device,
        "pdl::a_kernel_reads_what_it_waits_for_and_otherwise_does_not",
        with_and_without_a_wait,
    ));
    tests.push(trial(
        device,
        "pdl::steps_give_the_tokens_of_ordinary_edges",
        same_tokens,
    ));
    tests.push(trial(
        device,
        "pdl::wide_layers_give_the_tokens_of_ordinary_edges",
        same_tokens_of_wide_layers,
    ));
    tests.push(trial(
        device,
        "pdl::recorded_layers_of_experts_give_the_outputs_of_launches",
        same_mixtures,
    ));
    tests.push(trial(
        device,
        "pdl::long_runs_reserve_no_more_memory",
        flat_memory,
    ));
}

const BLOCKS: usize = 64;
const THREADS: usize = 128;
/// The number of floats of a buffer, four for each thread.
const FLOATS: usize = 4 * BLOCKS * THREADS;

/// Writes `value` to every element, after many operations that depend on each other.
#[cube(launch_unchecked)]
fn write_late(out: &mut [f32], value: f32, operations: u32) {
    launch_dependents(true);
    wait(true);
    let mut state = UNIT_POS_X;
    for _ in 0..operations {
        state = state * 1664525 + 1013904223;
    }
    // The condition is never true, because the period of the generator is 2^32.
    let value = if state == UNIT_POS_X && operations != 0 {
        -value
    } else {
        value
    };
    st_global_16(
        global_address_mut::<f32>(out) + u64::cast_from(ABSOLUTE_POS as u32) * 16,
        F4::new(value),
    );
}

/// Copies the output of `write_late`; if `waits` is false, before `write_late` has ended.
#[cube(launch_unchecked)]
fn copy(input: &[f32], out: &mut [f32], #[comptime] waits: bool) {
    launch_dependents(true);
    wait(waits);
    let place = u64::cast_from(ABSOLUTE_POS as u32) * 16;
    let found = ld_global_16(global_address::<f32>(input) + place);
    // A kernel that never waits would let the next kernel start before `write_late` has ended.
    wait(true);
    st_global_16(global_address_mut::<f32>(out) + place, found);
}

/// Replays six layers of few rows of experts, each with another routing, and compares the outputs
/// with those of the same layers that are not recorded. The second launch of a layer reads the
/// router's logits early, which those of the layer before must not be.
fn same_mixtures(device: &Device) {
    let random = |shape: [usize; 2]| {
        Tensor::<2>::random(shape, Distribution::Default, device).cast(FloatDType::F16)
    };
    let router = Router {
        experts: 16,
        top_k: 4,
        scores: RouterScores::Softmax,
        normalises: true,
    };
    let spec: WeightFormat = QuantSpec::int4(GroupSize::G64).into();
    let layers: Vec<(QuantExperts, Tensor<2>)> = (0..6)
        .map(|_| {
            let dtype = ActivationDtype::F16;
            let experts = QuantExperts::random(router, 256, 128, spec, dtype, device)
                .unwrap_or_else(|error| panic!("{error}"));
            (experts, random([16, 256]).transpose())
        })
        .collect();
    let x = random([2, 256]);
    let pass = || {
        layers.iter().fold(x.clone(), |x, (experts, router)| {
            let logits = marlin_nn::linear(x.clone(), router.clone(), None);
            // The stream keeps the magnitude of the activations, and so the routings apart.
            x.clone() + experts.forward(x, logits)
        })
    };
    let bits = |out: Tensor<2>| {
        out.cast(FloatDType::F32)
            .try_into_vec_as::<f32>()
            .unwrap_or_else(|error| panic!("{error}"))
    };
    let expected = bits(pass());
    let mut graph = capture(device, pass);
    assert!(graph.is_hardware(), "the driver records a graph");
    for replay in 0..100 {
        // SAFETY: the layers and the activations that the pass reads are alive.
        let found = bits(unsafe { graph.replay() }.clone());
        assert!(found == expected, "replay {replay} gives other outputs");
    }
}

fn arg(handle: &Handle) -> BufferArg {
    // SAFETY: every buffer was made for as many floats.
    unsafe { BufferArg::from_raw_parts(handle.clone(), FLOATS) }
}

/// Replays a graph 200 times that writes zeros, then writes ones late, then copies the ones.
/// Returns the number of replays in which the copy has a zero.
fn stale_replays(device: &Device, client: &Client, waits: bool) -> usize {
    let [values, copied] = [(); 2].map(|()| client.create_from_slice(&vec![0; 4 * FLOATS]));
    let grid = || {
        (
            CubeCount::new_1d(BLOCKS as u32),
            CubeDim::new_1d(THREADS as u32),
        )
    };
    let write = |value: f32, operations: u32| {
        let (count, dim) = grid();
        // SAFETY: each thread writes its own four floats of a buffer that has four floats for each
        // thread.
        unsafe {
            write_late::launch_unchecked(client, count, dim, arg(&values), value, operations)
        };
        make_edge_programmatic(client);
    };
    let mut graph = capture(device, || {
        write(0.0, 0);
        write(1.0, 20_000);
        let (count, dim) = grid();
        // SAFETY: each thread reads and writes its own four floats of buffers that have four floats
        // for each thread.
        unsafe { copy::launch_unchecked(client, count, dim, arg(&values), arg(&copied), waits) };
        make_edge_programmatic(client);
    });
    assert!(graph.is_hardware(), "the driver records a graph");
    let mut stale = 0;
    for _ in 0..200 {
        // SAFETY: both buffers live to the end of this function, and nothing else uses them.
        unsafe { graph.replay() };
        let bytes = client
            .read_one(copied.clone())
            .unwrap_or_else(|error| panic!("{error}"));
        let found = bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        stale += usize::from(found.into_iter().any(|value| value != 1.0));
    }
    stale
}

fn with_and_without_a_wait(device: &Device) {
    let client = client(device);
    if Target::of(&client)
        .card
        .is_none_or(|card| card.capability < 90)
    {
        return;
    }
    assert_eq!(
        stale_replays(device, &client, true),
        0,
        "replays in which a kernel that waits reads what is not there yet"
    );
    let stale = stale_replays(device, &client, false);
    assert!(
        stale > 100,
        "without a wait only {stale} of 200 replays read too early: the edges are not programmatic"
    );
}

/// Returns the tokens of sequences that decode in `slots` slots to the end of the window, in
/// several rounds.
fn tokens(model: &Arc<Model>, slots: usize, rounds: usize) -> Vec<u32> {
    let mut engine = Engine::new(model.clone(), slots).unwrap_or_else(|error| panic!("{error}"));
    let tokens = (0..rounds)
        .flat_map(|index| round(&mut engine, slots, index))
        .collect();
    assert!(engine.is_captured(), "steps are replayed as graphs");
    tokens
}

/// Returns the tokens of round `index`, sequence by sequence.
fn round(engine: &mut Engine, slots: usize, index: usize) -> Vec<u32> {
    let sampling = Sampling {
        temperature: 1.0,
        top_k: Some(100),
        top_p: 0.99,
        repetition_penalty: 1.05,
        ..Sampling::GREEDY
    };
    let request = |slot: usize| {
        let options = RequestParams {
            sampling,
            seed: (index * slots + slot) as u64,
            ..RequestParams::default()
        };
        (vec![1 + slot as u32, 2, 3, 4], options)
    };
    let requests: Vec<_> = (0..slots).map(request).collect();
    requests::run(engine, slots, slots, &requests).concat()
}

/// Checks that a model gives the same tokens with programmatic edges as with ordinary edges, while
/// another thread keeps the device busy on its own stream.
fn check(model: &Arc<Model>, device: &Device, slots: &[usize], rounds: usize, most: usize) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let x = Tensor::<2>::random([4096, 4096], Distribution::Default, (device, DType::F32));
            while !done.load(Ordering::Relaxed) {
                let first = x.clone().exp().slice([0..1, 0..1]).into_data();
                assert_eq!(first.shape().num_elements(), 1);
            }
        });
        for &slots in slots {
            record_ordinary_edges(true);
            let expected = tokens(model, slots, rounds);
            record_ordinary_edges(false);
            let found = tokens(model, slots, rounds);
            assert!(
                expected.len() >= most * slots,
                "{} tokens of {slots} sequences",
                expected.len()
            );
            assert!(
                found == expected,
                "{slots} sequences: the tokens differ from those of ordinary edges"
            );
        }
        done.store(true, Ordering::Relaxed);
    });
}

/// Returns the shipped model in 4 bits.
fn shipped(device: &Device) -> Arc<Model> {
    let (_guard, folder) = quantised();
    let options = OpenOptions {
        dtype: Some(FloatDType::F16),
        max_len: Some(512),
        with_tokenizer: false,
        ..OpenOptions::default()
    };
    LanguageModel::open(&folder, device, &options)
        .unwrap_or_else(|error| panic!("{error}"))
        .model
}

/// Checks 10,000 steps of the shipped model, with 1, 3, 16 and 64 sequences.
fn same_tokens(device: &Device) {
    check(&shipped(device), device, &[1, 3, 16, 64], 5, 2500);
}

/// Checks that reserved memory does not grow over 130,000 tokens of 16 sequences.
fn flat_memory(device: &Device) {
    const SLOTS: usize = 16;
    let reserved = || device.memory_pool_usage().map(|usage| usage.bytes_reserved);
    let mut engine = Engine::new(shipped(device), SLOTS).unwrap_or_else(|error| panic!("{error}"));
    let mut tokens = round(&mut engine, SLOTS, 0).len();
    let before = reserved();
    for index in 1.. {
        tokens += round(&mut engine, SLOTS, index).len();
        if tokens >= 130_000 {
            break;
        }
    }
    assert!(
        before.is_some() && reserved() == before,
        "{before:?} bytes reserved after a round, {:?} after {tokens} tokens",
        reserved()
    );
}

/// Checks layers as wide as those of Llama 2 7B, whose matmuls fill the device.
fn same_tokens_of_wide_layers(device: &Device) {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "eos_token_id": 2,
    });
    let config =
        ModelConfig::from_json(&config.to_string()).unwrap_or_else(|error| panic!("{error}"));
    let spec = WeightFormat::dense(QuantSpec::int4(GroupSize::G128));
    let model = Model::random(&config, 256, FloatDType::F16, Some(spec), device)
        .unwrap_or_else(|error| panic!("{error}"));
    check(&Arc::new(model), device, &[1, 3, 16, 64], 1, 250);
}
