//! The division of an attention into blocks, which depends only on the shape and the device.

use super::config::{AttentionConfig, AttentionTarget};
use super::shape::{AttentionPass, AttentionShape};
use marlin_kernels::KernelError;
use marlin_kernels::problem::{MAX_ELEMENTS, expect_at_most};

/// The maximum number of splits of a sequence.
pub(super) const MAX_SPLITS: usize = 128;
/// The minimum number of positions of a split other than the last: two tiles. A step of Llama 2 7B
/// with one sequence on an H100, mean of positions 64 to 576, takes 1.639 ms with this value, and
/// 1.655, 1.672 and 1.685 ms with 192, 256 and 512. The mean of positions 64 to 320 does not depend
/// on the value.
const MIN_SPLIT_LEN: usize = 128;
/// The maximum number of positions of a split, unless the sequence would then have more than
/// [`MAX_SPLITS`]. The limit ensures that one long sequence in a large batch is split.
const MAX_SPLIT_LEN: usize = 8192;
/// The number of registers of a multiprocessor of an NVIDIA card.
const REGISTERS: usize = 65536;
/// The numbers of registers per thread that the grid is planned for, in blocks of 256 threads and
/// in smaller blocks. The kernels use at most as many, so all blocks run at once.
const THREAD_REGISTERS: [usize; 2] = [128, 168];

/// The configuration and the grid of an attention's launch. They do not depend on the lengths of
/// the sequences, so a launch can be recorded in a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionPlan {
    /// The compile-time parameters of the kernel.
    pub config: AttentionConfig,
    /// The grid: splits, groups of query heads, rows.
    pub blocks: [usize; 3],
    /// The planned number of splits of a sequence. A split has about 1 / `splits` of the sequence's
    /// positions, within the limits of [`AttentionPlan::split_len`].
    pub splits: usize,
    /// The minimum and the maximum number of positions of a split. Shorter sequences have fewer
    /// splits than [`AttentionPlan::splits`]; longer ones have more, up to the number in the grid.
    pub split_len: [usize; 2],
}

impl AttentionPlan {
    /// Plans an attention on a device.
    ///
    /// Sequences are split so that the blocks of all rows occupy the device once. If the rows
    /// occupy the device without splits, only long sequences are split.
    ///
    /// # Errors
    /// Returns an error if [`AttentionShape::check`] rejects the shape, or if there are 2^32
    /// partial sums or more.
    pub fn new(shape: &AttentionShape, target: &AttentionTarget) -> Result<Self, KernelError> {
        shape.check()?;
        // A prompt has many tokens, which occupy the device without splits.
        let config = AttentionConfig::new(
            shape,
            target,
            target.multiprocessors > 1 && shape.pass == AttentionPass::Step,
        );
        let groups = shape.heads / config.heads;
        let longest = shape.longest().max(1);
        if !config.is_split {
            return Ok(Self {
                config,
                blocks: [1, groups, shape.rows],
                splits: 1,
                split_len: [longest, longest],
            });
        }
        let registers = if config.threads >= 256 {
            THREAD_REGISTERS[0]
        } else {
            THREAD_REGISTERS[1]
        };
        let slots = target.multiprocessors * (REGISTERS / (registers * config.threads)).max(1);
        let splits = (slots / (groups * shape.rows).max(1)).clamp(1, MAX_SPLITS);
        let most = MAX_SPLIT_LEN.max(longest.div_ceil(MAX_SPLITS));
        let grid = splits
            .min(longest.div_ceil(MIN_SPLIT_LEN))
            .max(longest.div_ceil(most));
        let config = AttentionConfig {
            is_split: grid > 1,
            ..config
        };
        let plan = Self {
            config,
            blocks: [grid, groups, shape.rows],
            splits,
            split_len: [MIN_SPLIT_LEN, most],
        };
        expect_at_most(shape, plan.partials(), MAX_ELEMENTS)?;
        Ok(plan)
    }

    /// Returns the length, in f32 elements, of the workspace for the partial sums of splits. The
    /// workspace need not be initialised.
    pub fn partials(&self) -> usize {
        let [splits, groups, rows] = self.blocks;
        if self.config.is_split {
            splits * groups * rows * self.config.partial()
        } else {
            1
        }
    }

    /// Returns the length, in u32 elements, of the buffer of arrival_counters, which must be zero
    /// before the first launch and is zero after each.
    pub fn arrival_counters(&self) -> usize {
        let [_, groups, rows] = self.blocks;
        if self.config.is_split {
            groups * rows
        } else {
            1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{CacheShape, Pages};
    use crate::kernels::attention::shape::VECTOR;
    use marlin_kernels::ActivationDtype;

    const H200: AttentionTarget = AttentionTarget {
        multiprocessors: 132,
        plane: 32,
        units: 1024,
    };
    const CPU: AttentionTarget = AttentionTarget {
        multiprocessors: 1,
        plane: 1,
        units: 2,
    };

    fn shape(rows: usize, heads: usize, kv_heads: usize, max_len: usize) -> AttentionShape {
        AttentionShape {
            rows,
            heads,
            cache: CacheShape::from([rows, kv_heads, max_len, 128]),
            rotary_dim: 128,
            max_positions: max_len,
            window: None,
            has_sinks: false,
            norm_epsilon: None,
            dtype: ActivationDtype::F16,
            pass: AttentionPass::Step,
        }
    }

    fn plan(shape: &AttentionShape, target: &AttentionTarget) -> AttentionPlan {
        AttentionPlan::new(shape, target).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Returns the length and the number of splits, as the kernel computes them.
    fn splits(plan: &AttentionPlan, cached: usize) -> (usize, usize) {
        let split_len = (cached / plan.splits + 1)
            .clamp(plan.split_len[0], plan.split_len[1])
            .next_multiple_of(plan.config.lane_groups());
        (split_len, cached.div_ceil(split_len).max(1))
    }

    #[test]
    fn every_length_has_its_splits_in_the_grid() {
        for target in [
            H200,
            AttentionTarget {
                multiprocessors: 3,
                ..H200
            },
            CPU,
        ] {
            for rows in [1, 3, 16, 128] {
                for (heads, kv_heads) in [(32, 32), (32, 8), (64, 8), (28, 4), (6, 6)] {
                    for max_len in [1, 2, 129, 576, 4096, 131_072, 2_000_000] {
                        for window in [None, Some(1), Some(1000)] {
                            let shape = AttentionShape {
                                window,
                                ..shape(rows, heads, kv_heads, max_len)
                            };
                            let plan = plan(&shape, &target);
                            assert!(plan.blocks[0] <= MAX_SPLITS, "{shape}: {plan:?}");
                            let longest = shape.longest();
                            for cached in
                                (0..=longest.min(3000)).chain((0..=longest).rev().step_by(997))
                            {
                                let (split_len, count) = splits(&plan, cached);
                                assert!(
                                    count <= plan.blocks[0],
                                    "{shape}, {cached} cached: {count} splits of {split_len} in {plan:?}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn few_rows_are_split_and_many_are_not() {
        let blocks =
            |rows, heads, max_len| plan(&shape(rows, heads, heads, max_len), &H200).blocks[0];
        assert_eq!(blocks(1, 32, 65_536), 8);
        assert_eq!(blocks(1, 8, 131_072), 33);
        assert_eq!(blocks(1, 32, 576), 5);
        assert_eq!(blocks(128, 32, 576), 1);
        // One long sequence among many is still split.
        assert_eq!(blocks(128, 32, 131_072), 16);
    }

    #[test]
    fn a_runtime_without_visible_writes_has_one_split() {
        let plan = plan(&shape(1, 32, 8, 131_072), &CPU);
        assert_eq!(
            (
                plan.blocks,
                plan.config.is_split,
                plan.partials(),
                plan.arrival_counters()
            ),
            ([1, 32, 1], false, 1, 1)
        );
        assert_eq!((plan.config.lanes, plan.config.threads), (1, 2));
    }

    #[test]
    fn every_group_of_heads_is_covered() {
        for target in [H200, CPU] {
            for group in 1..=16 {
                for head_dim in (8..=512).step_by(8) {
                    let shape = AttentionShape {
                        cache: CacheShape::from([1, 2, 64, head_dim]),
                        rotary_dim: head_dim,
                        ..shape(1, 2 * group, 2, 64)
                    };
                    let config = plan(&shape, &target).config;
                    assert!(group.is_multiple_of(config.heads), "{shape}: {config:?}");
                    assert!(
                        config.lanes * config.lane_vectors() * VECTOR >= head_dim,
                        "{shape}: {config:?}"
                    );
                    let shared = 4 * config.lane_groups() * config.heads * head_dim;
                    assert!(shared <= 32 * 1024, "{shape}: {config:?}");
                    assert!(
                        config.threads.is_multiple_of(config.lanes)
                            && config.threads >= target.plane,
                        "{shape}: {config:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn invalid_shapes_are_rejected() {
        let good = shape(2, 8, 4, 64);
        let with_cache = |change: fn(&mut CacheShape)| {
            let mut shape = good;
            change(&mut shape.cache);
            shape
        };
        assert_eq!(good.check(), Ok(()));
        let paged = with_cache(|cache| cache.pages = Some(Pages { count: 9, size: 16 }));
        assert_eq!(paged.check(), Ok(()));
        for bad in [
            with_cache(|cache| cache.kv_heads = 3),
            with_cache(|cache| cache.kv_heads = 0),
            AttentionShape {
                rotary_dim: 100,
                ..with_cache(|cache| cache.head_dim = 100)
            },
            with_cache(|cache| cache.head_dim = 520),
            with_cache(|cache| cache.max_len = 0),
            with_cache(|cache| cache.pages = Some(Pages { count: 0, size: 16 })),
            with_cache(|cache| cache.pages = Some(Pages { count: 9, size: 8 })),
            with_cache(|cache| cache.pages = Some(Pages { count: 9, size: 48 })),
            AttentionShape {
                rotary_dim: 130,
                ..good
            },
            AttentionShape {
                rotary_dim: 7,
                ..good
            },
            AttentionShape {
                max_positions: 63,
                ..good
            },
            AttentionShape {
                window: Some(0),
                ..good
            },
        ] {
            assert!(
                matches!(bad.check(), Err(KernelError::Shape { .. })),
                "{bad}"
            );
        }
        for large in [
            AttentionShape {
                max_positions: 1 << 31,
                ..with_cache(|cache| cache.max_len = 1 << 31)
            },
            with_cache(|cache| cache.slots = usize::MAX),
            with_cache(|cache| {
                let (count, size) = (1 << 30, 16);
                cache.pages = Some(Pages { count, size });
            }),
            AttentionShape {
                rows: 60_000,
                heads: 60_000,
                ..with_cache(|cache| cache.kv_heads = 60_000)
            },
        ] {
            assert!(
                matches!(large.check(), Err(KernelError::TooLarge { .. })),
                "{large}"
            );
        }
    }
}
