//! Contents of a folder without `model.safetensors`.

use super::CheckpointError;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

/// Weights under a file name other than `model.safetensors`.
pub(super) enum OtherName {
    /// A single safetensors file.
    File(PathBuf),
    /// The index of several shards.
    Index(PathBuf),
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

/// Returns the only index of a folder, or otherwise its only safetensors file.
pub(super) fn weights_of_another_name(dir: &Path) -> Result<OtherName, CheckpointError> {
    let entries = std::fs::read_dir(dir).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => CheckpointError::NoWeights {
            dir: dir.into(),
            found: InPlaceOfWeights::Nothing,
        },
        _ => CheckpointError::io("read", dir, source),
    })?;
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    let with = |ending: &'static str| {
        names
            .iter()
            .filter(move |name| name.ends_with(ending) && !name.starts_with('.'))
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
    let found = match (indices.as_slice(), files.as_slice()) {
        ([index], _) => return Ok(OtherName::Index(dir.join(index))),
        (_, [file]) => return Ok(OtherName::File(dir.join(file))),
        (_, [first, second, ..]) => InPlaceOfWeights::Several((*first).clone(), (*second).clone()),
        _ if !adapters.is_empty() => InPlaceOfWeights::Adapter,
        _ => other_form().map_or(InPlaceOfWeights::Nothing, |name| {
            InPlaceOfWeights::OtherForm(name.clone())
        }),
    };
    Err(CheckpointError::NoWeights {
        dir: dir.into(),
        found,
    })
}
