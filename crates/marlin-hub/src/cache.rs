//! The folder of a model in Hugging Face's cache.
//!
//! `models--owner--name` has the contents of files in `blobs`, links to them in
//! `snapshots/<commit>`, and the commits of branches and tags in `refs`. `huggingface_hub` for Python
//! uses the same folder.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::HubError;
use crate::checksum::pointer_object_id;
use crate::files::{RemoteFile, is_complete};
use crate::name::{ModelName, is_hex, is_object_id};

/// The folder of a model.
pub(crate) struct Cache {
    root: PathBuf,
    lock: PathBuf,
}

impl Cache {
    /// Names the folder of a model; creates nothing.
    pub fn new(cache: &Path, ModelName { owner, name }: &ModelName) -> Self {
        let folder = format!("models--{owner}--{name}");
        Self {
            lock: cache.join(".locks").join(&folder).join("burn-marlin.lock"),
            root: cache.join(folder),
        }
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    pub fn blob(&self, blob: &str) -> PathBuf {
        self.root.join("blobs").join(blob)
    }

    /// Returns the path of a file that is being downloaded.
    pub fn partial(&self, file: &RemoteFile) -> PathBuf {
        self.blob(&format!("{}.incomplete", file.object_id))
    }

    /// Returns the snapshot of a revision, if it is complete.
    pub fn complete(&self, revision: &str) -> Option<PathBuf> {
        let snapshot = self.snapshot(&self.commit(revision)?);
        is_complete(&snapshot).then_some(snapshot)
    }

    /// Returns the commit that a revision was when it was last downloaded.
    pub fn commit(&self, revision: &str) -> Option<String> {
        if is_object_id(revision) {
            return Some(revision.into());
        }
        let text = fs::read_to_string(self.reference(revision)).ok()?;
        Some(text.trim())
            .filter(|commit| is_object_id(commit))
            .map(String::from)
    }

    fn reference(&self, revision: &str) -> PathBuf {
        self.root.join("refs").join(revision)
    }

    /// Returns the name of the blob with the contents of a file, if they are in the cache, from
    /// this or another revision.
    pub fn blob_of(&self, file: &RemoteFile) -> Option<String> {
        let has_size = |path: &Path| fs::metadata(path).is_ok_and(|found| found.len() == file.size);
        if !file.is_lfs {
            return has_size(&self.blob(&file.object_id)).then(|| file.object_id.clone());
        }
        let blobs = self.root.join("blobs").read_dir().ok()?;
        blobs
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|blob| blob.len() == 64 && is_hex(blob) && has_size(&self.blob(blob)))
            .find(|blob| pointer_object_id(blob, file.size) == file.object_id)
    }

    /// Returns whether a file of a snapshot is a link to a blob, or a copy of it.
    pub fn is_linked(&self, commit: &str, file: &RemoteFile, blob: &str) -> bool {
        let path = self.snapshot(commit).join(&file.path);
        match (fs::canonicalize(&path), fs::canonicalize(self.blob(blob))) {
            (Ok(target), Ok(blob)) if target == blob => true,
            // Where links are not allowed, other programs put copies there.
            (Ok(_), Ok(_)) => fs::symlink_metadata(&path)
                .is_ok_and(|found| found.is_file() && found.len() == file.size),
            _ => false,
        }
    }

    /// Links a file of a snapshot to a blob. The link appears at once.
    pub fn link(&self, commit: &str, file: &RemoteFile, blob: &str) -> Result<(), HubError> {
        let snapshot = self.snapshot(commit);
        create_dir(&snapshot)?;
        let (path, temporary) = (
            snapshot.join(&file.path),
            snapshot.join(format!(".{}.new", file.path)),
        );
        remove(&temporary)?;
        symlink(&self.blob(blob), blob, &temporary)
            .and_then(|()| fs::rename(&temporary, &path))
            .map_err(|source| HubError::io("link", &path, source))
    }

    /// Records the commit of a branch or tag.
    pub fn set_commit(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        let path = self.reference(revision);
        let mut temporary = path.clone().into_os_string();
        temporary.push(".new");
        let temporary = PathBuf::from(temporary);
        create_dir(path.parent().unwrap_or(&self.root))?;
        fs::write(&temporary, commit)
            .and_then(|()| fs::rename(&temporary, &path))
            .map_err(|source| HubError::io("write", &path, source))
    }

    /// Waits until no other process downloads this model, and keeps others from it until the file
    /// is dropped.
    pub fn lock(&self) -> Result<File, HubError> {
        for dir in [self.lock.parent(), Some(&*self.root.join("blobs"))] {
            dir.map_or(Ok(()), create_dir)?;
        }
        let failed = |source| HubError::io("lock", &self.lock, source);
        let file = File::create(&self.lock).map_err(failed)?;
        if file.try_lock().is_err() {
            tracing::info!(lock = %self.lock.display(), "waits for another download of the model");
            file.lock().map_err(failed)?;
        }
        Ok(file)
    }
}

/// Removes a file, which may not exist.
pub(crate) fn remove(path: &Path) -> Result<(), HubError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => {
            Err(HubError::io("remove", path, source))
        }
        _ => Ok(()),
    }
}

fn create_dir(path: &Path) -> Result<(), HubError> {
    fs::create_dir_all(path).map_err(|source| HubError::io("create", path, source))
}

/// Links to a blob, by its path relative to the snapshot, so that the cache can be moved.
#[cfg(unix)]
fn symlink(_: &Path, blob: &str, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(Path::new("../../blobs").join(blob), link)
}

/// Links to a blob. Symbolic links need privileges on other systems.
#[cfg(not(unix))]
fn symlink(path: &Path, _: &str, link: &Path) -> io::Result<()> {
    fs::hard_link(path, link)
}
