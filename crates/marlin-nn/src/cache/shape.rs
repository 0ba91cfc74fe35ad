//! The shape of the KV cache of a layer, with or without pages.

use std::ops::Range;

/// The shape of the KV cache of a layer.
///
/// The keys are a tensor [pages, kv_heads, page_size, head_dim], and so are the values. Without
/// [`pages`](Self::pages) every slot has one page of `max_len` positions: slot `s` is page `s`.
/// With pages, a page table, i32 [slots, max_len / page_size rounded up], has the page of each
/// `page_size` positions of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// The number of slots, each of which holds one sequence.
    pub slots: usize,
    /// The number of heads of the keys, which is also that of the values.
    pub kv_heads: usize,
    /// The maximum number of positions of a slot.
    pub max_len: usize,
    /// The number of features of a head.
    pub head_dim: usize,
    /// The pages that the slots share; `None` if every slot has a page of its own.
    pub pages: Option<Pages>,
}

/// The pages of a paged KV cache (PagedAttention, arXiv 2309.06180).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pages {
    /// The number of pages.
    pub count: usize,
    /// The number of positions of a page: a power of two, at least [`Pages::MIN_SIZE`].
    pub size: usize,
}

impl Pages {
    /// The minimum number of positions of a page.
    pub const MIN_SIZE: usize = 16;

    /// Returns true if the number of positions of a page is one that kernels support.
    pub fn has_valid_size(&self) -> bool {
        self.size >= Self::MIN_SIZE && self.size.is_power_of_two()
    }
}

impl From<[usize; 4]> for CacheShape {
    /// Returns the shape of a cache [slots, kv_heads, max_len, head_dim] without pages.
    fn from([slots, kv_heads, max_len, head_dim]: [usize; 4]) -> Self {
        Self {
            slots,
            kv_heads,
            max_len,
            head_dim,
            pages: None,
        }
    }
}

impl CacheShape {
    /// Returns the shape of the keys, which is also that of the values: [pages, kv_heads,
    /// page_size, head_dim].
    pub fn dims(&self) -> [usize; 4] {
        let Pages { count, size } = self.pages.unwrap_or(Pages {
            count: self.slots,
            size: self.max_len,
        });
        [count, self.kv_heads, size, self.head_dim]
    }

    /// Returns the shape of the page table, [slots, pages of a slot]; `None` without pages.
    pub fn table_dims(&self) -> Option<[usize; 2]> {
        let pages = self.pages?;
        Some([self.slots, self.max_len.div_ceil(pages.size.max(1))])
    }

    /// Returns the number of elements of the keys, which is also that of the values; `usize::MAX`
    /// if the number overflows.
    pub fn elements(&self) -> usize {
        self.dims().into_iter().fold(1, usize::saturating_mul)
    }

    /// Returns the ranges of elements of some positions of a key head of a slot, in their order:
    /// one for each page. `table` is the page table if the cache has pages.
    pub fn runs<'a>(
        &self,
        table: Option<&'a [i32]>,
        [slot, kv_head]: [usize; 2],
        positions: Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> + use<'a> {
        let [pages, kv_heads, size, head_dim] = self.dims();
        let columns = self.table_dims().map_or(1, |[_, columns]| columns);
        let first = positions.start / size;
        (first..positions.end.div_ceil(size)).map(move |column| {
            let page = table.map_or(slot, |table| {
                // As in kernels, a page outside the cache is the last one.
                (table[slot * columns + column] as u32 as usize).min(pages - 1)
            });
            let start = positions.start.max(column * size) - column * size;
            let end = positions.end.min((column + 1) * size) - column * size;
            let of_page = (page * kv_heads + kv_head) * size;
            (of_page + start) * head_dim..(of_page + end) * head_dim
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_follow_the_page_table() {
        let shape = CacheShape {
            pages: Some(Pages { count: 5, size: 16 }),
            ..CacheShape::from([2, 3, 40, 8])
        };
        assert_eq!(shape.dims(), [5, 3, 16, 8]);
        assert_eq!(shape.table_dims(), Some([2, 3]));
        let table = [0, 0, 0, 4, 1, 2];
        let runs: Vec<_> = shape.runs(Some(&table), [1, 2], 14..40).collect();
        let start = |page: usize| (page * 3 + 2) * 16 * 8;
        assert_eq!(
            runs,
            [
                start(4) + 14 * 8..start(4) + 16 * 8,
                start(1)..start(1) + 16 * 8,
                start(2)..start(2) + 8 * 8
            ]
        );
        assert_eq!(shape.runs(Some(&table), [1, 2], 16..16).count(), 0);
    }

    #[test]
    fn without_pages_a_slot_is_one_run() {
        let shape = CacheShape::from([4, 3, 40, 8]);
        assert_eq!(shape.dims(), [4, 3, 40, 8]);
        let mut runs = shape.runs(None, [3, 1], 5..33);
        let start = (3 * 3 + 1) * 40 * 8;
        assert_eq!(runs.next(), Some(start + 5 * 8..start + 33 * 8));
        assert_eq!(runs.next(), None);
    }
}
