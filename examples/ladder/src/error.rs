use marlin_kernels::{KernelError, Runtime};
use std::path::PathBuf;

/// An error of a step that cannot run, or of a wrong result.
#[derive(Debug, thiserror::Error)]
pub enum LadderError {
    /// A length that is not a multiple of the step's tiles.
    #[error("step {step} takes {axis} in multiples of {multiple}, not {axis} = {found}")]
    Multiple {
        /// Number of the step.
        step: usize,
        /// K or N.
        axis: &'static str,
        /// The required divisor.
        multiple: usize,
        /// The value.
        found: usize,
    },
    /// A length that is too small or too large for a step.
    #[error("step {step} takes {axis} from {least} to {most}, not {axis} = {found}")]
    Range {
        /// Number of the step.
        step: usize,
        /// M, K or N.
        axis: &'static str,
        /// The minimum.
        least: usize,
        /// The maximum.
        most: usize,
        /// The value.
        found: usize,
    },
    /// A format that the ladder does not implement.
    #[error(
        "{problem}: the ladder takes int4 in groups of 128, symmetric, with scales and activations in f16 and rows in order"
    )]
    Format {
        /// A description of the problem.
        problem: String,
    },
    /// A step in inline PTX, on a device of another runtime than CUDA.
    #[error("step {step} is written in PTX, which runs on CUDA only; this device is {runtime}")]
    NeedsCuda {
        /// Number of the step.
        step: usize,
        /// The runtime of the device.
        runtime: Runtime,
    },
    /// A card with too little shared memory for a step.
    #[error(
        "step {step}: {problem} fits no block of this card, which has {shared_limit} bytes of shared memory for one"
    )]
    Card {
        /// Number of the step.
        step: usize,
        /// A description of the problem.
        problem: String,
        /// The maximum shared memory of a block, in bytes.
        shared_limit: usize,
    },
    /// A result with a larger error than rounding can cause.
    #[error(
        "step {step}, {problem}: relative error {error:.1e}, where at most {tolerance:.0e} is rounding"
    )]
    Wrong {
        /// Number of the step.
        step: usize,
        /// A description of the problem.
        problem: String,
        /// The measured error.
        error: f64,
        /// The allowed error.
        tolerance: f64,
    },
    /// A device that this program was built without, or that is not present.
    #[error("--device: {0}; a build with `--features cpu` runs steps 1 to 3 without a GPU")]
    Device(#[from] cubecl::device::DeviceUnavailable),
    /// A buffer of the wrong length, or an error of a launch in `marlin-kernels`.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A weight that the format does not support.
    #[error(transparent)]
    Weight(#[from] marlin_format::FormatError),
    /// The device failed.
    #[error("the device failed: {0}")]
    Failed(String),
    /// A kernel that CubeCL does not compile.
    #[error("CubeCL does not compile step {step}: {message}")]
    Compile {
        /// Number of the step.
        step: usize,
        /// The message of the compiler.
        message: String,
    },
    /// The record cannot be written.
    #[error("cannot write {path}: {source}", path = path.display())]
    File {
        /// The path of the record.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The record cannot be written as JSON.
    #[error("the record is no JSON: {0}")]
    Json(#[from] serde_json::Error),
}
