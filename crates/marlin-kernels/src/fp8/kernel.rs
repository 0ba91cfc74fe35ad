use crate::pdl::launch_dependents_and_wait;
use crate::planes::plane_total;
use crate::ptx::{U4, cvt_e4m3x4};
use cubecl::prelude::*;

/// The number of values that a unit rounds at a time.
pub(super) const RUN: usize = 16;
/// The maximum number of units of a cube.
const MAX_UNITS: usize = 512;
/// The number of units of a plane.
const PLANE: usize = 32;
/// The largest e4m3.
const LARGEST: f32 = 448.0;
/// The smallest magnitude that has a scale: the reciprocals of smaller ones are not finite.
const SMALLEST: f32 = 1e-30;

/// The compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RowsConfig {
    /// The number of runs of [`RUN`] values of a row.
    pub runs: usize,
    /// True if the row is added to the residual stream and normalised first.
    pub has_norm: bool,
}

impl RowsConfig {
    /// Returns the number of units of a cube, which rounds a row.
    pub fn units(&self) -> usize {
        self.runs.next_multiple_of(PLANE).min(MAX_UNITS)
    }

    /// Returns the number of runs of a unit.
    fn runs_each(&self) -> usize {
        self.runs.div_ceil(self.units())
    }
}

/// Rounds a row: `codes` [M, K / 16] in the order that the [module](super) defines, and `scales`
/// `[M]`. With a norm, `x` is added to `residual`, the result is stored in `sum`, and its RMSNorm
/// is rounded.
#[cube(launch_unchecked)]
pub(super) fn quantize_rows<F: Float>(
    x: &[Vector<F, Const<8>>],
    residual: ComptimeOption<&[Vector<F, Const<8>>]>,
    norm: ComptimeOption<&[Vector<F, Const<8>>]>,
    mut sum: ComptimeOption<&mut [Vector<F, Const<8>>]>,
    codes: &mut [Vector<u32, Const<4>>],
    scales: &mut [f32],
    epsilon: f32,
    #[comptime] config: RowsConfig,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let runs = comptime!(config.runs);
    let unit = UNIT_POS as usize;
    // The row stays in registers until its largest magnitude is known.
    let mut values = Array::<Vector<f32, Const<8>>>::new(comptime!(2 * config.runs_each()));
    let mut square = 0.0f32.runtime();
    let mut largest = 0.0f32.runtime();
    // 0, or NaN if a value is not finite.
    let mut not_finite = 0.0f32.runtime();
    #[unroll]
    for i in 0..comptime!(config.runs_each()) {
        let run = unit + comptime!(i * config.units());
        if run < runs {
            #[unroll]
            for half in 0..2usize {
                let in_row = 2 * run + half;
                let at = CUBE_POS * comptime!(2 * runs) + in_row;
                let mut value = x[at];
                #[comptime]
                match &residual {
                    ComptimeOption::Some(residual) => value += residual[at],
                    ComptimeOption::None => {}
                }
                #[comptime]
                match &mut sum {
                    ComptimeOption::Some(sum) => sum[at] = value,
                    ComptimeOption::None => {}
                }
                let mut wide = Vector::<f32, Const<8>>::cast_from(value);
                let squares = wide * wide;
                #[comptime]
                match &norm {
                    ComptimeOption::Some(norm) => {
                        wide *= Vector::<f32, Const<8>>::cast_from(norm[in_row]);
                    }
                    ComptimeOption::None => {}
                }
                #[unroll]
                for element in 0..8usize {
                    square += squares.extract(element);
                    largest = max(largest, wide.extract(element).abs());
                    not_finite = fma(wide.extract(element), 0.0f32, not_finite);
                }
                values[comptime!(2 * i + half)] = wide;
            }
        }
    }
    let (square, largest, not_finite) = of_row(square, largest, not_finite, config);
    // The norm divides all values of the row by the same root, which only the scale has to know.
    let mut scale = largest * comptime!(1.0 / LARGEST) + not_finite;
    if comptime!(config.has_norm) {
        scale /= (square / comptime!((runs * RUN) as f32) + epsilon).sqrt();
    }
    let inverse = select(
        largest < SMALLEST,
        0.0f32.runtime(),
        LARGEST / max(largest, SMALLEST),
    );
    #[unroll]
    for i in 0..comptime!(config.runs_each()) {
        let run = unit + comptime!(i * config.units());
        if run < runs {
            let first = values[comptime!(2 * i)] * Vector::new(inverse);
            let second = values[comptime!(2 * i + 1)] * Vector::new(inverse);
            let mut words = U4::new(0u32);
            #[unroll]
            for t in 0..4usize {
                words.insert(
                    t,
                    cvt_e4m3x4(
                        first.extract(comptime!(2 * t)),
                        second.extract(comptime!(2 * t)),
                        first.extract(comptime!(2 * t + 1)),
                        second.extract(comptime!(2 * t + 1)),
                    ),
                );
            }
            codes[CUBE_POS * runs + run] = words;
        }
    }
    if unit == 0 {
        scales[CUBE_POS] = scale;
    }
}

/// Returns a row's sum of squares, largest magnitude and sum of `not_finite` from those of the
/// units.
#[cube]
fn of_row(
    square: f32,
    largest: f32,
    not_finite: f32,
    #[comptime] config: RowsConfig,
) -> (f32, f32, f32) {
    let planes = comptime!(config.units() / PLANE);
    let mut largest = largest;
    #[unroll]
    for i in 0..comptime!(PLANE.ilog2()) {
        largest = max(largest, plane_shuffle_xor(largest, comptime!(1u32 << i)));
    }
    let square = plane_total(square, PLANE);
    let not_finite = plane_total(not_finite, PLANE);
    let mut parts = Shared::<[f32]>::new_slice(comptime!(3 * planes));
    if UNIT_POS.is_multiple_of(comptime!(PLANE as u32)) {
        let plane = (UNIT_POS / comptime!(PLANE as u32)) as usize;
        parts[3 * plane] = square;
        parts[3 * plane + 1] = largest;
        parts[3 * plane + 2] = not_finite;
    }
    sync_cube();
    let (mut square, mut largest, mut not_finite) = (parts[0], parts[1], parts[2]);
    #[unroll]
    for plane in 1..planes {
        square += parts[comptime!(3 * plane)];
        largest = max(largest, parts[comptime!(3 * plane + 1)]);
        not_finite += parts[comptime!(3 * plane + 2)];
    }
    (square, largest, not_finite)
}
