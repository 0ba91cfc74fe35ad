//! A packed weight in host memory, and the reader of its words, scales and zero points.

use super::simd::{LANES, Simd};
use crate::{KernelError, QuantProblem};
use half::{bf16, f16};
use marlin_format::layout::PlainLayout;
use marlin_format::{WeightTensors, WeightValue};
use std::ops::Range;

/// A slice of floats in their stored dtype.
#[derive(Debug, Clone, Copy)]
pub enum Floats<'a> {
    /// 32-bit float.
    F32(&'a [f32]),
    /// IEEE half.
    F16(&'a [f16]),
    /// bfloat16.
    BF16(&'a [bf16]),
}

impl Floats<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::BF16(values) => values.len(),
        }
    }

    /// Returns the values in a range.
    ///
    /// # Panics
    /// Panics if the range ends beyond the values.
    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(values) => Self::F32(&values[range]),
            Self::F16(values) => Self::F16(&values[range]),
            Self::BF16(values) => Self::BF16(&values[range]),
        }
    }

    /// Loads the values from `start` on; lanes past the end have any value.
    #[inline(always)]
    pub(super) fn load<S: Simd>(&self, simd: S, start: usize) -> S::F32 {
        match self {
            Self::F32(values) => simd.load(&lanes(values, start)),
            Self::F16(values) => simd.load_f16(&lanes(values, start)),
            Self::BF16(values) => simd.load_bf16(&lanes(values, start)),
        }
    }
}

/// A mutable slice of floats, for results.
#[derive(Debug)]
pub enum FloatsMut<'a> {
    /// 32-bit float.
    F32(&'a mut [f32]),
    /// IEEE half.
    F16(&'a mut [f16]),
    /// bfloat16.
    BF16(&'a mut [bf16]),
}

impl FloatsMut<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::BF16(values) => values.len(),
        }
    }
}

/// Returns the values from `start` on, and default values past the end.
#[inline(always)]
pub fn lanes<T: Copy + Default>(values: &[T], start: usize) -> [T; LANES] {
    if let Some(values) = values.get(start..).and_then(<[T]>::first_chunk) {
        return *values;
    }
    std::array::from_fn(|lane| values.get(start + lane).copied().unwrap_or_default())
}

/// A weight in host memory, in the plain layout.
#[derive(Debug, Clone, Copy)]
pub struct HostWeight<'a> {
    /// The packed values in the [`PlainLayout`]: [ceil(K / 8), N rounded up to a multiple of 8];
    /// with 8 bits ceil(K / 4) rows.
    pub words: &'a [u32],
    /// The scales [G, N].
    pub scales: Floats<'a>,
    /// The zero points [G, ceil(N / 8)], eight to a word along N; with 8 bits [G, ceil(N / 4)],
    /// four to a word. `None` if the weight is symmetric.
    pub zero_points: Option<&'a [u32]>,
    /// The natural row of each stored row, `[K]`; `None` if the rows are in natural order.
    pub row_permutation: Option<&'a [u32]>,
}

impl HostWeight<'_> {
    pub(crate) fn check(&self, problem: &QuantProblem) -> Result<(), KernelError> {
        problem.expect_weight(&WeightTensors {
            qweight: self.words.len(),
            metadata: None,
            scales: self.scales.len(),
            zero_points: self.zero_points.map(<[u32]>::len),
            row_permutation: self.row_permutation.map(<[u32]>::len),
        })
    }
}

/// A weight, with the numbers that the kernels' loops need.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    weight: HostWeight<'a>,
    n: usize,
    /// Number of words in a row of words.
    columns: usize,
    /// The kind of the values.
    pub value: WeightValue,
    /// Rows of K that share a scale.
    group: usize,
    /// Rows of K whose products are added up before the scale is applied.
    pub chunk: usize,
}

/// Maximum number of rows of K in one sum. If a whole column shares a scale, a longer sum would
/// lose digits when the part of the zero point is subtracted from it.
const MAX_CHUNK: usize = 128;

impl<'a> Reader<'a> {
    pub fn new(problem: &QuantProblem, weight: HostWeight<'a>) -> Self {
        let (n, k, spec) = (problem.n(), problem.k(), problem.spec());
        let (group, columns) = (
            spec.scales.group.rows(k),
            PlainLayout::new(k, n, spec.value).columns(),
        );
        // With groups of 16 to 128 rows, a chunk is a group.
        Self {
            weight,
            n,
            columns,
            value: spec.value,
            group,
            chunk: group.clamp(1, MAX_CHUNK),
        }
    }

    /// Loads the words of a vector of columns from `column` on; `column` is below N.
    #[inline(always)]
    pub fn words<S: Simd>(&self, simd: S, row: usize, column: usize) -> S::U32 {
        simd.load_words(&lanes(self.weight.words, row * self.columns + column))
    }

    /// Prefetches the cache line of a word.
    #[inline(always)]
    pub fn prefetch<S: Simd>(&self, simd: S, row: usize, column: usize) {
        simd.prefetch(self.weight.words, row * self.columns + column);
    }

    /// Loads the scales of a vector of columns in a chunk; lanes beyond N have any value.
    #[inline(always)]
    pub fn scales<S: Simd>(&self, simd: S, chunk: usize, column: usize) -> S::F32 {
        self.weight
            .scales
            .load(simd, self.group_of(chunk) * self.n + column)
    }

    /// Loads the zero points of a vector of columns in a chunk; lanes beyond N have any value.
    #[inline(always)]
    pub fn zeros<S: Simd>(&self, simd: S, chunk: usize, column: usize) -> S::F32 {
        let Some(words) = self.weight.zero_points else {
            return simd.splat(f32::from(self.value.midpoint()));
        };
        let (bits, per_word) = (self.value.bits(), self.value.per_word());
        let row = self.group_of(chunk) * self.n.div_ceil(per_word);
        // A vector's first column is the first value of a word.
        let word = |lane: usize| {
            words
                .get(row + column / per_word + lane / per_word)
                .copied()
                .unwrap_or_default()
        };
        let words = simd.load_words(&std::array::from_fn(word));
        let shifted = simd.shift_right_each(
            words,
            &std::array::from_fn(|lane| (lane % per_word * bits) as u32),
        );
        simd.to_f32(simd.and(shifted, u32::from(self.value.max())))
    }

    /// Returns the scales of a vector of columns in a chunk, and the offsets `-zero scale` that are
    /// added to the products of scales and stored values.
    #[inline(always)]
    pub fn scale_and_offset<S: Simd>(
        &self,
        simd: S,
        chunk: usize,
        column: usize,
    ) -> (S::F32, S::F32) {
        let scales = self.scales(simd, chunk, column);
        let minus_zeros = simd.mul(self.zeros(simd, chunk, column), simd.splat(-1.0));
        (scales, simd.mul(minus_zeros, scales))
    }

    fn group_of(&self, chunk: usize) -> usize {
        chunk * self.chunk / self.group.max(1)
    }
}
