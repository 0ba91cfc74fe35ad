//! The shape of the KV cache of a layer, with or without pages.

use std::ops::Range;

/// The format in which a KV cache stores keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CacheFormat {
    /// The dtype of the activations.
    #[default]
    Activations,
    /// Eight bits, e4m3 (OCP 8-bit floating point specification, OFP8), with a scale in f32 for
    /// each position of each head. Activations have 16 bits. A position of a head takes `head_dim`
    /// bytes of values and 8 of scale:
    ///
    /// ```text
    /// byte    0  1  2  3 | 4  5  6  7 | ..            | head_dim .. + 4 | .. + 8
    /// value   0  2  1  3 | 4  6  5  7 | ..            | scale, f32      | 0
    /// ```
    ///
    /// The second and the third value of each word are exchanged, so that two masks take the values
    /// of a word apart as two pairs of f16. A scale belongs to values that are read as f16 with the
    /// same bits of exponent and mantissa, 2^-8 of e4m3's values. The largest value of a position
    /// is 448 in e4m3, so that no value is out of range, and pages can be written position by
    /// position.
    E4m3,
}

impl CacheFormat {
    /// The number of 16-bit elements that the scale of a position takes.
    const SCALE_ELEMENTS: usize = 4;

    /// Returns the number of elements, of the size of activations, of a position of a head.
    pub const fn row(self, head_dim: usize) -> usize {
        match self {
            Self::Activations => head_dim,
            Self::E4m3 => head_dim / 2 + Self::SCALE_ELEMENTS,
        }
    }
}

/// The shape of the KV cache of a layer.
///
/// The keys are a tensor [pages, kv_heads, page_size, row], and so are the values; a row is
/// `head_dim` elements, or as the [`format`](Self::format) says. Without
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
    /// The format of keys and values.
    pub format: CacheFormat,
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
            format: CacheFormat::Activations,
        }
    }
}

impl CacheShape {
    /// Returns the shape of the keys, which is also that of the values: [pages, kv_heads,
    /// page_size, row].
    pub fn dims(&self) -> [usize; 4] {
        let Pages { count, size } = self.pages.unwrap_or(Pages {
            count: self.slots,
            size: self.max_len,
        });
        [count, self.kv_heads, size, self.format.row(self.head_dim)]
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

    /// Returns the shape with keys and values in the dtype of activations.
    pub fn in_activations(&self) -> Self {
        Self {
            format: CacheFormat::Activations,
            ..*self
        }
    }

    /// Returns the ranges of elements of some positions of a key head of a slot, in their order:
    /// one for each page. `table` is the page table if the cache has pages.
    pub fn runs<'a>(
        &self,
        table: Option<&'a [i32]>,
        [slot, kv_head]: [usize; 2],
        positions: Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> + use<'a> {
        let [pages, kv_heads, size, row] = self.dims();
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
            (of_page + start) * row..(of_page + end) * row
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
