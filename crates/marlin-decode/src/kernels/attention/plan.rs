//! How an attention is cut into blocks, from its shape and the device alone.

use super::shape::{AttentionShape, MAX_HEAD_DIM, VECTOR};
use crate::kernels::shape::shared_memory;
use cubecl::client::Client;
use cubecl::ir::{ElemType, UIntKind};
use marlin_kernels::planes::Planes;
use marlin_kernels::problem::expect_at_most;
use marlin_kernels::{ActivationDtype, KernelError, Runtime, Target};

/// Most shares of a sequence.
pub(super) const MAX_SHARES: usize = 128;
/// Fewest positions of a share but the last: two tiles, about what it costs two shares to meet. Estimated, not measured.
const MIN_SHARE: usize = 128;
/// Most positions of a share where no other bound holds: one long sequence in a large batch is still cut.
const MAX_SHARE: usize = 8192;
/// Registers of a multiprocessor of NVIDIA's cards.
const REGISTERS: usize = 65536;
/// Registers of a thread that the grid is made for, in blocks of 256 threads and of fewer: what these kernels take at most, so that all blocks run
/// at once.
const THREAD_REGISTERS: [usize; 2] = [128, 168];
/// Vectors of f32 that the teams' outputs may take in shared memory: 32 KiB.
const SHARED_VECTORS: usize = 1024;
/// Shared memory that a block takes at most.
const WANTED_SHARED: usize = 48 * 1024;
/// Vectors of f32 that a lane holds as its output.
const OUTPUT_VECTORS: usize = 8;

/// What a plan needs to know of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionTarget {
    /// Multiprocessors that one launch can spread a sequence over; 1 where blocks of a launch cannot rely on each other's writes.
    pub multiprocessors: usize,
    /// Units that can shuffle values among them; 1 where none can.
    pub plane: usize,
    /// Most units of a block.
    pub units: usize,
}

impl AttentionTarget {
    /// Multiprocessors of a device that does not say how many it has.
    const SOME: usize = 32;

    /// The target behind a CubeCL client.
    pub fn of(client: &Client) -> Self {
        let properties = client.properties();
        let (features, hardware) = (&properties.features, &properties.hardware);
        let plane = Planes::of(client).size;
        let multiprocessors = hardware.num_streaming_multiprocessors.map_or(Self::SOME, |count| count as usize);
        Self {
            multiprocessors: if features.device_memory_scope { multiprocessors } else { 1 },
            plane,
            units: Self::units(hardware.max_units_per_cube as usize, shared_memory(client), plane),
        }
    }

    /// Most units of a block where it has `shared` bytes of shared memory. What the teams leave for each other then takes half of it.
    fn units(most: usize, shared: usize, plane: usize) -> usize {
        if shared >= WANTED_SHARED {
            return most;
        }
        let vectors = if plane > 1 { OUTPUT_VECTORS } else { MAX_HEAD_DIM / VECTOR };
        most.min(shared / 2 / (vectors * VECTOR * size_of::<f32>())).max(1)
    }
}

/// What keys and values are read as, kept as until they are used, and written as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Held {
    /// What holds a part of a vector.
    pub elem: ElemType,
    /// How many hold a vector.
    pub size: usize,
}

impl Held {
    /// Words of 32 bits: CUDA's compiler takes halves apart, and so waits for them, right where they are loaded.
    pub(super) fn words(dtype: ActivationDtype) -> Self {
        Self { elem: ElemType::UInt(UIntKind::U32), size: VECTOR * dtype.elem().size() / size_of::<u32>() }
    }

    /// The elements themselves, which need no other type of the same bits.
    fn elements(dtype: ActivationDtype) -> Self {
        Self { elem: dtype.elem(), size: VECTOR }
    }

    /// What suits a client's runtime.
    pub(super) fn on(client: &Client, dtype: ActivationDtype) -> Self {
        if Target::of(client).runtime == Runtime::Cuda { Self::words(dtype) } else { Self::elements(dtype) }
    }
}

/// What a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionConfig {
    /// Features of a head.
    pub head_dim: usize,
    /// Features of a head that are turned.
    pub rotary_dim: usize,
    /// Query heads of a block.
    pub heads: usize,
    /// Blocks that have a key head's query heads between them.
    pub parts: usize,
    /// Lanes of a team: a power of two.
    pub lanes: usize,
    /// Threads of a block.
    pub threads: usize,
    /// Positions that a team reads at a time.
    pub positions: usize,
    /// Whether a sequence may have several shares.
    pub is_shared: bool,
    /// Whether elements in a buffer or in shared memory are read and written as vectors, too. CubeCL 0.11.3 compiles such a view to no shader.
    pub has_views: bool,
}

impl AttentionConfig {
    fn new(shape: &AttentionShape, target: &AttentionTarget, is_shared: bool) -> Self {
        let vectors = shape.head_dim / VECTOR;
        let lanes = vectors.next_power_of_two().min(power_of_two_below(target.plane));
        let lane_vectors = vectors.div_ceil(lanes);
        let group = shape.heads / shape.kv_heads;
        let most = (OUTPUT_VECTORS / lane_vectors).max(1);
        // More heads than a block holds are cut evenly, and each part reads the keys again.
        let heads = (1..=group.min(most)).rev().find(|heads| group.is_multiple_of(*heads)).unwrap_or(1);
        let threads = if heads * lane_vectors <= 4 { 256 } else { 128 };
        let threads = power_of_two_below(threads.min(target.units).min(SHARED_VECTORS / (lane_vectors * heads)));
        let positions = if lanes == 1 {
            1
        } else if heads * lane_vectors <= 4 && shape.dtype != ActivationDtype::F32 {
            4
        } else {
            2
        };
        Self {
            head_dim: shape.head_dim,
            rotary_dim: shape.rotary_dim,
            heads,
            parts: group / heads,
            lanes: lanes.min(threads),
            threads,
            positions,
            is_shared,
            has_views: true,
        }
    }

    /// Teams of a block.
    pub(super) const fn teams(&self) -> usize {
        self.threads / self.lanes
    }

    /// Vectors of a head.
    pub(super) const fn vectors(&self) -> usize {
        self.head_dim / VECTOR
    }

    /// Vectors of a head that a lane has, at most.
    pub(super) const fn lane_vectors(&self) -> usize {
        self.vectors().div_ceil(self.lanes)
    }

    /// Whether every lane has as many.
    pub(super) const fn is_even(&self) -> bool {
        self.vectors().is_multiple_of(self.lanes)
    }

    /// Whether loops over what a lane holds are written out, so that it stays in registers. A lone unit, which has whole heads, keeps it in memory.
    pub(super) const fn unrolls(&self) -> bool {
        self.heads * self.lane_vectors() <= OUTPUT_VECTORS
    }

    /// Elements that a share leaves in the workspace: its heads' outputs, then a maximum and a sum each.
    pub(super) const fn partial(&self) -> usize {
        self.heads * (self.head_dim + 2)
    }
}

/// The largest power of two that is not above `value`, which is at least 1.
fn power_of_two_below(value: usize) -> usize {
    1 << value.max(1).ilog2()
}

/// How an attention is launched. It stays as it is while sequences grow, so that a graph can hold it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionPlan {
    /// What the kernel is compiled for.
    pub config: AttentionConfig,
    /// The grid: shares, groups of query heads, rows.
    pub blocks: [usize; 3],
    /// Shares that a sequence is cut into while each has [`AttentionPlan::share`] positions or fewer.
    pub shares: usize,
    /// The fewest and the most positions of a share. Longer sequences have more shares, up to the grid's.
    pub share: [usize; 2],
}

impl AttentionPlan {
    /// The plan for a shape on a device.
    ///
    /// Sequences are cut so that the blocks of all rows fill the device once. Where the rows alone do so, only long sequences are cut.
    ///
    /// # Errors
    /// A shape that [`AttentionShape::check`] refuses, or partials of more elements than 32 bits count.
    pub fn new(shape: &AttentionShape, target: &AttentionTarget) -> Result<Self, KernelError> {
        shape.check()?;
        let config = AttentionConfig::new(shape, target, target.multiprocessors > 1);
        let groups = shape.heads / config.heads;
        let longest = shape.longest().max(1);
        if !config.is_shared {
            return Ok(Self { config, blocks: [1, groups, shape.rows], shares: 1, share: [longest, longest] });
        }
        let registers = if config.threads >= 256 { THREAD_REGISTERS[0] } else { THREAD_REGISTERS[1] };
        let slots = target.multiprocessors * (REGISTERS / (registers * config.threads)).max(1);
        let shares = (slots / (groups * shape.rows).max(1)).clamp(1, MAX_SHARES);
        let most = MAX_SHARE.max(longest.div_ceil(MAX_SHARES));
        let grid = shares.min(longest.div_ceil(MIN_SHARE)).max(longest.div_ceil(most));
        let config = AttentionConfig { is_shared: grid > 1, ..config };
        let plan = Self { config, blocks: [grid, groups, shape.rows], shares, share: [MIN_SHARE, most] };
        expect_at_most(shape, plan.partials(), u32::MAX as usize)?;
        Ok(plan)
    }

    /// Elements, in f32, of the buffer in which shares of a sequence leave what they have. What it holds before and after a launch does not matter.
    pub fn partials(&self) -> usize {
        let [shares, groups, rows] = self.blocks;
        if self.config.is_shared { shares * groups * rows * self.config.partial() } else { 1 }
    }

    /// Elements, in u32, of the buffer of tickets: zero before the first launch, and after each.
    pub fn tickets(&self) -> usize {
        let [_, groups, rows] = self.blocks;
        if self.config.is_shared { groups * rows } else { 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: AttentionTarget = AttentionTarget { multiprocessors: 132, plane: 32, units: 1024 };
    const CPU: AttentionTarget = AttentionTarget { multiprocessors: 1, plane: 1, units: 2 };

    fn shape(rows: usize, heads: usize, kv_heads: usize, max_len: usize) -> AttentionShape {
        AttentionShape {
            rows,
            heads,
            kv_heads,
            head_dim: 128,
            rotary_dim: 128,
            slots: rows,
            max_len,
            max_positions: max_len,
            window: None,
            norm_epsilon: None,
            dtype: ActivationDtype::F16,
        }
    }

    fn plan(shape: &AttentionShape, target: &AttentionTarget) -> AttentionPlan {
        AttentionPlan::new(shape, target).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The length of a share and how many there are, as the kernel works them out.
    fn shares(plan: &AttentionPlan, cached: usize) -> (usize, usize) {
        let share = (cached / plan.shares + 1).clamp(plan.share[0], plan.share[1]).next_multiple_of(plan.config.teams());
        (share, cached.div_ceil(share).max(1))
    }

    #[test]
    fn every_length_has_its_shares_in_the_grid() {
        for target in [H200, AttentionTarget { multiprocessors: 3, ..H200 }, CPU] {
            for rows in [1, 3, 16, 128] {
                for (heads, kv_heads) in [(32, 32), (32, 8), (64, 8), (28, 4), (6, 6)] {
                    for max_len in [1, 2, 129, 576, 4096, 131_072, 2_000_000] {
                        for window in [None, Some(1), Some(1000)] {
                            let shape = AttentionShape { window, ..shape(rows, heads, kv_heads, max_len) };
                            let plan = plan(&shape, &target);
                            assert!(plan.blocks[0] <= MAX_SHARES, "{shape}: {plan:?}");
                            let longest = shape.longest();
                            for cached in (0..=longest.min(3000)).chain((0..=longest).rev().step_by(997)) {
                                let (share, count) = shares(&plan, cached);
                                assert!(count <= plan.blocks[0], "{shape}, {cached} cached: {count} shares of {share} in {plan:?}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn few_rows_are_cut_and_many_are_not() {
        let blocks = |rows, heads, max_len| plan(&shape(rows, heads, heads, max_len), &H200).blocks[0];
        assert_eq!(blocks(1, 32, 65_536), 8);
        assert_eq!(blocks(1, 8, 131_072), 33);
        assert_eq!(blocks(1, 32, 576), 5);
        assert_eq!(blocks(128, 32, 576), 1);
        // One long sequence among many is still cut.
        assert_eq!(blocks(128, 32, 131_072), 16);
    }

    #[test]
    fn a_runtime_without_exchange_has_one_share() {
        let plan = plan(&shape(1, 32, 8, 131_072), &CPU);
        assert_eq!((plan.blocks, plan.config.is_shared, plan.partials(), plan.tickets()), ([1, 32, 1], false, 1, 1));
        assert_eq!((plan.config.lanes, plan.config.threads), (1, 2));
    }

    #[test]
    fn little_shared_memory_makes_small_blocks() {
        assert_eq!(AttentionTarget::units(1024, 48 * 1024, 32), 1024);
        assert_eq!(AttentionTarget::units(1024, 32 * 1024, 32), 64);
        assert_eq!(AttentionTarget::units(1024, 32 * 1024, 1), 8);
    }

    #[test]
    fn every_group_of_heads_is_covered() {
        for target in [H200, CPU] {
            for group in 1..=16 {
                for head_dim in (8..=512).step_by(8) {
                    let shape = AttentionShape { head_dim, rotary_dim: head_dim, ..shape(1, 2 * group, 2, 64) };
                    let config = plan(&shape, &target).config;
                    assert!(group.is_multiple_of(config.heads), "{shape}: {config:?}");
                    assert!(config.lanes * config.lane_vectors() * VECTOR >= head_dim, "{shape}: {config:?}");
                    let shared = 4 * config.teams() * config.heads * head_dim;
                    assert!(shared <= 32 * 1024, "{shape}: {config:?}");
                    assert!(config.threads.is_multiple_of(config.lanes) && config.threads >= target.plane, "{shape}: {config:?}");
                }
            }
        }
    }

    #[test]
    fn shapes_without_sense_are_refused() {
        let good = shape(2, 8, 4, 64);
        assert_eq!(good.check(), Ok(()));
        for bad in [
            AttentionShape { kv_heads: 3, ..good },
            AttentionShape { kv_heads: 0, ..good },
            AttentionShape { head_dim: 100, rotary_dim: 100, ..good },
            AttentionShape { head_dim: 520, ..good },
            AttentionShape { rotary_dim: 130, ..good },
            AttentionShape { rotary_dim: 7, ..good },
            AttentionShape { max_positions: 63, ..good },
            AttentionShape { window: Some(0), ..good },
            AttentionShape { max_len: 0, ..good },
        ] {
            assert!(matches!(bad.check(), Err(KernelError::Shape { .. })), "{bad}");
        }
        for large in [
            AttentionShape { max_len: 1 << 31, max_positions: 1 << 31, ..good },
            AttentionShape { slots: usize::MAX, ..good },
            AttentionShape { rows: 60_000, heads: 60_000, kv_heads: 60_000, ..good },
        ] {
            assert!(matches!(large.check(), Err(KernelError::TooLarge { .. })), "{large}");
        }
    }
}
