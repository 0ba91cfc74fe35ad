//! The fusion provider. In unmodified models, the provider claims every matmul whose weight is a
//! dequantised weight, and launches the kernel on the packed weight instead.
//!
//! Operations that the provider does not recognise run unfused: the weight is dequantised for the
//! call, which is slower, but gives correct results.

#[cfg(feature = "cubecl-runtime")]
mod fuser;
#[cfg(feature = "cubecl-runtime")]
mod operation;
#[cfg(feature = "cubecl-runtime")]
mod pattern;
#[cfg(feature = "cubecl-runtime")]
mod provider;

pub use crate::count::{FusionCount, fusion_count};

use crate::Error;
use burn::tensor::Tensor;
use std::sync::atomic::{AtomicBool, Ordering};

static INSTALLED: AtomicBool = AtomicBool::new(false);

/// Registers the fusion provider for every CubeCL device of this process. A second call has no
/// effect. If no feature for a CubeCL runtime is enabled, the first call has no effect either.
///
/// Without the provider, a converted model gives correct results, but dequantises each weight on
/// each call.
///
/// # Errors
/// [`Error::Install`] if the first tensor operation on a fusion device has already run.
pub fn install() -> Result<(), Error> {
    if INSTALLED.swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    #[cfg(feature = "cubecl-runtime")]
    provider::register().map_err(|reason| {
        INSTALLED.store(false, Ordering::SeqCst);
        Error::Install { reason }
    })?;
    Ok(())
}

/// Launches the operations queued on the tensor's stream, so that the operations that follow begin
/// a new fusion block.
///
/// The operation that produces the activations would otherwise keep its block open, the
/// dequantisation would open a second block, and a matmul that reads from two blocks is fused with
/// neither. The call waits for the launches, not for the device.
pub(crate) fn start_block(tensor: &Tensor<2>) {
    #[cfg(feature = "cubecl-runtime")]
    if INSTALLED.load(Ordering::Relaxed)
        && let Ok(tensor) = tensor.clone().try_into_primitive::<burn::backend::Cube>()
    {
        tensor.client.sync(|| ());
    }
    #[cfg(not(feature = "cubecl-runtime"))]
    let _ = tensor;
}
