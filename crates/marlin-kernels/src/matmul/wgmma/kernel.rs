use super::pipeline::{PipelineState, fill_ahead, meet_producer, produce};
use super::producer::{Producer, ProducerAddresses};
use super::{fp8, warpgroup};
use crate::pdl::{launch_dependents, wait};
use crate::ptx::{
    F4, U4, bar_warp_sync, cluster_wait, global_address, global_address_mut, setmaxnreg_dec,
    setmaxnreg_inc, shared_address, tensormap_address,
};
use crate::tile::cluster::Receiver;
use crate::tile::config::Config;
use crate::tile::epilogue::finish;
use crate::tile::fp8::scale_rows;
use crate::tile::fragment::stored_ones;
use crate::tile::sizes::{TileSizes, of_routing};
use crate::tile::stripe::{TilePart, tile_place, units_of_block};
use cubecl::prelude::*;

/// The registers per thread of a producer that gives registers away, and of the two warpgroups that
/// multiply. The total is that of three warpgroups with 168 registers per thread.
const PRODUCER_REGISTERS: usize = 24;
const CONSUMER_REGISTERS: usize = 240;

/// Computes out = x W + bias. W is in [`MarlinLayout`](marlin_format::layout::MarlinLayout), or in
/// [`SparseLayout`](marlin_format::layout::SparseLayout) if it is 2:4, padded to chunks. x is read
/// through a tensor map. With a tile of e4m3, an element of x is two codes
/// ([`fp8`](crate::fp8)), and `row_scales` `[M]` has the scales of its rows.
///
/// The product is computed transposed: matrix A holds 64 columns of the weight, and B the rows of
/// activations of a tile.
///
/// With experts, the rows of x are in their order, and `row_blocks` has the number of blocks of
/// rows in its first element, and then for each block its expert, its first row and its number of
/// rows ([`Routing`](crate::experts::Routing)). Rows of a tile past its block belong to other
/// experts, and their outputs are not written.
#[cube(launch_unchecked, cluster_dim = config.cluster_dim())]
pub(crate) fn matmul<F: Float>(
    x: TensorMap<F, Tiled>,
    qweight: &[u32],
    metadata: ComptimeOption<&[u32]>,
    scales: &[F],
    zero_points: ComptimeOption<&[u32]>,
    row_scales: ComptimeOption<&[f32]>,
    bias: ComptimeOption<&[F]>,
    row_blocks: ComptimeOption<&[U4]>,
    out: &mut [F],
    workspace: &mut [u64],
    sizes: TileSizes,
    #[comptime] config: Config,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents(true);
    let shared = Shared::<[u32]>::new_aligned_slice(
        comptime!(config.tile.stages * config.stage_bytes() / 4),
        comptime!(config.alignment().max(128)),
    );
    let mut reduce =
        Shared::<[f32]>::new_aligned_slice(comptime!(config.reduce_floats()), 128usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(
        comptime!(config.tile.stages * config.barrier_bytes() / 8),
        8usize,
    );
    let (stages, barriers) = (
        shared_address::<u32>(&shared),
        shared_address::<u64>(&barriers),
    );
    let source = ProducerAddresses {
        x_map: tensormap_address::<F>(&x),
        qweight: global_address::<u32>(qweight),
        metadata: #[comptime]
        match metadata {
            ComptimeOption::Some(metadata) => global_address::<u32>(metadata),
            ComptimeOption::None => 0u64.runtime(),
        },
        scales: global_address::<F>(scales),
        zeros: #[comptime]
        match zero_points {
            ComptimeOption::Some(zeros) => global_address::<u32>(zeros),
            ComptimeOption::None => 0u64.runtime(),
        },
        row_blocks: #[comptime]
        match row_blocks {
            ComptimeOption::Some(row_blocks) => global_address::<U4>(row_blocks),
            ComptimeOption::None => 0u64.runtime(),
        },
    };
    let sizes = of_routing(sizes, source.row_blocks, config);
    let receiver = Receiver::new(config);
    let (start, end) = units_of_block(&sizes, config);
    if comptime!(!config.tile.is_clustered()) && start == end {
        wait(true);
        terminate!();
    }

    // Consumers first wait for the phase of parity 0, and the producer for the phase of parity 1,
    // which counts as complete.
    let mut state = PipelineState::first(stages, barriers, 0u32.runtime());
    let mut part = TilePart::last(&sizes, start, end);
    let first = PipelineState::first(stages, barriers, 1u32.runtime());
    let mut producer = Producer::new(first, start, end, &source, &sizes, config);
    // After the broadcast from lane 0 the compiler knows that the value is uniform in a warp, and
    // keeps values that the lanes share in uniform registers.
    let warp = plane_broadcast(UNIT_POS_X / 32, 0u32);
    if comptime!(config.has_producer()) {
        if warp >= comptime!(config.tile.warps() as u32) {
            if comptime!(config.moves_registers()) {
                setmaxnreg_dec(PRODUCER_REGISTERS);
            }
            if warp == comptime!(config.tile.warps() as u32) {
                produce(&mut producer, end, &source, &sizes, config);
            }
            if comptime!(config.tile.is_clustered()) {
                bar_warp_sync();
                cluster_wait();
            }
            terminate!();
        }
        if comptime!(config.moves_registers()) {
            setmaxnreg_inc(CONSUMER_REGISTERS);
        }
        meet_producer(config);
        wait(true);
    } else {
        wait(true);
        fill_ahead(&mut producer, warp, &source, &sizes, config);
    }

    let workspace = global_address_mut::<u64>(workspace);
    warpgroup::declare(config);
    let mut sums = Array::<F4>::new(comptime!(config.tile.sub_tiles() * config.tile.batch_tiles));
    let ones = stored_ones(true, config);
    let mut to_multiply = end - start + sizes.waves * sizes.depth;
    while to_multiply > 0 {
        #[unroll]
        for i in 0..comptime!(config.tile.sub_tiles() * config.tile.batch_tiles) {
            sums[i] = F4::new(0.0);
        }
        if comptime!(!config.multiplies_subnormals() && !config.tile.is_fp8()) {
            warpgroup::clear(config);
        }
        // Chunks of the tile along N. If the tile extends beyond N, some warps have no chunk.
        let chunk_n =
            tile_place(part.tile, &sizes, config).0 * comptime!(config.tile.chunks_n() as u32);
        let chunks = min(
            sizes.chunks_n - chunk_n,
            comptime!(config.tile.chunks_n() as u32),
        );
        state.agree();
        if comptime!(config.tile.is_fp8()) {
            fp8::multiply(&mut state, warp, part.end - part.first, &mut sums, config);
            scale_rows(&mut sums, &row_scales, &part, &sizes, config);
        } else {
            for step in part.first..part.end {
                if comptime!(!config.has_producer()) {
                    producer.share(warp, &source, &sizes, config);
                }
                if comptime!(config.tile.is_sparse()) {
                    warpgroup::multiply_sparse(&state, warp, chunks, &sizes.masks, config);
                } else {
                    warpgroup::multiply(
                        &state,
                        warp,
                        step,
                        &part,
                        ones,
                        &mut sums,
                        &sizes.masks,
                        config,
                    );
                }
                state.next(config);
            }
            warpgroup::end(&mut sums, config);
        }
        finish::<F>(
            &sums,
            &mut reduce,
            &receiver,
            scales,
            &bias,
            source.row_blocks,
            out,
            workspace,
            &part,
            &sizes,
            config,
        );
        to_multiply -= part.end - part.first;
        part.next(&sizes, start, config);
    }
}
