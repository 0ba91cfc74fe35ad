//! The product of many rows of activations. A panel of the weight is unpacked into the first-level
//! cache, and multiplied from there with all rows.

use super::float::add_product;
use super::simd::{Kernel, LANES, Simd, dispatch};
use super::threads::{Columns, for_each, strip};
use super::unpack::{ValueKernel, dispatch_values, unpack};
use super::weight::Reader;
use std::ops::Range;

/// Rows of K in a panel, a multiple of every chunk length: 16 KiB, half a first-level cache.
const DEPTH: usize = 256;
/// Maximum number of rows of activations whose sums are kept in registers. With twelve rows, twelve
/// of thirteen instructions are multiply-adds.
const BLOCK: usize = 12;
/// Maximum number of columns of a task.
const STRIP: usize = 256;

/// Activations in the order of the stored rows, in blocks of rows, as the innermost loop reads
/// them.
pub struct Activations {
    /// The blocks one after the other, each [k, rows of the block].
    packed: Vec<f32>,
    rows: usize,
    k: usize,
    /// Rows of every block except the last.
    block: usize,
}

impl Activations {
    /// Packs the activations `x` [rows, k].
    pub fn new(x: &[f32], k: usize, permutation: Option<&[u32]>) -> Self {
        let rows = x.len() / k.max(1);
        // Blocks are of about the same size, because a block of few rows needs as many loads as a
        // block of many.
        let block = rows
            .div_ceil(rows.div_ceil(dispatch(BlockRows)).max(1))
            .max(1);
        let mut packed = vec![0.0; x.len()];
        let blocks = Columns::new(&mut packed, x.len());
        for_each(rows.div_ceil(block), 4 * x.len(), |index| {
            let x = &x[index * block * k..rows.min((index + 1) * block) * k];
            // SAFETY: each task has a block of its own.
            let packed = unsafe { blocks.part(0, index * block * k, x.len()) };
            let count = x.len() / k;
            for (row, x) in x.chunks_exact(k).enumerate() {
                let packed = packed.iter_mut().skip(row).step_by(count);
                match permutation {
                    Some(permutation) => packed
                        .zip(permutation)
                        .for_each(|(packed, &natural)| *packed = x[natural as usize]),
                    None => packed.zip(x).for_each(|(packed, x)| *packed = *x),
                }
            }
        });
        Self {
            packed,
            rows,
            k,
            block,
        }
    }
}

/// Adds the product of activations with a weight to `out` [rows, n].
pub fn multiply(reader: &Reader<'_>, x: &Activations, out: &mut [f32], n: usize) {
    let strip = strip(n, LANES, STRIP);
    let out = Columns::new(out, n);
    for_each(n.div_ceil(strip), x.packed.len() * n, |task| {
        let columns = task * strip..n.min((task + 1) * strip);
        let strip = Strip {
            reader,
            x,
            out: &out,
            columns,
        };
        dispatch_values(reader.value, strip);
    });
}

/// Computes the number of rows of activations whose sums fit in registers, besides a vector of the
/// weight and one of activations.
struct BlockRows;

impl Kernel for BlockRows {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) -> usize {
        (S::REGISTERS - 2).min(BLOCK)
    }
}

struct Strip<'a> {
    reader: &'a Reader<'a>,
    x: &'a Activations,
    out: &'a Columns<'a, f32>,
    columns: Range<usize>,
}

impl ValueKernel for Strip<'_> {
    #[inline(always)]
    fn run<S: Simd, const PER_WORD: usize, const FLOAT: bool>(self, simd: S) {
        let x = self.x;
        let mut panel = [[0.0f32; LANES]; DEPTH];
        // The loop over K is outside, so that the panel's part of all activations stays in the
        // second-level cache.
        for start in (0..x.k).step_by(DEPTH) {
            let depth = DEPTH.min(x.k - start);
            for column in self.columns.clone().step_by(LANES) {
                let columns = column..self.columns.end.min(column + LANES);
                self.unpack::<S, PER_WORD, FLOAT>(simd, start..start + depth, column, &mut panel);
                for first in (0..x.rows).step_by(x.block) {
                    let count = x.block.min(x.rows - first);
                    let packed = &x.packed[first * x.k + start * count..][..depth * count];
                    match count {
                        1 => self.tile::<S, 1>(simd, packed, &panel, first, columns.clone()),
                        2 => self.tile::<S, 2>(simd, packed, &panel, first, columns.clone()),
                        3 => self.tile::<S, 3>(simd, packed, &panel, first, columns.clone()),
                        4 => self.tile::<S, 4>(simd, packed, &panel, first, columns.clone()),
                        5 => self.tile::<S, 5>(simd, packed, &panel, first, columns.clone()),
                        6 => self.tile::<S, 6>(simd, packed, &panel, first, columns.clone()),
                        7 => self.tile::<S, 7>(simd, packed, &panel, first, columns.clone()),
                        8 => self.tile::<S, 8>(simd, packed, &panel, first, columns.clone()),
                        9 => self.tile::<S, 9>(simd, packed, &panel, first, columns.clone()),
                        10 => self.tile::<S, 10>(simd, packed, &panel, first, columns.clone()),
                        11 => self.tile::<S, 11>(simd, packed, &panel, first, columns.clone()),
                        _ => self.tile::<S, BLOCK>(simd, packed, &panel, first, columns.clone()),
                    }
                }
            }
        }
    }
}

impl Strip<'_> {
    /// Unpacks rows of K of the columns from `column` on; the first row must begin a chunk. Values
    /// beyond K and N are unspecified.
    #[inline(always)]
    fn unpack<S: Simd, const PER_WORD: usize, const FLOAT: bool>(
        &self,
        simd: S,
        rows: Range<usize>,
        column: usize,
        panel: &mut [[f32; LANES]; DEPTH],
    ) {
        let (reader, panel) = (self.reader, panel.as_chunks_mut::<PER_WORD>().0);
        for start in rows.clone().step_by(reader.chunk) {
            let (chunk, end) = (start / reader.chunk, rows.end.min(start + reader.chunk));
            let (scales, offsets) = reader.scale_and_offset(simd, chunk, column);
            let of_chunk =
                &mut panel[(start - rows.start) / PER_WORD..(end - rows.start).div_ceil(PER_WORD)];
            for (row, panel) in of_chunk.iter_mut().enumerate() {
                let values = unpack::<S, PER_WORD, FLOAT>(
                    simd,
                    reader.words(simd, start / PER_WORD + row, column),
                    scales,
                    offsets,
                );
                for (panel, value) in panel.iter_mut().zip(values) {
                    simd.store(value, panel);
                }
            }
        }
    }

    /// Adds the product of `ROWS` rows of activations, from `first` on, with a panel.
    #[inline(always)]
    fn tile<S: Simd, const ROWS: usize>(
        &self,
        simd: S,
        x: &[f32],
        panel: &[[f32; LANES]; DEPTH],
        first: usize,
        columns: Range<usize>,
    ) {
        let mut sums = [simd.splat(0.0); ROWS];
        for (x, weights) in x.as_chunks::<ROWS>().0.iter().zip(panel) {
            let weights = simd.load(weights);
            for (sum, &x) in sums.iter_mut().zip(x) {
                *sum = simd.mul_add(simd.splat(x), weights, *sum);
            }
        }
        for (row, sum) in sums.into_iter().enumerate() {
            // SAFETY: no other task has these columns.
            let out = unsafe { self.out.part(first + row, columns.start, columns.len()) };
            add_product(simd, sum, simd.splat(1.0), out);
        }
    }
}
