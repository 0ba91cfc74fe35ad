//! Loads the activations and stores them in shared memory, normalised if a norm is fused.

use super::config::{GemvConfig, GemvSizes};
use crate::planes::plane_total;
use crate::ptx::lane;
use cubecl::prelude::*;

/// The values that a lane loads for a step, not yet normalised; zeros beyond K.
#[derive(CubeType)]
pub(super) struct RawInput<F: Float, N: Size> {
    x: Vector<F, N>,
    residual: Vector<F, N>,
    norm: Vector<F, N>,
}

#[cube]
impl<F: Float, N: Size> RawInput<F, N> {
    pub fn new() -> Self {
        let zero = Vector::<F, N>::new(F::from_int(0));
        RawInput::<F, N> {
            x: zero,
            residual: zero,
            norm: zero,
        }
    }

    /// Issues the loads of the values of a step.
    pub fn load(
        &mut self,
        x: &[Vector<F, N>],
        residual: &ComptimeOption<&[Vector<F, N>]>,
        norm: &ComptimeOption<&[Vector<F, N>]>,
        step: u32,
        sizes: &GemvSizes,
        #[comptime] config: GemvConfig,
    ) {
        let place = place(step);
        let is_there = place < sizes.k / comptime!(config.lane_values() as u32);
        let zero = Vector::<F, N>::new(F::from_int(0));
        self.x = if is_there { x[place as usize] } else { zero };
        #[comptime]
        match residual {
            ComptimeOption::Some(residual) => {
                self.residual = if is_there {
                    residual[place as usize]
                } else {
                    zero
                }
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match norm {
            ComptimeOption::Some(norm) => {
                self.norm = if is_there { norm[place as usize] } else { zero }
            }
            ComptimeOption::None => {}
        }
    }
}

/// Returns the position of a lane's values of a step, in units of one lane's vector.
#[cube]
fn place(step: u32) -> u32 {
    step * 32 + lane()
}

/// Stores the input of a warp's step in the warp's part of shared memory and, if `keeps_sum`, the
/// sum of input and residual stream in global memory. Returns the root by which the values were
/// divided, and the sum of the squares of the values before the division. Without a norm the values
/// are stored unchanged.
///
/// The mean square of the row is known only after the whole row was read. A step is therefore
/// divided by the root of its own mean square, which brings the values to the middle of f16's range
/// whatever the magnitude of the row. The products of the step are multiplied by that root in f32,
/// and the final sums are divided by the root of the row.
#[cube]
pub(super) fn stage<F: Float, N: Size>(
    raw: &RawInput<F, N>,
    sum: &mut ComptimeOption<&mut [Vector<F, N>]>,
    staged: &mut Shared<[Vector<F, N>]>,
    step: u32,
    keeps_sum: bool,
    sizes: &GemvSizes,
    #[comptime] config: GemvConfig,
) -> (f32, f32) {
    let mut root = 1.0f32.runtime();
    let mut square = 0.0f32.runtime();
    if comptime!(config.has_norm()) {
        let value = raw.x + raw.residual;
        #[comptime]
        match sum {
            ComptimeOption::Some(sum) => {
                if keeps_sum && place(step) < sizes.k / comptime!(config.lane_values() as u32) {
                    sum[place(step) as usize] = value;
                }
            }
            ComptimeOption::None => {}
        }
        let wide = Vector::<f32, N>::cast_from(value);
        let squares = wide * wide;
        #[unroll]
        for i in 0..config.lane_values() {
            square += squares.extract(i);
        }
        square = plane_total(square, 32usize);
        // The added constant prevents a division by zero for a step of zeros, and is negligible
        // beside the square of any f16.
        root = (square / comptime!(config.step_k() as f32) + 1e-30).sqrt();
        staged[UNIT_POS_X as usize] =
            Vector::<F, N>::cast_from(wide * Vector::<f32, N>::new(1.0 / root)) * raw.norm;
    } else {
        staged[UNIT_POS_X as usize] = raw.x;
    }
    (root, square)
}
