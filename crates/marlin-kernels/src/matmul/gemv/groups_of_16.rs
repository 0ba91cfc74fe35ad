//! The products of a step of floats in groups of 16.
//!
//! A product of 16 rows of K is one group, which has a scale of its own. The eight columns of
//! fragment B, which hold the same row of activations otherwise, then hold that row for one product
//! each and zeros for the other seven: after the eight products of a step, column `g` of the
//! accumulator has the sums of group `g`. A lane has the sums of groups `2t` and `2t + 1`
//! (`t = lane % 4`), and loads the scales of these two groups only.
//!
//! ```text
//! fragment B   column 0   1   2   ...   7          accumulator, lane groupID * 4 + t
//! product 0       x[0..16]  0   0         0        t = 0: groups 0, 1
//! product 1       0   x[16..32] 0         0        t = 1: groups 2, 3
//!  ...                                              ...
//! product 7       0         0   0   x[112..128]    t = 3: groups 6, 7
//! ```

use super::config::{GemvConfig, GemvSizes};
use super::weight::{WeightAddresses, WeightLoads};
use crate::planes::plane_total;
use crate::ptx::{F4, U4, lane, ldmatrix_x4, mma_m16n8k16, shared_address, st_shared_16};
use crate::tile::fragment::{column_scales, dequantize};
use cubecl::prelude::*;
use marlin_format::GroupSize;

/// The number of lanes that share a column, each with two groups of a step.
const LANES: usize = 4;

/// Returns the address of 16 bytes of zeros in shared memory; 0 for other groups.
#[cube]
pub(super) fn zeros(#[comptime] config: GemvConfig) -> u32 {
    if comptime!(config.group == GroupSize::G16) {
        let zeros = Shared::<[u32]>::new_aligned_slice(4usize, 16usize);
        let address = shared_address::<u32>(&zeros);
        if UNIT_POS_X == 0 {
            st_shared_16(address, U4::new(0u32));
        }
        sync_cube();
        address
    } else {
        0u32.runtime()
    }
}

/// Adds the products of a step to a lane's `totals`, and loads the next step.
#[cube]
pub(super) fn multiply(
    loads: &mut WeightLoads,
    weight: &WeightAddresses,
    matrices: u32,
    zeros: u32,
    totals: &mut Array<f32>,
    root: f32,
    next: u32,
    more: bool,
    sizes: &GemvSizes,
    #[comptime] config: GemvConfig,
) {
    let mut products = Array::<F4>::new(4usize);
    #[unroll]
    for j in 0..4usize {
        products[j] = F4::new(0.0);
    }
    // Lane 8i + r gives the address of row r of matrix i of ldmatrix.x4, which is column r of the
    // fragment of product i / 2 of a part.
    let own = lane() % 8 - lane() / 16;
    #[unroll]
    for part in 0..comptime!(config.step_k() / 32) {
        let is_own = own == comptime!(2 * part as u32);
        let b = ldmatrix_x4(select(
            is_own,
            matrices + comptime!(64 * part as u32),
            zeros,
        ));
        #[unroll]
        for half in 0..2usize {
            let k16 = comptime!(2 * part + half);
            #[unroll]
            for j in 0..4usize {
                let a = dequantize(
                    loads.sub_tile(k16, j, config),
                    &loads.group(0usize, config),
                    &sizes.masks,
                    j,
                    comptime!(config.products()),
                );
                products[j] = mma_m16n8k16(
                    a,
                    b.extract(comptime!(2 * half)),
                    b.extract(comptime!(2 * half + 1)),
                    products[j],
                    config.bf16,
                );
            }
            if more {
                loads.load_k16(weight, k16, config);
            }
        }
    }
    #[unroll]
    for j in 0..4usize {
        let mut sums = Array::<f32>::new(2usize);
        sums[0usize] = 0.0;
        sums[1usize] = 0.0;
        #[unroll]
        for group in 0..2usize {
            let weights = loads.group(group, config);
            let scales = column_scales(&weights, j, comptime!(config.products()));
            #[unroll]
            for row in 0..2usize {
                sums[row] = fma(
                    products[j].extract(comptime!(2 * row + group)),
                    scales.extract(comptime!(2 * row)),
                    sums[row],
                );
            }
        }
        #[unroll]
        for row in 0..2usize {
            let i = comptime!(4 * row + j);
            totals[i] = fma(sums[row], root, totals[i]);
        }
    }
    if more {
        #[unroll]
        for group in 0..2usize {
            loads.load_group(weight, next, group, sizes, config);
        }
    }
}

/// Adds the totals of the lanes that share a column.
#[cube]
pub(super) fn add_lanes(totals: &mut Array<f32>) {
    #[unroll]
    for i in 0..8usize {
        totals[i] = plane_total(totals[i], LANES);
    }
}
