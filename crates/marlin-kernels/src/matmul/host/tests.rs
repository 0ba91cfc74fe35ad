//! Compares the host kernels with f64, with all of this processor's instruction sets and with plain
//! Rust.

mod experts;

use super::simd::tests::{ALL, set_best};
use super::simd::{Kernel, LANES, Scalar, Simd, dispatch};
use super::*;
use crate::ActivationDtype;
use half::{bf16, f16};
use marlin_format::layout::PlainLayout;
use marlin_format::{GroupSize, QuantSpec, WeightDescriptor, WeightFormat, WeightValue};
use marlin_testing::seed;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Case {
    problem: QuantProblem,
    words: Vec<u32>,
    scales: Vec<f16>,
    zero_points: Option<Vec<u32>>,
    permutation: Option<Vec<u32>>,
    x: Vec<f32>,
    bias: Vec<f32>,
    /// The dequantised weight, [K, N] in natural order.
    natural: Vec<f64>,
    /// The sum of the magnitudes of the two terms of each value, `q scale` and `zero scale`, [K,
    /// N]. The kernels sum the products with values and with zero points separately.
    terms: Vec<f64>,
}

impl Case {
    fn random(
        m: usize,
        n: usize,
        k: usize,
        spec: QuantSpec,
        permuted: bool,
        rng: &mut StdRng,
    ) -> Self {
        let max = spec.value.max();
        let (groups, per_word) = (spec.scales.group.count(k), spec.value.per_word());
        let mut code = || {
            let code = rng.random_range(0..=max);
            // NaN has no weight.
            if spec.value.is_nan(code) {
                code - 1
            } else {
                code
            }
        };
        let q: Vec<u8> = (0..k * n).map(|_| code()).collect();
        let scales: Vec<f16> = (0..groups * n)
            .map(|_| f16::from_f32(rng.random_range(-0.1f32..0.1)))
            .collect();
        let zeros: Vec<u8> = (0..groups * n).map(|_| rng.random_range(0..=max)).collect();
        let zero_points = spec.has_zero_points().then(|| {
            let word = |zeros: &[u8]| {
                zeros.iter().rev().fold(0u32, |word, &zero| {
                    (word << spec.value.bits()) | u32::from(zero)
                })
            };
            zeros
                .chunks(n)
                .flat_map(|row| row.chunks(per_word).map(word))
                .collect()
        });
        let mut rows: Vec<u32> = (0..k as u32).collect();
        if permuted {
            rows.shuffle(rng);
        }
        let (mut natural, mut terms) = (vec![0.0; k * n], vec![0.0; k * n]);
        for (stored, &row) in rows.iter().enumerate() {
            let group = stored / spec.scales.group.rows(k);
            for column in 0..n {
                let zero = if spec.has_zero_points() {
                    zeros[group * n + column]
                } else {
                    spec.value.midpoint()
                };
                let scale = f64::from(scales[group * n + column].to_f32());
                let place = row as usize * n + column;
                let code = q[stored * n + column];
                let (value, zero) = if spec.value.is_float() {
                    (f64::from(spec.value.decode(code)), 0.0)
                } else {
                    (f64::from(code), f64::from(zero))
                };
                natural[place] = (value - zero) * scale;
                terms[place] = (value.abs() + zero) * scale.abs();
            }
        }
        let weight =
            WeightDescriptor::plain(WeightFormat::dense(spec).with_permutation(permuted), k, n);
        let problem = QuantProblem::new(m, weight, ActivationDtype::F32);
        Self {
            problem,
            words: PlainLayout::new(k, n, spec.value).pack_with(|row, column| q[row * n + column]),
            scales,
            zero_points,
            permutation: permuted.then_some(rows),
            x: (0..m * k).map(|_| rng.random_range(-1.0f32..1.5)).collect(),
            bias: (0..n).map(|_| rng.random_range(-1.0f32..1.0)).collect(),
            natural,
            terms,
        }
    }

    fn weight(&self) -> HostWeight<'_> {
        HostWeight {
            words: &self.words,
            scales: Floats::F16(&self.scales),
            zero_points: self.zero_points.as_deref(),
            row_permutation: self.permutation.as_deref(),
        }
    }

    /// Returns the largest error of an output, relative to the sum of the magnitudes of its terms.
    fn error(&self, found: &[f32]) -> f64 {
        let (m, n, k) = (self.problem.m, self.problem.n(), self.problem.k());
        let mut worst = 0f64;
        for row in 0..m {
            for column in 0..n {
                let x = |i: usize| f64::from(self.x[row * k + i]);
                let sum: f64 = (0..k).map(|i| x(i) * self.natural[i * n + column]).sum();
                let magnitude: f64 = (0..k)
                    .map(|i| x(i).abs() * self.terms[i * n + column])
                    .sum();
                let bias = f64::from(self.bias[column]);
                worst = worst.max(
                    (f64::from(found[row * n + column]) - sum - bias).abs()
                        / (magnitude + bias.abs()),
                );
            }
        }
        worst
    }
}

fn specs() -> Vec<QuantSpec> {
    let int4 = [
        GroupSize::G32,
        GroupSize::G64,
        GroupSize::G128,
        GroupSize::Channel,
    ]
    .map(QuantSpec::int4);
    let int8 = [GroupSize::G32, GroupSize::Channel].map(QuantSpec::int8);
    let floats = WeightValue::FLOATS.into_iter().flat_map(|value| {
        value
            .groups()
            .iter()
            .map(move |&group| QuantSpec::new(value, group))
    });
    int4.into_iter()
        .chain(int8)
        .flat_map(|spec| [spec, spec.with_zero_points()])
        .chain(floats)
        .collect()
}

#[test]
fn products_agree_with_f64_for_any_rows_and_shapes() {
    let seed = seed();
    let rng = &mut StdRng::seed_from_u64(seed);
    for spec in specs() {
        let ks: &[usize] = if spec.scales.group == GroupSize::Channel {
            &[1, 7, 129, 300, 513]
        } else {
            &[33, 128, 200, 344, 384]
        };
        for &k in ks {
            for n in [1, 7, 8, 9, 33, 129] {
                for m in [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 31] {
                    let case = Case::random(m, n, k, spec, (m + n) % 3 == 0, rng);
                    for best in ALL {
                        set_best(best);
                        let error = case.error(
                            &matmul(&case.problem, &case.x, case.weight(), Some(&case.bias))
                                .unwrap(),
                        );
                        assert!(
                            error < 1e-5,
                            "{}, {best:?}, seed {seed}: {error:e}",
                            case.problem
                        );
                    }
                }
            }
        }
    }
}

/// Checks a problem that is large enough for all cores.
#[test]
fn threads_share_the_columns() {
    let seed = seed();
    let rng = &mut StdRng::seed_from_u64(seed);
    for m in [1, 8, 40] {
        let case = Case::random(
            m,
            1000,
            512,
            QuantSpec::int4(GroupSize::G64).with_zero_points(),
            true,
            rng,
        );
        let error =
            case.error(&matmul(&case.problem, &case.x, case.weight(), Some(&case.bias)).unwrap());
        assert!(error < 1e-5, "{}, seed {seed}: {error:e}", case.problem);
    }
}

#[test]
fn the_float_weight_is_in_natural_order() {
    let seed = seed();
    let rng = &mut StdRng::seed_from_u64(seed);
    for spec in specs() {
        for (k, n) in [
            (128, 9),
            (256, 64),
            (384, 301),
            (1024, 17),
            (128, 2100),
            (344, 33),
            (100, 9),
            (33, 70),
        ] {
            for permuted in [false, true] {
                let case = Case::random(1, n, k, spec, permuted, rng);
                let (mut single, mut half, mut brain) = (
                    vec![0f32; k * n],
                    vec![f16::ZERO; k * n],
                    vec![bf16::ZERO; k * n],
                );
                set_best(ALL[(n + usize::from(permuted)) % 3]);
                dequantize(&case.problem, case.weight(), FloatsMut::F32(&mut single)).unwrap();
                dequantize(&case.problem, case.weight(), FloatsMut::F16(&mut half)).unwrap();
                dequantize(&case.problem, case.weight(), FloatsMut::BF16(&mut brain)).unwrap();
                for (i, &expected) in case.natural.iter().enumerate() {
                    let close = |found: f32, digits: f64| {
                        (f64::from(found) - expected).abs() <= digits * (expected.abs() + 1.0)
                    };
                    let all = close(single[i], 2e-6)
                        && close(half[i].to_f32(), 1e-3)
                        && close(brain[i].to_f32(), 8e-3);
                    assert!(
                        all,
                        "{}, seed {seed}, value {i}: {expected}, {} {} {}",
                        case.problem, single[i], half[i], brain[i]
                    );
                }
            }
        }
    }
}

#[test]
fn wrong_buffers_are_refused() {
    let case = Case::random(
        1,
        8,
        128,
        QuantSpec::int4(GroupSize::G32),
        false,
        &mut StdRng::seed_from_u64(1),
    );
    let short = HostWeight {
        words: &case.words[1..],
        ..case.weight()
    };
    assert!(matmul(&case.problem, &case.x, short, None).is_err());
    assert!(matmul(&case.problem, &case.x[1..], case.weight(), None).is_err());
    assert!(dequantize(&case.problem, case.weight(), FloatsMut::F32(&mut [0.0; 8])).is_err());
}

/// Checks that the entry points are not generic functions, whose loops the calling crate would
/// compile at its own optimisation level. A type parameter could not be inferred here, so the test
/// would not compile.
#[test]
fn the_loops_are_compiled_in_this_crate() {
    let names = [
        std::any::type_name_of_val(&matmul),
        std::any::type_name_of_val(&dequantize),
    ];
    assert_eq!(
        names,
        [
            "marlin_kernels::matmul::host::matmul",
            "marlin_kernels::matmul::host::dequantize"
        ]
    );
}

/// A kernel that returns the results of all methods of [`Simd`] for its inputs.
struct Methods {
    floats: [f32; LANES],
    words: [u32; LANES],
}

impl Kernel for Methods {
    type Output = Vec<[f32; LANES]>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let (a, words) = (simd.load(&self.floats), simd.load_words(&self.words));
        let mut halves = [f16::ZERO; LANES];
        simd.store_f16(a, &mut halves);
        let brains = self.floats.map(bf16::from_f32);
        let shifted = simd.shift_right_each(words, &std::array::from_fn(|lane| 2 * lane as u32));
        let vectors = [
            simd.splat(2.5),
            simd.add(a, simd.splat(1.0)),
            simd.mul(a, a),
            simd.mul_add(a, simd.splat(0.5), simd.splat(1.0)),
            simd.load_f16(&halves),
            simd.load_bf16(&brains),
            simd.to_f32(simd.and(words, 0xff0)),
            simd.to_f32(simd.shift_right::<28>(words)),
            simd.to_f32(simd.and(shifted, 15)),
            simd.splat(simd.sum(a)),
            simd.to_f32(simd.shift_left::<7>(simd.and(words, 0xffff))),
            simd.bits_to_f32(simd.and(words, 0x7f_ffff), 120 << 23),
            simd.min(a, simd.mul(a, a)),
            simd.with_sign(simd.mul(a, a), words),
        ];
        let mut out = vec![[0.0; LANES]; vectors.len()];
        for (out, vector) in out.iter_mut().zip(vectors) {
            simd.store(vector, out);
        }
        out
    }
}

#[test]
fn plain_rust_gives_what_vector_instructions_give() {
    let seed = seed();
    let rng = &mut StdRng::seed_from_u64(seed);
    for _ in 0..1000 {
        let (floats, words) = (
            std::array::from_fn(|_| rng.random_range(-100f32..100.0)),
            std::array::from_fn(|_| rng.random()),
        );
        let expected = Methods { floats, words }.run(Scalar);
        for best in ALL {
            set_best(best);
            for (found, expected) in dispatch(Methods { floats, words })
                .as_flattened()
                .iter()
                .zip(expected.as_flattened())
            {
                // A fused multiply-add rounds once.
                assert!(
                    (found - expected).abs() <= 1e-6 * expected.abs().max(1.0),
                    "{best:?}, seed {seed}: {found} {expected}"
                );
            }
        }
    }
}

#[test]
fn a_loop_runs_every_iteration_once_whoever_else_runs_one() {
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for tasks in [0, 1, 2, 7, 1000] {
                    for threads in [1, 2, 3, 100] {
                        let counts: Vec<AtomicUsize> =
                            (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                        // A nested loop runs on the thread that starts it.
                        pool::for_each(tasks, threads, &|index| {
                            pool::for_each(2, 2, &|_| {
                                _ = counts[index].fetch_add(1, Ordering::Relaxed)
                            })
                        });
                        assert!(
                            counts
                                .iter()
                                .all(|count| count.load(Ordering::Relaxed) == 2),
                            "{tasks} tasks, {threads} threads"
                        );
                    }
                }
            });
        }
    });
}

#[test]
fn a_panic_comes_out_of_the_loop_and_the_next_one_runs() {
    for _ in 0..100 {
        let panicked = std::panic::catch_unwind(|| {
            pool::for_each(50, 8, &|index| assert!(index != 20, "twenty"))
        });
        let message = panicked.unwrap_err();
        assert_eq!(message.downcast_ref::<&str>(), Some(&"twenty"));
        let sum = AtomicUsize::new(0);
        pool::for_each(50, 8, &|index| _ = sum.fetch_add(index, Ordering::Relaxed));
        assert_eq!(sum.load(Ordering::Relaxed), 1225);
    }
}
