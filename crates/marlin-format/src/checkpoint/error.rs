//! The errors of a folder, of a file in it, or of its config.

use std::path::{Path, PathBuf};

use safetensors::Dtype;

use super::{ConfigError, HeaderError, InPlaceOfWeights};
use crate::{FormatError, QuantSpec};

/// A checkpoint that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused.
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
    /// A text of Git LFS where weights should be.
    #[error("{} is a pointer of Git LFS, not the file itself; run `git lfs pull`, or download the file", path.display())]
    LfsPointer {
        /// The file.
        path: PathBuf,
    },
    /// An index that is not the JSON it should be.
    #[error("{} is not a safetensors index", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// The position and the cause.
        source: serde_json::Error,
    },
    /// An index that names a file outside its folder.
    #[error("{} names the shard `{shard}`; a shard must be a file name in the same folder", index.display())]
    ShardName {
        /// The index.
        index: PathBuf,
        /// The name found.
        shard: String,
    },
    /// A shard that the index names and the folder lacks.
    #[error("{} is missing, and {} says that it holds `{tensor}`; download it again", path.display(), index.display())]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The shard.
        path: PathBuf,
        /// A tensor it should hold.
        tensor: String,
    },
    /// A tensor that is not in the shard the index names.
    #[error("`{tensor}` is not in {}, where {} says it is", path.display(), index.display())]
    NotInShard {
        /// The index.
        index: PathBuf,
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// One name in two shards.
    #[error("`{tensor}` is in both {} and {}; one of them does not belong to this checkpoint", first.display(), second.display())]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// A shard.
        first: PathBuf,
        /// Another shard.
        second: PathBuf,
    },
    /// A safetensors file whose header does not hold together.
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
        /// The tensor.
        tensor: String,
    },
    /// A tensor of another dtype.
    #[error("`{tensor}` in {} is {found}; expected {expected}", path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The expected dtype.
        expected: &'static str,
        /// The dtype in the file.
        found: Dtype,
    },
    /// A tensor of another shape.
    #[error("`{tensor}` in {} has shape {found:?}; expected {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The expected shape.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor whose values make no sense.
    #[error("`{tensor}` in {}: {problem}", path.display())]
    Values {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The fault, with numbers.
        problem: String,
    },
    /// A quantised weight that does not hold together.
    #[error("the quantised weight `{layer}` in {}", path.display())]
    Weight {
        /// The layer, the prefix of its tensors' names.
        layer: String,
        /// The file that holds its values.
        path: PathBuf,
        /// The cause.
        source: FormatError,
    },
    /// Zero points, where the config declares a symmetric weight.
    #[error(
        "`{tensor}` is in {}, but the config says that weights are symmetric; if they are not, say so in the config \
         (`zero_point` true, `symmetric` false), or remove the tensor",
        path.display()
    )]
    UnexpectedZeroPoints {
        /// The file.
        path: PathBuf,
        /// The tensor of zero points.
        tensor: String,
    },
    /// A config of a quantised checkpoint that is not read.
    #[error("the quantisation that {} says", path.display())]
    Config {
        /// The config.
        path: PathBuf,
        /// The cause.
        source: ConfigError,
    },
    /// No zero points, where the config declares them.
    #[error(
        "{} has no tensor `{tensor}`, but the config says that weights have zero points; if they are symmetric, say so in the config \
         (`zero_point` false, `symmetric` true), or else download the checkpoint again",
        dir.display()
    )]
    MissingZeroPoints {
        /// The folder.
        dir: PathBuf,
        /// The tensor of zero points.
        tensor: String,
    },
    /// A layer that its config describes as its format cannot be.
    #[error(
        "the config says that `{layer}` is {found} in {format}, but {format} holds {expected} weights; is it the checkpoint's own config?"
    )]
    Spec {
        /// The layer.
        layer: String,
        /// The format.
        format: &'static str,
        /// The specs that the format can hold.
        expected: &'static str,
        /// The spec in the config.
        found: QuantSpec,
    },
    /// A layer without a quantised weight, read as one.
    #[error("the weight of `{layer}` is not quantised; read its tensor `{layer}.weight`")]
    NotQuantized {
        /// The layer.
        layer: String,
    },
    /// A layer that does not fit the memory.
    #[error(
        "to read `{layer}` takes {needed} bytes of memory, and {available} are available; use a machine with more"
    )]
    LayerTooLarge {
        /// The layer.
        layer: String,
        /// Bytes that reading it takes.
        needed: usize,
        /// Bytes that there are.
        available: usize,
    },
    /// A target folder with something in it.
    #[error("{} exists and is not empty; name a new folder, or empty this one first", dir.display())]
    TargetNotEmpty {
        /// The folder.
        dir: PathBuf,
    },
    /// A name that is not a plain file name, or is the weights' own.
    #[error(
        "`{name}` cannot be written into the checkpoint: it must be a plain file name other than model.safetensors"
    )]
    FileName {
        /// The name.
        name: String,
    },
    /// Tensors that cannot be laid out.
    #[error("the declared tensors do not make a safetensors file")]
    Declaration {
        /// The cause.
        source: HeaderError,
    },
    /// Tensors declared twice, or not at all.
    #[error("tensors must be declared once before they are written, and {}", if *declared { "they were already" } else { "none were" })]
    Declare {
        /// True if they were already declared.
        declared: bool,
    },
    /// A tensor that was not declared.
    #[error("`{tensor}` was not declared")]
    NotDeclared {
        /// The tensor.
        tensor: String,
    },
    /// A tensor written twice.
    #[error("`{tensor}` was already written")]
    WrittenTwice {
        /// The tensor.
        tensor: String,
    },
    /// A tensor whose bytes do not fit its declaration.
    #[error("`{tensor}` was declared with {expected} bytes, but {found} were given")]
    TensorSize {
        /// The tensor.
        tensor: String,
        /// Bytes of the declared dtype and shape.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// Declared tensors that were never written.
    #[error("{missing} declared tensors were not written, the first of them `{tensor}`")]
    NotWritten {
        /// The number of missing files.
        missing: usize,
        /// The first by name.
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
