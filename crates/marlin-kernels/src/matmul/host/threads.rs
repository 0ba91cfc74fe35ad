//! Distributes work over all cores, and gives each thread its own columns of a matrix to write.

use super::pool;
use std::marker::PhantomData;

/// The minimum number of multiply-adds for each thread. With fewer, another thread costs more than
/// it saves, because it starts about a microsecond late.
const WORK: usize = 1 << 17;

/// Runs `task` for `0..tasks`, on as many threads as `work`, the number of multiplications,
/// justifies. The calling thread takes part.
pub fn for_each(tasks: usize, work: usize, task: impl Fn(usize) + Sync) {
    pool::for_each(tasks, pool::threads().min(work / WORK), &task);
}

/// Returns the number of columns of each task when `n` columns are split evenly into several tasks
/// per thread. The result is a multiple of `step`, and at most `most`.
pub fn strip(n: usize, step: usize, most: usize) -> usize {
    let even = n.div_ceil(4 * pool::threads());
    // Rounded to the nearest multiple: rounded up, there might be too few tasks for all threads.
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
    /// Wraps a matrix with rows of `n` elements.
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
    /// Panics if the columns are outside the matrix.
    #[inline(always)]
    pub fn start(&self, row: usize, first: usize, width: usize) -> *mut T {
        assert!(
            row < self.rows && first <= self.n && width <= self.n - first,
            "outside the matrix"
        );
        // SAFETY: inside the matrix.
        unsafe { self.start.add(row * self.n + first) }
    }

    /// Returns `width` columns of a row, from `first` on.
    ///
    /// # Safety
    /// While the slice lives, no other slice may have the same elements.
    ///
    /// # Panics
    /// Panics if the columns are outside the matrix.
    #[allow(clippy::mut_from_ref, reason = "the caller keeps the parts apart")]
    #[inline(always)]
    pub unsafe fn part(&self, row: usize, first: usize, width: usize) -> &mut [T] {
        // SAFETY: inside the matrix; the caller lets no other slice have these elements.
        unsafe { std::slice::from_raw_parts_mut(self.start(row, first, width), width) }
    }
}
