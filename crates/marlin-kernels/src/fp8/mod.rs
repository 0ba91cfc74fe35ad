//! Rows of activations rounded to e4m3 for a product of e4m3 by e4m3 (W8A8), each with a scale of
//! its own, optionally after the addition to the residual stream and the RMSNorm.
//!
//! The scale of a row is its largest magnitude divided by 448, the largest e4m3. A row with a value
//! that is not finite has NaN for its scale.
//!
//! The tensor cores take 32 rows of K at a time, and a lane has four consecutive bytes of each 16.
//! The weight's fragment, made from the words of
//! [`MarlinLayout`](marlin_format::layout::MarlinLayout), has other rows of K there. The sum over K
//! does not depend on the order, so the activations are stored in the weight's: of every 16 values
//! `k`, bytes `4t` to `4t + 3` are `2t`, `2t + 1`, `2t + 8` and `2t + 9`.
//!
//! ```text
//! byte  0 1 2 3 | 4 5  6  7 | 8 9 10 11 | 12 13 14 15
//! k     0 1 8 9 | 2 3 10 11 | 4 5 12 13 |  6  7 14 15
//! lane  t = 0   | t = 1     | t = 2     | t = 3
//! ```

mod kernel;
mod launch;
#[cfg(feature = "inspect")]
mod source;

pub(crate) use launch::quantize;
#[cfg(feature = "inspect")]
pub use source::source;
