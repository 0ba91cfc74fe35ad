//! Models by their name on the Hugging Face hub.
//!
//! [`resolve`] takes the path of a folder or a name such as `Qwen/Qwen3-8B-AWQ`, and returns a
//! folder. The files of a name are in Hugging Face's own cache, which other programs share; those
//! that are not there are downloaded.
//!
//! Only the files that are read are downloaded: configs, tokenizer, chat template, and the
//! safetensors that a folder is opened with. A download that breaks off is resumed, in the same run
//! or in the next. Each file is compared with the checksum in the hub's list before it gets its
//! name in the cache, and the folder that is returned has links to such files only.

mod cache;
mod download;
mod environment;
mod error;
mod hub;
mod name;
mod snapshot;

use std::path::{Path, PathBuf};

use self::cache::Cache;
use self::environment::Environment;
use self::hub::Hub;
use self::name::ModelName;

pub use self::error::HubError;
pub use self::snapshot::is_needed;

/// The revision without another.
const MAIN: &str = "main";

/// Options for finding a model. The environment has the value of each option that is not set, as in
/// Hugging Face's own programs. Not `Debug`, as it may hold a token.
#[derive(Clone, Default)]
pub struct HubOptions {
    /// The branch, tag or commit; `main` if not set.
    pub revision: Option<String>,
    /// True to use only what is in the cache, as with `HF_HUB_OFFLINE=1`.
    pub offline: bool,
    /// True to leave out the weights, which are nearly all bytes of a model.
    pub without_weights: bool,
    /// The token of an account, for gated and private models; otherwise that of `HF_TOKEN`, or of
    /// the file `HF_TOKEN_PATH`, by default the file `token` of `HF_HOME`.
    pub token: Option<String>,
    /// The address of the hub; otherwise that of `HF_ENDPOINT`, or `https://huggingface.co`.
    pub endpoint: Option<String>,
    /// The cache; otherwise `HF_HUB_CACHE`, or the folder `hub` of `HF_HOME`, or of
    /// `~/.cache/huggingface`.
    pub cache: Option<PathBuf>,
}

/// The progress of a download.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HubProgress<'a> {
    /// The file that is being downloaded.
    pub file: &'a str,
    /// The bytes of all files that are there.
    pub done: u64,
    /// The bytes of all files that were missing.
    pub total: u64,
}

/// Returns the folder of a model, given by its path or its name on the hub. Downloads the files
/// that are not in the cache, and calls `on_progress` with every piece.
///
/// A path that exists is returned as it is, and so is a path that cannot be a name because it is
/// absolute or begins with `./` or `../`. With a name, the current commit of the revision is asked
/// for even if everything is in the cache; if the hub cannot be reached, the commit in the cache is
/// taken.
///
/// The folder is complete: every file that was downloaded has the size and the checksum that the
/// hub lists. Two processes can download the same model; the second waits for the first.
///
/// # Errors
/// A [`HubError`]. After each of them a later call goes on with the files and parts of files that
/// were received.
pub fn resolve(
    path: impl AsRef<Path>,
    options: &HubOptions,
    on_progress: impl FnMut(HubProgress<'_>),
) -> Result<PathBuf, HubError> {
    let path = path.as_ref();
    if path.exists() {
        return match &options.revision {
            None => Ok(path.into()),
            Some(revision) => Err(HubError::RevisionOfFolder {
                dir: path.into(),
                revision: revision.clone(),
            }),
        };
    }
    let Some(name) = path.to_str().and_then(ModelName::parse) else {
        let is_path = path.is_absolute() || path.starts_with(".") || path.starts_with("..");
        return if is_path {
            Ok(path.into())
        } else {
            Err(HubError::NeitherFolderNorName {
                text: path.display().to_string(),
            })
        };
    };
    let revision = options.revision.as_deref().unwrap_or(MAIN);
    name::check_revision(revision)?;
    let environment = Environment::read(options)?;
    let cache = Cache::new(&environment.cache, &name);
    let cached = || {
        let snapshot = cache.snapshot(&cache.commit(revision)?);
        snapshot::is_complete(&snapshot, options.without_weights).then_some(snapshot)
    };
    if environment.offline {
        return cached().ok_or_else(|| HubError::Offline {
            name: name.to_string(),
            revision: revision.into(),
            cache: environment.cache.clone(),
        });
    }
    let hub = Hub::new(&environment, name, revision);
    match snapshot::download(&hub, &cache, options.without_weights, on_progress) {
        Err(HubError::Unreachable { url, source }) => match cached() {
            Some(snapshot) => {
                tracing::warn!(%url, error = %source, snapshot = %snapshot.display(), "the hub cannot be reached, the model in the cache is taken");
                Ok(snapshot)
            }
            None => Err(HubError::Unreachable { url, source }),
        },
        result => result,
    }
}
