//! The properties of Burn devices that kernels depend on.

#![cfg_attr(
    not(feature = "cubecl-runtime"),
    allow(unused_variables, reason = "only devices of CubeCL differ")
)]

use crate::backend::float_dtype;
use burn::tensor::{DType, Device};
use marlin_format::{ScaleDtype, available_memory};
#[cfg(feature = "cuda")]
use marlin_kernels::device::free_memory_of_card;
use marlin_kernels::{Runtime, Target};
#[cfg(feature = "cubecl-runtime")]
use {burn::backend::DispatchDevice, cubecl::client::Client};

/// Returns the properties of a Burn device that decide which kernel runs.
///
/// A backend other than CubeCL and Flex does not implement the operations. It is described as Flex,
/// whose host kernels are the closest.
pub fn target(device: &Device) -> Target {
    #[cfg(feature = "cubecl-runtime")]
    if let Some(client) = client_of(device) {
        return Target::of(&client);
    }
    Target::FLEX
}

/// Returns the client of a CubeCL device without autodiff; `None` for other devices.
#[cfg(feature = "cubecl-runtime")]
#[allow(
    unreachable_patterns,
    reason = "without Flex there are CubeCL devices alone"
)]
pub fn client(device: &Device) -> Option<Client> {
    match device.as_dispatch() {
        DispatchDevice::Cube(cube) => Some(cube.client()),
        _ => None,
    }
}

/// Returns the client of a CubeCL device, with autodiff or without.
#[cfg(feature = "cubecl-runtime")]
fn client_of(device: &Device) -> Option<Client> {
    client(&device.clone().without_autodiff())
}

/// Returns the name that a device reports.
pub fn device_name(device: &Device) -> String {
    #[cfg(feature = "cubecl-runtime")]
    if let Some(client) = client_of(device) {
        return client.properties().identity.name.clone();
    }
    "Flex (CPU)".into()
}

/// Returns the number of free bytes on a device, or `None` if the device does not report its
/// memory. For a backend that runs on the host, this is the available memory of the machine. On
/// CUDA, what other processes have on the card is not free.
pub fn free_memory(device: &Device) -> Option<usize> {
    #[cfg(feature = "cubecl-runtime")]
    if let Some(client) = client_of(device) {
        let total = client.properties().memory.max_memory()?;
        let usage = device.memory_pool_usage();
        let used = usage.as_ref().map_or(0, |usage| usage.bytes_in_use);
        let free = total.saturating_sub(used);
        #[cfg(feature = "cuda")]
        let free = free_memory_of_card(&client).map_or(free, |bytes| {
            // Tensors can also take what the pool has reserved and does not use.
            let reserved = usage.as_ref().map_or(0, |usage| usage.bytes_reserved);
            free.min((bytes as u64).saturating_add(reserved.saturating_sub(used)))
        });
        return Some(free as usize);
    }
    available_memory()
}

/// Returns true if the memory of a device is that of the host.
pub fn is_host(device: &Device) -> bool {
    matches!(target(device).runtime, Runtime::Cpu | Runtime::Flex)
}

/// Runs `make` with a dedicated allocation for each tensor that it makes. The device gets the
/// memory back when the tensor is dropped.
///
/// Other tensors of a CubeCL device share pages, and a page is as large as the largest tensor that
/// the pages have ever held. After one tensor that is much larger than the others, most of each new
/// page therefore stays empty.
pub fn with_dedicated_memory<T: Send>(device: &Device, make: impl FnOnce() -> T + Send) -> T {
    #[cfg(feature = "cubecl-runtime")]
    if let Some(client) = client_of(device) {
        // Burn's fusion allocates a tensor when its operation runs, so queued operations are
        // flushed before and after `make`. An error of an operation is reported when its tensor is
        // read.
        let run = || drop(device.flush());
        run();
        return client.memory_dedicated_allocation((), |()| {
            let made = make();
            run();
            made
        });
    }
    make()
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
