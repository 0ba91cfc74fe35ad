use crate::tile::Tile;
use crate::{ActivationDtype, Kernel, Runtime};

/// The reason why a launch was refused. Errors are raised on the host, before anything runs.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum KernelError {
    /// The format does not fit the shape.
    #[error(transparent)]
    Format(#[from] marlin_format::FormatError),
    /// The length of a buffer is not the length that the problem needs.
    #[error("{operand}: {found} elements where the problem {problem} needs {expected}")]
    BufferLength {
        /// The operand, such as activations, qweight, state or workspace.
        operand: &'static str,
        /// A description of the problem.
        problem: String,
        /// The number of elements that the problem needs.
        expected: usize,
        /// The number of elements of the buffer.
        found: usize,
    },
    /// No kernel supports the shape.
    #[error("{problem}: {reason}")]
    Shape {
        /// A description of the problem.
        problem: String,
        /// The reason why the shape is not supported.
        reason: &'static str,
    },
    /// An operand is missing, or is given although the format does not have it.
    #[error("{operand}: {found} where the problem {problem} says otherwise")]
    Presence {
        /// The operand, such as metadata, zero points or row permutation.
        operand: &'static str,
        /// A description of the problem.
        problem: String,
        /// "present" or "missing".
        found: &'static str,
    },
    /// An operand is an alias of another buffer, but the kernel needs a buffer of its own.
    #[error(
        "{operand}: an alias of another buffer where the problem {problem} needs a buffer of its own"
    )]
    Alias {
        /// The operand, such as activations.
        operand: &'static str,
        /// A description of the problem.
        problem: String,
    },
    /// A range exceeds its limit.
    #[error("{what}: up to {end} of {limit} asked for, {problem}")]
    Outside {
        /// The name of the counted item, such as slot, positions or rows.
        what: &'static str,
        /// A description of the problem.
        problem: String,
        /// One past the last item requested.
        end: usize,
        /// The limit.
        limit: usize,
    },
    /// A matrix has more elements than the kernels can address.
    #[error(
        "the problem {problem} has {elements} elements in one operand; the kernels address at most {limit}"
    )]
    TooLarge {
        /// A description of the problem.
        problem: String,
        /// The number of elements of the largest operand.
        elements: usize,
        /// The largest number of elements that 32-bit indices can address.
        limit: usize,
    },
    /// The plan was made for another backend than the CubeCL runtime of the launch.
    #[error(
        "the plan `{kernel}` is not launched on {runtime}; take the plan that `plan` gives for its target"
    )]
    NotLaunchable {
        /// The plan's kernel.
        kernel: Kernel,
        /// The runtime of the launch.
        runtime: Runtime,
    },
    /// A launch of a tile kernel has no blocks, or has another number of clusters than tiles.
    #[error(
        "the problem {problem}: a launch of {blocks} blocks in tiles of {tile}; take the launch that `tile::plan` gives"
    )]
    Blocks {
        /// A description of the problem.
        problem: String,
        /// The tile.
        tile: Tile,
        /// The number of blocks.
        blocks: usize,
    },
    /// A launch of a tile of e4m3 for a weight whose activations are not rounded, that has
    /// act-order, or whose K does not fill chunks of 128 rows.
    #[error(
        "the problem {problem}: not for tiles of e4m3, which take a weight with activations in e4m3, without act-order, and a K that is a multiple of 128; take the plan that `plan` gives"
    )]
    Fp8 {
        /// A description of the problem.
        problem: String,
    },
    /// A router chooses no experts for a token, or more than there are or than kernels support.
    #[error(
        "a router that chooses {top_k} of {experts} experts; a token takes 1 to 32 of up to 1024"
    )]
    Router {
        /// The number of experts.
        experts: usize,
        /// The number of experts of a token.
        top_k: usize,
    },
    /// The problem has an epilogue that its kernel cannot compute.
    #[error(
        "the problem {problem}: {kernel} does not end with this epilogue; take the plan that `plan` gives"
    )]
    Epilogue {
        /// A description of the problem.
        problem: String,
        /// The plan's kernel.
        kernel: Kernel,
    },
    /// The one-row kernel does not support the problem, or the number of blocks among which K is
    /// split.
    #[error(
        "the problem {problem} on clusters of {blocks} blocks: not for the kernel of one row; take the plan that `plan` gives"
    )]
    NoGemv {
        /// A description of the problem.
        problem: String,
        /// The number of blocks among which K is split.
        blocks: usize,
    },
    /// Sampling does not support a vocabulary of this size.
    #[error("a vocabulary of {found} tokens; sampling takes 1 to {limit}")]
    Vocabulary {
        /// The number of tokens of the vocabulary.
        found: usize,
        /// The largest supported vocabulary.
        limit: usize,
    },
    /// The kernel does not support this pair of dtypes.
    #[error(
        "activations in {activations} and scales in {scales}; the kernel takes both in f16 or both in bf16"
    )]
    DtypePair {
        /// Dtype of activations and output.
        activations: ActivationDtype,
        /// Dtype of the scales.
        scales: ActivationDtype,
    },
    /// The device does not support the activations' dtype.
    #[error("{runtime} does not support {dtype}; cast the activations to f32")]
    Dtype {
        /// The runtime of the launch.
        runtime: Runtime,
        /// The dtype that the device lacks.
        dtype: &'static str,
    },
}
