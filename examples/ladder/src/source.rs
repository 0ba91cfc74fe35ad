//! The CUDA text of the ladder's own kernels, generated without a device, so that the machine code
//! compiled from the text can be inspected.

use crate::LadderError;
use crate::fragment::{WARPS, row_tiles};
use crate::step_1_naive::{THREADS, naive::Naive};
use crate::step_2_wide::{Block, wide::Wide};
use crate::step_3_shared::shared_tile::SharedTile;
use crate::step_4_tensor_cores::tensor_cores::TensorCores;
use crate::step_5_async::{AsyncConfig, pipelined::Pipelined};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::inspect::{
    KernelSource, buffer, cuda_text, properties, settings, shared_limit, source_of, target,
};
use marlin_kernels::{QuantProblem, Target, plan};

/// Returns the CUDA text of step `number`, 1 to 5, for `m` rows of activations on a card of compute
/// capability `capability` (80 for 8.0).
///
/// # Errors
/// Returns an error for a step without a kernel in this crate, or one that does not fit in a block
/// of the card.
pub fn source(number: usize, m: usize, capability: u32) -> Result<KernelSource, LadderError> {
    let message = |message: String| LadderError::Compile {
        step: number,
        message,
    };
    let block = Block {
        rows: m.next_power_of_two().min(8),
        lanes: 8,
        splits: 32,
    };
    let settings = |threads| settings(threads, ExecutionMode::Unchecked);
    let (properties, target) = (properties(capability), target());
    let text = match number {
        1 => cuda_text(
            &Naive::new(
                settings(THREADS as usize),
                properties,
                target,
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
                (),
                (),
                (),
            ),
            capability,
        ),
        2 => cuda_text(
            &Wide::new(
                settings(block.threads()),
                properties,
                target,
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
                (),
                (),
                block,
            ),
            capability,
        ),
        3 => cuda_text(
            &SharedTile::new(
                settings(block.threads()),
                properties,
                target,
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
                (),
                (),
                block,
            ),
            capability,
        ),
        4 => cuda_text(
            &TensorCores::new(
                settings(32 * WARPS),
                properties,
                target,
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
                (),
                (),
                row_tiles(m),
            ),
            capability,
        ),
        5 => {
            let config = AsyncConfig::new(m, shared_limit(capability));
            let config = config
                .ok_or_else(|| message(format!("{m} rows fit no block of sm_{capability}")))?;
            cuda_text(
                &Pipelined::new(
                    settings(32 * WARPS),
                    properties,
                    target,
                    buffer(),
                    buffer(),
                    buffer(),
                    buffer(),
                    (),
                    (),
                    (),
                    config,
                ),
                capability,
            )
        }
        _ => return Err(message("the ladder's own kernels are steps 1 to 5".into())),
    };
    text.map_err(|error| message(error.to_string()))
}

/// Returns the digest of the CUDA text of step `number` for a problem. For step 6, the text is that
/// of the kernel that the library plans. Returns `None` on devices other than NVIDIA's, and if the
/// step has no kernel for the problem.
pub fn digest(client: &Client, number: usize, problem: &QuantProblem) -> Option<String> {
    let capability = Target::of(client).card?.capability;
    let source = match number {
        6 => source_of(
            problem,
            &plan(*problem, &Target::of(client)).kernel,
            capability,
        )
        .ok()
        .flatten(),
        number => source(number, problem.m, capability).ok(),
    };
    source.map(|source| source.digest())
}
