//! The configurations of which the compiler spills registers, which are no candidates.

use super::config::Config;
use super::rows::RowOrder;
use super::shape::{Product, Tile};
use marlin_format::{GroupSize, WeightValue};

/// Returns true if ptxas (13.5) spills registers of a configuration. ptxas limits some kernels to
/// 64 or 128 registers although twice as many are available. With a producer, 12 warps may need
/// more than the 128 registers that each thread can have. Another version of ptxas may spill in
/// other configurations; a candidate is then missing or slow, but results stay correct.
pub(super) fn spills(config: &Config, capability: u32) -> bool {
    let Tile {
        batch_tiles,
        warps_n,
        warps_k,
        product,
        ..
    } = config.tile;
    let tile = (batch_tiles, warps_n, warps_k);
    let Config {
        group,
        zero_points,
        bf16,
        ..
    } = *config;
    // With SwiGLU, this tile spills 8 to 40 bytes in most formats. The plan then computes SwiGLU
    // after the matmul, which costs less than another tile.
    if config.is_gated() && config.tile.is_wgmma() && tile == (8, 4, 1) {
        return true;
    }
    // The expert of a tile's rows is one register more than there is.
    if config.rows == RowOrder::Sorted && product == Product::Wgmma && tile == (2, 4, 3) {
        return true;
    }
    // A lane keeps the token of a row, one register more than there is.
    if config.rows == RowOrder::Gathered
        && batch_tiles == 1
        && group == GroupSize::Channel
        && !config.value.is_float()
    {
        return true;
    }
    if config.value == WeightValue::E4m3 {
        return match (product, capability, tile) {
            (Product::Wgmma, _, (8, 4, 1)) => group == GroupSize::Channel,
            (Product::MmaSync, 86 | 89, (8, 4, 1)) => true,
            (Product::MmaSync, 80, (1, 2, 4)) => group == GroupSize::Channel,
            (Product::MmaSync, 80, (2, 2, 4)) => group == GroupSize::G128,
            _ => false,
        };
    }
    if config.value == WeightValue::E2m1 {
        return match (product, capability, tile) {
            (Product::MmaSync, _, (1, 1, 8)) => true,
            (Product::MmaSync, _, (1, 4, 3)) => {
                group == GroupSize::G16 && config.rows == RowOrder::Gathered
            }
            (Product::MmaSync, 80 | 86 | 89, (4, 2, 4) | (4, 4, 2)) => group == GroupSize::G16,
            (Product::MmaSync, 86 | 89, (2, 1, 8)) => group == GroupSize::G32,
            (Product::MmaSync, 90, (2, 1, 8)) => {
                group == GroupSize::G16 && config.rows == RowOrder::Sorted
            }
            (Product::Wgmma, _, (16, 8, 1)) => group == GroupSize::G16 && config.is_gated(),
            _ => false,
        };
    }
    if config.value == WeightValue::Int8 {
        return match (product, capability, tile) {
            (Product::Wgmma, _, (8, 4, 1)) => group == GroupSize::Channel,
            // These spill hundreds of bytes, in every format.
            (Product::MmaSync | Product::SparseMmaSync, 86 | 89, (8, 4, 1)) => true,
            (Product::MmaSync, 80, (1, 2, 4)) => group == GroupSize::Channel && !zero_points,
            // Cards with more shared memory use larger tiles.
            (Product::SparseMmaSync, 80 | 90, (1, 1, 4)) => true,
            (Product::SparseMmaSync, 80, (2, 2, 4) | (8, 4, 1)) => {
                group == GroupSize::G64 && zero_points
            }
            _ => false,
        };
    }
    if config.tile.is_sparse() {
        // The second tile spills nothing, but the compiler unrolls the loop of its first copies,
        // which the instruction counts of `cargo xtask proof` do not allow.
        if product == Product::SparseWgmma
            && matches!(tile, (8, 4, 1) | (4, 4, 2))
            && group == GroupSize::Channel
            && !zero_points
        {
            return true;
        }
        return zero_points
            && match (capability, tile) {
                (80, (8, 4, 1)) => group == GroupSize::G64 && config.is_gated(),
                (80, (2, 1, 8)) => group == GroupSize::G64,
                (80 | 86 | 89, (2, 2, 2)) => group == GroupSize::G64 && !bf16,
                (86 | 89, (8, 4, 1)) => group == GroupSize::G32,
                (90, (1, 1, 8 | 12)) => group == GroupSize::Channel && bf16,
                _ => false,
            };
    }
    if product == Product::Wgmma {
        return match tile {
            (2, 4, 3) => zero_points && matches!(group, GroupSize::G64 | GroupSize::G128),
            (8, 4, 1) => group == GroupSize::Channel,
            _ => false,
        };
    }
    match capability {
        80 => match tile {
            (1, 1, 16) => group == GroupSize::Channel && !zero_points,
            (1, 3, 4) => group == GroupSize::Channel && zero_points == bf16,
            (2, 1, 8) => matches!(group, GroupSize::G64 | GroupSize::G128) && !zero_points,
            _ => false,
        },
        90 => {
            (tile == (1, 1, 16) || tile == (1, 1, 8) && bf16)
                && group == GroupSize::Channel
                && !zero_points
        }
        _ => false,
    }
}
