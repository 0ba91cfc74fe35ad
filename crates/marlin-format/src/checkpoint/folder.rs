//! The files of a folder that have the weights.

use super::{CheckpointError, INDEX_FILE, WEIGHTS_FILE};
use std::ffi::OsStr;
use std::fmt;
use std::path::Path;

/// The file that the weights of a folder are opened by. The field is its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WeightFile {
    /// A single safetensors file.
    Single(String),
    /// The index of several shards.
    Index(String),
}

/// The contents of a folder without readable weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InPlaceOfWeights {
    /// No files that could be weights.
    Nothing,
    /// A LoRA adapter (`adapter_model.safetensors`).
    Adapter,
    /// Weights in an unsupported form: PyTorch pickles (`.bin`, `.pt`, `.pth`) or GGUF. The field
    /// is the name of the first such file.
    OtherForm(String),
    /// Several safetensors files without an index. The fields are the first two names, sorted.
    Several(String, String),
}

impl fmt::Display for InPlaceOfWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("is the download complete?"),
            Self::Adapter => f.write_str("it is the folder of a LoRA adapter: open the model that it belongs to, or merge the two first"),
            Self::OtherForm(name) => {
                write!(
                    f,
                    "it holds {name:?}, a form that is not read: save the model as safetensors (`save_pretrained` of transformers does)"
                )
            }
            Self::Several(first, second) => {
                write!(f, "it holds {first:?}, {second:?} and no index that says what they are: open one of them by its path")
            }
        }
    }
}

/// Returns the weights among the files of a folder, given their names: those that
/// [`Checkpoint::open`](super::Checkpoint::open) opens.
///
/// # Errors
/// What the folder has in place of weights that are read.
pub fn weight_file(names: &[String]) -> Result<WeightFile, InPlaceOfWeights> {
    let has = |wanted: &str| names.iter().any(|name| name == wanted);
    if has(WEIGHTS_FILE) {
        return Ok(WeightFile::Single(WEIGHTS_FILE.into()));
    }
    if has(INDEX_FILE) {
        return Ok(WeightFile::Index(INDEX_FILE.into()));
    }
    let mut names: Vec<&String> = names.iter().collect();
    names.sort();
    let with = |ending: &'static str| {
        let names = names.iter().copied();
        names.filter(move |name| name.ends_with(ending) && !name.starts_with('.'))
    };
    let (adapters, files): (Vec<&String>, Vec<&String>) =
        with(".safetensors").partition(|name| name.starts_with("adapter_"));
    let indices: Vec<&String> = with(".safetensors.index.json").collect();
    let other_form = || {
        names.iter().find(|name| {
            matches!(
                Path::new(name).extension().and_then(OsStr::to_str),
                Some("bin" | "pt" | "pth" | "gguf")
            )
        })
    };
    match (indices.as_slice(), files.as_slice()) {
        ([index], _) => Ok(WeightFile::Index((*index).clone())),
        (_, [file]) => Ok(WeightFile::Single((*file).clone())),
        (_, [first, second, ..]) => Err(InPlaceOfWeights::Several(
            (*first).clone(),
            (*second).clone(),
        )),
        _ if !adapters.is_empty() => Err(InPlaceOfWeights::Adapter),
        _ => Err(other_form().map_or(InPlaceOfWeights::Nothing, |name| {
            InPlaceOfWeights::OtherForm((*name).clone())
        })),
    }
}

/// Returns the weights of a folder. Links to files that do not exist do not count.
pub(super) fn weight_file_of(dir: &Path) -> Result<WeightFile, CheckpointError> {
    let names = match std::fs::read_dir(dir) {
        Ok(entries) => entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| dir.join(name).exists())
            .collect(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(source) => return Err(CheckpointError::io("read", dir, source)),
    };
    weight_file(&names).map_err(|found| CheckpointError::NoWeights {
        dir: dir.into(),
        found,
    })
}
