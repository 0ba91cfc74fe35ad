//! The errors of a command.

use crate::device::DeviceName;
use std::path::PathBuf;

/// An error that ends the program. Its message is all that the user sees.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    #[error(transparent)]
    Model(#[from] marlin_lm::ModelError),
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(#[from] marlin_lm::hub::HubError),
    #[cfg(not(feature = "hub"))]
    #[error(
        "there is no folder {model}, and this build opens no models by name; build it with the feature hub",
        model = model.display()
    )]
    NoHub { model: PathBuf },
    #[error(transparent)]
    Text(#[from] marlin_lm::TextError),
    #[error(transparent)]
    Marlin(#[from] burn_marlin::Error),
    #[error(transparent)]
    Checkpoint(#[from] marlin_format::checkpoint::CheckpointError),
    #[error("{dir}: {count} {}; `generate` does not take the folder as it is", if *count == 1 { "fault" } else { "faults" }, dir = dir.display())]
    Faults { dir: PathBuf, count: usize },
    #[error("{count} {}", if *count == 1 { "check failed" } else { "checks failed" })]
    Checks { count: usize },
    #[error("cannot read {path}", path = path.display())]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{path}: the text is not UTF-8", path = path.display())]
    NotUtf8 { path: PathBuf },
    #[error("{path}", path = path.display())]
    ShortText {
        path: PathBuf,
        source: Box<marlin_lm::ModelError>,
    },
    #[error("cannot write {path}", path = path.display())]
    Write {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("the plot could not be drawn: {0}")]
    Plot(String),
    #[error("--method gptq, sparsegpt and awq need text to calibrate on: --calibration FILE")]
    NoCalibration,
    #[error("--calibration is for --method gptq, sparsegpt and awq; rounding looks at no text")]
    CalibrationOfRtn,
    #[error("--awq is for --method gptq and sparsegpt; with rounding it is --method awq")]
    AwqOfRtn,
    #[error("--device {name}: {reason}")]
    Device { name: &'static str, reason: String },
    #[error(
        "--tensor-parallel {count}: {found} {} of this kind {} present",
        if *found == 1 { "device" } else { "devices" },
        if *found == 1 { "is" } else { "are" }
    )]
    FewDevices { count: usize, found: usize },
    #[error(transparent)]
    UnknownCard(#[from] crate::advise::cards::UnknownCard),
    #[error(
        "advice is about NVIDIA cards, and the device is {device}; --card NAME takes one that is not at hand: {cards}"
    )]
    NoCard { device: String, cards: String },
    #[error("--prompt: {prompt} tokens and a next one do not fit a cache of {positions}")]
    LongPrompt { prompt: usize, positions: usize },
    #[error("--ids: token {id} is not below the vocabulary's {vocab_size}")]
    TokenId { id: u32, vocab_size: usize },
    #[error("--ids: {found} tokens do not fit a cache of {max_len}")]
    TooManyIds { found: usize, max_len: usize },
    #[error("the device did not return the logits: {0}")]
    Read(String),
    #[error(
        "the logit of token {token} is {found}; are the weights broken, or the activations too large for their dtype?"
    )]
    NotFinite { token: usize, found: f32 },
    #[cfg(feature = "serve")]
    #[error(transparent)]
    Server(#[from] marlin_serve::model::ModelServerError),
    #[cfg(feature = "serve")]
    #[error(transparent)]
    Api(#[from] marlin_http::OptionsError),
    #[cfg(feature = "serve")]
    #[error(transparent)]
    Tls(#[from] marlin_http::TlsError),
    #[cfg(feature = "serve")]
    #[error("the threads of the server could not be started")]
    Runtime(#[source] std::io::Error),
    #[cfg(feature = "serve")]
    #[error("cannot listen on {address}; --port takes another port, --host another address")]
    Listen {
        address: std::net::SocketAddr,
        source: std::io::Error,
    },
    #[cfg(feature = "serve")]
    #[error("--{option}: {reason}")]
    LoadOption { option: String, reason: String },
    #[cfg(feature = "serve")]
    #[error(
        "{host} has the address {address}, which is no loopback address, and a load test of a server of others is an attack; --allow-remote says that this one may be tested"
    )]
    RemoteLoad {
        host: String,
        address: std::net::IpAddr,
    },
    #[cfg(feature = "serve")]
    #[error(transparent)]
    Load(marlin_load::LoadError),
    #[error("the input could not be read")]
    Input(#[source] std::io::Error),
    #[error("the output could not be written")]
    Output(#[from] std::io::Error),
    #[error("the output is no JSON")]
    Json(#[from] serde_json::Error),
}

impl CliError {
    /// Returns the error of a device that this machine or this build does not have.
    pub fn no_device(name: DeviceName) -> Self {
        Self::Device {
            name: name.as_str(),
            reason: "no such device is present; `burn-marlin doctor` says what is missing".into(),
        }
    }
}
