//! 2:4: pruning, and weights that store two of every four values beside those that store all.

use std::borrow::Cow;

use rayon::prelude::*;

use super::quantize::quantize_rtn;
use super::{PlainParts, PlainWeight, QuantSpec, Sparsity, WeightDescriptor};
use crate::layout::{MetadataLayout, PlainLayout};
use crate::{Bits, FormatError};

impl PlainWeight {
    /// The same weight with every value stored; a dense one as it is.
    pub fn to_dense(&self) -> Cow<'_, Self> {
        match self.metadata() {
            None => Cow::Borrowed(self),
            Some(_) => Cow::Owned(self.clone().into_dense()),
        }
    }

    /// The same weight with every value stored; a dense one as it is.
    pub fn into_dense(self) -> Self {
        let Some(metadata) = self.metadata() else {
            return self;
        };
        let words = expand_two_four(
            &self.descriptor(),
            self.words(),
            metadata,
            self.zero_point_words().as_deref(),
        );
        Self {
            parts: PlainParts {
                words,
                metadata: None,
                ..self.into_parts()
            },
        }
    }

    /// The same weight as 2:4, one that is that as it is: of every four rows of a column, from a
    /// multiple of four on, at most two may be other than zero.
    ///
    /// Where fewer are, rows that come first are stored with them.
    ///
    /// # Errors
    /// [`FormatError::NotTwoFour`] with the first four rows that do not fit;
    /// [`FormatError::SparseRows`] and [`FormatError::SparsePermuted`].
    pub fn to_two_four(&self) -> Result<Cow<'_, Self>, FormatError> {
        if self.metadata().is_some() {
            return Ok(Cow::Borrowed(self));
        }
        self.descriptor().with_sparsity(Sparsity::TwoFour).check()?;
        let (words, metadata) = match self.spec().bits {
            Bits::Four => self.compressed::<8>()?,
            Bits::Eight => self.compressed::<4>()?,
        };
        let parts = PlainParts {
            k: self.k(),
            n: self.n(),
            spec: self.spec(),
            words,
            metadata: Some(metadata),
            scales: self.scales().clone(),
            zero_points: self.zero_points().map(<[u8]>::to_vec),
            row_permutation: None,
        };
        Ok(Cow::Owned(Self { parts }))
    }

    /// The words of kept values, and the metadata.
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
        // A task has the 32 rows of a row of metadata.
        let tasks = words
            .par_chunks_mut(16 / V * columns)
            .zip(metadata.par_chunks_exact_mut(columns))
            .enumerate();
        tasks.try_for_each(|(block, (words, metadata))| {
            let rows = 32 * block..k.min(32 * block + 32);
            let zeros = zeros_of(&self.descriptor(), rows.start, points.as_deref());
            for four in rows.step_by(4) {
                let dense = &self.words()[four / V * columns..][..n];
                let (from, to) = (bits.count() * (four % V), bits.count() * (four / 2 % V));
                let line = &mut words[four % 32 / 2 / V * columns..][..n];
                for (column, (&dense, word)) in dense.iter().zip(line).enumerate() {
                    let values = (dense ^ zeros[column]) >> from;
                    let value = |i: usize| (values >> (bits.count() * i)) & u32::from(bits.max());
                    let mask = (0..4).fold(0, |mask, i| mask | u8::from(value(i) != 0) << i);
                    let Some(places) = places(mask) else {
                        return Err(FormatError::NotTwoFour {
                            row: four,
                            column,
                            found: mask.count_ones() as usize,
                        });
                    };
                    let pair = value(usize::from(places & 3))
                        | value(usize::from(places >> 2)) << bits.count();
                    let mask = (1u32 << (2 * bits.count())) - 1;
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

    /// The same weight as 2:4, where it is that and sparse tensor cores take it: rows in their
    /// natural order, and K a multiple of 32.
    pub fn as_found(self) -> Self {
        let is_candidate = self.metadata().is_none()
            && self.row_permutation().is_none()
            && self.k().is_multiple_of(32);
        // Nearly every dense weight fails here, before memory is taken for another form of it.
        let is_candidate = is_candidate && self.first_rows_fit();
        let found = is_candidate
            .then(|| self.to_two_four().ok())
            .flatten()
            .map(Cow::into_owned);
        found.unwrap_or(self)
    }

    /// Returns true if at most two of the first four rows of every column are other than zero, of a
    /// dense weight of at least four rows.
    fn first_rows_fit(&self) -> bool {
        let zero = |column: usize| {
            self.zero_points()
                .map_or(self.spec().bits.midpoint(), |points| points[column])
        };
        (0..self.n()).all(|column| {
            (0..4)
                .filter(|&row| self.q(row, column) != zero(column))
                .count()
                <= 2
        })
    }
}

/// The words of all values of a 2:4 weight in the plain layout, from those of its kept values, its
/// metadata and its zero points ([`PlainWeight::zero_point_words`]): [`WeightDescriptor::tensors`]
/// lists their lengths.
///
/// # Panics
/// Panics if a slice is shorter than the descriptor says.
pub fn expand_two_four(
    descriptor: &WeightDescriptor,
    kept: &[u32],
    metadata: &[u32],
    zero_points: Option<&[u32]>,
) -> Vec<u32> {
    match descriptor.spec().bits {
        Bits::Four => expanded::<8>(descriptor, kept, metadata, zero_points),
        Bits::Eight => expanded::<4>(descriptor, kept, metadata, zero_points),
    }
}

/// [`expand_two_four`] of `V` values to a word.
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

/// For every column of row `row`, a word whose every value is that of a weight of 0.
fn zeros_of(descriptor: &WeightDescriptor, row: usize, zero_points: Option<&[u32]>) -> Vec<u32> {
    let (n, bits) = (descriptor.n, descriptor.spec().bits);
    let columns = descriptor.plain_layout().columns();
    let mut zeros = vec![bits.padding_word(); columns];
    if let Some(points) = zero_points {
        let (per_word, everywhere) = (bits.per_word(), u32::MAX / u32::from(bits.max()));
        let of_group =
            &points[row / descriptor.spec().group.rows(descriptor.k) * n.div_ceil(per_word)..];
        for (column, zeros) in zeros[..n].iter_mut().enumerate() {
            *zeros = everywhere
                * ((of_group[column / per_word] >> (bits.count() * (column % per_word)))
                    & u32::from(bits.max()));
        }
    }
    zeros
}

/// The nibble of metadata for four values of which those in `mask` are not zero, lowest bit first;
/// `None` for more than two.
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

/// The lower 16 bits of kept values in the word of the `V` values among which they were kept, the
/// others 0; a nibble for every four of these says which of them the two kept ones are. Without
/// branches and tables, so that many words go at a time.
#[inline]
fn expand<const V: usize>(kept: u32, nibbles: u32) -> u32 {
    let bits = 32 / V;
    // The bits of four values, and the lowest bit of every four.
    let four = u32::MAX >> (32 - 4 * bits);
    let ones = u32::MAX / four;
    // Fields of `width` bits to the lowest ones of every four.
    let spread = |fields: u32, width: usize| {
        (0..V / 4).fold(0, |spread, i| {
            spread | (((fields >> (width * i)) & ((1 << width) - 1)) << (4 * bits * i))
        })
    };
    let (pairs, nibbles) = (spread(kept, 2 * bits), spread(nibbles, 4));
    // Values up by 0 to 3 places: by one where the lower bit of `places` is set, then by two where
    // the upper one is.
    let place = |values: u32, places: u32| {
        let odd = (places & ones) * four;
        let values = (values & !odd) | ((values << bits) & odd);
        let upper = ((places >> 1) & ones) * four;
        (values & !upper) | ((values << (2 * bits)) & upper)
    };
    let value = ones * ((1 << bits) - 1);
    place(pairs & value, nibbles) | place((pairs >> bits) & value, nibbles >> 2)
}

/// Sets to 0 the two smallest values, by magnitude, of every four rows of each column of `weight`
/// (`[K, N]` row-major): 2:4 pruning that needs no data. Of equal ones, those in later rows. A
/// weight that is 2:4 keeps all its values.
///
/// # Errors
/// [`FormatError::SparseRows`] where K is not a multiple of 4; [`FormatError::Length`] where
/// `weight` does not have K * N values.
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
/// other than 0.
///
/// # Errors
/// [`FormatError::NotTwoFour`] with the first four rows that do not fit;
/// [`FormatError::SparseRows`]; [`FormatError::Length`].
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

/// Rounds `weight` (`[K, N]` row-major, f32) to [all of its values](quantize_rtn), or [prunes
/// it](quantize_two_four) before; 2:4 in any case where the rounded values
/// [are](PlainWeight::as_found).
///
/// # Errors
/// As both.
pub fn quantize(
    weight: Vec<f32>,
    k: usize,
    n: usize,
    spec: &QuantSpec,
    sparsity: Sparsity,
) -> Result<PlainWeight, FormatError> {
    match sparsity {
        Sparsity::Dense => quantize_rtn(&weight, k, n, spec).map(PlainWeight::as_found),
        Sparsity::TwoFour => quantize_two_four(weight, k, n, spec),
    }
}

/// [Prunes](prune_two_four) `weight` (`[K, N]` row-major, f32) and [rounds](quantize_rtn) what is
/// left, into a 2:4 weight.
///
/// # Errors
/// As both.
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
