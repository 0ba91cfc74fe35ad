//! Requests to the hub.

use std::time::Duration;

use serde::Deserialize;
use ureq::http::Response;
use ureq::{Agent, Body};

use crate::HubError;
use crate::environment::Environment;
use crate::name::{ModelName, is_hex};

/// The time after which a hub that sends nothing is given up.
const QUIET: Duration = Duration::from_secs(60);

/// The hub's description of a revision of a model.
#[derive(Deserialize)]
pub(crate) struct Listing {
    /// The commit.
    #[serde(rename = "sha")]
    pub commit: String,
    /// The files at the top of the repository.
    #[serde(rename = "siblings")]
    pub files: Vec<RemoteFile>,
}

/// A file in the hub's list.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RemoteFile {
    /// The path in the repository.
    #[serde(rename = "rfilename")]
    pub path: String,
    /// The size in bytes.
    pub size: u64,
    /// The Git object ID: of the file, or of the pointer to a file in LFS.
    pub blob_id: String,
    /// Set for a file in LFS.
    pub lfs: Option<Lfs>,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Lfs {
    pub sha256: String,
}

impl RemoteFile {
    /// Returns the checksum, which names the contents in the cache: for a file in LFS the SHA-256,
    /// otherwise the Git object ID.
    pub fn checksum(&self) -> &str {
        match &self.lfs {
            Some(lfs) => &lfs.sha256,
            None => &self.blob_id,
        }
    }
}

/// A revision of a model on the hub.
pub(crate) struct Hub {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    pub name: ModelName,
    pub revision: String,
}

impl Hub {
    pub fn new(environment: &Environment, name: ModelName, revision: &str) -> Self {
        let config = Agent::config_builder()
            // Errors of the hub have their reason in headers.
            .http_status_as_error(false)
            .redirect_auth_headers(ureq::config::RedirectAuthHeaders::SameHost)
            .user_agent(concat!("burn-marlin/", env!("CARGO_PKG_VERSION")))
            // Offsets in a file are those of its own bytes.
            .accept_encoding("identity")
            .timeout_resolve(Some(QUIET))
            .timeout_connect(Some(QUIET))
            .timeout_per_read(Some(QUIET));
        // A proxy reaches neither this machine's mirror nor that of the tests.
        let config = if is_loopback(&environment.endpoint) {
            config.proxy(None)
        } else {
            config
        };
        Self {
            agent: config.build().into(),
            endpoint: environment.endpoint.clone(),
            token: environment.token.clone(),
            name,
            revision: revision.into(),
        }
    }

    /// Returns the commit and the files of the revision.
    pub fn list(&self) -> Result<Listing, HubError> {
        let (endpoint, name, revision) = (&self.endpoint, &self.name, encode(&self.revision));
        let url = format!("{endpoint}/api/models/{name}/revision/{revision}?blobs=true");
        let mut response = self.get(&url, 0)?;
        let text = response.body_mut().read_to_vec();
        let text = text.map_err(|error| unreachable(&url, error))?;
        let mut listing: Listing = serde_json::from_slice(&text)
            .map_err(|error| HubError::answer(&url, format!("the list of files: {error}")))?;
        // Paths and checksums name files in the cache.
        let is_name = |path: &str| !path.starts_with('.') && !path.contains(['/', '\\', ':', '\0']);
        listing.files.retain(|file| is_name(&file.path));
        let digits = |file: &RemoteFile| if file.lfs.is_some() { 64 } else { 40 };
        let is_valid = |file: &RemoteFile| is_hex(file.checksum(), digits(file));
        if is_hex(&listing.commit, 40) && listing.files.iter().all(is_valid) {
            Ok(listing)
        } else {
            let reason = "the list of files: commits and checksums must be hexadecimal";
            Err(HubError::answer(&url, reason.into()))
        }
    }

    /// Begins to download a file from an offset. Returns whether the answer begins there, and not
    /// at the beginning of the file, and its bytes.
    pub fn open(&self, url: &str, start: u64) -> Result<(bool, Body), HubError> {
        let response = self.get(url, start)?;
        let is_rest = response.status().as_u16() == 206;
        Ok((is_rest, response.into_body()))
    }

    /// Returns an answer that is no error.
    fn get(&self, url: &str, start: u64) -> Result<Response<Body>, HubError> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if start > 0 {
            request = request.header("Range", format!("bytes={start}-"));
        }
        let response = request.call().map_err(|error| unreachable(url, error))?;
        let status = response.status().as_u16();
        let header = |name| {
            let value = response.headers().get(name);
            value
                .and_then(|value| value.to_str().ok())
                .unwrap_or_default()
        };
        let (code, reason) = (header("X-Error-Code"), header("X-Error-Message"));
        let (endpoint, name) = (self.endpoint.clone(), self.name.to_string());
        Err(match status {
            200 | 206 => return Ok(response),
            500.. => unreachable(url, ureq::Error::StatusCode(status)),
            401 if reason.contains("Invalid credentials") => HubError::Token { endpoint },
            // Without a token the hub does not tell whether a model exists.
            404 | 401 if code != "GatedRepo" => HubError::NotFound {
                endpoint,
                name,
                revision: self.revision.clone(),
            },
            401 | 403 => HubError::Gated {
                url: format!("{endpoint}/{name}"),
                name,
                status,
            },
            _ => HubError::answer(url, format!("the hub answers {status} {reason}")),
        })
    }

    /// Returns the address of a file.
    pub fn url(&self, commit: &str, path: &str) -> String {
        let Self { endpoint, name, .. } = self;
        format!("{endpoint}/{name}/resolve/{commit}/{}", encode(path))
    }
}

/// Returns whether an address is one of this machine.
fn is_loopback(endpoint: &str) -> bool {
    let host = endpoint.split_once("://").map_or("", |(_, host)| host);
    ["127.", "localhost", "[::1]"]
        .iter()
        .any(|start| host.starts_with(start))
}

fn unreachable(url: &str, error: ureq::Error) -> HubError {
    HubError::Unreachable {
        url: url.into(),
        source: error.into_io(),
    }
}

/// Encodes a text as one part of a URL's path.
fn encode(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    let encoded = |byte| match is_plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    text.bytes().map(encoded).collect()
}
