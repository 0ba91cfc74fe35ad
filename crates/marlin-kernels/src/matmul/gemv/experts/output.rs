use super::super::config::{COLUMNS, GemvConfig, GemvSizes};
use super::super::output::{PART, add_parts, biased};
use super::config::ExpertGemvConfig;
use crate::tile::epilogue::gated;
use cubecl::prelude::*;

/// Writes a tile of columns of a row of an expert.
#[cube]
pub(super) fn write_row<F: Float>(
    sums: &Shared<[f32]>,
    bias: &ComptimeOption<&[F]>,
    out: &mut [F],
    expert: u32,
    row: u32,
    tile: u32,
    sizes: &GemvSizes,
    #[comptime] config: ExpertGemvConfig,
) {
    let gemv = comptime!(config.gemv);
    let column = tile * comptime!(COLUMNS as u32) + UNIT_POS_X;
    if UNIT_POS_X < comptime!(COLUMNS as u32) && column < sizes.n {
        // The column's bias among those of all experts.
        let of = expert * sizes.n * comptime!(gemv.epilogue.columns() as u32) + column;
        let mut value = biased::<F>(add_parts(sums, UNIT_POS_X, gemv), bias, of);
        if comptime!(gemv.is_gated()) {
            let ups = add_parts(
                sums,
                UNIT_POS_X + comptime!((gemv.blocks * PART) as u32),
                gemv,
            );
            value = gated(value, biased::<F>(ups, bias, of + sizes.n), gemv.epilogue);
        }
        out[(row * sizes.n + column) as usize] = F::cast_from(value);
    }
}

/// Writes a tile of columns of the weighted sum of a token's experts, which lane `i` of each warp
/// has. The outputs are added in the order of the experts' rank.
#[cube]
pub(super) fn write_sum<F: Float>(
    sums: &Shared<[f32]>,
    bias: &ComptimeOption<&[F]>,
    out: &mut [F],
    experts: u32,
    weights: f32,
    token: u32,
    tile: u32,
    sizes: &GemvSizes,
    #[comptime] config: ExpertGemvConfig,
) {
    if UNIT_POS_X < comptime!(COLUMNS as u32) {
        let column = tile * comptime!(COLUMNS as u32) + UNIT_POS_X;
        // A column that does not exist has the bias of one that does.
        let of_bias = min(column, sizes.n - 1);
        let mut total = 0.0f32;
        #[unroll]
        for choice in 0..comptime!(config.router.top_k as u32) {
            let expert = plane_shuffle(experts, choice);
            let weight = plane_shuffle(weights, choice);
            let sum = add_parts(
                sums,
                UNIT_POS_X + choice * part_length(config.gemv),
                config.gemv,
            );
            total += weight * biased::<F>(sum, bias, expert * sizes.n + of_bias);
        }
        if column < sizes.n {
            out[(token * sizes.n + column) as usize] = F::cast_from(total);
        }
    }
}

/// Returns the number of sums of an expert.
#[cube]
fn part_length(#[comptime] gemv: GemvConfig) -> u32 {
    comptime!((gemv.blocks * PART) as u32).runtime()
}
