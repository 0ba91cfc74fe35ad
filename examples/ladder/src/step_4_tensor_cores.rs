//! Step 4: tensor cores, on a weight whose words are fragments.
//!
//! **The step.** `mma.m16n8k16` does 2048 multiply-adds in one instruction of a warp, if every lane
//! holds the values of its fragments. The tile layout stores the weight in that order: one 16-byte
//! load brings a lane its weights of 16 rows of K by 64 columns, and no value moves between lanes.
//! A word becomes the fragment A by bit operations on pairs: `lop3` puts two nibbles 16 bits apart
//! into the mantissas of two halves, one half2 instruction subtracts the offset and the zero point,
//! and another one applies the scale. Activations are the fragment B, loaded from global memory as
//! they are needed. A block has 64 columns, its eight warps take chunks of 64 rows of K in turn,
//! and their sums are added at the end.
//!
//! **What bounds it.** The bound is latency. A warp loads a chunk, waits, multiplies, and only then
//! loads the next chunk. With one or two blocks on each multiprocessor, not enough bytes are in
//! flight to keep the memory busy. In addition, N / 64 blocks are hardly ever a multiple of the
//! multiprocessors.
//!
//! **In the profile.** HMMA replaces FMA, and the arithmetic pipes are mostly idle. "Long
//! scoreboard" at the first use of a chunk's words is nearly the only reason to stall. The time for
//! 64 rows is little more than that for one row.

use crate::fragment::{WARPS, pair_place, row_tiles, scales_place, words_place, write};
use crate::{Args, LadderError};
use cubecl::client::Client;
use cubecl::prelude::*;
use half::f16;
use marlin_kernels::QuantProblem;
use marlin_kernels::ptx::{
    F4, U4, fma_f16x2, lane, mma_m16n8k16, mul_f16x2, prmt_duplicate_half, sub_f16x2,
};

/// The number 1024 in f16, twice. Its last bit has the value 1: a nibble or-ed into bits 0 to 3
/// gives 1024 + q, and a nibble or-ed into bits 4 to 7 gives 1024 + 16q.
pub const MAGIC: u32 = 0x6400_6400;
/// The number 1024 + 8 in f16, twice. Subtracted from 1024 + q, it gives q - 8.
pub const LOW_OFFSET: u32 = 0x6408_6408;
/// The number 1/16 in f16, twice. Multiplied by 1024 + 16q, it gives 64 + q.
pub const HIGH_FACTOR: u32 = 0x2c00_2c00;
/// The number -(64 + 8) in f16, twice. Added to the product with [`HIGH_FACTOR`], it gives q - 8.
pub const HIGH_OFFSET: u32 = 0xd480_d480;

// ANCHOR: dequantize
/// Returns the fragment A of a word. `scales` holds the scales of columns `g` (lower half) and `g +
/// 8` (upper half).
#[cube]
fn dequantize(word: u32, scales: u32) -> U4 {
    let (low_scale, high_scale) = (
        prmt_duplicate_half(scales, false),
        prmt_duplicate_half(scales, true),
    );
    let mut a = U4::new(0u32);
    #[unroll]
    for half in 0..2usize {
        let word = word >> comptime!(8 * half as u32);
        let low = sub_f16x2((word & 0x000f_000fu32) | MAGIC, LOW_OFFSET.runtime());
        let high = fma_f16x2(
            (word & 0x00f0_00f0u32) | MAGIC,
            HIGH_FACTOR.runtime(),
            HIGH_OFFSET.runtime(),
        );
        a.insert(comptime!(2 * half), mul_f16x2(low, low_scale));
        a.insert(comptime!(2 * half + 1), mul_f16x2(high, high_scale));
    }
    a
}
// ANCHOR_END: dequantize

// ANCHOR: multiply
/// Adds the products of 16 rows of K to `sums`. `words` holds the weights of 64 columns. `b[2i]`
/// and `b[2i + 1]` hold the rows of activations `8i..8i + 8`, in `tiles` n8 tiles. `sums[j * tiles
/// + i]` holds the sums of columns `16j..16j + 16` and of those rows.
#[cube]
pub(crate) fn multiply(
    words: U4,
    scales: U4,
    b: &Array<u32>,
    sums: &mut Array<F4>,
    #[comptime] tiles: usize,
) {
    #[unroll]
    for j in 0..4usize {
        let a = dequantize(words.extract(j), scales.extract(j));
        #[unroll]
        for i in 0..tiles {
            let sum = comptime!(j * tiles + i);
            sums[sum] = mma_m16n8k16(
                a,
                b[comptime!(2 * i)],
                b[comptime!(2 * i + 1)],
                sums[sum],
                false,
            );
        }
    }
}
// ANCHOR_END: multiply

// ANCHOR: kernel
/// Multiplies 64 columns with `8 * tiles` rows of activations per block. `x` holds pairs of
/// activations along K.
#[cube(launch_unchecked)]
pub(crate) fn tensor_cores(
    x: &[u32],
    words: &[U4],
    scales: &[U4],
    out: &mut [f16],
    m: u32,
    n: u32,
    k: u32,
    #[comptime] tiles: usize,
) {
    let (lane, warp) = (lane(), UNIT_POS_X / 32);
    let chunks_n = n / 64;
    let mut sums = Array::<F4>::new(comptime!(4 * tiles));
    #[unroll]
    for i in 0..comptime!(4 * tiles) {
        sums[i] = F4::new(0.0);
    }
    let mut x_rows = Array::<u32>::new(tiles);
    #[unroll]
    for i in 0..tiles {
        // Rows past M repeat the last row, and are not written.
        let row = (CUBE_POS_Y * comptime!(tiles as u32) + comptime!(i as u32)) * 8 + lane / 4;
        x_rows[i] = min(row, m - 1) * (k / 2) + pair_place(lane);
    }

    let mut chunk = warp;
    while chunk < k / 64 {
        let group = scales[scales_place(chunk / 2, CUBE_POS_X, chunks_n, lane) as usize];
        let mut four = Array::<U4>::new(4usize);
        #[unroll]
        for step in 0..4usize {
            four[step] = words[words_place(
                chunk * 4 + comptime!(step as u32),
                CUBE_POS_X,
                chunks_n,
                lane,
            ) as usize];
        }
        #[unroll]
        for step in 0..4usize {
            let mut b = Array::<u32>::new(comptime!(2 * tiles));
            #[unroll]
            for i in 0..tiles {
                let pair = x_rows[i] + chunk * 32 + comptime!(8 * step as u32);
                b[comptime!(2 * i)] = x[pair as usize];
                b[comptime!(2 * i + 1)] = x[(pair + 4) as usize];
            }
            multiply(four[step], group, &b, &mut sums, tiles);
        }
        chunk += comptime!(WARPS as u32);
    }
    write(&sums, out, m, n, tiles);
}
// ANCHOR_END: kernel

pub(crate) fn launch(
    client: &Client,
    problem: &QuantProblem,
    args: Args,
) -> Result<(), LadderError> {
    let (m, n, k) = (problem.m, problem.n(), problem.k());
    let tiles = row_tiles(m);
    let count = CubeCount::new_2d((n / 64) as u32, m.div_ceil(8 * tiles) as u32);
    let dim = CubeDim::new_1d(32 * WARPS as u32);
    let [m, n, k] = [m, n, k].map(|length| length as u32);
    // SAFETY: the lengths of all buffers were checked, K and N are whole chunks of more than one
    // group, and no row past M is read or written.
    unsafe {
        tensor_cores::launch_unchecked(
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
            tiles,
        )
    };
    Ok(())
}
