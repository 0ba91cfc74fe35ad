//! Vectors with AVX-512: one register of sixteen lanes.

use super::{LANES, Simd};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// The implementation with AVX-512F: Intel's servers since Skylake, AMD's processors since Zen 4.
#[derive(Debug, Clone, Copy)]
pub struct Avx512(());

impl Avx512 {
    /// Returns the implementation if this processor has the instructions.
    pub fn detect() -> Option<Self> {
        is_x86_feature_detected!("avx512f").then_some(Self(()))
    }
}

// SAFETY, of every block below: an `Avx512` is created only if the processor has the instructions;
// loads and stores are within the array that they are given, and accept any alignment. A prefetch
// of any address has no effect except on the cache.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "the comment above is of all of them"
)]
impl Simd for Avx512 {
    type F32 = __m512;
    type U32 = __m512i;
    const REGISTERS: usize = 32;

    #[inline(always)]
    fn prefetch(self, words: &[u32], index: usize) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(words.as_ptr().wrapping_add(index).cast()) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> __m512 {
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }

    #[inline(always)]
    fn store(self, vector: __m512, to: &mut [f32; LANES]) {
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), vector) }
    }

    #[inline(always)]
    fn store_f16(self, vector: __m512, to: &mut [f16; LANES]) {
        unsafe {
            _mm256_storeu_si256(
                to.as_mut_ptr().cast(),
                _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector),
            )
        }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn sum(self, vector: __m512) -> f32 {
        unsafe { _mm512_reduce_add_ps(vector) }
    }

    #[inline(always)]
    fn splat_word(self, word: u32) -> __m512i {
        unsafe { _mm512_set1_epi32(word as i32) }
    }

    #[inline(always)]
    fn load_words(self, from: &[u32; LANES]) -> __m512i {
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    #[inline(always)]
    fn and(self, words: __m512i, mask: u32) -> __m512i {
        unsafe { _mm512_and_si512(words, self.splat_word(mask)) }
    }

    #[inline(always)]
    fn shift_right<const BITS: i32>(self, words: __m512i) -> __m512i {
        // The immediate count of the plain shift has another type than `BITS`; a constant vector of
        // counts costs a register.
        unsafe { _mm512_srlv_epi32(words, _mm512_set1_epi32(BITS)) }
    }

    #[inline(always)]
    fn shift_right_each(self, words: __m512i, by: &[u32; LANES]) -> __m512i {
        unsafe { _mm512_srlv_epi32(words, self.load_words(by)) }
    }

    #[inline(always)]
    fn to_f32(self, words: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(words) }
    }

    #[inline(always)]
    fn shift_left<const BITS: i32>(self, words: __m512i) -> __m512i {
        unsafe { _mm512_sllv_epi32(words, _mm512_set1_epi32(BITS)) }
    }

    #[inline(always)]
    fn bits_to_f32(self, words: __m512i, bits: u32) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_add_epi32(words, self.splat_word(bits))) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn with_sign(self, magnitudes: __m512, words: __m512i) -> __m512 {
        let signs = self.and(words, 0x8000_0000);
        // A bitwise or of floats needs AVX-512DQ.
        unsafe { _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(magnitudes), signs)) }
    }
}
