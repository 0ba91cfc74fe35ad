use crate::tile::Tile;
use crate::{ActivationDtype, Kernel, Runtime};

/// The reason why a launch was refused; raised on the host, before anything runs.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum KernelError {
    /// The format does not fit the shape.
    #[error(transparent)]
    Format(#[from] marlin_format::FormatError),
    /// A buffer has another length than the problem needs.
    #[error("{operand}: {found} elements where the problem {problem} needs {expected}")]
    BufferLength {
        /// The operand, such as activations, words, state or workspace.
        operand: &'static str,
        /// The problem, as words.
        problem: String,
        /// Elements needed.
        expected: usize,
        /// Elements found.
        found: usize,
    },
    /// A shape that no kernel takes.
    #[error("{problem}: {reason}")]
    Shape {
        /// The problem, as words.
        problem: String,
        /// The fault.
        reason: &'static str,
    },
    /// An operand is there that the format does not have, or is missing.
    #[error("{operand}: {found} where the problem {problem} says otherwise")]
    Presence {
        /// The operand: zero points or row permutation.
        operand: &'static str,
        /// The problem, as words.
        problem: String,
        /// "present" or "missing".
        found: &'static str,
    },
    /// An alias of another buffer where the kernel needs a buffer of its own.
    #[error(
        "{operand}: an alias of another buffer where the problem {problem} needs a buffer of its own"
    )]
    Alias {
        /// The operand: activations.
        operand: &'static str,
        /// The problem, as words.
        problem: String,
    },
    /// A range that leaves what it belongs to.
    #[error("{what}: up to {end} of {limit} asked for, {problem}")]
    Outside {
        /// The name of the count: slot or positions.
        what: &'static str,
        /// The problem, as words.
        problem: String,
        /// One past the last one requested.
        end: usize,
        /// The limit.
        limit: usize,
    },
    /// A matrix has more elements than the kernels can address.
    #[error(
        "the problem {problem} has {elements} elements in one operand; the kernels address at most {limit}"
    )]
    TooLarge {
        /// The problem, as words.
        problem: String,
        /// Elements of the largest operand.
        elements: usize,
        /// The largest count that 32-bit indices reach.
        limit: usize,
    },
    /// A plan of another backend came to a CubeCL launch.
    #[error(
        "the plan `{kernel}` is not launched on {runtime}; take the plan that `plan` gives for its target"
    )]
    NotLaunchable {
        /// The plan's kernel.
        kernel: Kernel,
        /// The runtime asked.
        runtime: Runtime,
    },
    /// A launch of a tile kernel without blocks, or of clusters that are not one for each tile.
    #[error(
        "the problem {problem}: a launch of {blocks} blocks in tiles of {tile}; take the launch that `tile::plan` gives"
    )]
    Blocks {
        /// The problem, as words.
        problem: String,
        /// The tile.
        tile: Tile,
        /// The blocks.
        blocks: usize,
    },
    /// A matmul that is to compute an epilogue with which its kernel cannot end.
    #[error(
        "the problem {problem}: {kernel} does not end with this epilogue; take the plan that `plan` gives"
    )]
    Epilogue {
        /// The problem, as words.
        problem: String,
        /// The plan's kernel.
        kernel: Kernel,
    },
    /// A problem or a cluster that the kernel of one row does not take.
    #[error(
        "the problem {problem} on clusters of {blocks} blocks: not for the kernel of one row; take the plan that `plan` gives"
    )]
    NoGemv {
        /// The problem, as words.
        problem: String,
        /// Blocks of a cluster.
        blocks: usize,
    },
    /// A vocabulary that sampling does not take.
    #[error("a vocabulary of {found} tokens; sampling takes 1 to {limit}")]
    Vocabulary {
        /// Tokens of the vocabulary.
        found: usize,
        /// The most it takes.
        limit: usize,
    },
    /// The kernel does not take this pair of dtypes.
    #[error(
        "activations in {activations} and scales in {scales}; the kernel takes both in f16 or both in bf16"
    )]
    DtypePair {
        /// Dtype of activations and output.
        activations: ActivationDtype,
        /// Dtype of the scales.
        scales: ActivationDtype,
    },
    /// The device cannot hold the activations' dtype.
    #[error("{runtime} does not support {dtype}; cast the activations to f32")]
    Dtype {
        /// The runtime asked.
        runtime: Runtime,
        /// The dtype it lacks.
        dtype: &'static str,
    },
}
