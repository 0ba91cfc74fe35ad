//! Errors of the options and of a comparison.

use burn::tensor::FloatDType;

use crate::HEAD_FEATURES;

/// A comparison that could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompareError {
    /// A width that is not a multiple of the width of an attention head.
    #[error(
        "--hidden {found}: the model needs a multiple of {HEAD_FEATURES}, one attention head or more"
    )]
    Hidden {
        /// The width asked for.
        found: usize,
    },
    /// A number that must be 1 or more.
    #[error("--{option} 0: the comparison needs 1 or more")]
    Zero {
        /// The option's name.
        option: &'static str,
    },
    /// A dtype that the device does not compute in.
    #[error("the device does not compute in {dtype:?}; every device does in F32, with --f32")]
    Dtype {
        /// The dtype asked for.
        dtype: FloatDType,
    },
    /// A model that does not fit in the memory of the device.
    #[error(
        "--hidden {hidden} --layers {layers} --rows {rows} takes about {needed} bytes; the device has {free} free"
    )]
    TooLarge {
        /// Features of a row.
        hidden: usize,
        /// Layers of the encoder.
        layers: usize,
        /// Rows of activations.
        rows: usize,
        /// Bytes of the float weights and of one layer's activations.
        needed: usize,
        /// Free bytes of the device.
        free: usize,
    },
    /// A device that is not present.
    #[error("--device {name}: no such device is present")]
    Device {
        /// Its name on the command line.
        name: String,
    },
    /// The fusion provider could not be installed, or the conversion failed.
    #[error(transparent)]
    Marlin(#[from] burn_marlin::Error),
    /// The device failed while the model ran.
    #[error("the device failed in a forward pass: {reason}")]
    Run {
        /// The message of the device.
        reason: String,
    },
    /// Standard output is closed or full.
    #[error("the comparison could not be written")]
    Output(#[from] std::io::Error),
}
