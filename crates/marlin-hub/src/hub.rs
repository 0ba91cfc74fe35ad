//! Requests to the hub.

use std::ops::Range;
use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt;
use hf_hub::repository::RepoTreeEntry;
use hf_hub::repository::download::HFByteStream;
use hf_hub::{HFClient, HFError, HFRepository, HFResult, RepoTypeModel};
use tokio::time::timeout;

use crate::HubError;
use crate::files::RemoteFile;
use crate::name::{ModelName, is_object_id};

/// The time after which a hub that sends nothing is given up. The attempts of `hf-hub` at a request
/// have it together.
pub(crate) const QUIET: Duration = Duration::from_secs(60);

/// A model on the hub.
pub(crate) struct Hub {
    repository: HFRepository<RepoTypeModel>,
    endpoint: String,
    name: ModelName,
}

impl Hub {
    pub fn new(client: &HFClient, name: &ModelName) -> Self {
        Self {
            repository: client.model(&*name.owner, &*name.name),
            endpoint: client.endpoint().into(),
            name: name.clone(),
        }
    }

    /// Returns the commit of a revision.
    pub async fn commit(&self, revision: &str) -> Result<String, HubError> {
        let url = format!(
            "{}/api/models/{}/revision/{revision}",
            self.endpoint, self.name
        );
        let request = self.repository.info().revision(revision).send();
        let info = answer(request)
            .await
            .map_err(|error| self.failed(error, &url, Some(revision)))?;
        match info.sha {
            Some(commit) if is_object_id(&commit) => Ok(commit),
            found => Err(HubError::Answer {
                url,
                reason: format!("the commit is {found:?}, not 40 hexadecimal digits"),
            }),
        }
    }

    /// Returns the files at the top of the repository.
    pub async fn list(&self, commit: &str) -> Result<Vec<RemoteFile>, HubError> {
        let url = format!("{}/api/models/{}/tree/{commit}", self.endpoint, self.name);
        let entries = async {
            let mut pages = pin!(self.repository.list_tree().revision(commit).send()?);
            let mut entries = Vec::new();
            while let Some(entry) = pages.next().await {
                entries.push(entry?);
            }
            Ok::<_, HFError>(entries)
        };
        let entries = answer(entries)
            .await
            .map_err(|error| self.failed(error, &url, Some(commit)))?;
        let files = entries.into_iter().filter_map(|entry| match entry {
            RepoTreeEntry::File {
                oid,
                size,
                path,
                lfs,
                ..
            } => Some(RemoteFile {
                path,
                size,
                object_id: oid,
                is_lfs: lfs.is_some(),
            }),
            RepoTreeEntry::Directory { .. } => None,
        });
        // The path, and the ID below, name files in the cache.
        let is_name = |path: &str| !path.starts_with('.') && !path.contains(['/', '\\', ':', '\0']);
        let files: Vec<RemoteFile> = files.filter(|file| is_name(&file.path)).collect();
        match files.iter().find(|file| !is_object_id(&file.object_id)) {
            None => Ok(files),
            Some(file) => Err(HubError::Answer {
                url,
                reason: format!(
                    "the ID of {:?} is {:?}, not 40 hexadecimal digits",
                    file.path, file.object_id
                ),
            }),
        }
    }

    /// Begins to download a file or a part of it. Returns the number of bytes that the hub
    /// announces, and the bytes.
    pub async fn download(
        &self,
        commit: &str,
        file: &RemoteFile,
        range: Option<Range<u64>>,
    ) -> HFResult<(Option<u64>, HFByteStream)> {
        let request = self.repository.download_file_stream();
        answer(
            request
                .filename(&*file.path)
                .revision(commit)
                .maybe_range(range)
                .send(),
        )
        .await
    }

    /// Returns the name of the model.
    pub fn name(&self) -> String {
        self.name.to_string()
    }

    pub fn url(&self, commit: &str, file: &RemoteFile) -> String {
        format!(
            "{}/{}/resolve/{commit}/{}",
            self.endpoint, self.name, file.path
        )
    }

    /// Returns the error of a failed request. `revision` is set for a request that fails if the
    /// model or the revision does not exist.
    pub fn failed(&self, error: HFError, url: &str, revision: Option<&str>) -> HubError {
        let url = url.to_owned();
        match (status(&error), revision) {
            (Some((404, _)), Some(revision)) => self.not_found(revision),
            // Without a token the hub does not tell whether a model exists.
            (Some((401 | 403, Some("RepoNotFound" | "RevisionNotFound"))), Some(revision)) => {
                self.not_found(revision)
            }
            (Some((status @ (401 | 403), _)), _) => HubError::Gated {
                name: self.name.to_string(),
                url: format!("{}/{}", self.endpoint, self.name),
                status,
            },
            (Some((..500, _)), _) => HubError::Answer {
                url,
                reason: error.to_string(),
            },
            _ => HubError::Unreachable {
                url,
                source: Box::new(error),
            },
        }
    }

    fn not_found(&self, revision: &str) -> HubError {
        HubError::NotFound {
            endpoint: self.endpoint.clone(),
            name: self.name.to_string(),
            revision: revision.into(),
        }
    }
}

/// Returns whether another attempt at a request may succeed.
pub(crate) fn is_transient(error: &HFError) -> bool {
    status(error).is_none_or(|(status, _)| status >= 500)
}

/// Returns the status and the hub's code of an answer that is an error.
fn status(error: &HFError) -> Option<(u16, Option<&str>)> {
    let context = match error {
        HFError::Http { context }
        | HFError::AuthRequired { context }
        | HFError::Forbidden { context }
        | HFError::Conflict { context }
        | HFError::RateLimited { context, .. } => context,
        HFError::RepoNotFound { context, .. }
        | HFError::RevisionNotFound { context, .. }
        | HFError::EntryNotFound { context, .. } => context.as_ref()?,
        _ => return None,
    };
    Some((context.status.as_u16(), context.error_code.as_deref()))
}

/// Waits for an answer, but not for ever.
async fn answer<T>(request: impl Future<Output = HFResult<T>>) -> HFResult<T> {
    match timeout(QUIET, request).await {
        Ok(answer) => answer,
        Err(_) => Err(silent()),
    }
}

/// Returns the error of a hub that sends nothing.
pub(crate) fn silent() -> HFError {
    HFError::Other(format!("nothing was received for {} s", QUIET.as_secs()))
}
