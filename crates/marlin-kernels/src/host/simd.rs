//! Eight lanes of f32 at a time: one trait of what the kernels need, AVX2 with FMA and F16C where the processor has them, and plain Rust elsewhere.
//!
//! Plain Rust works on arrays of eight, which compilers turn into the vector instructions that every processor of a target has, NEON on AArch64.

use half::{bf16, f16};

/// Lanes of a vector.
pub const LANES: usize = 8;

/// Vectors of [`LANES`] lanes. A value is a proof that the processor has the instructions.
///
/// Every method is inlined into [`dispatch`]'s function, which is compiled for these instructions: a [`Kernel`] and what it calls are
/// `#[inline(always)]`, and no closure handles vectors, since it would be a function of its own.
pub trait Simd: Copy {
    /// Floats.
    type F32: Copy;
    /// Words.
    type U32: Copy;

    fn splat(self, value: f32) -> Self::F32;
    fn load(self, from: &[f32; LANES]) -> Self::F32;
    fn load_f16(self, from: &[f16; LANES]) -> Self::F32;
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F32;
    fn store(self, vector: Self::F32, to: &mut [f32; LANES]);
    /// Rounds to nearest, ties to even.
    fn store_f16(self, vector: Self::F32, to: &mut [f16; LANES]);
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`.
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// The sum of the lanes.
    fn sum(self, vector: Self::F32) -> f32;

    fn splat_word(self, word: u32) -> Self::U32;
    fn load_words(self, from: &[u32; LANES]) -> Self::U32;
    fn and(self, words: Self::U32, mask: u32) -> Self::U32;
    fn shift_right<const BITS: i32>(self, words: Self::U32) -> Self::U32;
    /// Each word by its own count.
    fn shift_right_each(self, words: Self::U32, by: &[u32; LANES]) -> Self::U32;
    /// Words below 2^31 as floats.
    fn to_f32(self, words: Self::U32) -> Self::F32;
}

/// What is compiled once for each [`Simd`].
pub trait Kernel {
    /// What it gives.
    type Output;

    /// Runs it. `#[inline(always)]`, as everything that it hands `simd` to.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs a kernel with the best instructions of this processor.
pub fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if let Some(avx2) = Avx2::detect() {
        // SAFETY: the processor has the instructions.
        return unsafe { run_avx2(avx2, kernel) };
    }
    kernel.run(Scalar)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(avx2: Avx2, kernel: K) -> K::Output {
    kernel.run(avx2)
}

/// Plain Rust.
#[derive(Debug, Clone, Copy)]
pub struct Scalar;

#[inline(always)]
fn map<A: Copy, B>(a: [A; LANES], f: impl Fn(A) -> B) -> [B; LANES] {
    a.map(f)
}

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

impl Simd for Scalar {
    type F32 = [f32; LANES];
    type U32 = [u32; LANES];

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F32 {
        [value; LANES]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F32 {
        *from
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F32 {
        map(*from, f16::to_f32)
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F32 {
        map(*from, bf16::to_f32)
    }

    #[inline(always)]
    fn store(self, vector: Self::F32, to: &mut [f32; LANES]) {
        *to = vector;
    }

    #[inline(always)]
    fn store_f16(self, vector: Self::F32, to: &mut [f16; LANES]) {
        *to = map(vector, f16::from_f32);
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        // Two roundings: without the instruction a fused one is a call of a function.
        zip(zip(a, b, |a, b| a * b), c, |product, c| product + c)
    }

    #[inline(always)]
    fn sum(self, vector: Self::F32) -> f32 {
        let [a, b, c, d, e, f, g, h] = vector;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }

    #[inline(always)]
    fn splat_word(self, word: u32) -> Self::U32 {
        [word; LANES]
    }

    #[inline(always)]
    fn load_words(self, from: &[u32; LANES]) -> Self::U32 {
        *from
    }

    #[inline(always)]
    fn and(self, words: Self::U32, mask: u32) -> Self::U32 {
        map(words, |word| word & mask)
    }

    #[inline(always)]
    fn shift_right<const BITS: i32>(self, words: Self::U32) -> Self::U32 {
        map(words, |word| word >> BITS)
    }

    #[inline(always)]
    fn shift_right_each(self, words: Self::U32, by: &[u32; LANES]) -> Self::U32 {
        std::array::from_fn(|lane| words[lane] >> by[lane])
    }

    #[inline(always)]
    fn to_f32(self, words: Self::U32) -> Self::F32 {
        map(words, |word| word as i32 as f32)
    }
}

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{LANES, Simd};
    use half::{bf16, f16};
    use std::arch::x86_64::*;

    /// AVX2, FMA and F16C: every x86-64 processor since Haswell and Zen.
    #[derive(Debug, Clone, Copy)]
    pub struct Avx2(());

    impl Avx2 {
        /// The proof, where this processor has them.
        pub fn detect() -> Option<Self> {
            let has = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            has.then_some(Self(()))
        }
    }

    // SAFETY, of every block below: an `Avx2` is made only where the processor has the instructions; loads and stores are within the
    // array that they get, and take any alignment.
    #[allow(clippy::undocumented_unsafe_blocks, reason = "the comment above is of all of them")]
    impl Simd for Avx2 {
        type F32 = __m256;
        type U32 = __m256i;

        #[inline(always)]
        fn splat(self, value: f32) -> __m256 {
            unsafe { _mm256_set1_ps(value) }
        }

        #[inline(always)]
        fn load(self, from: &[f32; LANES]) -> __m256 {
            unsafe { _mm256_loadu_ps(from.as_ptr()) }
        }

        #[inline(always)]
        fn load_f16(self, from: &[f16; LANES]) -> __m256 {
            unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())) }
        }

        #[inline(always)]
        fn load_bf16(self, from: &[bf16; LANES]) -> __m256 {
            unsafe {
                let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
            }
        }

        #[inline(always)]
        fn store(self, vector: __m256, to: &mut [f32; LANES]) {
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), vector) }
        }

        #[inline(always)]
        fn store_f16(self, vector: __m256, to: &mut [f16; LANES]) {
            unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector)) }
        }

        #[inline(always)]
        fn add(self, a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_add_ps(a, b) }
        }

        #[inline(always)]
        fn mul(self, a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_mul_ps(a, b) }
        }

        #[inline(always)]
        fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        fn sum(self, vector: __m256) -> f32 {
            unsafe {
                let four = _mm_add_ps(_mm256_castps256_ps128(vector), _mm256_extractf128_ps::<1>(vector));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
            }
        }

        #[inline(always)]
        fn splat_word(self, word: u32) -> __m256i {
            unsafe { _mm256_set1_epi32(word as i32) }
        }

        #[inline(always)]
        fn load_words(self, from: &[u32; LANES]) -> __m256i {
            unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
        }

        #[inline(always)]
        fn and(self, words: __m256i, mask: u32) -> __m256i {
            unsafe { _mm256_and_si256(words, self.splat_word(mask)) }
        }

        #[inline(always)]
        fn shift_right<const BITS: i32>(self, words: __m256i) -> __m256i {
            unsafe { _mm256_srli_epi32::<BITS>(words) }
        }

        #[inline(always)]
        fn shift_right_each(self, words: __m256i, by: &[u32; LANES]) -> __m256i {
            unsafe { _mm256_srlv_epi32(words, self.load_words(by)) }
        }

        #[inline(always)]
        fn to_f32(self, words: __m256i) -> __m256 {
            unsafe { _mm256_cvtepi32_ps(words) }
        }
    }
}
