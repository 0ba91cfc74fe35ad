use super::block::LengthsLaunch;
use super::config::{AttentionConfig, AttentionTarget, Held};
use super::kernel;
use super::plan::AttentionPlan;
use super::shape::{AttentionShape, VECTOR};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::overlap;
use marlin_kernels::problem::{expect_at_least, expect_length};
use marlin_kernels::{KernelError, Runtime, Target};

/// Operands of [`attention`]: contiguous buffers, aligned to 32 bytes.
pub struct AttentionArgs {
    /// The qkv projection's output [rows, (heads + 2 kv_heads) head_dim]: heads of q, of k, of v.
    /// Of prompts the queries alone, [rows, heads head_dim], normalised and rotated.
    pub qkv: BufferArg,
    /// The step's [`Row`](crate::kernels::Row)s, i32 [rows,
    /// [`Row::WORDS`](crate::kernels::Row::WORDS)].
    pub state: BufferArg,
    /// The cache of keys [slots, kv_heads, max_len, head_dim], normalised and rotated. In a step
    /// each token's key is written at its row's slot and position.
    pub keys: BufferArg,
    /// The cache of values, in the same shape.
    pub values: BufferArg,
    /// Cosines, f32 [max_positions, rotary_dim / 2]. Features `i` and `i + rotary_dim / 2` of a
    /// head are rotated as a pair.
    pub cos: BufferArg,
    /// Sines, in the same shape.
    pub sin: BufferArg,
    /// Weight of the RMSNorm of the heads of q, `[head_dim]`; present if and only if the shape has
    /// an epsilon.
    pub q_norm: Option<BufferArg>,
    /// Weight of the RMSNorm of the heads of k, as for q.
    pub k_norm: Option<BufferArg>,
    /// The output [rows, heads head_dim]; skipped rows are not written.
    pub out: BufferArg,
    /// Workspace of at least [`AttentionPlan::partials`] f32 elements; launches that do not run at
    /// the same time may share it.
    pub partials: BufferArg,
    /// Counters, at least [`AttentionPlan::tickets`] u32 elements: zero before the first launch,
    /// and zero again after each. Launches that do not run at the same time may share it.
    pub tickets: BufferArg,
}

/// Launches the attention of one decode step: normalises and rotates q and k, writes k and v to the
/// cache, and attends from each row's token to the positions of its sequence. Skips rows that are
/// idle, and rows whose position or slot is outside the cache.
///
/// Two rows of a step must not have the same slot, because the order of their writes is undefined.
/// Tokens of prompts may; see [`AttentionPass`](super::AttentionPass).
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
    let [heads, kv_heads, slots, max_len] =
        [shape.heads, shape.kv_heads, shape.slots, shape.max_len].map(|length| length as u32);
    let window = shape.window.map_or(u32::MAX, |window| window as u32);
    let [splits, least, most] =
        [plan.splits, plan.split_len[0], plan.split_len[1]].map(|length| length as u32);
    let epsilon = shape.norm_epsilon.unwrap_or_default();
    let held = Held::on(client, shape.dtype);
    let config = AttentionConfig {
        has_views: matches!(Target::of(client).runtime, Runtime::Cuda | Runtime::Cpu),
        overlaps: overlap::is_supported(client),
        ..plan.config
    };
    // SAFETY: the lengths of all buffers were checked against the shape that the kernel derives its
    // addresses from. The kernel skips rows whose position or slot is outside the cache, and the
    // grid has a block for every split of every other row.
    unsafe {
        kernel::attention::launch_unchecked(
            client,
            CubeCount::new_3d(blocks, groups, rows),
            CubeDim::new_1d(config.threads as u32),
            AddressType::from_len(shape.cache_elements() / VECTOR),
            held.size,
            args.qkv,
            args.state,
            args.keys,
            args.values,
            args.cos,
            args.sin,
            args.q_norm.into(),
            args.k_norm.into(),
            args.out,
            args.partials,
            args.tickets,
            LengthsLaunch::new(
                heads, kv_heads, slots, max_len, window, splits, least, most, epsilon,
            ),
            config,
            shape.dtype.elem(),
            held.elem,
        );
    }
    overlap::follow(client);
    Ok(())
}

/// Checks everything that the kernel assumes of its operands and the device.
fn check(
    client: &Client,
    shape: &AttentionShape,
    plan: &AttentionPlan,
    args: &AttentionArgs,
) -> Result<(), KernelError> {
    shape.dtype.expect_on(client)?;
    expect_length(shape, "qkv", shape.rows * shape.columns(), args.qkv.len())?;
    shape.expect_cache(&args.state, &args.keys, &args.values)?;
    shape.expect_parameters([&args.cos, &args.sin], [&args.q_norm, &args.k_norm])?;
    expect_length(
        shape,
        "output",
        shape.rows * shape.heads * shape.head_dim,
        args.out.len(),
    )?;
    expect_at_least(shape, "partials", plan.partials(), args.partials.len())?;
    expect_at_least(shape, "tickets", plan.tickets(), args.tickets.len())
}
