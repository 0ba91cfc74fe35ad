//! Writes checkpoint folders, completely or not at all.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Component, Path, PathBuf};

use tempfile::TempDir;

use super::header::{self, Entry};
use super::{CheckpointError, INDEX_FILE, TensorSpec, WEIGHTS_FILE};

/// A writer of a checkpoint: files such as `config.json`, and all tensors in one
/// `model.safetensors`.
///
/// All files are written to a temporary folder beside the target, which [`finish`](Self::finish)
/// renames. If the writer is dropped before that, the temporary folder is removed. Tensors are
/// written to disk in any order, and memory holds one tensor at a time.
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

/// The weight file, after its tensors are declared.
#[derive(Debug)]
struct Weights {
    path: PathBuf,
    file: File,
    /// The header entry of each tensor, by tensor name, and true if the tensor was written.
    entries: BTreeMap<String, (Entry, bool)>,
}

impl CheckpointWriter {
    /// Checks that the folder `dir` does not exist or is empty.
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

    /// Creates a checkpoint that will be the folder `dir`. The parent folder is created if it does
    /// not exist.
    ///
    /// # Errors
    /// [`CheckpointError::TargetNotEmpty`] if `dir` exists and is not empty;
    /// [`CheckpointError::Io`].
    pub fn create(dir: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        Self::start(dir.as_ref(), None)
    }

    /// Creates a checkpoint as [`create`](Self::create) does, with the temporary folder in
    /// `workplace`, which must be on the same file system. If a killed process leaves its temporary
    /// folder, the folder can be found in `workplace`.
    ///
    /// # Errors
    /// The errors of [`create`](Self::create).
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
    /// [`CheckpointError::FileName`] if `name` is not a plain file name or is reserved for the
    /// weights; [`CheckpointError::Io`].
    pub fn write_file(&mut self, name: &str, contents: &[u8]) -> Result<(), CheckpointError> {
        let path = self.path_of(name)?;
        fs::write(&path, contents).map_err(|source| CheckpointError::io("write", &path, source))
    }

    /// Copies a file into the checkpoint under its own name.
    ///
    /// # Errors
    /// [`CheckpointError::FileName`] if the name is reserved for the weights;
    /// [`CheckpointError::Io`].
    pub fn copy_file(&mut self, from: &Path) -> Result<(), CheckpointError> {
        let name = from.file_name().unwrap_or_default().to_string_lossy();
        let path = self.path_of(&name)?;
        fs::copy(from, &path)
            .map(|_| ())
            .map_err(|source| CheckpointError::io("copy", from, source))
    }

    /// Declares all tensors, assigns their positions in the file and writes the header.
    /// [`write_tensor`](Self::write_tensor) writes their bytes.
    ///
    /// # Errors
    /// [`CheckpointError::Declare`] if tensors were already declared;
    /// [`CheckpointError::Declaration`] for duplicate names and for sizes that overflow;
    /// [`CheckpointError::Io`].
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

    /// Writes the bytes of a declared tensor (row-major, little-endian). Each tensor is written
    /// once.
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

    /// Moves the checkpoint to its target folder. On failure, the temporary folder is removed.
    ///
    /// # Errors
    /// [`CheckpointError::Declare`] if no tensors were declared; [`CheckpointError::NotWritten`] if
    /// a tensor was not written; [`CheckpointError::TargetNotEmpty`] if the target was filled in
    /// the meantime; [`CheckpointError::Io`].
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
        // After the rename there is no temporary folder to remove.
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
