//! The executors of all ranks of a model.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use marlin_nn::ahead::CompiledAhead;
use marlin_nn::{SequenceState, TokenLogprobs};

use super::super::scheduler::{Executor, PromptChunk};
use super::graph::ModelStep;
use super::{CachePages, ModelExecutor, hold_recordings};
use crate::parallel::{ParallelError, RankState, Ranks, Session};
use crate::{Model, ModelError};

/// The executors of all ranks of a model: of one, or of a model that is split over devices. Each
/// operation is done by every rank, with the same arguments and in the same order, and the results
/// are those of rank 0. Since all ranks have the bits of the same logits, all choose the same
/// tokens.
pub(in super::super) struct ModelExecutors {
    own: ModelExecutor,
    /// The executors of the other ranks.
    others: Option<Others>,
    next_step: u64,
}

/// The executors of the other ranks, which are dropped with it.
struct Others {
    ranks: Arc<Ranks>,
    id: u64,
    session: Session,
}

impl Drop for Others {
    fn drop(&mut self) {
        self.ranks.forget(self.id);
    }
}

/// The executor of another rank, with the steps that were started and not finished.
struct OtherExecutor {
    executor: ModelExecutor,
    steps: VecDeque<(u64, ModelStep)>,
}

/// A step that was given to all ranks.
pub(in super::super) struct RanksStep {
    id: u64,
    /// The step of rank 0; `None` if a rank had failed before.
    own: Option<ModelStep>,
}

impl ModelExecutors {
    /// Creates the executors of a model, with empty KV caches of `slots` sequences, which share
    /// `pages` if given.
    ///
    /// # Errors
    /// [`ModelError::CacheTooLarge`] and [`ModelError::E4m3Cache`] before anything is allocated on
    /// any device; [`ModelError::Parallel`].
    pub(in super::super) fn new(
        model: Arc<Model>,
        slots: usize,
        pages: CachePages,
    ) -> Result<Self, ModelError> {
        ModelExecutor::check(&model, slots, pages)?;
        let others = match model.ranks() {
            None => None,
            Some(ranks) => Some(Others::new(ranks, slots, pages)?),
        };
        let create = move |model: Arc<Model>| ModelExecutor::new(model, slots, pages);
        let own = match &others {
            None => create(model),
            Some(others) => others.run(
                move |state, id| {
                    let other = OtherExecutor {
                        executor: create(state.model.clone()),
                        steps: VecDeque::new(),
                    };
                    state.keep(id, other);
                },
                || create(model),
            )?,
        };
        Ok(Self {
            own,
            others,
            next_step: 0,
        })
    }

    /// Does an operation on all ranks, and returns the result of rank 0; `None` if a rank has
    /// failed.
    fn on_all<T>(
        &mut self,
        operation: impl FnOnce(&mut ModelExecutor) -> T + Clone + Send + 'static,
    ) -> Option<T> {
        let Some(others) = &self.others else {
            return Some(operation(&mut self.own));
        };
        let of_other = operation.clone();
        let on_other = move |other: &mut OtherExecutor| drop(of_other(&mut other.executor));
        let own = &mut self.own;
        others.run_kept(on_other, || operation(own)).ok()
    }

    /// Starts a step on all ranks; `None` if the executors start none.
    fn start_on_all(
        &mut self,
        start: impl FnOnce(&mut ModelExecutor) -> Option<ModelStep> + Clone + Send + 'static,
    ) -> Option<RanksStep> {
        let id = self.next_step;
        self.next_step += 1;
        let own = match &self.others {
            None => start(&mut self.own)?,
            Some(others) => {
                let of_other = start.clone();
                let on_other = move |other: &mut OtherExecutor| {
                    let step = of_other(&mut other.executor);
                    other.steps.extend(step.map(|step| (id, step)));
                };
                let own = &mut self.own;
                match others.run_kept(on_other, || start(own)) {
                    Ok(step) => step?,
                    // The step fails when it is finished.
                    Err(_) => return Some(RanksStep { id, own: None }),
                }
            }
        };
        Some(RanksStep { id, own: Some(own) })
    }

    /// Sets the first pages of a slot for the work that follows; see
    /// [`KvCache::set_pages`](crate::KvCache::set_pages).
    pub(in super::super) fn set_pages(&mut self, slot: usize, pages: &[u32]) {
        let pages = pages.to_vec();
        self.on_all(move |executor| executor.set_pages(slot, &pages));
    }

    /// Sets the suppressed tokens of a slot's sequence for the work that follows, as a bitmap.
    pub(in super::super) fn set_suppressed_bitmap(&mut self, slot: usize, bitmap: Vec<u32>) {
        self.on_all(move |executor| executor.set_suppressed_bitmap(slot, bitmap));
    }

    /// Starts the step that follows the last step of `size` rows, where some rows are replaced; see
    /// [`ModelExecutor::start_replaced`].
    ///
    /// # Panics
    /// Panics if there was no such step.
    pub(in super::super) fn start_replaced(
        &mut self,
        size: usize,
        replaced: &[(usize, SequenceState)],
        logprobs: bool,
    ) -> RanksStep {
        let replaced = replaced.to_vec();
        self.start_always(move |executor| executor.start_replaced(size, &replaced, logprobs))
    }

    /// Starts a step on all ranks, which the executors always start.
    fn start_always(
        &mut self,
        start: impl FnOnce(&mut ModelExecutor) -> ModelStep + Clone + Send + 'static,
    ) -> RanksStep {
        let id = self.next_step;
        self.start_on_all(move |executor| Some(start(executor)))
            .unwrap_or(RanksStep { id, own: None })
    }

    /// Waits for a step and returns its rows, each with the log probabilities of its token if the
    /// row asked for them. Steps are finished in the order in which they were started.
    pub(in super::super) fn finish_with_logprobs(
        &mut self,
        step: RanksStep,
    ) -> Result<Vec<(SequenceState, Option<TokenLogprobs>)>, ModelError> {
        let RanksStep { id, own: step } = step;
        let own = &mut self.own;
        let Some(others) = &self.others else {
            return step.map_or_else(|| Ok(Vec::new()), |step| own.finish_with_logprobs(step));
        };
        let Some(step) = step else {
            others.check()?;
            // A failure ends a session, so the check has failed.
            return Ok(Vec::new());
        };
        let run = others.run_with_state(
            move |model, kept| {
                let communicator = model.communicator().cloned();
                while let Some((_, step)) = kept.steps.pop_front_if(|(first, _)| *first <= id) {
                    let finished = kept.executor.finish_with_logprobs(step);
                    if let (Err(error), Some(communicator)) = (finished, &communicator) {
                        communicator.fail(error.to_string());
                    }
                }
            },
            || own.finish_with_logprobs(step),
        );
        let rows = run?;
        others.check()?;
        rows
    }

    /// Implements [`Engine::warm_up`](crate::Engine::warm_up).
    pub(in super::super) fn warm_up(&mut self, prompt_tokens: usize) -> Duration {
        self.on_all(move |executor| executor.warm_up(prompt_tokens))
            .unwrap_or_default()
    }

    /// Implements [`Engine::set_prefill_chunk`](crate::Engine::set_prefill_chunk).
    pub(in super::super) fn set_chunk(&mut self, tokens: usize) {
        self.own.set_chunk(tokens);
    }

    pub(in super::super) fn is_captured(&self) -> bool {
        self.own.is_captured()
    }

    /// Returns true if the device records graphs and runs them beside the host.
    pub(in super::super) fn runs_ahead(&self) -> bool {
        self.own.runs_ahead()
    }

    /// Implements [`Engine::compile_ahead`](crate::Engine::compile_ahead), on the device of rank 0:
    /// the others find its kernels in the cache on disk.
    pub(in super::super) fn compile_ahead(&self, prompt_tokens: usize) -> CompiledAhead {
        self.own.compile_ahead(prompt_tokens)
    }

    /// Implements [`BatchEngine::compile_all`](crate::BatchEngine::compile_all).
    pub(in super::super) fn compile_all(&self) -> CompiledAhead {
        self.own.compile_all()
    }

    /// Implements [`BatchEngine::kernel_set`](crate::BatchEngine::kernel_set).
    pub(in super::super) fn kernel_set(&self) -> Option<u64> {
        self.own.kernel_set()
    }

    /// Implements [`BatchEngine::record_next`](crate::BatchEngine::record_next). No passes of a
    /// split model are recorded.
    pub(in super::super) fn record_next(&mut self) -> bool {
        self.own.record_next()
    }
}

impl Others {
    /// Checks that every other rank has room for an executor.
    fn new(ranks: &Arc<Ranks>, slots: usize, pages: CachePages) -> Result<Self, ModelError> {
        let session = ranks.session()?;
        let check = move |state: &mut RankState| ModelExecutor::check(&state.model, slots, pages);
        ranks
            .ask(session, check)?
            .into_iter()
            .collect::<Result<(), _>>()?;
        Ok(Self {
            ranks: ranks.clone(),
            id: ranks.new_id(),
            session,
        })
    }

    /// Checks that no rank has failed.
    fn check(&self) -> Result<(), ParallelError> {
        self.ranks.group().check(self.session)
    }

    /// Runs `root` on this thread and `command` on the other ranks. No graph is recorded meanwhile.
    fn run<T>(
        &self,
        command: impl FnOnce(&mut RankState, u64) + Clone + Send + 'static,
        root: impl FnOnce() -> T,
    ) -> Result<T, ParallelError> {
        let _not_recording = hold_recordings();
        let id = self.id;
        let command = move |state: &mut RankState| command(state, id);
        self.ranks.run(self.session, command, root)
    }

    /// Runs `root` on this thread and `command` on the model and the executor of the other ranks.
    fn run_with_state<T>(
        &self,
        command: impl FnOnce(&Model, &mut OtherExecutor) + Clone + Send + 'static,
        root: impl FnOnce() -> T,
    ) -> Result<T, ParallelError> {
        let of_rank = move |state: &mut RankState, id| {
            if let Some((model, other)) = state.kept::<OtherExecutor>(id) {
                command(model, other);
            }
        };
        self.run(of_rank, root)
    }

    /// Runs `root` on this thread and `command` on the executors of the other ranks.
    fn run_kept<T>(
        &self,
        command: impl FnOnce(&mut OtherExecutor) + Clone + Send + 'static,
        root: impl FnOnce() -> T,
    ) -> Result<T, ParallelError> {
        self.run_with_state(move |_, other| command(other), root)
    }
}

impl Executor for ModelExecutors {
    type Step = RanksStep;

    fn chunk(&self, is_running: bool) -> usize {
        self.own.chunk(is_running)
    }

    fn prefill(&mut self, chunks: &[PromptChunk]) -> Option<RanksStep> {
        let chunks = chunks.to_vec();
        self.start_on_all(move |executor| executor.prefill(&chunks))
    }

    fn mixes(&self, rows: &[SequenceState]) -> bool {
        self.own.mixes(rows)
    }

    fn set_token_bitmap(&mut self, slot: usize, tokens: &[u32]) {
        let tokens = tokens.to_vec();
        self.on_all(move |executor| executor.set_token_bitmap(slot, &tokens));
    }

    fn set_biases(&mut self, slot: usize, rows: Vec<u32>) {
        self.on_all(move |executor| executor.set_biases(slot, rows));
    }

    fn set_suppressed(&mut self, slot: usize, tokens: &[u32]) {
        let tokens = tokens.to_vec();
        self.on_all(move |executor| executor.set_suppressed(slot, &tokens));
    }

    fn start(&mut self, rows: &[SequenceState]) -> RanksStep {
        let rows = rows.to_vec();
        self.start_always(move |executor| executor.start(&rows))
    }

    fn start_next(&mut self, count: usize) -> Option<RanksStep> {
        // No passes of a split model are recorded, so none starts before the host has the tokens.
        if self.others.is_some() {
            return None;
        }
        self.start_on_all(move |executor| executor.start_next(count))
    }

    fn finish(&mut self, step: RanksStep) -> Result<Vec<SequenceState>, ModelError> {
        let rows = self.finish_with_logprobs(step)?;
        Ok(rows.into_iter().map(|(row, _)| row).collect())
    }
}
