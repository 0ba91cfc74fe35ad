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
    remote: &RemoteFile,
    mut on_bytes: impl FnMut(u64),
) -> Result<(), HubError> {
    let _lock = cache.lock(remote)?;
    let blob = cache.blob(remote);
    if has_size(&blob, remote) {
        return Ok(());
    }
    let url = hub.url(commit, &remote.path);
    let mut partial = Partial::open(cache.partial(remote), url.clone(), remote)?;
    tracing::info!(%url, size = remote.size, done = partial.done, "downloads");
    on_bytes(partial.done);
    let (mut attempts, mut furthest) = (0, partial.done);
    while partial.done < remote.size {
        let source = match partial.receive(hub, &mut on_bytes) {
            Err(HubError::Unreachable { source, .. }) => Some(source),
            result => result.map(|()| None)?,
        };
        if partial.done > furthest {
            (attempts, furthest) = (0, partial.done);
        }
        attempts += 1;
        if partial.done < remote.size {
            tracing::debug!(%url, done = partial.done, attempts, ?source, "a download broke off");
            if attempts >= ATTEMPTS {
                return Err(HubError::Interrupted {
                    url,
                    done: partial.done,
                    total: remote.size,
                    attempts,
                    source,
                });
            }
            sleep(DELAY * 2u32.pow(attempts - 1));
        }
    }
    partial.finish(blob)
}

/// A file that is being downloaded. Its position is its end.
struct Partial<'a> {
    path: PathBuf,
    file: File,
    done: u64,
    url: String,
    remote: &'a RemoteFile,
}

impl<'a> Partial<'a> {
    /// Opens the file with what an earlier run has downloaded, or an empty file.
    fn open(path: PathBuf, url: String, remote: &'a RemoteFile) -> Result<Self, HubError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let failed = |source| HubError::io("create", &path, source);
        let mut file = options.open(&path).map_err(failed)?;
        let done = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let mut partial = Self {
            path,
            file,
            done,
            url,
            remote,
        };
        if done > remote.size {
            partial.restart()?;
        }
        Ok(partial)
    }

    /// Removes the contents.
    fn restart(&mut self) -> Result<(), HubError> {
        self.done = 0;
        self.file
            .set_len(0)
            .and_then(|()| self.file.rewind())
            .map_err(|source| HubError::io("write", &self.path, source))
    }

    /// Receives the rest of the file, until its end or the end of the connection.
    fn receive(&mut self, hub: &Hub, on_bytes: &mut impl FnMut(u64)) -> Result<(), HubError> {
        let (is_rest, body) = hub.open(&self.url, self.done)?;
        if self.done > 0 && !is_rest {
            self.restart()?;
        }
        let mut body = body.into_reader().take(self.remote.size - self.done);
        let mut piece = vec![0; PIECE];
        loop {
            let count = match body.read(&mut piece) {
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(source) => {
                    let url = self.url.clone();
                    return Err(HubError::Unreachable { url, source });
                }
            };
            self.file
                .write_all(&piece[..count])
                .map_err(|source| self.not_written(source))?;
            self.done += count as u64;
            on_bytes(self.done);
        }
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
    fn finish(mut self, blob: PathBuf) -> Result<(), HubError> {
        // Without this a power failure could leave the name without the contents.
        self.file
            .sync_all()
            .map_err(|source| self.not_written(source))?;
        // Of what is in the file, which earlier runs and other programs have written, too.
        let found = checksum(&mut self.file, self.remote);
        let found = found.map_err(|source| HubError::io("read", &self.path, source))?;
        drop(self.file);
        if found != self.remote.checksum() {
            fs::remove_file(&self.path)
                .map_err(|source| HubError::io("remove", &self.path, source))?;
            return Err(HubError::Checksum {
                url: self.url,
                expected: self.remote.checksum().into(),
                found,
            });
        }
        fs::rename(&self.path, blob).map_err(|source| HubError::io("rename", &self.path, source))
    }
}

/// Returns the checksum of a file, of the kind that the hub lists.
fn checksum(file: &mut File, remote: &RemoteFile) -> io::Result<String> {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    file.rewind()?;
    if remote.lfs.is_some() {
        let mut hash = Sha256::new();
        io::copy(file, &mut hash)?;
        Ok(hex(&hash.finalize()))
    } else {
        let mut hash = Sha1::new_with_prefix(format!("blob {}\0", remote.size));
        io::copy(file, &mut hash)?;
        Ok(hex(&hash.finalize()))
    }
}
