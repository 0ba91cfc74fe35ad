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

    /// Returns the device, if this build supports it and this machine has it.
    pub fn find(self) -> Option<Device> {
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
            _ => return None,
        };
        Device::enumerate(filter).into_iter().next()
    }
}

/// Opens the named device, or the best one present.
///
/// CubeCL's CPU runtime is never the default: Flex is faster on the same machine. Kernels that are
/// compiled after this call are kept on disk.
pub fn open(name: Option<DeviceName>) -> Result<Device, CliError> {
    #[cfg(feature = "cubecl-runtime")]
    if name != Some(DeviceName::Flex) {
        crate::kernel_cache::enable();
    }
    match name {
        Some(name) => name.find().ok_or_else(|| CliError::no_device(name)),
        None => DeviceName::DEFAULTS
            .into_iter()
            .find_map(DeviceName::find)
            .ok_or_else(|| CliError::Device {
                name: "flex",
                reason: "this build has no device".into(),
            }),
    }
}
