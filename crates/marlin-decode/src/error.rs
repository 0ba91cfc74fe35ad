/// A failure of a decode step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The device did not finish a step.
    #[error("a step of decode failed on the device: {reason}")]
    Step {
        /// The device's own words.
        reason: String,
    },
}
