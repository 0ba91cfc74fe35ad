//! Reads files of an untrusted folder: only regular files, up to a limit of bytes.

use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

/// The maximum size in bytes of a config, a chat template or a generation config. Published ones
/// have kilobytes.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// The maximum size in bytes of an index of shards. The index of a model with 60 layers of 256
/// experts has 9 MB.
pub const MAX_INDEX_BYTES: u64 = 64 << 20;
/// The maximum size in bytes of a `tokenizer.json`. The largest published ones have 35 MB.
pub const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// The reason why an existing file is not read; the source of an [`io::Error`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// A path that is not a regular file, such as a folder, a pipe or a device.
    #[error("it is not a regular file; put the file there, or a link to it")]
    NotRegular,
    /// A symbolic link to a file outside the folder, which may be an attempt to read that file.
    #[error("it is a link to {}, outside of the folder; put the file itself there", target.display())]
    Outside {
        /// The target of the link.
        target: PathBuf,
    },
    /// A file that is larger than the limit for its kind.
    #[error(
        "it has more than the {limit} bytes that are read of such a file; is it the right one?"
    )]
    TooLarge {
        /// The limit in bytes.
        limit: u64,
    },
}

/// Opens a regular file of a folder. Symbolic links are followed within the folder, and from a
/// folder of the Hugging Face hub's cache (`snapshots/<revision>`) to the files of that cache
/// (`blobs`).
///
/// # Errors
/// The errors of the operating system. For a file of another kind, an error whose source is a
/// [`FileError`]; such a file is not opened, because opening a pipe waits for a writer.
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

/// Returns the number of bytes that a file occupies on the disk, if the system reports it.
#[cfg(unix)]
pub(super) fn on_disk(metadata: &Metadata) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    // `stat` counts in blocks of this size, independent of the block size of the disk.
    Some(metadata.blocks().saturating_mul(512))
}

#[cfg(not(unix))]
pub(super) fn on_disk(_: &Metadata) -> Option<u64> {
    None
}

/// Returns the folder to which the links of a snapshot in the hub's cache point:
/// `models--a--b/blobs` for `models--a--b/snapshots/<revision>`.
fn blobs(dir: &Path) -> Option<PathBuf> {
    let snapshots = dir
        .parent()
        .filter(|parent| parent.ends_with("snapshots"))?;
    Some(snapshots.parent()?.join("blobs"))
}

fn refused(error: FileError) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, error)
}

/// Returns the bytes of a regular file of a folder. Symbolic links are followed within the folder,
/// and to the files of the Hugging Face hub's cache.
///
/// # Errors
/// The errors of the operating system. For a file of another kind or of more than `limit` bytes, an
/// error whose source is a [`FileError`].
pub fn read_file(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let (file, metadata) = open(path)?;
    if metadata.len() > limit {
        return Err(refused(FileError::TooLarge { limit }));
    }
    let mut bytes = Vec::new();
    // The file may grow after the check, and files of a virtual file system report a length of 0.
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        Err(refused(FileError::TooLarge { limit }))
    } else {
        Ok(bytes)
    }
}

/// Returns the text of a regular file of a folder, read as in [`read_file`].
///
/// # Errors
/// The errors of [`read_file`], and an error for bytes that are not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    String::from_utf8(read_file(path, limit)?)
        .map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}
