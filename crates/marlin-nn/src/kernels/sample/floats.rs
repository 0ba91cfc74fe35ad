//! Float arithmetic and shared memory that behave alike with every compiler, for kernels that agree
//! with the host to the last bit.

use cubecl::prelude::*;

/// Float arithmetic in which every operation rounds as it is written.
///
/// The compiler of a shader may compute a quotient with an error of two and a half units in the
/// last place (Vulkan, "Precision and Operation of SPIR-V Instructions"), make one operation of a
/// product and a sum, and rearrange operations: 1 - (1 - x) becomes x. CubeCL 0.11.3 cannot forbid
/// these changes.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Floats {
    /// The number 0, as a value that the compiler does not know.
    pub zero: u32,
    /// True if the kernel is compiled as a shader, for Vulkan, Metal or WebGPU.
    #[cube(comptime)]
    pub is_shader: bool,
}

#[cube]
impl Floats {
    /// Returns `value` unchanged. The compiler does not combine operations on the result with
    /// operations that compute `value`.
    pub fn rounded(&self, value: f32) -> f32 {
        if comptime!(self.is_shader) {
            f32::reinterpret(u32::reinterpret(value) ^ self.zero)
        } else {
            value
        }
    }

    /// Returns `a / b`, rounded to the nearest. With a shader compiler, quotients below the normal
    /// numbers are 0. `b` must be a normal number.
    pub fn divide(&self, a: f32, b: f32) -> f32 {
        if comptime!(self.is_shader) {
            quotient(a, b)
        } else {
            a / b
        }
    }
}

/// Returns a / b, computed with integers; `a` itself if it is 0, subnormal, infinite or NaN.
#[cube]
fn quotient(a: f32, b: f32) -> f32 {
    let a_bits = u32::reinterpret(a);
    let b_bits = u32::reinterpret(b);
    let a_exponent = (a_bits >> 23) & 0xffu32;
    let mut bits = a_bits;
    if a_exponent != 0 && a_exponent != 0xff {
        let numerator = u64::cast_from((a_bits & 0x007f_ffffu32) | 0x0080_0000u32) << 26;
        let denominator = u64::cast_from((b_bits & 0x007f_ffffu32) | 0x0080_0000u32);
        let whole = numerator / denominator;
        // The quotient has 26 or 27 bits, of which 24 are kept. The last bit is set if there is a
        // remainder.
        let mut digits = u32::cast_from(whole);
        if whole * denominator != numerator {
            digits |= 1u32;
        }
        let mut exponent =
            i32::cast_from(a_exponent) - i32::cast_from((b_bits >> 23) & 0xffu32) + 127;
        let mut dropped = 3u32.runtime();
        if digits < 0x0400_0000u32 {
            dropped = 2u32.runtime();
            exponent -= 1;
        }
        let kept = (digits + (1u32 << (dropped - 1)) - 1 + ((digits >> dropped) & 1u32)) >> dropped;
        // The leading bit is the implicit 1 of the format. A quotient that is rounded up to 2^24
        // carries into the exponent.
        let mut magnitude = (exponent << 23) + i32::cast_from(kept) - 0x0080_0000i32;
        if exponent < 1 {
            magnitude = 0i32.runtime();
        }
        if exponent > 254 {
            magnitude = 0x7f80_0000i32.runtime();
        }
        bits = ((a_bits ^ b_bits) & 0x8000_0000u32) | u32::cast_from(magnitude);
    }
    f32::reinterpret(bits)
}

/// Words in shared memory that the units of a cube exchange.
///
/// CubeCL 0.11.3 does not tell compilers of SPIR-V that other units see a plain store to shared
/// memory (`NonPrivatePointer` of the Vulkan memory model), so a shader compiler may keep a value
/// in a register across barriers. Other units see atomic stores.
#[derive(CubeType)]
pub(super) struct SharedWords {
    plain: Shared<[u32]>,
    atomic: Shared<[Atomic<u32>]>,
    #[cube(comptime)]
    is_shader: bool,
}

#[cube]
impl SharedWords {
    pub fn new(#[comptime] length: usize, #[comptime] is_shader: bool) -> Self {
        SharedWords {
            plain: Shared::<[u32]>::new_slice(comptime!(if is_shader { 1 } else { length })),
            atomic: Shared::<[Atomic<u32>]>::new_slice(comptime!(if is_shader {
                length
            } else {
                1
            })),
            is_shader,
        }
    }

    pub fn get(&self, index: usize) -> u32 {
        if comptime!(self.is_shader) {
            self.atomic[index].load()
        } else {
            self.plain[index]
        }
    }

    pub fn set(&mut self, index: usize, value: u32) {
        if comptime!(self.is_shader) {
            self.atomic[index].store(value);
        } else {
            self.plain[index] = value;
        }
    }
}

/// 64-bit values in shared memory that the units of a cube exchange; see [`SharedWords`].
#[derive(CubeType)]
pub(super) struct SharedValues {
    plain: Shared<[u64]>,
    /// The low and the high word of each value, [length, 2].
    halves: Shared<[Atomic<u32>]>,
    #[cube(comptime)]
    is_shader: bool,
}

#[cube]
impl SharedValues {
    pub fn new(#[comptime] length: usize, #[comptime] is_shader: bool) -> Self {
        SharedValues {
            plain: Shared::<[u64]>::new_slice(comptime!(if is_shader { 1 } else { length })),
            halves: Shared::<[Atomic<u32>]>::new_slice(comptime!(if is_shader {
                2 * length
            } else {
                1
            })),
            is_shader,
        }
    }

    pub fn get(&self, index: usize) -> u64 {
        if comptime!(self.is_shader) {
            (u64::cast_from(self.halves[2 * index + 1].load()) << 32)
                | u64::cast_from(self.halves[2 * index].load())
        } else {
            self.plain[index]
        }
    }

    pub fn set(&mut self, index: usize, value: u64) {
        if comptime!(self.is_shader) {
            self.halves[2 * index].store(u32::cast_from(value));
            self.halves[2 * index + 1].store(u32::cast_from(value >> 32));
        } else {
            self.plain[index] = value;
        }
    }
}
