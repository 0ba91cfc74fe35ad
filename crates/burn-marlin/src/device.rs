//! The properties of Burn devices that kernels depend on.

use crate::backend::float_dtype;
#[cfg(feature = "cubecl-runtime")]
use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device};
use cubecl::client::Client;
use marlin_format::{ScaleDtype, available_memory};
use marlin_kernels::Target;

/// Returns the properties of a Burn device that decide which kernel runs.
///
/// A backend other than CubeCL and Flex does not implement the operations. It is described as Flex,
/// whose host kernels are the closest.
pub fn target(device: &Device) -> Target {
    client_of(device).map_or(Target::FLEX, |client| Target::of(&client))
}

/// Returns the client of a CubeCL device without autodiff; `None` for other devices.
#[allow(
    unreachable_patterns,
    reason = "without Flex there are CubeCL devices alone"
)]
pub fn client(device: &Device) -> Option<Client> {
    match device.as_dispatch() {
        #[cfg(feature = "cubecl-runtime")]
        DispatchDevice::Cube(cube) => Some(cube.client()),
        _ => None,
    }
}

/// Returns the client of a CubeCL device, with autodiff or without.
fn client_of(device: &Device) -> Option<Client> {
    client(&device.clone().without_autodiff())
}

/// The name that a device reports.
pub fn device_name(device: &Device) -> String {
    client_of(device).map_or_else(
        || "Flex (CPU)".into(),
        |client| client.properties().identity.name.clone(),
    )
}

/// Returns the number of free bytes on a device, or `None` if the device does not report its
/// memory. For a backend that runs on the host, this is the available memory of the machine.
pub fn free_memory(device: &Device) -> Option<usize> {
    let Some(client) = client_of(device) else {
        return available_memory();
    };
    let total = client.properties().memory.max_memory()?;
    let used = device
        .memory_pool_usage()
        .map_or(0, |usage| usage.bytes_in_use);
    Some(total.saturating_sub(used) as usize)
}

/// Runs `make` with a dedicated allocation for each tensor that it makes. The device gets the
/// memory back when the tensor is dropped.
///
/// Other tensors of a CubeCL device share pages, and a page is as large as the largest tensor that
/// the pages have ever held. After one tensor that is much larger than the others, most of each new
/// page therefore stays empty.
pub fn with_dedicated_memory<T: Send>(device: &Device, make: impl FnOnce() -> T + Send) -> T {
    let Some(client) = client_of(device) else {
        return make();
    };
    // Burn's fusion allocates a tensor when its operation runs, so queued operations are flushed
    // before and after `make`. An error of an operation is reported when its tensor is read.
    let run = || drop(device.flush());
    run();
    client.memory_dedicated_allocation((), |()| {
        let made = make();
        run();
        made
    })
}

/// Returns the dtype in which a device holds scales of the dtype `dtype`: the same dtype if the
/// device supports it, f32 otherwise.
pub(crate) fn scale_dtype(dtype: ScaleDtype, device: &Device) -> DType {
    let dtype = DType::from(float_dtype(dtype.into()));
    if device.supports_dtype(dtype) {
        dtype
    } else {
        DType::F32
    }
}
