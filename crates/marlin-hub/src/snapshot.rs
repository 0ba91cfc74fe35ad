//! The files of a revision of a model.

use std::fs::File;
use std::path::PathBuf;

use crate::cache::Cache;
use crate::download::download;
use crate::files::{CONFIG, RemoteFile, Weights, is_needed, shards, weights};
use crate::hub::Hub;
use crate::{HubError, HubProgress};

/// Downloads the files of a revision that are needed and not in the cache. Returns the folder with
/// all of them.
pub(crate) async fn snapshot(
    hub: &Hub,
    cache: &Cache,
    revision: &str,
    on_progress: impl FnMut(HubProgress<'_>) + Send,
) -> Result<PathBuf, HubError> {
    let commit = hub.commit(revision).await?;
    let files = hub.list(&commit).await?;
    let weights = weights(files.iter().map(|file| &*file.path)).map_err(|found| {
        let name = hub.name();
        HubError::NoWeights { name, found }
    })?;
    let (Weights::File(first) | Weights::Index(first)) = &weights;
    let (needed, others): (Vec<_>, Vec<_>) = files
        .into_iter()
        .partition(|file| is_needed(&file.path) || file.path == *first);
    let mut run = Run {
        hub,
        cache,
        commit,
        blobs: Vec::new(),
        lock: None,
        on_progress,
    };
    run.fetch(needed).await?;
    if let Weights::Index(index) = &weights {
        run.fetch(run.shards(index, others)?).await?;
    }
    run.link(revision)
}

/// A run of [`snapshot`].
struct Run<'a, F> {
    hub: &'a Hub,
    cache: &'a Cache,
    commit: String,
    /// The files that are in the cache, and the names of their blobs.
    blobs: Vec<(RemoteFile, String)>,
    /// The lock of the model's folder, which is only taken to write there.
    lock: Option<File>,
    on_progress: F,
}

impl<F: FnMut(HubProgress<'_>) + Send> Run<'_, F> {
    fn lock(&mut self) -> Result<(), HubError> {
        if self.lock.is_none() {
            self.lock = Some(self.cache.lock()?);
        }
        Ok(())
    }

    /// Downloads those of the files that are not in the cache.
    async fn fetch(&mut self, files: Vec<RemoteFile>) -> Result<(), HubError> {
        let cache = self.cache;
        let missing = || files.iter().filter(|file| cache.blob_of(file).is_none());
        if missing().next().is_some() {
            self.lock()?;
        }
        // Another process may have downloaded some before the lock was free.
        let total = missing().map(|file| file.size).sum();
        let mut before = 0;
        for file in files {
            let blob = match cache.blob_of(&file) {
                Some(blob) => blob,
                None => {
                    let on_bytes = |bytes| {
                        (self.on_progress)(HubProgress {
                            file: &file.path,
                            done: before + bytes,
                            total,
                        });
                    };
                    let blob = download(self.hub, cache, &self.commit, &file, on_bytes).await?;
                    before += file.size;
                    blob
                }
            };
            self.blobs.push((file, blob));
        }
        Ok(())
    }

    /// Returns the shards in an index that was downloaded.
    fn shards(&self, index: &str, others: Vec<RemoteFile>) -> Result<Vec<RemoteFile>, HubError> {
        let names = match self.blobs.iter().find(|(file, _)| file.path == index) {
            Some((_, blob)) => shards(&self.cache.blob(blob))?,
            None => Default::default(),
        };
        let missing = |name: &&String| !others.iter().any(|file| file.path == **name);
        if let Some(shard) = names.iter().find(missing) {
            return Err(HubError::MissingShard {
                name: self.hub.name(),
                index: index.into(),
                shard: shard.clone(),
            });
        }
        Ok(others
            .into_iter()
            .filter(|file| names.contains(&file.path))
            .collect())
    }

    /// Puts links to all files into the folder of the commit, and returns it.
    fn link(mut self, revision: &str) -> Result<PathBuf, HubError> {
        // The folder counts as complete when it has a config.
        let mut blobs = std::mem::take(&mut self.blobs);
        blobs.sort_by_key(|(file, _)| file.path == CONFIG);
        for (file, blob) in &blobs {
            if !self.cache.is_linked(&self.commit, file, blob) {
                self.lock()?;
                self.cache.link(&self.commit, file, blob)?;
            }
        }
        if self.cache.commit(revision).as_ref() != Some(&self.commit) {
            self.lock()?;
            self.cache.set_commit(revision, &self.commit)?;
        }
        Ok(self.cache.snapshot(&self.commit))
    }
}
