use crate::marlin;
use marlin_format::layout::{PlainLayout, ScaleLayout, ZeroLayout};
use marlin_format::{Bits, GroupSize};
use std::fmt;

/// The order in which a device holds a weight [K, N]: what its kernel reads.
///
/// | tensor | plain | tile |
/// |---|---|---|
/// | words | [K/8 up, N up to a multiple of 8], [`PlainLayout`] | [K/16, 2N], both padded to 64, [`MarlinLayout`](marlin_format::layout::MarlinLayout) |
/// | scales | [G, N] | [G, N], both padded, [`ScaleLayout`] |
/// | zero points, eight a word | [G, N/8 up] | [G, N/8], both padded, [`ZeroLayout`] |
///
/// A row permutation is the same in both: stored rows keep their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightLayout {
    /// What records hold, and [`portable`](crate::portable) and [`host`](crate::host) read.
    Plain,
    /// What [`marlin`] reads.
    Tile,
}

impl WeightLayout {
    /// Shape of the words of a weight [K, N].
    pub fn words(self, k: usize, n: usize) -> [usize; 2] {
        match self {
            Self::Plain => {
                let layout = PlainLayout::new(k, n, Bits::Four);
                [layout.rows(), layout.columns()]
            }
            Self::Tile => {
                let layout = marlin::layout(k, n);
                [layout.k_padded() / 16, 2 * layout.n_padded()]
            }
        }
    }

    /// Shape of its scales.
    pub fn scales(self, k: usize, n: usize, group: GroupSize) -> [usize; 2] {
        match self {
            Self::Plain => [group.count(k), n],
            Self::Tile => {
                let layout = ScaleLayout::new(&marlin::layout(k, n), group);
                [layout.groups_padded(), layout.n_padded()]
            }
        }
    }

    /// Shape of its zero points, where it has some.
    pub fn zero_points(self, k: usize, n: usize, group: GroupSize) -> [usize; 2] {
        match self {
            Self::Plain => [group.count(k), n.div_ceil(8)],
            Self::Tile => {
                let layout = marlin::layout(k, n);
                let groups = ScaleLayout::new(&layout, group).groups_padded();
                [groups, ZeroLayout::new(&layout, group).words() / groups.max(1)]
            }
        }
    }

    /// The layout of a weight [K, N] whose words have this shape; `None` where it is neither's.
    pub fn of_words(shape: [usize; 2], k: usize, n: usize) -> Option<Self> {
        // Never both: the tile layout has at least twice as many columns.
        [Self::Plain, Self::Tile].into_iter().find(|layout| layout.words(k, n) == shape)
    }
}

impl fmt::Display for WeightLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Tile => "tile",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_tell_the_layouts_apart() {
        for k in [1, 7, 8, 16, 24, 32, 64, 65, 128, 4096] {
            for n in [1, 8, 63, 64, 65, 128, 4096] {
                for layout in [WeightLayout::Plain, WeightLayout::Tile] {
                    assert_eq!(WeightLayout::of_words(layout.words(k, n), k, n), Some(layout), "K = {k}, N = {n}");
                }
                assert_eq!(WeightLayout::of_words([k, 3], k, n), None, "K = {k}, N = {n}");
            }
        }
    }
}
