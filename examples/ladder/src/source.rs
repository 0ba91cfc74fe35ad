//! The CUDA text of the ladder's own kernels, generated without a device, to inspect the machine code compiled from it.

use crate::LadderError;
use crate::fragment::{WARPS, row_tiles};
use crate::step_1_naive::{THREADS, naive::Naive};
use crate::step_2_wide::{Block, wide::Wide};
use crate::step_3_shared::shared_tile::SharedTile;
use crate::step_4_tensor_cores::tensor_cores::TensorCores;
use crate::step_5_async::{Config, pipelined::Pipelined};
use cubecl::prelude::*;
use marlin_kernels::inspect::{
    Routine, Source, buffer, cuda_text, digest as digest_of_routine, digest_of, properties, settings, shared_limit, target,
};

/// The text of step `number`, 1 to 5, for `m` rows of activations on a card of compute capability `capability` (80 for 8.0).
///
/// # Errors
/// Returns an error for a step without a kernel in this crate, or one that does not fit in a block of the card.
pub fn source(number: usize, m: usize, capability: u32) -> Result<Source, LadderError> {
    let message = |message: String| LadderError::Compile { step: number, message };
    let block = Block { rows: m.next_power_of_two().min(8), lanes: 8, splits: 32 };
    let settings = |threads| settings(threads, ExecutionMode::Unchecked);
    let (properties, target) = (properties(capability), target());
    let text = match number {
        1 => cuda_text(
            &Naive::new(settings(THREADS as usize), properties, target, buffer(), buffer(), buffer(), buffer(), (), (), (), ()),
            capability,
        ),
        2 => cuda_text(
            &Wide::new(settings(block.threads()), properties, target, buffer(), buffer(), buffer(), buffer(), (), (), (), block),
            capability,
        ),
        3 => cuda_text(
            &SharedTile::new(settings(block.threads()), properties, target, buffer(), buffer(), buffer(), buffer(), (), (), (), block),
            capability,
        ),
        4 => cuda_text(
            &TensorCores::new(settings(32 * WARPS), properties, target, buffer(), buffer(), buffer(), buffer(), (), (), (), row_tiles(m)),
            capability,
        ),
        5 => {
            let config = Config::new(m, shared_limit(capability));
            let config = config.ok_or_else(|| message(format!("{m} rows fit no block of sm_{capability}")))?;
            cuda_text(
                &Pipelined::new(settings(32 * WARPS), properties, target, buffer(), buffer(), buffer(), buffer(), (), (), (), config),
                capability,
            )
        }
        _ => return Err(message("the ladder's own kernels are steps 1 to 5".into())),
    };
    text.map_err(|error| message(error.to_string()))
}

/// The digest of the kernels of all steps, like [`marlin_kernels::inspect::digest`] for one routine.
pub fn digest() -> String {
    let library = [Routine::MmaSync, Routine::Wgmma].map(digest_of_routine);
    let own = [
        include_str!("fragment.rs"),
        include_str!("step_1_naive.rs"),
        include_str!("step_2_wide.rs"),
        include_str!("step_3_shared.rs"),
        include_str!("step_4_tensor_cores.rs"),
        include_str!("step_5_async.rs"),
    ];
    digest_of(&own.into_iter().chain(library.iter().map(String::as_str)).collect::<Vec<_>>())
}
