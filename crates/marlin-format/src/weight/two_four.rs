//! 2:4 sparsity: pruning, and conversion between dense weights and 2:4 weights.

use std::borrow::Cow;

use rayon::prelude::*;

use super::quantize::quantize_rtn;
use super::{PlainParts, PlainWeight, QuantSpec, Sparsity, WeightDescriptor};
use crate::FormatError;
use crate::layout::{MetadataLayout, PlainLayout};

impl PlainWeight {
    /// Returns the weight with every value stored. A dense weight is borrowed unchanged.
    pub fn to_dense(&self) -> Cow<'_, Self> {
        match self.metadata() {
            None => Cow::Borrowed(self),
            Some(_) => Cow::Owned(self.clone().into_dense()),
        }
    }

    /// Converts to a weight with every value stored. A dense weight is returned unchanged.
    pub fn into_dense(self) -> Self {
        let Some(metadata) = self.metadata() else {
            return self;
        };
        let qweight = expand_two_four(
            &self.descriptor(),
            self.qweight(),
            metadata,
            self.zero_point_words().as_deref(),
        );
        Self {
            parts: PlainParts {
                qweight,
                metadata: None,
                ..self.into_parts()
            },
        }
    }

    /// Returns the weight in the 2:4 form. A weight that is already stored as 2:4 is borrowed
    /// unchanged. Of every four rows of a column, starting at a multiple of four, at most two may
    /// be nonzero.
    ///
    /// Where fewer than two values are nonzero, the earliest zero rows are stored as well.
    ///
    /// # Errors
    /// [`FormatError::NotTwoFour`] with the first four rows that violate the pattern;
    /// [`FormatError::SparseRows`] and [`FormatError::SparsePermuted`].
    pub fn to_two_four(&self) -> Result<Cow<'_, Self>, FormatError> {
        if self.metadata().is_some() {
            return Ok(Cow::Borrowed(self));
        }
        self.descriptor().with_sparsity(Sparsity::TwoFour).check()?;
        let (qweight, metadata) = match self.spec().value.per_word() {
            8 => self.compressed::<8>()?,
            _ => self.compressed::<4>()?,
        };
        let parts = PlainParts {
            k: self.k(),
            n: self.n(),
            spec: self.spec(),
            qweight,
            metadata: Some(metadata),
            scales: self.scales().clone(),
            zero_points: self.zero_points().map(<[u8]>::to_vec),
            row_permutation: None,
        };
        Ok(Cow::Owned(Self { parts }))
    }

    /// Returns the words of the kept values, and the metadata.
    fn compressed<const V: usize>(&self) -> Result<(Vec<u32>, Vec<u32>), FormatError> {
        let (k, n, dense) = (self.k(), self.n(), self.layout());
        let (columns, bits) = (dense.columns(), dense.bits);
        let kept = PlainLayout::new(k / 2, n, bits);
        let layout = MetadataLayout::new(k, n);
        let points = self.zero_point_words();
        let (mut words, mut metadata) = (
            kept.padding(),
            vec![MetadataLayout::PADDING_WORD; layout.words()],
        );
        // Each task processes the 32 rows of one row of metadata words.
        let tasks = words
            .par_chunks_mut(16 / V * columns)
            .zip(metadata.par_chunks_exact_mut(columns))
            .enumerate();
        tasks.try_for_each(|(block, (words, metadata))| {
            let rows = 32 * block..k.min(32 * block + 32);
            let zeros = zeros_of(&self.descriptor(), rows.start, points.as_deref());
            for four in rows.step_by(4) {
                let dense = &self.qweight()[four / V * columns..][..n];
                let (from, to) = (bits.bits() * (four % V), bits.bits() * (four / 2 % V));
                let line = &mut words[four % 32 / 2 / V * columns..][..n];
                for (column, (&dense, word)) in dense.iter().zip(line).enumerate() {
                    let values = (dense ^ zeros[column]) >> from;
                    let value = |i: usize| (values >> (bits.bits() * i)) & u32::from(bits.max());
                    let mask = (0..4).fold(0, |mask, i| mask | u8::from(value(i) != 0) << i);
                    let Some(places) = places(mask) else {
                        return Err(FormatError::NotTwoFour {
                            row: four,
                            column,
                            found: mask.count_ones() as usize,
                        });
                    };
                    let pair = value(usize::from(places & 3))
                        | value(usize::from(places >> 2)) << bits.bits();
                    let mask = (1u32 << (2 * bits.bits())) - 1;
                    *word = (*word & !(mask << to)) | ((pair ^ (zeros[column] & mask)) << to);
                    let slot = 4 * (four % 32 / 4);
                    metadata[column] =
                        (metadata[column] & !(15 << slot)) | u32::from(places) << slot;
                }
            }
            Ok(())
        })?;
        Ok((words, metadata))
    }

    /// Stores the weight as 2:4 if its values have the 2:4 pattern and the sparse tensor cores
    /// support the shape. The rows must be in their natural order, and K must be a multiple of 32.
    /// Any other weight is returned unchanged.
    pub fn detect_two_four(self) -> Self {
        let is_candidate = self.metadata().is_none()
            && !self.spec().value.is_float()
            && self.row_permutation().is_none()
            && self.k().is_multiple_of(32);
        // Nearly every dense weight fails this test, before memory for the 2:4 form is allocated.
        let is_candidate = is_candidate && self.first_rows_fit();
        let found = is_candidate
            .then(|| self.to_two_four().ok())
            .flatten()
            .map(Cow::into_owned);
        found.unwrap_or(self)
    }

    /// Returns true if at most two of the first four rows of every column are nonzero. The weight
    /// must be dense with at least four rows.
    fn first_rows_fit(&self) -> bool {
        let zero = |column: usize| {
            self.zero_points()
                .map_or(self.spec().value.midpoint(), |points| points[column])
        };
        (0..self.n()).all(|column| {
            (0..4)
                .filter(|&row| self.q(row, column) != zero(column))
                .count()
                <= 2
        })
    }
}

/// Expands a 2:4 weight to the words of all its values in the plain layout. The inputs are the
/// words of the kept values, the metadata and the zero points ([`PlainWeight::zero_point_words`]).
/// [`WeightDescriptor::tensors`] lists their lengths.
///
/// # Panics
/// Panics if a slice is shorter than the descriptor requires.
pub fn expand_two_four(
    descriptor: &WeightDescriptor,
    kept: &[u32],
    metadata: &[u32],
    zero_points: Option<&[u32]>,
) -> Vec<u32> {
    match descriptor.spec().value.per_word() {
        8 => expanded::<8>(descriptor, kept, metadata, zero_points),
        _ => expanded::<4>(descriptor, kept, metadata, zero_points),
    }
}

/// Implements [`expand_two_four`] for `V` values per word.
fn expanded<const V: usize>(
    descriptor: &WeightDescriptor,
    kept: &[u32],
    metadata: &[u32],
    zero_points: Option<&[u32]>,
) -> Vec<u32> {
    let layout = descriptor.with_sparsity(Sparsity::Dense).plain_layout();
    let columns = layout.columns();
    let mut words = vec![0; layout.words()];
    words
        .par_chunks_exact_mut(columns.max(1))
        .enumerate()
        .for_each(|(row, line)| {
            let first = V * row;
            let (half, shift) = (16 * (row % 2), first % 32);
            let (kept, metadata) = (
                &kept[row / 2 * columns..][..columns],
                &metadata[first / 32 * columns..][..columns],
            );
            for (((word, kept), metadata), zeros) in line
                .iter_mut()
                .zip(kept)
                .zip(metadata)
                .zip(zeros_of(descriptor, first, zero_points))
            {
                *word = expand::<V>((kept ^ zeros) >> half, metadata >> shift) ^ zeros;
            }
        });
    layout.pad(&mut words);
    words
}

/// Returns a word for every column of row `row`, in which every value represents a weight of 0.
fn zeros_of(descriptor: &WeightDescriptor, row: usize, zero_points: Option<&[u32]>) -> Vec<u32> {
    let (n, bits) = (descriptor.n, descriptor.spec().value);
    let columns = descriptor.plain_layout().columns();
    let mut zeros = vec![bits.padding_word(); columns];
    if let Some(points) = zero_points {
        let (per_word, everywhere) = (bits.per_word(), u32::MAX / u32::from(bits.max()));
        let of_group = &points
            [row / descriptor.spec().scales.group.rows(descriptor.k) * n.div_ceil(per_word)..];
        for (column, zeros) in zeros[..n].iter_mut().enumerate() {
            *zeros = everywhere
                * ((of_group[column / per_word] >> (bits.bits() * (column % per_word)))
                    & u32::from(bits.max()));
        }
    }
    zeros
}

/// Returns the metadata nibble for four values. The set bits of `mask`, lowest first, are the
/// nonzero values. Returns `None` if more than two values are nonzero.
const fn places(mask: u8) -> Option<u8> {
    Some(match mask {
        0b0000..=0b0011 => 4,
        0b0100 | 0b0101 => 8,
        0b0110 => 9,
        0b1000 | 0b1001 => 12,
        0b1010 => 13,
        0b1100 => 14,
        _ => return None,
    })
}

/// Expands the kept values in the lower 16 bits of `kept` to the word of `V` values from which they
/// were kept; the other values are 0. One nibble for every four values names the two kept values.
/// The function has no branches or tables, so that the loop over words can be vectorised.
#[inline]
fn expand<const V: usize>(kept: u32, nibbles: u32) -> u32 {
    let bits = 32 / V;
    // The bits of four values, and the lowest bit of every four values.
    let four = u32::MAX >> (32 - 4 * bits);
    let ones = u32::MAX / four;
    // Moves fields of `width` bits to the lowest bits of every four values.
    let spread = |fields: u32, width: usize| {
        (0..V / 4).fold(0, |spread, i| {
            spread | (((fields >> (width * i)) & ((1 << width) - 1)) << (4 * bits * i))
        })
    };
    let (pairs, nibbles) = (spread(kept, 2 * bits), spread(nibbles, 4));
    // Shifts values up by 0 to 3 positions: by one if the lower bit of `places` is set, then by two
    // if the upper bit is set.
    let place = |values: u32, places: u32| {
        let odd = (places & ones) * four;
        let values = (values & !odd) | ((values << bits) & odd);
        let upper = ((places >> 1) & ones) * four;
        (values & !upper) | ((values << (2 * bits)) & upper)
    };
    let value = ones * ((1 << bits) - 1);
    place(pairs & value, nibbles) | place((pairs >> bits) & value, nibbles >> 2)
}

/// Prunes `weight` (`[K, N]` row-major) to 2:4 without calibration data: sets the two values of
/// smallest magnitude to 0 in every four rows of each column. Among values of equal magnitude,
/// those in later rows are set to 0. A weight that is already 2:4 keeps all its values.
///
/// # Errors
/// [`FormatError::SparseRows`] if K is not a multiple of 4; [`FormatError::Length`] if `weight`
/// does not have K * N values; the errors of [`QuantSpec::check_shape`].
pub fn prune_two_four(weight: &mut [f32], k: usize, n: usize) -> Result<(), FormatError> {
    check_rows(weight, k, n)?;
    weight
        .par_chunks_exact_mut((4 * n).max(1))
        .for_each(|rows| {
            for column in 0..n {
                let magnitude = std::array::from_fn::<_, 4, _>(|i| rows[i * n + column].abs());
                for (i, value) in magnitude.iter().enumerate() {
                    let larger = magnitude.iter().enumerate().filter(|(other, magnitude)| {
                        let order = magnitude.total_cmp(value);
                        order.is_gt() || order.is_eq() && *other < i
                    });
                    if larger.count() >= 2 {
                        rows[i * n + column] = 0.0;
                    }
                }
            }
        });
    Ok(())
}

/// Checks that at most two of every four rows of each column of `weight` (`[K, N]` row-major) are
/// nonzero.
///
/// # Errors
/// [`FormatError::NotTwoFour`] with the first four rows that violate the pattern;
/// [`FormatError::SparseRows`]; [`FormatError::Length`]; the errors of [`QuantSpec::check_shape`].
pub fn check_two_four(weight: &[f32], k: usize, n: usize) -> Result<(), FormatError> {
    check_rows(weight, k, n)?;
    for (four, rows) in weight.chunks_exact((4 * n).max(1)).enumerate() {
        for column in 0..n {
            let found = (0..4).filter(|i| rows[i * n + column] != 0.0).count();
            if found > 2 {
                return Err(FormatError::NotTwoFour {
                    row: 4 * four,
                    column,
                    found,
                });
            }
        }
    }
    Ok(())
}

fn check_rows(weight: &[f32], k: usize, n: usize) -> Result<(), FormatError> {
    QuantSpec::check_shape(k, n)?;
    if !k.is_multiple_of(4) {
        return Err(FormatError::SparseRows { k });
    }
    match weight.len() == k * n {
        true => Ok(()),
        false => Err(FormatError::Length {
            what: "the weight",
            k,
            n,
            expected: k * n,
            found: weight.len(),
        }),
    }
}

/// Quantises `weight` (`[K, N]` row-major, f32) to nearest, either [dense](quantize_rtn) or [pruned
/// to 2:4 first](quantize_two_four). The result is stored as 2:4 in either case if the rounded
/// values [have that pattern](PlainWeight::detect_two_four).
///
/// # Errors
/// The errors of [`quantize_rtn`] and [`quantize_two_four`].
pub fn quantize(
    weight: Vec<f32>,
    k: usize,
    n: usize,
    spec: &QuantSpec,
    sparsity: Sparsity,
) -> Result<PlainWeight, FormatError> {
    match sparsity {
        Sparsity::Dense => quantize_rtn(&weight, k, n, spec).map(PlainWeight::detect_two_four),
        Sparsity::TwoFour => quantize_two_four(weight, k, n, spec),
    }
}

/// [Prunes](prune_two_four) `weight` (`[K, N]` row-major, f32) and [quantises](quantize_rtn) the
/// pruned values, into a 2:4 weight.
///
/// # Errors
/// The errors of [`prune_two_four`] and [`quantize_rtn`].
pub fn quantize_two_four(
    mut weight: Vec<f32>,
    k: usize,
    n: usize,
    spec: &QuantSpec,
) -> Result<PlainWeight, FormatError> {
    prune_two_four(&mut weight, k, n)?;
    Ok(quantize_rtn(&weight, k, n, spec)?
        .to_two_four()?
        .into_owned())
}
