//! The command line, and what can go wrong.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use burn::tensor::{Device, DeviceType};
use clap::{Parser, ValueEnum};

/// Continues a text with a Llama, float or in 4 bits.
#[derive(Debug, Parser)]
#[command(name = "generate-text")]
pub struct Args {
    /// Hugging Face folder.
    #[arg(default_value = "examples/train-tiny-llama/model")]
    pub model: PathBuf,
    /// Text to continue, or with `--chat` to answer.
    #[arg(long, default_value = "/// Returns the number of elements in the ")]
    pub prompt: String,
    /// Take the prompt for a user's turn, in the model's chat template.
    #[arg(long)]
    pub chat: bool,
    /// Where to run.
    #[arg(long, default_value = "flex")]
    pub device: DeviceName,
    /// Tokens to generate at most.
    #[arg(long, default_value = "64")]
    pub max_new_tokens: NonZeroUsize,
    /// 0 takes the likeliest token; without it the temperature that the model's makers chose.
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Seed of the random choices.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// A device as the command line names it.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum DeviceName {
    /// Burn's own CPU backend.
    #[cfg(feature = "flex")]
    Flex,
    /// CubeCL's CPU runtime.
    #[cfg(feature = "cpu")]
    Cpu,
    /// The first NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda,
    /// The first GPU with a Vulkan driver.
    #[cfg(feature = "vulkan")]
    Vulkan,
}

impl DeviceName {
    /// The device, where this machine has it.
    pub fn open(self) -> Result<Device, GenerateError> {
        let (name, kind) = match self {
            #[cfg(feature = "flex")]
            Self::Flex => ("flex", DeviceType::Flex),
            #[cfg(feature = "cpu")]
            Self::Cpu => ("cpu", DeviceType::Cpu),
            #[cfg(feature = "cuda")]
            Self::Cuda => ("cuda", DeviceType::Cuda),
            #[cfg(feature = "vulkan")]
            Self::Vulkan => ("vulkan", DeviceType::Vulkan),
        };
        Device::enumerate(kind).into_iter().next().ok_or(GenerateError::NoDevice { name })
    }
}

/// A text that could not be generated.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    #[error(transparent)]
    Install(#[from] burn_marlin::Error),
    #[error("--device {name}: no such device is present")]
    NoDevice { name: &'static str },
    #[error(transparent)]
    Llama(#[from] marlin_llama::LlamaError),
    #[error(transparent)]
    Text(#[from] marlin_llama::TextError),
    #[error("--chat: {} has no chat template", dir.display())]
    NoTemplate { dir: PathBuf },
    #[error("the text could not be written")]
    Output(#[from] std::io::Error),
}
