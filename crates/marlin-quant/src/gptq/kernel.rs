//! GPTQ's rounding of a block of rows as CubeCL kernels: one unit per column; in a search, one unit
//! per column and grid.

mod grid;

use self::grid::{code, range, scale_of, zero_of};
use crate::grid::Grid;
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_format::{QuantSpec, ScaleDtype, Sparsity};
use marlin_kernels::ptx::F4;
use marlin_kernels::{Runtime, Target};

/// The maximum number of rows of a block. The errors of the rows are in shared memory: 32 KiB for a
/// cube of [`UNITS`].
pub(super) const MAX_ROWS: usize = 128;
/// The number of rows that a unit holds in registers. The number of rows of a block is a multiple
/// of `STEP`, so that one load reads four entries of a factor's row.
pub(super) const STEP: usize = 16;
/// The number of columns of a cube.
const UNITS: usize = 64;

/// The levels that rows are rounded to, and whether they are pruned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Levels {
    top: u32,
    has_zero_points: bool,
    scale: ScaleDtype,
    /// The number of grids that a search tries.
    candidates: u32,
    /// True if two of every four rows are pruned.
    is_sparse: bool,
}

impl Levels {
    pub fn new(spec: &QuantSpec, sparsity: Sparsity) -> Self {
        Self {
            top: spec.value.max().into(),
            has_zero_points: spec.has_zero_points(),
            scale: spec.scales.dtype,
            candidates: Grid::candidates(spec) as u32,
            is_sparse: sparsity == Sparsity::TwoFour,
        }
    }

    /// Returns the number of grids that a search tries.
    pub fn candidates(&self) -> usize {
        self.candidates as usize
    }
}

/// A block of rows [rows, N] of a weight, f32, in the order in which they are rounded.
pub(super) struct Rows {
    pub weight: BufferArg,
    /// The second moment of each row's feature, f32 `[rows]`: the losses of features with moment 0
    /// do not count.
    pub moments: BufferArg,
    pub rows: usize,
    pub n: usize,
}

/// Computes the squared errors that remain in a group's outputs with each grid of a search,
/// [candidates, N]. `factor` is the part [rows, rows] of the inverse factor. A group of more rows
/// than a block has no factor: its losses are the squared errors of its weights, weighted by their
/// moments.
pub(super) fn group_losses(
    client: &Client,
    levels: Levels,
    group: Rows,
    factor: Option<BufferArg>,
    losses: BufferArg,
) {
    let (units, dim) = units(client);
    let count = CubeCount::Static(group.n.div_ceil(units) as u32, levels.candidates, 1);
    let Rows {
        weight,
        moments,
        rows,
        n,
    } = group;
    match factor {
        Some(factor) => compensated_losses::launch(
            client, count, dim, weight, factor, moments, losses, n, rows, levels, units,
        ),
        None => weighted_losses::launch(
            client, count, dim, weight, moments, losses, n, rows, levels, units,
        ),
    }
}

/// Writes the scale and zero point of each column, `[N]`, of the grid with the least loss, given
/// the losses [candidates, N].
pub(super) fn choose(
    client: &Client,
    levels: Levels,
    group: Rows,
    losses: BufferArg,
    scales: BufferArg,
    zeros: BufferArg,
) {
    let (units, dim) = units(client);
    let count = CubeCount::Static(group.n.div_ceil(units) as u32, 1, 1);
    chosen_grids::launch(
        client,
        count,
        dim,
        group.weight,
        losses,
        scales,
        zeros,
        group.n,
        group.rows,
        levels,
        units,
    );
}

/// The outputs of rounding a block.
pub(super) struct Rounded {
    /// The codes q, in f32: [rows, N].
    pub codes: BufferArg,
    /// The errors divided by the diagonal of the factor, [rows, N].
    pub errors: BufferArg,
    /// The sum of the squares of these errors, `[N]`.
    pub losses: BufferArg,
}

/// Rounds a block to the grids of its columns.
pub(super) fn round(
    client: &Client,
    levels: Levels,
    block: Rows,
    factor: BufferArg,
    scales: BufferArg,
    zeros: BufferArg,
    out: Rounded,
) {
    let (units, dim) = units(client);
    let count = CubeCount::Static(block.n.div_ceil(units) as u32, 1, 1);
    let Rows {
        weight,
        moments,
        rows,
        n,
    } = block;
    let Rounded {
        codes,
        errors,
        losses,
    } = out;
    rounded_rows::launch(
        client, count, dim, weight, factor, moments, scales, zeros, codes, errors, losses, n, rows,
        levels, units,
    );
}

/// Returns the number of columns of a cube: one on the CPU, where one core runs a whole cube.
fn units(client: &Client) -> (usize, CubeDim) {
    let units = if Target::of(client).runtime == Runtime::Cpu {
        1
    } else {
        UNITS
    };
    (units, CubeDim::new_1d(units as u32))
}

/// The parameters of rounding a column, apart from its values.
#[derive(CubeType)]
struct Column {
    column: usize,
    n: usize,
    rows: usize,
    scale: f32,
    zero: f32,
}

#[cube(launch)]
#[allow(clippy::too_many_arguments, reason = "the operands of the kernel")]
fn compensated_losses(
    weight: &[f32],
    factor: &[F4],
    moments: &[f32],
    losses: &mut [f32],
    n: usize,
    rows: usize,
    #[comptime] levels: Levels,
    #[comptime] units: usize,
) {
    let mut errors = Shared::<[f32]>::new_slice(comptime!(MAX_ROWS * units));
    let column = CUBE_POS_X as usize * units + UNIT_POS as usize;
    if column >= n {
        terminate!();
    }
    let (low, high) = range(weight, column, n, rows);
    let scale = scale_of(low, high, CUBE_POS_Y, levels);
    let zero = zero_of(low, scale, CUBE_POS_Y, levels);
    let place = Column {
        column,
        n,
        rows,
        scale,
        zero,
    };
    let mut values = Array::<f32>::new(STEP);
    let mut loss = 0.0f32.runtime();
    let mut first = 0usize.runtime();
    while first < rows {
        load(weight, factor, &errors, &mut values, first, &place, units);
        loss += round_step(
            factor,
            moments,
            &mut errors,
            &mut values,
            first,
            &place,
            levels,
            units,
        );
        first += STEP;
    }
    losses[CUBE_POS_Y as usize * n + column] = loss;
}

#[cube(launch)]
#[allow(clippy::too_many_arguments, reason = "the operands of the kernel")]
fn weighted_losses(
    weight: &[f32],
    moments: &[f32],
    losses: &mut [f32],
    n: usize,
    rows: usize,
    #[comptime] levels: Levels,
    #[comptime] units: usize,
) {
    let column = CUBE_POS_X as usize * units + UNIT_POS as usize;
    if column >= n {
        terminate!();
    }
    let (low, high) = range(weight, column, n, rows);
    let scale = scale_of(low, high, CUBE_POS_Y, levels);
    let zero = zero_of(low, scale, CUBE_POS_Y, levels);
    let mut loss = 0.0f32.runtime();
    for row in 0..rows {
        let value = weight[row * n + column];
        let error = value - (code(value, scale, zero, levels) - zero) * scale;
        loss += moments[row] * error * error;
    }
    losses[CUBE_POS_Y as usize * n + column] = loss;
}

#[cube(launch)]
#[allow(clippy::too_many_arguments, reason = "the operands of the kernel")]
fn chosen_grids(
    weight: &[f32],
    losses: &[f32],
    scales: &mut [f32],
    zeros: &mut [f32],
    n: usize,
    rows: usize,
    #[comptime] levels: Levels,
    #[comptime] units: usize,
) {
    let column = CUBE_POS_X as usize * units + UNIT_POS as usize;
    if column >= n {
        terminate!();
    }
    let mut best = 0u32.runtime();
    let mut least = losses[column];
    for index in 1..levels.candidates {
        let loss = losses[index as usize * n + column];
        if loss < least {
            least = loss;
            best = index;
        }
    }
    let (low, high) = range(weight, column, n, rows);
    let scale = scale_of(low, high, best, levels);
    scales[column] = scale;
    zeros[column] = zero_of(low, scale, best, levels);
}

#[cube(launch)]
#[allow(clippy::too_many_arguments, reason = "the operands of the kernel")]
fn rounded_rows(
    weight: &[f32],
    factor: &[F4],
    moments: &[f32],
    scales: &[f32],
    zeros: &[f32],
    codes_out: &mut [f32],
    errors_out: &mut [f32],
    losses: &mut [f32],
    n: usize,
    rows: usize,
    #[comptime] levels: Levels,
    #[comptime] units: usize,
) {
    let mut errors = Shared::<[f32]>::new_slice(comptime!(MAX_ROWS * units));
    let column = CUBE_POS_X as usize * units + UNIT_POS as usize;
    if column >= n {
        terminate!();
    }
    let place = Column {
        column,
        n,
        rows,
        scale: scales[column],
        zero: zeros[column],
    };
    let mut values = Array::<f32>::new(STEP);
    let mut loss = 0.0f32.runtime();
    let mut first = 0usize.runtime();
    while first < rows {
        load(weight, factor, &errors, &mut values, first, &place, units);
        loss += round_step(
            factor,
            moments,
            &mut errors,
            &mut values,
            first,
            &place,
            levels,
            units,
        );
        #[unroll]
        for i in 0..STEP {
            codes_out[(first + i) * n + column] = values[i];
            errors_out[(first + i) * n + column] = errors[(first + i) * units + UNIT_POS as usize];
        }
        first += STEP;
    }
    losses[column] = loss;
}

/// Loads the rows from `first` on, and subtracts the effect of the errors of the rows before them.
#[cube]
fn load(
    weight: &[f32],
    factor: &[F4],
    errors: &Shared<[f32]>,
    values: &mut Array<f32>,
    first: usize,
    place: &Column,
    #[comptime] units: usize,
) {
    #[unroll]
    for i in 0..STEP {
        values[i] = weight[(first + i) * place.n + place.column];
    }
    for row in 0..first {
        let error = errors[row * units + UNIT_POS as usize];
        let line = (row * place.rows + first) / 4;
        #[unroll]
        for part in 0..comptime!(STEP / 4) {
            let factors = factor[line + part];
            #[unroll]
            for i in 0..4usize {
                values[part * 4 + i] -= error * factors.extract(i);
            }
        }
    }
}

/// Rounds the `STEP` rows from `first` on, and replaces their `values` with their codes. Returns
/// the sum of the squares of their errors.
#[cube]
#[allow(clippy::too_many_arguments, reason = "one step of two kernels")]
fn round_step(
    factor: &[F4],
    moments: &[f32],
    errors: &mut Shared<[f32]>,
    values: &mut Array<f32>,
    first: usize,
    place: &Column,
    #[comptime] levels: Levels,
    #[comptime] units: usize,
) -> f32 {
    let mut loss = 0.0f32.runtime();
    let mut costs = Array::<f32>::new(4usize);
    #[unroll]
    for i in 0..STEP {
        let row = first + i;
        let line = (row * place.rows + first) / 4;
        let diagonal = factor[line + comptime!(i / 4)].extract(comptime!(i % 4));
        if comptime!(levels.is_sparse && i % 4 == 0) {
            #[unroll]
            for other in 0..4usize {
                let line = ((row + other) * place.rows + row) / 4;
                costs[other] = (values[i + other] / factor[line].extract(other)).abs();
            }
        }
        let mut code = code(values[i], place.scale, place.zero, levels);
        if comptime!(levels.is_sparse) {
            // In every four rows, the two whose pruning costs least are pruned.
            let mut cheaper = 0u32.runtime();
            #[unroll]
            for other in 0..4usize {
                let is_before = comptime!(other < i % 4);
                let (cost, own) = (costs[other], costs[comptime!(i % 4)]);
                if cost < own || (is_before && cost == own) {
                    cheaper += 1;
                }
            }
            if cheaper < 2 {
                code = place.zero;
            }
        }
        let error = (values[i] - (code - place.zero) * place.scale) / diagonal;
        errors[row * units + UNIT_POS as usize] = error;
        if moments[row] > 0.0 {
            loss += error * error;
        }
        values[i] = code;
        #[unroll]
        for after in 0..comptime!(STEP - 1 - i) {
            let after = comptime!(i + 1 + after);
            values[after] -=
                error * factor[line + comptime!(after / 4)].extract(comptime!(after % 4));
        }
    }
    loss
}
