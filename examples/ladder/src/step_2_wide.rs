//! Step 2: wide loads, several outputs per thread, and K split among the threads of a block.
//!
//! **The step.** A thread loads 16 bytes of the weight at a time: four columns by eight rows of K.
//! It multiplies the weights with up to eight rows of activations, which it also loads 16 bytes at
//! a time. A weight is thus unpacked once for eight outputs. Eight threads side by side read a line
//! of 128 bytes. Because N/4 threads are too few to keep the memory busy, 32 threads share a
//! column: each takes every 32nd row of words, and their sums are added in shared memory at the end
//! (split-K).
//!
//! ```text
//!             32 columns
//!          lane 0 .. lane 7
//! split 0  | row of words 0, 32, 64, ..
//! split 1  | row of words 1, 33, 65, ..
//!  ..
//! split 31 | row of words 31, 63, 95, ..    then: out = the sum of all splits
//! ```
//!
//! **What bounds it.** The bound is instructions. Each weight takes a shift, a mask, a conversion,
//! a subtraction, a scale, and the products. Conversions from integer to float run at a lower rate
//! than multiply-adds. In addition, each thread loads and converts its activations separately.
//!
//! **In the profile.** Requests take four full lines, and the bytes per second are many times those
//! of step 1. With one row, the source view has one `I2FP` for each multiply-add. With eight rows,
//! it has mostly FFMA, and loads of activations that the first-level cache serves.

use crate::{Args, LadderError};
use cubecl::client::Client;
use cubecl::prelude::*;
use half::f16;
use marlin_kernels::{QuantProblem, Runtime, Target};

/// The maximum number of rows of activations of a block.
const MAX_ROWS: usize = 8;

/// The work of a block: `rows` rows by `4 * lanes` columns, with K split into `splits` parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Block {
    pub rows: usize,
    pub lanes: usize,
    pub splits: usize,
}

impl Block {
    /// Returns the block for `m` rows of activations. On the CPU runtime, the threads of a block
    /// are threads of the operating system that wait for each other in a loop, so their number does
    /// not exceed the cores.
    pub fn new(client: &Client, m: usize) -> Self {
        let cores = client.properties().hardware.max_units_per_cube as usize;
        let (lanes, splits) = if Target::of(client).runtime == Runtime::Cpu {
            ((cores / 2).clamp(1, 2), 2)
        } else {
            (8, 32)
        };
        Self {
            rows: m.next_power_of_two().min(MAX_ROWS),
            lanes,
            splits,
        }
    }

    /// Returns the number of threads of a block.
    pub const fn threads(&self) -> usize {
        self.lanes * self.splits
    }

    /// Returns the number of columns of a block.
    pub const fn columns(&self) -> usize {
        4 * self.lanes
    }

    /// Returns the number of blocks of a problem.
    pub fn count(&self, problem: &QuantProblem) -> CubeCount {
        CubeCount::new_2d(
            problem.n().div_ceil(self.columns()) as u32,
            problem.m.div_ceil(self.rows) as u32,
        )
    }
}

// ANCHOR: kernel
/// Multiplies eight activations of each row with one word of each of four columns at a time.
#[cube(launch_unchecked)]
pub(crate) fn wide(
    x: &[Vector<f16, Const<8>>],
    words: &[Vector<u32, Const<4>>],
    scales: &[Vector<f16, Const<4>>],
    out: &mut [f16],
    m: usize,
    n: usize,
    k: usize,
    #[comptime] block: Block,
) {
    let lane = UNIT_POS_X as usize % comptime!(block.lanes);
    let split = UNIT_POS_X as usize / comptime!(block.lanes);
    // Threads past N repeat the last four columns, and rows past M the last row, so that the loop
    // has no branch; their results are not written.
    let quads = n / 4;
    let quad = min(
        CUBE_POS_X as usize * comptime!(block.lanes) + lane,
        quads - 1,
    );
    let word_rows = k / 8;
    let mut x_rows = Array::<usize>::new(comptime!(block.rows));
    let mut sums = Array::<f32>::new(comptime!(4 * block.rows));
    #[unroll]
    for r in 0..comptime!(block.rows) {
        x_rows[r] = min(CUBE_POS_Y as usize * comptime!(block.rows) + r, m - 1) * word_rows;
        #[unroll]
        for c in 0..4usize {
            sums[comptime!(4 * r + c)] = 0.0;
        }
    }

    let mut word_row = split;
    while word_row < word_rows {
        let four = words[word_row * quads + quad];
        let scale = Vector::<f32, Const<4>>::cast_from(scales[word_row / 16 * quads + quad]);
        let mut activations = Array::<Vector<f32, Const<8>>>::new(comptime!(block.rows));
        #[unroll]
        for r in 0..comptime!(block.rows) {
            activations[r] = Vector::cast_from(x[x_rows[r] + word_row]);
        }
        #[unroll]
        for c in 0..4usize {
            #[unroll]
            for i in 0..8usize {
                let q = (four.extract(c) >> comptime!(4 * i as u32)) & 15u32;
                let weight = (f32::cast_from(q) - 8.0) * scale.extract(c);
                #[unroll]
                for r in 0..comptime!(block.rows) {
                    sums[comptime!(4 * r + c)] += activations[r].extract(i) * weight;
                }
            }
        }
        word_row += comptime!(block.splits);
    }
    add_splits(&sums, out, m, n, block);
}
// ANCHOR_END: kernel

// ANCHOR: add
/// Adds the sums of a block's splits, always in the same order, and writes the result. `sums[4r +
/// c]` is the sum of row `r` and of column `c` of the thread's four columns.
#[cube]
pub(crate) fn add_splits(
    sums: &Array<f32>,
    out: &mut [f16],
    m: usize,
    n: usize,
    #[comptime] block: Block,
) {
    let outputs = comptime!(block.rows * block.columns());
    let mut parts = Shared::<[f32]>::new_slice(comptime!(block.splits * outputs));
    let lane = UNIT_POS_X as usize % comptime!(block.lanes);
    let split = UNIT_POS_X as usize / comptime!(block.lanes);
    #[unroll]
    for r in 0..comptime!(block.rows) {
        #[unroll]
        for c in 0..4usize {
            parts[split * outputs + comptime!(r * block.columns() + c) + 4 * lane] =
                sums[comptime!(4 * r + c)];
        }
    }
    sync_cube();
    let mut output = UNIT_POS_X as usize;
    while output < outputs {
        let mut sum = 0.0f32;
        #[unroll]
        for s in 0..comptime!(block.splits) {
            sum += parts[output + comptime!(s * outputs)];
        }
        let row = CUBE_POS_Y as usize * comptime!(block.rows) + output / comptime!(block.columns());
        let column =
            CUBE_POS_X as usize * comptime!(block.columns()) + output % comptime!(block.columns());
        if row < m && column < n {
            out[row * n + column] = f16::cast_from(sum);
        }
        output += comptime!(block.threads());
    }
}
// ANCHOR_END: add

pub(crate) fn launch(
    client: &Client,
    problem: &QuantProblem,
    args: Args,
) -> Result<(), LadderError> {
    let (m, n, k) = (problem.m, problem.n(), problem.k());
    let block = Block::new(client, m);
    let (count, dim) = (
        block.count(problem),
        CubeDim::new_1d(block.threads() as u32),
    );
    // SAFETY: the lengths of all buffers were checked, K and N are multiples of 8, and nothing past
    // M or N is read or written.
    unsafe {
        wide::launch_unchecked(
            client,
            count,
            dim,
            args.x,
            args.words,
            args.scales,
            args.out,
            m,
            n,
            k,
            block,
        )
    };
    Ok(())
}
