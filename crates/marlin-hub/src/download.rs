//! The download of a file.
//!
//! Bytes are appended to `blobs/<checksum>.incomplete`, which a later attempt or run goes on with.
//! The file gets its final name only when its checksum is that of the hub's list.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use sha1::{Digest, Sha1};
use sha2::Sha256;

use crate::HubError;
use crate::cache::{Cache, has_size};
use crate::hub::{Hub, RemoteFile};

/// The number of attempts without progress after which a download is given up.
const ATTEMPTS: u32 = 5;
/// The time before the second attempt; it doubles with every further one.
const DELAY: Duration = Duration::from_millis(200);
/// The size of the pieces that are read and written, in bytes.
const PIECE: usize = 1 << 18;

/// Downloads a file to the cache, unless another process does so first. `on_bytes` is called with
/// the number of bytes of the file that are there, which is less than before if the download begins
/// anew.
pub(crate) fn download(
    hub: &Hub,
    cache: &Cache,
    commit: &str,
    file: &RemoteFile,
    mut on_bytes: impl FnMut(u64),
) -> Result<(), HubError> {
    let _lock = cache.lock(&file.id)?;
    let blob = cache.blob(&file.id);
    if has_size(&blob, file) {
        on_bytes(file.size);
        return Ok(());
    }
    let url = hub.url(commit, &file.path);
    let mut partial = Partial::open(cache.partial(file), url.clone(), file)?;
    tracing::info!(%url, size = file.size, done = partial.done, "downloads");
    on_bytes(partial.done);
    let (mut attempts, mut furthest) = (0, partial.done);
    while partial.done < file.size {
        let source = match partial.receive(hub, &mut on_bytes) {
            Err(HubError::Unreachable { source, .. }) => Some(source),
            result => result.map(|()| None)?,
        };
        if partial.done > furthest {
            (attempts, furthest) = (0, partial.done);
        }
        attempts += 1;
        if partial.done < file.size {
            tracing::debug!(%url, done = partial.done, attempts, ?source, "a download broke off");
            if attempts >= ATTEMPTS {
                return Err(HubError::Interrupted {
                    url,
                    done: partial.done,
                    total: file.size,
                    attempts,
                    source,
                });
            }
            sleep(DELAY * 2u32.pow(attempts - 1));
        }
    }
    partial.finish(blob)
}

/// A file that is being downloaded, and the checksum of what is there.
struct Partial<'a> {
    path: PathBuf,
    url: String,
    file: File,
    remote: &'a RemoteFile,
    checksum: Checksum,
    done: u64,
}

impl<'a> Partial<'a> {
    /// Opens the file with what an earlier run has downloaded, or an empty file.
    fn open(path: PathBuf, url: String, remote: &'a RemoteFile) -> Result<Self, HubError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options
            .open(&path)
            .map_err(|source| HubError::io("create", &path, source))?;
        let mut partial = Self {
            path,
            url,
            file,
            remote,
            checksum: Checksum::new(remote),
            done: 0,
        };
        match partial.read() {
            Ok(()) if partial.done <= remote.size => {}
            // More than the whole file: not a part of it.
            Ok(()) => partial.restart()?,
            Err(source) => return Err(HubError::io("read", &partial.path, source)),
        }
        Ok(partial)
    }

    /// Reads what is there, and leaves the file at its end.
    fn read(&mut self) -> io::Result<()> {
        // A length of its own, as files of a device have no end.
        let length = self.file.metadata()?.len();
        let mut buffer = vec![0; PIECE];
        while self.done < length {
            match self.file.read(&mut buffer)? {
                0 => break,
                count => {
                    self.checksum.update(&buffer[..count]);
                    self.done += count as u64;
                }
            }
        }
        Ok(())
    }

    /// Removes the contents.
    fn restart(&mut self) -> Result<(), HubError> {
        self.file
            .set_len(0)
            .and_then(|()| self.file.seek(SeekFrom::Start(0)))
            .map_err(|source| HubError::io("write", &self.path, source))?;
        self.done = 0;
        self.checksum = Checksum::new(self.remote);
        Ok(())
    }

    /// Receives the rest of the file, until its end or the end of the connection.
    fn receive(&mut self, hub: &Hub, on_bytes: &mut impl FnMut(u64)) -> Result<(), HubError> {
        let (is_rest, body) = hub.open(&self.url, self.done)?;
        if self.done > 0 && !is_rest {
            self.restart()?;
        }
        let mut body = body.into_reader().take(self.remote.size - self.done);
        let mut buffer = vec![0; PIECE];
        loop {
            match body.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => self.write(&buffer[..count])?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(source) => {
                    let url = self.url.clone();
                    return Err(HubError::Unreachable { url, source });
                }
            }
            on_bytes(self.done);
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file
            .write_all(bytes)
            .map_err(|source| self.not_written(source))?;
        self.checksum.update(bytes);
        self.done += bytes.len() as u64;
        Ok(())
    }

    fn not_written(&self, source: io::Error) -> HubError {
        match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => HubError::DiskFull {
                path: self.path.clone(),
                url: self.url.clone(),
                missing: self.remote.size - self.done,
                source,
            },
            _ => HubError::io("write", &self.path, source),
        }
    }

    /// Compares the checksum, and gives the file its final name. A file with another checksum is
    /// removed.
    fn finish(self, blob: PathBuf) -> Result<(), HubError> {
        // Without this a power failure could leave the name without the contents.
        self.file
            .sync_all()
            .map_err(|source| self.not_written(source))?;
        drop(self.file);
        let (expected, found) = (&self.remote.id, self.checksum.finish());
        if found != *expected {
            fs::remove_file(&self.path)
                .map_err(|source| HubError::io("remove", &self.path, source))?;
            return Err(HubError::Checksum {
                url: self.url,
                expected: expected.clone(),
                found,
            });
        }
        fs::rename(&self.path, blob).map_err(|source| HubError::io("rename", &self.path, source))
    }
}

/// The checksum of a file whose contents are added in pieces.
enum Checksum {
    /// The Git object ID.
    Git(Sha1),
    /// The SHA-256 of a file in LFS.
    Lfs(Sha256),
}

impl Checksum {
    fn new(file: &RemoteFile) -> Self {
        if file.is_lfs {
            Self::Lfs(Sha256::new())
        } else {
            Self::Git(Sha1::new_with_prefix(format!("blob {}\0", file.size)))
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Git(hash) => hash.update(bytes),
            Self::Lfs(hash) => hash.update(bytes),
        }
    }

    fn finish(self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Self::Git(hash) => hex(&hash.finalize()),
            Self::Lfs(hash) => hex(&hash.finalize()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_git_and_of_lfs() {
        let mut file = RemoteFile {
            path: String::new(),
            size: 6,
            id: String::new(),
            is_lfs: false,
        };
        // `printf 'hello\n' | git hash-object --stdin`, and `| sha256sum`.
        for (is_lfs, expected) in [
            (false, "ce013625030ba8dba906f756967f9e9ca394464a"),
            (
                true,
                "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
            ),
        ] {
            file.is_lfs = is_lfs;
            let mut checksum = Checksum::new(&file);
            checksum.update(b"hel");
            checksum.update(b"lo\n");
            assert_eq!(checksum.finish(), expected);
        }
    }
}
