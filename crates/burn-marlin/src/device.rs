#[cfg(feature = "cubecl-runtime")]
use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device};
use marlin_format::ScaleDtype;
use marlin_kernels::Target;

/// What the choice of a kernel needs to know of a Burn device.
///
/// A backend that is neither CubeCL nor Flex has no implementation of the op; it is described as Flex, whose host kernels are the closest.
#[allow(unreachable_patterns, reason = "without Flex there are CubeCL devices alone")]
pub fn target(device: &Device) -> Target {
    match device.clone().without_autodiff().as_dispatch() {
        #[cfg(feature = "cubecl-runtime")]
        DispatchDevice::Cube(device) => Target::of(&device.client()),
        _ => Target::flex(),
    }
}

/// Bytes that a device can still hold; `None` where it does not say.
#[allow(unreachable_patterns, reason = "without Flex there are CubeCL devices alone")]
pub fn free_memory(device: &Device) -> Option<usize> {
    match device.clone().without_autodiff().as_dispatch() {
        #[cfg(feature = "cubecl-runtime")]
        DispatchDevice::Cube(cube) => {
            let total = cube.client().properties().memory.max_memory()?;
            let used = device.memory_pool_usage().map_or(0, |usage| usage.bytes_in_use);
            Some(total.saturating_sub(used) as usize)
        }
        _ => None,
    }
}

/// The dtype in which a device holds scales of a format: the format's own where the device has it, f32 otherwise.
pub(crate) fn scale_dtype(dtype: ScaleDtype, device: &Device) -> DType {
    let dtype = match dtype {
        ScaleDtype::F16 => DType::F16,
        ScaleDtype::BF16 => DType::BF16,
    };
    if device.supports_dtype(dtype) { dtype } else { DType::F32 }
}
