//! Arithmetic that rounds alike on every device: integer operations, single operations that
//! [`Floats`] keeps separate, and explicit multiply-adds. `reference.rs` repeats the operations in
//! Rust.

use super::floats::Floats;
use super::{BROKEN, MASS_BITS};
use cubecl::prelude::*;

/// Returns the key of a value, an unsigned integer that orders values: 0 for minus infinity, which
/// is never chosen, and [`BROKEN`] for NaN and plus infinity. Both zeros have the same key.
#[cube]
pub(super) fn key(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let magnitude = bits & 0x7fff_ffffu32;
    let mut key = bits | 0x8000_0000u32;
    if bits != magnitude && magnitude != 0 {
        key = !bits;
    }
    if bits == 0xff80_0000u32 {
        key = 0u32.runtime();
    }
    if magnitude > 0x7f80_0000u32 || bits == 0x7f80_0000u32 {
        key = BROKEN.runtime();
    }
    key
}

/// Returns the value of a key. The value must be finite.
#[cube]
pub(super) fn value(key: u32) -> f32 {
    let mut bits = !key;
    if key >> 31 == 1 {
        bits = key & 0x7fff_ffffu32;
    }
    f32::reinterpret(bits)
}

/// Computes four random words from a seed and a counter, by Philox4x32-10.
#[cube]
pub(super) fn philox(words: &mut Array<u32>, counter: u32, position: u32, seed: u32) {
    words[0] = counter;
    words[1] = position;
    words[2] = 0u32;
    words[3] = 0u32;
    #[unroll]
    for round in 0..10u32 {
        let (x, y) = (words[0], words[2]);
        let key = seed + comptime!(round.wrapping_mul(0x9e37_79b9)).runtime();
        words[0] = y.mul_hi(0xcd9e_8d57u32) ^ words[1] ^ key;
        words[1] = y * 0xcd9e_8d57u32;
        words[2] = x.mul_hi(0xd251_1f53u32) ^ words[3] ^ comptime!(round.wrapping_mul(0xbb67_ae85));
        words[3] = x * 0xd251_1f53u32;
    }
}

/// Returns the Gumbel noise -ln(-ln(u)) for the u in (0, 1) that a random word represents.
///
/// The word represents 1 - u, because the noise of the most likely choices has u close to 1, and
/// needs a fine resolution there.
#[cube]
pub(super) fn gumbel(word: u32, floats: &Floats) -> f32 {
    let word = floats.rounded(f32::cast_from(word) + 0.5f32);
    let rest = floats.rounded(min(word * 2.328_306_4e-10f32, 0.999_999_94f32));
    let u = floats.rounded(1.0f32 - rest);
    let mut exponential = rest;
    if u < 1.0f32 {
        // The quotient compensates for the rounding of u.
        exponential = -ln(u, floats) * floats.divide(rest, 1.0f32 - u);
    }
    -ln(exponential, floats)
}

/// Returns the natural logarithm of a normal positive number, to about one unit in the last place.
#[cube]
pub(super) fn ln(x: f32, floats: &Floats) -> f32 {
    // x = 2^exponent * m, m from sqrt(1/2) to sqrt(2); ln m = 2 atanh((m - 1) / (m + 1)).
    let bits = i32::reinterpret(x);
    let exponent = (bits - 0x3f35_04f3i32) >> 23;
    let m = f32::reinterpret(bits - (exponent << 23));
    let s = floats.divide(m - 1.0f32, m + 1.0f32);
    let z = floats.rounded(s * s);
    let mut sum = fma(z, 1.0f32 / 9.0, 1.0f32 / 7.0);
    sum = fma(z, sum, 1.0f32 / 5.0);
    sum = fma(z, sum, 1.0f32 / 3.0);
    sum = fma(z, sum, 1.0f32);
    floats.rounded(fma(
        f32::cast_from(exponent),
        core::f32::consts::LN_2,
        floats.rounded((s + s) * sum),
    ))
}

/// Returns exp(x), for x up to 0, as an integer: 2^[`MASS_BITS`] for 0.
#[cube]
pub(super) fn mass(x: f32) -> u64 {
    let mut mass = 0u64.runtime();
    // exp(-29) is below 2^-41.
    if x > -29.0f32 {
        let n = fma(x, core::f32::consts::LOG2_E, 0.5f32).floor();
        let mut r = fma(n, -0.693_359_4f32, x);
        r = fma(n, 2.121_944_4e-4f32, r);
        let mut sum = fma(r, 1.0f32 / 5040.0, 1.0f32 / 720.0);
        sum = fma(r, sum, 1.0f32 / 120.0);
        sum = fma(r, sum, 1.0f32 / 24.0);
        sum = fma(r, sum, 1.0f32 / 6.0);
        sum = fma(r, sum, 0.5f32);
        sum = fma(r, sum, 1.0f32);
        sum = fma(r, sum, 1.0f32);
        let scale = f32::reinterpret((i32::cast_from(n) + comptime!(127 + MASS_BITS)) << 23);
        mass = u64::cast_from(sum * scale);
    }
    mass
}
