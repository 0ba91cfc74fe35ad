//! Arithmetic on the two 16-bit halves of a register.

use super::read;
use cubecl::prelude::*;

/// `and`: returns `a & b`, computed where this function is called. The compiler would move its own
/// `and` beyond the `wgmma_fence` before which the result must be available.
#[cube]
pub fn and_here(a: u32, b: u32) -> u32 {
    let d: u32;
    gpu_asm!("and.b32 {d}, {a}, {b};", d = out(_) d, a = in(_) read::<u32>(a), b = in(_) read::<u32>(b));
    read::<u32>(d)
}

/// `lop3`: returns `(a & mask) | c`. If `stays`, it is computed where this function is called; see
/// [`and_here()`].
#[cube]
#[allow(
    clippy::if_same_then_else,
    reason = "the options of the two instructions differ"
)]
pub fn lop3_and_or(a: u32, #[comptime] mask: u32, c: u32, #[comptime] stays: bool) -> u32 {
    let d: u32;
    if comptime!(stays) {
        gpu_asm!(
            "lop3.b32 {d}, {a}, {m}, {c}, 0xea;",
            d = out(_) d, a = in(_) read::<u32>(a), m = const mask, c = in(_) read::<u32>(c)
        );
    } else {
        gpu_asm!(
            "lop3.b32 {d}, {a}, {m}, {c}, 0xea;",
            d = out(_) d, a = in(_) read::<u32>(a), m = const mask, c = in(_) read::<u32>(c), options(pure, nomem)
        );
    }
    read::<u32>(d)
}

/// Returns `a - b` of two pairs of f16.
#[cube]
pub fn sub_f16x2(a: u32, b: u32) -> u32 {
    let d: u32;
    gpu_asm!("sub.f16x2 {d}, {a}, {b};", d = out(_) d, a = in(_) read::<u32>(a), b = in(_) read::<u32>(b), options(pure, nomem));
    read::<u32>(d)
}

/// Returns `a * b` of two pairs of f16.
#[cube]
pub fn mul_f16x2(a: u32, b: u32) -> u32 {
    let d: u32;
    gpu_asm!("mul.rn.f16x2 {d}, {a}, {b};", d = out(_) d, a = in(_) read::<u32>(a), b = in(_) read::<u32>(b), options(pure, nomem));
    read::<u32>(d)
}

/// Returns `a * b + c` of three pairs of f16.
#[cube]
pub fn fma_f16x2(a: u32, b: u32, c: u32) -> u32 {
    let d: u32;
    gpu_asm!(
        "fma.rn.f16x2 {d}, {a}, {b}, {c};",
        d = out(_) d, a = in(_) read::<u32>(a), b = in(_) read::<u32>(b), c = in(_) read::<u32>(c), options(pure, nomem)
    );
    read::<u32>(d)
}

/// Returns `a * b + c` of three pairs of bf16; the only bf16x2 arithmetic of compute capability
/// 8.0.
#[cube]
pub fn fma_bf16x2(a: u32, b: u32, c: u32) -> u32 {
    let d: u32;
    gpu_asm!(
        "fma.rn.bf16x2 {d}, {a}, {b}, {c};",
        d = out(_) d, a = in(_) read::<u32>(a), b = in(_) read::<u32>(b), c = in(_) read::<u32>(c), options(pure, nomem)
    );
    read::<u32>(d)
}

/// `prmt`: selects four bytes of two registers by the nibbles of `selector`, the lowest first. 0 to
/// 3 select the bytes of `a`, 4 to 7 the bytes of `b`.
#[cube]
pub fn prmt(a: u32, b: u32, #[comptime] selector: u32) -> u32 {
    let d: u32;
    gpu_asm!(
        "prmt.b32 {d}, {a}, {b}, {s};",
        d = out(_) d, a = in(_) read::<u32>(a), b = in(_) read::<u32>(b), s = const selector, options(pure, nomem)
    );
    read::<u32>(d)
}

/// `cvt.rn.f16x2` or (`bf16`) `cvt.rn.bf16x2`: converts two floats to a pair of halves; the first
/// argument is the lower half.
#[cube]
pub fn cvt_halves(low: f32, high: f32, #[comptime] bf16: bool) -> u32 {
    let d: u32;
    gpu_asm!(
        "cvt.rn.{t}.f32 {d}, {h}, {l};",
        t = const comptime!(if bf16 { "bf16x2" } else { "f16x2" }),
        d = out(_) d, h = in(_) read::<f32>(high), l = in(_) read::<f32>(low), options(pure, nomem)
    );
    read::<u32>(d)
}

/// `cvt.rn.satfinite.e4m3x2`: rounds four floats to the bytes of a register, the first argument to
/// the lowest; from compute capability 8.9 on.
#[cube]
pub fn cvt_e4m3x4(first: f32, second: f32, third: f32, fourth: f32) -> u32 {
    let d: u32;
    gpu_asm!(
        "{{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, {b}, {a}; cvt.rn.satfinite.e4m3x2.f32 h, {e}, {c}; mov.b32 {d}, {{l, h}}; }}",
        d = out(_) d, a = in(_) read::<f32>(first), b = in(_) read::<f32>(second),
        c = in(_) read::<f32>(third), e = in(_) read::<f32>(fourth), options(pure, nomem)
    );
    read::<u32>(d)
}

/// `cvt.rn.f16x2.e4m3x2`: returns the numbers of the e4m3 codes in bytes 0 and 1, or (`upper`) 2
/// and 3; from compute capability 8.9 on. An H200 takes as long as for two logical instructions.
/// The compiler does not move the instruction.
#[cube]
pub fn cvt_f16x2_e4m3(codes: u32, #[comptime] upper: bool) -> u32 {
    let d: u32;
    gpu_asm!(
        "{{ .reg .b16 l, h; mov.b32 {{l, h}}, {a}; cvt.rn.f16x2.e4m3x2 {d}, {p}; }}",
        d = out(_) d, a = in(_) read::<u32>(codes), p = const comptime!(if upper { "h" } else { "l" })
    );
    read::<u32>(d)
}

/// `ex2.approx`: returns 2 to the power of a value, to a relative error of 2^-22 ("Floating Point
/// Instructions: ex2").
#[cube]
pub fn ex2_approx(value: f32) -> f32 {
    let d: f32;
    gpu_asm!("ex2.approx.ftz.f32 {d}, {v};", d = out(_) d, v = in(_) read::<f32>(value), options(pure, nomem));
    read::<f32>(d)
}

/// `rcp.approx`: returns the reciprocal, to one unit in the last place ("Floating Point
/// Instructions: rcp").
#[cube]
pub fn rcp_approx(value: f32) -> f32 {
    let d: f32;
    gpu_asm!("rcp.approx.ftz.f32 {d}, {v};", d = out(_) d, v = in(_) read::<f32>(value), options(pure, nomem));
    read::<f32>(d)
}

/// `prmt`: copies the lower (`upper` false) or upper half of a register to both halves.
#[cube]
pub fn prmt_duplicate_half(value: u32, #[comptime] upper: bool) -> u32 {
    let d: u32;
    gpu_asm!(
        "prmt.b32 {d}, {v}, {v}, {s};",
        d = out(_) d, v = in(_) read::<u32>(value), s = const comptime!(if upper { "0x3232" } else { "0x1010" }), options(pure, nomem)
    );
    read::<u32>(d)
}

/// Converts the lower or (`upper`) upper half of a register, f16 or (`bf16`) bf16, to f32.
#[cube]
pub fn half_to_f32(value: u32, #[comptime] upper: bool, #[comptime] bf16: bool) -> f32 {
    if comptime!(bf16) {
        // A bf16 is the upper half of an f32.
        f32::reinterpret(if comptime!(upper) {
            value & 0xffff_0000u32
        } else {
            value << 16u32
        })
    } else {
        let d: f32;
        gpu_asm!(
            "{{ .reg .b16 l, h; mov.b32 {{l, h}}, {v}; cvt.f32.f16 {d}, {s}; }}",
            d = out(_) d, v = in(_) read::<u32>(value), s = const comptime!(if upper { "h" } else { "l" }), options(pure, nomem)
        );
        read::<f32>(d)
    }
}
