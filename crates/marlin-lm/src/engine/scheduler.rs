//! The order of prompts and steps, independent of the device that runs them.

mod sequence;

use marlin_nn::{SequenceState, SequenceStatus};

use self::sequence::Sequence;
use super::{RequestParams, StepOutput, StopReason, check_prompt};
use crate::ModelError;
use crate::biases::bias_rows;
use crate::model::CachePosition;
use crate::sampling::SamplingError;
use crate::suppression::Suppressed;

/// A chunk of a prompt, whose tokens are read together.
#[derive(Clone)]
pub(super) struct PromptChunk {
    pub(super) tokens: Vec<u32>,
    /// The slot, and the position of the first token.
    pub(super) position: CachePosition,
    /// The row of the last token, if the prompt ends with it.
    pub(super) end: Option<SequenceState>,
}

/// The scheduler's interface to a device with a model. The device runs work in the order in which
/// it is given.
pub(super) trait Executor {
    /// A step that was given to the device.
    type Step;

    /// Returns the largest number of tokens of a [`prefill`](Self::prefill). `is_running` is true
    /// while running sequences wait for it.
    fn chunk(&self, is_running: bool) -> usize;

    /// Runs chunks of prompts through the model, writes their positions of the KV cache, and
    /// chooses the first token of each prompt that ends. Returns the step with the rows of these
    /// prompts, in this order; `None` if no prompt ends.
    fn prefill(&mut self, chunks: &[PromptChunk]) -> Option<Self::Step>;

    /// Returns true if a [`prefill`](Self::prefill) that reads prompts should also continue the
    /// sequences of these rows, so that the weights are read once for both. Such a row is passed as
    /// a chunk of one token that ends.
    fn mixes(&self, rows: &[SequenceState]) -> bool;

    /// Sets the tokens of a slot's sequence, for the repetition penalty.
    fn set_token_bitmap(&mut self, slot: usize, tokens: &[u32]);

    /// Sets the generated tokens and the biases of a slot's sequence, as rows of the token table
    /// ([`bias_rows`]).
    fn set_biases(&mut self, slot: usize, rows: Vec<u32>);

    /// Sets the suppressed tokens of a slot's sequence for the work that follows.
    fn set_suppressed(&mut self, slot: usize, tokens: &[u32]);

    /// Starts a step of these rows.
    fn start(&mut self, rows: &[SequenceState]) -> Self::Step;

    /// Starts the step that follows the last step of `count` rows; the host need not know these
    /// rows. Returns `None` on a device that waits for the host.
    fn start_next(&mut self, count: usize) -> Option<Self::Step>;

    /// Waits for a step and returns its rows. Steps are finished in the order in which they were
    /// started.
    fn finish(&mut self, step: Self::Step) -> Result<Vec<SequenceState>, ModelError>;
}

/// The sequences of an engine.
pub(super) struct Scheduler<E: Executor> {
    executor: E,
    /// The sequence of each slot.
    sequences: Vec<Option<Sequence>>,
    /// The number of positions of a slot.
    window: usize,
    vocab_size: usize,
    /// The number of sequences that were ever added.
    added: u64,
    /// A step that was started before the host has read the tokens of the step before it.
    ahead: Option<Started<E::Step>>,
}

struct Started<S> {
    /// The slot and the id of the sequence of each row.
    sequences: Vec<(usize, u64)>,
    step: S,
}

impl<E: Executor> Scheduler<E> {
    pub(super) fn new(executor: E, slots: usize, window: usize, vocab_size: usize) -> Self {
        Self {
            executor,
            sequences: (0..slots).map(|_| None).collect(),
            window,
            vocab_size,
            added: 0,
            ahead: None,
        }
    }

    pub(super) fn executor(&self) -> &E {
        &self.executor
    }

    pub(super) fn executor_mut(&mut self) -> &mut E {
        &mut self.executor
    }

    pub(super) fn add_request(
        &mut self,
        prompt: &[u32],
        options: &RequestParams,
    ) -> Result<usize, ModelError> {
        options.validate(self.vocab_size)?;
        let last = check_prompt(prompt, self.window, self.vocab_size)?;
        let Some(slot) = self.sequences.iter().position(Option::is_none) else {
            return Err(ModelError::TooManySequences {
                asked: self.sequences.len() + 1,
                max: self.sequences.len(),
            });
        };
        self.executor.set_token_bitmap(slot, prompt);
        let biases = bias_rows(options, &[], self.vocab_size);
        let suppressed = Suppressed::new(&options.suppression, &options.stop_tokens, prompt);
        let row = options
            .sampling
            .row(last, prompt.len() as u32 - 1, slot as u32, options.seed);
        let row = SequenceState {
            suppresses: suppressed.is_some(),
            is_biased: biases.is_some(),
            ..row
        };
        if let Some(rows) = biases {
            self.executor.set_biases(slot, rows);
        }
        self.added += 1;
        self.sequences[slot] = Some(Sequence {
            id: self.added,
            prompt: prompt.to_vec(),
            read: 0,
            row,
            remaining_tokens: options.max_new_tokens,
            stop_tokens: options.stop_tokens.clone(),
            suppressed,
        });
        // The tokens that may not follow the prompt are already known.
        self.suppress([slot], 0);
        Ok(slot)
    }

    pub(super) fn abort(&mut self, slot: usize) {
        if let Some(sequence) = self.sequences.get_mut(slot) {
            *sequence = None;
        }
    }

    pub(super) fn sequences(&self) -> usize {
        self.sequences.iter().flatten().count()
    }

    pub(super) fn waiting(&self) -> usize {
        self.sequences
            .iter()
            .flatten()
            .filter(|sequence| !sequence.is_running())
            .count()
    }

    pub(super) fn step(&mut self) -> Result<Vec<StepOutput>, ModelError> {
        let rows: Vec<SequenceState> = self.running().map(|(_, sequence)| sequence.row).collect();
        if self.waiting() > 0 && self.executor.mixes(&rows) {
            self.step_mixed()
        } else {
            self.step_apart()
        }
    }

    /// Reads a chunk of prompts and continues the running sequences in the same pass; if none is
    /// running, reads prompts until one ends.
    fn step_mixed(&mut self) -> Result<Vec<StepOutput>, ModelError> {
        if let Some(step) = self.ahead.take() {
            let decoded = self.finish(step)?;
            // A pass of prompts needs the tokens of this step, so the next call starts it.
            if !decoded.is_empty() {
                return Ok(decoded);
            }
        }
        loop {
            let running: Vec<usize> = self.running().map(|(slot, _)| slot).collect();
            self.suppress(running, 0);
            let mut chunks: Vec<_> = self
                .running()
                .filter_map(|(slot, sequence)| sequence.as_chunk(slot))
                .collect();
            let size = self.executor.chunk(!chunks.is_empty());
            // A few running rows replace prompt tokens: a device that records passes only for some
            // numbers of rows would round the sum up by half.
            let budget = if chunks.len() <= size / 4 {
                size - chunks.len()
            } else {
                size
            };
            chunks.extend(self.next_chunks(budget, true));
            if chunks.is_empty() {
                return Ok(Vec::new());
            }
            let step = self.executor.prefill(&chunks);
            if let Some(step) = self.started(&chunks, step) {
                return self.finish(step);
            }
        }
    }

    /// Reads a chunk of prompts in one pass, and continues the running sequences in another.
    fn step_apart(&mut self) -> Result<Vec<StepOutput>, ModelError> {
        let first = self.read_prompts();
        let is_first = |sequence: &(usize, u64)| {
            first
                .as_ref()
                .is_some_and(|first| first.sequences.contains(sequence))
        };
        let running: Vec<(usize, u64)> = self
            .running()
            .map(|(slot, sequence)| (slot, sequence.id))
            .filter(|sequence| !is_first(sequence))
            .collect();
        let mut ahead = self.ahead.take();
        if let Some(step) = ahead.take_if(|step| {
            !step
                .sequences
                .iter()
                .any(|sequence| running.contains(sequence))
        }) {
            // All sequences of the step were removed.
            self.executor.finish(step.step)?;
        }
        let is_ahead = ahead.is_some();
        let slots: Vec<usize> = running.iter().map(|&(slot, _)| slot).collect();
        if !is_ahead {
            self.suppress(slots.iter().copied(), 0);
        }
        let step = ahead.or_else(|| {
            let rows: Vec<SequenceState> = running
                .iter()
                .filter_map(|&(slot, _)| Some(self.sequences[slot].as_ref()?.row))
                .collect();
            (!rows.is_empty()).then(|| Started {
                step: self.executor.start(&rows),
                sequences: running.clone(),
            })
        });
        // The same sequences continue, and their state is on the device, so the next step need not
        // wait for the host.
        if let (Some(step), None) = (&step, &first)
            && step.sequences == running
            && self.running().all(|(_, sequence)| sequence.runs_ahead())
        {
            self.suppress(slots, 1);
            self.ahead = self.executor.start_next(running.len()).map(|step| Started {
                sequences: running,
                step,
            });
        }
        let mut decoded = Vec::new();
        // Steps are finished in the order in which they were started.
        let started = if is_ahead {
            [step, first]
        } else {
            [first, step]
        };
        for step in started.into_iter().flatten() {
            decoded.extend(self.finish(step)?);
        }
        decoded.sort_by_key(|decoded| decoded.slot);
        Ok(decoded)
    }

    /// Sets the suppressed tokens of the sequences in these slots for their next work, if they
    /// changed. Earlier work chooses `unknown` tokens of each sequence that the host does not have
    /// yet.
    fn suppress(&mut self, slots: impl IntoIterator<Item = usize>, unknown: usize) {
        for slot in slots {
            let suppressed = self.sequences[slot]
                .as_mut()
                .and_then(|sequence| sequence.suppressed.as_mut());
            if let Some(tokens) = suppressed.and_then(|suppressed| suppressed.change(unknown)) {
                self.executor.set_suppressed(slot, &tokens);
            }
        }
    }

    /// Waits for a step and returns its outcome, in the order of slots.
    fn finish(
        &mut self,
        Started { sequences, step }: Started<E::Step>,
    ) -> Result<Vec<StepOutput>, ModelError> {
        let rows = self.executor.finish(step)?;
        let mut decoded: Vec<_> = sequences
            .into_iter()
            .zip(rows)
            .filter_map(|((slot, id), row)| self.decoded(slot, id, row))
            .collect();
        decoded.sort_by_key(|decoded| decoded.slot);
        Ok(decoded)
    }

    /// Returns the step of the chunks that end, with their sequences.
    fn started(&self, chunks: &[PromptChunk], step: Option<E::Step>) -> Option<Started<E::Step>> {
        let ended = chunks
            .iter()
            .filter(|chunk| chunk.end.is_some())
            .map(|chunk| chunk.position.slot);
        let sequences = ended
            .filter_map(|slot| Some((slot, self.sequences[slot].as_ref()?.id)))
            .collect();
        step.map(|step| Started { sequences, step })
    }

    /// Returns the sequences whose prompts are read, with their slots.
    fn running(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        let sequences = self
            .sequences
            .iter()
            .enumerate()
            .filter_map(|(slot, sequence)| Some((slot, sequence.as_ref()?)));
        sequences.filter(|(_, sequence)| sequence.is_running())
    }

    /// Reads chunks of prompts, oldest first, as many at once as one chunk has room for. While a
    /// sequence is running it reads once, otherwise until a sequence is running. Returns the step
    /// of the prompts whose first token the last pass chooses.
    fn read_prompts(&mut self) -> Option<Started<E::Step>> {
        let is_running = self.running().next().is_some();
        loop {
            let chunks = self.next_chunks(self.executor.chunk(is_running), false);
            if chunks.is_empty() {
                return None;
            }
            let step = self.executor.prefill(&chunks);
            if is_running || self.running().next().is_some() {
                return self.started(&chunks, step);
            }
        }
    }

    /// Takes the next chunks from their prompts, with at most `size` tokens together. If `fills` is
    /// set, a chunk is cut to fill the remaining room; otherwise a prompt is read in chunks of
    /// `size` tokens, and waits if a chunk has no room beside the others.
    fn next_chunks(&mut self, size: usize, fills: bool) -> Vec<PromptChunk> {
        let (mut chunks, mut budget) = (Vec::new(), size);
        loop {
            let sequences = self
                .sequences
                .iter_mut()
                .enumerate()
                .filter_map(|(slot, sequence)| Some((slot, sequence.as_mut()?)));
            let oldest = sequences
                .filter(|(_, sequence)| !sequence.is_running())
                .min_by_key(|(_, sequence)| sequence.id);
            let size = if fills { budget } else { size };
            let fits = |sequence: &Sequence| budget > 0 && sequence.chunk(size).len() <= budget;
            let Some((slot, sequence)) = oldest.filter(|(_, sequence)| fits(sequence)) else {
                return chunks;
            };
            let (tokens, position) = (
                sequence.chunk(size).to_vec(),
                CachePosition {
                    slot,
                    start: sequence.read,
                },
            );
            budget -= tokens.len();
            sequence.read += tokens.len();
            let end = (sequence.read == sequence.prompt.len()).then_some(sequence.row);
            chunks.push(PromptChunk {
                tokens,
                position,
                end,
            });
        }
    }

    /// Returns the outcome of a step for a sequence, and removes the sequence if it has ended;
    /// `None` if it was removed already.
    fn decoded(&mut self, slot: usize, id: u64, row: SequenceState) -> Option<StepOutput> {
        let sequence = self.sequences[slot]
            .as_mut()
            .filter(|sequence| sequence.id == id)?;
        sequence.row = row;
        let token = row.token;
        let decoded = match row.status {
            SequenceStatus::Failed | SequenceStatus::Idle => StepOutput {
                slot,
                token: None,
                end: Some(Err(SamplingError::NoToken)),
            },
            _ if sequence.stop_tokens.contains(&token) => StepOutput {
                slot,
                token: None,
                end: Some(Ok(StopReason::StopToken(token))),
            },
            state => {
                sequence.remaining_tokens = sequence.remaining_tokens.saturating_sub(1);
                if let Some(suppressed) = &mut sequence.suppressed {
                    suppressed.push(token);
                }
                let end = match (sequence.remaining_tokens, state) {
                    (0, _) => Some(Ok(StopReason::MaxNewTokens)),
                    (_, SequenceStatus::WindowFull) => Some(Ok(StopReason::CacheFull)),
                    _ => None,
                };
                StepOutput {
                    slot,
                    token: Some(token),
                    end,
                }
            }
        };
        if decoded.end.is_some() {
            self.abort(slot);
        }
        Some(decoded)
    }
}

#[cfg(test)]
mod tests;
