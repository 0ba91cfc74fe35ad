//! Weights are fragment A of `mma.m16n8k16`, activations are fragment B. The sum over K may be
//! taken in any order as long as both fragments use the same order, so a lane loads contiguous
//! values: 16 bytes, eight features of one column or row, are its part of two products. With
//! `groupID = lane / 4` and `t = lane % 4`:
//!
//! | features of a step | product | in A, columns `groupID` and `groupID + 8` | in B, row `groupID` |
//! |---|---|---|---|
//! | `8t`, `8t + 1`     | first  | `a0`, `a1` | `b0` |
//! | `8t + 2`, `8t + 3` | first  | `a2`, `a3` | `b1` |
//! | `8t + 4`, `8t + 5` | second | `a0`, `a1` | `b0` |
//! | `8t + 6`, `8t + 7` | second | `a2`, `a3` | `b1` |
//!
//! Source: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".

use super::{COLUMNS, ROWS, STEP, WARPS};
use crate::matmul::float::biased;
use crate::pdl::{launch_dependents, wait};
use crate::ptx::{F4, U4, lane, mma_m16n8k16};
use cubecl::prelude::*;

/// Steps of a warp whose loads are in flight at the same time.
const LOADS: usize = 4;

/// Computes 16 columns of 8 rows. The buffers are those of
/// [`FloatOperands`](crate::matmul::float::FloatOperands); `x` and `weight` are read as vectors
/// of four words, eight values.
#[cube(launch_unchecked)]
pub(super) fn few_columns<F: Float>(
    x: &[U4],
    weight: &[U4],
    bias: ComptimeOption<&[F]>,
    out: &mut [F],
    columns: u32,
    rows: u32,
    #[comptime] features: usize,
    #[comptime] bf16: bool,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents(uses_pdl);
    let vectors = comptime!((features / 8) as u32);
    let steps = comptime!((features / STEP).div_ceil(WARPS));
    let (warp, lane) = (UNIT_POS_X / 32, lane());
    let (group_id, t) = (lane / 4, lane % 4);
    let (first_column, first_row) = (
        CUBE_POS_X * comptime!(COLUMNS as u32),
        CUBE_POS_Y * comptime!(ROWS as u32),
    );
    // Columns and rows beyond the last load the last one again; their results are not used.
    let upper = min(first_column + group_id, columns - 1) * vectors + t;
    let lower = min(first_column + group_id + 8, columns - 1) * vectors + t;
    let row = min(first_row + group_id, rows - 1) * vectors + t;

    let mut sum = F4::new(0.0);
    #[unroll]
    for turn in 0..comptime!(steps.div_ceil(LOADS)) {
        let mut weights = Array::<U4>::new(comptime!(2 * LOADS));
        #[unroll]
        for load in 0..LOADS {
            let place = comptime!(((turn * LOADS + load) * WARPS * 4) as u32) + 4 * warp;
            weights[comptime!(2 * load)] = vector(weight, upper, place, turn, load, features);
            weights[comptime!(2 * load + 1)] = vector(weight, lower, place, turn, load, features);
        }
        // The weight does not depend on the kernel before.
        if comptime!(turn == 0) {
            wait(uses_pdl);
        }
        let mut values = Array::<U4>::new(LOADS);
        #[unroll]
        for load in 0..LOADS {
            let place = comptime!(((turn * LOADS + load) * WARPS * 4) as u32) + 4 * warp;
            values[load] = vector(x, row, place, turn, load, features);
        }
        #[unroll]
        for load in 0..LOADS {
            let (upper, lower) = (
                weights[comptime!(2 * load)],
                weights[comptime!(2 * load + 1)],
            );
            let value = values[load];
            let first = mma_m16n8k16(
                fragment(upper, lower, 0usize),
                value.extract(0usize),
                value.extract(1usize),
                sum,
                bf16,
            );
            sum = mma_m16n8k16(
                fragment(upper, lower, 2usize),
                value.extract(2usize),
                value.extract(3usize),
                first,
                bf16,
            );
        }
    }

    // The sums of the warps, [register, warp, lane]. A lane's registers are rows 2t and 2t + 1 of
    // its first column, then of its second column.
    let mut parts = Shared::<[f32]>::new_slice(comptime!(4 * WARPS * 32));
    #[unroll]
    for register in 0..4usize {
        parts[(comptime!((register * WARPS * 32) as u32) + warp * 32 + lane) as usize] =
            sum.extract(register);
    }
    sync_cube();
    // A thread takes a row and a column; columns vary fastest.
    if UNIT_POS_X < comptime!((ROWS * COLUMNS) as u32) {
        let (row, column) = (
            UNIT_POS_X / comptime!(COLUMNS as u32),
            UNIT_POS_X % comptime!(COLUMNS as u32),
        );
        let register = column / 8 * 2 + row % 2;
        let lane = column % 8 * 4 + row / 2;
        let place = register * comptime!((WARPS * 32) as u32) + lane;
        let mut sum = 0.0f32;
        #[unroll]
        for warp in 0..comptime!(WARPS as u32) {
            sum += parts[(place + comptime!(warp * 32)) as usize];
        }
        let (row, column) = (first_row + row, first_column + column);
        if row < rows && column < columns {
            let sum = biased::<F>(sum, &bias, column as usize);
            out[(row * columns + column) as usize] = F::cast_from(sum);
        }
    }
}

/// Loads the vector of a step; zeros after the last step.
#[cube]
fn vector(
    of: &[U4],
    start: u32,
    place: u32,
    #[comptime] turn: usize,
    #[comptime] load: usize,
    #[comptime] features: usize,
) -> U4 {
    let is_whole = comptime!((turn * LOADS + load + 1) * WARPS * STEP <= features);
    if comptime!(is_whole) {
        of[(start + place) as usize]
    } else {
        let mut values = U4::new(0u32);
        if place < comptime!((features / 8) as u32) {
            values = of[(start + place) as usize];
        }
        values
    }
}

/// Builds fragment A from words `word` and `word + 1` of two columns.
#[cube]
fn fragment(upper: U4, lower: U4, #[comptime] word: usize) -> U4 {
    let mut a = U4::new(0u32);
    a.insert(0usize, upper.extract(word));
    a.insert(1usize, lower.extract(word));
    a.insert(2usize, upper.extract(comptime!(word + 1)));
    a.insert(3usize, lower.extract(comptime!(word + 1)));
    a
}
