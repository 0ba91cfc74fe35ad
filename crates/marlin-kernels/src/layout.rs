use crate::marlin;
use marlin_format::layout::{PlainLayout, ScaleLayout, ZeroLayout};
use marlin_format::{Bits, GroupSize, QuantSpec};
use std::fmt;

/// The order in which a device holds a weight [K, N]: what its kernel reads.
///
/// | tensor | plain | tile, of 4 bits alone |
/// |---|---|---|
/// | words | [K/8 up, N up to a multiple of 8], [`PlainLayout`]; of 8 bits K/4 up | [K/16, 2N], both padded to 64, [`MarlinLayout`](marlin_format::layout::MarlinLayout) |
/// | scales | [G, N] | [G, N], both padded, [`ScaleLayout`] |
/// | zero points, as many a word as weights | [G, N/8 up]; of 8 bits N/4 up | [G, N/8], both padded, [`ZeroLayout`] |
///
/// A row permutation is the same in both: stored rows keep their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightLayout {
    /// What records hold, and [`portable`](crate::portable) and [`host`](crate::host) read.
    Plain,
    /// What [`marlin`] reads: 4 bits alone.
    Tile,
}

impl WeightLayout {
    /// Shape of the words of a weight [K, N].
    pub fn words(self, k: usize, n: usize, bits: Bits) -> [usize; 2] {
        match self {
            Self::Plain => {
                let layout = PlainLayout::new(k, n, bits);
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
    pub fn zero_points(self, k: usize, n: usize, spec: &QuantSpec) -> [usize; 2] {
        match self {
            Self::Plain => [spec.group.count(k), n.div_ceil(spec.bits.per_word())],
            Self::Tile => {
                let layout = marlin::layout(k, n);
                let groups = ScaleLayout::new(&layout, spec.group).groups_padded();
                [groups, ZeroLayout::new(&layout, spec.group).words() / groups.max(1)]
            }
        }
    }

    /// The layout and width of a weight [K, N] whose words have this shape; `None` where it is no weight's, and where it could be of either
    /// width, which have the same words up to K = 4.
    pub fn of_words(shape: [usize; 2], k: usize, n: usize) -> Option<(Self, Bits)> {
        let all = [(Self::Plain, Bits::Four), (Self::Plain, Bits::Eight), (Self::Tile, Bits::Four)];
        let mut found = all.into_iter().filter(|(layout, bits)| layout.words(k, n, *bits) == shape);
        // The tile layout has at least twice as many columns as the plain one.
        found.next().filter(|_| found.next().is_none())
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
        for k in [1, 4, 5, 7, 8, 16, 24, 32, 64, 65, 128, 4096] {
            for n in [1, 8, 63, 64, 65, 128, 4096] {
                for (layout, bits) in
                    [(WeightLayout::Plain, Bits::Four), (WeightLayout::Plain, Bits::Eight), (WeightLayout::Tile, Bits::Four)]
                {
                    let expected = if k <= 4 && layout == WeightLayout::Plain { None } else { Some((layout, bits)) };
                    assert_eq!(WeightLayout::of_words(layout.words(k, n, bits), k, n), expected, "K = {k}, N = {n}, {bits}");
                }
                assert_eq!(WeightLayout::of_words([k, 3], k, n), None, "K = {k}, N = {n}");
            }
        }
    }

    #[test]
    fn several_groups_tell_their_size() {
        for k in 1..1100 {
            for layout in [WeightLayout::Plain, WeightLayout::Tile] {
                let counts = GroupSize::ALL.map(|group| layout.scales(k, 1, group)[0]);
                for (i, count) in counts.iter().enumerate() {
                    assert!(*count == 1 || !counts[..i].contains(count), "K = {k}, {layout}: {counts:?}");
                }
            }
        }
    }
}
