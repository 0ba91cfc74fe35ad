//! The pages of sequences: prefixes, allocation, and release after the last step that uses them.

use super::sequence::Sequence;
use super::step::PageTable;
use crate::pages::{PageId, PagePool};
use crate::prefix::PrefixTree;
use std::collections::VecDeque;
use std::sync::Arc;

/// The pool and the prefix tree, with the pages that wait for steps in flight.
#[derive(Debug)]
pub(super) struct PageCache {
    pub pool: PagePool,
    pub tree: PrefixTree,
    steps: VecDeque<StepInFlight>,
}

/// A step that is not complete.
#[derive(Debug)]
struct StepInFlight {
    id: u64,
    /// The pages that are released when the step is complete.
    releases: Vec<PageId>,
}

impl PageCache {
    pub fn new(pages: u32, page_size: usize) -> Self {
        Self {
            pool: PagePool::new(pages, page_size),
            tree: PrefixTree::new(page_size),
            steps: VecDeque::new(),
        }
    }

    /// Returns the number of steps in flight.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// Returns true if the sequence has a row in a step in flight.
    pub fn in_flight(&self, sequence: &Sequence) -> bool {
        let last = sequence.last_step;
        self.steps.iter().any(|step| Some(step.id) == last)
    }

    pub fn begin_step(&mut self, id: u64) {
        let releases = Vec::new();
        self.steps.push_back(StepInFlight { id, releases });
    }

    /// Ends the first step in flight.
    ///
    /// # Panics
    /// If it is another one.
    pub fn end_step(&mut self, id: u64) {
        let first = self.steps.front().map(|step| step.id);
        assert_eq!(Some(id), first, "steps are completed in order, once");
        for page in self
            .steps
            .pop_front()
            .into_iter()
            .flat_map(|step| step.releases)
        {
            self.pool.release(page);
        }
    }

    /// Takes a page, evicting one if none is free.
    pub fn take(&mut self) -> Option<PageId> {
        if self.pool.free() == 0 {
            self.tree.evict(&mut self.pool, 1);
        }
        self.pool.allocate()
    }

    /// Gives a sequence the pages for the positions of its tokens, with those of the longest cached
    /// prefix, whose positions are computed. Returns false, and takes no pages, if fewer than
    /// `reserve` pages would be left free or idle.
    pub fn admit(&mut self, sequence: &mut Sequence, reserve: usize) -> bool {
        let mut pages = self.tree.find(&sequence.tokens);
        pages.iter().for_each(|&page| self.pool.retain(page));
        let computed = pages.len() * self.pool.page_size();
        let missing = sequence.tokens.len().div_ceil(self.pool.page_size()) - pages.len();
        if self.pool.free() + self.pool.idle() < missing + reserve {
            pages.iter().for_each(|&page| self.pool.release(page));
            return false;
        }
        let short = missing.saturating_sub(self.pool.free());
        self.tree.evict(&mut self.pool, short);
        pages.extend((0..missing).map_while(|_| self.pool.allocate()));
        sequence.pages = Arc::new(pages);
        sequence.computed = computed;
        sequence.scheduled = computed;
        true
    }

    /// Adds the full pages of the computed positions to the tree.
    pub fn store(&mut self, sequence: &mut Sequence) {
        let full = sequence.computed / self.pool.page_size();
        let tokens = &sequence.tokens[..full * self.pool.page_size()];
        let mut pages = sequence.pages[..full].to_vec();
        let duplicates = self.tree.insert(&mut self.pool, tokens, &mut pages);
        if !duplicates.is_empty() {
            Arc::make_mut(&mut sequence.pages)[..full].copy_from_slice(&pages);
            self.release(sequence, &duplicates);
        }
    }

    /// Adds the full pages of a sequence to the tree, and takes all its pages from it.
    pub fn close(&mut self, sequence: &mut Sequence) {
        self.store(sequence);
        let pages: PageTable = std::mem::take(&mut sequence.pages);
        self.release(sequence, &pages);
    }

    /// Returns how many pages become free or idle if the sequence is closed.
    pub fn gain(&self, sequence: &Sequence) -> usize {
        let pages = sequence.pages.iter();
        pages
            .filter(|&&page| self.pool.references(page) == 1)
            .count()
    }

    /// Releases pages that the sequence used, after the last step that has a row of it.
    fn release(&mut self, sequence: &Sequence, pages: &[PageId]) {
        let last = sequence.last_step;
        match self.steps.iter_mut().find(|step| Some(step.id) == last) {
            Some(step) => step.releases.extend_from_slice(pages),
            None => pages.iter().for_each(|&page| self.pool.release(page)),
        }
    }

    /// Returns the pages that are released when steps in flight are complete.
    pub fn releases(&self) -> impl Iterator<Item = PageId> {
        self.steps
            .iter()
            .flat_map(|step| step.releases.iter().copied())
    }
}
