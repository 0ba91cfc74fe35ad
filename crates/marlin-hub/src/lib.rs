//! Models by name: downloads what a model needs from the Hugging Face hub.
//!
//! [`resolve`] takes what a user gives as a model. A path that exists is returned as it is. A name,
//! such as `Qwen/Qwen3-8B-AWQ`, is looked up in Hugging Face's cache, the folder that
//! `huggingface_hub` for Python also uses; files that are not there are downloaded.
//!
//! Only the files that are read are downloaded: configs, tokenizer, chat template, and the
//! safetensors that a folder is opened with. A download that breaks off is resumed, in the same run
//! or in the next. Each file is compared with the checksum in the hub's list before it gets its name
//! in the cache, and the folder that is returned has links to such files only.
//!
//! The crate `hf-hub` sends the requests and knows the environment variables. It does not resume
//! downloads or compare checksums, so files are received and stored here.

mod cache;
mod checksum;
mod download;
mod error;
mod files;
mod hub;
mod name;
mod snapshot;

use std::path::{Path, PathBuf};
use std::thread;

use hf_hub::{HFClient, HFError};

use self::cache::Cache;
use self::hub::Hub;
use self::name::ModelName;
use self::snapshot::snapshot;

pub use self::error::HubError;
pub use self::files::is_needed;

/// The revision without another.
const MAIN: &str = "main";
/// The hub without another.
const ENDPOINT: &str = "https://huggingface.co";

/// Options for finding a model. The environment has the value of each option that is not set, as in
/// Hugging Face's own programs.
#[derive(Clone, Default)]
pub struct HubOptions {
    /// The branch, tag or commit; `main` if not set.
    pub revision: Option<String>,
    /// True to use only what is in the cache, as with `HF_HUB_OFFLINE=1`.
    pub offline: bool,
    /// The token of an account, for gated and private models; otherwise that of `HF_TOKEN`,
    /// `HF_TOKEN_PATH`, or the file in which `hf auth login` keeps it.
    pub token: Option<String>,
    /// The address of the hub; otherwise that of `HF_ENDPOINT`, or `https://huggingface.co`.
    pub endpoint: Option<String>,
    /// The cache; otherwise `HF_HUB_CACHE`, or the folder `hub` of `HF_HOME`, or of
    /// `~/.cache/huggingface`.
    pub cache: Option<PathBuf>,
}

/// Does not show the token.
impl std::fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HubOptions")
            .field("revision", &self.revision)
            .field("offline", &self.offline)
            .field("token", &self.token.as_ref().map(|_| "..."))
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .finish()
    }
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

/// Returns whether a path that does not exist is the name of a model on the hub: an owner and a
/// name.
pub fn is_name(path: &Path) -> bool {
    !path.exists() && path.to_str().and_then(ModelName::parse).is_some()
}

/// Returns the folder of a model, given by its path or its name on the hub. Downloads the files
/// that are not in the cache, and calls `on_progress` with every piece.
///
/// A path that exists is returned as it is, and so is a path that cannot be a name because it is
/// absolute or begins with `./` or `../`. With a name, the current commit of the revision is asked
/// for even if everything is in the cache; if the hub cannot be reached, the commit in the cache is
/// taken.
///
/// The folder is complete: every file in it has the size and the checksum that the hub lists. Two
/// processes can download the same model; the second waits for the first.
///
/// # Errors
/// A [`HubError`]. After each of them a later call goes on with the files and parts of files that
/// were received.
pub fn resolve(
    path: impl AsRef<Path>,
    options: &HubOptions,
    on_progress: impl FnMut(HubProgress<'_>) + Send,
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
    let client = client(options)?;
    let cache = Cache::new(client.cache_dir(), &name);
    if options.offline || is_offline() {
        return cache.complete(revision).ok_or_else(|| HubError::Offline {
            name: name.to_string(),
            revision: revision.into(),
            cache: client.cache_dir().into(),
        });
    }
    let hub = Hub::new(&client, &name);
    match block_on(snapshot(&hub, &cache, revision, on_progress)) {
        Err(HubError::Unreachable { url, source }) => match cache.complete(revision) {
            Some(snapshot) => {
                tracing::warn!(%url, error = %source, snapshot = %snapshot.display(), "the hub cannot be reached, the model in the cache is taken");
                Ok(snapshot)
            }
            None => Err(HubError::Unreachable { url, source }),
        },
        result => result,
    }
}

/// Creates the client, which reads the environment.
fn client(options: &HubOptions) -> Result<HFClient, HubError> {
    let mut builder = HFClient::builder();
    if let Some(token) = &options.token {
        builder = builder.token(token);
    }
    if let Some(endpoint) = &options.endpoint {
        builder = builder.endpoint(endpoint);
    }
    if let Some(cache) = &options.cache {
        builder = builder.cache_dir(cache);
    }
    builder.build().map_err(|error| {
        let endpoint = options.endpoint.clone();
        let endpoint = endpoint.or_else(|| std::env::var("HF_ENDPOINT").ok());
        let (endpoint, source) = (endpoint.unwrap_or_else(|| ENDPOINT.into()), Box::new(error));
        match *source {
            HFError::Url(_) => HubError::Endpoint { endpoint, source },
            _ => HubError::Unreachable {
                url: endpoint,
                source,
            },
        }
    })
}

/// Returns whether the environment forbids to use the network, in the words of `huggingface_hub`.
fn is_offline() -> bool {
    let value = std::env::var("HF_HUB_OFFLINE").unwrap_or_default();
    matches!(&*value.to_uppercase(), "1" | "ON" | "YES" | "TRUE")
}

/// Runs a future on a thread of its own: the caller's may be one of another runtime, in which
/// `block_on` panics.
fn block_on<T: Send>(
    future: impl Future<Output = Result<T, HubError>> + Send,
) -> Result<T, HubError> {
    let run = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(HubError::Runtime)?
            .block_on(future)
    };
    thread::scope(|scope| match scope.spawn(run).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}
