//! `wgmma`: the asynchronous matrix products of a warpgroup of four warps, from compute capability
//! 9.0a on ("Asynchronous Warpgroup Level Matrix Multiply-Accumulate Operation").

use super::{U4, read};
use cubecl::prelude::*;

/// Declares `registers` accumulators for [`wgmma()`], and the other PTX registers that it uses.
/// Call it once, at the start of a kernel and outside loops.
///
/// The accumulators are PTX registers that only inline assembly names. If they were CubeCL values,
/// each instruction would copy them, and ptxas would make it wait for the preceding one.
#[cube]
pub fn wgmma_declare(#[comptime] registers: usize) {
    gpu_asm!(
        ".reg .f32 wgmma_sum<{n}>; .reg .b64 wgmma_b; .reg .pred wgmma_more; .reg .pred wgmma_add; setp.eq.u32 wgmma_add, 1, 1;",
        n = const registers
    );
}

/// Declares the additional PTX register of [`wgmma_shared()`]; call it besides [`wgmma_declare()`].
#[cube]
pub fn wgmma_declare_shared() {
    gpu_asm!(".reg .b64 wgmma_a;");
}

/// Sets whether every following [`wgmma()`] that starts sums adds to its accumulators (1) or
/// replaces them (0).
#[cube]
pub fn wgmma_more(more: u32) {
    gpu_asm!("setp.ne.u32 wgmma_more, {m}, 0;", m = in(_) read::<u32>(more));
}

/// Sets an accumulator of [`wgmma()`] to 0. No `wgmma` may be in flight.
#[cube]
pub fn wgmma_clear(#[comptime] register: usize) {
    gpu_asm!("mov.f32 wgmma_sum{i}, 0f00000000;", i = const register);
}

/// Reads an accumulator of [`wgmma()`]. No `wgmma` may be in flight.
#[cube]
pub fn wgmma_sum(#[comptime] register: usize) -> f32 {
    let sum: f32;
    gpu_asm!("mov.f32 {s}, wgmma_sum{i};", s = out(_) sum, i = const register);
    read::<f32>(sum)
}

/// Multiplies an accumulator of [`wgmma()`] by a factor. No `wgmma` that adds to it may be in
/// flight.
#[cube]
pub fn wgmma_scale(#[comptime] register: usize, factor: f32) {
    gpu_asm!("mul.f32 wgmma_sum{i}, wgmma_sum{i}, {f};", i = const register, f = in(_) read::<f32>(factor));
}

/// The upper half of [`wgmma()`]'s descriptor of B: eight rows are 1024 bytes (in units of 16
/// bytes, from bit 32 on), and their runs of 16 bytes are swizzled within 128 bytes (1 in bits 62
/// and 63).
const DESCRIPTOR_SWIZZLE_128: u32 = (1 << 30) | (1024 / 16);

/// Returns the lower half of [`wgmma()`]'s descriptor of B for an address in shared memory below
/// 2^18: the address in units of 16 bytes, and 1 for the offset that a swizzled matrix does not
/// use. 16 values along K are 2 units.
#[cube]
pub fn wgmma_descriptor(address: u32) -> u32 {
    (address / 16) | 0x1_0000u32
}

/// Returns the lower half of the descriptor of B for [`wgmma_transposed()`]. B is stored in rows of
/// K of 64 values, 128 bytes, each; the next 64 values of all rows are `atom` bytes further. 16
/// rows of K are 128 units.
#[cube]
pub fn wgmma_descriptor_transposed(address: u32, #[comptime] atom: usize) -> u32 {
    (address / 16) | comptime!((atom as u32 / 16) << 16)
}

/// Sets the descriptor of B for every following [`wgmma()`], from its lower half. If it were an
/// operand instead, ptxas would use ten more registers.
#[cube]
pub fn wgmma_b(descriptor: u32) {
    gpu_asm!("mov.b64 wgmma_b, {{{d}, {u}}};", d = in(_) read::<u32>(descriptor), u = const DESCRIPTOR_SWIZZLE_128);
}

/// `wgmma.mma_async.m64nNk16`: adds the product of A and B to the f32 accumulators from number
/// `first` on. A is in registers, in f16 or (`bf16`) bf16; [B](wgmma_b()) is `n` rows of K-major
/// values in shared memory. If the instruction `starts` sums, it adds to the accumulators or
/// replaces them, as set by [`wgmma_more()`].
///
/// Warp `w` of four holds the rows `16w` to `16w + 15`. Its lanes hold A like the fragment of
/// `mma.m16n8k16`, and the sums like `n / 8` accumulators of `mma.m16n8k16` side by side.
#[cube]
pub fn wgmma(
    a: U4,
    #[comptime] first: usize,
    #[comptime] n: usize,
    #[comptime] starts: bool,
    #[comptime] bf16: bool,
) {
    gpu_asm!(
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{t}.{t} {{{s}}}, {a}, wgmma_b, {p}, 1, 1, 0;",
        n = const n, t = const comptime!(if bf16 { "bf16" } else { "f16" }), s = const comptime!(sum_names(first, n / 2)),
        p = const comptime!(if starts { "wgmma_more" } else { "wgmma_add" }), a = in(_) read::<U4>(a)
    );
}

/// `wgmma.mma_async.m64nNk32` of e4m3: multiplies like [`wgmma()`], with 32 values of K, one byte
/// each. A lane's bytes of A are those of 16 values of [`wgmma()`], in the same registers.
#[cube]
pub fn wgmma_e4m3(a: U4, #[comptime] first: usize, #[comptime] n: usize, #[comptime] starts: bool) {
    gpu_asm!(
        "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{s}}}, {a}, wgmma_b, {p}, 1, 1;",
        n = const n, s = const comptime!(sum_names(first, n / 2)),
        p = const comptime!(if starts { "wgmma_more" } else { "wgmma_add" }), a = in(_) read::<U4>(a)
    );
}

/// Multiplies like [`wgmma()`], with A, 64 rows of K-major values, in shared memory as well: `a` is
/// the lower half of its [descriptor](wgmma_descriptor()).
#[cube]
pub fn wgmma_shared(
    a: u32,
    #[comptime] first: usize,
    #[comptime] n: usize,
    #[comptime] starts: bool,
    #[comptime] bf16: bool,
) {
    gpu_asm!(
        "mov.b64 wgmma_a, {{{d}, {u}}}; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{t}.{t} {{{s}}}, wgmma_a, wgmma_b, {p}, 1, 1, 0, 0;",
        n = const n, t = const comptime!(if bf16 { "bf16" } else { "f16" }), s = const comptime!(sum_names(first, n / 2)),
        p = const comptime!(if starts { "wgmma_more" } else { "wgmma_add" }), d = in(_) read::<u32>(a), u = const DESCRIPTOR_SWIZZLE_128
    );
}

/// Multiplies like [`wgmma()`], with B transposed in shared memory: rows of K of N values, with the
/// descriptor of [`wgmma_descriptor_transposed()`]. It always adds to the accumulators.
#[cube]
pub fn wgmma_transposed(
    a: U4,
    #[comptime] first: usize,
    #[comptime] n: usize,
    #[comptime] bf16: bool,
) {
    gpu_asm!(
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{t}.{t} {{{s}}}, {a}, wgmma_b, wgmma_add, 1, 1, 1;",
        n = const n, t = const comptime!(if bf16 { "bf16" } else { "f16" }), s = const comptime!(sum_names(first, n / 2)),
        a = in(_) read::<U4>(a)
    );
}

/// `wgmma.mma_async.sp.m64nNk32`: multiplies like [`wgmma()`], with an A that stores two of every
/// four columns, and with 32 rows of B, 64 bytes from the descriptor on. It always adds to the
/// accumulators. Each warp passes the metadata of its 16 rows, in the form that `mma_sp_m16n8k32`
/// takes.
#[cube]
pub fn wgmma_sp(
    a: U4,
    metadata: u32,
    #[comptime] selector: usize,
    #[comptime] first: usize,
    #[comptime] n: usize,
    #[comptime] bf16: bool,
) {
    gpu_asm!(
        "wgmma.mma_async.sp.sync.aligned.m64n{n}k32.f32.{t}.{t} {{{s}}}, {a}, wgmma_b, {e}, {f}, wgmma_add, 1, 1, 0;",
        n = const n, t = const comptime!(if bf16 { "bf16" } else { "f16" }), s = const comptime!(sum_names(first, n / 2)),
        f = const selector, a = in(_) read::<U4>(a), e = in(_) read::<u32>(metadata)
    );
}

fn sum_names(first: usize, count: usize) -> String {
    (first..first + count)
        .map(|i| format!("wgmma_sum{i}"))
        .collect::<Vec<_>>()
        .join(", ")
}

/// `wgmma.fence`: orders writes to registers before the next [`wgmma()`].
#[cube]
pub fn wgmma_fence() {
    gpu_asm!("wgmma.fence.sync.aligned;");
}

/// `wgmma.commit_group`: closes the group of products issued since the last call.
#[cube]
pub fn wgmma_commit_group() {
    gpu_asm!("wgmma.commit_group.sync.aligned;");
}

/// `wgmma.wait_group`: waits until at most `pending` groups are in flight.
#[cube]
pub fn wgmma_wait_group(#[comptime] pending: usize) {
    gpu_asm!("wgmma.wait_group.sync.aligned {n};", n = const pending);
}

/// `setmaxnreg.dec`: the warpgroup's threads keep `registers` registers each, and release the
/// others ("Miscellaneous Instructions: setmaxnreg").
#[cube]
pub fn setmaxnreg_dec(#[comptime] registers: usize) {
    gpu_asm!("setmaxnreg.dec.sync.aligned.u32 {n};", n = const registers);
}

/// `setmaxnreg.inc`: the warpgroup's threads get `registers` registers each, once other warpgroups
/// have released enough.
#[cube]
pub fn setmaxnreg_inc(#[comptime] registers: usize) {
    gpu_asm!("setmaxnreg.inc.sync.aligned.u32 {n};", n = const registers);
}
