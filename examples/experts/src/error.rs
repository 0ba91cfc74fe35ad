//! Errors of the options and of the comparison.

/// An error that prevents the comparison.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MixtureError {
    /// A number that must be 1 or more.
    #[error("--tokens and --runs are 1 or more")]
    Zero,
    /// A device that is not present.
    #[error("--device {name}: no such device is present")]
    Device {
        /// The name of the device on the command line.
        name: String,
    },
    /// The experts could not be quantised.
    #[error(transparent)]
    Marlin(#[from] burn_marlin::Error),
    /// The device failed while the mixture ran.
    #[error("the device failed in a forward pass: {reason}")]
    Run {
        /// The message of the device.
        reason: String,
    },
    /// Standard output is closed or full.
    #[error("the comparison could not be written")]
    Output(#[from] std::io::Error),
}
