//! The errors of a safetensors header.

use safetensors::Dtype;

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
    #[error(
        "the header says it has {header} bytes, but {available} follow; the file is truncated or not safetensors"
    )]
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
    #[error(
        "`{tensor}` of {dtype} and shape {shape:?} needs {expected} bytes, but its offsets {start}..{end} span others"
    )]
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
    #[error(
        "`{tensor}` starts at byte {found} of the data; the tensor before it ends at {expected}"
    )]
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
