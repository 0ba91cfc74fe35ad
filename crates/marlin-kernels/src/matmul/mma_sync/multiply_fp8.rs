//! The products of a warp's chunk in e4m3, by `mma.sync`.

use super::multiply::{activations, row_bytes};
use crate::ptx::{F4, lane, ldmatrix_x4, mma_e4m3_m16n8k32, opaque};
use crate::tile::config::Config;
use crate::tile::fp8::{column_scales, fragment, sub_tile};
use crate::tile::shape::{CHUNK_STEPS, TILE_BYTES};
use cubecl::prelude::*;

/// Adds the products of a warp's chunk, 64 columns by 128 rows of K, to its sums, scaled if the
/// weight has a scale for each 128 rows. `sums[j * batch_tiles + b]` holds the columns of sub-tile
/// `j` ([`sub_tile`]) and the rows `8b..8b + 8`.
///
/// The tensor cores add e4m3 products with fewer bits than f32 has, so the products of a chunk have
/// accumulators of their own, and are then added to the sums. The registers have room for those of
/// one sub-tile: a warp multiplies one after the other, and reads the activations for each.
#[cube]
pub(super) fn multiply_fp8(stage: u32, sums: &mut Array<F4>, #[comptime] config: Config) {
    let warp = UNIT_POS_X / 32;
    let batch_tiles = comptime!(config.tile.batch_tiles);
    let words = stage + warp * comptime!((config.word_rows() * TILE_BYTES) as u32) + lane() * 16;
    let scales = stage
        + comptime!(config.scales_offset() as u32)
        + warp * comptime!(config.scales_bytes() as u32)
        + lane() / 4 * 16;
    let (activations, swizzle) = activations(lane(), warp, config);
    #[unroll]
    for j in 0..4usize {
        // The compiler would otherwise keep the activations of all rows of K in registers.
        let rows = opaque(stage + activations);
        let own = sub_tile(0u32.runtime(), j, config.tile) * 4;
        let mut products = Array::<F4>::new(batch_tiles);
        #[unroll]
        for tile in 0..batch_tiles {
            products[tile] = F4::new(0.0);
        }
        #[unroll]
        for k32 in 0..CHUNK_STEPS {
            let a = fragment(words + own, k32, TILE_BYTES as u32);
            let place = rows + (swizzle ^ comptime!(2 * k32 as u32)) * 16;
            #[unroll]
            for pair in 0..comptime!(batch_tiles / 2) {
                let b = ldmatrix_x4(place + comptime!((pair * 16 * row_bytes(&config)) as u32));
                #[unroll]
                for i in 0..2usize {
                    let tile = comptime!(2 * pair + i);
                    products[tile] = mma_e4m3_m16n8k32(
                        a,
                        b.extract(comptime!(2 * i)),
                        b.extract(comptime!(2 * i + 1)),
                        products[tile],
                    );
                }
            }
        }
        let scales = if comptime!(config.grouped()) {
            column_scales(scales + own, config)
        } else {
            F4::new(1.0)
        };
        #[unroll]
        for tile in 0..batch_tiles {
            let i = comptime!(j * batch_tiles + tile);
            sums[i] = if comptime!(config.grouped()) {
                fma(products[tile], scales, sums[i])
            } else {
                sums[i] + products[tile]
            };
        }
    }
}
