//! The normalised activations, computed before they are stored in shared memory.

use super::config::{Lengths, STEP_K, V4};
use crate::ptx::lane;
use cubecl::prelude::*;

/// A lane's four values of a step, as they are in memory; zeros past K.
#[derive(CubeType)]
pub(super) struct RawInput<F: Float> {
    x: V4<F>,
    residual: V4<F>,
    norm: V4<F>,
}

#[cube]
impl<F: Float> RawInput<F> {
    pub fn new() -> Self {
        let zero = V4::<F>::new(F::from_int(0));
        RawInput::<F> { x: zero, residual: zero, norm: zero }
    }

    /// Issues the loads of the values of a step.
    pub fn load(&mut self, x: &[V4<F>], residual: &[V4<F>], norm: &[V4<F>], step: u32, lengths: &Lengths) {
        let place = place(step);
        let is_there = place < lengths.k / 4;
        let zero = V4::<F>::new(F::from_int(0));
        self.x = if is_there { x[place as usize] } else { zero };
        self.residual = if is_there { residual[place as usize] } else { zero };
        self.norm = if is_there { norm[place as usize] } else { zero };
    }
}

/// The position of a lane's four values of a step, in vectors of four.
#[cube]
fn place(step: u32) -> u32 {
    step * comptime!(STEP_K as u32 / 4) + lane()
}

/// Stores a warp's step in its shared memory, and the sum with the residual stream in global memory; returns the root that the values were divided by,
/// and the sum of their squares.
///
/// The mean square of the row is known only when all of it was read. Until then a step is divided by the root of its own mean square, which brings it to
/// the middle of f16's range whatever the row's is; its products are multiplied by that root in f32, and at the end divided by the row's.
#[cube]
pub(super) fn stage<F: Float>(
    raw: &RawInput<F>,
    sum: &mut [V4<F>],
    staged: &mut Shared<[V4<F>]>,
    step: u32,
    keeps_sum: bool,
    lengths: &Lengths,
) -> (f32, f32) {
    let value = raw.x + raw.residual;
    if keeps_sum && place(step) < lengths.k / 4 {
        sum[place(step) as usize] = value;
    }
    let wide = V4::<f32>::cast_from(value);
    let squares = wide * wide;
    let mut square = 0.0f32;
    #[unroll]
    for i in 0..4usize {
        square += squares.extract(i);
    }
    let square = plane_sum(square);
    // The added constant prevents a division by zero for a step of zeros, and is negligible beside the square of any f16.
    let root = (square / comptime!(STEP_K as f32) + 1e-30).sqrt();
    staged[UNIT_POS_X as usize] = V4::<F>::cast_from(wide * V4::<f32>::new(1.0 / root)) * raw.norm;
    (root, square)
}
