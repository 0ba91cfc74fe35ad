//! Clusters of blocks: barriers and stores to another block's shared memory.

use super::read;
use cubecl::prelude::*;

/// `mapa` and `st.shared::cluster`: stores where `address`, one of the block's own shared memory, is in the first block of its cluster.
#[cube]
pub fn st_first_block(address: u32, value: f32) {
    gpu_asm!(
        "{{ .reg .u32 t; mapa.shared::cluster.u32 t, {a}, 0; st.shared::cluster.f32 [t], {v}; }}",
        a = in(_) read::<u32>(address), v = in(_) read::<f32>(value)
    );
}

/// `barrier.cluster.arrive`: this thread's writes are visible to threads that wait; it does not wait itself ("barrier.cluster").
#[cube]
pub fn cluster_arrive() {
    gpu_asm!("barrier.cluster.arrive.release.aligned;");
}

/// `barrier.cluster.arrive.relaxed`: as [`cluster_arrive()`], of a thread that has written nothing: no fence.
#[cube]
pub fn cluster_arrive_relaxed() {
    gpu_asm!("barrier.cluster.arrive.relaxed.aligned;");
}

/// `barrier.cluster.wait`: until all threads of the cluster have arrived.
#[cube]
pub fn cluster_wait() {
    gpu_asm!("barrier.cluster.wait.acquire.aligned;");
}
