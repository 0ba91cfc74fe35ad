//! Errors of the options and of the comparison.

use burn::tensor::FloatDType;

use crate::HEAD_FEATURES;

/// An error that prevents the comparison.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompareError {
    /// A width that is not a multiple of the width of an attention head.
    #[error(
        "--hidden {found}: the model needs a multiple of {HEAD_FEATURES}, one attention head or more"
    )]
    Hidden {
        /// The requested width.
        found: usize,
    },
    /// A number that must be 1 or more.
    #[error("--{option} 0: the comparison needs 1 or more")]
    Zero {
        /// The option's name.
        option: &'static str,
    },
    /// A dtype that the device does not support.
    #[error("the device does not compute in {dtype:?}; every device does in F32, with --f32")]
    Dtype {
        /// The requested dtype.
        dtype: FloatDType,
    },
    /// A model that does not fit in the memory of the device.
    #[error(
        "--hidden {hidden} --layers {layers} --rows {rows} takes about {needed} bytes; the device has {free} free"
    )]
    TooLarge {
        /// The number of features of a row.
        hidden: usize,
        /// The number of layers of the encoder.
        layers: usize,
        /// The number of rows of activations.
        rows: usize,
        /// The estimated bytes of the float weights and of one layer's activations.
        needed: usize,
        /// The number of free bytes of the device.
        free: usize,
    },
    /// A device that is not present.
    #[error("--device {name}: no such device is present")]
    Device {
        /// The name of the device on the command line.
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
