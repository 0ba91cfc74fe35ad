use super::copies::CopyAddresses;
use super::copy::CopyAhead;
use super::multiply::multiply;
use super::multiply_fp8::multiply_fp8;
use super::multiply_sparse::multiply_sparse;
use crate::pdl::{launch_dependents, wait};
use crate::ptx::{F4, U4, global_address, global_address_mut, opaque, shared_address};
use crate::tile::cluster::Receiver;
use crate::tile::config::Config;
use crate::tile::epilogue::finish;
use crate::tile::fp8::scale_rows;
use crate::tile::fragment::stored_ones;
use crate::tile::rows::RowOrder;
use crate::tile::sizes::{TileSizes, of_routing};
use crate::tile::stripe::{TilePart, tile_column, units_of_block};
use cubecl::prelude::*;

/// Computes out = x W + bias. W is in [`MarlinLayout`](marlin_format::layout::MarlinLayout), or in
/// [`SparseLayout`](marlin_format::layout::SparseLayout) if it is 2:4, padded to chunks. With a
/// tile of e4m3, an element of x is two codes ([`fp8`](crate::fp8)), and `row_scales` `[M]` has the
/// scales of its rows.
///
/// The product is computed transposed: fragment A holds 16 columns of the weight and fragment B
/// eight rows of activations, so a tile of few rows wastes at most seven rows.
///
/// With experts, `row_blocks` has the number of blocks of rows in its first element, and then for
/// each block its expert, its first row and its number of rows; `tokens` `[M]` has the row of x of
/// each row ([`Routing`](crate::experts::Routing)).
#[cube(launch_unchecked)]
pub(crate) fn matmul<F: Float>(
    x: &[F],
    qweight: &[u32],
    metadata: ComptimeOption<&[u32]>,
    scales: &[F],
    zero_points: ComptimeOption<&[u32]>,
    row_scales: ComptimeOption<&[f32]>,
    bias: ComptimeOption<&[F]>,
    row_blocks: ComptimeOption<&[U4]>,
    tokens: ComptimeOption<&[u32]>,
    out: &mut [F],
    workspace: &mut [u64],
    sizes: TileSizes,
    #[comptime] config: Config,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    // With gathered rows, the kernel before may be the one that computes the routing, and the next
    // kernel, with sorted rows, reads the routing before it waits. It must not start before the
    // routing is complete, which it is after this wait.
    let overlaps = comptime!(uses_pdl && config.rows != RowOrder::Gathered);
    wait(comptime!(uses_pdl && !overlaps));
    launch_dependents(uses_pdl);
    let shared = Shared::<[u32]>::new_aligned_slice(
        comptime!(config.tile.stages * config.stage_bytes() / 4),
        comptime!(config.alignment().max(128)),
    );
    let mut reduce =
        Shared::<[f32]>::new_aligned_slice(comptime!(config.reduce_floats()), 128usize);
    let stages = shared_address::<u32>(&shared);
    let x = global_address::<F>(x);
    let source = CopyAddresses {
        x,
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
            ComptimeOption::None => x,
        },
        tokens: #[comptime]
        match tokens {
            ComptimeOption::Some(tokens) => global_address::<u32>(tokens),
            ComptimeOption::None => x,
        },
    };
    let sizes = of_routing(sizes, source.row_blocks, config);
    let receiver = Receiver::new(config);
    let (start, end) = units_of_block(&sizes, config);
    if start == end {
        wait(overlaps);
        terminate!();
    }

    // The first copies are issued before anything else.
    let mut stage = stages;
    let mut part = TilePart::last(&sizes, start, end);
    let mut ahead = CopyAhead::new(start, end, &sizes, config);
    ahead.fill(stages, &source, &sizes, config, overlaps);

    let workspace = global_address_mut::<u64>(workspace);
    let (warps_n, warps_k) = comptime!((config.tile.warps_n as u32, config.tile.warps_k as u32));
    let warp = UNIT_POS_X / 32;
    let mut sums = Array::<F4>::new(comptime!(4 * config.tile.batch_tiles));
    let ones = stored_ones(true, config);
    let mut to_multiply = end - start;
    while to_multiply > 0 {
        #[unroll]
        for i in 0..comptime!(4 * config.tile.batch_tiles) {
            sums[i] = F4::new(0.0);
        }
        let column = tile_column(part.tile, &sizes, config) * warps_n + warp % warps_n;
        // The value is opaque, because otherwise the compiler recomputes it for every step.
        let chunks = opaque(if column < sizes.chunks_n {
            sizes.chunks_k
        } else {
            0u32.runtime()
        });
        let mut chunk = part.first * warps_k + warp / warps_n;
        for _ in part.first..part.end {
            ahead.step(stage, stages, &source, &sizes, config);
            // Beyond N or K there is nothing to multiply.
            if chunk < chunks {
                if comptime!(config.tile.is_fp8()) {
                    multiply_fp8(stage, &mut sums, config);
                } else if comptime!(config.tile.is_sparse()) {
                    multiply_sparse(stage, &mut sums, &sizes.masks, config);
                } else {
                    multiply(stage, &mut sums, ones, &sizes.masks, config);
                }
            }
            chunk += warps_k;
            let last = stages + comptime!(((config.tile.stages - 1) * config.stage_bytes()) as u32);
            stage = if stage == last {
                stages
            } else {
                stage + comptime!(config.stage_bytes() as u32)
            };
        }
        scale_rows(&mut sums, &row_scales, &part, &sizes, config);
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
