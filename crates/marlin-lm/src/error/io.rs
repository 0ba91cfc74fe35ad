//! The errors of files.

use std::path::Path;

use super::ModelError;

impl ModelError {
    /// Returns the error of an action on a file or folder.
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io {
            action,
            path: path.into(),
            source,
        }
    }
}
