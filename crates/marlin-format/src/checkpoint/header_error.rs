//! Errors of a safetensors header.

use safetensors::Dtype;

/// An inconsistency in a safetensors header, or between the header and its file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// A file that is too short for the header's length.
    #[error("the file has {found} bytes; a safetensors file starts with 8 bytes of header length")]
    TooShort {
        /// The number of bytes in the file.
        found: usize,
    },
    /// A header that extends past the end of the file.
    #[error(
        "the header says it has {header} bytes, but {available} follow; the file is truncated or not safetensors"
    )]
    PastEnd {
        /// The header's length, as the file declares it.
        header: u64,
        /// The number of bytes after the length.
        available: usize,
    },
    /// A header that is larger than the format allows.
    #[error("the header has {header} bytes; at most {limit} are allowed")]
    TooLarge {
        /// The header's length.
        header: u64,
        /// The limit.
        limit: usize,
    },
    /// A header that is not valid JSON of the expected form.
    #[error("the header is not valid")]
    Json(#[from] serde_json::Error),
    /// A tensor name that occurs twice in a file.
    #[error("`{tensor}` is there twice")]
    DuplicateTensor {
        /// The name of the tensor.
        tensor: String,
    },
    /// A tensor name that is too long or has control characters.
    #[error("`{tensor}` cannot be the name of a tensor: it is too long, or has control characters")]
    Name {
        /// The beginning of the name.
        tensor: String,
    },
    /// A tensor name that is reserved for the metadata.
    #[error("`{tensor}` is the name of the header's metadata; a tensor cannot have it")]
    ReservedName {
        /// The name.
        tensor: String,
    },
    /// A dtype and shape whose size cannot be computed or is not a whole number of bytes.
    #[error("`{tensor}` of {dtype} and shape {shape:?} has no size in bytes")]
    Size {
        /// The name of the tensor.
        tensor: String,
        /// The dtype of the tensor.
        dtype: Dtype,
        /// The shape of the tensor.
        shape: Vec<usize>,
    },
    /// A tensor whose byte range does not match its dtype and shape.
    #[error(
        "`{tensor}` of {dtype} and shape {shape:?} needs {expected} bytes, but its offsets {start}..{end} span others"
    )]
    Offsets {
        /// The name of the tensor.
        tensor: String,
        /// The dtype of the tensor.
        dtype: Dtype,
        /// The shape of the tensor.
        shape: Vec<usize>,
        /// The number of bytes of that dtype and shape.
        expected: usize,
        /// The first byte of the range, from the start of the data.
        start: usize,
        /// One past the last byte of the range.
        end: usize,
    },
    /// A tensor that overlaps the previous tensor, or leaves a gap after it.
    #[error(
        "`{tensor}` starts at byte {found} of the data; the tensor before it ends at {expected}"
    )]
    Gap {
        /// The name of the tensor.
        tensor: String,
        /// The end of the previous tensor.
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
        /// The number of bytes of all tensors.
        expected: usize,
        /// The number of bytes after the header.
        found: usize,
    },
}
