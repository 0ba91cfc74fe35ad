//! One row, with an addition to the residual stream and an RMSNorm before it: `norm(x + residual) W` in one launch.
//!
//! A decode step of one sequence is a chain of small launches, each of which costs three to five microseconds beside its bytes. A norm is nothing but
//! such a cost, so it is computed where its output is multiplied. Microseconds of both in a step on an H200, f16, groups of 128, for one row, which takes
//! this routine, and for two, which take the norm's kernel and then the [tile kernels](crate::tile) (`benches/records/decode-*-h200.log`):
//!
//! | norm, and projection of | K x N | one row | two rows |
//! |---|---|---:|---:|
//! | Llama 2 7B, q, k and v | 4096 x 12288 | 9.9 | 13.5 |
//! | Llama 2 7B, gate and up | 4096 x 22016 | 14.7 | 19.2 |
//! | Llama 3 8B, q, k and v | 4096 x 6144 | 7.4 | 10.0 |
//! | Llama 3 8B, gate and up | 4096 x 28672 | 18.0 | 22.4 |
//! | Llama 2 70B, q, k and v | 8192 x 10240 | 14.9 | 18.9 |
//! | Llama 2 70B, gate and up | 8192 x 57344 | 63.7 | 67.2 |
//!
//! Every cluster makes the whole input, so more rows cost more. A version for several took 0.7 to 2.5 us less for two rows than the norm apart on 7B and 8B,
//! but 2.7 us more on 70B's gate and up, and of four rows gained on 8B's q, k and v alone. SiLU of the gates in front of an MLP's last matmul, done in the
//! same way, gained 0.1 to 0.4 us on 7B and 8B and lost 1.2 us on 70B. So neither is here.
//!
//! # How it works
//!
//! **Work.** A cluster of blocks has 64 columns of the weight, a tile of the layout, and its warps take the steps of 128 rows of K in turn
//! (`kernel.rs`). No column is cut anywhere else, so sums meet in the cluster's shared memory and never in global memory (`output.rs`). A launch has
//! as many warps as the card holds at once (`plan.rs`).
//!
//! **Weights** go from memory to registers, a lane's 16 bytes of a tile at a time, and each register is asked for again as soon as it was multiplied
//! (`weight.rs`). Nobody else needs them, and shared memory would only be another stop on the way.
//!
//! **Input.** Every cluster normalises the row anew, each warp the part that it multiplies, while its weights are on their way (`input.rs`): some kilobytes
//! from the second-level cache. The division by the root of the mean square of the whole row is put off to the end.
//!
//! **Products** are those of `fragment.rs` for few rows: stored weights as f16 subnormals, one product more for the zero points, a group's sums scaled
//! in f32.

mod config;
mod input;
mod kernel;
mod launch;
mod output;
mod plan;
#[cfg(feature = "inspect")]
mod source;
mod weight;

pub use config::Config;
pub(crate) use launch::launch;
pub use plan::{CLUSTERS, plan};
#[cfg(feature = "inspect")]
pub use source::source;
