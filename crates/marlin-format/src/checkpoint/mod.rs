//! Checkpoints in Hugging Face folders: reading and writing of tensors and quantisation configs.
//!
//! | task | type |
//! |---|---|
//! | read a folder (one file or shards, also 2:4 float matrices with a bitmask) | [`Checkpoint`], [`TensorView`] |
//! | write a folder, completely or not at all | [`CheckpointWriter`], [`TensorSpec`] |
//! | find the format of every layer from a folder's configs | [`Quantization`], [`LayerFormat`] |
//! | list the quantised layers and other tensors | [`entries`], [`CheckpointEntry`] |
//! | read a quantised layer of any format | [`layer_format`], [`layer_tensors`], [`read_layer`] |
//! | read and write compressed-tensors, pack-quantized | [`compressed_tensors`] |
//! | read GPTQ, versions 1 and 2; write version 2 | [`gptq`] |
//! | read AWQ, Marlin and Marlin 2:4 | [`awq`], [`marlin`], [`marlin24`] |
//! | read FP8, NVFP4 and MXFP4 of any program | [`fp8`], [`fp4`] |
//! | read MXFP4 experts of gpt-oss, all in one tensor | [`stacked`] |
//!
//! Files are untrusted: everything that a file declares is checked against the file before it is
//! used, and the error names the file.

pub mod awq;
pub mod compressed_tensors;
pub mod fp4;
pub mod fp8;
pub mod gptq;
pub mod marlin;
pub mod marlin24;
pub mod stacked;

mod bitmask;
mod config_error;
mod error;
mod files;
mod float_scales;
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
pub use folder::{InPlaceOfWeights, WeightFile, weight_file};
pub use format::{
    Fp4Format, Fp8Config, Fp8Format, GptqFormat, GptqVersion, LayerFormat, Marlin24Names,
    PackQuantizedFormat,
};
pub use header_error::HeaderError;
pub use layer::{CheckpointEntry, entries, layer_format, layer_tensors, read_layer};
pub use quantization::Quantization;
pub use reader::{Checkpoint, TensorInfo, read_index};
pub use safetensors::Dtype;
pub use tensor::{TensorData, TensorSpec, TensorView, is_float};
pub use writer::CheckpointWriter;

/// The file name of a model's config.
pub(crate) const CONFIG_FILE: &str = "config.json";
/// The file name of the weights, if a folder has one weight file.
pub(crate) const WEIGHTS_FILE: &str = "model.safetensors";
/// The file name of the index of weight files, if a folder has several.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";
