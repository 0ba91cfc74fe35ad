//! Errors of weights, specs and layouts, independent of any file.

use crate::{GroupSize, ScaleDtype, WeightValue};

/// An inconsistency in a weight, a spec or a layout.
///
/// Every message states the expected value, the value found and, if one exists, a remedy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// A bit width of quantised values that no kernel of this project supports.
    #[error("weights of {found} bits are not supported; use 4 or 8")]
    Bits {
        /// The number found.
        found: i64,
    },
    /// A text that does not name a kind of floats.
    #[error("`{found}` is not a kind of values; use 4, 8, \"e2m1\" or \"e4m3\"")]
    ValueName {
        /// The text found.
        found: String,
    },
    /// A group size that no kernel of this project supports for this kind of values.
    #[error(
        "{value} values in groups of {} are not supported; use {}", group_name(*.group), group_names(value.groups())
    )]
    ValueGroup {
        /// The kind of values.
        value: WeightValue,
        /// The group size found.
        group: GroupSize,
    },
    /// Zero points beside floats.
    #[error("{value} values have no zero points; use a symmetric spec")]
    FloatZeroPoints {
        /// The kind of values.
        value: WeightValue,
    },
    /// A 2:4 weight of floats.
    #[error("a 2:4 weight of {value} values is not supported; keep this weight dense")]
    SparseFloats {
        /// The kind of values.
        value: WeightValue,
    },
    /// Activations in e4m3 beside weights of other values.
    #[error(
        "activations are rounded to e4m3 only beside weights of e4m3, this weight is {value}; leave its activations as they are"
    )]
    Fp8Activations {
        /// The kind of values.
        value: WeightValue,
    },
    /// Floats in a file format of integers.
    #[error("{format} files hold integers, this weight is {value}; write it as compressed-tensors")]
    IntegerFormat {
        /// The file format.
        format: &'static str,
        /// The kind of values.
        value: WeightValue,
    },
    /// Floats in groups for which no file format is written.
    #[error(
        "{value} values in groups of {} are not written to files; quantise to fp8, mxfp4 or nvfp4", group_name(*.group)
    )]
    UnwrittenGroup {
        /// The kind of values.
        value: WeightValue,
        /// The group size.
        group: GroupSize,
    },
    /// A weight of no matrices.
    #[error("a weight of 0 experts; a weight has one matrix or more")]
    NoExperts,
    /// A value whose code is NaN.
    #[error("the {value} value at row {row}, column {column} is NaN; weights must be finite")]
    NanValue {
        /// The kind of values.
        value: WeightValue,
        /// The stored row.
        row: usize,
        /// The index of the output feature.
        column: usize,
    },
    /// A group size that no kernel of this project supports.
    #[error(
        "group size {found} is not supported; use -1 (one group per output channel), 16, 32, 64 or 128"
    )]
    GroupSize {
        /// The number found.
        found: i64,
    },
    /// A text that does not name a group size.
    #[error("`{found}` is not a group size; use channel, g16, g32, g64 or g128")]
    GroupSizeName {
        /// The text found.
        found: String,
    },
    /// A shape in which K or N is zero.
    #[error("a weight of K = {k} by N = {n} has no elements; both must be at least 1")]
    Empty {
        /// The number of input features (K).
        k: usize,
        /// The number of output features (N).
        n: usize,
    },
    /// A shape in which K or N is above
    /// [`QuantSpec::MAX_FEATURES`](crate::QuantSpec::MAX_FEATURES).
    #[error("a weight of K = {k} by N = {n} is too large; each may be at most {limit}")]
    TooLarge {
        /// The number of input features (K).
        k: usize,
        /// The number of output features (N).
        n: usize,
        /// The largest K or N.
        limit: usize,
    },
    /// A shape in which K * N is above [`QuantSpec::MAX_ELEMENTS`](crate::QuantSpec::MAX_ELEMENTS).
    #[error(
        "a weight of K = {k} by N = {n} has {elements} elements; kernels address at most {limit}: split its output features into several layers, \
         or leave it as floats"
    )]
    TooManyElements {
        /// The number of input features (K).
        k: usize,
        /// The number of output features (N).
        n: usize,
        /// The product K * N.
        elements: usize,
        /// The largest K * N.
        limit: usize,
    },
    /// A buffer whose length does not match the shape of the weight.
    #[error("{what} has {found} values; K = {k}, N = {n} needs {expected}")]
    Length {
        /// The name of the buffer.
        what: &'static str,
        /// The number of input features (K).
        k: usize,
        /// The number of output features (N).
        n: usize,
        /// The length that the shape requires.
        expected: usize,
        /// The length of the buffer.
        found: usize,
    },
    /// Scales in a dtype other than the spec's.
    #[error("the spec says {expected} scales, but the scales are {found}")]
    ScaleDtypeMismatch {
        /// The dtype in the spec.
        expected: ScaleDtype,
        /// The dtype of the scales.
        found: ScaleDtype,
    },
    /// A scale that is infinite or NaN.
    #[error("the scale of group {group}, column {column} is {value}; scales must be finite")]
    NonFiniteScale {
        /// The index of the group along K.
        group: usize,
        /// The index of the output feature.
        column: usize,
        /// The scale found.
        value: f32,
    },
    /// Missing zero points, although the spec has zero points.
    #[error("the spec says zero points, but none are given; give them or use a symmetric spec")]
    MissingZeroPoints,
    /// Unexpected zero points, although the spec is symmetric.
    #[error(
        "the spec is symmetric, but zero points are given; drop them or use a spec with zero points"
    )]
    UnexpectedZeroPoints,
    /// A zero point that does not fit in the weight's bit width.
    #[error("the zero point of group {group}, column {column} is {found}; it must be in 0..={max}")]
    ZeroPoint {
        /// The index of the group along K.
        group: usize,
        /// The index of the output feature.
        column: usize,
        /// The zero point found.
        found: u8,
        /// The largest value of the weight's bit width.
        max: u8,
    },
    /// A 2:4 weight whose K is not a multiple of 4.
    #[error(
        "a 2:4 weight of K = {k}; K must be a multiple of 4, of which two values are kept: keep this weight dense"
    )]
    SparseRows {
        /// The number of input features (K).
        k: usize,
    },
    /// A 2:4 weight with act-order. Act-order sorts the rows by group, so four stored neighbours
    /// are not the four rows that were pruned together.
    #[error(
        "a 2:4 weight with act-order; its rows must be in their natural order: keep this weight dense, or quantise without act-order"
    )]
    SparsePermuted,
    /// A weight that is not 2:4, although a 2:4 weight is required.
    #[error(
        "rows {row} to {} of column {column} have {found} values that are not zero; a 2:4 weight has at most two of every four: prune it, or \
         keep it dense", row + 3
    )]
    NotTwoFour {
        /// The first of the four rows.
        row: usize,
        /// The index of the output feature.
        column: usize,
        /// The number of nonzero values.
        found: usize,
    },
    /// A spec that the published 2:4 file format does not support.
    #[error(
        "`marlin-24` files hold symmetric integers in groups of 128 rows or one a channel, this one is {found}; choose such a spec, or another format"
    )]
    Marlin24Spec {
        /// The spec found.
        found: crate::QuantSpec,
    },
    /// A metadata nibble that does not name two rows in ascending order, or a padding nibble that
    /// does not name the first two rows.
    #[error(
        "the metadata of rows {row} to {} of column {column} are {found:#x}; they must name two rows in ascending order: 4, 8, 9, 12, 13 or 14, \
         and 4 in padding", row + 3
    )]
    Metadata {
        /// The first of the four rows.
        row: usize,
        /// The index of the output feature.
        column: usize,
        /// The nibble found.
        found: u8,
    },
    /// A row permutation that names a row outside the weight.
    #[error(
        "the row permutation names row {found} at position {position}; rows go from 0 to {last}"
    )]
    PermutationRange {
        /// The index in the permutation.
        position: usize,
        /// The row at that index.
        found: u32,
        /// The last row, K - 1.
        last: usize,
    },
    /// A row permutation that names a row twice.
    #[error(
        "the row permutation names row {row} a second time at position {position}; it must name every row once"
    )]
    PermutationDuplicate {
        /// The index in the permutation.
        position: usize,
        /// The row at that index.
        row: u32,
    },
    /// A slice that is empty or extends past the weight.
    #[error(
        "a slice of {axis} from {start} to {end} of {length} features; it must have at least one and end within them"
    )]
    SliceRange {
        /// The axis, `K` or `N`.
        axis: &'static str,
        /// The first feature.
        start: usize,
        /// One past the last feature.
        end: usize,
        /// The number of features of the weight along that axis.
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
    /// A slice along K of a weight with a row permutation (act-order).
    #[error(
        "a slice of K of a weight with act-order, whose groups have rows from all of K; slice it along N"
    )]
    SlicePermuted,
    /// A packed word whose padding is not the midpoint.
    #[error("word {word} is {found:#010x}: its values past K or N must be {}, as in {:#010x}", .bits.midpoint(), .bits.padding_word())]
    Padding {
        /// The index of the word.
        word: usize,
        /// The word found.
        found: u32,
        /// Width of the values.
        bits: WeightValue,
    },
    /// A value to quantise that is infinite or NaN.
    #[error(
        "the weight at row {row}, column {column} is {value}; only finite weights can be quantised"
    )]
    NonFiniteWeight {
        /// The index of the input feature.
        row: usize,
        /// The index of the output feature.
        column: usize,
        /// The weight found.
        value: f32,
    },
    /// A scale that is larger than its dtype can represent.
    #[error("the scale of the group at row {row}, column {column} is {value}, above the largest {dtype}; use {}", overflow_hint(*.dtype))]
    ScaleOverflow {
        /// The first input feature of the group.
        row: usize,
        /// The index of the output feature.
        column: usize,
        /// The scale before rounding to its dtype.
        value: f32,
        /// The dtype that cannot represent the scale.
        dtype: ScaleDtype,
    },
    /// A padding multiple that is not a positive multiple of the tile's extent.
    #[error(
        "{axis} cannot be padded to multiples of {multiple}; it must be a positive multiple of the tile's {tile}"
    )]
    PadMultiple {
        /// The axis, `K` or `N`.
        axis: &'static str,
        /// The required multiple.
        multiple: usize,
        /// The tile's extent along that axis.
        tile: usize,
    },
    /// An extent that is not a multiple of the tile, in a layout without padding.
    #[error(
        "{axis} = {extent} is not a multiple of the tile's {tile}; the published 2:4 formats have whole tiles only"
    )]
    TileDoesNotDivide {
        /// The axis, `K` or `N`.
        axis: &'static str,
        /// The extent, K or N.
        extent: usize,
        /// The tile's extent along that axis.
        tile: usize,
    },
    /// A weight whose bit width differs from that of the layout.
    #[error("the Marlin tile layout holds {expected}, but the weight is {found}")]
    LayoutBits {
        /// Width of the layout's values.
        expected: WeightValue,
        /// Width of the weight's values.
        found: WeightValue,
    },
    /// A weight whose shape differs from that of the layout.
    #[error("the layout is for K = {k}, N = {n}, but the weight has K = {found_k}, N = {found_n}")]
    LayoutShape {
        /// The number of input features (K) of the layout.
        k: usize,
        /// The number of output features (N) of the layout.
        n: usize,
        /// The number of input features (K) of the weight.
        found_k: usize,
        /// The number of output features (N) of the weight.
        found_n: usize,
    },
}

/// Returns a group size as a number of rows, or in words for one group over all of K.
fn group_name(group: GroupSize) -> String {
    match group {
        GroupSize::Channel => "all rows".into(),
        rows => rows.as_i64().to_string(),
    }
}

fn group_names(groups: &[GroupSize]) -> String {
    let names: Vec<_> = groups.iter().copied().map(group_name).collect();
    names.join(" or ")
}

fn overflow_hint(dtype: ScaleDtype) -> &'static str {
    match dtype {
        ScaleDtype::F16 => "bf16 scales (`ScaleDtype::BF16`; `--scales bf16` on the command line)",
        ScaleDtype::BF16 | ScaleDtype::F32 => "smaller weights",
    }
}
