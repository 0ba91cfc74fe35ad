//! The scales that go with the Marlin tile layout.

use super::TileExtents;
use crate::{FormatError, GroupSize, Scales};

/// The layout of scales `[G, N]`, row-major, with the columns of each block permuted so that the
/// scales of one lane are contiguous.
///
/// Columns are padded with scales of 0, as far as [`MarlinLayout`](super::MarlinLayout) pads N, so
/// that padded outputs are 0. Groups are padded where K is padded past the last group.
///
/// **Grouped** (more than one group): a lane scales its B fragments, which are in column
/// `groupID = lane / 4` of each of the eight blocks of 8 columns of a tile. In every 64 columns:
///
/// | position | 0 | 1 | ... | 7 | 8 | 9 | ... | 63 |
/// |---|---|---|---|---|---|---|---|---|
/// | column   | 0 | 8 | ... | 56 | 1 | 9 | ... | 63 |
/// | lanes    | 0..4 | 0..4 | ... | 0..4 | 4..8 | 4..8 | ... | 28..32 |
///
/// **Channel-wise** (one group): a lane scales its accumulators once, at the end. The accumulators
/// are in columns `2t` and `2t + 1` (`t = lane % 4`) of each block of 8. In every 32 columns:
///
/// | position | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | ... | 31 |
/// |---|---|---|---|---|---|---|---|---|---|---|---|---|
/// | column   | 0 | 1 | 8 | 9 | 16 | 17 | 24 | 25 | 2 | 3 | ... | 31 |
/// | `t`      | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 1 | ... | 3 |
///
/// The number of groups decides, not the group size, as in the published format: `K = 128` with
/// groups of 128 is channel-wise.
///
/// Sources: the packer of the Marlin paper's authors (IST-DASLab/marlin), and PTX ISA, "Matrix
/// Fragments for mma.m16n8k16 with floating point type", multiplicand B and accumulator C.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScaleLayout {
    k: usize,
    n: usize,
    groups: usize,
    groups_padded: usize,
    n_padded: usize,
}

impl ScaleLayout {
    /// Creates the layout of the scales of a weight in a tile layout, with the group size `group`.
    pub fn new(extents: impl Into<TileExtents>, group: GroupSize) -> Self {
        let TileExtents {
            k,
            n,
            k_padded,
            n_padded,
        } = extents.into();
        Self {
            k,
            n,
            groups: group.count(k),
            groups_padded: group.count(k_padded),
            n_padded,
        }
    }

    /// Returns the number of groups, including those in the padding of K.
    pub fn groups_padded(&self) -> usize {
        self.groups_padded
    }

    /// Returns the number of columns, including padding.
    pub fn n_padded(&self) -> usize {
        self.n_padded
    }

    /// Returns the total number of scales, including padding.
    pub fn len(&self) -> usize {
        self.groups_padded.saturating_mul(self.n_padded)
    }

    /// Returns true if there are no scales. This is the case only if N is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the index of the scale of group `g`, column `n`, padding included.
    pub fn index(&self, g: usize, n: usize) -> usize {
        let permuted = if self.groups_padded > 1 {
            // An 8 x 8 transposition.
            n / 64 * 64 + 8 * (n % 8) + n % 64 / 8
        } else {
            // A 4 x 4 transposition of pairs.
            n / 32 * 32 + 8 * (n % 8 / 2) + 2 * (n % 32 / 8) + n % 2
        };
        g * self.n_padded + permuted
    }

    /// Permutes and pads the scales `[G, N]` of a weight.
    ///
    /// # Errors
    /// [`FormatError::Length`] if the number of scales is not G * N.
    pub fn pack(&self, scales: &Scales) -> Result<Scales, FormatError> {
        Ok(match scales {
            Scales::F16(values) => Scales::F16(self.pack_values(values)?),
            Scales::BF16(values) => Scales::BF16(self.pack_values(values)?),
            Scales::F32(values) => Scales::F32(self.pack_values(values)?),
        })
    }

    /// Undoes [`pack`](Self::pack).
    ///
    /// # Errors
    /// [`FormatError::Length`] if the number of scales is not [`len`](Self::len).
    pub fn unpack(&self, packed: &Scales) -> Result<Scales, FormatError> {
        Ok(match packed {
            Scales::F16(values) => Scales::F16(self.unpack_values(values)?),
            Scales::BF16(values) => Scales::BF16(self.unpack_values(values)?),
            Scales::F32(values) => Scales::F32(self.unpack_values(values)?),
        })
    }

    /// Permutes and pads any values `[G, N]` that go with the scales, such as zero points. The
    /// padding is `T::default()`.
    ///
    /// # Errors
    /// [`FormatError::Length`] if the number of values is not G * N.
    pub fn pack_values<T: Copy + Default>(&self, values: &[T]) -> Result<Vec<T>, FormatError> {
        self.check(
            "the scales",
            self.groups.saturating_mul(self.n),
            values.len(),
        )?;
        let mut packed = vec![T::default(); self.len()];
        for (position, &value) in values.iter().enumerate() {
            packed[self.index(position / self.n, position % self.n)] = value;
        }
        Ok(packed)
    }

    /// Undoes [`pack_values`](Self::pack_values).
    ///
    /// # Errors
    /// [`FormatError::Length`] if the number of values is not [`len`](Self::len).
    pub fn unpack_values<T: Copy>(&self, packed: &[T]) -> Result<Vec<T>, FormatError> {
        self.check("the scales in Marlin layout", self.len(), packed.len())?;
        Ok(gather(packed, [self.groups, self.n], |g, n| {
            self.index(g, n)
        }))
    }

    fn check(&self, what: &'static str, expected: usize, found: usize) -> Result<(), FormatError> {
        if found == expected {
            Ok(())
        } else {
            Err(FormatError::Length {
                what,
                k: self.k,
                n: self.n,
                expected,
                found,
            })
        }
    }
}

/// Gathers values `[rows, columns]` from `values`, each from the index that `place` returns.
pub(crate) fn gather<T: Copy>(
    values: &[T],
    [rows, columns]: [usize; 2],
    place: impl Fn(usize, usize) -> usize,
) -> Vec<T> {
    let mut gathered = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        gathered.extend((0..columns).map(|column| values[place(row, column)]));
    }
    gathered
}
