//! The invariants of a scheduler.

use super::Scheduler;
use super::sequence::Rank;
use std::collections::BTreeSet;

impl Scheduler {
    /// Checks the invariants, in time proportional to the pages and the requests; for tests.
    ///
    /// # Panics
    /// If a page is lost, or is not free although nothing uses it; if a page that a sequence writes
    /// to is used by another one or by the prefix tree; or if a request is not in exactly one of
    /// the queue and the running sequences.
    pub fn check(&self) {
        let pool = &self.cache.pool;
        pool.check();
        self.cache.tree.check(pool);
        let mut references = vec![0; pool.len()];
        let sequences = self.sequences.values();
        let pages = sequences.flat_map(|sequence| sequence.pages.iter().copied());
        for page in pages.chain(self.cache.releases()) {
            references[page.index()] += 1;
        }
        for page in pool.pages() {
            assert_eq!(
                pool.references(page),
                references[page.index()],
                "references of {page:?}"
            );
        }
        for sequence in self.sequences.values() {
            let id = sequence.rank.request;
            let written = sequence.computed / self.config.page_size;
            for &page in sequence.pages.iter().skip(written) {
                assert!(
                    pool.references(page) == 1 && !pool.is_cached(page),
                    "{page:?}, which {id:?} writes to, is shared"
                );
            }
            let positions = sequence.pages.len() * self.config.page_size;
            assert!(sequence.computed <= sequence.scheduled, "{id:?}");
            assert!(sequence.scheduled <= positions, "pages of {id:?}");
        }
        let queue = self.queue.ranks();
        assert_eq!(queue.len(), self.queue.len(), "waiting requests");
        assert!(self.queue.new_len() <= self.config.max_waiting);
        assert!(self.running.len() <= self.config.max_sequences);
        assert!(queue.is_disjoint(&self.running), "waiting and running");
        let all: BTreeSet<Rank> = self.sequences.values().map(|s| s.rank).collect();
        assert_eq!(&queue | &self.running, all, "lost requests");
        let deadlines = self.sequences.values().filter(|s| s.deadline().is_some());
        assert_eq!(deadlines.count(), self.deadlines.len(), "time-outs");
    }
}
