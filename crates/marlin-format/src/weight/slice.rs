//! Slices of a weight: some of its input or output features as a new weight.

use std::ops::Range;

use super::{GroupSize, PlainParts, PlainWeight, Scales};
use crate::FormatError;
use crate::layout::{MetadataLayout, PlainLayout};

impl PlainWeight {
    /// Returns the weight of the output features in `columns`, with shape `[K, columns]`.
    ///
    /// # Errors
    /// [`FormatError::SliceRange`] if the range is empty or extends past N.
    pub fn slice_n(&self, columns: Range<usize>) -> Result<Self, FormatError> {
        check_range("N", &columns, self.n())?;
        let (k, n, spec) = (self.k(), columns.len(), self.spec());
        // A word holds rows of one column, so whole words are copied.
        let of_columns = |from: &[u32], padding: u32| {
            let mut to =
                vec![padding; from.len() / self.layout().columns() * n.next_multiple_of(8)];
            for (to, from) in to
                .chunks_exact_mut(n.next_multiple_of(8))
                .zip(from.chunks_exact(self.layout().columns()))
            {
                to[..n].copy_from_slice(&from[columns.clone()]);
            }
            to
        };
        let qweight = of_columns(self.qweight(), spec.value.padding_word());
        let metadata = self
            .metadata()
            .map(|metadata| of_columns(metadata, MetadataLayout::PADDING_WORD));
        let groups = spec.scales.group.count(k);
        let of_group =
            |group: usize| group * self.n() + columns.start..group * self.n() + columns.end;
        Self::new(PlainParts {
            k,
            n,
            spec,
            qweight,
            metadata,
            scales: self.scales().ranges((0..groups).map(of_group)),
            zero_points: self.zero_points().map(|zeros| {
                (0..groups)
                    .flat_map(|group| &zeros[of_group(group)])
                    .copied()
                    .collect()
            }),
            row_permutation: self.row_permutation().map(<[u32]>::to_vec),
        })
    }

    /// Returns the weight of the input features in `rows`, with shape `[rows, N]`. The products
    /// with the parts of a weight add up to the product with the whole weight.
    ///
    /// # Errors
    /// * [`FormatError::SliceRange`] if the range is empty or extends past K.
    /// * [`FormatError::SliceGroup`] if the range does not start at the start of a group.
    /// * [`FormatError::SlicePermuted`] for a weight with act-order, because each part would have
    ///   some rows of every group.
    /// * [`FormatError::SparseRows`] for a 2:4 weight if the range starts or ends within four rows
    ///   of which two are kept.
    pub fn slice_k(&self, rows: Range<usize>) -> Result<Self, FormatError> {
        check_range("K", &rows, self.k())?;
        if self.row_permutation().is_some() {
            return Err(FormatError::SlicePermuted);
        }
        let (k, n, spec) = (rows.len(), self.n(), self.spec());
        let group_rows = spec.scales.group.rows(self.k());
        // One group over all of K is one group over every part of K.
        let first = if spec.scales.group == GroupSize::Channel {
            0
        } else {
            rows.start / group_rows
        };
        if spec.scales.group != GroupSize::Channel && !rows.start.is_multiple_of(group_rows) {
            return Err(FormatError::SliceGroup {
                start: rows.start,
                group: spec.scales.group,
            });
        }
        if self.metadata().is_some()
            && let Some(&k) = [rows.start, k].iter().find(|k| !k.is_multiple_of(4))
        {
            return Err(FormatError::SparseRows { k });
        }
        let sparsity = self.sparsity();
        let (layout, per_word) = (
            PlainLayout::new(sparsity.stored_rows(k), n, spec.value),
            spec.value.per_word(),
        );
        let start = sparsity.stored_rows(rows.start);
        let qweight = if start.is_multiple_of(per_word) {
            let mut qweight =
                self.qweight()[start / per_word * layout.columns()..][..layout.words()].to_vec();
            layout.pad(&mut qweight);
            qweight
        } else {
            layout.pack_with(|row, column| self.q(start + row, column))
        };
        let metadata = self.metadata().map(|metadata| {
            let (from, to) = (MetadataLayout::new(self.k(), n), MetadataLayout::new(k, n));
            let mut part = vec![MetadataLayout::PADDING_WORD; to.words()];
            for four in 0..k / 4 {
                (0..n).for_each(|column| {
                    to.index(four, column).write(
                        &mut part,
                        from.index(rows.start / 4 + four, column).read(metadata),
                    );
                });
            }
            part
        });
        let per_group = first * n..(first + spec.scales.group.count(k)) * n;
        Self::new(PlainParts {
            k,
            n,
            spec,
            qweight,
            metadata,
            scales: self.scales().ranges([per_group.clone()]),
            zero_points: self.zero_points().map(|zeros| zeros[per_group].to_vec()),
            row_permutation: None,
        })
    }
}

impl Scales {
    /// Returns the scales at the given ranges of indices, concatenated.
    fn ranges(&self, ranges: impl IntoIterator<Item = Range<usize>>) -> Self {
        fn gather<T: Copy>(values: &[T], ranges: impl IntoIterator<Item = Range<usize>>) -> Vec<T> {
            ranges
                .into_iter()
                .flat_map(|range| &values[range])
                .copied()
                .collect()
        }
        match self {
            Self::F16(values) => Self::F16(gather(values, ranges)),
            Self::BF16(values) => Self::BF16(gather(values, ranges)),
            Self::F32(values) => Self::F32(gather(values, ranges)),
        }
    }
}

fn check_range(axis: &'static str, range: &Range<usize>, length: usize) -> Result<(), FormatError> {
    if range.start < range.end && range.end <= length {
        return Ok(());
    }
    Err(FormatError::SliceRange {
        axis,
        start: range.start,
        end: range.end,
        length,
    })
}
