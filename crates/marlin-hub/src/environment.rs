//! The settings of Hugging Face's own programs: options, or the environment.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

use crate::{HubError, HubOptions};

/// The hub without another.
const ENDPOINT: &str = "https://huggingface.co";

/// The settings that apply.
pub(crate) struct Environment {
    /// The address of the hub, without a slash at its end.
    pub endpoint: String,
    pub cache: PathBuf,
    pub token: Option<String>,
    pub offline: bool,
}

impl Environment {
    /// Reads the environment for what the options leave open.
    pub fn read(options: &HubOptions) -> Result<Self, HubError> {
        let text = |name| variable(name).and_then(|value| value.into_string().ok());
        let path = |name| variable(name).map(PathBuf::from);
        let home = path("HF_HOME").or_else(|| {
            let caches = path("XDG_CACHE_HOME").or_else(|| Some(env::home_dir()?.join(".cache")));
            Some(caches?.join("huggingface"))
        });
        let in_home = |name| home.as_ref().map(|home| home.join(name));
        let cache = options.cache.clone();
        let cache = cache.or_else(|| path("HF_HUB_CACHE"));
        let token = options.token.clone().or_else(|| text("HF_TOKEN"));
        let token = token.or_else(|| {
            let file = path("HF_TOKEN_PATH").or_else(|| in_home("token"))?;
            std::fs::read_to_string(file).ok()
        });
        let endpoint = options.endpoint.clone().or_else(|| text("HF_ENDPOINT"));
        let endpoint = endpoint.unwrap_or_else(|| ENDPOINT.into());
        let is_url = |scheme| {
            endpoint
                .strip_prefix(scheme)
                .is_some_and(|host: &str| !host.is_empty())
        };
        if !is_url("https://") && !is_url("http://") {
            return Err(HubError::Endpoint { endpoint });
        }
        let offline = text("HF_HUB_OFFLINE").unwrap_or_default().to_uppercase();
        Ok(Self {
            endpoint: endpoint.trim_end_matches('/').into(),
            cache: cache.or_else(|| in_home("hub")).ok_or(HubError::NoHome)?,
            token: token
                .map(|token| token.trim().to_owned())
                .filter(|token| !token.is_empty()),
            offline: options.offline || matches!(&*offline, "1" | "ON" | "YES" | "TRUE"),
        })
    }
}

/// Returns an environment variable that is not empty.
fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}
