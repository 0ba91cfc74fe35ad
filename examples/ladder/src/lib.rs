//! A 4-bit matmul in six steps, from one thread per output to the Marlin kernel.
//!
//! Each step computes out = x W, with activations x [M, K] and output [M, N] in f16. The weight W
//! [K, N] has 4 bits, in groups of 128 rows of K with one f16 scale for each column: `W[k][n] =
//! (q[k][n] - 8) * s[k / 128][n]`.
//!
//! | step | adds | K | N |
//! |---|---|---|---|
//! | [`step_1_naive`] | one thread per output | any | any |
//! | [`step_2_wide`] | 16-byte loads, four columns and eight rows per thread, split-K in a block | multiples of 8 | multiples of 8 |
//! | [`step_3_shared`] | activations in shared memory, no conversion instructions | multiples of 8 | multiples of 8 |
//! | [`step_4_tensor_cores`] | `mma.m16n8k16` on fragments of the tile layout | multiples of 64 from 192 on | multiples of 64 |
//! | [`step_5_async`] | a `cp.async` pipeline of several stages | multiples of 64 from 192 on | multiples of 64 |
//! | [`step_6_marlin`] | stripes over all multiprocessors, `wgmma`, the copy engine: the library's kernel | multiples of 8 | any |
//!
//! Steps 1 to 3 run on every CubeCL runtime and read the plain layout; steps 4 to 6 run on CUDA and
//! read the tile layout.

pub mod data;
mod error;
#[allow(
    missing_docs,
    reason = "`#[cube]` makes a module and a struct of every function, without a line on them"
)]
pub mod fragment;
#[cfg(feature = "cuda")]
pub mod source;
pub mod step_1_naive;
pub mod step_2_wide;
pub mod step_3_shared;
pub mod step_4_tensor_cores;
pub mod step_5_async;
pub mod step_6_marlin;

use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use marlin_format::{GroupSize, QuantSpec};
use marlin_format::{WeightDescriptor, WeightLayout};
use marlin_kernels::problem::expect_length;
use marlin_kernels::{ActivationDtype, KernelError, QuantProblem, Runtime, Target};

pub use error::LadderError;

/// The number of rows of K that share a scale.
pub const GROUP: usize = 128;

/// The operands of a step.
pub struct Args {
    /// The activations, f16 [M, K].
    pub x: BufferArg,
    /// The weight's words, u32, in the step's layout.
    pub words: BufferArg,
    /// The weight's scales, f16, in the step's layout.
    pub scales: BufferArg,
    /// The output, f16 [M, N]; every element is written.
    pub out: BufferArg,
}

/// A step of the ladder.
#[derive(Clone, Copy)]
pub struct Step {
    /// The number of the step, starting at 1.
    pub number: usize,
    /// The technique that the step adds.
    pub name: &'static str,
    /// The layout of the weight that the step reads.
    pub layout: WeightLayout,
    /// The required divisors of K and N.
    multiples: [usize; 2],
    /// The smallest K.
    least_k: usize,
    /// The function that launches the kernel on checked operands.
    launch: fn(&Client, &QuantProblem, Args) -> Result<(), LadderError>,
}

/// All steps, in order.
pub const STEPS: [Step; 6] = [
    step(
        1,
        "naive",
        WeightLayout::Plain,
        [1, 1],
        1,
        step_1_naive::launch,
    ),
    step(
        2,
        "wide loads",
        WeightLayout::Plain,
        [8, 8],
        8,
        step_2_wide::launch,
    ),
    step(
        3,
        "shared memory",
        WeightLayout::Plain,
        [8, 8],
        8,
        step_3_shared::launch,
    ),
    // Steps 4 and 5 need more than one group: with one group, the tile layout has the scales in
    // another order.
    step(
        4,
        "tensor cores",
        WeightLayout::Tile,
        [64, 64],
        GROUP + 64,
        step_4_tensor_cores::launch,
    ),
    step(
        5,
        "async copies",
        WeightLayout::Tile,
        [64, 64],
        GROUP + 64,
        step_5_async::launch,
    ),
    step(
        6,
        "marlin",
        WeightLayout::Tile,
        [8, 1],
        8,
        step_6_marlin::launch,
    ),
];

const fn step(
    number: usize,
    name: &'static str,
    layout: WeightLayout,
    multiples: [usize; 2],
    least_k: usize,
    launch: fn(&Client, &QuantProblem, Args) -> Result<(), LadderError>,
) -> Step {
    Step {
        number,
        name,
        layout,
        multiples,
        least_k,
        launch,
    }
}

impl Step {
    /// The maximum number of rows of activations: the limit of a grid along y.
    pub const MAX_ROWS: usize = 65_535;

    /// Returns true if the step is written in PTX.
    pub fn needs_cuda(&self) -> bool {
        self.layout == WeightLayout::Tile
    }

    /// Checks that the step supports a problem, regardless of the device.
    ///
    /// # Errors
    /// Returns an error for another format, or an M, K or N that the step does not support.
    pub fn check(&self, problem: &QuantProblem) -> Result<(), LadderError> {
        let (m, n, k) = (problem.m, problem.n(), problem.k());
        if *problem != crate::problem(m, k, n) {
            return Err(LadderError::Format {
                problem: problem.to_string(),
            });
        }
        let (step, features) = (self.number, QuantSpec::MAX_FEATURES);
        for (axis, found, least, most) in [
            ("M", m, 1, Self::MAX_ROWS),
            ("K", k, self.least_k, features),
            ("N", n, 1, features),
        ] {
            if !(least..=most).contains(&found) {
                return Err(LadderError::Range {
                    step,
                    axis,
                    least,
                    most,
                    found,
                });
            }
        }
        for (axis, found, multiple) in [("K", k, self.multiples[0]), ("N", n, self.multiples[1])] {
            if !found.is_multiple_of(multiple) {
                return Err(LadderError::Multiple {
                    step,
                    axis,
                    multiple,
                    found,
                });
            }
        }
        // Kernels count elements in 32 bits.
        let (elements, limit) = ((m * k.max(n)).max(k * n), u32::MAX as usize);
        if elements > limit {
            return Err(KernelError::TooLarge {
                problem: problem.to_string(),
                elements,
                limit,
            }
            .into());
        }
        Ok(())
    }

    /// Checks that a device can run the step.
    ///
    /// # Errors
    /// Returns an error for a step in PTX on another runtime than CUDA.
    pub fn check_device(&self, client: &Client) -> Result<(), LadderError> {
        let runtime = Target::of(client).runtime;
        if self.needs_cuda() && runtime != Runtime::Cuda {
            return Err(LadderError::NeedsCuda {
                step: self.number,
                runtime,
            });
        }
        Ok(())
    }

    /// Launches the step.
    ///
    /// # Errors
    /// Returns the errors of [`check`](Self::check) and [`check_device`](Self::check_device), and
    /// an error for a buffer of the wrong length.
    pub fn launch(
        &self,
        client: &Client,
        problem: &QuantProblem,
        args: Args,
    ) -> Result<(), LadderError> {
        self.check(problem)?;
        self.check_device(client)?;
        let (m, n, k) = (problem.m, problem.n(), problem.k());
        let tensors = problem.weight.in_layout(self.layout).tensors();
        for (operand, expected, found) in [
            ("activations", m * k, args.x.len()),
            ("words", tensors.qweight.elements(), args.words.len()),
            ("scales", tensors.scales.elements(), args.scales.len()),
            ("output", m * n, args.out.len()),
        ] {
            expect_length(problem, operand, expected, found)?;
        }
        (self.launch)(client, problem, args)
    }
}

/// Returns a problem of the ladder: `m` rows of activations times a weight [K, N].
pub fn problem(m: usize, k: usize, n: usize) -> QuantProblem {
    QuantProblem::new(
        m,
        WeightDescriptor::plain(QuantSpec::int4(GroupSize::G128), k, n),
        ActivationDtype::F16,
    )
}
