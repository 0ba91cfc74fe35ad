//! The common form, to and from which every file format and device layout converts.

use rayon::prelude::*;
use std::fmt;

use super::{Scales, Sparsity, WeightDescriptor, WeightFormat};
use crate::layout::{MetadataLayout, PlainLayout};
use crate::{FormatError, QuantSpec, ScaleDtype, WeightValue};

/// The parts of a [`PlainWeight`], not yet checked.
#[derive(Debug, Clone, PartialEq)]
pub struct PlainParts {
    /// The number of input features (K).
    pub k: usize,
    /// The number of output features (N).
    pub n: usize,
    /// The quantisation of the weight.
    pub spec: QuantSpec,
    /// The stored values in [`PlainLayout`], padding the midpoint of the spec's bits: K rows, or
    /// K/2 of a 2:4 weight.
    pub qweight: Vec<u32>,
    /// The rows of a 2:4 weight's stored values, in [`MetadataLayout`]; `None` where the weight is
    /// dense.
    pub metadata: Option<Vec<u32>>,
    /// The scales `[G, N]`, row-major.
    pub scales: Scales,
    /// The zero points `[G, N]`, row-major, each 0..=15 (4 bits) or 0..=255 (8 bits). Present
    /// exactly if the spec has zero points.
    pub zero_points: Option<Vec<u8>>,
    /// The row permutation `[K]`: stored row `i` is natural input row `row_permutation[i]`. `None`
    /// if rows are in their natural order.
    pub row_permutation: Option<Vec<u32>>,
}

impl PlainParts {
    /// Returns the format and shape of the parts, in the plain layout.
    fn descriptor(&self) -> WeightDescriptor {
        let sparsity = if self.metadata.is_some() {
            Sparsity::TwoFour
        } else {
            Sparsity::Dense
        };
        let format = WeightFormat::dense(self.spec)
            .with_permutation(self.row_permutation.is_some())
            .with_sparsity(sparsity);
        WeightDescriptor::plain(format, self.k, self.n)
    }

    /// Undoes [`PlainWeight::zero_point_words`] of a weight with `n` output features.
    pub fn zero_points_of_words(words: &[u32], n: usize, bits: WeightValue) -> Vec<u8> {
        let per_word = bits.per_word();
        let zero = |word: u32, slot: usize| (word >> (bits.bits() * slot)) as u8 & bits.max();
        let row = |words: &[u32]| {
            (0..n)
                .map(|column| zero(words[column / per_word], column % per_word))
                .collect::<Vec<_>>()
        };
        words
            .chunks_exact(n.div_ceil(per_word))
            .flat_map(row)
            .collect()
    }
}

/// A checked 4-bit or 8-bit weight `[K, N]`.
///
/// Integers: `weight[row][n] = scale[g][n] * (q - z)`, with `q` in 0..=15 or 0..=255 and `z` the
/// zero point of the group, the [midpoint](crate::WeightValue::midpoint) 8 or 128 where the spec is
/// symmetric. Floats: `weight[row][n] = scale[g][n] * value`, the number of the code `q`
/// ([`WeightValue::decode`]).
///
/// **Act-order.** With a row permutation, the rows are stored sorted by group: stored row `i`
/// belongs to group `i / rows(K)` and is natural input row `row_permutation[i]`. A product gathers
/// the activations in the same order: `x'[i] = x[row_permutation[i]]`.
///
/// **2:4.** With metadata, two of every four rows of a column are stored, in order: stored row `i`
/// is one of rows `4 (i / 2)..4 (i / 2) + 4`. The other two rows have the value of the zero point,
/// which is a weight of 0. Group sizes count all rows, not only stored rows.
#[derive(Clone, PartialEq)]
pub struct PlainWeight {
    pub(super) parts: PlainParts,
}

impl PlainWeight {
    /// Creates a weight from `parts` after checking these conditions:
    ///
    /// * Sizes match the spec.
    /// * Scales are finite and have the spec's dtype.
    /// * Zero points are present exactly if the spec has zero points, and fit in the spec's bits.
    /// * Padding is the midpoint.
    /// * No value is NaN.
    /// * The row permutation names every row once.
    /// * Metadata name two rows in ascending order.
    ///
    /// # Errors
    /// A [`FormatError`] that names the violated condition and, where there is one, the position.
    pub fn new(parts: PlainParts) -> Result<Self, FormatError> {
        let PlainParts {
            k,
            n,
            spec,
            ref qweight,
            ref scales,
            ..
        } = parts;
        let descriptor = parts.descriptor();
        descriptor.check()?;
        let layout = descriptor.plain_layout();
        let per_group = spec.scales.group.count(k) * n;
        let length = |what, expected, found| match found == expected {
            true => Ok(()),
            false => Err(FormatError::Length {
                what,
                k,
                n,
                expected,
                found,
            }),
        };

        length("the packed weight", layout.words(), qweight.len())?;
        if let Some(word) = layout.bad_padding(qweight) {
            return Err(FormatError::Padding {
                word,
                found: qweight[word],
                bits: spec.value,
            });
        }

        if let Some((row, column)) = layout.first_nan(qweight) {
            return Err(FormatError::NanValue {
                value: spec.value,
                row,
                column,
            });
        }

        if let Some(metadata) = &parts.metadata {
            let layout = MetadataLayout::new(k, n);
            length("the metadata", layout.words(), metadata.len())?;
            if let Some((four, column)) = layout.first_bad(metadata) {
                return Err(FormatError::Metadata {
                    row: 4 * four,
                    column,
                    found: layout.index(four, column).read(metadata),
                });
            }
        }

        if scales.dtype() != spec.scales.dtype {
            return Err(FormatError::ScaleDtypeMismatch {
                expected: spec.scales.dtype,
                found: scales.dtype(),
            });
        }
        length("the scales", per_group, scales.len())?;
        if let Some(index) = scales.first_not_finite() {
            return Err(FormatError::NonFiniteScale {
                group: index / n,
                column: index % n,
                value: scales.get(index),
            });
        }

        match (&parts.zero_points, spec.has_zero_points()) {
            (None, false) => {}
            (None, true) => return Err(FormatError::MissingZeroPoints),
            (Some(_), false) => return Err(FormatError::UnexpectedZeroPoints),
            (Some(zero_points), true) => {
                length("the zero points", per_group, zero_points.len())?;
                let max = spec.value.max();
                if let Some(index) = position(zero_points, |zero_point| zero_point > max) {
                    return Err(FormatError::ZeroPoint {
                        group: index / n,
                        column: index % n,
                        found: zero_points[index],
                        max,
                    });
                }
            }
        }

        if let Some(permutation) = &parts.row_permutation {
            length("the row permutation", k, permutation.len())?;
            check_permutation(permutation)?;
        }
        Ok(Self { parts })
    }

    /// Returns the parts without a copy.
    pub fn into_parts(self) -> PlainParts {
        self.parts
    }

    /// Rounds the scales to another dtype. Returns the weight unchanged if a scale is too large for
    /// that dtype.
    pub fn with_scales_in(mut self, dtype: ScaleDtype) -> Self {
        Self::round_scales(std::slice::from_mut(&mut self), dtype);
        self
    }

    /// Rounds the scales of several weights to another dtype. Leaves all of them unchanged if a
    /// scale of one is too large for that dtype.
    pub fn round_scales(weights: &mut [Self], dtype: ScaleDtype) {
        let rounded = weights.iter().map(|weight| {
            let scales = Scales::from_f32(&weight.parts.scales.to_f32(), dtype);
            scales.first_not_finite().is_none().then_some(scales)
        });
        let Some(rounded) = rounded.collect::<Option<Vec<Scales>>>() else {
            return;
        };
        for (weight, scales) in weights.iter_mut().zip(rounded) {
            weight.parts.scales = scales;
            weight.parts.spec.scales.dtype = dtype;
        }
    }

    /// Returns K, the number of input features.
    pub fn k(&self) -> usize {
        self.parts.k
    }

    /// Returns N, the number of output features.
    pub fn n(&self) -> usize {
        self.parts.n
    }

    /// Returns the quantisation of the weight.
    pub fn spec(&self) -> QuantSpec {
        self.parts.spec
    }

    /// Returns the format and shape of the weight, in the plain layout.
    pub fn descriptor(&self) -> WeightDescriptor {
        self.parts.descriptor()
    }

    /// Returns the pattern of the stored values.
    pub fn sparsity(&self) -> Sparsity {
        self.descriptor().format.sparsity
    }

    /// The packed values, in [`layout`](Self::layout).
    pub fn qweight(&self) -> &[u32] {
        &self.parts.qweight
    }

    /// Returns the metadata of a 2:4 weight in [`MetadataLayout`], which name the rows of the
    /// stored values. `None` for a dense weight.
    pub fn metadata(&self) -> Option<&[u32]> {
        self.parts.metadata.as_deref()
    }

    /// Returns the scales, `[G, N]` row-major.
    pub fn scales(&self) -> &Scales {
        &self.parts.scales
    }

    /// Returns the zero points, `[G, N]` row-major, each 0..=15 or 0..=255. `None` if the spec is
    /// symmetric.
    pub fn zero_points(&self) -> Option<&[u8]> {
        self.parts.zero_points.as_deref()
    }

    /// Returns the zero points as packed words, as in the plain layout: `[G, N/8]` (4 bits) or
    /// `[G, N/4]` (8 bits), rounded up. The first zero point is in the lowest bits.
    pub fn zero_point_words(&self) -> Option<Vec<u32>> {
        let bits = self.spec().value;
        let word = |zeros: &[u8]| {
            zeros
                .iter()
                .rev()
                .fold(0, |word, &zero| word << bits.bits() | u32::from(zero))
        };
        self.zero_points().map(|zeros| {
            zeros
                .chunks(self.n())
                .flat_map(|row| row.chunks(bits.per_word()).map(word))
                .collect()
        })
    }

    /// Returns the natural input row of each stored row, `[K]`. `None` if rows are stored in their
    /// natural order.
    pub fn row_permutation(&self) -> Option<&[u32]> {
        self.parts.row_permutation.as_deref()
    }

    /// Returns the layout of the values in [`qweight`](Self::qweight), with K rows, or K/2 rows for
    /// a 2:4 weight.
    pub fn layout(&self) -> PlainLayout {
        self.descriptor().plain_layout()
    }

    /// Returns the quantised value at a stored row and a column, 0..=15 or 0..=255.
    ///
    /// # Panics
    /// Panics if `stored_row` or `column` is outside the padded weight.
    pub fn q(&self, stored_row: usize, column: usize) -> u8 {
        self.layout()
            .index(stored_row, column)
            .read(&self.parts.qweight)
    }

    /// Returns the weight in f32, `[K, N]` row-major, with rows in their natural order.
    pub fn dequantize(&self) -> Vec<f32> {
        if self.parts.metadata.is_some() {
            return self.to_dense().dequantize();
        }
        let PlainParts {
            k,
            n,
            spec,
            ref qweight,
            ..
        } = self.parts;
        let group_rows = spec.scales.group.rows(k);
        let layout = self.layout();
        let max = u32::from(spec.value.max());
        let scales = self.parts.scales.to_f32();
        let numbers: Vec<f32> = (0..=spec.value.max())
            .map(|code| spec.value.decode(code))
            .collect();
        // The stored row of each natural one.
        let stored_rows = self.parts.row_permutation.as_ref().map(|permutation| {
            let mut stored = vec![0; k];
            permutation
                .iter()
                .enumerate()
                .for_each(|(row, &natural)| stored[natural as usize] = row);
            stored
        });
        let mut weight = vec![0.0f32; k * n];
        weight
            .par_chunks_exact_mut(n.max(1))
            .enumerate()
            .for_each(|(natural, row)| {
                let stored = stored_rows
                    .as_ref()
                    .map_or(natural, |stored| stored[natural]);
                let group = stored / group_rows * n;
                let start = layout.index(stored, 0);
                let (packed, shift) = (&qweight[start.word..][..n], start.shift());
                let values = row
                    .iter_mut()
                    .zip(packed)
                    .zip(&scales[group..])
                    .map(|((value, word), scale)| (value, (word >> shift) & max, scale));
                match &self.parts.zero_points {
                    Some(all) => {
                        values
                            .zip(&all[group..])
                            .for_each(|((value, q, scale), &zero)| {
                                *value = scale * (q as f32 - f32::from(zero))
                            })
                    }
                    None => {
                        values.for_each(|(value, q, scale)| *value = scale * numbers[q as usize])
                    }
                }
            });
        weight
    }

    /// Bytes that this form takes: packed values and metadata with their padding, scales, zero
    /// points (a byte each) and row permutation.
    pub fn size_bytes(&self) -> usize {
        let PlainParts {
            qweight,
            metadata,
            scales,
            zero_points,
            row_permutation,
            ..
        } = &self.parts;
        size_of_val(qweight.as_slice())
            + metadata
                .as_ref()
                .map_or(0, |metadata| size_of_val(metadata.as_slice()))
            + scales.as_bytes().len()
            + zero_points.as_ref().map_or(0, Vec::len)
            + row_permutation
                .as_ref()
                .map_or(0, |permutation| size_of_val(permutation.as_slice()))
    }

    /// Returns the number of bits for each of the K * N weights in files. There a zero point takes
    /// the spec's bits, and a scale of e2m1 takes a byte; in this form a zero point takes a byte,
    /// and a scale of e2m1 the spec's dtype.
    pub fn bits_per_weight(&self) -> f64 {
        let PlainParts {
            spec,
            scales,
            zero_points,
            ..
        } = &self.parts;
        let zero_points = zero_points.as_ref().map_or(0, Vec::len);
        let scales = match spec.value {
            WeightValue::E2m1 => 8 * (scales.as_bytes().len() - scales.len()),
            _ => 0,
        };
        let saved = (8 - spec.value.bits()) * zero_points + scales;
        (8.0 * self.size_bytes() as f64 - saved as f64)
            / (self.parts.k as f64 * self.parts.n as f64)
    }
}

impl fmt::Debug for PlainWeight {
    /// Formats the shape and the spec only, because the values of a layer are too many to read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlainWeight")
            .field("k", &self.parts.k)
            .field("n", &self.parts.n)
            .field("spec", &format_args!("{}", self.parts.spec))
            .field("sparsity", &format_args!("{}", self.sparsity()))
            .field("row_permutation", &self.parts.row_permutation.is_some())
            .finish_non_exhaustive()
    }
}

/// Returns the index of the first value for which `is_bad` returns true. A first pass tests all
/// values without a branch for each value, so that the pass can be vectorised.
pub(crate) fn position<T: Copy>(values: &[T], is_bad: impl Fn(T) -> bool) -> Option<usize> {
    match values.iter().fold(false, |any, &value| any | is_bad(value)) {
        true => values.iter().position(|&value| is_bad(value)),
        false => None,
    }
}

fn check_permutation(permutation: &[u32]) -> Result<(), FormatError> {
    let mut seen = vec![false; permutation.len()];
    for (position, &row) in permutation.iter().enumerate() {
        match seen.get_mut(row as usize) {
            None => {
                return Err(FormatError::PermutationRange {
                    position,
                    found: row,
                    last: permutation.len().saturating_sub(1),
                });
            }
            Some(true) => return Err(FormatError::PermutationDuplicate { position, row }),
            Some(unseen) => *unseen = true,
        }
    }
    Ok(())
}
