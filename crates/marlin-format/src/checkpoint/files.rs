//! Reading the files of a folder that a stranger wrote: regular ones only, and no more of them than they may have.

use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Most bytes of a config, a chat template or a generation config: real ones have kilobytes.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Most bytes of an index of shards: that of a model with 60 layers of 256 experts has 9 MB.
pub const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Most bytes of a `tokenizer.json`: the largest published ones have 35 MB.
pub const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// Why a file that is there is not read; the source of an [`io::Error`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// A folder, a pipe, a device.
    #[error("it is not a regular file; put the file there, or a link to it")]
    NotRegular,
    /// More bytes than such a file may have.
    #[error("it has more than the {limit} bytes that are read of such a file; is it the right one?")]
    TooLarge {
        /// Most bytes.
        limit: u64,
    },
}

/// What the system says of a regular file, links followed; `None` of a folder, a pipe or a device. To be asked before a file is opened: opening a pipe
/// waits for somebody to write to it.
pub(super) fn regular(path: &Path) -> io::Result<Option<Metadata>> {
    Ok(Some(fs::metadata(path)?).filter(Metadata::is_file))
}

/// The bytes of a regular file, links followed.
///
/// # Errors
/// Those of the system, and with a [`FileError`] inside for a file of another kind or of more than `limit` bytes; nothing of it is read then.
pub fn read_file(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let refused = |error| Err(io::Error::new(ErrorKind::InvalidInput, error));
    let Some(metadata) = regular(path)? else { return refused(FileError::NotRegular) };
    if metadata.len() > limit {
        return refused(FileError::TooLarge { limit });
    }
    let mut bytes = Vec::new();
    // A file may grow in the meantime, and those of a system have no length.
    File::open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit { refused(FileError::TooLarge { limit }) } else { Ok(bytes) }
}

/// The text of a regular file, links followed.
///
/// # Errors
/// As [`read_file`], and for bytes that are not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    String::from_utf8(read_file(path, limit)?).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}
