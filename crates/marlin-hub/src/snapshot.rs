//! The files of a revision of a model.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use marlin_format::checkpoint::{WeightFile, read_index, weight_file};

use crate::cache::{Cache, has_size};
use crate::download::download as download_file;
use crate::hub::{Hub, Listing, RemoteFile};
use crate::{HubError, HubProgress};

const CONFIG: &str = "config.json";

/// The files beside the weights that are read, or that a quantised copy takes over.
const FILES: [&str; 15] = [
    CONFIG,
    "adapter_config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "hf_quant_config.json",
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

/// Downloads the files of a revision that are needed and not in the cache. Returns the folder with
/// all of them.
pub(crate) fn download(
    hub: &Hub,
    cache: &Cache,
    without_weights: bool,
    mut on_progress: impl FnMut(HubProgress<'_>),
) -> Result<PathBuf, HubError> {
    let Listing { commit, files } = hub.list()?;
    let (mut needed, mut others): (Vec<_>, Vec<_>) =
        files.into_iter().partition(|file| is_needed(&file.path));
    let mut index = None;
    if !without_weights {
        let names: Vec<String> = others.iter().map(|file| file.path.clone()).collect();
        let weights = weight_file(&names).map_err(|found| HubError::NoWeights {
            name: hub.name.to_string(),
            found,
        })?;
        let (WeightFile::Single(name) | WeightFile::Index(name)) = &weights;
        needed.extend(others.extract_if(.., |file| file.path == *name));
        index = needed
            .last()
            .cloned()
            .filter(|_| matches!(weights, WeightFile::Index(_)));
    }
    fetch(hub, cache, &commit, &needed, &mut on_progress)?;
    if let Some(index) = index {
        let weight_map = read_index(&cache.file(&commit, &index))?;
        let mut names: BTreeSet<String> = weight_map.into_values().collect();
        let shards = others.extract_if(.., |file| names.remove(&file.path));
        let shards: Vec<RemoteFile> = shards.collect();
        if let Some(name) = names.first() {
            let reason = format!("it names {name:?}, which the model does not have");
            return Err(HubError::answer(&hub.url(&commit, &index.path), reason));
        }
        fetch(hub, cache, &commit, &shards, &mut on_progress)?;
        needed.extend(shards);
    }
    // The folder counts as complete when it has a config.
    needed.sort_by_key(|file| file.path == CONFIG);
    for file in &needed {
        cache.link(&commit, file)?;
    }
    cache.set_commit(&hub.revision, &commit)?;
    Ok(cache.snapshot(&commit))
}

/// Downloads those of the files that are not in the cache.
fn fetch(
    hub: &Hub,
    cache: &Cache,
    commit: &str,
    files: &[RemoteFile],
    on_progress: &mut impl FnMut(HubProgress<'_>),
) -> Result<(), HubError> {
    let mut missing: Vec<&RemoteFile> = files.iter().collect();
    missing.retain(|file| !has_size(&cache.file(commit, file), file));
    let total = missing.iter().map(|file| file.size).sum();
    let mut before = 0;
    for file in missing {
        download_file(hub, cache, commit, file, |bytes| {
            on_progress(HubProgress {
                file: &file.path,
                done: before + bytes,
                total,
            });
        })?;
        before += file.size;
    }
    Ok(())
}

/// Returns whether a snapshot in the cache has a config and, unless they are left out, all its
/// weights. Another program may have downloaded only a part of the model.
pub(crate) fn is_complete(snapshot: &Path, without_weights: bool) -> bool {
    let Ok(entries) = snapshot.read_dir() else {
        return false;
    };
    let names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        // A link to a file that is not there does not count.
        .filter(|name| snapshot.join(name).is_file())
        .collect();
    let has = |wanted: &str| names.iter().any(|name| name == wanted);
    let has_weights = || match weight_file(&names) {
        // One of several shards, whose index is not there yet.
        Ok(WeightFile::Single(name)) => !name.contains("-of-") || name.contains("-00001-of-00001."),
        Ok(WeightFile::Index(index)) => read_index(&snapshot.join(index))
            .is_ok_and(|shards| shards.values().all(|shard| has(shard))),
        Err(_) => false,
    };
    has(CONFIG) && (without_weights || has_weights())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_snapshot_with_a_missing_shard_is_not_complete() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        assert!(!is_complete(&dir.path().join("nowhere"), true));
        write("model-00001-of-00002.safetensors", "");
        write(CONFIG, "{}");
        assert!(is_complete(dir.path(), true) && !is_complete(dir.path(), false));
        let map =
            r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "b.safetensors"}}"#;
        write("model.safetensors.index.json", map);
        assert!(!is_complete(dir.path(), false));
        write("b.safetensors", "");
        assert!(is_complete(dir.path(), false));
        fs::remove_file(dir.path().join(CONFIG)).unwrap();
        assert!(!is_complete(dir.path(), false) && !is_complete(dir.path(), true));
    }
}
