//! Barriers: `mbarrier`, named barriers, and the synchronisation of a warp's lanes.

use super::read;
use cubecl::prelude::*;

/// `mbarrier.init`: initialises a barrier whose phases complete with `count` arrivals and all
/// expected bytes ("mbarrier").
#[cube]
pub fn mbarrier_init(barrier: u32, #[comptime] count: usize) {
    gpu_asm!("mbarrier.init.shared::cta.b64 [{b}], {n};", b = in(_) read::<u32>(barrier), n = const count);
}

/// `mbarrier.arrive`: arrives once at a barrier. The preceding reads and writes of this thread are
/// then performed.
#[cube]
pub fn mbarrier_arrive(barrier: u32) {
    gpu_asm!("mbarrier.arrive.shared::cta.b64 _, [{b}];", b = in(_) read::<u32>(barrier));
}

/// `mbarrier.arrive.expect_tx`: arrives once, and adds `bytes` to the bytes that are expected in
/// this phase.
#[cube]
pub fn mbarrier_arrive_expect_tx(barrier: u32, bytes: u32) {
    gpu_asm!(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{b}], {n};",
        b = in(_) read::<u32>(barrier), n = in(_) read::<u32>(bytes)
    );
}

/// `mbarrier.try_wait.parity` in a loop: waits until the phase of the given parity is complete. The
/// copies of that phase are then visible, also to `wgmma`.
#[cube]
pub fn mbarrier_wait_parity(barrier: u32, parity: u32) {
    gpu_asm!(
        "{{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [{b}], {p}; @!done bra WAIT; }}",
        b = in(_) read::<u32>(barrier), p = in(_) read::<u32>(parity)
    );
}

/// Waits like [`mbarrier_wait_parity()`], in a whole warp; the compiler knows that the warp stays
/// converged.
#[cube]
pub fn mbarrier_wait_parity_warp(barrier: u32, parity: u32) {
    gpu_asm!(
        "{{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [{b}], {p}; vote.sync.all.pred done, done, 0xffffffff; @!done bra.uni WAIT; }}",
        b = in(_) read::<u32>(barrier), p = in(_) read::<u32>(parity)
    );
}

/// `elect.sync`: returns true in one lane of a converged warp.
#[cube]
pub fn elect_sync() -> bool {
    let elected: u32;
    gpu_asm!(
        "{{ .reg .pred one; elect.sync _|one, 0xffffffff; selp.u32 {e}, 1, 0, one; }}",
        e = out(_) elected
    );
    read::<u32>(elected) != 0
}

/// `bar.warp.sync`: waits for all lanes of a warp.
#[cube]
pub fn bar_warp_sync() {
    gpu_asm!("bar.warp.sync 0xffffffff;");
}

/// `bar.sync`: waits until `threads` threads, including this one, have arrived at barrier `id`.
#[cube]
pub fn bar_sync(#[comptime] id: usize, #[comptime] threads: usize) {
    gpu_asm!("bar.sync {i}, {n};", i = const id, n = const threads);
}

/// Waits like [`bar_sync()`], at a barrier whose number is only known at run time.
#[cube]
pub fn bar_sync_numbered(id: u32, #[comptime] threads: usize) {
    gpu_asm!("bar.sync {i}, {n};", i = in(_) read::<u32>(id), n = const threads);
}

/// `bar.arrive`: arrives at barrier `id` of `threads` threads without waiting.
#[cube]
pub fn bar_arrive(#[comptime] id: usize, #[comptime] threads: usize) {
    gpu_asm!("bar.arrive {i}, {n};", i = const id, n = const threads);
}

/// `fence.proxy.async`: makes this thread's writes to shared memory visible to the copy engine
/// ("Async proxy").
#[cube]
pub fn fence_proxy_async() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}
