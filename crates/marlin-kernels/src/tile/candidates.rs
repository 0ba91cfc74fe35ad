//! The available tiles, and their configurations.

use super::config::Config;
use super::rows::{BLOCK_ROWS, MAX_EXPERT_ROWS, RowOrder};
use super::shape::{Product, Tile};
use super::spills::spills;
use crate::Epilogue;
use crate::device::{FP8_CAPABILITY, WGMMA_CAPABILITY};
use marlin_format::{GroupSize, Sparsity, WeightValue, ZeroPoint};

/// The candidate tiles for weights of 4 bits, each with the nanoseconds that one chunk takes on an
/// otherwise idle multiprocessor of an H200 (groups of 128, f16). Deep tiles split a column among
/// few blocks; wide tiles read the activations less often. [`with_stages`] sets the number of
/// stages.
const NIBBLE_TILES: [(Tile, u32); 45] = [
    (tile(1, 1, 8), 77),
    (tile(1, 1, 16), 70),
    (tile(1, 3, 4), 70),
    (tile(2, 1, 8), 92),
    (tile(2, 2, 6), 87),
    (tile(2, 4, 3), 94),
    (tile(4, 1, 8), 141),
    (tile(4, 2, 4), 127),
    (tile(4, 4, 2), 126),
    (tile(8, 1, 8), 208),
    (tile(8, 2, 4), 194),
    (tile(8, 4, 2), 190),
    (wgmma(1, 4, 3), 70),
    (wgmma(2, 4, 2), 69),
    (wgmma(2, 4, 3), 69),
    (wgmma(4, 4, 2), 92),
    (wgmma(8, 4, 1), 120),
    (wgmma(8, 4, 2), 144),
    (wgmma(16, 4, 2), 187),
    (wgmma(16, 8, 1), 183),
    (clustered(2, wgmma(8, 4, 1)), 112),
    (clustered(3, wgmma(8, 4, 1)), 112),
    (clustered(4, wgmma(8, 4, 1)), 112),
    (clustered(5, wgmma(8, 4, 1)), 112),
    (clustered(6, wgmma(8, 4, 1)), 112),
    (clustered(8, wgmma(8, 4, 1)), 112),
    (clustered(2, wgmma(16, 8, 1)), 145),
    (clustered(3, wgmma(16, 8, 1)), 145),
    (clustered(4, wgmma(16, 8, 1)), 145),
    (clustered(5, wgmma(16, 8, 1)), 145),
    (clustered(6, wgmma(16, 8, 1)), 145),
    (clustered(8, wgmma(16, 8, 1)), 145),
    (sparse(1, 1, 8), 98),
    (sparse(1, 1, 12), 84),
    (sparse(1, 3, 4), 80),
    (sparse(2, 1, 8), 124),
    // This tile is for the 99 KB of shared memory of compute capability 8.6 and 8.9: with zero
    // points in groups of 32, no other tile fits without register spills.
    (sparse(2, 2, 2), 144),
    (sparse(2, 2, 6), 102),
    (sparse(4, 2, 4), 159),
    (sparse(4, 4, 2), 160),
    (sparse(8, 4, 1), 269),
    (sparse_wgmma(2, 4, 2), 92),
    (sparse_wgmma(4, 4, 2), 110),
    (sparse_wgmma(8, 4, 1), 155),
    (sparse_wgmma(16, 8, 1), 270),
];

/// The candidate tiles for weights of 8 bits, each with the nanoseconds of a chunk's products
/// alone. With few rows, reading the chunk's bytes takes longer; `cost.rs` computes that time from
/// the memory bandwidth.
const BYTE_TILES: [(Tile, u32); 22] = [
    (tile(1, 1, 8), 72),
    (tile(1, 2, 4), 90),
    (tile(2, 2, 4), 99),
    (tile(4, 2, 2), 160),
    (tile(8, 4, 1), 211),
    (wgmma(2, 4, 2), 80),
    (wgmma(4, 4, 2), 95),
    (wgmma(8, 4, 1), 151),
    (wgmma(16, 4, 2), 195),
    (wgmma(16, 8, 1), 200),
    // A chunk of 128 rows of K: 4096 rows took 345 us for Llama 2 7B's qkv with both.
    (fp8_wgmma(16, 8, 1), 220),
    (fp8_wgmma(32, 8, 1), 430),
    // This tile is for compute capability 8.9. Its time was not measured: a chunk of 64 rows of K
    // takes the 64 rows of activations of the tile below 211 ns, and the tensor cores multiply
    // twice as many e4m3 at a time.
    (fp8_mma(6, 4, 1), 160),
    (sparse(1, 1, 8), 97),
    // This tile is for the 99 KB of shared memory of compute capability 8.6 and 8.9. Its time was
    // not measured.
    (sparse(1, 1, 4), 115),
    (sparse(2, 2, 4), 115),
    (sparse(4, 2, 2), 202),
    (sparse(8, 4, 1), 276),
    (sparse_wgmma(2, 4, 2), 84),
    (sparse_wgmma(4, 4, 2), 105),
    (sparse_wgmma(8, 4, 1), 182),
    (sparse_wgmma(16, 8, 1), 285),
];

/// The tiles for weights of a width, with their nanoseconds.
const fn candidates(value: WeightValue) -> &'static [(Tile, u32)] {
    match value.bits() {
        4 => &NIBBLE_TILES,
        _ => &BYTE_TILES,
    }
}

/// Creates a tile of `mma.sync` with 0 stages.
const fn tile(batch_tiles: usize, warps_n: usize, warps_k: usize) -> Tile {
    Tile {
        batch_tiles,
        warps_n,
        warps_k,
        cluster: 1,
        stages: 0,
        product: Product::MmaSync,
    }
}

/// Creates a tile of `wgmma` with 0 stages.
const fn wgmma(batch_tiles: usize, warps_n: usize, warps_k: usize) -> Tile {
    Tile {
        product: Product::Wgmma,
        ..tile(batch_tiles, warps_n, warps_k)
    }
}

/// Creates a tile of `mma.sp.sync`, for a 2:4 weight, with 0 stages.
const fn sparse(batch_tiles: usize, warps_n: usize, warps_k: usize) -> Tile {
    Tile {
        product: Product::SparseMmaSync,
        ..tile(batch_tiles, warps_n, warps_k)
    }
}

/// Creates a tile of `wgmma.sp`, for a 2:4 weight, with 0 stages.
const fn sparse_wgmma(batch_tiles: usize, warps_n: usize, warps_k: usize) -> Tile {
    Tile {
        product: Product::SparseWgmma,
        ..tile(batch_tiles, warps_n, warps_k)
    }
}

/// Creates a tile of `mma.sync` of e4m3 with 0 stages.
const fn fp8_mma(batch_tiles: usize, warps_n: usize, warps_k: usize) -> Tile {
    Tile {
        product: Product::Fp8MmaSync,
        ..tile(batch_tiles, warps_n, warps_k)
    }
}

/// Creates a tile of `wgmma` of e4m3 with 0 stages.
const fn fp8_wgmma(batch_tiles: usize, warps_n: usize, warps_k: usize) -> Tile {
    Tile {
        product: Product::Fp8Wgmma,
        ..tile(batch_tiles, warps_n, warps_k)
    }
}

/// The tiles of [`expert_candidates`]. Their nanoseconds are a fit to both matmuls of a layer on an
/// H200 (Qwen3-30B-A3B, Mixtral 8x7B, gpt-oss-20b; 16 to 1024 tokens): those of `mma.sync` in
/// proportion to the first one's, those of `wgmma` such that the fastest of all tiles is chosen.
/// Tiles of 24, 40 and 80 rows are for experts that have about 16, 32 and 64 rows, of which random
/// routing gives many a few more.
const EXPERT_TILES: [(Tile, u32); 10] = [
    (tile(1, 2, 4), 75),
    (tile(1, 2, 6), 71),
    (tile(1, 2, 8), 69),
    (tile(1, 4, 2), 75),
    (tile(1, 4, 3), 67),
    (tile(1, 4, 4), 64),
    (wgmma(2, 8, 1), 64),
    (wgmma(3, 4, 2), 78),
    (wgmma(5, 8, 1), 105),
    (wgmma(10, 8, 1), 125),
];

/// Returns true if a tile can have the rows of experts in this order. With `mma.sync`, a lane of a
/// warp has a gathered row's token. The copy engine copies rows in their order alone: with a copy
/// for each gathered row, both matmuls of a layer of Qwen3-30B-A3B and 4096 tokens took 2177 us on
/// an H200, and 761 after a kernel that gathers. `wgmma` of eight rows was not timed.
pub(crate) fn takes_experts(tile: &Tile, rows: RowOrder) -> bool {
    BLOCK_ROWS.contains(&tile.rows())
        && match tile.product {
            Product::MmaSync => tile.rows() <= MAX_EXPERT_ROWS,
            Product::Wgmma => {
                rows == RowOrder::Sorted && tile.batch_tiles > 1 && !tile.is_clustered()
            }
            _ => false,
        }
}

/// Returns a tile whose K is split among the `cluster` blocks of a cluster.
const fn clustered(cluster: usize, tile: Tile) -> Tile {
    Tile { cluster, ..tile }
}

/// The maximum number of stages of a tile. More stages in flight gain nothing on an H200.
const MAX_STAGES: usize = 8;
/// The bytes of shared memory to which tiles of up to 64 rows are limited, if enough stages fit.
/// The rest is for blocks of the kernels before and after it in a pass, which overlap with it
/// ([programmatic dependent launch](crate::pdl)). A decode step of Llama 2 7B on an H200 with 16
/// sequences, in tokens/s: 7141 with 227 KB, 7780 with 160, 7640 with 112, 7390 with 90.
const FEW_ROWS_SHARED: usize = 160 * 1024;
/// The minimum number of steps by which copies run ahead of products.
const MIN_AHEAD: usize = 1;

/// Nanoseconds that a chunk of a tile takes, whatever its stages.
pub(crate) fn chunk_nanoseconds(tile: &Tile, value: WeightValue) -> f64 {
    let same = |other: &Tile| {
        Tile {
            stages: tile.stages,
            ..*other
        } == *tile
    };
    candidates(value)
        .iter()
        .chain(expert_candidates(value))
        .find(|(other, _)| same(other))
        .map_or(f64::INFINITY, |&(_, nanoseconds)| f64::from(nanoseconds))
}

/// Returns the tiles that only weights of 4 bits with experts use, with their nanoseconds. Their
/// even numbers of chunks of columns have gates and ups, which few rows without experts have in the
/// kernel of one row.
const fn expert_candidates(value: WeightValue) -> &'static [(Tile, u32)] {
    match value.bits() {
        4 => &EXPERT_TILES,
        _ => &[],
    }
}

/// The tiles for weights of a width that a card of compute capability `capability` can run with
/// rows of activations in an order.
fn tiles(capability: u32, value: WeightValue, rows: RowOrder) -> impl Iterator<Item = Tile> {
    let of_experts = if rows.has_experts() {
        expert_candidates(value)
    } else {
        &[]
    };
    candidates(value)
        .iter()
        .chain(of_experts)
        .map(|&(tile, _)| tile)
        .filter(move |tile| !rows.has_experts() || takes_experts(tile, rows))
        .filter(move |tile| capability == WGMMA_CAPABILITY || !tile.is_wgmma())
        .filter(move |tile| match tile.product {
            // Compute capability 9.0 has these products of e4m3 as products of f16 only.
            Product::Fp8MmaSync => capability >= FP8_CAPABILITY && capability != WGMMA_CAPABILITY,
            _ => true,
        })
}

/// Returns configurations of every tile that a card of compute capability `capability` can run, in
/// an arbitrary format and with each supported epilogue. The caller must use only properties that
/// do not depend on the format.
pub(crate) fn any_format(capability: u32) -> impl Iterator<Item = Config> {
    WeightValue::INTEGERS.into_iter().flat_map(move |value| {
        let format = move |tile: &Tile, epilogue| Format {
            group: GroupSize::Channel,
            value,
            zero_points: false,
            bf16: false,
            sparsity: tile.sparsity(),
            epilogue,
            rows: RowOrder::InOrder,
        };
        let epilogues =
            move |tile: Tile| Epilogue::ALL.map(|epilogue| format(&tile, epilogue).config(tile));
        tiles(capability, value, RowOrder::InOrder)
            .flat_map(epilogues)
            .filter(Config::takes_epilogue)
    })
}

/// Returns every configuration that can run on a card of compute capability `capability` (80 for
/// 8.0) with `shared_limit` bytes of shared memory per block, with rows of activations in an order.
pub fn configs(capability: u32, shared_limit: usize, rows: RowOrder) -> Vec<Config> {
    let formats = WeightValue::ALL.into_iter().flat_map(|value| {
        let groups = value
            .sparsities()
            .iter()
            .flat_map(move |&sparsity| value.groups().iter().map(move |&group| (sparsity, group)));
        groups.flat_map(move |(sparsity, group)| {
            let zero_points = value.zero_points().iter();
            zero_points.flat_map(move |&zero_point| {
                [false, true].map(|bf16| Format {
                    group,
                    value,
                    zero_points: zero_point == ZeroPoint::Integer,
                    bf16,
                    sparsity,
                    epilogue: Epilogue::None,
                    rows,
                })
            })
        })
    });
    // The models with the clamped SwiGLU are mixtures.
    let epilogues = Epilogue::ALL
        .into_iter()
        .filter(move |&epilogue| rows.has_experts() || epilogue != Epilogue::ClampedSwiGlu);
    let with_epilogues = formats.flat_map(|format| {
        let epilogues = epilogues.clone();
        epilogues.map(move |epilogue| Format { epilogue, ..format })
    });
    with_epilogues
        .flat_map(|format| format.configs(capability, shared_limit))
        .collect()
}

/// The part of a configuration that a problem determines; the rest is the tile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Format {
    pub group: GroupSize,
    pub value: WeightValue,
    pub zero_points: bool,
    pub bf16: bool,
    pub sparsity: Sparsity,
    pub epilogue: Epilogue,
    pub rows: RowOrder,
}

impl Format {
    /// Returns the configurations of all tiles that support this format and fit in `shared_limit`
    /// bytes of shared memory, with their number of stages.
    pub fn configs(self, capability: u32, shared_limit: usize) -> impl Iterator<Item = Config> {
        tiles(capability, self.value, self.rows)
            .filter(move |tile| tile.sparsity() == self.sparsity)
            .filter(move |tile| !tile.is_fp8() || self.value == WeightValue::E4m3)
            .map(move |tile| self.config(tile))
            .filter(Config::takes_epilogue)
            .filter_map(move |config| with_stages(config, shared_limit))
            .filter(move |config| !spills(config, capability))
    }

    /// Returns the configuration of this format with a tile.
    pub fn config(self, tile: Tile) -> Config {
        let Self {
            group,
            value,
            zero_points,
            bf16,
            epilogue,
            rows,
            ..
        } = self;
        Config {
            tile,
            group,
            value,
            zero_points,
            bf16,
            epilogue,
            rows,
        }
    }
}

/// Returns the configuration with as many stages as fit in `shared_limit` bytes; for up to 64 rows
/// in [`FEW_ROWS_SHARED`], if enough stages fit there. `None` if too few stages fit.
fn with_stages(config: Config, shared_limit: usize) -> Option<Config> {
    let stages_in = |limit: usize| {
        let room = limit.saturating_sub(config.end_bytes());
        let stages = (room / (config.stage_bytes() + config.barrier_bytes())).min(MAX_STAGES);
        (stages >= MIN_AHEAD + config.tile.stages_in_use()).then_some(stages)
    };
    let few_rows = if config.moves_registers() {
        None
    } else {
        stages_in(shared_limit.min(FEW_ROWS_SHARED))
    };
    let stages = few_rows.or_else(|| stages_in(shared_limit))?;
    Some(Config {
        tile: Tile {
            stages,
            ..config.tile
        },
        ..config
    })
}
