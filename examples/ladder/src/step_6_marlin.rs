//! Step 6: the library's kernel, [`marlin_kernels::marlin`].
//!
//! **The step.** What is left to gain is spread over many places, and that kernel has them all:
//!
//! - *Stripes.* There are as many blocks as multiprocessors, and each has the same number of steps along K, across columns. Blocks that share a tile
//!   add their sums through global memory, in a fixed order (`marlin/stripe.rs`, `exchange.rs`).
//! - *No dequantisation.* For few rows the masked nibbles are multiplied as they are: in f16 they are small numbers, and one product with ones sums the
//!   activations, from which the zero points follow (`fragment.rs`).
//! - *Warpgroups.* On compute capability 9.0 `wgmma` reads the activations from shared memory itself and runs on while the next weights are made
//!   fragments; the copy engine fills the stages for one warp that does nothing else (`warpgroup.rs`, `pipeline.rs`).
//! - *A choice of tiles.* An estimate of the time takes the fastest of up to 18 for each problem and card (`plan.rs`).
//!
//! **What bounds it.** With few rows, the memory; with many, the tensor cores and the making of fragments.
//!
//! **In the profile.** Memory throughput close to that of a plain copy, on all multiprocessors, to the end of the launch.

use crate::{Args, LadderError};
use cubecl::client::Client;
use marlin_kernels::Problem;
use marlin_kernels::marlin::{self, Card, MatmulArgs, WeightArgs, Workspace};

// ANCHOR: launch
pub(crate) fn launch(client: &Client, problem: &Problem, args: Args) -> Result<(), LadderError> {
    let shared_limit = client.properties().hardware.max_shared_memory_size;
    let no_card = || LadderError::Card { step: 6, problem: problem.to_string(), shared_limit };
    let card = Card::of(client).ok_or_else(no_card)?;
    let launch = marlin::plan(problem, &card).ok_or_else(no_card)?;
    let weight = WeightArgs { words: args.words, scales: args.scales, zero_points: None };
    let workspace = args.workspace.unwrap_or_else(|| Workspace::new(client, &card));
    let args = MatmulArgs { x: args.x, weight, bias: None, out: args.out, workspace };
    Ok(marlin::matmul(client, problem, launch, args)?)
}
// ANCHOR_END: launch
