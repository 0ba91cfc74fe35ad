//! Step 6: the library's kernels, [`mma_sync`](marlin_kernels::matmul::mma_sync) and
//! [`wgmma`](marlin_kernels::matmul::wgmma).
//!
//! **The step.** The remaining gains are many small ones, and the library's kernels have all of
//! them:
//!
//! - *Stripes.* The number of blocks is that of the multiprocessors, and each block has the same
//!   number of steps along K, across columns. Blocks that share a tile add their sums through
//!   global memory, in a fixed order (`tile/stripe.rs`, `exchange.rs`).
//! - *No dequantisation.* For few rows, the masked nibbles are multiplied unchanged, as subnormal
//!   f16 numbers. One product with ones sums the activations, which gives the correction for the
//!   zero points (`fragment.rs`).
//! - *Warpgroups.* On compute capability 9.0, `wgmma` reads the activations directly from shared
//!   memory and runs while the next weights are converted to fragments. The copy engine fills the
//!   stages, started by one dedicated warp (`matmul/wgmma`).
//! - *A choice of tiles.* A cost model selects the fastest of up to 18 tiles for each problem and
//!   card (`tile/cost.rs`).
//!
//! **What bounds it.** With few rows, the bound is the memory; with many rows, the tensor cores and
//! the conversion to fragments.
//!
//! **In the profile.** Memory throughput is close to that of a plain copy, on all multiprocessors,
//! to the end of the launch.

use crate::{Args, LadderError};
use cubecl::client::Client;
use marlin_format::{WeightLayout, WeightTensors};
use marlin_kernels::{Operands, QuantProblem, Target, plan};

// ANCHOR: launch
pub(crate) fn launch(
    client: &Client,
    problem: &QuantProblem,
    args: Args,
) -> Result<(), LadderError> {
    let problem = problem.in_layout(WeightLayout::Tile);
    let plan = plan(problem, &Target::of(client));
    let weight = WeightTensors {
        qweight: args.words,
        metadata: None,
        scales: args.scales,
        zero_points: None,
        row_permutation: None,
    };
    Ok(marlin_kernels::launch(
        client,
        &problem,
        &plan,
        Operands {
            x: args.x,
            norm: None,
            weight,
            bias: None,
            out: args.out,
        },
    )?)
}
// ANCHOR_END: launch
