//! Hugging Face folders: tensors as their files hold them.
//!
//! | task | type |
//! |---|---|
//! | read a folder, one file or shards; 2:4 float matrices with a bitmask, too | [`Checkpoint`], [`TensorView`] |
//! | write a folder, all of it or nothing | [`CheckpointWriter`], [`TensorSpec`] |
//! | the format of every layer, by a folder's configs | [`Quantization`], [`LayerFormat`] |
//! | its quantised layers and other tensors | [`parts`], [`Part`] |
//! | read a quantised layer, whatever its format | [`layer_format`], [`layer_tensors`], [`read_layer`] |
//! | compressed-tensors, pack-quantized: read and write | [`compressed_tensors`] |
//! | GPTQ, versions 1 and 2: read, and write version 2 | [`gptq`] |
//! | AWQ, Marlin and Marlin 2:4: read | [`awq`], [`marlin`], [`marlin24`] |
//!
//! Files come from anywhere: everything that a file declares is checked against the file before it
//! is used, and the error names the file.

pub mod awq;
pub mod compressed_tensors;
pub mod gptq;
pub mod marlin;
pub mod marlin24;

mod bitmask;
mod config_error;
mod error;
mod files;
mod folder;
mod format;
mod groups;
mod header;
mod header_error;
mod layer;
mod layer_tensors;
mod packed;
mod quantization;
mod reader;
mod tensor;
mod writer;

pub use config_error::ConfigError;
pub use error::CheckpointError;
pub use files::{
    FileError, MAX_CONFIG_BYTES, MAX_INDEX_BYTES, MAX_TOKENIZER_BYTES, read_file, read_text,
};
pub use folder::InPlaceOfWeights;
pub use format::{GptqFormat, GptqVersion, LayerFormat, Marlin24Names, PackQuantizedFormat};
pub use header_error::HeaderError;
pub use layer::{Part, layer_format, layer_tensors, parts, read_layer};
pub use quantization::Quantization;
pub use reader::{Checkpoint, TensorInfo};
pub use safetensors::Dtype;
pub use tensor::{TensorData, TensorSpec, TensorView, is_float};
pub use writer::CheckpointWriter;

/// The config of a model.
pub(crate) const CONFIG_FILE: &str = "config.json";
/// A folder's one weight file.
pub(crate) const WEIGHTS_FILE: &str = "model.safetensors";
/// A folder's list of weight files, where there are several.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";
