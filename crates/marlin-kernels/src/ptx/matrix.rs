//! The matrix instructions of a warp: `ldmatrix` and `mma.sync`.

use super::{F4, U4, read};
use cubecl::prelude::*;

/// `ldmatrix.x4`: loads four 8 x 8 matrices of 16-bit values; lane `8i + r` gives the address of
/// row `r` of matrix `i`.
#[cube]
pub fn ldmatrix_x4(address: u32) -> U4 {
    let value: U4;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {v}, [{a}];",
        v = out(_) value, a = in(_) read::<u32>(address), options(readonly)
    );
    read::<U4>(value)
}

/// Loads like [`ldmatrix_x4()`], with each matrix transposed.
#[cube]
pub fn ldmatrix_x4_trans(address: u32) -> U4 {
    let value: U4;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {v}, [{a}];",
        v = out(_) value, a = in(_) read::<u32>(address), options(readonly)
    );
    read::<U4>(value)
}

/// `mma.sp::ordered_metadata.sync.m16n8k32`: multiplies f16 or (`bf16`) bf16 fragments, with f32
/// accumulators. A stores two of every four columns, B has 32 rows ("Warp-level matrix instructions
/// for sparse mma"). Of every four lanes, the first two (`selector` 0) or the last two (`selector`
/// 1) provide the `metadata`.
#[cube]
pub fn mma_sp_m16n8k32(
    a: U4,
    b: U4,
    c: F4,
    metadata: u32,
    #[comptime] selector: usize,
    #[comptime] bf16: bool,
) -> F4 {
    let d: F4;
    gpu_asm!(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{t}.{t}.f32 {d}, {a}, {b}, {c}, {e}, {s};",
        t = const comptime!(if bf16 { "bf16" } else { "f16" }), s = const selector,
        d = out(_) d, a = in(_) read::<U4>(a), b = in(_) read::<U4>(b), c = in(_) read::<F4>(c), e = in(_) read::<u32>(metadata),
        options(pure, nomem)
    );
    read::<F4>(d)
}

/// `mma.sync.m16n8k32` of e4m3: multiplies like [`mma_m16n8k16()`], with 32 values of K, one byte
/// each; from compute capability 8.9 on.
#[cube]
pub fn mma_e4m3_m16n8k32(a: U4, b0: u32, b1: u32, c: F4) -> F4 {
    let d: F4;
    gpu_asm!(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {d}, {a}, {{{b0}, {b1}}}, {c};",
        d = out(_) d, a = in(_) read::<U4>(a), b0 = in(_) read::<u32>(b0), b1 = in(_) read::<u32>(b1), c = in(_) read::<F4>(c),
        options(pure, nomem)
    );
    read::<F4>(d)
}

/// `mma.sync.m16n8k16`: multiplies f16 or (`bf16`) bf16 fragments, with f32 accumulators.
#[cube]
pub fn mma_m16n8k16(a: U4, b0: u32, b1: u32, c: F4, #[comptime] bf16: bool) -> F4 {
    let d: F4;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {d}, {a}, {{{b0}, {b1}}}, {c};",
        t = const comptime!(if bf16 { "bf16" } else { "f16" }),
        d = out(_) d, a = in(_) read::<U4>(a), b0 = in(_) read::<u32>(b0), b1 = in(_) read::<u32>(b1), c = in(_) read::<F4>(c),
        options(pure, nomem)
    );
    read::<F4>(d)
}
