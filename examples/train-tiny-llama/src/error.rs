//! Errors, with messages that tell the user how to resolve them.

use std::path::{Path, PathBuf};

/// An error of the program.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// `cargo metadata` failed, or its output is not as expected.
    #[error(
        "`cargo metadata --offline` failed: {0}; run this inside the workspace, after `cargo fetch`"
    )]
    Metadata(String),
    /// A crate whose sources are held out is not among the dependencies.
    #[error(
        "the crate `{0}` is held out for evaluation, but it is not a dependency of this workspace; put another crate into HELD_OUT"
    )]
    HeldOutMissing(&'static str),
    /// The tokenizer could not be trained or used.
    #[error("tokenizer: {0}")]
    Tokenizer(tokenizers::Error),
    /// A file of the corpus folder that `corpus` did not write.
    #[error("{}: {problem}; write the folder again with `train-tiny-llama corpus --out`", path.display())]
    Corpus {
        /// The file.
        path: PathBuf,
        /// A description of the fault.
        problem: String,
    },
    /// An invalid option.
    #[error("{0}")]
    Option(String),
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(String),
    /// The loss is not finite.
    #[error(
        "the loss is {loss} after {step} steps: the training diverged; lower --lr (it was {lr})"
    )]
    Diverged {
        /// The loss that was read.
        loss: f32,
        /// Steps taken.
        step: usize,
        /// Peak learning rate.
        lr: f64,
    },
    /// The model could not be built or written.
    #[error(transparent)]
    Model(#[from] marlin_lm::ModelError),
}

impl Error {
    /// Attaches a path to an operating system error.
    pub fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::Io { path, source }
    }
}
