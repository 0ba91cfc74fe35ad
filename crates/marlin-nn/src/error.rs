/// An error of a decode step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// A step failed on the device.
    #[error("a step of decode failed on the device: {reason}")]
    Step {
        /// The device's error message.
        reason: String,
    },
}
