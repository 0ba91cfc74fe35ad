//! Random operands, their product in f64, and copies of the operands on a device.

use crate::{Args, GROUP, LadderError, Step, problem};
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;
use half::f16;
use marlin_format::layout::{PlainLayout, ScaleLayout};
use marlin_format::{PlainParts, PlainWeight, Scales, WeightLayout};
use marlin_kernels::QuantProblem;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rayon::prelude::*;

/// The largest relative error that rounding can cause. The weights, which tensor cores multiply in
/// f16, and the output are rounded.
pub const TOLERANCE: f64 = 1e-3;

/// Random operands, and their product in f64.
pub struct Data {
    /// The problem; its M is the maximum over all launches.
    pub problem: QuantProblem,
    /// The activations [M, K].
    pub x: Vec<f16>,
    /// The weight.
    pub weight: PlainWeight,
    /// The expected output [M, N].
    pub expected: Vec<f64>,
}

impl Data {
    /// Draws operands from a seed.
    ///
    /// # Errors
    /// Returns an error if the format does not support the shape.
    pub fn random(m: usize, k: usize, n: usize, seed: u64) -> Result<Self, LadderError> {
        let problem = problem(m, k, n);
        let mut rng = SmallRng::seed_from_u64(seed);
        let q: Vec<u8> = (0..k * n).map(|_| rng.random_range(0..=15)).collect();
        let qweight = PlainLayout::new(k, n, problem.spec().value)
            .pack_with(|row, column| q[row * n + column]);
        let scales: Vec<f32> = (0..problem.spec().scales.group.count(k) * n)
            .map(|_| rng.random_range(0.002..0.02))
            .collect();
        let scales = Scales::from_f32(&scales, problem.spec().scales.dtype);
        let weight = PlainWeight::new(PlainParts {
            k,
            n,
            spec: problem.spec(),
            qweight,
            metadata: None,
            scales,
            zero_points: None,
            row_permutation: None,
        })?;
        let x: Vec<f16> = (0..m * k)
            .map(|_| f16::from_f32(rng.random_range(-1.0..1.0)))
            .collect();

        // A 4-bit number times an f16 scale is exact in f32.
        let value = |row: usize, column: usize| {
            (f32::from(q[row * n + column]) - 8.0) * weight.scales().get(row / GROUP * n + column)
        };
        let dense: Vec<f32> = (0..k * n)
            .into_par_iter()
            .map(|i| value(i / n, i % n))
            .collect();
        let product = |row: &[f16]| {
            let mut sums = vec![0.0f64; n];
            for (x, weights) in row.iter().map(|x| x.to_f64()).zip(dense.chunks_exact(n)) {
                sums.iter_mut()
                    .zip(weights)
                    .for_each(|(sum, &weight)| *sum += x * f64::from(weight));
            }
            sums
        };
        let expected = x.par_chunks_exact(k).flat_map_iter(product).collect();
        Ok(Self {
            problem,
            x,
            weight,
            expected,
        })
    }

    /// Returns the relative error ||found - expected|| / ||expected|| of the first rows; infinite
    /// if a value is not finite.
    pub fn relative_error(&self, found: &[f16]) -> f64 {
        let square = |sum: f64, value: f64| sum + value * value;
        let expected = &self.expected[..found.len().min(self.expected.len())];
        let difference = found
            .iter()
            .zip(expected)
            .map(|(found, expected)| found.to_f64() - expected)
            .fold(0.0, square);
        let norm = expected.iter().copied().fold(0.0, square);
        let error = (difference / norm).sqrt();
        if error.is_finite() {
            error
        } else {
            f64::INFINITY
        }
    }
}

/// The operands on a device, with several copies of the weight, which calls use in turn.
pub struct Buffers {
    x: Handle,
    out: Handle,
    plain: Vec<[Handle; 2]>,
    tile: Vec<[Handle; 2]>,
}

impl Buffers {
    /// Copies operands to a device. The weight is copied `copies` times in each layout that `steps`
    /// need.
    ///
    /// # Errors
    /// Returns no error for a weight of [`Data::random`].
    pub fn new(
        client: &Client,
        data: &Data,
        steps: &[Step],
        copies: usize,
    ) -> Result<Self, LadderError> {
        let problem = &data.problem;
        let upload = |layout, words: &[u32], scales: &Scales| -> Vec<[Handle; 2]> {
            let wanted = if steps.iter().any(|step| step.layout == layout) {
                copies
            } else {
                0
            };
            let words: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            (0..wanted)
                .map(|_| {
                    [
                        client.create_from_slice(&words),
                        client.create_from_slice(scales.as_bytes()),
                    ]
                })
                .collect()
        };
        let layout = problem.weight.tiles();
        let scales =
            ScaleLayout::new(&layout, problem.spec().scales.group).pack(data.weight.scales())?;
        Ok(Self {
            x: client.create_from_slice(&bytes(&data.x)),
            out: client.empty(2 * problem.m * problem.n()),
            plain: upload(
                WeightLayout::Plain,
                data.weight.qweight(),
                data.weight.scales(),
            ),
            tile: upload(WeightLayout::Tile, &layout.pack(&data.weight)?, &scales),
        })
    }

    /// Returns the operands of call number `call`. Calls use the copies of the weight in turn. If
    /// `out` is `None`, calls share one output.
    pub fn args(
        &self,
        step: &Step,
        problem: &QuantProblem,
        call: usize,
        out: Option<&Handle>,
    ) -> Args {
        let (m, k, n) = (problem.m, problem.k(), problem.n());
        let tensors = problem.weight.in_layout(step.layout).tensors();
        let copies = if step.layout == WeightLayout::Plain {
            &self.plain
        } else {
            &self.tile
        };
        let [words, scales] = &copies[call % copies.len()];
        Args {
            x: buffer(&self.x, m * k),
            words: buffer(words, tensors.qweight.elements()),
            scales: buffer(scales, tensors.scales.elements()),
            out: buffer(out.unwrap_or(&self.out), m * n),
        }
    }

    /// Runs a step once on an output filled with NaN, and returns the output.
    ///
    /// # Errors
    /// Returns an error if the step does not support the problem, or the device fails.
    pub fn run(
        &self,
        client: &Client,
        step: &Step,
        problem: &QuantProblem,
    ) -> Result<Vec<f16>, LadderError> {
        let out = client.create_from_slice(&bytes(&vec![f16::NAN; problem.m * problem.n()]));
        step.launch(client, problem, self.args(step, problem, 0, Some(&out)))?;
        let found = client
            .read_one(out)
            .map_err(|error| LadderError::Failed(format!("{error:?}")))?;
        Ok(found
            .chunks_exact(2)
            .map(|pair| f16::from_le_bytes([pair[0], pair[1]]))
            .collect())
    }
}

fn bytes(values: &[f16]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn buffer(handle: &Handle, elements: usize) -> BufferArg {
    // SAFETY: every handle of this module was made for at least `elements` elements.
    unsafe { BufferArg::from_raw_parts(handle.clone(), elements) }
}
