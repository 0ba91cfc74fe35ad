use marlin_format::Sparsity;
use std::fmt;

/// The number of stored rows of K in a chunk. A chunk, 64 stored rows by 64 columns, is the part of
/// the weight that one warp (two with 128 rows of activations, four with 256) multiplies in one
/// stage. A 2:4 weight stores 64 of 128 rows.
pub(crate) const CHUNK_K: usize = 64;
/// The number of columns of a chunk, equal to the columns of a tile of
/// [`MarlinLayout`](marlin_format::layout::MarlinLayout).
pub(crate) const CHUNK_N: usize = 64;
/// The number of steps in which a chunk is multiplied, each of 16 stored rows of K.
pub(crate) const CHUNK_STEPS: usize = CHUNK_K / 16;
/// The number of bytes of a tile of [`MarlinLayout`](marlin_format::layout::MarlinLayout). Tiles
/// that are side by side along N are contiguous in memory.
pub(crate) const TILE_BYTES: usize = 16 * CHUNK_N / 2;
/// The number of bytes of a stage's two barriers, `full` and `empty`.
pub(crate) const BARRIER_BYTES: usize = 16;
/// The number of rows of metadata tiles ([`SparseLayout`](marlin_format::layout::SparseLayout)) in
/// a chunk of a 2:4 weight. A metadata tile covers 64 rows of K and has as many bytes as a tile of
/// values.
pub(crate) const METADATA_ROWS: usize = 2;
/// The number of values of a row of activations that are contiguous in shared memory, for `wgmma`.
pub(crate) const ATOM_K: usize = 64;
/// The number of bytes of [`ATOM_K`] values.
pub(crate) const ATOM_ROW_BYTES: usize = ATOM_K * 2;
/// The number of padding floats after each row of the reduction buffer. The padding places the four
/// rows that a store touches in different banks.
pub(crate) const REDUCE_PADDING: usize = 4;

/// The division of a block's work, fixed when the kernel is compiled.
///
/// A block computes a tile of `8 * batch_tiles` rows of activations by `64 * warps_n` columns, in
/// steps of `64 * warps_k` stored rows of K. Warp `w` multiplies 64 columns, the run with the index
/// `w % warps_n`, and 64 stored rows of each step, the run with the index `w / warps_n`. With more
/// than 64 rows of activations, a warp has registers for the sums of only 32 columns, half a chunk,
/// and with more than 128 for those of 16: see [`sub_tiles`](Self::sub_tiles).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tile {
    /// The number of n8 tiles, each of eight rows of activations: 1 or an even number, and any with
    /// `wgmma`.
    pub batch_tiles: usize,
    /// The number of warps side by side along N.
    pub warps_n: usize,
    /// The number of warps along K, whose sums are added in shared memory.
    pub warps_k: usize,
    /// The number of blocks of a cluster. The blocks of a cluster compute one tile: they split its
    /// K and add their sums through distributed shared memory (`cluster.rs`). 1 if each block
    /// computes a stripe and blocks exchange sums through global memory.
    pub cluster: usize,
    /// The number of stages of the copy pipeline.
    pub stages: usize,
    /// The instruction that multiplies.
    pub product: Product,
}

/// The instruction that multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Product {
    /// `mma.sync`: each warp multiplies independently. Every card supports it.
    MmaSync,
    /// `wgmma`: the four warps of a warpgroup, side by side along N, multiply the same rows of K
    /// together. Only compute capability 9.0 supports it.
    Wgmma,
    /// `mma.sp.sync`: like `mma.sync`, for a 2:4 weight.
    SparseMmaSync,
    /// `wgmma.sp`: like `wgmma`, for a 2:4 weight.
    SparseWgmma,
    /// `mma.sync` with weights and activations in e4m3 (W8A8). Cards support it from compute
    /// capability 8.9 on.
    Fp8MmaSync,
    /// `wgmma` with weights and activations in e4m3.
    Fp8Wgmma,
}

impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::MmaSync => "mma.sync",
            Self::Wgmma => "wgmma",
            Self::SparseMmaSync => "mma.sp",
            Self::SparseWgmma => "wgmma.sp",
            Self::Fp8MmaSync => "mma.sync e4m3",
            Self::Fp8Wgmma => "wgmma e4m3",
        })
    }
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let product = if self.product == Product::MmaSync {
            String::new()
        } else {
            format!(", {}", self.product)
        };
        let cluster = if self.cluster == 1 {
            String::new()
        } else {
            format!(", clusters of {}", self.cluster)
        };
        write!(
            f,
            "{} x {} x {}, {} stages{product}{cluster}",
            self.rows(),
            self.columns(),
            self.depth(),
            self.stages
        )
    }
}

impl Tile {
    /// Returns the number of rows of activations in a tile.
    pub const fn rows(&self) -> usize {
        8 * self.batch_tiles
    }

    /// Returns the number of columns of a tile.
    pub const fn columns(&self) -> usize {
        16 * self.sub_tiles() * self.warps_n
    }

    /// Returns the number of sub-tiles of 16 columns that a warp multiplies: the four of a chunk,
    /// two with more than 64 rows of activations, or one with more than 128.
    pub const fn sub_tiles(&self) -> usize {
        match self.batch_tiles {
            0..=8 => 4,
            9..=16 => 2,
            _ => 1,
        }
    }

    /// Returns the number of chunks of a tile along N.
    pub const fn chunks_n(&self) -> usize {
        self.columns() / CHUNK_N
    }

    /// Returns the number of chunks of a step.
    pub const fn chunks(&self) -> usize {
        self.chunks_n() * self.warps_k
    }

    /// Returns the number of stored rows of K in a chunk: 64, or 128 with activations in e4m3, of
    /// which 128 bytes hold twice as many.
    pub const fn stored_chunk_rows(&self) -> usize {
        if self.is_fp8() { 2 * CHUNK_K } else { CHUNK_K }
    }

    /// Returns the number of rows of K in a chunk: the stored rows, or twice as many for a 2:4
    /// weight.
    pub const fn chunk_rows(&self) -> usize {
        if self.is_sparse() {
            2 * CHUNK_K
        } else {
            self.stored_chunk_rows()
        }
    }

    /// Returns the number of bytes of an activation in a stage.
    pub const fn activation_bytes(&self) -> usize {
        if self.is_fp8() { 1 } else { 2 }
    }

    /// Returns the number of boxes of activations of a chunk, each of 128 bytes of every row.
    pub const fn atoms(&self) -> usize {
        self.chunk_rows() * self.activation_bytes() / ATOM_ROW_BYTES
    }

    /// Returns the number of rows of K in a step.
    pub const fn depth(&self) -> usize {
        self.chunk_rows() * self.warps_k
    }

    /// Returns the number of rows of metadata tiles in a chunk; 0 for a dense weight.
    pub(crate) const fn metadata_rows(&self) -> usize {
        if self.is_sparse() { METADATA_ROWS } else { 0 }
    }

    /// Returns the number of warps of a block that multiply.
    pub const fn warps(&self) -> usize {
        self.warps_n * self.warps_k
    }

    /// Returns true if blocks compute whole tiles in waves, one tile per block in each wave, and
    /// only the remaining tiles are divided into stripes. Tiles of few rows have no waves because
    /// there are few of these tiles, and clusters have none because each computes a single tile.
    pub const fn has_waves(&self) -> bool {
        self.batch_tiles > 8 && !self.is_clustered()
    }

    /// Returns true if the blocks of a cluster split K.
    pub const fn is_clustered(&self) -> bool {
        self.cluster > 1
    }

    /// Returns true if warpgroups multiply (`wgmma`).
    pub const fn is_wgmma(&self) -> bool {
        matches!(
            self.product,
            Product::Wgmma | Product::SparseWgmma | Product::Fp8Wgmma
        )
    }

    /// Returns true if weights and activations are multiplied in e4m3.
    pub const fn is_fp8(&self) -> bool {
        matches!(self.product, Product::Fp8MmaSync | Product::Fp8Wgmma)
    }

    /// Returns true if the weight is 2:4.
    pub const fn is_sparse(&self) -> bool {
        matches!(self.product, Product::SparseMmaSync | Product::SparseWgmma)
    }

    /// Returns the sparsity of the weights that the tile supports.
    pub const fn sparsity(&self) -> Sparsity {
        if self.is_sparse() {
            Sparsity::TwoFour
        } else {
            Sparsity::Dense
        }
    }

    /// Returns the number of stages that no copy may fill: the stage that is being multiplied and,
    /// with asynchronous products, the preceding stage.
    pub(crate) fn stages_in_use(&self) -> usize {
        if self.is_wgmma() { 2 } else { 1 }
    }

    /// Returns the number of threads of a block that multiply.
    pub const fn threads(&self) -> usize {
        32 * self.warps()
    }
}
