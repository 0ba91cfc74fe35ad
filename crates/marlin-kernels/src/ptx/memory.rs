//! Loads and stores with explicit caching and ordering.

use super::{F4, U2, U4, read};
use cubecl::prelude::*;

/// `ld.shared.v4`: loads 16 bytes of shared memory.
#[cube]
pub fn ld_shared_16(address: u32) -> U4 {
    let value: U4;
    gpu_asm!("ld.shared.v4.u32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u32>(address), options(readonly));
    read::<U4>(value)
}

/// Loads four floats like [`ld_shared_16()`].
#[cube]
pub fn ld_shared_f32_16(address: u32) -> F4 {
    let value: F4;
    gpu_asm!("ld.shared.v4.f32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u32>(address));
    read::<F4>(value)
}

/// `ld.shared.v2`: loads 8 bytes of shared memory.
#[cube]
pub fn ld_shared_8(address: u32) -> U2 {
    let value: U2;
    gpu_asm!("ld.shared.v2.u32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u32>(address), options(readonly));
    read::<U2>(value)
}

/// `ld.shared`: loads 4 bytes of shared memory.
#[cube]
pub fn ld_shared_4(address: u32) -> u32 {
    let value: u32;
    gpu_asm!("ld.shared.u32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u32>(address), options(readonly));
    read::<u32>(value)
}

/// `st.shared`: stores a float to shared memory.
#[cube]
pub fn st_shared_f32(address: u32, value: f32) {
    gpu_asm!("st.shared.f32 [{a}], {v};", a = in(_) read::<u32>(address), v = in(_) read::<f32>(value));
}

/// `st.shared.v4`: stores 16 bytes to shared memory.
#[cube]
pub fn st_shared_16(address: u32, value: U4) {
    gpu_asm!("st.shared.v4.u32 [{a}], {v};", a = in(_) read::<u32>(address), v = in(_) read::<U4>(value));
}

/// `ld.global.v4`: loads 16 bytes of global memory.
#[cube]
pub fn ld_global_16(address: u64) -> F4 {
    let value: F4;
    gpu_asm!("ld.global.v4.f32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u64>(address));
    read::<F4>(value)
}

/// `st.global.v4`: stores 16 bytes to global memory.
#[cube]
pub fn st_global_16(address: u64, value: F4) {
    gpu_asm!("st.global.v4.f32 [{a}], {v};", a = in(_) read::<u64>(address), v = in(_) read::<F4>(value));
}

/// `ld.shared`: loads 2 bytes of shared memory into the lower half of a register.
#[cube]
pub fn ld_shared_2(address: u32) -> u32 {
    let value: u32;
    gpu_asm!(
        "{{ .reg .b16 t; ld.shared.b16 t, [{a}]; cvt.u32.u16 {v}, t; }}",
        v = out(_) value, a = in(_) read::<u32>(address), options(readonly)
    );
    read::<u32>(value)
}

/// `st.global`: stores 4 bytes to global memory.
#[cube]
pub fn st_global_4(address: u64, value: u32) {
    gpu_asm!("st.global.u32 [{a}], {v};", a = in(_) read::<u64>(address), v = in(_) read::<u32>(value));
}

/// `st.global`: stores the first `count` words, 1, 2 or 4, to global memory.
#[cube]
pub fn st_global_words(address: u64, words: U4, #[comptime] count: usize) {
    let (first, second) = (words.extract(0usize), words.extract(1usize));
    if comptime!(count == 4) {
        gpu_asm!("st.global.v4.u32 [{a}], {v};", a = in(_) read::<u64>(address), v = in(_) read::<U4>(words));
    } else if comptime!(count == 2) {
        gpu_asm!("st.global.v2.u32 [{a}], {{{f}, {s}}};", a = in(_) read::<u64>(address), f = in(_) read::<u32>(first), s = in(_) read::<u32>(second));
    } else {
        st_global_4(address, first);
    }
}

/// `ld.global`: loads 4 bytes of global memory.
#[cube]
pub fn ld_global_4(address: u64) -> u32 {
    let value: u32;
    gpu_asm!("ld.global.u32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u64>(address));
    read::<u32>(value)
}

/// `ld.global.v4`: loads four words of global memory.
#[cube]
pub fn ld_global_words(address: u64) -> U4 {
    let value: U4;
    gpu_asm!("ld.global.v4.u32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u64>(address));
    read::<U4>(value)
}

/// `ld.global.cg`: loads 16 bytes that another kernel has written from the second-level cache,
/// whatever an earlier load has left in the first-level cache.
#[cube]
pub fn ld_global_l2_16(address: u64) -> U4 {
    let value: U4;
    gpu_asm!("ld.global.cg.v4.u32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u64>(address));
    read::<U4>(value)
}

/// Loads 8 bytes like [`ld_global_l2_16()`].
#[cube]
pub fn ld_global_l2_8(address: u64) -> U2 {
    let value: U2;
    gpu_asm!("ld.global.cg.v2.u32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u64>(address));
    read::<U2>(value)
}

/// Loads 4 bytes like [`ld_global_l2_16()`].
#[cube]
pub fn ld_global_l2_4(address: u64) -> u32 {
    let value: u32;
    gpu_asm!("ld.global.cg.u32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u64>(address));
    read::<u32>(value)
}

/// Loads 2 bytes like [`ld_global_l2_16()`]; the upper half of the word is zero.
#[cube]
pub fn ld_global_l2_2(address: u64) -> u32 {
    let value: u32;
    gpu_asm!(
        "{{ .reg .u16 t; ld.global.cg.u16 t, [{a}]; cvt.u32.u16 {v}, t; }}",
        v = out(_) value, a = in(_) read::<u64>(address)
    );
    read::<u32>(value)
}

/// `ld.acquire.gpu`: loads a value; writes before the release of the value are then visible.
#[cube]
pub fn ld_acquire(address: u64) -> u32 {
    let value: u32;
    gpu_asm!("ld.acquire.gpu.global.u32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u64>(address));
    read::<u32>(value)
}

/// `st.relaxed.gpu`: stores a value, which other threads may see before or after this thread's
/// other writes.
#[cube]
pub fn st_relaxed(address: u64, value: u32) {
    gpu_asm!("st.relaxed.gpu.global.u32 [{a}], {v};", a = in(_) read::<u64>(address), v = in(_) read::<u32>(value));
}

/// `st.release.gpu`: stores a value; earlier writes of this thread, and of threads with which it
/// has synchronised at a barrier, are visible to a thread that acquires the value.
#[cube]
pub fn st_release(address: u64, value: u32) {
    gpu_asm!("st.release.gpu.global.u32 [{a}], {v};", a = in(_) read::<u64>(address), v = in(_) read::<u32>(value));
}

/// `ld.relaxed.gpu`: loads a value and its mark, which [`st_marked()`] stores together. A store of
/// another block is seen completely or not at all.
#[cube]
pub fn ld_marked(address: u64) -> (f32, u32) {
    let both: Vector<u32, Const<2>>;
    gpu_asm!(
        "{{ .reg .b64 t; ld.relaxed.gpu.global.b64 t, [{a}]; mov.b64 {v}, t; }}",
        v = out(_) both, a = in(_) read::<u64>(address)
    );
    let both = read::<Vector<u32, Const<2>>>(both);
    (f32::reinterpret(both.extract(0usize)), both.extract(1usize))
}

/// `st.relaxed.gpu`: stores a value and its mark in one 64-bit word.
#[cube]
pub fn st_marked(address: u64, value: f32, mark: u32) {
    gpu_asm!(
        "{{ .reg .b64 t; mov.b64 t, {{{v}, {m}}}; st.relaxed.gpu.global.b64 [{a}], t; }}",
        a = in(_) read::<u64>(address), v = in(_) read::<u32>(u32::reinterpret(value)), m = in(_) read::<u32>(mark)
    );
}

/// `ld.global.nc.L1::no_allocate`: loads 16 bytes that are read only once; the compiler does not
/// move the load ("Data Movement: ld.global.nc").
#[cube]
pub fn ld_global_once_16(address: u64) -> U4 {
    let value: U4;
    gpu_asm!(
        "ld.global.nc.L1::no_allocate.v4.u32 {v}, [{a}];",
        v = out(_) value, a = in(_) read::<u64>(address), options(readonly)
    );
    read::<U4>(value)
}

/// Loads 8 bytes like [`ld_global_once_16()`].
#[cube]
pub fn ld_global_once_8(address: u64) -> U2 {
    let value: U2;
    gpu_asm!("ld.global.nc.L1::no_allocate.v2.u32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u64>(address), options(readonly));
    read::<U2>(value)
}

/// Loads 4 bytes like [`ld_global_once_16()`].
#[cube]
pub fn ld_global_once_4(address: u64) -> u32 {
    let value: u32;
    gpu_asm!("ld.global.nc.L1::no_allocate.u32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u64>(address), options(readonly));
    read::<u32>(value)
}
