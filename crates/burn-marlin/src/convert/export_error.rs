use burn::tensor::DType;
use marlin_format::FormatError;
use marlin_format::checkpoint::CheckpointError;

/// The reason why a model cannot be exported as a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The folder cannot be written, or two tensors have one name.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A parameter has a reparameterisation other than a quantised weight.
    #[error(
        "`{path}` has a reparameterisation (LoRA?), which the files have no parameter for: `materialize` the model, and quantise it afterwards"
    )]
    Reparameterized {
        /// Path of the parameter in the model.
        path: String,
    },
    /// The name of a quantised layer's weight does not end in `.weight`.
    #[error(
        "the quantised `{path}` would be called `{name}`; a name that ends in `.weight` is needed: let the key map keep that part"
    )]
    Name {
        /// Path of the parameter in the model.
        path: String,
        /// The name of the parameter after the key map.
        name: String,
    },
    /// A parameter has a dtype that safetensors files do not hold.
    #[error("`{path}` is {found:?}, which safetensors files do not hold; convert it first")]
    Dtype {
        /// Path of the parameter in the model.
        path: String,
        /// The dtype of the parameter.
        found: DType,
    },
    /// The files have no format for the values of a quantised weight.
    #[error("the quantised weight `{path}`")]
    Format {
        /// Path of the parameter in the model.
        path: String,
        /// The cause.
        source: FormatError,
    },
    /// A quantised weight could not be read from the device.
    #[error("the quantised weight `{path}`")]
    Weight {
        /// Path of the parameter in the model.
        path: String,
        /// The cause.
        source: crate::Error,
    },
    /// A tensor could not be read from the device.
    #[error("`{path}` cannot be read from the device: {reason}")]
    Read {
        /// Path of the parameter in the model.
        path: String,
        /// The error of the device.
        reason: String,
    },
}
