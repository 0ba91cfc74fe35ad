//! Weights of the same input features, side by side as one.

use crate::layout::{MetadataLayout, PlainLayout};
use crate::{FormatError, PlainParts, PlainWeight, QuantSpec, Scales};

/// Weights that cannot be one: each needs a matmul of its own.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// Nothing to join.
    #[error("there are no weights to join")]
    Empty,
    /// Weights for other activations.
    #[error("weight {part} has K = {found}, the first K = {expected}")]
    InputFeatures {
        /// Index of the weight.
        part: usize,
        /// K of the first weight.
        expected: usize,
        /// K of this one.
        found: usize,
    },
    /// Weights in different formats.
    #[error("weight {part} is {found}, the first {expected}")]
    Spec {
        /// Index of the weight.
        part: usize,
        /// The quantisation of the first weight.
        expected: QuantSpec,
        /// The quantisation of this weight.
        found: QuantSpec,
    },
    /// Act-order weights whose rows are sorted differently: they need the activations in different
    /// orders.
    #[error("weight {part} has its rows in another order than the first")]
    RowOrder {
        /// Index of the weight.
        part: usize,
    },
    /// More output features or elements than a weight may have.
    #[error(transparent)]
    Format(#[from] FormatError),
}

impl PlainWeight {
    /// One weight [K, N1 + N2 + ..] with the columns of `parts` side by side. Its product is that
    /// of each part, bit for bit. It is 2:4 where all parts are; among dense ones a 2:4 part
    /// becomes dense.
    ///
    /// # Errors
    /// A [`JoinError`] where the parts differ in K, in how they are quantised, or in the order of
    /// their rows.
    pub fn join(parts: &[&PlainWeight]) -> Result<PlainWeight, JoinError> {
        Self::join_in(parts, |words| vec![0; words])
    }

    /// The same in memory of the caller's: `memory` returns the requested number of words, with any
    /// contents.
    pub(crate) fn join_in(
        parts: &[&PlainWeight],
        memory: impl FnOnce(usize) -> Vec<u32>,
    ) -> Result<PlainWeight, JoinError> {
        let [first, rest @ ..] = parts else {
            return Err(JoinError::Empty);
        };
        let (k, spec) = (first.k(), first.spec());
        for (part, weight) in rest
            .iter()
            .enumerate()
            .map(|(index, weight)| (index + 1, weight))
        {
            if weight.k() != k {
                return Err(JoinError::InputFeatures {
                    part,
                    expected: k,
                    found: weight.k(),
                });
            }
            if weight.spec() != spec {
                return Err(JoinError::Spec {
                    part,
                    expected: spec,
                    found: weight.spec(),
                });
            }
            if weight.row_permutation() != first.row_permutation() {
                return Err(JoinError::RowOrder { part });
            }
        }
        if parts.iter().any(|part| part.sparsity() != first.sparsity()) {
            let dense: Vec<_> = parts.iter().map(|part| part.to_dense()).collect();
            return Self::join_in(&dense.iter().map(AsRef::as_ref).collect::<Vec<_>>(), memory);
        }
        let n = parts
            .iter()
            .fold(0usize, |sum, part| sum.saturating_add(part.n()));
        QuantSpec::check_shape(k, n)?;

        let groups = spec.group.count(k);
        let layout = PlainLayout::new(first.sparsity().stored_rows(k), n, spec.bits);
        let mut words = memory(layout.words());
        join_words(
            &mut words,
            layout.columns(),
            parts,
            PlainWeight::words,
            spec.bits.padding_word(),
        );
        let metadata = first.metadata().map(|_| {
            let mut metadata = vec![0; MetadataLayout::new(k, n).words()];
            join_words(
                &mut metadata,
                layout.columns(),
                parts,
                |part| part.metadata().unwrap_or_default(),
                MetadataLayout::PADDING_WORD,
            );
            metadata
        });
        let scales = match first.scales() {
            Scales::F16(_) => {
                Scales::F16(side_by_side(parts, groups, |part| match part.scales() {
                    Scales::F16(values) => values,
                    _ => &[],
                }))
            }
            Scales::BF16(_) => {
                Scales::BF16(side_by_side(parts, groups, |part| match part.scales() {
                    Scales::BF16(values) => values,
                    _ => &[],
                }))
            }
            Scales::F32(_) => {
                Scales::F32(side_by_side(parts, groups, |part| match part.scales() {
                    Scales::F32(values) => values,
                    _ => &[],
                }))
            }
        };
        let zero_points = spec
            .zero_points
            .then(|| side_by_side(parts, groups, |part| part.zero_points().unwrap_or_default()));
        let row_permutation = first.row_permutation().map(<[u32]>::to_vec);
        Ok(PlainWeight::new(PlainParts {
            k,
            n,
            spec,
            words,
            metadata,
            scales,
            zero_points,
            row_permutation,
        })?)
    }
}

/// Fills rows of `columns` words with the rows of every part, which have padding of their own.
fn join_words(
    words: &mut [u32],
    columns: usize,
    parts: &[&PlainWeight],
    of: impl Fn(&PlainWeight) -> &[u32],
    padding: u32,
) {
    for (row, line) in words.chunks_exact_mut(columns).enumerate() {
        let mut start = 0;
        for part in parts {
            line[start..][..part.n()]
                .copy_from_slice(&of(part)[row * part.layout().columns()..][..part.n()]);
            start += part.n();
        }
        line[start..].fill(padding);
    }
}

/// The values `[groups, N]` of every part, row by row.
fn side_by_side<'a, T: Copy + 'a>(
    parts: &[&'a PlainWeight],
    groups: usize,
    values: impl Fn(&'a PlainWeight) -> &'a [T],
) -> Vec<T> {
    let mut joined = Vec::new();
    for group in 0..groups {
        for part in parts {
            joined.extend(values(part).iter().skip(group * part.n()).take(part.n()));
        }
    }
    joined
}
