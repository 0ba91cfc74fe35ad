//! The command line, the devices, and the errors.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use burn::tensor::{Device, DeviceType};
use clap::Parser;

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
    /// Use the prompt as a user's message, in the model's chat template.
    #[arg(long)]
    pub chat: bool,
    /// The device to run on; all but `flex` are features of this program.
    #[arg(long, default_value = "flex", value_parser = ["flex", "cpu", "cuda", "vulkan"])]
    pub device: String,
    /// Tokens to generate at most.
    #[arg(long, default_value = "64")]
    pub max_new_tokens: NonZeroUsize,
    /// 0 takes the likeliest token; without it the temperature of the model's generation_config.
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Seed of the random choices.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Opens the first device of a kind; `None` if this build lacks the feature or the machine lacks
/// the device.
pub fn open_device(name: &str) -> Option<Device> {
    let kind = match name {
        #[cfg(feature = "flex")]
        "flex" => DeviceType::Flex,
        #[cfg(feature = "cpu")]
        "cpu" => DeviceType::Cpu,
        #[cfg(feature = "cuda")]
        "cuda" => DeviceType::Cuda,
        #[cfg(feature = "vulkan")]
        "vulkan" => DeviceType::Vulkan,
        _ => return None,
    };
    Device::enumerate(kind).into_iter().next()
}

/// An error that prevents the generation of text.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    #[error(transparent)]
    Install(#[from] burn_marlin::Error),
    #[error("--device {name}: no such device is present")]
    NoDevice { name: String },
    #[error(transparent)]
    Model(#[from] marlin_lm::ModelError),
    #[error(transparent)]
    Text(#[from] marlin_lm::TextError),
    #[error("--chat: {} has no chat template", dir.display())]
    NoTemplate { dir: PathBuf },
    #[error("the text could not be written")]
    Output(#[from] std::io::Error),
}
