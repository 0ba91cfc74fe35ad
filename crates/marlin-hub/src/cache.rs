//! The folder of a model in Hugging Face's cache.
//!
//! `models--owner--name` has the contents of files in `blobs`, links to them in
//! `snapshots/<commit>`, and the commits of branches and tags in `refs`. `huggingface_hub` for
//! Python uses the same folder, and the same locks below `.locks`.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::HubError;
use crate::hub::RemoteFile;
use crate::name::{ModelName, is_hex};

/// The folder of a model.
pub(crate) struct Cache {
    root: PathBuf,
    locks: PathBuf,
}

impl Cache {
    /// Names the folder of a model; creates nothing.
    pub fn new(cache: &Path, ModelName { owner, name }: &ModelName) -> Self {
        let folder = format!("models--{owner}--{name}");
        Self {
            locks: cache.join(".locks").join(&folder),
            root: cache.join(folder),
        }
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// Returns the path of the contents of a file, of this or another commit.
    pub fn blob(&self, file: &RemoteFile) -> PathBuf {
        self.root.join("blobs").join(file.checksum())
    }

    /// Returns the path of a file that is being downloaded.
    pub fn partial(&self, file: &RemoteFile) -> PathBuf {
        self.blob(file).with_extension("incomplete")
    }

    /// Returns the commit that a revision was when it was last downloaded.
    pub fn commit(&self, revision: &str) -> Option<String> {
        let is_commit = |text: &str| is_hex(text, 40);
        if is_commit(revision) {
            return Some(revision.into());
        }
        let text = fs::read_to_string(self.reference(revision)).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Records the commit of a branch or tag.
    pub fn set_commit(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        let path = self.reference(revision);
        create_dir(path.parent().unwrap_or(&self.root))?;
        fs::write(&path, commit).map_err(|source| HubError::io("write", &path, source))
    }

    fn reference(&self, revision: &str) -> PathBuf {
        self.root.join("refs").join(revision)
    }

    /// Returns the path of a file of a commit: in the commit's folder if it is there, otherwise of
    /// its blob, which need not exist.
    pub fn file(&self, commit: &str, file: &RemoteFile) -> PathBuf {
        let path = self.snapshot(commit).join(&file.path);
        if has_size(&path, file) {
            path
        } else {
            self.blob(file)
        }
    }

    /// Links a file of a commit to its blob, if it is not in the folder of the commit.
    pub fn link(&self, commit: &str, file: &RemoteFile) -> Result<(), HubError> {
        let snapshot = self.snapshot(commit);
        let link = snapshot.join(&file.path);
        if has_size(&link, file) {
            return Ok(());
        }
        create_dir(&snapshot)?;
        let create = || symlink(&self.blob(file), file.checksum(), &link);
        match create() {
            // Another process has linked it.
            Err(error) if error.kind() == ErrorKind::AlreadyExists && has_size(&link, file) => {
                Ok(())
            }
            // A damaged copy.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                fs::remove_file(&link).and_then(|()| create())
            }
            result => result,
        }
        .map_err(|source| HubError::io("link", &link, source))
    }

    /// Waits until no other process downloads a file, and keeps others from it until the returned
    /// lock is dropped.
    pub fn lock(&self, file: &RemoteFile) -> Result<File, HubError> {
        create_dir(&self.locks)?;
        create_dir(&self.root.join("blobs"))?;
        let path = self.locks.join(format!("{}.lock", file.checksum()));
        let failed = |source| HubError::io("lock", &path, source);
        let lock = File::create(&path).map_err(failed)?;
        if lock.try_lock().is_err() {
            tracing::warn!(lock = %path.display(), "waits for another process that downloads the file");
            lock.lock().map_err(failed)?;
        }
        Ok(lock)
    }
}

/// Returns whether a path, or what it links to, is a file with the size that the hub lists.
pub(crate) fn has_size(path: &Path, file: &RemoteFile) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() == file.size)
}

fn create_dir(path: &Path) -> Result<(), HubError> {
    fs::create_dir_all(path).map_err(|source| HubError::io("create", path, source))
}

/// Links to a blob, by its path relative to the snapshot, so that the cache can be moved.
#[cfg(unix)]
fn symlink(_: &Path, id: &str, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(Path::new("../../blobs").join(id), link)
}

/// Links to a blob. Symbolic links need privileges on other systems.
#[cfg(not(unix))]
fn symlink(blob: &Path, _: &str, link: &Path) -> io::Result<()> {
    fs::hard_link(blob, link)
}
