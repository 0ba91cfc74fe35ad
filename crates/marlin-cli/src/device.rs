//! The devices that the command line names.

use crate::error::CliError;
use burn::tensor::{Device, DeviceType};
use clap::ValueEnum;

/// A device as the command line names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceName {
    /// The first NVIDIA GPU.
    Cuda,
    /// The first GPU with a Vulkan driver.
    Vulkan,
    /// CubeCL's CPU runtime.
    Cpu,
    /// Burn's own CPU backend.
    Flex,
}

impl DeviceName {
    /// The devices that commands run on by default: the first that is present.
    pub const DEFAULTS: [Self; 3] = [Self::Cuda, Self::Vulkan, Self::Flex];

    /// Returns the name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Vulkan => "vulkan",
            Self::Cpu => "cpu",
            Self::Flex => "flex",
        }
    }

    /// Returns the first of these devices, if this build supports them and this machine has one.
    pub fn find(self) -> Option<Device> {
        self.all().into_iter().next()
    }

    /// Returns all of these devices that this machine has; none if this build does not support
    /// them.
    fn all(self) -> Vec<Device> {
        let filter = match self {
            #[cfg(feature = "cuda")]
            Self::Cuda => DeviceType::Cuda,
            #[cfg(feature = "vulkan")]
            Self::Vulkan => DeviceType::Vulkan,
            #[cfg(feature = "cpu")]
            Self::Cpu => DeviceType::Cpu,
            #[cfg(feature = "flex")]
            Self::Flex => DeviceType::Flex,
            #[allow(unreachable_patterns, reason = "reached where a feature is off")]
            _ => return Vec::new(),
        };
        Device::enumerate(filter).into_iter().collect()
    }
}

/// Opens the named device, or the best one present.
///
/// CubeCL's CPU runtime is never the default: Flex is faster on the same machine. Kernels that are
/// compiled after this call are kept on disk.
pub fn open(name: Option<DeviceName>) -> Result<Device, CliError> {
    let (_, device) = find(name)?;
    Ok(device)
}

/// Opens `count` devices of the named kind, or of the best one present. Devices whose memory is
/// that of the host are repeated.
pub fn open_all(name: Option<DeviceName>, count: usize) -> Result<Vec<Device>, CliError> {
    let (name, first) = find(name)?;
    if count <= 1 || burn_marlin::device::is_host(&first) {
        return Ok(vec![first; count.max(1)]);
    }
    let mut devices = name.all();
    let found = devices.len();
    if found < count {
        return Err(CliError::FewDevices { count, found });
    }
    devices.truncate(count);
    Ok(devices)
}

/// Returns the named device, or the best one present, with its name.
fn find(name: Option<DeviceName>) -> Result<(DeviceName, Device), CliError> {
    #[cfg(feature = "cubecl-runtime")]
    if name != Some(DeviceName::Flex) {
        crate::kernel_cache::enable();
    }
    let found = |name: DeviceName| Some((name, name.find()?));
    match name {
        Some(name) => found(name).ok_or_else(|| CliError::no_device(name)),
        None => DeviceName::DEFAULTS
            .into_iter()
            .find_map(found)
            .ok_or_else(|| CliError::Device {
                name: "flex",
                reason: "this build has no device".into(),
            }),
    }
}
