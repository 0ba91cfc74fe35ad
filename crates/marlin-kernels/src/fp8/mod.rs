//! Rows of activations rounded to e4m3 for a product of e4m3 by e4m3 (W8A8), each with a scale of
//! its own, optionally after the addition to the residual stream and the RMSNorm.
//!
//! The scale of a row is its largest magnitude divided by 448, the largest e4m3. A row with a value
//! that is not finite has NaN for its scale.
//!
//! Cards have products of e4m3 from compute capability 8.9 on: `mma.sync`, or on 9.0 `wgmma`. On
//! 8.9 the times of the plan are modelled, since none was measured there.
//!
//! The tensor cores take 32 rows of K at a time, and a lane has four consecutive bytes of each 16.
//! A word of the weight in [`MarlinLayout`](marlin_format::layout::MarlinLayout) has other rows of
//! K there. The sum over K does not depend on the order, so the activations are stored in the
//! weight's: of every 16 values `k`, bytes `4t` to `4t + 3` are `2t`, `2t + 8`, `2t + 1` and `2t +
//! 9`.
//!
//! ```text
//! byte  0 1 2 3 |  4 5  6 7 |  8 9 10 11 | 12 13 14 15
//! k     0 8 1 9 | 2 10 3 11 | 4 12  5 13 |  6 14  7 15
//! lane  t = 0   |  t = 1    |  t = 2     |  t = 3
//! ```

mod kernel;
mod launch;
#[cfg(feature = "inspect")]
mod source;

pub(crate) use launch::quantize;
#[cfg(feature = "inspect")]
pub use source::source;
