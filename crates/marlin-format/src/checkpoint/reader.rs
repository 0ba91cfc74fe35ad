//! Opens checkpoint folders and finds their tensors.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use memmap2::Mmap;
use safetensors::Dtype;
use serde::Deserialize;

use super::bitmask::{self, Bitmasked};
use super::files::{self, MAX_INDEX_BYTES, read_file};
use super::folder::{self, WeightFile};
use super::header::{self, Entry};
use super::{CheckpointError, TensorView};
use crate::text::{excerpt, is_plain};
use crate::{JoinError, PlainWeight};

/// The tensors of a folder, mapped into memory. Opening a folder reads only the headers.
///
/// While the checkpoint is open, its files must not be changed in place or truncated. Renaming or
/// deleting files is allowed; [`CheckpointWriter`](super::CheckpointWriter) and downloads do so.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<(PathBuf, Mmap)>,
    /// The number of bytes that all files occupy on the disk, if the system reports it.
    on_disk: Option<u64>,
    /// The index into `files` and the header entry of each tensor, by tensor name.
    tensors: BTreeMap<String, (usize, Entry)>,
    /// The bitmasks of those `tensors` that are matrices with a bitmask, by tensor name. The entry
    /// in `tensors` has the shape of the matrix and the range of the stored values.
    bitmasked: BTreeMap<String, Bitmasked>,
    /// Buffers of recycled weights, for reuse.
    spare: Mutex<Vec<Vec<u32>>>,
}

/// The header of one tensor in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// The dtype of the tensor.
    pub dtype: Dtype,
    /// The shape of the tensor.
    pub shape: &'a [usize],
    /// The file that contains the tensor.
    pub path: &'a Path,
}

/// The first bytes of a Git LFS pointer, the text that replaces a large file.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// The part of an index that maps tensors to files.
#[derive(Deserialize)]
struct Index {
    /// The file name of each tensor, by tensor name.
    weight_map: BTreeMap<String, String>,
}

/// Reads an index of weight files. Returns the file name of each tensor, by tensor name.
///
/// # Errors
/// A [`CheckpointError`] for a file that cannot be read or is no index, and for an index that names
/// files outside its folder.
pub fn read_index(path: &Path) -> Result<BTreeMap<String, String>, CheckpointError> {
    let text = read_file(path, MAX_INDEX_BYTES)
        .map_err(|source| CheckpointError::io("read", path, source))?;
    let index: Index = serde_json::from_slice(&text).map_err(|source| CheckpointError::Index {
        path: path.into(),
        source,
    })?;
    let is_file_name = |shard: &str| {
        let mut components = Path::new(shard).components();
        let parts = (components.next(), components.next());
        matches!(parts, (Some(Component::Normal(_)), None)) && is_plain(shard)
    };
    match index.weight_map.values().find(|shard| !is_file_name(shard)) {
        None => Ok(index.weight_map),
        Some(shard) => Err(CheckpointError::ShardName {
            index: path.into(),
            shard: excerpt(shard),
        }),
    }
}

impl Checkpoint {
    /// Opens the weights of a folder. The weights are the first of these that exist:
    ///
    /// * `model.safetensors`
    /// * the shards that `model.safetensors.index.json` names
    /// * the shards of the only index under another name
    /// * the only safetensors file, such as AutoGPTQ's `gptq_model-4bit-128g.safetensors`
    ///
    /// If `dir` is a safetensors file, opens that file, whatever its name.
    ///
    /// Every header is checked against its file, so that names, sizes and offsets are valid. A
    /// float matrix that compressed-tensors stored as `sparse-24-bitmask` is a single tensor,
    /// `{layer}.weight`. Its values are expanded at the first access and stay in memory.
    ///
    /// # Errors
    /// A [`CheckpointError`] for these faults:
    ///
    /// * a folder without weights
    /// * an invalid index, or an index that names files outside the folder
    /// * shards that are missing, lack a tensor that the index names, or have a tensor in common
    /// * files that are truncated or too long, or whose headers are inconsistent
    pub fn open(dir: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let dir = dir.as_ref();
        let mut checkpoint = Self {
            dir: dir.into(),
            files: Vec::new(),
            on_disk: Some(0),
            tensors: BTreeMap::new(),
            bitmasked: BTreeMap::new(),
            spare: Mutex::default(),
        };
        if dir.is_file() {
            checkpoint.dir = dir.parent().map(Path::to_path_buf).unwrap_or_default();
            // A file that the caller names may be a link to any folder.
            checkpoint.add_file(
                fs::canonicalize(dir).map_err(|source| CheckpointError::io("open", dir, source))?,
            )?;
        } else {
            match folder::weight_file_of(dir)? {
                WeightFile::Single(name) => checkpoint.add_file(dir.join(name))?,
                WeightFile::Index(name) => checkpoint.add_shards(&dir.join(name))?,
            }
        }
        checkpoint.join_bitmasks()?;
        Ok(checkpoint)
    }

    /// Returns the folder of the checkpoint. For a single file, this is the folder of the file.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns true if the checkpoint has a tensor with this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns true if the checkpoint has a tensor of this layer, which is a tensor whose name is
    /// the layer's name, a dot and a further part.
    pub fn contains_layer(&self, layer: &str) -> bool {
        let prefix = format!("{layer}.");
        self.tensors
            .range(prefix.clone()..)
            .next()
            .is_some_and(|(name, _)| name.starts_with(&prefix))
    }

    /// Returns the dtype, shape and file of a tensor, or `None` if there is no such tensor.
    pub fn info(&self, name: &str) -> Option<TensorInfo<'_>> {
        let (file, entry) = self.tensors.get(name)?;
        Some(TensorInfo {
            dtype: entry.dtype,
            shape: &entry.shape,
            path: &self.files[*file].0,
        })
    }

    /// Returns a tensor.
    ///
    /// # Errors
    /// [`CheckpointError::MissingTensor`] if there is no such tensor, [`CheckpointError::Values`]
    /// for a bitmask that does not select two of every four values.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, CheckpointError> {
        let Some(tensor) = self.tensors.get(name) else {
            return Err(CheckpointError::MissingTensor {
                dir: self.dir.clone(),
                tensor: name.into(),
            });
        };
        let view = self.view(tensor);
        match self.bitmasked.get(name) {
            None => Ok(view),
            Some(matrix) => Ok(TensorView {
                bytes: matrix.values(view, self.view(&matrix.bitmask))?,
                ..view
            }),
        }
    }

    /// Returns the view of a tensor in a file.
    fn view<'a>(&'a self, (file, entry): &'a (usize, Entry)) -> TensorView<'a> {
        let (path, map) = &self.files[*file];
        // `header::parse` checked the range against this map.
        let bytes = &map[entry.start..entry.end];
        TensorView {
            name: &entry.name,
            path,
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes,
        }
    }

    /// Returns the number of bytes of all tensors.
    pub fn size_bytes(&self) -> usize {
        self.tensors
            .values()
            .map(|(_, entry)| entry.end - entry.start)
            .sum()
    }

    /// Returns true if the files occupy less than an eighth of their length on the disk. Nearly all
    /// of such files is holes, which are read as zeros. The files may be an unfinished download, or
    /// made to occupy readers for a long time. Returns false if the system does not report the disk
    /// usage.
    pub fn is_sparse_file(&self) -> bool {
        let bytes: usize = self.files.iter().map(|(_, map)| map.len()).sum();
        self.on_disk
            .is_some_and(|on_disk| on_disk > 0 && on_disk < bytes as u64 / 8)
    }

    /// Lets the system reclaim the memory pages of a tensor. The tensor stays readable from the
    /// file.
    ///
    /// Does nothing if the system has no such call or the checkpoint has no such tensor.
    pub fn release(&self, name: &str) {
        #[cfg(unix)]
        if let Some((file, entry)) = self.tensors.get(name) {
            let (_, map) = &self.files[*file];
            // SAFETY: the map is read-only and backed by a file, so a dropped page is read again
            // with the same bytes.
            let dropped = unsafe {
                map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    entry.start,
                    entry.end - entry.start,
                )
            };
            // On failure the pages stay in memory, which has no other effect.
            drop(dropped);
        }
        #[cfg(not(unix))]
        let _ = name;
    }

    /// Reuses the memory of a weight that is no longer needed for layers that are read later. The
    /// first access to new memory, page by page, takes longer than the conversion of a layer.
    pub fn recycle(&self, weight: PlainWeight) {
        self.spare
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(weight.into_parts().qweight);
    }

    /// Joins weights as [`PlainWeight::join`] does, in recycled memory.
    ///
    /// # Errors
    /// The errors of [`PlainWeight::join`].
    pub fn join(&self, parts: &[&PlainWeight]) -> Result<PlainWeight, JoinError> {
        PlainWeight::join_in(parts, |words| self.buffer(words))
    }

    /// Returns a buffer of the given number of words, with any contents. The buffer is the smallest
    /// recycled one that is large enough, or a new one.
    pub(super) fn buffer(&self, words: usize) -> Vec<u32> {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = spare
            .iter()
            .enumerate()
            .filter(|(_, buffer)| buffer.capacity() >= words);
        match fitting
            .min_by_key(|(_, buffer)| buffer.capacity())
            .map(|(index, _)| index)
        {
            Some(index) => {
                let mut buffer = spare.swap_remove(index);
                buffer.resize(words, 0);
                buffer
            }
            None => {
                // A new buffer replaces a spare one, so that there are never more buffers than
                // there were weights in use at the same time.
                spare.pop();
                vec![0; words]
            }
        }
    }

    /// Replaces the three tensors of every matrix with a bitmask by one tensor.
    fn join_bitmasks(&mut self) -> Result<(), CheckpointError> {
        let [shape, compressed, bitmask] = bitmask::TENSORS;
        let suffix = format!(".{bitmask}");
        let layers: Vec<String> = self
            .tensors
            .keys()
            .filter_map(|name| name.strip_suffix(&suffix))
            .map(String::from)
            .collect();
        for layer in layers {
            let names = [shape, compressed, bitmask].map(|tensor| format!("{layer}.{tensor}"));
            let weight = format!("{layer}.weight");
            if !names.iter().all(|name| self.contains(name)) || self.contains(&weight) {
                continue;
            }
            let [shape, compressed, bitmask] = [
                self.tensor(&names[0])?,
                self.tensor(&names[1])?,
                self.tensor(&names[2])?,
            ];
            let Some(shape) = bitmask::shape(shape, compressed, bitmask)? else {
                continue;
            };
            let [_, compressed, bitmask] = names.map(|name| self.tensors.remove(&name));
            if let (Some((file, compressed)), Some(bitmask)) = (compressed, bitmask) {
                let entry = Entry {
                    name: weight.clone(),
                    shape: shape.to_vec(),
                    ..compressed
                };
                self.tensors.insert(weight.clone(), (file, entry));
                self.bitmasked.insert(weight, Bitmasked::new(bitmask));
            }
        }
        Ok(())
    }

    fn add_shards(&mut self, index: &Path) -> Result<(), CheckpointError> {
        let weight_map = read_index(index)?;

        // One tensor name for each shard, for error messages. Every shard is opened once.
        let shards: BTreeMap<&str, &str> = weight_map
            .iter()
            .map(|(tensor, shard)| (shard.as_str(), tensor.as_str()))
            .collect();
        for (shard, tensor) in shards {
            let path = self.dir.join(shard);
            if !path.exists() {
                return Err(CheckpointError::MissingShard {
                    index: index.into(),
                    path,
                    tensor: excerpt(tensor),
                });
            }
            self.add_file(path)?;
        }

        for (tensor, shard) in &weight_map {
            let path = self.dir.join(shard);
            if self.info(tensor).is_none_or(|info| info.path != path) {
                return Err(CheckpointError::NotInShard {
                    index: index.into(),
                    path,
                    tensor: excerpt(tensor),
                });
            }
        }
        Ok(())
    }

    fn add_file(&mut self, path: PathBuf) -> Result<(), CheckpointError> {
        let (map, on_disk) = map(&path)?;
        if map.starts_with(LFS_POINTER) {
            return Err(CheckpointError::LfsPointer { path });
        }
        let entries = header::parse(&map).map_err(|source| CheckpointError::Header {
            path: path.clone(),
            source,
        })?;
        let file = self.files.len();
        for entry in entries {
            if let Some((first, _)) = self.tensors.get(&entry.name) {
                let first = self.files[*first].0.clone();
                return Err(CheckpointError::DuplicateTensor {
                    tensor: entry.name,
                    first,
                    second: path,
                });
            }
            self.tensors.insert(entry.name.clone(), (file, entry));
        }
        self.files.push((path, map));
        self.on_disk = self
            .on_disk
            .zip(on_disk)
            .map(|(before, bytes)| before + bytes);
        Ok(())
    }
}

/// Maps a file, and returns the map and the number of bytes that the file occupies on the disk.
fn map(path: &Path) -> Result<(Mmap, Option<u64>), CheckpointError> {
    let (file, metadata) =
        files::open(path).map_err(|source| CheckpointError::io("open", path, source))?;
    // SAFETY: the map is read-only and lives as long as the views into it. `Checkpoint` documents
    // that no process may truncate the file in the meantime; no way to map a file avoids this
    // condition.
    let map =
        unsafe { Mmap::map(&file) }.map_err(|source| CheckpointError::io("map", path, source))?;
    Ok((map, files::on_disk(&metadata)))
}
