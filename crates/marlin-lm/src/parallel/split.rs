//! Even splits of features in whole units.

use std::ops::Range;

/// The largest unit of features that no group of rows binds: kernels take tiles of 64 features.
const LARGEST_UNIT: usize = 64;

/// Returns the ranges of `total` features of each of `count` ranks, in whole units of `unit`
/// features. The first ranks have one unit more if the number of units is not a multiple of
/// `count`. The last unit may be incomplete. Returns `None` if there are fewer units than ranks.
pub(crate) fn ranges(total: usize, count: usize, unit: usize) -> Option<Vec<Range<usize>>> {
    let units = total.div_ceil(unit);
    if units < count {
        return None;
    }
    let (each, more) = (units / count, units % count);
    let first = |rank: usize| total.min((rank * each + rank.min(more)) * unit);
    let of_rank = |rank| first(rank)..first(rank + 1);
    Some((0..count).map(of_rank).collect())
}

/// Returns the unit of features that no group of rows binds: the largest power of two up to
/// [`LARGEST_UNIT`] of which each of `count` ranks has at least one.
pub(crate) fn free_unit(total: usize, count: usize) -> usize {
    let mut unit = LARGEST_UNIT;
    while unit > 1 && total.div_ceil(unit) < count {
        unit /= 2;
    }
    unit
}

/// Returns the smallest number that is a multiple of both.
pub(crate) fn common_multiple(a: usize, b: usize) -> usize {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a / divisor * b
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn groups_of_llama_2_7b_over_four_ranks() {
        let ranges = ranges(11008, 4, 128).unwrap();
        let groups: Vec<usize> = ranges.iter().map(|range| range.len() / 128).collect();
        assert_eq!(groups, [22, 22, 21, 21]);
    }

    #[test]
    fn the_last_group_may_be_incomplete() {
        assert_eq!(ranges(344, 2, 32).unwrap(), [0..192, 192..344]);
        assert_eq!(ranges(52, 2, 32).unwrap(), [0..32, 32..52]);
        assert_eq!(ranges(32, 2, 32), None);
    }

    #[test]
    fn a_free_unit_is_64_where_there_is_enough() {
        assert_eq!(free_unit(11008, 8), 64);
        assert_eq!(free_unit(96, 2), 64);
        assert_eq!(free_unit(96, 4), 16);
        assert_eq!(free_unit(3, 4), 1);
    }

    #[test]
    fn common_multiples() {
        assert_eq!(common_multiple(32, 128), 128);
        assert_eq!(common_multiple(1, 64), 64);
        assert_eq!(common_multiple(6, 4), 12);
    }

    proptest! {
        #[test]
        fn ranges_are_disjoint_complete_and_whole(
            total in 1usize..5000, count in 1usize..9, unit in 1usize..200,
        ) {
            match ranges(total, count, unit) {
                None => prop_assert!(total.div_ceil(unit) < count),
                Some(ranges) => {
                    prop_assert_eq!(ranges.len(), count);
                    let mut end = 0;
                    for range in &ranges {
                        prop_assert_eq!(range.start, end);
                        prop_assert!(range.start.is_multiple_of(unit));
                        prop_assert!(!range.is_empty());
                        end = range.end;
                    }
                    prop_assert_eq!(end, total);
                    let units = ranges.iter().map(|range| range.len().div_ceil(unit));
                    let (most, fewest) = (units.clone().max(), units.min());
                    prop_assert!(most.zip(fewest).is_some_and(|(a, b)| a - b <= 1));
                }
            }
        }
    }
}
