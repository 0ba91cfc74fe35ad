//! Values of a KV cache in e4m3 ([`CacheFormat::E4m3`](super::CacheFormat)), in kernels.

use cubecl::prelude::*;
use half::f16;

/// A vector of eight values in f32.
type F8 = Vector<f32, Const<8>>;
/// The codes of eight values.
pub(crate) type Codes = Vector<u32, Const<2>>;

/// The largest value of e4m3.
const LARGEST: f32 = 448.0;
/// The largest value of e4m3 that is read as f16 with the same bits of exponent and mantissa.
const LARGEST_AS_F16: f32 = 1.75;
/// The smallest magnitude that has a scale: the reciprocals of smaller ones are not finite.
const SMALLEST: f32 = 1e-30;
/// The smallest normal value of e4m3, 2^-6.
const SMALLEST_NORMAL: f32 = 0.015625;
/// The reciprocal of the distance between e4m3's subnormal values, 2^9.
const SUBNORMALS: f32 = 512.0;
/// 2^23: a sum with it has its integer part in the lowest bits.
const INTEGER: f32 = 8388608.0;

/// The scale of the values of a position of a head.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowScale {
    /// The factor of values that are read as f16.
    pub scale: f32,
    /// The factor that makes values e4m3's.
    pub inverse: f32,
}

#[cube]
impl RowScale {
    /// Returns the scale of values whose largest magnitude is `most`. `poison` is 0, or NaN if a
    /// value is not finite, so that all values of the position are NaN.
    pub fn new(most: f32, poison: f32) -> RowScale {
        let inverse = select(
            most < SMALLEST,
            0.0f32.runtime(),
            LARGEST / max(most, SMALLEST),
        );
        RowScale {
            scale: most * comptime!(1.0 / LARGEST_AS_F16) + poison,
            inverse,
        }
    }

    /// Returns the row's last vector, with the scale.
    pub fn words(&self) -> Codes {
        let mut words = Codes::new(0u32);
        words.insert(0usize, u32::reinterpret(self.scale));
        words
    }
}

/// Returns the scale of a row from its last vector.
#[cube]
pub(crate) fn row_scale<H: Numeric, W: Size>(words: Vector<H, W>) -> f32 {
    f32::reinterpret(Codes::reinterpret(words).extract(0usize))
}

/// Returns the largest magnitude of eight values and `most`.
#[cube]
pub(crate) fn largest(values: F8, most: f32) -> f32 {
    let mut most = most;
    #[unroll]
    for i in 0..8usize {
        most = max(most, values.extract(i).abs());
    }
    most
}

/// Returns `sum`, or NaN if one of eight values is not finite.
#[cube]
pub(crate) fn poison(values: F8, sum: f32) -> f32 {
    let mut sum = sum;
    #[unroll]
    for i in 0..8usize {
        sum += values.extract(i) * 0.0;
    }
    sum
}

/// Rounds eight values to the nearest values of e4m3, ties to even.
#[cube]
pub(crate) fn encode(values: F8, scale: &RowScale) -> Codes {
    let mut codes = Codes::new(0u32);
    #[unroll]
    for word in 0..2usize {
        let mut bits = 0u32.runtime();
        #[unroll]
        for i in 0..4usize {
            let byte = comptime!([0u32, 2, 1, 3][i]);
            let code = round(values.extract(comptime!(4 * word + i)) * scale.inverse);
            bits |= code << comptime!(8 * byte);
        }
        codes.insert(word, bits);
    }
    codes
}

/// Rounds a value to the nearest value of e4m3, ties to even. The magnitude is at most 448.
#[cube]
fn round(value: f32) -> u32 {
    let magnitude = value.abs();
    let subnormal = u32::reinterpret(magnitude * SUBNORMALS + INTEGER) & 0xff;
    let bits = u32::reinterpret(magnitude);
    // Three bits of the mantissa remain. The exponent's bias is 7 in place of 127.
    let rounded = (bits + 0x7ffff + ((bits >> 20) & 1)) >> 20;
    let normal = min(rounded - comptime!(120u32 << 3), 0x7e);
    let code = select(magnitude < SMALLEST_NORMAL, subnormal, normal);
    code | ((u32::reinterpret(value) >> 24) & 0x80)
}

/// Returns eight values, read as f16 with the same bits of exponent and mantissa. `as_f16` is true
/// if words are converted as pairs of f16, 13 instructions for four values on CUDA, and false on
/// runtimes without such vectors.
#[cube]
pub(crate) fn decode<H: Numeric, W: Size>(codes: Vector<H, W>, #[comptime] as_f16: bool) -> F8 {
    let codes = Codes::reinterpret(codes);
    let mut values = F8::new(0.0);
    if as_f16 {
        let mut pairs = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for word in 0..2usize {
            let bits = codes.extract(word);
            pairs.insert(comptime!(2 * word), pair(bits));
            pairs.insert(comptime!(2 * word + 1), pair(bits >> 8));
        }
        values = F8::cast_from(Vector::<f16, Const<8>>::reinterpret(pairs));
    } else {
        #[unroll]
        for i in 0..8usize {
            let (word, byte) = comptime!((i / 4, [0u32, 2, 1, 3][i % 4]));
            let code = codes.extract(word) >> comptime!(8 * byte);
            let bits = ((code & 0x7f) << 20) | ((code & 0x80) << 24);
            // The bias of f32's exponent is 112 above that of f16's.
            values.insert(i, f32::reinterpret(bits) * comptime!(2f32.powi(112)));
        }
    }
    values
}

/// Returns the bits of two values of f16 from the first and the third byte of a word.
#[cube]
fn pair(bits: u32) -> u32 {
    ((bits & 0x0080_0080) << 8) | ((bits & 0x007f_007f) << 7)
}
