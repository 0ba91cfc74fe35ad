use super::{LOADS, VALUES, WARPS};
use crate::matmul::float::biased;
use crate::pdl::{launch_dependents, wait};
use crate::planes::plane_total;
use crate::ptx::{
    F4, U4, cvt_halves, global_address, half_to_f32, lane, ld_global_once_16, ld_global_words,
    prefetch_l2,
};
use cubecl::prelude::*;

/// Threads of a block.
pub(super) const THREADS: usize = 32 * WARPS;

/// The compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct FloatGemvConfig {
    /// The number of vectors of a row.
    pub vectors: usize,
    /// True if the row is normalised.
    pub has_norm: bool,
    /// True for bf16, false for f16.
    pub bf16: bool,
    /// True if the card has programmatic dependent launch.
    pub uses_pdl: bool,
}

impl FloatGemvConfig {
    /// Returns the number of turns in which a warp reads a column.
    const fn turns(&self) -> usize {
        self.vectors.div_ceil(32 * LOADS)
    }
}

/// Computes columns, each by a warp. The buffers are those of
/// [`FloatOperands`](crate::matmul::float::FloatOperands), read as vectors of four words, eight
/// values.
///
/// A lane has vectors `lane + 32 i` of its warp's column. As soon as it has multiplied one, it
/// loads the vector that takes its register next, of the same column or of the warp's next one. The
/// row is in shared memory in f32, not yet divided by its root mean square: `[half, vector, 4]`, so
/// that neighbouring lanes read neighbouring 16 bytes.
#[cube(launch_unchecked)]
pub(super) fn float_gemv<F: Float>(
    x: &[U4],
    residual: ComptimeOption<&[U4]>,
    norm: ComptimeOption<&[U4]>,
    mut sum: ComptimeOption<&mut [U4]>,
    mut normalised: ComptimeOption<&mut [U4]>,
    weight: &[U4],
    bias: ComptimeOption<&[F]>,
    out: &mut [F],
    columns: u32,
    epsilon: f32,
    #[comptime] config: FloatGemvConfig,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents(config.uses_pdl);
    let vectors = comptime!(config.vectors as u32);
    let mut row = Shared::<[F4]>::new_aligned_slice(comptime!(2 * config.vectors), 16usize);
    let mut squares = Shared::<[f32]>::new_slice(WARPS);
    let (warp, lane) = (UNIT_POS_X / 32, lane());
    let stride = CUBE_COUNT_X * comptime!(WARPS as u32);
    let mut column = CUBE_POS_X * comptime!(WARPS as u32) + warp;
    let weight = Weight {
        address: global_address::<U4>(weight) + u64::cast_from(lane * 16),
        lane,
    };
    let mut weights = Array::<U4>::new(LOADS);
    if column < columns {
        #[unroll]
        for i in 0..LOADS {
            weight.load(&mut weights, column, 0usize, i, config);
        }
        weight.prefetch(column, comptime!(32 * LOADS), config);
        if column + stride < columns {
            weight.prefetch(column + stride, 0usize, config);
        }
    }
    // Until the preceding kernels have ended, only the weight may be read.
    wait(config.uses_pdl);

    let stream = Stream {
        x: global_address::<U4>(x),
        residual: address_of(residual),
        norm: address_of(norm),
    };
    let mut square = 0.0f32;
    #[unroll]
    for i in 0..comptime!(config.vectors.div_ceil(THREADS)) {
        let place = UNIT_POS_X + comptime!((i * THREADS) as u32);
        if comptime!((i + 1) * THREADS <= config.vectors) || place < vectors {
            let words = stream.words(place, config);
            let norm = stream.norm_words(place, config);
            #[unroll]
            for half in 0..2usize {
                let mut four = F4::new(0.0);
                #[unroll]
                for j in 0..4usize {
                    let mut of_row = value(words, comptime!(4 * half + j), config);
                    if comptime!(config.has_norm) {
                        square = fma(of_row, of_row, square);
                        of_row *= value(norm, comptime!(4 * half + j), config);
                    }
                    four.insert(j, of_row);
                }
                row[(comptime!((half * config.vectors) as u32) + place) as usize] = four;
            }
        }
    }
    if comptime!(config.has_norm) {
        let of_warp = plane_total(square, 32usize);
        if lane == 0 {
            squares[warp as usize] = of_warp;
        }
    }
    sync_cube();

    let mut scale = 1.0f32.runtime();
    if comptime!(config.has_norm) {
        let mut total = 0.0f32;
        #[unroll]
        for i in 0..WARPS {
            total += squares[i];
        }
        scale = 1.0 / (total / comptime!((config.vectors * VALUES) as f32) + epsilon).sqrt();
    }
    while column < columns {
        let next = column + stride;
        let mut total = 0.0f32;
        #[unroll]
        for turn in 0..config.turns() {
            #[unroll]
            for i in 0..LOADS {
                let first = comptime!(32 * (turn * LOADS + i));
                let place = lane + comptime!(first as u32);
                if exists(place, first, config) {
                    total = multiply(total, weights[i], &row, place, config);
                }
                if comptime!(turn + 1 < config.turns()) {
                    weight.load(&mut weights, column, comptime!(turn + 1), i, config);
                } else if next < columns {
                    weight.load(&mut weights, next, 0usize, i, config);
                }
            }
        }
        let total = plane_total(total, 32usize) * scale;
        if lane == 0 {
            out[column as usize] = F::cast_from(biased::<F>(total, &bias, column as usize));
        }
        column = next;
    }

    // The blocks share the writing of the stream and of the normalised row.
    if comptime!(config.has_norm) {
        let mut place = CUBE_POS_X * comptime!(THREADS as u32) + UNIT_POS_X;
        while place < vectors {
            let words = stream.words(place, config);
            let norm = stream.norm_words(place, config);
            write(&mut sum, place, words);
            write(&mut normalised, place, normed(words, norm, scale, config));
            place += CUBE_COUNT_X * comptime!(THREADS as u32);
        }
    }
}

/// The weight, as a lane reads it.
#[derive(CubeType, Clone, Copy)]
struct Weight {
    /// The address of the lane's first vector.
    address: u64,
    lane: u32,
}

#[cube]
impl Weight {
    /// Loads vector `i` of a turn through a column; there may be none.
    fn load(
        &self,
        weights: &mut Array<U4>,
        column: u32,
        #[comptime] turn: usize,
        #[comptime] i: usize,
        #[comptime] config: FloatGemvConfig,
    ) {
        let first = comptime!(32 * (turn * LOADS + i));
        if exists(self.lane + comptime!(first as u32), first, config) {
            let at = self.address
                + u64::cast_from(column) * comptime!((config.vectors * 16) as u64)
                + comptime!((first * 16) as u64);
            weights[i] = ld_global_once_16(at);
        }
    }

    /// Brings the vectors of a column from vector `first` on to the second-level cache.
    fn prefetch(&self, column: u32, #[comptime] first: usize, #[comptime] config: FloatGemvConfig) {
        let start = self.address + u64::cast_from(column) * comptime!((config.vectors * 16) as u64);
        #[unroll]
        for i in comptime!(first / 32)..comptime!(config.vectors / 32) {
            prefetch_l2(start + comptime!((512 * i) as u64));
        }
    }
}

/// The addresses of the activations, the residual stream and the norm's weight.
#[derive(CubeType, Clone, Copy)]
struct Stream {
    x: u64,
    residual: u64,
    norm: u64,
}

#[cube]
impl Stream {
    /// Returns a vector of the activations; with a norm, added to the residual stream and rounded.
    fn words(&self, place: u32, #[comptime] config: FloatGemvConfig) -> U4 {
        let at = u64::cast_from(place) * 16;
        let mut words = ld_global_words(self.x + at);
        if comptime!(config.has_norm) {
            let residual = ld_global_words(self.residual + at);
            #[unroll]
            for i in 0..4usize {
                let mut sums = Array::<f32>::new(2usize);
                #[unroll]
                for j in 0..2usize {
                    let index = comptime!(2 * i + j);
                    sums[j] = value(words, index, config) + value(residual, index, config);
                }
                words.insert(i, cvt_halves(sums[0], sums[1], config.bf16));
            }
        }
        words
    }

    /// Returns a vector of the norm's weight; zeros without a norm.
    fn norm_words(&self, place: u32, #[comptime] config: FloatGemvConfig) -> U4 {
        if comptime!(config.has_norm) {
            ld_global_words(self.norm + u64::cast_from(place) * 16)
        } else {
            U4::new(0u32)
        }
    }
}

/// Returns true if a row has vector `place`, one of the 32 from `first` on; without a comparison if
/// it has all or none of them.
#[cube]
fn exists(place: u32, #[comptime] first: usize, #[comptime] config: FloatGemvConfig) -> bool {
    if comptime!(first + 32 <= config.vectors) {
        true.runtime()
    } else if comptime!(first < config.vectors) {
        place < comptime!(config.vectors as u32)
    } else {
        false.runtime()
    }
}

/// Returns the address of a buffer; 0 if there is none.
#[cube]
fn address_of(buffer: ComptimeOption<&[U4]>) -> u64 {
    #[comptime]
    match buffer {
        ComptimeOption::Some(buffer) => global_address::<U4>(buffer),
        ComptimeOption::None => 0u64.runtime(),
    }
}

/// Returns value `index` of eight.
#[cube]
fn value(words: U4, #[comptime] index: usize, #[comptime] config: FloatGemvConfig) -> f32 {
    half_to_f32(
        words.extract(comptime!(index / 2)),
        comptime!(index % 2 == 1),
        config.bf16,
    )
}

/// Adds the products of a vector of the weight and of the row.
#[cube]
fn multiply(
    total: f32,
    weights: U4,
    row: &Shared<[F4]>,
    place: u32,
    #[comptime] config: FloatGemvConfig,
) -> f32 {
    let mut total = total;
    #[unroll]
    for half in 0..2usize {
        let four = row[(comptime!((half * config.vectors) as u32) + place) as usize];
        #[unroll]
        for j in 0..4usize {
            let weight = value(weights, comptime!(4 * half + j), config);
            total = fma(weight, four.extract(j), total);
        }
    }
    total
}

/// Returns a normalised vector, rounded before and after the multiplication by the norm's weight.
#[cube]
fn normed(words: U4, norm: U4, scale: f32, #[comptime] config: FloatGemvConfig) -> U4 {
    let mut out = U4::new(0u32);
    #[unroll]
    for i in 0..4usize {
        let (low, high) = comptime!((2 * i, 2 * i + 1));
        let scaled = cvt_halves(
            value(words, low, config) * scale,
            value(words, high, config) * scale,
            config.bf16,
        );
        let low = half_to_f32(scaled, false, config.bf16) * value(norm, low, config);
        let high = half_to_f32(scaled, true, config.bf16) * value(norm, high, config);
        out.insert(i, cvt_halves(low, high, config.bf16));
    }
    out
}

/// Writes a vector, if there is a buffer.
#[cube]
fn write(buffer: &mut ComptimeOption<&mut [U4]>, place: u32, words: U4) {
    #[comptime]
    match buffer {
        ComptimeOption::Some(buffer) => buffer[place as usize] = words,
        ComptimeOption::None => {}
    }
}
