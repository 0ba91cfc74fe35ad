//! The pool of pages of the KV cache.

/// A page of the KV cache, by its index in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(u32);

impl PageId {
    /// Returns the index of the page, less than the number of pages in the pool.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Page {
    /// The sequences that use the page.
    references: u32,
    /// True if the page is in the prefix tree.
    cached: bool,
}

/// The pages of the KV cache, with their reference counts.
///
/// A page is *free*, or it is referenced by sequences, or cached by the prefix tree, or both. A
/// page that is cached and not referenced is *idle*: it can be evicted.
#[derive(Debug)]
pub struct PagePool {
    page_size: usize,
    pages: Vec<Page>,
    free: Vec<PageId>,
    idle: usize,
}

impl PagePool {
    /// Makes a pool of `pages` free pages of `page_size` positions each.
    ///
    /// # Panics
    /// If `page_size` is 0.
    pub fn new(pages: u32, page_size: usize) -> Self {
        assert!(page_size > 0, "a page must have at least one position");
        Self {
            page_size,
            pages: vec![Page::default(); pages as usize],
            free: (0..pages).rev().map(PageId).collect(),
            idle: 0,
        }
    }

    /// Returns the number of positions in a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns the number of pages in the pool.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Returns true if the pool has no pages at all.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Returns all pages of the pool.
    pub fn pages(&self) -> impl Iterator<Item = PageId> + use<> {
        (0..self.pages.len() as u32).map(PageId)
    }

    /// Returns the number of free pages.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of idle pages: cached by the prefix tree, and referenced by no sequence.
    pub fn idle(&self) -> usize {
        self.idle
    }

    /// Returns the number of sequences that reference a page.
    pub fn references(&self, page: PageId) -> u32 {
        self.pages[page.index()].references
    }

    /// Returns true if the page is cached by the prefix tree.
    pub fn is_cached(&self, page: PageId) -> bool {
        self.pages[page.index()].cached
    }

    /// Takes a free page, with one reference. Returns `None` if no page is free.
    pub fn allocate(&mut self) -> Option<PageId> {
        let page = self.free.pop()?;
        self.pages[page.index()].references = 1;
        Some(page)
    }

    /// Adds a reference to a page that is referenced or cached.
    ///
    /// # Panics
    /// If the page is free.
    pub fn retain(&mut self, page: PageId) {
        let state = &mut self.pages[page.index()];
        assert!(
            state.references > 0 || state.cached,
            "{page:?} is free and cannot be shared"
        );
        if state.references == 0 {
            self.idle -= 1;
        }
        state.references += 1;
    }

    /// Removes a reference from a page. Without another, the page becomes idle if it is cached, and
    /// free otherwise.
    ///
    /// # Panics
    /// If the page has no reference.
    pub fn release(&mut self, page: PageId) {
        let state = &mut self.pages[page.index()];
        assert!(state.references > 0, "{page:?} is released once too often");
        state.references -= 1;
        if state.references == 0 {
            if state.cached {
                self.idle += 1;
            } else {
                self.free.push(page);
            }
        }
    }

    /// Marks a page that a sequence references as cached.
    pub(crate) fn cache(&mut self, page: PageId) {
        let state = &mut self.pages[page.index()];
        assert!(
            state.references > 0 && !state.cached,
            "{page:?} is free or cached and cannot be cached"
        );
        state.cached = true;
    }

    /// Frees an idle page.
    pub(crate) fn evict(&mut self, page: PageId) {
        let state = &mut self.pages[page.index()];
        assert!(
            state.references == 0 && state.cached,
            "{page:?} is not idle and cannot be evicted"
        );
        state.cached = false;
        self.idle -= 1;
        self.free.push(page);
    }

    /// Checks the invariants, in time proportional to the number of pages; for tests.
    ///
    /// # Panics
    /// If the list of free pages or the count of idle pages does not agree with the state of the
    /// pages.
    pub fn check(&self) {
        let mut is_free = vec![false; self.len()];
        for page in &self.free {
            assert!(!is_free[page.index()], "{page:?} is twice in the free list");
            is_free[page.index()] = true;
        }
        let mut idle = 0;
        for (index, (page, &is_free)) in self.pages.iter().zip(&is_free).enumerate() {
            let unused = page.references == 0 && !page.cached;
            assert_eq!(unused, is_free, "page {index} is lost, or free and in use");
            idle += usize::from(page.references == 0 && page.cached);
        }
        assert_eq!(idle, self.idle, "idle pages are miscounted");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_handed_out_once_and_come_back_after_the_last_release() {
        let mut pool = PagePool::new(2, 64);
        let [a, b] = [pool.allocate().unwrap(), pool.allocate().unwrap()];
        assert_ne!(a, b);
        assert_eq!(pool.allocate(), None);
        pool.retain(a);
        pool.release(a);
        assert_eq!(pool.free(), 0);
        pool.release(a);
        assert_eq!(pool.free(), 1);
        assert_eq!(pool.allocate(), Some(a));
        pool.check();
    }

    #[test]
    fn cached_pages_become_idle_and_are_freed_by_eviction() {
        let mut pool = PagePool::new(1, 64);
        let page = pool.allocate().unwrap();
        pool.cache(page);
        pool.release(page);
        assert_eq!((pool.free(), pool.idle()), (0, 1));
        pool.retain(page);
        assert_eq!(pool.idle(), 0);
        pool.release(page);
        pool.evict(page);
        assert_eq!((pool.free(), pool.idle()), (1, 0));
        pool.check();
    }

    #[test]
    #[should_panic(expected = "once too often")]
    fn a_second_release_is_found() {
        let mut pool = PagePool::new(1, 64);
        let page = pool.allocate().unwrap();
        pool.release(page);
        pool.release(page);
    }
}
