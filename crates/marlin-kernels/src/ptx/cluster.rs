//! Clusters of blocks: barriers and stores to another block's shared memory.

use super::{F4, read};
use cubecl::prelude::*;

/// `mapa` and `st.async`: stores a value in the shared memory of the first block of the cluster, at
/// the place that `address` has in the block's own shared memory. Once the four bytes are visible
/// they are counted at the `barrier` of the first block ("Data Movement: st.async").
#[cube]
pub fn st_async_first_block(address: u32, value: f32, barrier: u32) {
    gpu_asm!(
        "{{ .reg .u32 t, m; mapa.shared::cluster.u32 t, {a}, 0; mapa.shared::cluster.u32 m, {b}, 0; st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [t], {v}, [m]; }}",
        a = in(_) read::<u32>(address), v = in(_) read::<f32>(value), b = in(_) read::<u32>(barrier)
    );
}

/// `mapa`: maps `address`, of a block's own shared memory, to the address of the same place in the
/// shared memory of the cluster's block of rank `rank` ("mapa").
#[cube]
pub fn mapa(address: u32, rank: u32) -> u32 {
    let mapped: u32;
    gpu_asm!(
        "mapa.shared::cluster.u32 {m}, {a}, {r};",
        m = out(_) mapped, a = in(_) read::<u32>(address), r = in(_) read::<u32>(rank)
    );
    read::<u32>(mapped)
}

/// `st.async`: stores 16 bytes to the shared memory of a block of the cluster, and counts them at a
/// `barrier` of that block once they are visible. Both addresses come from [`mapa()`].
#[cube]
pub fn st_async_16(address: u32, value: F4, barrier: u32) {
    gpu_asm!(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [{a}], {v}, [{b}];",
        a = in(_) read::<u32>(address), v = in(_) read::<F4>(value), b = in(_) read::<u32>(barrier)
    );
}

/// `mbarrier.try_wait.parity` in a loop: waits until the first phase is complete. The values that
/// other blocks of the cluster stored and counted are then visible.
#[cube]
pub fn mbarrier_wait_first_phase_cluster(barrier: u32) {
    gpu_asm!(
        "{{ .reg .pred done; WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{b}], 0; @!done bra WAIT; }}",
        b = in(_) read::<u32>(barrier)
    );
}

/// `fence.mbarrier_init`: makes the initialisation of barriers by this thread visible to threads of
/// the cluster that wait for this thread's arrival.
#[cube]
pub fn fence_mbarrier_init() {
    gpu_asm!("fence.mbarrier_init.release.cluster;");
}

/// `barrier.cluster.arrive.relaxed`: arrives without waiting. The thread must have written nothing
/// that other threads read, or must have fenced such writes ("barrier.cluster").
#[cube]
pub fn cluster_arrive_relaxed() {
    gpu_asm!("barrier.cluster.arrive.relaxed.aligned;");
}

/// `barrier.cluster.wait`: waits until all threads of the cluster have arrived.
#[cube]
pub fn cluster_wait() {
    gpu_asm!("barrier.cluster.wait.acquire.aligned;");
}
