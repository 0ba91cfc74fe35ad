//! Clusters of blocks: barriers and stores to another block's shared memory.

use super::{F4, read};
use cubecl::prelude::*;

/// `mapa` and `st.async`: stores where `address`, one of the block's own shared memory, is in the
/// first block of its cluster, and counts the four bytes there at the `barrier` of that place once
/// they are visible ("Data Movement: st.async").
#[cube]
pub fn st_async_first_block(address: u32, value: f32, barrier: u32) {
    gpu_asm!(
        "{{ .reg .u32 t, m; mapa.shared::cluster.u32 t, {a}, 0; mapa.shared::cluster.u32 m, {b}, 0; st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [t], {v}, [m]; }}",
        a = in(_) read::<u32>(address), v = in(_) read::<f32>(value), b = in(_) read::<u32>(barrier)
    );
}

/// `mapa`: the address, in the shared memory of the cluster, of what lies at `address` of a block's
/// own in the block of that rank ("mapa").
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
/// `barrier` of that block once they are visible. Both are addresses that [`mapa()`] gives.
#[cube]
pub fn st_async_16(address: u32, value: F4, barrier: u32) {
    gpu_asm!(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [{a}], {v}, [{b}];",
        a = in(_) read::<u32>(address), v = in(_) read::<F4>(value), b = in(_) read::<u32>(barrier)
    );
}

/// `mbarrier.try_wait.parity` until the first phase is complete: what other blocks of the cluster
/// stored and counted is visible.
#[cube]
pub fn mbarrier_wait_first_phase_cluster(barrier: u32) {
    gpu_asm!(
        "{{ .reg .pred done; WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{b}], 0; @!done bra WAIT; }}",
        b = in(_) read::<u32>(barrier)
    );
}

/// `fence.mbarrier_init`: barriers that this thread has initialised are so for threads of the
/// cluster that wait for it to arrive.
#[cube]
pub fn fence_mbarrier_init() {
    gpu_asm!("fence.mbarrier_init.release.cluster;");
}

/// `barrier.cluster.arrive.relaxed`: the thread does not wait itself, and has written nothing that
/// others read, or fenced it ("barrier.cluster").
#[cube]
pub fn cluster_arrive_relaxed() {
    gpu_asm!("barrier.cluster.arrive.relaxed.aligned;");
}

/// `barrier.cluster.wait`: until all threads of the cluster have arrived.
#[cube]
pub fn cluster_wait() {
    gpu_asm!("barrier.cluster.wait.acquire.aligned;");
}
