//! Compares the operations of a decode step with a reference in f64.

use super::{Attention, gated, rms_norm};
use crate::cache::{CacheShape, Pages};
use crate::kernels::attention::{AttentionPass, AttentionShape};
use crate::kernels::{SequenceState, SequenceStatus};
use half::f16;
use marlin_kernels::matmul::host::HostFloat;
use marlin_kernels::matmul::host::lm_head::head;
use marlin_kernels::{ActivationDtype, Epilogue};
use marlin_testing::{rms_norm as rms_norm_f64, rotate, seed};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

fn random<T: HostFloat>(count: usize, rng: &mut StdRng) -> Vec<T> {
    (0..count)
        .map(|_| T::from_f32(rng.random_range(-1.0f32..1.0)))
        .collect()
}

fn f64s<T: HostFloat>(values: &[T]) -> Vec<f64> {
    values
        .iter()
        .map(|value| f64::from(value.to_f32()))
        .collect()
}

fn expect<T: HostFloat>(what: &str, seed: u64, found: &[T], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in f64s(found).into_iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= tolerance * (expected.abs() + 1.0),
            "{what}, seed {seed}, value {i}: {found} for {expected}"
        );
    }
}

fn rows_agree<T: HostFloat>(tolerance: f64) {
    let seed = seed();
    let rng = &mut StdRng::seed_from_u64(seed);
    for (rows, features) in [(1, 1), (1, 576), (3, 130), (8, 61)] {
        let (x, weight) = (
            random::<T>(rows * features, rng),
            random::<T>(features, rng),
        );
        let expected: Vec<f64> = f64s(&x)
            .chunks(features)
            .flat_map(|row| rms_norm_f64(row, &f64s(&weight), 1e-5))
            .collect();
        expect(
            "norm",
            seed,
            &rms_norm(&x, &weight, 1e-5),
            &expected,
            tolerance,
        );

        let gate_up = random::<T>(2 * rows * features, rng);
        let swiglu = |gate: f64, up: f64| gate / (1.0 + (-gate).exp()) * up;
        let clamped = |gate: f64, up: f64| {
            let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
            gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)
        };
        for (epilogue, output) in [
            (Epilogue::SwiGlu, &swiglu as &dyn Fn(f64, f64) -> f64),
            (Epilogue::ClampedSwiGlu, &clamped),
        ] {
            // Some gates and ups are above the limit.
            let gate_up: Vec<T> = gate_up
                .iter()
                .map(|value| T::from_f32(8.0 * value.to_f32()))
                .collect();
            let expected: Vec<f64> = f64s(&gate_up)
                .chunks(2 * features)
                .flat_map(|row| {
                    let (gates, ups) = row.split_at(features);
                    gates.iter().zip(ups).map(|(&gate, &up)| output(gate, up))
                })
                .collect();
            expect(
                &format!("{epilogue:?}"),
                seed,
                &gated(&gate_up, features, epilogue),
                &expected,
                tolerance,
            );
        }

        let columns = 700;
        let table = random::<T>(columns * features, rng);
        let dot = |x: &[f64], weights: &[f64]| {
            x.iter()
                .zip(weights)
                .map(|(x, weight)| x * weight)
                .sum::<f64>()
        };
        let (xs, weights) = (f64s(&x), f64s(&table));
        let expected: Vec<f64> = xs
            .chunks(features)
            .flat_map(|x| weights.chunks(features).map(move |weights| dot(x, weights)))
            .collect();
        expect(
            "head",
            seed,
            &head(&x, &table, features),
            &expected,
            tolerance,
        );
    }
}

#[test]
fn rows_in_f32_agree_with_f64() {
    rows_agree::<f32>(1e-5);
}

#[test]
fn rows_in_f16_agree_with_f64() {
    rows_agree::<f16>(2e-3);
}

/// Compares attention with the reference: the cache changes only at each row's position, and rows
/// that are idle or outside the cache give zeros.
fn attention_agrees<T: HostFloat>(
    [head_dim, rotary_dim]: [usize; 2],
    window: Option<usize>,
    with_norms: bool,
    pages: Option<Pages>,
    positions: [u32; 2],
    tolerance: f64,
) {
    let seed = seed();
    let rng = &mut StdRng::seed_from_u64(seed);
    let (heads, kv_heads, slots, max_len) = (6, 2, 3, 600);
    let shape = AttentionShape {
        rows: 4,
        heads,
        cache: CacheShape {
            pages,
            ..CacheShape::from([slots, kv_heads, max_len, head_dim])
        },
        rotary_dim,
        max_positions: max_len,
        window,
        has_sinks: window.is_some(),
        norm_epsilon: with_norms.then_some(1e-5),
        dtype: ActivationDtype::F32,
        pass: AttentionPass::Step,
    };
    let row = |status, slot| SequenceState {
        status,
        slot,
        ..SequenceState::IDLE
    };
    let at = |position, slot| row(SequenceStatus::At(position), slot);
    let rows = [
        at(positions[0], 2),
        row(SequenceStatus::Idle, 0),
        at(positions[1], 0),
        at(max_len as u32, 1),
    ];
    let half = rotary_dim / 2;
    let angles: Vec<f64> = (0..max_len * half)
        .map(|_| rng.random_range(0.0..6.0))
        .collect();
    let [cos, sin] = [f64::cos, f64::sin].map(|f: fn(f64) -> f64| {
        angles
            .iter()
            .map(|&angle| f(angle) as f32)
            .collect::<Vec<f32>>()
    });
    let norms = with_norms.then(|| [random::<T>(head_dim, rng), random::<T>(head_dim, rng)]);
    let sinks = window.map(|_| random::<T>(heads, rng));
    let qkv = random::<T>(4 * (heads + 2 * kv_heads) * head_dim, rng);
    let (mut keys, mut values) = (
        random::<T>(shape.cache_elements(), rng),
        random::<T>(shape.cache_elements(), rng),
    );
    // The pages of the slots in a random order.
    let table = shape.cache.table_dims().map(|[slots, columns]| {
        let mut pages: Vec<i32> = (0..(slots * columns) as i32).collect();
        pages.shuffle(rng);
        pages
    });
    let element = |slot: usize, head: usize, position: usize| {
        let [_, _, size, _] = shape.cache.dims();
        let page = table.as_ref().map_or(slot, |table| {
            table[slot * max_len.div_ceil(size) + position / size] as usize
        });
        ((page * kv_heads + head) * size + position % size) * head_dim
    };
    let (mut all_keys, mut all_values) = (f64s(&keys), f64s(&values));

    let attention = Attention {
        shape,
        pages: table.as_deref(),
        cos: &cos,
        sin: &sin,
        norms: norms.as_ref().map(|[q, k]| [q.as_slice(), k.as_slice()]),
        sinks: sinks.as_deref(),
    };
    let out = attention.run(&qkv, &rows, &mut keys, &mut values);

    let rotated = |x: &[f64], norm: usize, position: usize| {
        let mut x = match &norms {
            Some(norms) => rms_norm_f64(x, &f64s(&norms[norm]), 1e-5),
            None => x.to_vec(),
        };
        let angles = position * half..(position + 1) * half;
        rotate(&mut x, &cos[angles.clone()], &sin[angles]);
        x
    };
    let mut expected = vec![0.0; 4 * heads * head_dim];
    for (index, qkv) in f64s(&qkv)
        .chunks((heads + 2 * kv_heads) * head_dim)
        .enumerate()
    {
        let (slot, position) = (
            rows[index].slot as usize,
            [positions[0], 0, positions[1], 0][index] as usize,
        );
        if index % 2 == 1 {
            continue;
        }
        let head_of = |head: usize| &qkv[head * head_dim..(head + 1) * head_dim];
        for head in 0..kv_heads {
            let place = element(slot, head, position);
            all_keys[place..place + head_dim].copy_from_slice(&rotated(
                head_of(heads + head),
                1,
                position,
            ));
            all_values[place..place + head_dim].copy_from_slice(head_of(heads + kv_heads + head));
        }
        let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
        for head in 0..heads {
            let query = rotated(head_of(head), 0, position);
            let place = |position: usize| element(slot, head / (heads / kv_heads), position);
            let dot = |position| {
                (0..head_dim)
                    .map(|i| query[i] * all_keys[place(position) + i])
                    .sum::<f64>()
            };
            let weights: Vec<f64> = (first..=position)
                .map(|position| (dot(position) / (head_dim as f64).sqrt()).exp())
                .collect();
            let sink = sinks.as_ref().map_or(0.0, |sinks| f64s(sinks)[head].exp());
            let total = weights.iter().sum::<f64>() + sink;
            for i in 0..head_dim {
                let sum: f64 = weights
                    .iter()
                    .zip(first..)
                    .map(|(weight, position)| weight * all_values[place(position) + i])
                    .sum();
                expected[(index * heads + head) * head_dim + i] = sum / total;
            }
        }
    }
    expect("attention", seed, &out, &expected, tolerance);
    expect("keys", seed, &keys, &all_keys, tolerance);
    expect("values", seed, &values, &all_values, tolerance);
}

#[test]
fn attention_in_f32_agrees_with_f64() {
    attention_agrees::<f32>([16, 16], None, false, None, [0, 599], 1e-5);
    attention_agrees::<f32>([16, 8], Some(7), true, None, [3, 311], 1e-5);
    attention_agrees::<f32>([16, 0], Some(1), false, None, [64, 65], 1e-5);
    // These heads are not multiples of the SIMD lanes.
    attention_agrees::<f32>([8, 8], None, false, None, [5, 70], 1e-5);
    attention_agrees::<f32>([120, 60], None, true, None, [2, 33], 1e-5);
}

#[test]
fn attention_over_pages_agrees_with_f64() {
    let pages = |count, size| Some(Pages { count, size });
    attention_agrees::<f32>([16, 16], None, false, pages(30, 64), [63, 599], 1e-5);
    attention_agrees::<f32>([16, 8], Some(70), true, pages(114, 16), [64, 511], 1e-5);
    attention_agrees::<f16>([24, 24], Some(1), true, pages(15, 128), [0, 128], 3e-3);
}

#[test]
fn attention_in_f16_agrees_with_f64() {
    attention_agrees::<f16>([16, 16], None, true, None, [17, 530], 3e-3);
    attention_agrees::<f16>([24, 24], None, false, None, [9, 80], 3e-3);
}
