//! The kernel for one row of activations: `x W`, or `norm(x + residual) W` with the addition to the
//! residual stream and the RMSNorm fused, in one launch.
//!
//! A decode step of one sequence is a chain of small launches, each of which costs three to five
//! microseconds besides reading its bytes. A norm is almost entirely this overhead, so it is fused
//! into the matmul of its output, and SwiGLU into the matmul of gate and up. The table gives
//! microseconds of norm and product in a step on an H200, f16, groups of 128. "One row" is this
//! routine; "two rows" is the norm's kernel followed by the [tile kernels](crate::tile)
//! (`benches/records/decode-*-h200.log`, before programmatic dependent launch was used):
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
//! A 2:4 weight takes 9.5, 12.8, 12.4 and 49.1 us for the projections of 7B and of 70B
//! (`benches/records/decode-24-h200.log`).
//!
//! Every cluster normalises the whole input, so more rows cost more. For two rows, a version for
//! several rows took 0.7 to 2.5 us less than a separate norm on 7B and 8B, but 2.7 us more on 70B's
//! gate and up; for four rows it was faster only on 8B's q, k and v. SiLU of the gates before an
//! MLP's last matmul, fused in the same way, gained 0.1 to 0.4 us on 7B and 8B and lost 1.2 us on
//! 70B. Neither is implemented for these reasons.
//!
//! # How it works
//!
//! **Work.** A cluster of blocks computes 64 columns of the weight, a tile of the layout, and its
//! warps take the steps of 128 stored rows of K in turn (`kernel.rs`). K is split only within the
//! cluster, so sums are added in its shared memory and never in global memory (`output.rs`). Blocks
//! store their sums in the first block's shared memory with `st.async`, which counts the bytes at
//! an `mbarrier` there; a cluster barrier would first wait for all writes of every thread. A launch
//! has as many warps as can be resident on the card at once (`plan.rs`). With SwiGLU a cluster
//! computes 64 gates and the corresponding 64 ups.
//!
//! **Weights** are loaded from memory to registers, 16 bytes of a tile for each lane at a time. The
//! next load into a register is issued as soon as its value was multiplied (`weight.rs`). No other
//! warp needs these values, so staging them in shared memory would gain nothing. In a recorded pass
//! the weights of a warp's first step are loaded while the preceding kernel still runs
//! ([programmatic dependent launch](crate::pdl)); if each warp has a single step, this is the whole
//! weight.
//!
//! **Input.** Every cluster repeats the norm of the row, each warp for the part that it multiplies,
//! while its weights are being loaded (`input.rs`). The row is a few kilobytes, read from the
//! second-level cache. The division by the root mean square of the whole row is deferred to the
//! end.
//!
//! **Products** are computed as in `fragment.rs` for few rows: stored weights are f16 subnormals,
//! one further product subtracts the zero points, and a group's sums are scaled in f32
//! (`groups.rs`). Groups of 16 are summed side by side (`groups_of_16.rs`).

mod config;
#[cfg(feature = "cubecl-runtime")]
pub mod experts;
#[cfg(feature = "cubecl-runtime")]
mod groups;
#[cfg(feature = "cubecl-runtime")]
mod groups_of_16;
#[cfg(feature = "cubecl-runtime")]
mod input;
#[cfg(feature = "cubecl-runtime")]
mod kernel;
#[cfg(feature = "cubecl-runtime")]
mod launch;
#[cfg(feature = "cubecl-runtime")]
mod output;
mod plan;
#[cfg(feature = "inspect")]
mod source;
#[cfg(feature = "cubecl-runtime")]
mod weight;

pub use config::GemvConfig;
#[cfg(feature = "cubecl-runtime")]
pub(crate) use launch::launch;
pub use plan::{CLUSTERS, plan, takes_format};
#[cfg(feature = "inspect")]
pub use source::source;
