//! The products of a step of a weight whose groups have at least 32 rows, one group after the
//! other.

use super::config::{GemvConfig, GemvSizes};
use super::weight::{WeightAddresses, WeightLoads};
use crate::ptx::{F4, U4, ldmatrix_x4, mma_m16n8k16, mma_sp_m16n8k32};
use crate::tile::fragment::{column_scales, column_zeros, dequantize, stored};
use crate::tile::sizes::NibbleMasks;
use cubecl::prelude::*;

/// Adds the products of a step to a lane's `totals`, and loads the next step.
#[cube]
pub(super) fn multiply(
    loads: &mut WeightLoads,
    weight: &WeightAddresses,
    matrices: u32,
    totals: &mut Array<f32>,
    root: f32,
    next: u32,
    more: bool,
    ones: U4,
    sizes: &GemvSizes,
    #[comptime] config: GemvConfig,
) {
    #[unroll]
    for group in 0..config.groups_in_step() {
        let mut products = Array::<F4>::new(4usize);
        let mut x_sums = F4::new(0.0);
        #[unroll]
        for j in 0..4usize {
            products[j] = F4::new(0.0);
        }
        // A part is 32 rows of K: the B fragments of two steps of 16 stored rows of a dense
        // weight, or of one step of a 2:4 weight.
        let parts = comptime!(config.step_k() / 32 / config.groups_in_step());
        #[unroll]
        for part in 0..parts {
            let part = comptime!(group * parts + part);
            let b = ldmatrix_x4(matrices + comptime!(64 * part as u32));
            if comptime!(config.is_sparse()) {
                multiply_sparse(&*loads, group, b, &mut products, &sizes.masks, part, config);
                if more {
                    loads.load_k16(weight, part, config);
                    // A tile of metadata covers two parts.
                    if comptime!(part % 2 == 1) {
                        loads.load_tile(weight, comptime!(config.tiles() + part / 2), config);
                    }
                }
            } else {
                #[unroll]
                for half in 0..2usize {
                    let k16 = comptime!(2 * part + half);
                    let (b0, b1) = (
                        b.extract(comptime!(2 * half)),
                        b.extract(comptime!(2 * half + 1)),
                    );
                    #[unroll]
                    for j in 0..4usize {
                        let words = loads.sub_tile(k16, j, config);
                        let a = if comptime!(config.products().multiplies_subnormals()) {
                            stored(words.0, &sizes.masks, false, comptime!(config.products()))
                        } else {
                            dequantize(
                                words,
                                &loads.group(group, config),
                                &sizes.masks,
                                j,
                                comptime!(config.products()),
                            )
                        };
                        products[j] = mma_m16n8k16(a, b0, b1, products[j], config.bf16);
                    }
                    if comptime!(config.products().multiplies_subnormals()) {
                        x_sums = mma_m16n8k16(ones, b0, b1, x_sums, config.bf16);
                    }
                    if more {
                        loads.load_k16(weight, k16, config);
                    }
                }
            }
        }
        #[unroll]
        for j in 0..4usize {
            let weights = loads.group(group, config);
            let zeros = column_zeros(&weights, j, comptime!(config.products()));
            let scales = column_scales(&weights, j, comptime!(config.products()));
            #[unroll]
            for half in 0..2usize {
                let element = comptime!(2 * half);
                let product = if comptime!(config.products().multiplies_subnormals()) {
                    fma(
                        x_sums.extract(element),
                        zeros.extract(element),
                        products[j].extract(element),
                    )
                } else {
                    products[j].extract(element)
                };
                let i = comptime!(4 * half + j);
                totals[i] = fma(product, root * scales.extract(element), totals[i]);
            }
        }
        if more {
            loads.load_group(weight, next, group, sizes, config);
        }
    }
}

/// Adds the products of a part of a 2:4 weight's step: 32 rows of K, of which 16 are stored, and
/// half of a tile of metadata.
#[cube]
fn multiply_sparse(
    loads: &WeightLoads,
    #[comptime] group: usize,
    b: U4,
    products: &mut Array<F4>,
    masks: &NibbleMasks,
    #[comptime] part: usize,
    #[comptime] config: GemvConfig,
) {
    let weights = loads.group(group, config);
    #[unroll]
    for j in 0..4usize {
        let a = dequantize(
            loads.sub_tile(part, j, config),
            &weights,
            masks,
            j,
            comptime!(config.products()),
        );
        let places = loads.word(
            comptime!(config.tiles() + part / 2),
            comptime!(part % 2 * 2 + j / 2),
        );
        products[j] = mma_sp_m16n8k32(a, b, products[j], places, comptime!(j % 2), config.bf16);
    }
}
