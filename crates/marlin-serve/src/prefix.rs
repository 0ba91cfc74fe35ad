//! The prefixes in the KV cache, as a radix tree over whole pages of tokens.

use crate::pages::{PageId, PagePool};
use std::collections::{BTreeSet, HashMap};

/// The index of the root, which has no pages and is never removed.
const ROOT: usize = 0;

/// A node with the edge from its parent.
#[derive(Debug, Default)]
struct Node {
    parent: usize,
    /// The tokens of the edge, a page's number for each of `pages`.
    tokens: Vec<u32>,
    /// The pages of the edge; empty for the root and for nodes that are not in use.
    pages: Vec<PageId>,
    /// The nodes below, by the tokens of the first page of their edges.
    children: HashMap<Box<[u32]>, usize>,
    /// The time of the last walk that passed the whole edge.
    last_used: u64,
}

/// The pages of computed prefixes, as a radix tree over whole pages of token IDs.
///
/// An edge has one or more pages; it is split where a prefix ends inside it. The pages that the
/// tree holds are marked as cached in the [`PagePool`]. A sequence that uses a page of the tree
/// also uses all pages above it, so the pages without references are always at the ends of
/// branches, and can be evicted from there.
#[derive(Debug)]
pub struct PrefixTree {
    page_size: usize,
    nodes: Vec<Node>,
    /// The nodes that are not in use.
    unused: Vec<usize>,
    /// The nodes without children, the least recently used first. Nodes with the same time are on
    /// one path, so at most one of them is a leaf.
    leaves: BTreeSet<(u64, usize)>,
    /// The number of walks so far.
    time: u64,
}

impl PrefixTree {
    /// Makes an empty tree for pages of `page_size` positions.
    pub fn new(page_size: usize) -> Self {
        Self {
            page_size,
            nodes: vec![Node::default()],
            unused: Vec::new(),
            leaves: BTreeSet::new(),
            time: 0,
        }
    }

    /// Returns the pages of the longest cached prefix of `tokens`, and marks them as used. At least
    /// the last token is left out, as it must be computed for its logits.
    ///
    /// The pages have no new reference: the caller retains them before anything is evicted.
    pub fn find(&mut self, tokens: &[u32]) -> Vec<PageId> {
        let whole = tokens.len().saturating_sub(1) / self.page_size * self.page_size;
        self.walk(&tokens[..whole]).1
    }

    /// Adds the prefix `tokens`, computed in `pages`, which the caller references.
    ///
    /// Where the tree has other pages for the same tokens, these are kept. They take the place of
    /// the caller's in `pages`, with a reference for it, and the caller's are returned: it releases
    /// them when no step uses them.
    ///
    /// # Panics
    /// If the number of tokens is not that of the positions in `pages`.
    #[must_use = "the caller's duplicates are to be released"]
    pub fn insert(
        &mut self,
        pool: &mut PagePool,
        tokens: &[u32],
        pages: &mut [PageId],
    ) -> Vec<PageId> {
        assert_eq!(
            tokens.len(),
            pages.len() * self.page_size,
            "only whole pages are cached"
        );
        let (node, cached) = self.walk(tokens);
        let mut duplicates = Vec::new();
        for (page, &cached) in pages.iter_mut().zip(&cached) {
            if *page != cached {
                pool.retain(cached);
                duplicates.push(std::mem::replace(page, cached));
            }
        }
        let (tokens, pages) = (
            &tokens[cached.len() * self.page_size..],
            &pages[cached.len()..],
        );
        if !pages.is_empty() {
            pages.iter().for_each(|&page| pool.cache(page));
            self.add_leaf(node, tokens, pages);
        }
        duplicates
    }

    /// Evicts up to `count` pages that no sequence references, from the ends of the least recently
    /// used branches. Returns the number of evicted pages.
    pub fn evict(&mut self, pool: &mut PagePool, count: usize) -> usize {
        let mut evicted = 0;
        let mut from = (0, 0);
        while evicted < count
            && let Some(&(time, leaf)) = self.leaves.range(from..).next()
        {
            let node = &mut self.nodes[leaf];
            while evicted < count
                && let Some(&page) = node.pages.last()
                && pool.references(page) == 0
            {
                pool.evict(page);
                node.pages.pop();
                evicted += 1;
            }
            if node.pages.is_empty() {
                self.remove_leaf(leaf);
            } else {
                node.tokens.truncate(node.pages.len() * self.page_size);
                from = (time, leaf + 1);
            }
        }
        evicted
    }

    /// Follows whole pages of `tokens` as far as the tree has them, splits the edge in which they
    /// end, and marks the nodes on the way as used. Returns the last node, and the pages.
    fn walk(&mut self, tokens: &[u32]) -> (usize, Vec<PageId>) {
        self.time += 1;
        let mut node = ROOT;
        let mut pages = Vec::new();
        loop {
            let rest = &tokens[pages.len() * self.page_size..];
            let Some(&child) = rest
                .get(..self.page_size)
                .and_then(|first| self.nodes[node].children.get(first))
            else {
                return (node, pages);
            };
            let edge = &self.nodes[child];
            let common = rest
                .chunks_exact(self.page_size)
                .zip(edge.tokens.chunks_exact(self.page_size))
                .take_while(|(page, cached)| page == cached)
                .count();
            node = if common < edge.pages.len() {
                self.split(child, common)
            } else {
                child
            };
            self.touch(node);
            pages.extend_from_slice(&self.nodes[node].pages);
        }
    }

    /// Sets the time of a node's last use to the present.
    fn touch(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        if self.leaves.remove(&(node.last_used, index)) {
            self.leaves.insert((self.time, index));
        }
        node.last_used = self.time;
    }

    /// Moves the first `count` pages of a node's edge to a new node above it, and returns that.
    fn split(&mut self, lower: usize, count: usize) -> usize {
        let node = &mut self.nodes[lower];
        let tokens = node.tokens.split_off(count * self.page_size);
        let pages = node.pages.split_off(count);
        let mut above = Node {
            parent: node.parent,
            tokens: std::mem::replace(&mut node.tokens, tokens),
            pages: std::mem::replace(&mut node.pages, pages),
            children: HashMap::new(),
            last_used: node.last_used,
        };
        above.children.insert(self.key(lower), lower);
        let upper = self.add_node(above);
        self.nodes[lower].parent = upper;
        self.link(upper);
        upper
    }

    /// Adds a leaf below `parent`, used at the present time.
    fn add_leaf(&mut self, parent: usize, tokens: &[u32], pages: &[PageId]) {
        let leaf = self.add_node(Node {
            parent,
            tokens: tokens.into(),
            pages: pages.into(),
            children: HashMap::new(),
            last_used: self.time,
        });
        self.link(leaf);
        self.leaves.remove(&(self.nodes[parent].last_used, parent));
        self.leaves.insert((self.time, leaf));
    }

    /// Removes a leaf whose pages were evicted. The tokens of its first page are still there.
    fn remove_leaf(&mut self, leaf: usize) {
        let key = self.key(leaf);
        let Node {
            parent, last_used, ..
        } = std::mem::take(&mut self.nodes[leaf]);
        self.leaves.remove(&(last_used, leaf));
        self.unused.push(leaf);
        let above = &mut self.nodes[parent];
        above.children.remove(&key);
        if above.children.is_empty() && parent != ROOT {
            self.leaves.insert((above.last_used, parent));
        }
    }

    /// Stores a node in a place that is not in use, and returns its index.
    fn add_node(&mut self, node: Node) -> usize {
        if let Some(index) = self.unused.pop() {
            self.nodes[index] = node;
            index
        } else {
            self.nodes.push(node);
            self.nodes.len() - 1
        }
    }

    /// Makes a node the child of its parent, in the place of a child with the same first page.
    fn link(&mut self, index: usize) {
        let (key, parent) = (self.key(index), self.nodes[index].parent);
        self.nodes[parent].children.insert(key, index);
    }

    /// Returns the tokens of the first page of a node's edge.
    fn key(&self, index: usize) -> Box<[u32]> {
        self.nodes[index].tokens[..self.page_size].into()
    }

    /// Checks the invariants, in time proportional to the size of the tree; for tests.
    ///
    /// # Panics
    /// If nodes are not linked both ways, a page is in the tree twice or not marked as cached, the
    /// list of leaves is wrong, or a page is referenced although the one above it is not.
    pub fn check(&self, pool: &PagePool) {
        let mut seen = vec![false; pool.len()];
        let mut leaves = 0;
        let mut stack = vec![ROOT];
        let mut reached = 0;
        while let Some(index) = stack.pop() {
            reached += 1;
            let node = &self.nodes[index];
            assert_eq!(node.tokens.len(), node.pages.len() * self.page_size);
            for &page in &node.pages {
                assert!(!seen[page.index()], "{page:?} is in the tree twice");
                assert!(pool.is_cached(page), "{page:?} is not marked as cached");
                seen[page.index()] = true;
            }
            let references = node.pages.iter().map(|&page| pool.references(page));
            assert!(
                references.is_sorted_by(|above, below| (*above > 0) >= (*below > 0)),
                "a page of node {index} is referenced without the page above it"
            );
            if index != ROOT {
                assert!(!node.pages.is_empty(), "node {index} has no pages");
                let is_leaf = self.leaves.contains(&(node.last_used, index));
                assert_eq!(is_leaf, node.children.is_empty(), "leaf {index}");
                leaves += usize::from(is_leaf);
            }
            for (first, &child) in &node.children {
                let below = &self.nodes[child];
                assert_eq!(below.parent, index, "the parent of node {child}");
                assert_eq!(**first, below.tokens[..self.page_size], "key of {child}");
                assert!(index == ROOT || below.last_used <= node.last_used);
                let is_used = |page: Option<&PageId>| page.is_some_and(|&p| pool.references(p) > 0);
                assert!(
                    index == ROOT || !is_used(below.pages.first()) || is_used(node.pages.last()),
                    "node {child} is referenced without node {index}"
                );
                stack.push(child);
            }
        }
        assert_eq!(leaves, self.leaves.len(), "leaves that are not in the tree");
        assert_eq!(reached + self.unused.len(), self.nodes.len(), "lost nodes");
        for page in pool.pages() {
            assert_eq!(seen[page.index()], pool.is_cached(page), "{page:?} is lost");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes a prefix in new pages, caches it, and releases it. Returns the pages in use before
    /// the release.
    fn compute(tree: &mut PrefixTree, pool: &mut PagePool, tokens: &[u32]) -> Vec<PageId> {
        let mut pages: Vec<_> = (0..tokens.len() / 2)
            .map(|_| pool.allocate().unwrap())
            .collect();
        for page in tree.insert(pool, tokens, &mut pages) {
            pool.release(page);
        }
        pages.iter().for_each(|&page| pool.release(page));
        pool.check();
        tree.check(pool);
        pages
    }

    #[test]
    fn the_longest_prefix_is_found_in_whole_pages_without_the_last_token() {
        let mut pool = PagePool::new(8, 2);
        let mut tree = PrefixTree::new(2);
        let pages = compute(&mut tree, &mut pool, &[1, 2, 3, 4, 5, 6]);
        assert_eq!(tree.find(&[1, 2, 3, 4, 5, 6, 7]), pages);
        assert_eq!(tree.find(&[1, 2, 3, 4, 5, 6]), pages[..2]);
        assert_eq!(tree.find(&[1, 2, 3, 9, 9]), pages[..1]);
        assert_eq!(tree.find(&[1, 2]), []);
        assert_eq!(tree.find(&[2, 1, 3]), []);
        assert_eq!(tree.find(&[]), []);
        tree.check(&pool);
    }

    #[test]
    fn branches_share_their_prefix_and_duplicates_are_given_back() {
        let mut pool = PagePool::new(8, 2);
        let mut tree = PrefixTree::new(2);
        let first = compute(&mut tree, &mut pool, &[1, 2, 3, 4, 5, 6]);
        let second = compute(&mut tree, &mut pool, &[1, 2, 3, 4, 7, 8]);
        assert_eq!(first[..2], second[..2]);
        assert_ne!(first[2], second[2]);
        assert_eq!((pool.idle(), pool.free()), (4, 4));
        assert_eq!(tree.find(&[1, 2, 3, 4, 7, 8, 0]), second);
        assert_eq!(tree.find(&[1, 2, 3, 4, 5, 6, 0]), first);
    }

    #[test]
    fn the_least_recently_used_branch_without_references_is_evicted() {
        let mut pool = PagePool::new(8, 2);
        let mut tree = PrefixTree::new(2);
        let first = compute(&mut tree, &mut pool, &[1, 2, 3, 4]);
        compute(&mut tree, &mut pool, &[1, 2, 5, 6]);
        let third = compute(&mut tree, &mut pool, &[7, 8, 9, 10]);
        assert_eq!(tree.find(&[1, 2, 3, 4, 0]), first);
        pool.retain(third[0]);
        // [5, 6] is the oldest, then the unreferenced end of the third.
        assert_eq!(tree.evict(&mut pool, 1), 1);
        assert_eq!(tree.find(&[1, 2, 5, 6, 0]), first[..1]);
        assert_eq!(tree.evict(&mut pool, 1), 1);
        assert_eq!(tree.find(&[7, 8, 9, 10, 0]), third[..1]);
        tree.check(&pool);
        assert_eq!(tree.evict(&mut pool, 9), 2);
        assert_eq!((pool.free(), pool.idle()), (7, 0));
        pool.release(third[0]);
        assert_eq!(tree.evict(&mut pool, 9), 1);
        assert_eq!(pool.free(), 8);
        tree.check(&pool);
        pool.check();
    }
}
