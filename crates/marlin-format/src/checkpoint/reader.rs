//! Opening a folder and finding its tensors.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use memmap2::Mmap;
use safetensors::Dtype;
use serde::Deserialize;

use super::bitmask::{self, Bitmasked};
use super::files::{self, MAX_INDEX_BYTES, read_file};
use super::folder::{self, OtherName};
use super::header::{self, Entry};
use super::{CheckpointError, INDEX_FILE, TensorView, WEIGHTS_FILE};
use crate::text::{excerpt, is_plain};
use crate::{JoinError, PlainWeight};

/// The tensors of a folder, mapped into memory: opening reads the headers only.
///
/// While it is open, its files must not be changed in place or cut short. Renaming or deleting
/// them, as [`CheckpointWriter`](super::CheckpointWriter) and downloads do, is fine.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<(PathBuf, Mmap)>,
    /// Bytes that all files take on the disk, where the system reports them.
    on_disk: Option<u64>,
    /// By name: the index into `files`, and the tensor's entry in that file's header.
    tensors: BTreeMap<String, (usize, Entry)>,
    /// By name, those of `tensors` that are matrices of a bitmask: the entry has their shape, and
    /// the range of their stored values.
    bitmasked: BTreeMap<String, Bitmasked>,
    /// Words of weights that were given back.
    spare: Mutex<Vec<Vec<u32>>>,
}

/// The header of one tensor in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Its dtype.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: &'a [usize],
    /// The file it is in.
    pub path: &'a Path,
}

/// The first bytes of the text that Git LFS puts in place of a large file.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// The part of an index that names the files of tensors.
#[derive(Deserialize)]
struct Index {
    /// File names by tensor name.
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens the weights of a folder: `model.safetensors`, or else the shards that
    /// `model.safetensors.index.json` names, or else those of the only index of another name, or
    /// else the only safetensors file (AutoGPTQ's `gptq_model-4bit-128g.safetensors`). Of a
    /// safetensors file, which may have any name, opens that file.
    ///
    /// Every header is checked against its file: names, sizes and offsets are right from here on.
    /// Float matrices that compressed-tensors stored as `sparse-24-bitmask` are one tensor each,
    /// `{layer}.weight`, whose values are put in their places when they are first asked for, and
    /// stay in memory.
    ///
    /// # Errors
    /// A [`CheckpointError`] for a folder without weights; an index that is not one, or names files
    /// outside the folder; shards that are missing, lack a tensor the index names, or share one;
    /// and files that are truncated, too long, or whose headers lie.
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
        let (single, index) = (dir.join(WEIGHTS_FILE), dir.join(INDEX_FILE));
        if dir.is_file() {
            checkpoint.dir = dir.parent().map(Path::to_path_buf).unwrap_or_default();
            // A file that is named may be anywhere.
            checkpoint.add_file(
                fs::canonicalize(dir).map_err(|source| CheckpointError::io("open", dir, source))?,
            )?;
        } else if single.exists() {
            checkpoint.add_file(single)?;
        } else if index.exists() {
            checkpoint.add_shards(&index)?;
        } else {
            match folder::weights_of_another_name(dir)? {
                OtherName::File(path) => checkpoint.add_file(path)?,
                OtherName::Index(path) => checkpoint.add_shards(&path)?,
            }
        }
        checkpoint.join_bitmasks()?;
        Ok(checkpoint)
    }

    /// The folder it was opened from, or that its file is in.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns true if it has a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns true if it has a tensor of the layer of this name: one whose name continues with a
    /// dot.
    pub fn contains_layer(&self, layer: &str) -> bool {
        let prefix = format!("{layer}.");
        self.tensors
            .range(prefix.clone()..)
            .next()
            .is_some_and(|(name, _)| name.starts_with(&prefix))
    }

    /// Dtype, shape and file of a tensor, or `None` if it has no such tensor.
    pub fn info(&self, name: &str) -> Option<TensorInfo<'_>> {
        let (file, entry) = self.tensors.get(name)?;
        Some(TensorInfo {
            dtype: entry.dtype,
            shape: &entry.shape,
            path: &self.files[*file].0,
        })
    }

    /// A tensor.
    ///
    /// # Errors
    /// [`CheckpointError::MissingTensor`] where it has no such tensor, [`CheckpointError::Values`]
    /// for a bitmask that does not name two of every four values.
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

    /// A tensor of a file.
    fn view<'a>(&'a self, (file, entry): &'a (usize, Entry)) -> TensorView<'a> {
        let (path, map) = &self.files[*file];
        // `header::parse` checked the range against this very map.
        let bytes = &map[entry.start..entry.end];
        TensorView {
            name: &entry.name,
            path,
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes,
        }
    }

    /// Bytes of all tensors.
    pub fn size_bytes(&self) -> usize {
        self.tensors
            .values()
            .map(|(_, entry)| entry.end - entry.start)
            .sum()
    }

    /// Returns true if the files take less than an eighth of their bytes on the disk: nearly all of
    /// them is holes, which are read as zeros. A download that was not finished may be so, and a
    /// file that is to keep its readers busy. False where the system does not report it.
    pub fn is_hollow(&self) -> bool {
        let bytes: usize = self.files.iter().map(|(_, map)| map.len()).sum();
        self.on_disk
            .is_some_and(|on_disk| on_disk > 0 && on_disk < bytes as u64 / 8)
    }

    /// Lets the system take back the memory that a tensor's pages are in. It stays readable, from
    /// the file.
    ///
    /// Does nothing where the system has no such call, or the checkpoint no such tensor.
    pub fn release(&self, name: &str) {
        #[cfg(unix)]
        if let Some((file, entry)) = self.tensors.get(name) {
            let (_, map) = &self.files[*file];
            // SAFETY: the map is read-only and of a file, so that a page which was dropped is read
            // again with the same bytes.
            let dropped = unsafe {
                map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    entry.start,
                    entry.end - entry.start,
                )
            };
            // If it fails, the pages stay: that costs only memory.
            drop(dropped);
        }
        #[cfg(not(unix))]
        let _ = name;
    }

    /// Takes back the memory of a weight that is not needed any more: layers that are read from
    /// here on go there. Memory that is new to the process takes longer, page by page, than
    /// converting a layer.
    pub fn recycle(&self, weight: PlainWeight) {
        self.spare
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(weight.into_parts().words);
    }

    /// [`PlainWeight::join`] in memory that was given back.
    ///
    /// # Errors
    /// As [`PlainWeight::join`].
    pub fn join(&self, parts: &[&PlainWeight]) -> Result<PlainWeight, JoinError> {
        PlainWeight::join_in(parts, |words| self.buffer(words))
    }

    /// A buffer of this many words, whatever they are: the smallest that is large enough of those
    /// that were given back.
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
                // In its place: there are never more of them than there were weights at a time.
                spare.pop();
                vec![0; words]
            }
        }
    }

    /// Makes one tensor of every three that are a matrix with a bitmask.
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
        let text = read_file(index, MAX_INDEX_BYTES)
            .map_err(|source| CheckpointError::io("read", index, source))?;
        let parsed: Index =
            serde_json::from_slice(&text).map_err(|source| CheckpointError::Index {
                path: index.into(),
                source,
            })?;

        // A first tensor for each shard, to name in errors; every shard is opened once.
        let shards: BTreeMap<&str, &str> = parsed
            .weight_map
            .iter()
            .map(|(tensor, shard)| (shard.as_str(), tensor.as_str()))
            .collect();
        for (shard, tensor) in shards {
            let mut components = Path::new(shard).components();
            let is_file_name = matches!(
                (components.next(), components.next()),
                (Some(Component::Normal(_)), None)
            );
            if !is_file_name || !is_plain(shard) {
                return Err(CheckpointError::ShardName {
                    index: index.into(),
                    shard: excerpt(shard),
                });
            }
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

        for (tensor, shard) in &parsed.weight_map {
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

/// A file, and the bytes that it takes on the disk.
fn map(path: &Path) -> Result<(Mmap, Option<u64>), CheckpointError> {
    let (file, metadata) =
        files::open(path).map_err(|source| CheckpointError::io("open", path, source))?;
    // SAFETY: the map is read-only and lives as long as the views into it. That no process
    // truncates the file in the meantime is a condition that `Checkpoint` documents; there is no
    // way to map a file without it.
    let map =
        unsafe { Mmap::map(&file) }.map_err(|source| CheckpointError::io("map", path, source))?;
    Ok((map, files::on_disk(&metadata)))
}
