//! The download of a file.
//!
//! Bytes are appended to `blobs/<id>.incomplete`, which a later attempt or run goes on with. The
//! file gets its final name only when its checksum is that of the hub's list.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::time::Duration;

use futures_util::StreamExt;
use hf_hub::HFError;
use tokio::time::{sleep, timeout};

use crate::HubError;
use crate::cache::{Cache, remove};
use crate::checksum::Checksum;
use crate::files::RemoteFile;
use crate::hub::{Hub, QUIET, is_transient, silent};

/// The number of attempts without progress after which a download is given up.
const ATTEMPTS: u32 = 5;
/// The time before the second attempt; it doubles with every further one.
const DELAY: Duration = Duration::from_millis(200);

/// Downloads a file to the cache, and returns the name of its blob. `on_bytes` is called with the
/// number of bytes of the file that are there, which is less than before if the download begins
/// anew.
pub(crate) async fn download(
    hub: &Hub,
    cache: &Cache,
    commit: &str,
    file: &RemoteFile,
    mut on_bytes: impl FnMut(u64),
) -> Result<String, HubError> {
    let url = hub.url(commit, file);
    let mut partial = Partial::open(cache.partial(file), url.clone(), file)?;
    on_bytes(partial.done);
    let (mut attempts, mut furthest) = (0, partial.done);
    while partial.done < file.size {
        let source = match receive(hub, commit, file, &mut partial, &mut on_bytes).await {
            Ok(()) => None,
            Err(Broken::Disk(error)) => return Err(error),
            Err(Broken::Network(error)) if !is_transient(&error) => {
                return Err(hub.failed(error, &url, None));
            }
            Err(Broken::Network(error)) => Some(Box::new(error)),
        };
        if partial.done == file.size {
            break;
        }
        attempts = if partial.done > furthest {
            1
        } else {
            attempts + 1
        };
        furthest = furthest.max(partial.done);
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
        sleep(DELAY * 2u32.pow(attempts - 1)).await;
    }
    partial.finish(cache)
}

/// The end of an attempt.
enum Broken {
    Network(HFError),
    Disk(HubError),
}

/// Receives the rest of a file, until its end or the end of the connection.
async fn receive(
    hub: &Hub,
    commit: &str,
    file: &RemoteFile,
    partial: &mut Partial,
    on_bytes: &mut impl FnMut(u64),
) -> Result<(), Broken> {
    let rest = file.size - partial.done;
    let range = (partial.done > 0).then_some(partial.done..file.size);
    let is_range = range.is_some();
    let (announced, mut bytes) = hub
        .download(commit, file, range)
        .await
        .map_err(Broken::Network)?;
    // Perhaps not the range: a server that does not know ranges sends the file from its beginning.
    if is_range && announced != Some(rest) {
        return partial.restart().map_err(Broken::Disk);
    }
    while partial.done < file.size {
        let Ok(next) = timeout(QUIET, bytes.next()).await else {
            return Err(Broken::Network(silent()));
        };
        let Some(piece) = next.transpose().map_err(Broken::Network)? else {
            return Ok(());
        };
        partial.write(&piece).map_err(Broken::Disk)?;
        on_bytes(partial.done);
    }
    Ok(())
}

/// A file that is being downloaded, and the checksum of what is there.
struct Partial {
    path: PathBuf,
    url: String,
    file: File,
    remote: RemoteFile,
    checksum: Checksum,
    done: u64,
}

impl Partial {
    /// Opens the file with what an earlier run has downloaded, or an empty file.
    fn open(path: PathBuf, url: String, remote: &RemoteFile) -> Result<Self, HubError> {
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(|source| HubError::io("create", &path, source))?;
        let mut partial = Self {
            path,
            url,
            file,
            checksum: Checksum::new(remote.is_lfs, remote.size),
            remote: remote.clone(),
            done: 0,
        };
        match partial.read() {
            Ok(()) if partial.done <= remote.size => Ok(partial),
            // More than the whole file: not a part of it.
            Ok(()) => partial.restart().map(|()| partial),
            Err(source) => Err(HubError::io("read", &partial.path, source)),
        }
    }

    /// Reads what is there, and leaves the file at its end.
    fn read(&mut self) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        let mut buffer = vec![0; 1 << 20];
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
        self.checksum = Checksum::new(self.remote.is_lfs, self.remote.size);
        Ok(())
    }

    /// Appends bytes, without those beyond the size of the file.
    fn write(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        let rest = usize::try_from(self.remote.size - self.done).unwrap_or(usize::MAX);
        let bytes = &bytes[..bytes.len().min(rest)];
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
    fn finish(self, cache: &Cache) -> Result<String, HubError> {
        // Without this a power failure could leave the name without the contents.
        self.file
            .sync_all()
            .map_err(|source| self.not_written(source))?;
        let found = self.checksum.finish();
        if found.object_id != self.remote.object_id {
            remove(&self.path)?;
            return Err(HubError::Checksum {
                url: self.url,
                expected: self.remote.object_id,
                found: found.object_id,
            });
        }
        fs::rename(&self.path, cache.blob(&found.blob))
            .map_err(|source| HubError::io("rename", &self.path, source))?;
        Ok(found.blob)
    }
}
