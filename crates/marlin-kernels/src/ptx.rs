//! PTX instructions that CubeCL has no function for, one small wrapper each.
//!
//! Every operand goes through `read`: inline assembly takes a variable, a copy or another block's output by its stack address otherwise.
//! Addresses of shared memory are 32-bit, those of global memory 64-bit. Only the NVRTC compiler of the CUDA runtime takes these.
//!
//! Source: PTX ISA 8.0, the section that each wrapper names.

use cubecl::prelude::*;
#[cfg(feature = "cuda")]
use cubecl_cpp::cuda::ptx::tensor_map_address;

pub(crate) mod wgmma;

/// Four 32-bit registers: 16 bytes of a copy, or the fragment A of `mma.m16n8k16`.
pub type U4 = Vector<u32, Const<4>>;
/// The accumulator C and D of `mma.m16n8k16` in f32.
pub type F4 = Vector<f32, Const<4>>;

/// The value of a variable, in a register.
#[cube]
fn read<T: CubePrimitive>(value: T) -> T {
    intrinsic!(|scope| value.read_value(scope).into())
}

/// `%laneid`: the number of a thread in its warp. CubeCL's own divides by a warp size that it asks the device for.
#[cube]
pub fn lane() -> u32 {
    let lane: u32;
    gpu_asm!("mov.u32 {l}, %laneid;", l = out(_) lane, options(pure, nomem));
    read::<u32>(lane)
}

/// The same value, of which the compiler knows nothing: a loop that ends on it is not unrolled.
#[cube]
pub(crate) fn opaque(value: u32) -> u32 {
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
pub(crate) fn global_address_mut<T: CubePrimitive>(slice: &mut [T]) -> u64 {
    // SAFETY: the pointer is only turned into a number.
    let pointer = unsafe { slice.as_mut_ptr_unchecked() };
    let address: u64;
    gpu_asm!("cvta.to.global.u64 {a}, {p};", a = out(_) address, p = in(_) pointer, options(pure, nomem));
    read::<u64>(address)
}

/// `cp.async`, 16 bytes past the first-level cache ("Data Movement: cp.async").
#[cube]
pub fn copy_async_16(shared: u32, global: u64) {
    gpu_asm!("cp.async.cg.shared.global [{s}], [{g}], 16;", s = in(_) read::<u32>(shared), g = in(_) read::<u64>(global));
}

/// `cp.async` of 16 bytes, of which `bytes` (0 or 16) are read and the others are zero.
#[cube]
pub(crate) fn copy_async_16_or_zero(shared: u32, global: u64, bytes: u32) {
    gpu_asm!(
        "cp.async.cg.shared.global [{s}], [{g}], 16, {b};",
        s = in(_) read::<u32>(shared), g = in(_) read::<u64>(global), b = in(_) read::<u32>(bytes)
    );
}

/// `cp.async` of 4 bytes.
#[cube]
pub(crate) fn copy_async_4(shared: u32, global: u64) {
    gpu_asm!("cp.async.ca.shared.global [{s}], [{g}], 4;", s = in(_) read::<u32>(shared), g = in(_) read::<u64>(global));
}

/// `cp.async.commit_group`: closes the group of copies issued since the last one.
#[cube]
pub fn copy_async_commit() {
    gpu_asm!("cp.async.commit_group;");
}

/// `cp.async.wait_group`: until at most `pending` groups of this thread are under way.
#[cube]
pub fn copy_async_wait(#[comptime] pending: usize) {
    gpu_asm!("cp.async.wait_group {n};", n = const pending);
}

/// Address of a tensor map among the kernel's parameters.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn map_address<T: CubePrimitive>(map: &TensorMap<T, Tiled>) -> u64 {
    tensor_map_address::<T, Tiled>(map)
}

/// No other runtime compiles what takes it.
#[cfg(not(feature = "cuda"))]
#[cube]
pub(crate) fn map_address<T: CubePrimitive>(_map: &TensorMap<T, Tiled>) -> u64 {
    0u64.runtime()
}

/// `prefetch.tensormap`: a tensor map is about to be used.
#[cube]
pub(crate) fn prefetch_map(map: u64) {
    gpu_asm!("prefetch.tensormap [{m}];", m = in(_) read::<u64>(map));
}

/// `cp.async.bulk`: the copy engine copies `bytes`, and counts them on `barrier`. Addresses and `bytes` are multiples of 16 ("Data Movement:
/// cp.async.bulk").
#[cube]
pub(crate) fn copy_bulk(shared: u32, global: u64, bytes: u32, barrier: u32) {
    gpu_asm!(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{s}], [{g}], {n}, [{b}];",
        s = in(_) read::<u32>(shared), g = in(_) read::<u64>(global), n = in(_) read::<u32>(bytes), b = in(_) read::<u32>(barrier)
    );
}

/// `cp.async.bulk.tensor.2d`: the copy engine copies the box of a tensor map at `column` of `row`, zeros where that is past the tensor, and
/// counts its bytes, those zeros too, on `barrier`.
#[cube]
pub(crate) fn copy_tensor(shared: u32, map: u64, column: u32, row: u32, barrier: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [{s}], [{m}, {{{c}, {r}}}], [{b}];",
        s = in(_) read::<u32>(shared), m = in(_) read::<u64>(map), c = in(_) read::<u32>(column), r = in(_) read::<u32>(row),
        b = in(_) read::<u32>(barrier)
    );
}

/// `mbarrier.init`: a phase of the barrier completes with `count` arrivals and all bytes that are expected ("mbarrier").
#[cube]
pub(crate) fn barrier_init(barrier: u32, #[comptime] count: usize) {
    gpu_asm!("mbarrier.init.shared::cta.b64 [{b}], {n};", b = in(_) read::<u32>(barrier), n = const count);
}

/// `mbarrier.arrive`: one arrival. What this thread has read and written is done.
#[cube]
pub(crate) fn barrier_arrive(barrier: u32) {
    gpu_asm!("mbarrier.arrive.shared::cta.b64 _, [{b}];", b = in(_) read::<u32>(barrier));
}

/// `mbarrier.arrive.expect_tx`: one arrival, and `bytes` more to be copied in this phase.
#[cube]
pub(crate) fn barrier_arrive_expect(barrier: u32, bytes: u32) {
    gpu_asm!(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{b}], {n};",
        b = in(_) read::<u32>(barrier), n = in(_) read::<u32>(bytes)
    );
}

/// `mbarrier.try_wait.parity` until it says that the phase of that parity is complete: what was copied in it is there, for [`wgmma`](wgmma::wgmma) too.
#[cube]
pub(crate) fn barrier_wait(barrier: u32, parity: u32) {
    gpu_asm!(
        "{{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [{b}], {p}; @!done bra WAIT; }}",
        b = in(_) read::<u32>(barrier), p = in(_) read::<u32>(parity)
    );
}

/// As [`barrier_wait`], by a whole warp, which the compiler knows to stay together.
#[cube]
pub(crate) fn barrier_wait_warp(barrier: u32, parity: u32) {
    gpu_asm!(
        "{{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [{b}], {p}; vote.sync.all.pred done, done, 0xffffffff; @!done bra.uni WAIT; }}",
        b = in(_) read::<u32>(barrier), p = in(_) read::<u32>(parity)
    );
}

/// `elect.sync`: true in one lane of a whole warp.
#[cube]
pub(crate) fn elect() -> bool {
    let elected: u32;
    gpu_asm!(
        "{{ .reg .pred one; elect.sync _|one, 0xffffffff; selp.u32 {e}, 1, 0, one; }}",
        e = out(_) elected
    );
    read::<u32>(elected) != 0
}

/// `bar.warp.sync`: all lanes of a warp meet.
#[cube]
pub fn sync_warp() {
    gpu_asm!("bar.warp.sync 0xffffffff;");
}

/// `bar.sync`: waits until `threads` have come to barrier `id`, this one among them.
#[cube]
pub(crate) fn sync_some(#[comptime] id: usize, #[comptime] threads: usize) {
    gpu_asm!("bar.sync {i}, {n};", i = const id, n = const threads);
}

/// `bar.arrive`: comes to barrier `id` of `threads`, and waits for nobody.
#[cube]
pub(crate) fn sync_arrive(#[comptime] id: usize, #[comptime] threads: usize) {
    gpu_asm!("bar.arrive {i}, {n};", i = const id, n = const threads);
}

/// `ld.shared.v4`: 16 bytes of shared memory.
#[cube]
pub fn load_shared_16(address: u32) -> U4 {
    let value: U4;
    gpu_asm!("ld.shared.v4.u32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u32>(address), options(readonly));
    read::<U4>(value)
}

/// `ld.shared`: 4 bytes of shared memory.
#[cube]
pub(crate) fn load_shared_4(address: u32) -> u32 {
    let value: u32;
    gpu_asm!("ld.shared.u32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u32>(address), options(readonly));
    read::<u32>(value)
}

/// `ldmatrix.x4`: four 8 x 8 matrices of 16-bit values; lane `8i + r` gives the address of row `r` of matrix `i`.
#[cube]
pub fn load_matrix_x4(address: u32) -> U4 {
    let value: U4;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {v}, [{a}];",
        v = out(_) value, a = in(_) read::<u32>(address), options(readonly)
    );
    read::<U4>(value)
}

/// `mma.sync.m16n8k16` with f32 accumulators, of f16 or (`bf16`) bf16 fragments.
#[cube]
pub fn mma(a: U4, b0: u32, b1: u32, c: F4, #[comptime] bf16: bool) -> F4 {
    let d: F4;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {d}, {a}, {{{b0}, {b1}}}, {c};",
        t = const comptime!(if bf16 { "bf16" } else { "f16" }),
        d = out(_) d, a = in(_) read::<U4>(a), b0 = in(_) read::<u32>(b0), b1 = in(_) read::<u32>(b1), c = in(_) read::<F4>(c),
        options(pure, nomem)
    );
    read::<F4>(d)
}

/// `fence.proxy.async`: this thread's writes to shared memory are there for the copy engine ("Async proxy").
#[cube]
pub(crate) fn fence_proxy_async() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// `and`, where it is written: the compiler moves its own past the [`wgmma_fence`](wgmma::wgmma_fence) that its result must come before.
#[cube]
pub(crate) fn and_here(a: u32, b: u32) -> u32 {
    let d: u32;
    gpu_asm!("and.b32 {d}, {a}, {b};", d = out(_) d, a = in(_) read::<u32>(a), b = in(_) read::<u32>(b));
    read::<u32>(d)
}

/// `a - b` of two pairs of f16.
#[cube]
pub fn sub_f16x2(a: u32, b: u32) -> u32 {
    let d: u32;
    gpu_asm!("sub.f16x2 {d}, {a}, {b};", d = out(_) d, a = in(_) read::<u32>(a), b = in(_) read::<u32>(b), options(pure, nomem));
    read::<u32>(d)
}

/// `a * b` of two pairs of f16.
#[cube]
pub fn mul_f16x2(a: u32, b: u32) -> u32 {
    let d: u32;
    gpu_asm!("mul.rn.f16x2 {d}, {a}, {b};", d = out(_) d, a = in(_) read::<u32>(a), b = in(_) read::<u32>(b), options(pure, nomem));
    read::<u32>(d)
}

/// `a * b + c` of three pairs of f16.
#[cube]
pub fn fma_f16x2(a: u32, b: u32, c: u32) -> u32 {
    let d: u32;
    gpu_asm!(
        "fma.rn.f16x2 {d}, {a}, {b}, {c};",
        d = out(_) d, a = in(_) read::<u32>(a), b = in(_) read::<u32>(b), c = in(_) read::<u32>(c), options(pure, nomem)
    );
    read::<u32>(d)
}

/// `a * b + c` of three pairs of bf16; the one bf16x2 arithmetic that compute capability 8.0 has.
#[cube]
pub(crate) fn fma_bf16x2(a: u32, b: u32, c: u32) -> u32 {
    let d: u32;
    gpu_asm!(
        "fma.rn.bf16x2 {d}, {a}, {b}, {c};",
        d = out(_) d, a = in(_) read::<u32>(a), b = in(_) read::<u32>(b), c = in(_) read::<u32>(c), options(pure, nomem)
    );
    read::<u32>(d)
}

/// `prmt`: the lower (`upper` false) or upper half of a register, in both halves.
#[cube]
pub fn duplicate_half(value: u32, #[comptime] upper: bool) -> u32 {
    let d: u32;
    gpu_asm!(
        "prmt.b32 {d}, {v}, {v}, {s};",
        d = out(_) d, v = in(_) read::<u32>(value), s = const comptime!(if upper { "0x3232" } else { "0x1010" }), options(pure, nomem)
    );
    read::<u32>(d)
}

/// The lower or upper half of a register, f16 or (`bf16`) bf16, as f32.
#[cube]
pub(crate) fn half_to_f32(value: u32, #[comptime] upper: bool, #[comptime] bf16: bool) -> f32 {
    if comptime!(bf16) {
        // A bf16 is the upper half of an f32.
        f32::reinterpret(if comptime!(upper) { value & 0xffff_0000u32 } else { value << 16u32 })
    } else {
        let d: f32;
        gpu_asm!(
            "{{ .reg .b16 l, h; mov.b32 {{l, h}}, {v}; cvt.f32.f16 {d}, {s}; }}",
            d = out(_) d, v = in(_) read::<u32>(value), s = const comptime!(if upper { "h" } else { "l" }), options(pure, nomem)
        );
        read::<f32>(d)
    }
}

/// `ld.global.v4`: 16 bytes of global memory.
#[cube]
pub(crate) fn load_global_16(address: u64) -> F4 {
    let value: F4;
    gpu_asm!("ld.global.v4.f32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u64>(address));
    read::<F4>(value)
}

/// `st.global.v4`: 16 bytes to global memory.
#[cube]
pub(crate) fn store_global_16(address: u64, value: F4) {
    gpu_asm!("st.global.v4.f32 [{a}], {v};", a = in(_) read::<u64>(address), v = in(_) read::<F4>(value));
}

/// `ld.acquire.gpu`: what was written before the value was released is seen.
#[cube]
pub(crate) fn load_acquire(address: u64) -> u32 {
    let value: u32;
    gpu_asm!("ld.acquire.gpu.global.u32 {v}, [{a}];", v = out(_) value, a = in(_) read::<u64>(address));
    read::<u32>(value)
}

/// `st.release.gpu`: what this thread, and those that it met at a barrier, wrote before is seen by whoever acquires the value.
#[cube]
pub(crate) fn store_release(address: u64, value: u32) {
    gpu_asm!("st.release.gpu.global.u32 [{a}], {v};", a = in(_) read::<u64>(address), v = in(_) read::<u32>(value));
}

/// `ld.relaxed.gpu` of a value and its mark, stored together by [`store_marked`]: other blocks' stores are seen, whole or not at all.
#[cube]
pub(crate) fn load_marked(address: u64) -> (f32, u32) {
    let both: Vector<u32, Const<2>>;
    gpu_asm!(
        "{{ .reg .b64 t; ld.relaxed.gpu.global.b64 t, [{a}]; mov.b64 {v}, t; }}",
        v = out(_) both, a = in(_) read::<u64>(address)
    );
    let both = read::<Vector<u32, Const<2>>>(both);
    (f32::reinterpret(both.extract(0usize)), both.extract(1usize))
}

/// `st.relaxed.gpu` of a value and its mark in one 64-bit word.
#[cube]
pub(crate) fn store_marked(address: u64, value: f32, mark: u32) {
    gpu_asm!(
        "{{ .reg .b64 t; mov.b64 t, {{{v}, {m}}}; st.relaxed.gpu.global.b64 [{a}], t; }}",
        a = in(_) read::<u64>(address), v = in(_) read::<u32>(u32::reinterpret(value)), m = in(_) read::<u32>(mark)
    );
}
