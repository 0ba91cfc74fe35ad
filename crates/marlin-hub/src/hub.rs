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

/// A file in the hub's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteFile {
    /// The path in the repository.
    pub path: String,
    /// The size in bytes.
    pub size: u64,
    /// The checksum, which names the contents in the cache: for a file in LFS the SHA-256,
    /// otherwise the Git object ID.
    pub id: String,
    /// True for a file in LFS.
    pub is_lfs: bool,
}

/// A model on the hub.
pub(crate) struct Hub {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    name: ModelName,
}

impl Hub {
    pub fn new(environment: &Environment, name: ModelName) -> Self {
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
        Self {
            agent: config.build().into(),
            endpoint: environment.endpoint.clone(),
            token: environment.token.clone(),
            name,
        }
    }

    /// Returns the commit of a revision, and the files at the top of the repository.
    pub fn list(&self, revision: &str) -> Result<(String, Vec<RemoteFile>), HubError> {
        let Self { endpoint, name, .. } = self;
        let revision_part = encode(revision);
        let url = format!("{endpoint}/api/models/{name}/revision/{revision_part}?blobs=true");
        let mut response = self.get(&url, 0)?;
        let code = header(&response, "X-Error-Code");
        let not_found = match self.check(&url, &response) {
            Ok(()) => false,
            // So the hub answers for a model that does not exist, if it gets no token.
            Err(HubError::Gated { status: 401, .. }) if code != "GatedRepo" => true,
            Err(_) if response.status().as_u16() == 404 => true,
            Err(error) => return Err(error),
        };
        if not_found {
            return Err(HubError::NotFound {
                endpoint: endpoint.clone(),
                name: name.to_string(),
                revision: revision.into(),
            });
        }
        let failed = |reason| HubError::Answer {
            url: url.clone(),
            reason,
        };
        let text = response.body_mut().read_to_vec();
        let text = text.map_err(|error| unreachable(&url, error))?;
        let model: Model =
            serde_json::from_slice(&text).map_err(|error| failed(error.to_string()))?;
        if !is_hex(&model.sha, 40) {
            return Err(failed(format!(
                "the commit is {:?}, 40 hexadecimal digits expected",
                model.sha
            )));
        }
        // The path and the checksum name files in the cache.
        let is_name = |path: &str| !path.starts_with('.') && !path.contains(['/', '\\', ':', '\0']);
        let files = model.siblings.into_iter();
        let files = files.filter(|file| is_name(&file.rfilename));
        let files = files.map(|file| file.remote().map_err(failed));
        Ok((model.sha, files.collect::<Result<_, _>>()?))
    }

    /// Begins to download a file from an offset. Returns whether the answer begins there, and not
    /// at the beginning of the file, and its bytes.
    pub fn open(&self, url: &str, start: u64) -> Result<(bool, Body), HubError> {
        let response = self.get(url, start)?;
        self.check(url, &response)?;
        let is_rest = response.status().as_u16() == 206;
        Ok((is_rest, response.into_body()))
    }

    fn get(&self, url: &str, start: u64) -> Result<Response<Body>, HubError> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if start > 0 {
            request = request.header("Range", format!("bytes={start}-"));
        }
        request.call().map_err(|error| unreachable(url, error))
    }

    /// Returns the error of an answer that is one.
    fn check(&self, url: &str, response: &Response<Body>) -> Result<(), HubError> {
        let status = response.status().as_u16();
        let reason = header(response, "X-Error-Message");
        match status {
            200 | 206 => Ok(()),
            500.. => Err(unreachable(url, ureq::Error::StatusCode(status))),
            401 if reason.contains("Invalid credentials") => Err(HubError::Token {
                endpoint: self.endpoint.clone(),
            }),
            401 | 403 => Err(HubError::Gated {
                name: self.name.to_string(),
                url: format!("{}/{}", self.endpoint, self.name),
                status,
            }),
            _ => Err(HubError::Answer {
                url: url.into(),
                reason: format!("the hub answers {status} {reason}")
                    .trim_end()
                    .into(),
            }),
        }
    }

    /// Returns the name of the model.
    pub fn name(&self) -> String {
        self.name.to_string()
    }

    /// Returns the address of a file.
    pub fn url(&self, commit: &str, path: &str) -> String {
        let Self { endpoint, name, .. } = self;
        format!("{endpoint}/{name}/resolve/{commit}/{}", encode(path))
    }
}

/// The hub's description of a revision of a model.
#[derive(Deserialize)]
struct Model {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
}

impl Sibling {
    /// Returns the file, or what is wrong with its entry.
    fn remote(self) -> Result<RemoteFile, String> {
        let is_lfs = self.lfs.is_some();
        let (id, digits) = match self.lfs {
            Some(lfs) => (Some(lfs.sha256), 64),
            None => (self.blob_id, 40),
        };
        match (id, self.size) {
            (Some(id), Some(size)) if is_hex(&id, digits) => Ok(RemoteFile {
                path: self.rfilename,
                size,
                id,
                is_lfs,
            }),
            (id, size) => Err(format!(
                "{:?} has the size {size:?} and the checksum {id:?}, {digits} hexadecimal digits expected",
                self.rfilename
            )),
        }
    }
}

pub(crate) fn unreachable(url: &str, error: ureq::Error) -> HubError {
    HubError::Unreachable {
        url: url.into(),
        source: error.into_io(),
    }
}

fn header<'a>(response: &'a Response<Body>, name: &str) -> &'a str {
    let value = response.headers().get(name);
    value
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
}

/// Encodes a text as one part of a URL's path.
fn encode(text: &str) -> String {
    let encoded = |byte: u8| match byte {
        b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
        _ if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encoded).collect()
}
