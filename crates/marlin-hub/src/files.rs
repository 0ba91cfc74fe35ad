//! Which files of a model are needed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use marlin_format::checkpoint::{MAX_INDEX_BYTES, read_file};
use serde::Deserialize;

use crate::HubError;

const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const INDEX_ENDING: &str = ".safetensors.index.json";
pub(crate) const CONFIG: &str = "config.json";

/// The files beside the weights that are read, or that a quantised copy takes over.
const FILES: [&str; 14] = [
    CONFIG,
    "adapter_config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "quant_config.json",
    "quantize_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// Returns whether a file beside the weights is downloaded, given its path in the repository of a
/// model.
pub fn is_needed(path: &str) -> bool {
    FILES.contains(&path)
}

/// A file in the hub's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteFile {
    /// The path in the repository.
    pub path: String,
    /// The size in bytes.
    pub size: u64,
    /// The Git object ID: of the file, or of the pointer to a file in LFS.
    pub object_id: String,
    /// True for a file in LFS.
    pub is_lfs: bool,
}

/// Where the weights of a folder are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Weights {
    /// A single file.
    File(String),
    /// The index of shards.
    Index(String),
}

/// Returns where the weights are that a folder with these files is opened with; otherwise what is
/// there in their place. The rules are those of `marlin_format::checkpoint::Checkpoint::open`.
pub(crate) fn weights<'a>(
    paths: impl Iterator<Item = &'a str> + Clone,
) -> Result<Weights, Option<String>> {
    let has = |wanted| paths.clone().any(|path| path == wanted);
    let with = |ending: &'static str| {
        let ends = move |path: &&str| path.ends_with(ending) && !path.starts_with('.');
        paths.clone().filter(ends)
    };
    if has(WEIGHTS) {
        return Ok(Weights::File(WEIGHTS.into()));
    }
    if has(INDEX) {
        return Ok(Weights::Index(INDEX.into()));
    }
    let indices: Vec<&str> = with(INDEX_ENDING).collect();
    let (adapters, files): (Vec<&str>, Vec<&str>) =
        with(".safetensors").partition(|path| path.starts_with("adapter_"));
    match (&*indices, &*files) {
        ([index], _) => Ok(Weights::Index((*index).into())),
        (_, [file]) => Ok(Weights::File((*file).into())),
        (_, [first, second, ..]) => Err(Some(format!(
            "several files, such as {first} and {second}, and no index of them"
        ))),
        _ if !adapters.is_empty() => Err(Some(
            "a LoRA adapter: take the model that it belongs to".into(),
        )),
        _ => Err([".bin", ".pt", ".pth", ".gguf"]
            .into_iter()
            .find_map(|ending| with(ending).next())
            .map(|path| format!("{path}, a form that is not read"))),
    }
}

/// Returns the names of the shards in an index.
pub(crate) fn shards(index: &Path) -> Result<BTreeSet<String>, HubError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text =
        read_file(index, MAX_INDEX_BYTES).map_err(|source| HubError::io("read", index, source))?;
    let index: Index = serde_json::from_slice(&text).map_err(|source| HubError::Index {
        path: index.into(),
        source,
    })?;
    Ok(index.weight_map.into_values().collect())
}

/// Returns whether a snapshot in the cache has a config and all its weights. Another program may
/// have downloaded only a part of the model.
pub(crate) fn is_complete(snapshot: &Path) -> bool {
    let Ok(entries) = snapshot.read_dir() else {
        return false;
    };
    let paths: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        // A link to a file that is not there does not count.
        .filter(|path| snapshot.join(path).is_file())
        .collect();
    let has = |wanted: &str| paths.iter().any(|path| path == wanted);
    let has_weights = match weights(paths.iter().map(String::as_str)) {
        // One of several shards, whose index is not there yet.
        Ok(Weights::File(file)) => !file.contains("-of-") || file.contains("-00001-of-00001."),
        Ok(Weights::Index(index)) => shards(&snapshot.join(index))
            .is_ok_and(|shards| !shards.is_empty() && shards.iter().all(|shard| has(shard))),
        Err(_) => false,
    };
    has(CONFIG) && has_weights
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn of(paths: &[&str]) -> Result<Weights, Option<String>> {
        weights(paths.iter().copied())
    }

    #[test]
    fn the_weights_are_those_that_a_folder_is_opened_with() {
        let file = |name: &str| Ok(Weights::File(name.into()));
        let index = |name: &str| Ok(Weights::Index(name.into()));
        let consolidated = "consolidated.safetensors";
        assert_eq!(of(&[consolidated, WEIGHTS, INDEX]), file(WEIGHTS));
        assert_eq!(of(&[consolidated, INDEX]), index(INDEX));
        assert_eq!(
            of(&["a.safetensors.index.json"]),
            index("a.safetensors.index.json")
        );
        assert_eq!(of(&[consolidated, CONFIG]), file(consolidated));
    }

    #[test]
    fn a_model_without_readable_weights_says_what_it_has() {
        let words = |paths: &[&str]| of(paths).unwrap_err();
        assert_eq!(words(&[CONFIG]), None);
        for (paths, word) in [
            (["a.safetensors", "b.safetensors"], "no index"),
            (["adapter_model.safetensors", CONFIG], "LoRA"),
            (["pytorch_model.bin", CONFIG], "pytorch_model.bin"),
        ] {
            assert!(words(&paths).unwrap().contains(word), "{paths:?}");
        }
    }

    #[test]
    fn a_snapshot_with_a_missing_shard_is_not_complete() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        assert!(!is_complete(&dir.path().join("nowhere")));
        write("model-00001-of-00002.safetensors", "");
        write(CONFIG, "{}");
        assert!(!is_complete(dir.path()));
        let map =
            r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "b.safetensors"}}"#;
        write(INDEX, map);
        assert!(!is_complete(dir.path()));
        write("b.safetensors", "");
        assert!(is_complete(dir.path()));
        fs::remove_file(dir.path().join(CONFIG)).unwrap();
        assert!(!is_complete(dir.path()));
    }
}
