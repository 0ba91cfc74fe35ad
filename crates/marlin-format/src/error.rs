//! The errors of a weight, before any file is involved.

use crate::{Bits, GroupSize, ScaleDtype};

/// A weight, a spec or a layout that does not hold together.
///
/// Every message has the expected value, the value found and, if there is one, a remedy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// A width of quantised values that no kernel here supports.
    #[error("weights of {found} bits are not supported; use 4 or 8")]
    Bits {
        /// The number found.
        found: i64,
    },
    /// A group size that no kernel here supports.
    #[error(
        "group size {found} is not supported; use -1 (one group per output channel), 32, 64 or 128"
    )]
    GroupSize {
        /// The number found.
        found: i64,
    },
    /// A group size, as text, that does not name one.
    #[error("`{found}` is not a group size; use channel, g32, g64 or g128")]
    GroupSizeName {
        /// The text found.
        found: String,
    },
    /// K or N is zero.
    #[error("a weight of K = {k} by N = {n} has no elements; both must be at least 1")]
    Empty {
        /// Input features.
        k: usize,
        /// Output features.
        n: usize,
    },
    /// K or N is above [`QuantSpec::MAX_FEATURES`](crate::QuantSpec::MAX_FEATURES).
    #[error("a weight of K = {k} by N = {n} is too large; each may be at most {limit}")]
    TooLarge {
        /// Input features.
        k: usize,
        /// Output features.
        n: usize,
        /// The largest K or N.
        limit: usize,
    },
    /// K * N is above [`QuantSpec::MAX_ELEMENTS`](crate::QuantSpec::MAX_ELEMENTS).
    #[error(
        "a weight of K = {k} by N = {n} has {elements} elements; kernels address at most {limit}: split its output features into several layers, \
         or leave it as floats"
    )]
    TooManyElements {
        /// Input features.
        k: usize,
        /// Output features.
        n: usize,
        /// K * N.
        elements: usize,
        /// The largest K * N.
        limit: usize,
    },
    /// A buffer that does not have the length of its shape.
    #[error("{what} has {found} values; K = {k}, N = {n} needs {expected}")]
    Length {
        /// The name of the buffer.
        what: &'static str,
        /// Input features.
        k: usize,
        /// Output features.
        n: usize,
        /// The length of its shape.
        expected: usize,
        /// The length it has.
        found: usize,
    },
    /// Scales in another dtype than the spec's.
    #[error("the spec says {expected} scales, but the scales are {found}")]
    ScaleDtypeMismatch {
        /// The dtype in the spec.
        expected: ScaleDtype,
        /// The dtype of the scales.
        found: ScaleDtype,
    },
    /// A scale that is infinite or not a number.
    #[error("the scale of group {group}, column {column} is {value}; scales must be finite")]
    NonFiniteScale {
        /// Group along K.
        group: usize,
        /// Output feature.
        column: usize,
        /// The scale found.
        value: f32,
    },
    /// The spec has zero points, and there are none.
    #[error("the spec says zero points, but none are given; give them or use a symmetric spec")]
    MissingZeroPoints,
    /// The spec is symmetric, and there are zero points.
    #[error(
        "the spec is symmetric, but zero points are given; drop them or use a spec with zero points"
    )]
    UnexpectedZeroPoints,
    /// A zero point that the weight's bits do not hold.
    #[error("the zero point of group {group}, column {column} is {found}; it must be in 0..={max}")]
    ZeroPoint {
        /// Group along K.
        group: usize,
        /// Output feature.
        column: usize,
        /// The zero point found.
        found: u8,
        /// The largest value of the weight's bits.
        max: u8,
    },
    /// A 2:4 weight whose K is not a multiple of 4.
    #[error(
        "a 2:4 weight of K = {k}; K must be a multiple of 4, of which two values are kept: keep this weight dense"
    )]
    SparseRows {
        /// Input features.
        k: usize,
    },
    /// A 2:4 weight with act-order: sorted rows are not the four neighbours that were pruned
    /// together.
    #[error(
        "a 2:4 weight with act-order; its rows must be in their natural order: keep this weight dense, or quantise without act-order"
    )]
    SparsePermuted,
    /// A weight that is not 2:4 where 2:4 is asked for.
    #[error(
        "rows {row} to {} of column {column} have {found} values that are not zero; a 2:4 weight has at most two of every four: prune it, or \
         keep it dense", row + 3
    )]
    NotTwoFour {
        /// The first of the four rows.
        row: usize,
        /// Output feature.
        column: usize,
        /// Values that are not zero.
        found: usize,
    },
    /// A spec that the published 2:4 files do not hold.
    #[error(
        "`marlin-24` files hold symmetric weights in groups of 128 rows or one a channel, this one is {found}; choose such a spec, or another format"
    )]
    Marlin24Spec {
        /// The spec found.
        found: crate::QuantSpec,
    },
    /// Metadata that do not name two rows in ascending order, or padding that does not name the
    /// first two.
    #[error(
        "the metadata of rows {row} to {} of column {column} are {found:#x}; they must name two rows in ascending order: 4, 8, 9, 12, 13 or 14, \
         and 4 in padding", row + 3
    )]
    Metadata {
        /// The first of the four rows.
        row: usize,
        /// Output feature.
        column: usize,
        /// The nibble found.
        found: u8,
    },
    /// A row permutation that names a row outside the weight.
    #[error(
        "the row permutation names row {found} at position {position}; rows go from 0 to {last}"
    )]
    PermutationRange {
        /// The position in the permutation.
        position: usize,
        /// The row named there.
        found: u32,
        /// The last row, K - 1.
        last: usize,
    },
    /// A row permutation that names a row twice.
    #[error(
        "the row permutation names row {row} a second time at position {position}; it must name every row once"
    )]
    PermutationDuplicate {
        /// The position in the permutation.
        position: usize,
        /// The row named there.
        row: u32,
    },
    /// A slice that is empty or leaves the weight.
    #[error(
        "a slice of {axis} from {start} to {end} of {length} features; it must have at least one and end within them"
    )]
    SliceRange {
        /// K or N.
        axis: &'static str,
        /// The first feature.
        start: usize,
        /// One past the last feature.
        end: usize,
        /// Features of the weight.
        length: usize,
    },
    /// A slice along K that starts within a group.
    #[error("a slice of K from row {start}, within a group ({group}); start it with a group")]
    SliceGroup {
        /// The first row.
        start: usize,
        /// The group size.
        group: GroupSize,
    },
    /// A slice along K of a weight whose rows are permuted.
    #[error(
        "a slice of K of a weight with act-order, whose groups have rows from all of K; slice it along N"
    )]
    SlicePermuted,
    /// Padding of the packed words that is not the midpoint.
    #[error("word {word} is {found:#010x}: its values past K or N must be {}, as in {:#010x}", .bits.midpoint(), .bits.padding_word())]
    Padding {
        /// Index of the word.
        word: usize,
        /// The word found.
        found: u32,
        /// Width of the values.
        bits: Bits,
    },
    /// A weight to quantise that is infinite or not a number.
    #[error(
        "the weight at row {row}, column {column} is {value}; only finite weights can be quantised"
    )]
    NonFiniteWeight {
        /// Input feature.
        row: usize,
        /// Output feature.
        column: usize,
        /// The weight found.
        value: f32,
    },
    /// A group whose scale is larger than its dtype can hold.
    #[error("the scale of the group at row {row}, column {column} is {value}, above the largest {dtype}; use {}", overflow_hint(*.dtype))]
    ScaleOverflow {
        /// First input feature of the group.
        row: usize,
        /// Output feature.
        column: usize,
        /// The scale before it is rounded to its dtype.
        value: f32,
        /// The dtype it does not fit.
        dtype: ScaleDtype,
    },
    /// A padding multiple that is not a multiple of the tile.
    #[error(
        "{axis} cannot be padded to multiples of {multiple}; it must be a positive multiple of the tile's {tile}"
    )]
    PadMultiple {
        /// `K` or `N`.
        axis: &'static str,
        /// The required multiple.
        multiple: usize,
        /// The tile's extent along that axis.
        tile: usize,
    },
    /// K or N of a layout that does not pad.
    #[error(
        "{axis} = {extent} is not a multiple of the tile's {tile}; the published 2:4 formats have whole tiles only"
    )]
    TileDoesNotDivide {
        /// `K` or `N`.
        axis: &'static str,
        /// K or N.
        extent: usize,
        /// The tile's extent along that axis.
        tile: usize,
    },
    /// A weight packed with a layout that is for another width.
    #[error("the Marlin tile layout holds {expected}, but the weight is {found}")]
    LayoutBits {
        /// Width of the layout's values.
        expected: Bits,
        /// Width of the weight's values.
        found: Bits,
    },
    /// A weight packed with the layout of another shape.
    #[error("the layout is for K = {k}, N = {n}, but the weight has K = {found_k}, N = {found_n}")]
    LayoutShape {
        /// Input features of the layout.
        k: usize,
        /// Output features of the layout.
        n: usize,
        /// Input features of the weight.
        found_k: usize,
        /// Output features of the weight.
        found_n: usize,
    },
}

fn overflow_hint(dtype: ScaleDtype) -> &'static str {
    match dtype {
        ScaleDtype::F16 => "bf16 scales (`ScaleDtype::BF16`; `--scales bf16` on the command line)",
        ScaleDtype::BF16 | ScaleDtype::F32 => "smaller weights",
    }
}
