//! The operations of a scheduler on one rank.

use marlin_nn::{self as decode, SequenceState, SequenceStatus, TokenTable};

use super::super::scheduler::PromptChunk;
use super::graph::{ModelStep, Pass, lock};
use super::prompts::PromptRows;
use super::{LAST_MIXED_POSITION, ModelExecutor, not_recording, want_logprobs};
use crate::model::CachePosition;
use crate::tokens::token_tensor;

impl ModelExecutor {
    /// Implements `Executor::chunk`.
    pub(super) fn chunk(&self, is_running: bool) -> usize {
        if is_running {
            self.running_chunk
        } else {
            self.idle_chunk
        }
    }

    /// Implements `Executor::prefill`.
    pub(super) fn prefill(&mut self, chunks: &[PromptChunk]) -> Option<ModelStep> {
        let (mut rows, mut last_rows) = (Vec::new(), Vec::new());
        for chunk in chunks {
            let count = chunk.tokens.len();
            let as_rows = self.prompts.of_chunk(chunk);
            let (before, tokens) = chunk.tokens.split_at(count - as_rows);
            if !before.is_empty() {
                let _not_recording = not_recording(&self.model);
                let before = token_tensor(before, [1, before.len()], &self.model.device());
                self.model
                    .prefill(before, &mut lock(&self.state).cache, chunk.position);
            }
            let CachePosition { slot, start } = chunk.position;
            let first = start + count - as_rows;
            rows.extend((first..).zip(tokens).map(|(position, &token)| {
                SequenceState::of_prompt(token, position as u32, slot as u32)
            }));
            last_rows.extend(chunk.end.map(|end| SequenceState {
                token: rows.len() as u32 - 1,
                ..end
            }));
        }
        if rows.is_empty() {
            None
        } else {
            self.read_rows(rows, last_rows)
        }
    }

    /// Implements `Executor::mixes`.
    pub(super) fn mixes(&self, rows: &[SequenceState]) -> bool {
        let is_short = |row: &SequenceState| matches!(row.status, SequenceStatus::At(position) if position as usize <= LAST_MIXED_POSITION);
        self.prompts == PromptRows::All && rows.iter().all(is_short)
    }

    /// Implements `Executor::set_token_bitmap`.
    pub(super) fn set_token_bitmap(&mut self, slot: usize, tokens: &[u32]) {
        self.write_bitmap(slot, TokenTable::OCCURRED, tokens);
    }

    /// Implements `Executor::set_biases`.
    pub(super) fn set_biases(&mut self, slot: usize, rows: Vec<u32>) {
        self.write_words(slot, TokenTable::GENERATED, rows);
    }

    /// Implements `Executor::set_suppressed`.
    pub(super) fn set_suppressed(&mut self, slot: usize, tokens: &[u32]) {
        self.write_bitmap(slot, TokenTable::SUPPRESSED, tokens);
    }

    /// Implements `Executor::start`.
    pub(super) fn start(&mut self, rows: &[SequenceState]) -> ModelStep {
        let size = rows.len().next_power_of_two();
        let pass = Pass::Step {
            rows: size,
            logprobs: want_logprobs(rows),
        };
        let mut rows = rows.to_vec();
        rows.resize(size, SequenceState::IDLE);
        let model = self.model.clone();
        let graph = self.record(pass);
        let _not_recording = not_recording(&model);
        if graph.rows != rows {
            decode::write_rows(&mut lock(&graph.batch).rows, 0, &rows);
        }
        graph.step(pass)
    }

    /// Implements `Executor::start_next`.
    pub(super) fn start_next(&mut self, count: usize) -> Option<ModelStep> {
        let pass = Pass::Step {
            rows: count.next_power_of_two(),
            logprobs: false,
        };
        let graph = self
            .graphs
            .get_mut(&pass)
            .filter(|graph| graph.operations.is_hardware())?;
        let _not_recording = not_recording(&self.model);
        Some(graph.step(pass))
    }
}
