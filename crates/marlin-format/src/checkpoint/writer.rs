//! Writing a folder, all of it or nothing.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Component, Path, PathBuf};

use tempfile::TempDir;

use super::header::{self, Entry};
use super::{CheckpointError, INDEX_FILE, TensorSpec, WEIGHTS_FILE};

/// Writes a checkpoint: files such as `config.json`, and all tensors in one `model.safetensors`.
///
/// Everything goes into a temporary folder beside the target, which [`finish`](Self::finish)
/// renames. Dropped before that, nothing is left. Tensors go to disk as they come, in any order:
/// memory holds one at a time.
///
/// ```
/// use marlin_format::checkpoint::{Checkpoint, CheckpointWriter, Dtype, TensorSpec};
///
/// # let parent = tempfile::tempdir()?;
/// # let dir = parent.path().join("model");
/// let mut writer = CheckpointWriter::create(&dir)?;
/// writer.write_file("config.json", b"{}")?;
/// writer.declare([TensorSpec::new("norm.weight", Dtype::F32, [2])])?;
/// writer.write_tensor("norm.weight", bytemuck::cast_slice(&[1.0f32, 2.0]))?;
/// writer.finish()?;
/// assert_eq!(Checkpoint::open(&dir)?.tensor("norm.weight")?.to_f32()?, [1.0, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CheckpointWriter {
    target: PathBuf,
    temporary: TempDir,
    weights: Option<Weights>,
}

/// The weight file, once its tensors are declared.
#[derive(Debug)]
struct Weights {
    path: PathBuf,
    file: File,
    /// By name: true once it is written.
    entries: BTreeMap<String, (Entry, bool)>,
}

impl CheckpointWriter {
    /// Checks that the folder `dir` does not exist, or has nothing in it.
    ///
    /// # Errors
    /// [`CheckpointError::TargetNotEmpty`]; [`CheckpointError::Io`].
    pub fn expect_free(dir: &Path) -> Result<(), CheckpointError> {
        match fs::read_dir(dir).map(|mut entries| entries.next().is_none()) {
            Ok(true) => Ok(()),
            Ok(false) => Err(CheckpointError::TargetNotEmpty { dir: dir.into() }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(CheckpointError::io("use", dir, source)),
        }
    }

    /// Starts a checkpoint that will be the folder `dir`. Its parent is created where it does not
    /// exist.
    ///
    /// # Errors
    /// [`CheckpointError::TargetNotEmpty`] where `dir` exists with something in it;
    /// [`CheckpointError::Io`].
    pub fn create(dir: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        Self::start(dir.as_ref(), None)
    }

    /// As [`create`](Self::create), with the temporary folder in the folder `workplace`, of the
    /// same file system: one that a process which was killed leaves can be found there.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_in(workplace: &Path, dir: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        Self::start(dir.as_ref(), Some(workplace))
    }

    fn start(dir: &Path, workplace: Option<&Path>) -> Result<Self, CheckpointError> {
        let target = std::path::absolute(dir)
            .map_err(|source| CheckpointError::io("resolve", dir, source))?;
        Self::expect_free(&target)?;
        let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
            return Err(CheckpointError::TargetNotEmpty { dir: target });
        };
        fs::create_dir_all(parent)
            .map_err(|source| CheckpointError::io("create", parent, source))?;
        let (prefix, workplace) = (
            format!(".{}.", name.to_string_lossy()),
            workplace.unwrap_or(parent),
        );
        let temporary = tempfile::Builder::new()
            .prefix(&prefix)
            .tempdir_in(workplace)
            .map_err(|source| CheckpointError::io("create a folder in", workplace, source))?;
        Ok(Self {
            target,
            temporary,
            weights: None,
        })
    }

    /// Writes a file beside the weights.
    ///
    /// # Errors
    /// [`CheckpointError::FileName`] where `name` is not a plain file name or is one of the
    /// weights' own; [`CheckpointError::Io`].
    pub fn write_file(&mut self, name: &str, contents: &[u8]) -> Result<(), CheckpointError> {
        let path = self.path_of(name)?;
        fs::write(&path, contents).map_err(|source| CheckpointError::io("write", &path, source))
    }

    /// Copies a file beside the weights, under its own name.
    ///
    /// # Errors
    /// [`CheckpointError::FileName`] where the name is one of the weights' own;
    /// [`CheckpointError::Io`].
    pub fn copy_file(&mut self, from: &Path) -> Result<(), CheckpointError> {
        let name = from.file_name().unwrap_or_default().to_string_lossy();
        let path = self.path_of(&name)?;
        fs::copy(from, &path)
            .map(|_| ())
            .map_err(|source| CheckpointError::io("copy", from, source))
    }

    /// Declares the tensors. They are laid out and the header is written; their bytes follow by
    /// [`write_tensor`](Self::write_tensor).
    ///
    /// # Errors
    /// [`CheckpointError::Declare`] the second time; [`CheckpointError::Declaration`] for names
    /// that come twice and sizes that overflow; [`CheckpointError::Io`].
    pub fn declare(
        &mut self,
        tensors: impl IntoIterator<Item = TensorSpec>,
    ) -> Result<(), CheckpointError> {
        if self.weights.is_some() {
            return Err(CheckpointError::Declare { declared: true });
        }
        let specs: Vec<TensorSpec> = tensors.into_iter().collect();
        let (bytes, entries) =
            header::build(&specs).map_err(|source| CheckpointError::Declaration { source })?;
        let path = self.temporary.path().join(WEIGHTS_FILE);
        let write = || {
            let mut file = File::create(&path)?;
            file.write_all(&bytes)?;
            Ok(file)
        };
        let file = write().map_err(|source| CheckpointError::io("write", &path, source))?;
        let entries = entries
            .into_iter()
            .map(|entry| (entry.name.clone(), (entry, false)))
            .collect();
        self.weights = Some(Weights {
            path,
            file,
            entries,
        });
        Ok(())
    }

    /// Writes a declared tensor's bytes (row-major, little-endian), each tensor once.
    ///
    /// # Errors
    /// [`CheckpointError::Declare`], [`CheckpointError::NotDeclared`],
    /// [`CheckpointError::WrittenTwice`], [`CheckpointError::TensorSize`]; [`CheckpointError::Io`].
    pub fn write_tensor(&mut self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let weights = self
            .weights
            .as_mut()
            .ok_or(CheckpointError::Declare { declared: false })?;
        let Some((entry, written)) = weights.entries.get_mut(name) else {
            return Err(CheckpointError::NotDeclared {
                tensor: name.into(),
            });
        };
        if *written {
            return Err(CheckpointError::WrittenTwice {
                tensor: name.into(),
            });
        }
        let (expected, found) = (entry.end - entry.start, bytes.len());
        if expected != found {
            return Err(CheckpointError::TensorSize {
                tensor: name.into(),
                expected,
                found,
            });
        }
        weights
            .file
            .seek(SeekFrom::Start(entry.start as u64))
            .and_then(|_| weights.file.write_all(bytes))
            .map_err(|source| CheckpointError::io("write", &weights.path, source))?;
        *written = true;
        Ok(())
    }

    /// Moves the checkpoint to its target. Nothing is left of it where this fails.
    ///
    /// # Errors
    /// [`CheckpointError::Declare`] where no tensors were declared, [`CheckpointError::NotWritten`]
    /// where one was not written, [`CheckpointError::TargetNotEmpty`] where the target was filled
    /// in the meantime; [`CheckpointError::Io`].
    pub fn finish(self) -> Result<(), CheckpointError> {
        let Self {
            target,
            temporary,
            weights,
        } = self;
        let Weights {
            path,
            file,
            entries,
        } = weights.ok_or(CheckpointError::Declare { declared: false })?;
        let mut unwritten = entries
            .values()
            .filter(|(_, written)| !written)
            .map(|(entry, _)| &entry.name);
        if let Some(tensor) = unwritten.next() {
            return Err(CheckpointError::NotWritten {
                missing: 1 + unwritten.count(),
                tensor: tensor.clone(),
            });
        }
        file.sync_all()
            .map_err(|source| CheckpointError::io("write", &path, source))?;
        drop(file);

        Self::expect_free(&target)?;
        if target.exists() {
            fs::remove_dir(&target)
                .map_err(|source| CheckpointError::io("replace", &target, source))?;
        }
        fs::rename(temporary.path(), &target).map_err(|source| {
            CheckpointError::io("rename the temporary folder to", &target, source)
        })?;
        // Renamed: there is nothing left to remove.
        let _ = temporary.keep();
        Ok(())
    }

    fn path_of(&self, name: &str) -> Result<PathBuf, CheckpointError> {
        let mut components = Path::new(name).components();
        let plain = matches!((components.next(), components.next()), (Some(Component::Normal(first)), None) if first == name);
        if !plain || name == WEIGHTS_FILE || name == INDEX_FILE {
            return Err(CheckpointError::FileName { name: name.into() });
        }
        Ok(self.temporary.path().join(name))
    }
}
