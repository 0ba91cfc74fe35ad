//! Vectors with NEON: four registers of four lanes.

use super::{LANES, Simd};
use half::{bf16, f16};
use std::arch::aarch64::*;
use std::arch::asm;

/// The implementation with NEON, which every AArch64 processor has.
#[derive(Debug, Clone, Copy)]
pub struct Neon;

/// Number of registers of a vector.
const PARTS: usize = 4;

// SAFETY, of every block below: the instructions belong to the target's baseline; loads and stores
// are within the array that they are given, and accept any alignment. A prefetch of any address has
// no effect except on the cache.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "the comment above is of all of them"
)]
impl Simd for Neon {
    type F32 = [float32x4_t; PARTS];
    type U32 = [uint32x4_t; PARTS];
    // 32 registers of a quarter of a vector each.
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn prefetch(self, words: &[u32], index: usize) {
        let address = words.as_ptr().wrapping_add(index);
        unsafe {
            asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, readonly, preserves_flags))
        }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F32 {
        unsafe { [vdupq_n_f32(value); PARTS] }
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F32 {
        let from = from.as_ptr();
        unsafe {
            [
                vld1q_f32(from),
                vld1q_f32(from.add(4)),
                vld1q_f32(from.add(8)),
                vld1q_f32(from.add(12)),
            ]
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F32 {
        let from = from.as_ptr().cast::<u16>();
        unsafe {
            let (low, high) = (vld1q_u16(from), vld1q_u16(from.add(8)));
            [widen(low), widen_high(low), widen(high), widen_high(high)]
        }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F32 {
        let from = from.as_ptr().cast::<u16>();
        unsafe {
            let (low, high) = (vld1q_u16(from), vld1q_u16(from.add(8)));
            [
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(low))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_high_u16(low))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(high))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_high_u16(high))),
            ]
        }
    }

    #[inline(always)]
    fn store(self, vector: Self::F32, to: &mut [f32; LANES]) {
        let to = to.as_mut_ptr();
        for (part, vector) in vector.into_iter().enumerate() {
            unsafe { vst1q_f32(to.add(4 * part), vector) }
        }
    }

    #[inline(always)]
    fn store_f16(self, vector: Self::F32, to: &mut [f16; LANES]) {
        let to = to.as_mut_ptr().cast::<u16>();
        for (part, vector) in vector.into_iter().enumerate() {
            let halves: uint16x4_t;
            unsafe {
                asm!("fcvtn {:v}.4h, {:v}.4s", out(vreg) halves, in(vreg) vector, options(pure, nomem, nostack, preserves_flags));
                vst1_u16(to.add(4 * part), halves);
            }
        }
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        unsafe {
            [
                vaddq_f32(a[0], b[0]),
                vaddq_f32(a[1], b[1]),
                vaddq_f32(a[2], b[2]),
                vaddq_f32(a[3], b[3]),
            ]
        }
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        unsafe {
            [
                vmulq_f32(a[0], b[0]),
                vmulq_f32(a[1], b[1]),
                vmulq_f32(a[2], b[2]),
                vmulq_f32(a[3], b[3]),
            ]
        }
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        unsafe {
            [
                vfmaq_f32(c[0], a[0], b[0]),
                vfmaq_f32(c[1], a[1], b[1]),
                vfmaq_f32(c[2], a[2], b[2]),
                vfmaq_f32(c[3], a[3], b[3]),
            ]
        }
    }

    #[inline(always)]
    fn sum(self, [a, b, c, d]: Self::F32) -> f32 {
        unsafe {
            // Sums are added in the same order as by the other implementations.
            let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        }
    }

    #[inline(always)]
    fn splat_word(self, word: u32) -> Self::U32 {
        unsafe { [vdupq_n_u32(word); PARTS] }
    }

    #[inline(always)]
    fn load_words(self, from: &[u32; LANES]) -> Self::U32 {
        let from = from.as_ptr();
        unsafe {
            [
                vld1q_u32(from),
                vld1q_u32(from.add(4)),
                vld1q_u32(from.add(8)),
                vld1q_u32(from.add(12)),
            ]
        }
    }

    #[inline(always)]
    fn and(self, words: Self::U32, mask: u32) -> Self::U32 {
        let [mask, ..] = self.splat_word(mask);
        unsafe {
            [
                vandq_u32(words[0], mask),
                vandq_u32(words[1], mask),
                vandq_u32(words[2], mask),
                vandq_u32(words[3], mask),
            ]
        }
    }

    #[inline(always)]
    fn shift_right<const BITS: i32>(self, words: Self::U32) -> Self::U32 {
        let [a, b, c, d] = words;
        unsafe {
            [
                vshrq_n_u32::<BITS>(a),
                vshrq_n_u32::<BITS>(b),
                vshrq_n_u32::<BITS>(c),
                vshrq_n_u32::<BITS>(d),
            ]
        }
    }

    #[inline(always)]
    fn shift_right_each(self, words: Self::U32, by: &[u32; LANES]) -> Self::U32 {
        let by = self.load_words(by);
        let mut shifted = words;
        for (part, shifted) in shifted.iter_mut().enumerate() {
            // A shift to the left by a negative count is a shift to the right.
            unsafe { *shifted = vshlq_u32(words[part], vnegq_s32(vreinterpretq_s32_u32(by[part]))) }
        }
        shifted
    }

    #[inline(always)]
    fn shift_left<const BITS: i32>(self, words: Self::U32) -> Self::U32 {
        unsafe {
            [
                vshlq_n_u32::<BITS>(words[0]),
                vshlq_n_u32::<BITS>(words[1]),
                vshlq_n_u32::<BITS>(words[2]),
                vshlq_n_u32::<BITS>(words[3]),
            ]
        }
    }

    #[inline(always)]
    fn bits_to_f32(self, words: Self::U32, bits: u32) -> Self::F32 {
        let [bits, ..] = self.splat_word(bits);
        unsafe {
            [
                vreinterpretq_f32_u32(vaddq_u32(words[0], bits)),
                vreinterpretq_f32_u32(vaddq_u32(words[1], bits)),
                vreinterpretq_f32_u32(vaddq_u32(words[2], bits)),
                vreinterpretq_f32_u32(vaddq_u32(words[3], bits)),
            ]
        }
    }

    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        unsafe {
            [
                vminq_f32(a[0], b[0]),
                vminq_f32(a[1], b[1]),
                vminq_f32(a[2], b[2]),
                vminq_f32(a[3], b[3]),
            ]
        }
    }

    #[inline(always)]
    fn with_sign(self, magnitudes: Self::F32, words: Self::U32) -> Self::F32 {
        let signs = self.and(words, 0x8000_0000);
        unsafe {
            [
                vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(magnitudes[0]), signs[0])),
                vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(magnitudes[1]), signs[1])),
                vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(magnitudes[2]), signs[2])),
                vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(magnitudes[3]), signs[3])),
            ]
        }
    }

    #[inline(always)]
    fn to_f32(self, words: Self::U32) -> Self::F32 {
        let [a, b, c, d] = words;
        unsafe {
            [
                vcvtq_f32_u32(a),
                vcvtq_f32_u32(b),
                vcvtq_f32_u32(c),
                vcvtq_f32_u32(d),
            ]
        }
    }
}

/// Converts the low four f16 values to f32. The intrinsic needs a type that is not stable.
#[inline(always)]
fn widen(halves: uint16x8_t) -> float32x4_t {
    let floats;
    // SAFETY: an instruction of the target's baseline, on registers.
    unsafe {
        asm!("fcvtl {:v}.4s, {:v}.4h", out(vreg) floats, in(vreg) halves, options(pure, nomem, nostack, preserves_flags))
    }
    floats
}

/// Converts the high four f16 values to f32.
#[inline(always)]
fn widen_high(halves: uint16x8_t) -> float32x4_t {
    let floats;
    // SAFETY: as above.
    unsafe {
        asm!("fcvtl2 {:v}.4s, {:v}.8h", out(vreg) floats, in(vreg) halves, options(pure, nomem, nostack, preserves_flags))
    }
    floats
}
