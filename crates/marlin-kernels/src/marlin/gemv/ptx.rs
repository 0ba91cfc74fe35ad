//! PTX instructions of clusters, and loads that say what the first-level cache keeps.
//!
//! Source: PTX ISA 8.0, the section that each wrapper names.

use crate::ptx::U4;
use cubecl::prelude::*;

/// The value of a variable, in a register: inline assembly takes a copy by its stack address otherwise.
#[cube]
fn register<T: CubePrimitive>(value: T) -> T {
    intrinsic!(|scope| value.read_value(scope).into())
}

/// `ld.global.nc.L1::no_allocate`, where it is written: 16 bytes that are read once ("Data Movement: ld.global.nc").
#[cube]
pub(super) fn load_once_16(address: u64) -> U4 {
    let value: U4;
    gpu_asm!(
        "ld.global.nc.L1::no_allocate.v4.u32 {v}, [{a}];",
        v = out(_) value, a = in(_) register::<u64>(address), options(readonly)
    );
    register::<U4>(value)
}

/// The same of 4 bytes.
#[cube]
pub(super) fn load_once_4(address: u64) -> u32 {
    let value: u32;
    gpu_asm!("ld.global.nc.L1::no_allocate.u32 {v}, [{a}];", v = out(_) value, a = in(_) register::<u64>(address), options(readonly));
    register::<u32>(value)
}

/// `mapa` and `st.shared::cluster`: stores where `address`, one of the block's own shared memory, is in the first block of its cluster.
#[cube]
pub(super) fn store_in_first_block(address: u32, value: f32) {
    gpu_asm!(
        "{{ .reg .u32 t; mapa.shared::cluster.u32 t, {a}, 0; st.shared::cluster.f32 [t], {v}; }}",
        a = in(_) register::<u32>(address), v = in(_) register::<f32>(value)
    );
}

/// `barrier.cluster.arrive`: all that this thread wrote is there for those that wait, and it goes on ("barrier.cluster").
#[cube]
pub(super) fn cluster_arrive() {
    gpu_asm!("barrier.cluster.arrive.release.aligned;");
}

/// `barrier.cluster.wait`: until all threads of the cluster have arrived.
#[cube]
pub(super) fn cluster_wait() {
    gpu_asm!("barrier.cluster.wait.acquire.aligned;");
}
