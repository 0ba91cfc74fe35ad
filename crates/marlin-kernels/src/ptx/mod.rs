//! PTX instructions for which CubeCL has no function, with one function for each.
//!
//! Every operand is passed through [`read()`], because inline assembly would otherwise take a
//! variable, a copy or another block's output by its stack address. Addresses of shared memory are
//! 32-bit, those of global memory 64-bit. Only the NVRTC compiler of the CUDA runtime accepts these
//! functions.
//!
//! Source: PTX ISA 8.0, the sections that the functions name.

mod barrier;
mod cluster;
mod copy;
mod griddepcontrol;
mod half;
mod matrix;
mod memory;
mod warp;
mod warpgroup;

pub use barrier::*;
pub use cluster::*;
pub use copy::*;
pub use griddepcontrol::*;
pub use half::*;
pub use matrix::*;
pub use memory::*;
pub use warp::*;
pub use warpgroup::*;

use cubecl::prelude::*;

/// Two 32-bit registers.
pub type U2 = Vector<u32, Const<2>>;
/// Four 32-bit registers: 16 bytes of a copy, or the fragment A of `mma.m16n8k16`.
pub type U4 = Vector<u32, Const<4>>;
/// The accumulators C and D of `mma.m16n8k16` in f32.
pub type F4 = Vector<f32, Const<4>>;

/// Reads the value of a variable into a register.
#[cube]
pub fn read<T: CubePrimitive>(value: T) -> T {
    intrinsic!(|scope| value.read_value(scope).into())
}

/// `%laneid`: returns the number of a thread in its warp. CubeCL's own function divides by a warp
/// size that it queries from the device.
#[cube]
pub fn lane() -> u32 {
    let lane: u32;
    gpu_asm!("mov.u32 {l}, %laneid;", l = out(_) lane, options(pure, nomem));
    read::<u32>(lane)
}

/// Returns the same value, about which the compiler knows nothing. A loop whose end depends on the
/// result is not unrolled.
#[cube]
pub fn opaque(value: u32) -> u32 {
    let same: u32;
    gpu_asm!("mov.u32 {s}, {v};", s = out(_) same, v = in(_) read::<u32>(value));
    read::<u32>(same)
}

/// Returns the shared-window address of a slice in shared memory.
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

/// Returns the shared-window address of a slice in shared memory that is written.
#[cube]
pub fn shared_address_mut<T: CubePrimitive>(slice: &mut [T]) -> u32 {
    // SAFETY: the pointer is only turned into a number.
    let pointer = unsafe { slice.as_mut_ptr_unchecked() };
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 t; cvta.to.shared.u64 t, {p}; cvt.u32.u64 {a}, t; }}",
        a = out(_) address, p = in(_) pointer, options(pure, nomem)
    );
    read::<u32>(address)
}

/// Returns the global address of a slice that is read.
#[cube]
pub fn global_address<T: CubePrimitive>(slice: &[T]) -> u64 {
    // SAFETY: the pointer is only turned into a number.
    let pointer = unsafe { slice.as_ptr_unchecked() };
    let address: u64;
    gpu_asm!("cvta.to.global.u64 {a}, {p};", a = out(_) address, p = in(_) pointer, options(pure, nomem));
    read::<u64>(address)
}

/// Returns the global address of a slice that is written.
#[cube]
pub fn global_address_mut<T: CubePrimitive>(slice: &mut [T]) -> u64 {
    // SAFETY: the pointer is only turned into a number.
    let pointer = unsafe { slice.as_mut_ptr_unchecked() };
    let address: u64;
    gpu_asm!("cvta.to.global.u64 {a}, {p};", a = out(_) address, p = in(_) pointer, options(pure, nomem));
    read::<u64>(address)
}
