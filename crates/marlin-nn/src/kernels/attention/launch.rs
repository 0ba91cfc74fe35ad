use super::block::AttentionSizesLaunch;
use super::config::{AttentionConfig, AttentionTarget, KeyValueType};
use super::kernel;
use super::plan::AttentionPlan;
use super::shape::{AttentionPass, AttentionShape};
use crate::cache::{CacheFormat, CacheLengthsLaunch};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::pdl;
use marlin_kernels::problem::{expect_at_least, expect_length};
use marlin_kernels::{KernelError, Runtime, Target};

/// The operands of [`attention`]: contiguous buffers, aligned to 32 bytes.
pub struct AttentionArgs {
    /// The output of the qkv projection [rows, (heads + 2 kv_heads) head_dim]: query heads, key
    /// heads, then value heads. For prompts, only the queries [rows, heads head_dim], normalised
    /// and rotated.
    pub qkv: BufferArg,
    /// The [`SequenceState`](crate::kernels::SequenceState)s of the rows, i32 [rows,
    /// [`SequenceState::WORDS`](crate::kernels::SequenceState::WORDS)].
    pub state: BufferArg,
    /// The cache of keys [pages, kv_heads, page_size, row]
    /// ([`CacheShape`](crate::CacheShape)), normalised and rotated. A step writes each token's key
    /// at its row's slot and position.
    pub keys: BufferArg,
    /// The cache of values, in the same shape as `keys`.
    pub values: BufferArg,
    /// The page table, i32 [slots, pages of a slot]; present if and only if the cache has pages.
    pub pages: Option<BufferArg>,
    /// The table of cosines, f32 [max_positions, rotary_dim / 2]. Features `i` and `i +
    /// rotary_dim / 2` of a head are rotated as a pair.
    pub cos: BufferArg,
    /// The table of sines, in the same shape as `cos`.
    pub sin: BufferArg,
    /// The weight of the RMSNorm of query heads, `[head_dim]`; present if and only if the shape has
    /// an epsilon.
    pub q_norm: Option<BufferArg>,
    /// The weight of the RMSNorm of key heads, under the same conditions as `q_norm`.
    pub k_norm: Option<BufferArg>,
    /// A score of each query head without a position, `[heads]`; present if and only if the shape
    /// has them.
    pub sinks: Option<BufferArg>,
    /// The output [rows, heads head_dim]; skipped rows are not written.
    pub out: BufferArg,
    /// A workspace of at least [`AttentionPlan::partials`] f32 elements. Launches that do not run
    /// at the same time may share it.
    pub partials: BufferArg,
    /// Counters, at least [`AttentionPlan::arrival_counters`] u32 elements: zero before the first
    /// launch, and zero again after each. Launches that do not run at the same time may share it.
    pub arrival_counters: BufferArg,
}

/// Launches the attention of a decode step or of prompts. A step normalises and rotates q and k,
/// writes k and v to the cache, and attends from each row's token to the positions of its sequence;
/// the launch for prompts only attends. Rows that are idle, or whose position or slot is outside
/// the cache, are skipped.
///
/// Two rows of a step must not have the same slot, because the order of their writes is undefined.
/// Rows of prompts may have the same slot; see [`AttentionPass`](super::AttentionPass).
///
/// # Errors
/// Returns an error if [`AttentionShape::check`] rejects the shape, a buffer has the wrong length,
/// norms are given without an epsilon or an epsilon without norms, or the device does not support
/// the dtype.
pub fn attention(
    client: &Client,
    shape: &AttentionShape,
    args: AttentionArgs,
) -> Result<(), KernelError> {
    let plan = AttentionPlan::new(shape, &AttentionTarget::of(client))?;
    check(client, shape, &plan, &args)?;
    if shape.rows == 0 {
        return Ok(());
    }
    tracing::trace!(%shape, blocks = ?plan.blocks, "attention");
    let [blocks, groups, rows] = plan.blocks.map(|count| count as u32);
    let heads = shape.heads as u32;
    let window = shape.window.map_or(u32::MAX, |window| window as u32);
    let [splits, least, most] =
        [plan.splits, plan.split_len[0], plan.split_len[1]].map(|length| length as u32);
    let epsilon = shape.norm_epsilon.unwrap_or_default();
    let target = Target::of(client);
    let held = KeyValueType::on(&target, shape.dtype, shape.cache.format);
    let config = AttentionConfig {
        as_f16: target.runtime == Runtime::Cuda,
        has_views: matches!(target.runtime, Runtime::Cuda | Runtime::Cpu),
        uses_pdl: pdl::is_supported(&target),
        ..plan.config
    };
    // SAFETY: the lengths of all buffers were checked against the shape that the kernel derives its
    // addresses from. The kernel skips rows whose position or slot is outside the cache, and the
    // grid has a block for every split of every remaining row.
    unsafe {
        kernel::attention::launch_unchecked(
            client,
            CubeCount::new_3d(blocks, groups, rows),
            CubeDim::new_1d(config.threads as u32),
            AddressType::from_len(shape.cache_vectors()),
            held.size,
            args.qkv,
            args.state,
            args.keys,
            args.values,
            args.pages.into(),
            args.cos,
            args.sin,
            args.q_norm.into(),
            args.k_norm.into(),
            args.sinks.into(),
            args.out,
            args.partials,
            args.arrival_counters,
            AttentionSizesLaunch::new(
                heads,
                CacheLengthsLaunch::of(&shape.cache),
                window,
                splits,
                least,
                most,
                epsilon,
            ),
            config,
            shape.dtype.elem(),
            held.elem,
        );
    }
    pdl::make_edge_programmatic(client);
    Ok(())
}

/// Checks all assumptions of the kernel about its operands and the device.
fn check(
    client: &Client,
    shape: &AttentionShape,
    plan: &AttentionPlan,
    args: &AttentionArgs,
) -> Result<(), KernelError> {
    shape.dtype.expect_on(client)?;
    if shape.pass == AttentionPass::Prompt && shape.cache.format != CacheFormat::Activations {
        return Err(KernelError::Shape {
            problem: shape.to_string(),
            reason: "prompts attend to keys and values in the dtype of activations",
        });
    }
    expect_length(shape, "qkv", shape.rows * shape.columns(), args.qkv.len())?;
    shape.expect_cache(&args.state, &args.keys, &args.values, &args.pages)?;
    shape.expect_parameters([&args.cos, &args.sin], [&args.q_norm, &args.k_norm])?;
    shape.expect_sinks(&args.sinks)?;
    expect_length(
        shape,
        "output",
        shape.rows * shape.heads * shape.cache.head_dim,
        args.out.len(),
    )?;
    expect_at_least(shape, "partials", plan.partials(), args.partials.len())?;
    expect_at_least(
        shape,
        "arrival_counters",
        plan.arrival_counters(),
        args.arrival_counters.len(),
    )
}
