//! The dtypes of floats in host memory.

use super::simd::{LANES, Simd};
use half::{bf16, f16};

/// A dtype of activations, caches and float weights in host memory.
pub trait HostFloat: Copy + Default + Send + Sync {
    /// Converts the value to f32.
    fn to_f32(self) -> f32;
    /// Rounds an f32 to the dtype.
    fn from_f32(value: f32) -> Self;
    #[doc(hidden)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F32;
    /// Rounds an f32 to the dtype.
    #[doc(hidden)]
    fn store<S: Simd>(simd: S, vector: S::F32, to: &mut [Self; LANES]);
}

impl HostFloat for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F32 {
        simd.load(from)
    }

    #[inline(always)]
    fn store<S: Simd>(simd: S, vector: S::F32, to: &mut [Self; LANES]) {
        simd.store(vector, to);
    }
}

impl HostFloat for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F32 {
        simd.load_f16(from)
    }

    #[inline(always)]
    fn store<S: Simd>(simd: S, vector: S::F32, to: &mut [Self; LANES]) {
        simd.store_f16(vector, to);
    }
}

impl HostFloat for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F32 {
        simd.load_bf16(from)
    }

    #[inline(always)]
    fn store<S: Simd>(simd: S, vector: S::F32, to: &mut [Self; LANES]) {
        let mut values = [0.0; LANES];
        simd.store(vector, &mut values);
        *to = values.map(Self::from_f32);
    }
}

/// Adds `a * b` to the elements of `to`; `to` may have fewer elements than the vectors have lanes.
#[inline(always)]
pub(super) fn add_product<S: Simd>(simd: S, a: S::F32, b: S::F32, to: &mut [f32]) {
    match to.first_chunk_mut() {
        Some(to) => simd.store(simd.mul_add(a, b, simd.load(to)), to),
        None => {
            let mut products = [0.0; LANES];
            simd.store(simd.mul(a, b), &mut products);
            to.iter_mut()
                .zip(products)
                .for_each(|(to, product)| *to += product);
        }
    }
}
