use super::conversion::Conversion;
use super::rows::RowOrder;
use super::shape::{
    ATOM_ROW_BYTES, BARRIER_BYTES, CHUNK_N, CHUNK_STEPS, Product, REDUCE_PADDING, TILE_BYTES, Tile,
};
use crate::{ActivationDtype, Epilogue};
#[cfg(feature = "cubecl-runtime")]
use cubecl::prelude::CubeDim;
use marlin_format::{GroupSize, WeightValue};

/// The compile-time configuration of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// The division of work.
    pub tile: Tile,
    /// Rows of K that share a scale.
    pub group: GroupSize,
    /// Width of a weight.
    pub value: WeightValue,
    /// True if the weight has zero points; otherwise they are the middle everywhere: 8 or 128, or 0
    /// for floats.
    pub zero_points: bool,
    /// True if activations, scales, bias and output are in bf16; otherwise f16.
    pub bf16: bool,
    /// The operation on the output.
    pub epilogue: Epilogue,
    /// The rows of activations, and the matrices that they are multiplied by.
    pub rows: RowOrder,
}

/// The layout of shared memory, in order: the stages, each with weights, metadata, scales, zero
/// points and activations; the reduction buffer; the barriers of the stages; and the sums that a
/// block of a cluster receives from the other blocks, with a barrier.
impl Config {
    /// Returns true if a dedicated warp, the producer, copies and all other warps multiply.
    ///
    /// Each quarter of a multiprocessor has its own registers. With one more warp for the producer,
    /// a quarter has three warps of 168 registers per thread, or four of 128. If the sums do not
    /// fit in these registers, the warps that multiply share the copies, or a warpgroup of
    /// producers gives its registers to the other warpgroups.
    pub fn has_producer(&self) -> bool {
        self.tile.is_wgmma()
            && (self.tile.batch_tiles * self.tile.warps() <= 32 || self.tile.sub_tiles() < 4)
    }

    /// Returns true if a whole warpgroup is the producer. Only one of its warps copies. The
    /// warpgroup's registers go to the two warpgroups that multiply (`setmaxnreg`). With
    /// 80 rows, the sums of these fit in their own.
    pub fn moves_registers(&self) -> bool {
        self.tile.is_wgmma() && self.tile.batch_tiles > 10
    }

    /// Returns true if the epilogue is a SwiGLU: half of a tile's columns are gates, the other half
    /// the corresponding ups.
    pub const fn is_gated(&self) -> bool {
        self.epilogue.is_gated()
    }

    /// Returns true if the tile supports the epilogue. SwiGLU requires an even number of chunks
    /// along N, half of them gates and half ups.
    pub const fn takes_epilogue(&self) -> bool {
        !self.is_gated() || self.tile.chunks_n().is_multiple_of(2)
    }

    /// Returns true if a weight's N columns divide into tiles.
    pub(crate) const fn takes_columns(&self, n: usize) -> bool {
        n.is_multiple_of(self.column_multiple())
    }

    /// Returns the number of which N must be a multiple. With SwiGLU, gates fill one half of each
    /// tile and the corresponding ups the other half; with experts, the last tile of `wgmma` may
    /// have fewer.
    const fn column_multiple(&self) -> usize {
        if !self.is_gated() {
            1
        } else if self.has_partial_gates() {
            2 * CHUNK_N
        } else {
            self.tile.columns()
        }
    }

    /// Returns true if the last tile along N may have fewer gates and ups than the others.
    pub(crate) const fn has_partial_gates(&self) -> bool {
        self.is_gated() && self.tile.is_wgmma() && self.rows.has_experts()
    }

    /// Returns the number of output columns of the tile.
    pub const fn output_columns(&self) -> usize {
        self.tile.columns() / self.epilogue.columns()
    }

    /// Returns the dtype of activations, scales, bias and output.
    pub fn dtype(&self) -> ActivationDtype {
        if self.bf16 {
            ActivationDtype::BF16
        } else {
            ActivationDtype::F16
        }
    }

    /// Returns the conversion of the weight's values to the dtype of the activations.
    pub(crate) const fn conversion(&self) -> Conversion {
        // Cards with `wgmma` have the instruction from e4m3.
        Conversion::new(self.value, self.bf16, self.tile.is_wgmma())
    }

    /// Threads of a block.
    pub fn block_threads(&self) -> usize {
        let producers = match self.has_producer() {
            true if self.moves_registers() => 128,
            true => 32,
            false => 0,
        };
        self.tile.threads() + producers
    }

    /// Returns the number of tiles of words, one below the other, that a step of a chunk reads. A
    /// tile of 8-bit values has only 8 stored rows, so a step of 16 reads two, and one of 32, with
    /// activations in e4m3, four.
    pub(crate) const fn tiles_in_step(&self) -> usize {
        match self.value.bits() {
            4 => 1,
            _ if self.tile.is_fp8() => 4,
            _ => 2,
        }
    }

    /// Returns the number of rows of tiles of words in a chunk.
    pub(crate) const fn word_rows(&self) -> usize {
        CHUNK_STEPS * self.tiles_in_step()
    }

    /// Returns the number of groups in a chunk; 1 if a group has at least as many rows as a chunk.
    pub const fn groups_in_chunk(&self) -> usize {
        match (self.group, self.tile.chunk_rows()) {
            (GroupSize::G16, rows) => rows / 16,
            (GroupSize::G32, rows) => rows / 32,
            (GroupSize::G64, rows) => rows / 64,
            _ => 1,
        }
    }

    /// Returns true if scales are copied into the stages with the weight. Otherwise the weight has
    /// a single group, and its scales are applied once at the end.
    pub(crate) fn grouped(&self) -> bool {
        self.group != GroupSize::Channel
    }

    /// Returns true if a group's products are summed separately and scaled in f32. For few rows of
    /// activations, this takes fewer instructions than scaling the weights. For many rows, it needs
    /// more registers than there are. With two groups in a chunk, the sums are scaled twice as
    /// often.
    pub fn scales_sums(&self) -> bool {
        let most = match (self.groups_in_chunk(), self.tile.product) {
            (1, Product::MmaSync | Product::SparseMmaSync) => 4,
            // Accumulators can be read only between groups, if a group's first product replaces
            // them. `wgmma.sp` always adds to its accumulators.
            (_, Product::SparseWgmma) => 0,
            // Sums are added up outside the tensor cores every 128 rows of K in any case.
            (_, Product::Fp8MmaSync | Product::Fp8Wgmma) => usize::MAX,
            (_, Product::Wgmma) if self.value != WeightValue::Int4 => 0,
            (1, Product::Wgmma) => 2,
            (_, Product::MmaSync) if self.value == WeightValue::E2m1 => 2,
            _ => 1,
        };
        self.grouped() && self.tile.batch_tiles <= most
    }

    /// Returns true if the stored values are multiplied directly, and the zero points are
    /// subtracted from a group's sums. A pair of weights then takes one instruction instead of two,
    /// at the cost of one further product with all activations. On an H200 this reduces the time of
    /// large weights by 8 to 18 % with 16 rows of activations, and increases it by 4 to 28 % with
    /// 32.
    ///
    /// Three kinds of weights are excluded. With a single group, the sums of a whole column would
    /// lose too much precision when the zero points are subtracted. With a 2:4 weight, each column
    /// needs the sum of different activations, which would double the number of products. With 8
    /// bits, a stored byte is not part of a number that tensor cores multiply.
    pub fn multiplies_subnormals(&self) -> bool {
        self.scales_sums()
            && self.tile.batch_tiles <= 2
            && !self.tile.is_sparse()
            && self.value == WeightValue::Int4
    }

    /// Returns true if the bits of floats are multiplied as f16, and the sums are multiplied by the
    /// power of two that makes them the numbers. Sums of bf16 would leave the range of f32, and
    /// scales would leave that of f16.
    pub(crate) fn lifts_sums(&self) -> bool {
        self.conversion().needs_lift()
            && !self.tile.is_fp8()
            && !self.bf16
            && (self.scales_sums() || !self.grouped())
    }

    /// Returns true if a warp multiplies the two chunks of a group in two consecutive steps, so
    /// that its sums are scaled half as often.
    pub(crate) fn pairs_steps(&self) -> bool {
        self.tile.is_wgmma()
            && self.tile.batch_tiles > 1
            && self.multiplies_subnormals()
            && self.group == GroupSize::G128
    }

    /// Returns the number of steps for `chunks` chunks along K.
    pub(crate) fn steps(&self, chunks: usize) -> usize {
        let in_step = self.tile.warps_k;
        if self.pairs_steps() {
            2 * chunks.div_ceil(2 * in_step)
        } else {
            chunks.div_ceil(in_step)
        }
    }

    /// Returns the offset of the metadata in a stage, in bytes.
    pub(crate) const fn metadata_offset(&self) -> usize {
        self.tile.chunks() * self.word_rows() * TILE_BYTES
    }

    /// Returns the offset of the scales in a stage, in bytes.
    pub(crate) const fn scales_offset(&self) -> usize {
        self.metadata_offset() + self.tile.chunks() * self.tile.metadata_rows() * TILE_BYTES
    }

    /// Returns the number of bytes of a chunk's scales in a stage: for each group, 64 columns of 2
    /// bytes.
    pub(crate) fn scales_bytes(&self) -> usize {
        if self.grouped() {
            self.groups_in_chunk() * CHUNK_N * 2
        } else {
            0
        }
    }

    /// Returns the offset of the zero points in a stage, in bytes.
    pub(crate) fn zeros_offset(&self) -> usize {
        self.scales_offset() + self.tile.chunks() * self.scales_bytes()
    }

    /// Returns the number of bytes of the zero points of 64 columns in a group.
    pub(crate) const fn group_zeros_bytes(&self) -> usize {
        CHUNK_N / self.value.per_word() * 4
    }

    /// Returns the number of bytes of a chunk's zero points in a stage.
    pub(crate) fn zeros_bytes(&self) -> usize {
        if self.zero_points {
            self.groups_in_chunk() * self.group_zeros_bytes()
        } else {
            0
        }
    }

    /// Returns the number of bytes of a chunk with its metadata, scales and zero points.
    pub(crate) fn chunk_bytes(&self) -> usize {
        (self.word_rows() + self.tile.metadata_rows()) * TILE_BYTES
            + self.scales_bytes()
            + self.zeros_bytes()
    }

    /// Returns the offset of the activations in a stage, in bytes.
    pub(crate) fn activations_offset(&self) -> usize {
        (self.zeros_offset() + self.tile.chunks() * self.zeros_bytes())
            .next_multiple_of(self.alignment())
    }

    /// Returns the alignment of stages, and of the activations in a stage, in bytes: a run of eight
    /// values for `ldmatrix`, or eight rows of an atom for the swizzle of `wgmma`.
    pub(crate) fn alignment(&self) -> usize {
        if self.tile.is_wgmma() {
            ATOM_ROW_BYTES * 8
        } else {
            16
        }
    }

    /// Returns the number of bytes of a stage.
    pub(crate) fn stage_bytes(&self) -> usize {
        self.activations_offset() + self.activation_bytes()
    }

    /// Returns the number of bytes of the activations in a stage.
    pub(crate) const fn activation_bytes(&self) -> usize {
        self.tile.rows() * self.tile.depth() * self.tile.activation_bytes()
    }

    /// Returns the number of bytes of the barriers of a stage; 0 without `wgmma`.
    pub(crate) fn barrier_bytes(&self) -> usize {
        if self.tile.is_wgmma() {
            BARRIER_BYTES
        } else {
            0
        }
    }

    /// Returns the number of floats from one row of the reduction buffer to the next.
    pub(crate) const fn reduce_stride(&self) -> usize {
        self.tile.columns() + REDUCE_PADDING
    }

    /// Returns the number of floats of eight rows in the reduction buffer, for each warp along K.
    pub(crate) const fn eight_rows_floats(&self) -> usize {
        self.tile.warps_k * 8 * self.reduce_stride()
    }

    /// Returns the number of floats of the reduction buffer: eight rows, or twice eight rows, so
    /// that the next eight are stored while these are read. The blocks of a cluster have no room
    /// for more.
    pub(crate) const fn reduce_floats(&self) -> usize {
        if self.has_runs() && !self.tile.is_clustered() {
            2 * self.eight_rows_floats()
        } else {
            self.eight_rows_floats()
        }
    }

    /// Returns the number of bytes of shared memory of a block.
    pub fn shared_bytes(&self) -> usize {
        self.tile.stages * (self.stage_bytes() + self.barrier_bytes()) + self.end_bytes()
    }

    /// Returns the number of bytes of shared memory for the end of a tile: the reduction buffer,
    /// and the sums that a block of a cluster receives.
    pub(crate) fn end_bytes(&self) -> usize {
        let exchange = if self.tile.is_clustered() {
            self.received_bytes() + 8
        } else {
            0
        };
        self.reduce_floats() * 4 + exchange
    }

    /// Returns the dimensions of a cluster.
    #[cfg(feature = "cubecl-runtime")]
    pub(crate) fn cluster_dim(&self) -> CubeDim {
        CubeDim::new_1d(self.tile.cluster as u32)
    }
}
