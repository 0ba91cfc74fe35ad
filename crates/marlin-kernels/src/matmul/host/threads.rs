//! Work on all cores, and matrices of which each thread writes its own columns.

use super::pool;
use std::marker::PhantomData;

/// Multiplications and additions below which another thread costs more than it does: it begins
/// about a microsecond late.
const WORK: usize = 1 << 17;

/// Runs `task` for `0..tasks`, on as many threads as the number of multiplications justifies. The
/// calling thread takes part.
pub fn for_each(tasks: usize, work: usize, task: impl Fn(usize) + Sync) {
    pool::for_each(tasks, pool::threads().min(work / WORK), &task);
}

/// Columns of each task where `n` are split evenly: a multiple of `step`, several tasks a thread.
pub fn strip(n: usize, step: usize, most: usize) -> usize {
    let even = n.div_ceil(4 * pool::threads());
    // To the nearest multiple: rounded up, there may be fewer tasks than threads have turns.
    ((even + step / 2) / step * step).clamp(step, most)
}

/// A matrix [rows, n] whose columns are written by different threads.
pub struct Columns<'a, T> {
    start: *mut T,
    rows: usize,
    n: usize,
    matrix: PhantomData<&'a mut [T]>,
}

// SAFETY: threads reach elements only through `part`, whose callers keep them disjoint.
unsafe impl<T: Send> Sync for Columns<'_, T> {}

impl<'a, T> Columns<'a, T> {
    /// Of a matrix of rows of `n`.
    pub fn new(matrix: &'a mut [T], n: usize) -> Self {
        Self {
            start: matrix.as_mut_ptr(),
            rows: matrix.len() / n.max(1),
            n,
            matrix: PhantomData,
        }
    }

    /// Returns a pointer to column `first` of a row; `width` columns follow.
    ///
    /// # Panics
    /// Outside the matrix.
    #[inline(always)]
    pub fn start(&self, row: usize, first: usize, width: usize) -> *mut T {
        assert!(
            row < self.rows && first <= self.n && width <= self.n - first,
            "outside the matrix"
        );
        // SAFETY: inside the matrix.
        unsafe { self.start.add(row * self.n + first) }
    }

    /// `width` columns of a row, from `first` on.
    ///
    /// # Safety
    /// While the slice lives, no other has the same elements.
    ///
    /// # Panics
    /// Outside the matrix.
    #[allow(clippy::mut_from_ref, reason = "the caller keeps the parts apart")]
    #[inline(always)]
    pub unsafe fn part(&self, row: usize, first: usize, width: usize) -> &mut [T] {
        // SAFETY: inside the matrix; the caller lets no other slice have these elements.
        unsafe { std::slice::from_raw_parts_mut(self.start(row, first, width), width) }
    }
}
