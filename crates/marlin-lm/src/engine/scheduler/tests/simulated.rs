//! A simulated device, and the tokens that it chooses.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use marlin_nn::{SequenceState, SequenceStatus};

use self::Work::{First, Next, Prefill, Start};
use super::{CHUNK, LONG_CHUNK, VOCAB, WINDOW};
use crate::ModelError;
use crate::engine::scheduler::{Executor, PromptChunk, Scheduler};
use crate::model::CachePosition;

/// Work given to a device.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Work {
    /// A prefill of a slot with these positions of a prompt.
    Prefill(usize, Range<usize>),
    /// A prefill of a slot up to the end of the prompt, with the choice of its first token.
    First(usize, Range<usize>),
    /// A step of the rows of these slots, which the host passed.
    Start(Vec<u32>),
    /// A step of the rows that were on the device.
    Next(Vec<u32>),
}

/// A device on which the next token follows from all tokens of a sequence. It checks that a step
/// finds the tokens of its own sequences.
pub(super) struct Simulated {
    looks_ahead: bool,
    mixes: bool,
    /// The tokens in the KV cache of each slot.
    cache: Vec<Vec<u32>>,
    /// The suppressed tokens of each slot.
    suppressed: Vec<Vec<u32>>,
    /// The rows left by the last step, for each number of rows.
    rows: BTreeMap<usize, Vec<SequenceState>>,
    pub(super) work: Vec<Work>,
    unfinished: VecDeque<u64>,
    started: u64,
}

impl Simulated {
    fn run(&mut self, mut rows: Vec<SequenceState>) -> (u64, Vec<SequenceState>) {
        for row in &mut rows {
            let SequenceStatus::At(position) = row.status else {
                continue;
            };
            let cache = &mut self.cache[row.slot as usize];
            assert_eq!(
                cache.len(),
                position as usize,
                "the tokens of slot {}",
                row.slot
            );
            cache.push(row.token);
            row.token = next_but(
                if row.suppresses {
                    &self.suppressed[row.slot as usize]
                } else {
                    &[]
                },
                cache,
            );
            row.status = if cache.len() == WINDOW {
                SequenceStatus::WindowFull
            } else {
                SequenceStatus::At(position + 1)
            };
        }
        self.started += 1;
        self.unfinished.push_back(self.started);
        (self.started, rows)
    }
}

impl Simulated {
    fn step(&mut self, rows: Vec<SequenceState>) -> (u64, Vec<SequenceState>) {
        let (id, rows) = self.run(rows);
        self.rows.insert(rows.len(), rows.clone());
        (id, rows)
    }
}

impl Executor for Simulated {
    type Step = (u64, Vec<SequenceState>);

    fn chunk(&self, is_running: bool) -> usize {
        if is_running { CHUNK } else { LONG_CHUNK }
    }

    fn prefill(&mut self, chunks: &[PromptChunk]) -> Option<Self::Step> {
        assert!((1..=LONG_CHUNK).contains(&chunks.iter().map(|chunk| chunk.tokens.len()).sum()));
        let mut last_rows = Vec::new();
        for PromptChunk {
            tokens,
            position: CachePosition { slot, start },
            end,
        } in chunks
        {
            let (slot, start) = (*slot, *start);
            let (positions, is_end) = (start..start + tokens.len(), end.is_some());
            self.work.push(if is_end {
                First(slot, positions)
            } else {
                Prefill(slot, positions)
            });
            self.cache[slot].truncate(start);
            assert_eq!(self.cache[slot].len(), start, "the tokens of slot {slot}");
            // A step of the row adds the last token.
            self.cache[slot].extend(&tokens[..tokens.len() - usize::from(is_end)]);
            last_rows.extend(*end);
        }
        (!last_rows.is_empty()).then(|| self.run(last_rows))
    }

    fn mixes(&self, _rows: &[SequenceState]) -> bool {
        self.mixes
    }

    fn set_token_bitmap(&mut self, slot: usize, tokens: &[u32]) {
        if tokens.len() == 1 {
            self.cache[slot].clear();
        }
    }

    fn set_biases(&mut self, _slot: usize, _rows: Vec<u32>) {}

    fn set_suppressed(&mut self, slot: usize, tokens: &[u32]) {
        self.suppressed[slot] = tokens.to_vec();
    }

    fn start(&mut self, rows: &[SequenceState]) -> Self::Step {
        self.work
            .push(Start(rows.iter().map(|row| row.slot).collect()));
        self.step(rows.to_vec())
    }

    fn start_next(&mut self, count: usize) -> Option<Self::Step> {
        let rows = self.rows.get(&count).filter(|_| self.looks_ahead)?.clone();
        self.work
            .push(Next(rows.iter().map(|row| row.slot).collect()));
        Some(self.step(rows))
    }

    fn finish(&mut self, (step, rows): Self::Step) -> Result<Vec<SequenceState>, ModelError> {
        assert_eq!(
            self.unfinished.pop_front(),
            Some(step),
            "steps are finished in their order"
        );
        Ok(rows)
    }
}

fn next_token(tokens: &[u32]) -> u32 {
    next_but(&[], tokens)
}

/// Returns the next token that is not suppressed.
pub(super) fn next_but(suppressed: &[u32], tokens: &[u32]) -> u32 {
    let hash = tokens.iter().fold(17u32, |hash, &token| {
        hash.wrapping_mul(31).wrapping_add(token)
    });
    let in_turn = (0..VOCAB as u32).map(|later| (hash % VOCAB as u32 + later) % VOCAB as u32);
    in_turn
        .into_iter()
        .find(|token| !suppressed.contains(token))
        .unwrap()
}

/// Returns the tokens that follow a prompt that is decoded by itself.
pub(super) fn expected(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        tokens.push(next_token(&tokens));
    }
    tokens.split_off(prompt.len())
}

pub(super) fn scheduler(slots: usize, looks_ahead: bool) -> Scheduler<Simulated> {
    let (cache, suppressed) = (vec![Vec::new(); slots], vec![Vec::new(); slots]);
    let (rows, work, unfinished) = (BTreeMap::new(), Vec::new(), VecDeque::new());
    Scheduler::new(
        Simulated {
            looks_ahead,
            mixes: false,
            cache,
            suppressed,
            rows,
            work,
            unfinished,
            started: 0,
        },
        slots,
        WINDOW,
        VOCAB,
    )
}

/// Creates a scheduler whose passes of prompts also continue the running sequences.
pub(super) fn mixing(slots: usize) -> Scheduler<Simulated> {
    let mut scheduler = scheduler(slots, true);
    scheduler.executor.mixes = true;
    scheduler
}
