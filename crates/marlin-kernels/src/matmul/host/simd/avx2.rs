//! Vectors with AVX2, FMA and F16C: two registers of eight lanes.

use super::{LANES, Simd};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// The implementation with AVX2, FMA and F16C: every x86-64 processor since Haswell and Zen.
#[derive(Debug, Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// Returns the implementation if this processor has the instructions.
    pub fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }
}

// SAFETY, of every block below: an `Avx2` is created only if the processor has the instructions;
// loads and stores are within the array that they are given, and accept any alignment. A prefetch
// of any address has no effect except on the cache.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "the comment above is of all of them"
)]
impl Simd for Avx2 {
    type F32 = [__m256; 2];
    type U32 = [__m256i; 2];
    // Sixteen registers of half a vector each.
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn prefetch(self, words: &[u32], index: usize) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(words.as_ptr().wrapping_add(index).cast()) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> [__m256; 2] {
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> [__m256; 2] {
        unsafe {
            [
                _mm256_loadu_ps(from.as_ptr()),
                _mm256_loadu_ps(from.as_ptr().add(8)),
            ]
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> [__m256; 2] {
        unsafe {
            let from = from.as_ptr().cast::<__m128i>();
            [
                _mm256_cvtph_ps(_mm_loadu_si128(from)),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(1))),
            ]
        }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> [__m256; 2] {
        unsafe {
            let from = from.as_ptr().cast::<__m128i>();
            let (low, high) = (
                _mm256_cvtepu16_epi32(_mm_loadu_si128(from)),
                _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(1))),
            );
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }

    #[inline(always)]
    fn store(self, [low, high]: [__m256; 2], to: &mut [f32; LANES]) {
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), low);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), high);
        }
    }

    #[inline(always)]
    fn store_f16(self, [low, high]: [__m256; 2], to: &mut [f16; LANES]) {
        unsafe {
            let to = to.as_mut_ptr().cast::<__m128i>();
            _mm_storeu_si128(to, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low));
            _mm_storeu_si128(
                to.add(1),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high),
            );
        }
    }

    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        unsafe {
            [
                _mm256_fmadd_ps(a[0], b[0], c[0]),
                _mm256_fmadd_ps(a[1], b[1], c[1]),
            ]
        }
    }

    #[inline(always)]
    fn sum(self, [low, high]: [__m256; 2]) -> f32 {
        unsafe {
            let eight = _mm256_add_ps(low, high);
            let four = _mm_add_ps(
                _mm256_castps256_ps128(eight),
                _mm256_extractf128_ps::<1>(eight),
            );
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn splat_word(self, word: u32) -> [__m256i; 2] {
        unsafe { [_mm256_set1_epi32(word as i32); 2] }
    }

    #[inline(always)]
    fn load_words(self, from: &[u32; LANES]) -> [__m256i; 2] {
        unsafe {
            let from = from.as_ptr().cast::<__m256i>();
            [_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))]
        }
    }

    #[inline(always)]
    fn and(self, words: [__m256i; 2], mask: u32) -> [__m256i; 2] {
        let [mask, _] = self.splat_word(mask);
        unsafe {
            [
                _mm256_and_si256(words[0], mask),
                _mm256_and_si256(words[1], mask),
            ]
        }
    }

    #[inline(always)]
    fn shift_right<const BITS: i32>(self, words: [__m256i; 2]) -> [__m256i; 2] {
        unsafe {
            [
                _mm256_srli_epi32::<BITS>(words[0]),
                _mm256_srli_epi32::<BITS>(words[1]),
            ]
        }
    }

    #[inline(always)]
    fn shift_right_each(self, words: [__m256i; 2], by: &[u32; LANES]) -> [__m256i; 2] {
        let by = self.load_words(by);
        unsafe {
            [
                _mm256_srlv_epi32(words[0], by[0]),
                _mm256_srlv_epi32(words[1], by[1]),
            ]
        }
    }

    #[inline(always)]
    fn to_f32(self, words: [__m256i; 2]) -> [__m256; 2] {
        unsafe { [_mm256_cvtepi32_ps(words[0]), _mm256_cvtepi32_ps(words[1])] }
    }

    #[inline(always)]
    fn shift_left<const BITS: i32>(self, words: [__m256i; 2]) -> [__m256i; 2] {
        unsafe {
            [
                _mm256_slli_epi32::<BITS>(words[0]),
                _mm256_slli_epi32::<BITS>(words[1]),
            ]
        }
    }

    #[inline(always)]
    fn bits_to_f32(self, words: [__m256i; 2], bits: u32) -> [__m256; 2] {
        let [bits, _] = self.splat_word(bits);
        unsafe {
            [
                _mm256_castsi256_ps(_mm256_add_epi32(words[0], bits)),
                _mm256_castsi256_ps(_mm256_add_epi32(words[1], bits)),
            ]
        }
    }

    #[inline(always)]
    fn min(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        unsafe { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn with_sign(self, magnitudes: [__m256; 2], words: [__m256i; 2]) -> [__m256; 2] {
        let [low, high] = self.and(words, 0x8000_0000);
        unsafe {
            [
                _mm256_or_ps(magnitudes[0], _mm256_castsi256_ps(low)),
                _mm256_or_ps(magnitudes[1], _mm256_castsi256_ps(high)),
            ]
        }
    }
}
