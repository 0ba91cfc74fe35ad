//! Vectors of sixteen f32 lanes, and a trait with the operations that the kernels need. AVX-512
//! holds a vector in one register, AVX2 with FMA and F16C in two, NEON in four; on other processors
//! vectors are arrays in plain Rust.

use half::{bf16, f16};

/// Number of lanes of a vector.
pub const LANES: usize = 16;

/// Operations on vectors of [`LANES`] lanes. A value of the type proves that the processor has the
/// instructions.
///
/// Every method is inlined into a function of [`dispatch`] that is compiled for these instructions.
/// Therefore a [`Kernel`] and everything that it calls are `#[inline(always)]`, and no closure
/// handles vectors, because it would be a separate function.
pub trait Simd: Copy {
    /// A vector of floats.
    type F32: Copy;
    /// A vector of words.
    type U32: Copy;
    /// Number of vectors that fit in the processor's registers.
    const REGISTERS: usize;

    /// Prefetches the cache line of `words[index]`; the index may be out of bounds.
    fn prefetch(self, words: &[u32], index: usize);

    fn splat(self, value: f32) -> Self::F32;
    fn load(self, from: &[f32; LANES]) -> Self::F32;
    fn load_f16(self, from: &[f16; LANES]) -> Self::F32;
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F32;
    fn store(self, vector: Self::F32, to: &mut [f32; LANES]);
    /// Stores the lanes in f16, rounded to nearest, ties to even.
    fn store_f16(self, vector: Self::F32, to: &mut [f16; LANES]);
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// Returns `a * b + c`.
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// Returns the sum of the lanes.
    fn sum(self, vector: Self::F32) -> f32;

    fn splat_word(self, word: u32) -> Self::U32;
    fn load_words(self, from: &[u32; LANES]) -> Self::U32;
    fn and(self, words: Self::U32, mask: u32) -> Self::U32;
    fn shift_right<const BITS: i32>(self, words: Self::U32) -> Self::U32;
    /// Shifts each word right by its own count.
    fn shift_right_each(self, words: Self::U32, by: &[u32; LANES]) -> Self::U32;
    fn shift_left<const BITS: i32>(self, words: Self::U32) -> Self::U32;
    /// Converts words below 2^31 to floats.
    fn to_f32(self, words: Self::U32) -> Self::F32;
    /// Returns the floats whose bits are the words plus `bits`.
    fn bits_to_f32(self, words: Self::U32, bits: u32) -> Self::F32;
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// Returns positive floats with the highest bits of words as their signs.
    fn with_sign(self, magnitudes: Self::F32, words: Self::U32) -> Self::F32;
}

/// A kernel that is compiled once for each [`Simd`].
pub trait Kernel {
    /// The result of the kernel.
    type Output;

    /// Runs the kernel. The method must be `#[inline(always)]`, as must every function to which it
    /// passes `simd`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs a kernel with the best instruction set of this processor.
pub fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    let best = best();
    #[cfg(target_arch = "x86_64")]
    {
        if let (Best::All, Some(avx512)) = (best, Avx512::detect()) {
            // SAFETY: the processor has the instructions.
            return unsafe { run_avx512(avx512, kernel) };
        }
        if let (Best::All | Best::Avx2, Some(avx2)) = (best, Avx2::detect()) {
            // SAFETY: the processor has the instructions.
            return unsafe { run_avx2(avx2, kernel) };
        }
    }
    #[cfg(target_arch = "aarch64")]
    if best != Best::Plain {
        return kernel.run(Neon);
    }
    kernel.run(Scalar)
}

/// The best instruction set that [`dispatch`] may use. Only tests restrict it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code, reason = "tests take less than all"))]
pub enum Best {
    Plain,
    Avx2,
    All,
}

#[cfg(not(test))]
fn best() -> Best {
    Best::All
}

#[cfg(test)]
fn best() -> Best {
    tests::best()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn run_avx512<K: Kernel>(avx512: Avx512, kernel: K) -> K::Output {
    kernel.run(avx512)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(avx2: Avx2, kernel: K) -> K::Output {
    kernel.run(avx2)
}

/// The implementation in plain Rust.
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
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn prefetch(self, _words: &[u32], _index: usize) {}

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
        // This rounds twice: without the instruction, a fused multiply-add is a function call.
        zip(zip(a, b, |a, b| a * b), c, |product, c| product + c)
    }

    #[inline(always)]
    fn sum(self, vector: Self::F32) -> f32 {
        let [a, b, c, d, e, f, g, h] =
            std::array::from_fn(|lane| vector[lane] + vector[lane + LANES / 2]);
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
    fn shift_left<const BITS: i32>(self, words: Self::U32) -> Self::U32 {
        map(words, |word| word << BITS)
    }

    #[inline(always)]
    fn to_f32(self, words: Self::U32) -> Self::F32 {
        map(words, |word| word as i32 as f32)
    }

    #[inline(always)]
    fn bits_to_f32(self, words: Self::U32, bits: u32) -> Self::F32 {
        map(words, |word| f32::from_bits(word + bits))
    }

    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn with_sign(self, magnitudes: Self::F32, words: Self::U32) -> Self::F32 {
        std::array::from_fn(|lane| {
            f32::from_bits(magnitudes[lane].to_bits() | words[lane] & 0x8000_0000)
        })
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

#[cfg(target_arch = "aarch64")]
pub use neon::Neon;

#[cfg(target_arch = "x86_64")]
pub use {avx2::Avx2, avx512::Avx512};

#[cfg(test)]
pub mod tests {
    use super::Best;
    use std::cell::Cell;

    pub const ALL: [Best; 3] = [Best::Plain, Best::Avx2, Best::All];

    thread_local! {
        static BEST: Cell<Best> = const { Cell::new(Best::All) };
    }

    pub fn best() -> Best {
        BEST.get()
    }

    /// Sets the best instruction set that kernels on this thread may use from now on. Helper
    /// threads use all instruction sets.
    pub fn set_best(best: Best) {
        BEST.set(best);
    }
}
