//! PTX instructions that CubeCL has no function for: one function an instruction.
//!
//! Every operand goes through [`read()`]: inline assembly takes a variable, a copy or another
//! block's output by its stack address otherwise. Addresses of shared memory are 32-bit, those of
//! global memory 64-bit. Only the NVRTC compiler of the CUDA runtime takes these.
//!
//! Source: PTX ISA 8.0, the section that each function names.

mod barrier;
mod cluster;
mod copy;
mod half;
mod matrix;
mod memory;
mod overlap;
mod warpgroup;

pub use barrier::*;
pub use cluster::*;
pub use copy::*;
pub use half::*;
pub use matrix::*;
pub use memory::*;
pub use overlap::*;
pub use warpgroup::*;

use cubecl::prelude::*;

/// Two 32-bit registers.
pub type U2 = Vector<u32, Const<2>>;
/// Four 32-bit registers: 16 bytes of a copy, or the fragment A of `mma.m16n8k16`.
pub type U4 = Vector<u32, Const<4>>;
/// The accumulator C and D of `mma.m16n8k16` in f32.
pub type F4 = Vector<f32, Const<4>>;

/// The value of a variable, in a register.
#[cube]
pub fn read<T: CubePrimitive>(value: T) -> T {
    intrinsic!(|scope| value.read_value(scope).into())
}

/// `%laneid`: the number of a thread in its warp. CubeCL's own divides by a warp size that it asks
/// the device for.
#[cube]
pub fn lane() -> u32 {
    let lane: u32;
    gpu_asm!("mov.u32 {l}, %laneid;", l = out(_) lane, options(pure, nomem));
    read::<u32>(lane)
}

/// The same value, of which the compiler knows nothing: a loop that ends on it is not unrolled.
#[cube]
pub fn opaque(value: u32) -> u32 {
    let same: u32;
    gpu_asm!("mov.u32 {s}, {v};", s = out(_) same, v = in(_) read::<u32>(value));
    read::<u32>(same)
}

/// Shared-window address of a slice in shared memory.
#[cube]
pub fn shared_address<T: CubePrimitive>(slice: &[T]) -> u32 {
    // SAFETY: the pointer is only turned into a number.
    let pointer = unsafe { slice.as_ptr_unchecked() };
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 t; cvta.to.shared.u64 t, {p}; cvt.u32.u64 {a}, t; }}",
        a = out(_) address, p = in(_) pointer, options(pure, nomem)
    );
    read::<u32>(address)
}

/// Global address of a slice that is read.
#[cube]
pub fn global_address<T: CubePrimitive>(slice: &[T]) -> u64 {
    // SAFETY: the pointer is only turned into a number.
    let pointer = unsafe { slice.as_ptr_unchecked() };
    let address: u64;
    gpu_asm!("cvta.to.global.u64 {a}, {p};", a = out(_) address, p = in(_) pointer, options(pure, nomem));
    read::<u64>(address)
}

/// Global address of a slice that is written.
#[cube]
pub fn global_address_mut<T: CubePrimitive>(slice: &mut [T]) -> u64 {
    // SAFETY: the pointer is only turned into a number.
    let pointer = unsafe { slice.as_mut_ptr_unchecked() };
    let address: u64;
    gpu_asm!("cvta.to.global.u64 {a}, {p};", a = out(_) address, p = in(_) pointer, options(pure, nomem));
    read::<u64>(address)
}
