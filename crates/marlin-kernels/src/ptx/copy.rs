//! Asynchronous copies from global to shared memory: `cp.async`, and the copy engine.

use super::read;
use cubecl::prelude::*;
#[cfg(feature = "cuda")]
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// `cp.async`: copies 16 bytes, bypassing the first-level cache ("Data Movement: cp.async").
#[cube]
pub fn cp_async_16(shared: u32, global: u64) {
    gpu_asm!("cp.async.cg.shared.global [{s}], [{g}], 16;", s = in(_) read::<u32>(shared), g = in(_) read::<u64>(global));
}

/// `cp.async`: reads `bytes` bytes (0 or 16), and writes them and zeros up to 16 bytes.
#[cube]
pub fn cp_async_16_or_zero(shared: u32, global: u64, bytes: u32) {
    gpu_asm!(
        "cp.async.cg.shared.global [{s}], [{g}], 16, {b};",
        s = in(_) read::<u32>(shared), g = in(_) read::<u64>(global), b = in(_) read::<u32>(bytes)
    );
}

/// `cp.async`: copies 4 bytes.
#[cube]
pub fn cp_async_4(shared: u32, global: u64) {
    gpu_asm!("cp.async.ca.shared.global [{s}], [{g}], 4;", s = in(_) read::<u32>(shared), g = in(_) read::<u64>(global));
}

/// `cp.async`: copies 8 bytes.
#[cube]
pub fn cp_async_8(shared: u32, global: u64) {
    gpu_asm!("cp.async.ca.shared.global [{s}], [{g}], 8;", s = in(_) read::<u32>(shared), g = in(_) read::<u64>(global));
}

/// `cp.async.commit_group`: closes the group of copies issued since the last call.
#[cube]
pub fn cp_async_commit_group() {
    gpu_asm!("cp.async.commit_group;");
}

/// `cp.async.wait_group`: waits until at most `pending` groups of this thread are in flight.
#[cube]
pub fn cp_async_wait_group(#[comptime] pending: usize) {
    gpu_asm!("cp.async.wait_group {n};", n = const pending);
}

/// Returns the address of a tensor map among the kernel's parameters.
#[cfg(feature = "cuda")]
#[cube]
pub fn tensormap_address<T: CubePrimitive>(map: &TensorMap<T, Tiled>) -> u64 {
    tensor_map_address::<T, Tiled>(map)
}

/// Returns 0. Without the feature `cuda`, no runtime compiles the functions that use the address.
#[cfg(not(feature = "cuda"))]
#[cube]
pub fn tensormap_address<T: CubePrimitive>(_map: &TensorMap<T, Tiled>) -> u64 {
    0u64.runtime()
}

/// `prefetch.tensormap`: prefetches a tensor map that is about to be used.
#[cube]
pub fn prefetch_tensormap(map: u64) {
    gpu_asm!("prefetch.tensormap [{m}];", m = in(_) read::<u64>(map));
}

/// `prefetch.global.L2`: loads the 128 bytes around an address into the second-level cache ("Data
/// Movement: prefetch").
#[cube]
pub fn prefetch_l2(global: u64) {
    gpu_asm!("prefetch.global.L2 [{g}];", g = in(_) read::<u64>(global));
}

/// `cp.async.bulk`: the copy engine copies `bytes`, and counts them on `barrier`. Addresses and
/// `bytes` are multiples of 16 ("Data Movement: cp.async.bulk").
#[cube]
pub fn cp_async_bulk(shared: u32, global: u64, bytes: u32, barrier: u32) {
    gpu_asm!(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{s}], [{g}], {n}, [{b}];",
        s = in(_) read::<u32>(shared), g = in(_) read::<u64>(global), n = in(_) read::<u32>(bytes), b = in(_) read::<u32>(barrier)
    );
}

/// `cp.async.bulk.tensor.2d`: the copy engine copies the box of a tensor map at `column` of `row`,
/// with zeros outside the tensor, and counts its bytes, including those zeros, on `barrier`.
#[cube]
pub fn cp_async_bulk_tensor_2d(shared: u32, map: u64, column: u32, row: u32, barrier: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [{s}], [{m}, {{{c}, {r}}}], [{b}];",
        s = in(_) read::<u32>(shared), m = in(_) read::<u64>(map), c = in(_) read::<u32>(column), r = in(_) read::<u32>(row),
        b = in(_) read::<u32>(barrier)
    );
}
