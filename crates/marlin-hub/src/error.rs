//! The errors of finding and downloading a model.

use std::io;
use std::path::{Path, PathBuf};

use marlin_format::checkpoint::{CheckpointError, InPlaceOfWeights};

/// A model that cannot be found, downloaded or used by its name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// A text that is neither an existing path nor the name of a model.
    #[error(
        "`{text}` is no folder here, and no name of a model on the Hugging Face hub; a name has an owner, as Qwen/Qwen3-8B-AWQ has, a folder of two parts \
         can be given as ./owner/name"
    )]
    NeitherFolderNorName {
        /// The text.
        text: String,
    },
    /// A revision that was given for a folder.
    #[error(
        "{} is a folder, which has no revisions (`{revision}`); leave the revision out, or give the name of a model", dir.display()
    )]
    RevisionOfFolder {
        /// The folder.
        dir: PathBuf,
        /// The revision.
        revision: String,
    },
    /// A text that cannot be a revision.
    #[error("`{revision}` is no revision; it must be a branch, a tag or a commit of the model")]
    Revision {
        /// The text.
        revision: String,
    },
    /// An address of the hub that is not a URL.
    #[error("`{endpoint}` (HF_ENDPOINT) is no address of a hub, as https://huggingface.co is")]
    Endpoint {
        /// The address.
        endpoint: String,
    },
    /// A user without a home folder, and so without a cache.
    #[error("there is no home folder for the cache of models; set HF_HOME to a folder")]
    NoHome,
    /// A model that is not in the cache, while the network must not be used.
    #[error(
        "{name}, revision `{revision}`, is not complete in {} and the network is not used (--offline, HF_HUB_OFFLINE): run once with the network, or set \
         HF_HOME to the cache that has it", cache.display()
    )]
    Offline {
        /// The name of the model.
        name: String,
        /// The revision.
        revision: String,
        /// The cache.
        cache: PathBuf,
    },
    /// A model whose licence has not been accepted, or that is private.
    #[error(
        "{name} is gated or private, the hub answers {status}: accept its licence at {url}, then set HF_TOKEN to a token of the account that accepted it"
    )]
    Gated {
        /// The name of the model.
        name: String,
        /// The page of the model.
        url: String,
        /// The status of the hub's answer.
        status: u16,
    },
    /// A model or revision that the hub does not have.
    #[error(
        "{endpoint} has no model {name} with a revision `{revision}`, or does not show it without a token of its owner (HF_TOKEN), and there is no folder \
         {name} here; check the spelling of both"
    )]
    NotFound {
        /// The address of the hub.
        endpoint: String,
        /// The name of the model.
        name: String,
        /// The revision.
        revision: String,
    },
    /// A token that the hub does not know.
    #[error(
        "{endpoint} refuses the token; set HF_TOKEN to one that is valid, or, for a public model, remove it (HF_TOKEN, or the file `token` in HF_HOME)"
    )]
    Token {
        /// The address of the hub.
        endpoint: String,
    },
    /// A hub that does not answer, or not with what its interface promises.
    #[error(
        "{url} could not be read; check the network, or use a copy in the cache with --offline"
    )]
    Unreachable {
        /// The address.
        url: String,
        /// The cause.
        source: io::Error,
    },
    /// An answer of the hub that is an error, or is not understood.
    #[error("{url}: {reason}")]
    Answer {
        /// The address.
        url: String,
        /// What is wrong with the answer.
        reason: String,
    },
    /// A download that broke off again after several attempts.
    #[error(
        "{url} broke off after {done} of {total} bytes, {attempts} times in a row; run again to go on from there"
    )]
    Interrupted {
        /// The address.
        url: String,
        /// The bytes that were received.
        done: u64,
        /// The bytes of the file.
        total: u64,
        /// The number of attempts without progress.
        attempts: u32,
        /// The cause of the last attempt; `None` if the server ended the file early.
        source: Option<io::Error>,
    },
    /// A downloaded file with other contents than the hub lists.
    #[error(
        "{url} has another checksum than the hub lists: {expected} expected, {found} found; the download was deleted, run again to download it anew"
    )]
    Checksum {
        /// The address.
        url: String,
        /// The checksum in the hub's list: the SHA-256 for a file in LFS, otherwise the Git object
        /// ID.
        expected: String,
        /// The checksum of the bytes received.
        found: String,
    },
    /// A disk without room for a download.
    #[error(
        "{} has no room for the remaining {missing} bytes of {url}; free that much, or set HF_HOME to a folder on another disk, then run again to go on",
        path.display()
    )]
    DiskFull {
        /// The partial file.
        path: PathBuf,
        /// The address.
        url: String,
        /// The bytes that are not written yet.
        missing: u64,
        /// The cause.
        source: io::Error,
    },
    /// A file of the cache that could not be read or written.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A model without weights that can be read.
    #[error("{name} has no weights as safetensors on the hub{}", in_place(found))]
    NoWeights {
        /// The name of the model.
        name: String,
        /// The contents found in place of the weights.
        found: InPlaceOfWeights,
    },
    /// An index of shards that cannot be read.
    #[error(transparent)]
    Index(#[from] CheckpointError),
}

/// Says what a model has in place of weights. On the hub, nothing is no incomplete download.
fn in_place(found: &InPlaceOfWeights) -> String {
    match found {
        InPlaceOfWeights::Nothing => "; take another model".into(),
        found => format!(": {found}"),
    }
}

impl HubError {
    pub(crate) fn answer(url: &str, reason: String) -> Self {
        Self::Answer {
            url: url.into(),
            reason,
        }
    }

    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io {
            action,
            path: path.into(),
            source,
        }
    }
}
