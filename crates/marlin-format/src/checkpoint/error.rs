//! Errors of a checkpoint folder, of its files and of its config.

use std::path::{Path, PathBuf};

use safetensors::Dtype;

use super::{ConfigError, HeaderError, InPlaceOfWeights};
use crate::{FormatError, QuantSpec};

/// The reason why a checkpoint cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A failed operation of the operating system.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A folder without weights.
    #[error("{} has neither model.safetensors nor model.safetensors.index.json; {found}", dir.display())]
    NoWeights {
        /// The folder.
        dir: PathBuf,
        /// The contents found in place of the weights.
        found: InPlaceOfWeights,
    },
    /// A Git LFS pointer file in place of the weights.
    #[error("{} is a pointer of Git LFS, not the file itself; run `git lfs pull`, or download the file", path.display())]
    LfsPointer {
        /// The file.
        path: PathBuf,
    },
    /// An index that is not valid JSON of the expected form.
    #[error("{} is not a safetensors index", path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// The cause, with the position in the file.
        source: serde_json::Error,
    },
    /// An index that names a file outside its folder.
    #[error("{} names the shard `{shard}`; a shard must be a file name in the same folder", index.display())]
    ShardName {
        /// The index file.
        index: PathBuf,
        /// The name found.
        shard: String,
    },
    /// A shard that the index names but the folder does not contain.
    #[error("{} is missing, and {} says that it holds `{tensor}`; download it again", path.display(), index.display())]
    MissingShard {
        /// The index file.
        index: PathBuf,
        /// The shard.
        path: PathBuf,
        /// The name of a tensor that the shard should contain.
        tensor: String,
    },
    /// A tensor that is not in the shard that the index names.
    #[error("`{tensor}` is not in {}, where {} says it is", path.display(), index.display())]
    NotInShard {
        /// The index file.
        index: PathBuf,
        /// The shard.
        path: PathBuf,
        /// The name of the tensor.
        tensor: String,
    },
    /// A tensor name that occurs in two shards.
    #[error("`{tensor}` is in both {} and {}; one of them does not belong to this checkpoint", first.display(), second.display())]
    DuplicateTensor {
        /// The name of the tensor.
        tensor: String,
        /// The first shard.
        first: PathBuf,
        /// The second shard.
        second: PathBuf,
    },
    /// A safetensors file with an invalid header.
    #[error("{} is not a valid safetensors file", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: HeaderError,
    },
    /// A tensor that is not in the checkpoint.
    #[error("{} has no tensor `{tensor}`; is the download complete, and is its config the checkpoint's own?", dir.display())]
    MissingTensor {
        /// The folder.
        dir: PathBuf,
        /// The name of the tensor.
        tensor: String,
    },
    /// A tensor whose dtype is not the expected one.
    #[error("`{tensor}` in {} is {found}; expected {expected}", path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The name of the tensor.
        tensor: String,
        /// The expected dtype.
        expected: &'static str,
        /// The dtype in the file.
        found: Dtype,
    },
    /// A tensor whose shape is not the expected one.
    #[error("`{tensor}` in {} has shape {found:?}; expected {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The name of the tensor.
        tensor: String,
        /// The expected shape.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor with invalid values.
    #[error("`{tensor}` in {}: {problem}", path.display())]
    Values {
        /// The file.
        path: PathBuf,
        /// The name of the tensor.
        tensor: String,
        /// A description of the fault, with numbers.
        problem: String,
    },
    /// An inconsistent quantised weight.
    #[error("the quantised weight `{layer}` in {}", path.display())]
    Weight {
        /// The name of the layer, which is the prefix of its tensors' names.
        layer: String,
        /// The file that contains the quantised values.
        path: PathBuf,
        /// The cause.
        source: FormatError,
    },
    /// A tensor of zero points, although the config declares a symmetric weight.
    #[error(
        "`{tensor}` is in {}, but the config says that weights are symmetric; if they are not, say so in the config \
         (`zero_point` true, `symmetric` false), or remove the tensor",
        path.display()
    )]
    UnexpectedZeroPoints {
        /// The file.
        path: PathBuf,
        /// The name of the tensor of zero points.
        tensor: String,
    },
    /// A config of a quantised checkpoint that cannot be read.
    #[error("the quantisation that {} says", path.display())]
    Config {
        /// The config file.
        path: PathBuf,
        /// The cause.
        source: ConfigError,
    },
    /// A missing tensor of zero points, although the config declares zero points.
    #[error(
        "{} has no tensor `{tensor}`, but the config says that weights have zero points; if they are symmetric, say so in the config \
         (`zero_point` false, `symmetric` true), or else download the checkpoint again",
        dir.display()
    )]
    MissingZeroPoints {
        /// The folder.
        dir: PathBuf,
        /// The name of the tensor of zero points.
        tensor: String,
    },
    /// A layer whose spec in the config is not supported by its format.
    #[error(
        "the config says that `{layer}` is {found} in {format}, but {format} holds {expected} weights; is it the checkpoint's own config?"
    )]
    Spec {
        /// The name of the layer.
        layer: String,
        /// The format.
        format: &'static str,
        /// The specs that the format supports.
        expected: &'static str,
        /// The spec in the config.
        found: QuantSpec,
    },
    /// A layer that is read as quantised but is not quantised.
    #[error("the weight of `{layer}` is not quantised; read its tensor `{layer}.weight`")]
    NotQuantized {
        /// The name of the layer.
        layer: String,
    },
    /// A layer that does not fit in memory.
    #[error(
        "to read `{layer}` takes {needed} bytes of memory, and {available} are available; use a machine with more"
    )]
    LayerTooLarge {
        /// The name of the layer.
        layer: String,
        /// The number of bytes required to read the layer.
        needed: usize,
        /// The number of bytes available.
        available: usize,
    },
    /// A target folder that is not empty.
    #[error("{} exists and is not empty; name a new folder, or empty this one first", dir.display())]
    TargetNotEmpty {
        /// The folder.
        dir: PathBuf,
    },
    /// A name that is not a plain file name, or is reserved for the weights.
    #[error(
        "`{name}` cannot be written into the checkpoint: it must be a plain file name other than model.safetensors"
    )]
    FileName {
        /// The name.
        name: String,
    },
    /// Declared tensors that cannot be stored in one safetensors file.
    #[error("the declared tensors do not make a safetensors file")]
    Declaration {
        /// The cause.
        source: HeaderError,
    },
    /// A second declaration of tensors, or a missing one.
    #[error("tensors must be declared once before they are written, and {}", if *declared { "they were already" } else { "none were" })]
    Declare {
        /// True if tensors were already declared; false if none were.
        declared: bool,
    },
    /// A tensor that was not declared.
    #[error("`{tensor}` was not declared")]
    NotDeclared {
        /// The name of the tensor.
        tensor: String,
    },
    /// A tensor written twice.
    #[error("`{tensor}` was already written")]
    WrittenTwice {
        /// The name of the tensor.
        tensor: String,
    },
    /// A tensor whose byte count does not match its declaration.
    #[error("`{tensor}` was declared with {expected} bytes, but {found} were given")]
    TensorSize {
        /// The name of the tensor.
        tensor: String,
        /// The number of bytes of the declared dtype and shape.
        expected: usize,
        /// The number of bytes given.
        found: usize,
    },
    /// Declared tensors that were never written.
    #[error("{missing} declared tensors were not written, the first of them `{tensor}`")]
    NotWritten {
        /// The number of tensors that were not written.
        missing: usize,
        /// The first of these tensors by name.
        tensor: String,
    },
}

impl CheckpointError {
    pub(super) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io {
            action,
            path: path.into(),
            source,
        }
    }
}
