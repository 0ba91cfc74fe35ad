//! The errors of a folder, of a file in it, or of its config.

use std::path::{Path, PathBuf};

use safetensors::Dtype;

use super::InPlaceOfWeights;
use crate::text::excerpt;
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
    #[error("to read `{layer}` takes {needed} bytes of memory, and {available} are available; use a machine with more")]
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
    #[error("`{name}` cannot be written into the checkpoint: it must be a plain file name other than model.safetensors")]
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
        Self::Io { action, path: path.into(), source }
    }
}

/// A safetensors header that does not hold together, or does not fit its file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// Not even the header's length.
    #[error("the file has {found} bytes; a safetensors file starts with 8 bytes of header length")]
    TooShort {
        /// Bytes in the file.
        found: usize,
    },
    /// A header that does not fit the file.
    #[error("the header says it has {header} bytes, but {available} follow; the file is truncated or not safetensors")]
    PastEnd {
        /// The header's length, as the file declares it.
        header: u64,
        /// Bytes after the length.
        available: usize,
    },
    /// A header above the format's limit.
    #[error("the header has {header} bytes; at most {limit} are allowed")]
    TooLarge {
        /// The header's length.
        header: u64,
        /// The limit.
        limit: usize,
    },
    /// A header that is not the JSON it should be.
    #[error("the header is not valid")]
    Json(#[from] serde_json::Error),
    /// One name twice in a file.
    #[error("`{tensor}` is there twice")]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
    },
    /// A name that no module has.
    #[error("`{tensor}` cannot be the name of a tensor: it is too long, or has control characters")]
    Name {
        /// The beginning of the name.
        tensor: String,
    },
    /// A name that is not a tensor's.
    #[error("`{tensor}` is the name of the header's metadata; a tensor cannot have it")]
    ReservedName {
        /// The name.
        tensor: String,
    },
    /// A dtype and shape whose size cannot be computed or is not a whole number of bytes.
    #[error("`{tensor}` of {dtype} and shape {shape:?} has no size in bytes")]
    Size {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A tensor whose bytes do not fit its dtype and shape.
    #[error("`{tensor}` of {dtype} and shape {shape:?} needs {expected} bytes, but its offsets {start}..{end} span others")]
    Offsets {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<usize>,
        /// Bytes of that dtype and shape.
        expected: usize,
        /// First byte in the data.
        start: usize,
        /// Byte past the last.
        end: usize,
    },
    /// A tensor that overlaps the one before, or leaves a hole.
    #[error("`{tensor}` starts at byte {found} of the data; the tensor before it ends at {expected}")]
    Gap {
        /// The tensor.
        tensor: String,
        /// The end of the tensor before.
        expected: usize,
        /// The start of this tensor.
        found: usize,
    },
    /// A file that is too short or too long for its tensors.
    #[error(
        "the tensors need {expected} bytes of data, the file has {found}: it is {}",
        if found < expected { "truncated" } else { "longer than it says" }
    )]
    Coverage {
        /// Bytes of all tensors.
        expected: usize,
        /// Bytes after the header.
        found: usize,
    },
}

/// A `quantization_config` that this version does not read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A config that is not JSON.
    #[error("the config is not valid JSON")]
    Json(#[from] serde_json::Error),
    /// A field that is needed and absent.
    #[error("the quantization config has no `{field}`; expected {expected}")]
    Missing {
        /// The field, with the path to it.
        field: String,
        /// The accepted values.
        expected: &'static str,
    },
    /// A field with a value that is not supported.
    #[error("the quantization config's `{field}` is {found}; this version reads {expected}: use a checkpoint quantised so, or a float one")]
    Unsupported {
        /// The field, with the path to it.
        field: String,
        /// The accepted values.
        expected: &'static str,
        /// The value, as JSON.
        found: String,
    },
    /// A regular expression that cannot be used.
    #[error(
        "the quantization config's `{field}` has `{}`, which is not a regular expression this version can use; correct it",
        excerpt(pattern)
    )]
    Regex {
        /// The field, with the path to it.
        field: String,
        /// The expression.
        pattern: String,
        /// The cause.
        source: Box<fancy_regex::Error>,
    },
    /// More patterns than can be tried for every layer.
    #[error(
        "the quantization config has more than {limit} patterns and other entries that every layer is compared with; name layers in full, or use fewer patterns"
    )]
    TooManyPatterns {
        /// The limit.
        limit: usize,
    },
    /// A regular expression that takes too many steps to match.
    #[error(
        "the quantization config's pattern `{}` could not be matched with the layer `{layer}`; write it in a simpler way",
        excerpt(pattern)
    )]
    Match {
        /// The expression.
        pattern: String,
        /// The layer.
        layer: String,
        /// The cause.
        source: Box<fancy_regex::Error>,
    },
    /// A group size that is not supported.
    #[error("the quantization config's `{field}`")]
    GroupSize {
        /// The field, with the path to it.
        field: String,
        /// The cause.
        source: FormatError,
    },
    /// An `re:` pattern that cannot be used.
    #[error("layers are named by `{}`, which is not a regular expression this version can use", excerpt(pattern))]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The cause.
        source: Box<regex::Error>,
    },
}
