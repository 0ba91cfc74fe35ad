//! The number of uses of quantised weights on CubeCL devices, by kind of use.

use std::sync::atomic::{AtomicU64, Ordering};

static FUSED: AtomicU64 = AtomicU64::new(0);
static DEQUANTIZED: AtomicU64 = AtomicU64::new(0);

/// The number of uses of quantised weights on CubeCL devices since the program started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FusionCount {
    /// The number of matmuls that read the packed weight, claimed by the fusion provider.
    pub fused: u64,
    /// The number of times that a weight was dequantised to a float tensor.
    pub dequantized: u64,
}

/// Returns the counts so far.
pub fn fusion_count() -> FusionCount {
    FusionCount {
        fused: FUSED.load(Ordering::Relaxed),
        dequantized: DEQUANTIZED.load(Ordering::Relaxed),
    }
}

#[cfg(feature = "cubecl-runtime")]
pub(crate) fn count_fused() {
    FUSED.fetch_add(1, Ordering::Relaxed);
}

#[cfg(feature = "cubecl-runtime")]
pub(crate) fn count_dequantized() {
    DEQUANTIZED.fetch_add(1, Ordering::Relaxed);
}
