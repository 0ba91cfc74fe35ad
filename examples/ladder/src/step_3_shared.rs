//! Step 3: work that is common to a block's threads is done once, in shared memory, and weights
//! become floats without a conversion instruction.
//!
//! **The step.** The work is divided as in step 2. Now the block's threads together load a tile of
//! activations, the rows of the block by up to 1024 of K, convert it to f32 and store it in shared
//! memory, from which the eight lanes of a split all read the same values. Each thread first loads
//! the weights that it will multiply with the tile, and then its part of the tile, so that one wait
//! covers both loads.
//!
//! A 4-bit value `q` is or-ed into the lowest bits of 2^23, an f32 whose last bit has the value 1.
//! The result is the float 2^23 + q, and the subtraction of 2^23 + 8 gives exactly q - 8. The scale
//! is applied once to the sum of eight products, not to every weight.
//!
//! **What bounds it.** With few rows, the bounds are memory and the two barriers of each tile,
//! between which no load is issued. With eight rows, the bound is the FMA pipe: only the f32
//! multiply-adds remain. With M = 16, the multiply-adds of eight rows already take longer than the
//! weight takes to arrive.
//!
//! **In the profile.** The loop has no conversions, and FMA is the busiest pipe. Shared loads
//! replace most global loads, and "barrier" is among the stalls.

use crate::step_2_wide::{Block, add_splits};
use crate::{Args, LadderError};
use cubecl::client::Client;
use cubecl::prelude::*;
use half::f16;
use marlin_kernels::QuantProblem;

/// Returns the number of rows of words that a thread multiplies in a tile. With eight rows of
/// activations, four rows of words would need too many registers for two blocks on a
/// multiprocessor.
const fn words_of(rows: usize) -> usize {
    if rows < 8 { 4 } else { 2 }
}

// ANCHOR: weights
/// Returns q - 8 for value `i` of a word.
#[cube]
fn weight(word: u32, #[comptime] i: usize) -> f32 {
    // 0x4b000000 is 2^23 in f32.
    f32::reinterpret(((word >> comptime!(4 * i as u32)) & 15u32) | 0x4b00_0000u32) - 8_388_616.0
}
// ANCHOR_END: weights

// ANCHOR: kernel
/// Multiplies as step 2 does, on tiles of `8 * words_of(rows) * splits` rows of K.
#[cube(launch_unchecked)]
pub(crate) fn shared_tile(
    x: &[Vector<f16, Const<8>>],
    words: &[Vector<u32, Const<4>>],
    scales: &[Vector<f16, Const<4>>],
    out: &mut [f16],
    m: usize,
    n: usize,
    k: usize,
    #[comptime] block: Block,
) {
    let lane = UNIT_POS_X as usize % comptime!(block.lanes);
    let split = UNIT_POS_X as usize / comptime!(block.lanes);
    let quads = n / 4;
    let quad = min(
        CUBE_POS_X as usize * comptime!(block.lanes) + lane,
        quads - 1,
    );
    let word_rows = k / 8;
    let each = comptime!(words_of(block.rows));
    let depth = comptime!(each * block.splits);
    let mut tile = Shared::<[Vector<f32, Const<8>>]>::new_slice(comptime!(block.rows * depth));
    let mut sums = Array::<f32>::new(comptime!(4 * block.rows));
    #[unroll]
    for i in 0..comptime!(4 * block.rows) {
        sums[i] = 0.0;
    }

    let mut first = 0usize.runtime();
    while first < word_rows {
        let mut four = Array::<Vector<u32, Const<4>>>::new(each);
        let mut scale = Array::<Vector<f16, Const<4>>>::new(each);
        #[unroll]
        for w in 0..each {
            // Threads past K repeat the last row of words: the tile has zeros there.
            let word_row = min(first + comptime!(w * block.splits) + split, word_rows - 1);
            four[w] = words[word_row * quads + quad];
            scale[w] = scales[word_row / 16 * quads + quad];
        }

        // Every thread has finished with the previous tile.
        sync_cube();
        let mut place = UNIT_POS_X as usize;
        while place < comptime!(block.rows * depth) {
            let row = min(
                CUBE_POS_Y as usize * comptime!(block.rows) + place / depth,
                m - 1,
            );
            let word_row = first + place % depth;
            let mut values = Vector::<f32, Const<8>>::new(0.0);
            if word_row < word_rows {
                values = Vector::cast_from(x[row * word_rows + word_row]);
            }
            tile[place] = values;
            place += comptime!(block.threads());
        }
        sync_cube();

        #[unroll]
        for w in 0..each {
            let scale = Vector::<f32, Const<4>>::cast_from(scale[w]);
            let mut weights = Array::<f32>::new(32usize);
            #[unroll]
            for i in 0..32usize {
                weights[i] = weight(four[w].extract(comptime!(i / 8)), comptime!(i % 8));
            }
            #[unroll]
            for r in 0..comptime!(block.rows) {
                let activations = tile[comptime!(r * depth + w * block.splits) + split];
                #[unroll]
                for c in 0..4usize {
                    let mut sum = 0.0f32;
                    #[unroll]
                    for i in 0..8usize {
                        sum += activations.extract(i) * weights[comptime!(8 * c + i)];
                    }
                    sums[comptime!(4 * r + c)] += sum * scale.extract(c);
                }
            }
        }
        first += depth;
    }
    add_splits(&sums, out, m, n, block);
}
// ANCHOR_END: kernel

pub(crate) fn launch(
    client: &Client,
    problem: &QuantProblem,
    args: Args,
) -> Result<(), LadderError> {
    let (m, n, k) = (problem.m, problem.n(), problem.k());
    let block = Block::new(client, m);
    let (count, dim) = (
        block.count(problem),
        CubeDim::new_1d(block.threads() as u32),
    );
    // SAFETY: the lengths of all buffers were checked, K and N are multiples of 8, and nothing past
    // M, N or K is read or written.
    unsafe {
        shared_tile::launch_unchecked(
            client,
            count,
            dim,
            args.x,
            args.words,
            args.scales,
            args.out,
            m,
            n,
            k,
            block,
        )
    };
    Ok(())
}
