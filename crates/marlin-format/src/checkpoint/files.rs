//! Reading the files of an untrusted folder: only regular ones, and no more than a limit of bytes.

use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Most bytes of a config, a chat template or a generation config: real ones have kilobytes.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Most bytes of an index of shards: that of a model with 60 layers of 256 experts has 9 MB.
pub const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Most bytes of a `tokenizer.json`: the largest published ones have 35 MB.
pub const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// The reason why a file that exists is not read; the source of an [`io::Error`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// A folder, a pipe, a device.
    #[error("it is not a regular file; put the file there, or a link to it")]
    NotRegular,
    /// A link out of the folder, which may have been made to have another file read.
    #[error("it is a link to {}, outside of the folder; put the file itself there", target.display())]
    Outside {
        /// The file that it is a link to.
        target: PathBuf,
    },
    /// More bytes than such a file may have.
    #[error(
        "it has more than the {limit} bytes that are read of such a file; is it the right one?"
    )]
    TooLarge {
        /// Most bytes.
        limit: u64,
    },
}

/// Opens a regular file of a folder. Links are followed within the folder, and from a folder of the
/// Hugging Face hub's cache (`snapshots/<revision>`) to the files of that cache (`blobs`).
///
/// # Errors
/// Those of the system, and with a [`FileError`] inside for a file of another kind, which is not
/// opened: opening a pipe waits for a writer.
pub(super) fn open(path: &Path) -> io::Result<(File, Metadata)> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(refused(FileError::NotRegular));
    }
    if fs::symlink_metadata(path)?.is_symlink() {
        let (dir, target) = (
            fs::canonicalize(path.parent().unwrap_or(path))?,
            fs::canonicalize(path)?,
        );
        if !target.starts_with(&dir) && target.parent().map(Path::to_path_buf) != blobs(&dir) {
            return Err(refused(FileError::Outside { target }));
        }
    }
    Ok((File::open(path)?, metadata))
}

/// The bytes that a file takes on the disk, where the system reports them.
#[cfg(unix)]
pub(super) fn on_disk(metadata: &Metadata) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    // Blocks of `stat` have this size, whatever those of the disk have.
    Some(metadata.blocks().saturating_mul(512))
}

#[cfg(not(unix))]
pub(super) fn on_disk(_: &Metadata) -> Option<u64> {
    None
}

/// The folder that the links of a snapshot in the hub's cache point to: `models--a--b/blobs` for
/// `models--a--b/snapshots/<revision>`.
fn blobs(dir: &Path) -> Option<PathBuf> {
    let snapshots = dir
        .parent()
        .filter(|parent| parent.ends_with("snapshots"))?;
    Some(snapshots.parent()?.join("blobs"))
}

fn refused(error: FileError) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, error)
}

/// The bytes of a regular file of a folder. Links are followed within the folder, and to the files
/// of the Hugging Face hub's cache.
///
/// # Errors
/// Those of the system, and with a [`FileError`] inside for a file of another kind or of more than
/// `limit` bytes; nothing of it is read then.
pub fn read_file(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let (file, metadata) = open(path)?;
    if metadata.len() > limit {
        return Err(refused(FileError::TooLarge { limit }));
    }
    let mut bytes = Vec::new();
    // A file may grow in the meantime, and those of a system have no length.
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        Err(refused(FileError::TooLarge { limit }))
    } else {
        Ok(bytes)
    }
}

/// The text of a regular file of a folder, as [`read_file`] reads it.
///
/// # Errors
/// As [`read_file`], and for bytes that are not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    String::from_utf8(read_file(path, limit)?)
        .map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}
