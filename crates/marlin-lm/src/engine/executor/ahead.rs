//! The passes of every size: their kernels are compiled, and their graphs recorded, before they
//! run.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use marlin_nn::ahead::{CompiledAhead, PassShape};
use marlin_nn::kernels::attention::AttentionPass;
use marlin_nn::{self as decode, CacheShape, Pages};

use super::graph::{Pass, lock};
use super::prompts::PromptRows;
use super::{ModelExecutor, hold_recordings};

/// The free memory of the device, in bytes, below which passes are recorded only when they are
/// needed. A pass keeps memory for its activations.
const FREE_TO_RECORD: usize = 1 << 30;

impl ModelExecutor {
    /// Implements [`Engine::compile_ahead`](super::super::Engine::compile_ahead).
    pub(super) fn compile_ahead(&self, prompt_tokens: usize) -> CompiledAhead {
        let mut passes = vec![self.pass_shape(AttentionPass::Step, 1, 1)];
        if self.prompts != PromptRows::Last {
            let [rows, last_rows] = self.rounded(prompt_tokens.clamp(1, self.chunk(false)), 1);
            passes.push(self.pass_shape(AttentionPass::Prompt, rows, last_rows));
        }
        self.compile(&passes)
    }

    /// Implements [`BatchEngine::compile_all`](super::super::BatchEngine::compile_all).
    pub(super) fn compile_all(&self) -> CompiledAhead {
        self.compile(&self.all_passes())
    }

    /// Implements [`BatchEngine::kernel_set`](super::super::BatchEngine::kernel_set).
    pub(super) fn kernel_set(&self) -> Option<u64> {
        if !decode::ahead::is_supported(&self.model.device()) {
            return None;
        }
        let mut hasher = DefaultHasher::new();
        format!("{:?}", self.all_passes()).hash(&mut hasher);
        Some(hasher.finish())
    }

    fn compile(&self, passes: &[PassShape]) -> CompiledAhead {
        // A recording on another thread would fail if this call allocates.
        let _not_recording = hold_recordings();
        decode::ahead::compile(&self.model.device(), passes)
    }

    /// Returns the shapes of all [`passes`](Self::passes).
    fn all_passes(&self) -> Vec<PassShape> {
        let passes = self.passes().into_iter();
        let shapes = passes.map(|pass| match pass {
            Pass::Step { rows, .. } => self.pass_shape(AttentionPass::Step, rows, rows),
            Pass::Prompts {
                rows, last_rows, ..
            } => self.pass_shape(AttentionPass::Prompt, rows, last_rows),
        });
        shapes.collect()
    }

    /// Returns the passes of every number of rows, without log probabilities.
    fn passes(&self) -> Vec<Pass> {
        let logprobs = false;
        let steps = (1..=self.slots.next_power_of_two()).filter(|rows| rows.is_power_of_two());
        let mut passes: Vec<Pass> = steps.map(|rows| Pass::Step { rows, logprobs }).collect();
        if self.prompts != PromptRows::Last {
            let prompts: BTreeSet<[usize; 2]> = (1..=self.chunk(false))
                .flat_map(|rows| [0, 1, self.slots].map(|ending| self.rounded(rows, ending)))
                .collect();
            passes.extend(prompts.into_iter().map(|[rows, last_rows]| Pass::Prompts {
                rows,
                last_rows,
                logprobs,
            }));
        }
        passes
    }

    /// Implements [`BatchEngine::record_next`](super::super::BatchEngine::record_next).
    pub(super) fn record_next(&mut self) -> bool {
        if !self.runs_ahead() {
            return false;
        }
        let mut passes = self.passes().into_iter();
        let Some(pass) = passes.find(|pass| !self.graphs.contains_key(pass)) else {
            return false;
        };
        // The driver is asked last: this is called whenever the last request has ended.
        let free = burn_marlin::device::free_memory(&self.model.device());
        let has_room = free.is_some_and(|free| free >= FREE_TO_RECORD);
        if has_room {
            self.record(pass);
        }
        has_room
    }

    fn pass_shape(&self, pass: AttentionPass, rows: usize, last_rows: usize) -> PassShape {
        let cache = lock(&self.state).cache.shape();
        // Kernels depend on the size of a page, but not on the number of pages: those of one
        // sequence take less memory.
        let pages = cache.pages.map(|pages| Pages {
            count: pages.count.min(cache.max_len.div_ceil(pages.size)),
            ..pages
        });
        let cache = CacheShape { pages, ..cache };
        self.model.pass_shape(pass, rows, last_rows, cache)
    }
}
