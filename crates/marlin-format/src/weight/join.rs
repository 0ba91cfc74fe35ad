//! Joins of weights with the same input features into one weight.

use rayon::prelude::*;

use crate::layout::{MetadataLayout, PlainLayout};
use crate::{FormatError, PlainParts, PlainWeight, QuantSpec, Scales};

/// The reason why weights cannot be joined and each weight needs a matmul of its own.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// An empty list of weights.
    #[error("there are no weights to join")]
    Empty,
    /// Weights with different numbers of input features (K).
    #[error("weight {part} has K = {found}, the first K = {expected}")]
    InputFeatures {
        /// The index of the weight.
        part: usize,
        /// The K of the first weight.
        expected: usize,
        /// The K of this weight.
        found: usize,
    },
    /// Weights with different quantisation.
    #[error("weight {part} is {found}, the first {expected}")]
    Spec {
        /// The index of the weight.
        part: usize,
        /// The quantisation of the first weight.
        expected: QuantSpec,
        /// The quantisation of this weight.
        found: QuantSpec,
    },
    /// Act-order weights with different row permutations, which need the activations in different
    /// orders.
    #[error("weight {part} has its rows in another order than the first")]
    RowOrder {
        /// The index of the weight.
        part: usize,
    },
    /// A joined weight with more output features or elements than a weight may have.
    #[error(transparent)]
    Format(#[from] FormatError),
}

impl PlainWeight {
    /// Joins `parts` into one weight `[K, N1 + N2 + ..]` with the columns of the parts side by
    /// side. The product with the joined weight equals the products with the parts, bit for bit.
    /// The joined weight is 2:4 if all parts are 2:4. Otherwise every 2:4 part is converted to
    /// dense.
    ///
    /// # Errors
    /// A [`JoinError`] if the parts differ in K, in their quantisation, or in their row
    /// permutation.
    pub fn join(parts: &[&PlainWeight]) -> Result<PlainWeight, JoinError> {
        Self::join_in(parts, |words| vec![0; words])
    }

    /// Joins `parts` as [`join`](Self::join) does, in memory of the caller. `memory` returns the
    /// requested number of words, with any contents.
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

        let groups = spec.scales.group.count(k);
        let layout = PlainLayout::new(first.sparsity().stored_rows(k), n, spec.value);
        let mut qweight = memory(layout.words());
        join_words(
            &mut qweight,
            layout.columns(),
            parts,
            PlainWeight::qweight,
            spec.value.padding_word(),
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
            .has_zero_points()
            .then(|| side_by_side(parts, groups, |part| part.zero_points().unwrap_or_default()));
        let row_permutation = first.row_permutation().map(<[u32]>::to_vec);
        Ok(PlainWeight::new(PlainParts {
            k,
            n,
            spec,
            qweight,
            metadata,
            scales,
            zero_points,
            row_permutation,
        })?)
    }
}

/// Fills rows of `columns` words with the rows of every part, on all cores. Each part has padding
/// of its own.
fn join_words(
    words: &mut [u32],
    columns: usize,
    parts: &[&PlainWeight],
    of: impl Fn(&PlainWeight) -> &[u32] + Sync,
    padding: u32,
) {
    let lines = words.par_chunks_exact_mut(columns).enumerate();
    lines.for_each(|(row, line)| {
        let mut start = 0;
        for part in parts {
            line[start..][..part.n()]
                .copy_from_slice(&of(part)[row * part.layout().columns()..][..part.n()]);
            start += part.n();
        }
        line[start..].fill(padding);
    });
}

/// Concatenates the values `[groups, N]` of every part, row by row.
fn side_by_side<'a, T: Copy + 'a>(
    parts: &[&'a PlainWeight],
    groups: usize,
    values: impl Fn(&'a PlainWeight) -> &'a [T],
) -> Vec<T> {
    let lines = (0..groups).flat_map(|group| {
        let values = &values;
        let line = move |part: &&'a PlainWeight| &values(part)[group * part.n()..][..part.n()];
        parts.iter().map(line)
    });
    lines.collect::<Vec<_>>().concat()
}
