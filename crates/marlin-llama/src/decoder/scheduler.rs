//! The order of prompts and steps, independent of the device that runs them.

mod sequence;

use marlin_decode::{Row, RowState};

use self::sequence::Sequence;
use super::{Decoded, SequenceOptions, StopReason};
use crate::LlamaError;
use crate::model::CachePosition;
use crate::sampling::SamplingError;
use crate::suppression::Suppressed;

/// A chunk of a prompt, whose tokens are read together.
pub(super) struct PromptChunk {
    pub(super) tokens: Vec<u32>,
    /// The slot, and the position of the first token.
    pub(super) position: CachePosition,
    /// The row of the last token, if the prompt ends with it.
    pub(super) end: Option<Row>,
}

/// The scheduler's interface to a device with a model. The device runs work in the order in which
/// it is given.
pub(super) trait Engine {
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
    fn joins(&self, rows: &[Row]) -> bool;

    /// Sets the tokens of a slot's sequence, for the repetition penalty.
    fn set_seen(&mut self, slot: usize, tokens: &[u32]);

    /// Sets the suppressed tokens of a slot's sequence for the work that follows.
    fn set_suppressed(&mut self, slot: usize, tokens: &[u32]);

    /// Starts a step of these rows.
    fn start(&mut self, rows: &[Row]) -> Self::Step;

    /// Starts the step that follows the last step of `count` rows; the host need not know these
    /// rows. Returns `None` on a device that waits for the host.
    fn start_next(&mut self, count: usize) -> Option<Self::Step>;

    /// Waits for a step and returns its rows. Steps are finished in the order in which they were
    /// started.
    fn finish(&mut self, step: Self::Step) -> Result<Vec<Row>, LlamaError>;
}

/// The sequences of a decoder.
pub(super) struct Scheduler<E: Engine> {
    engine: E,
    /// The sequence of each slot.
    sequences: Vec<Option<Sequence>>,
    /// The number of positions of a slot.
    window: usize,
    vocab_size: usize,
    /// The number of sequences that have ever joined.
    joined: u64,
    /// A step that was started before the host has read the tokens of the step before it.
    ahead: Option<Started<E::Step>>,
}

struct Started<S> {
    /// The slot and the id of the sequence of each row.
    sequences: Vec<(usize, u64)>,
    step: S,
}

impl<E: Engine> Scheduler<E> {
    pub(super) fn new(engine: E, slots: usize, window: usize, vocab_size: usize) -> Self {
        Self {
            engine,
            sequences: (0..slots).map(|_| None).collect(),
            window,
            vocab_size,
            joined: 0,
            ahead: None,
        }
    }

    pub(super) fn engine(&self) -> &E {
        &self.engine
    }

    pub(super) fn engine_mut(&mut self) -> &mut E {
        &mut self.engine
    }

    pub(super) fn join(
        &mut self,
        prompt: &[u32],
        options: &SequenceOptions,
    ) -> Result<usize, LlamaError> {
        options.sampling.validate()?;
        options.suppression.validate()?;
        let (room, vocab_size) = (self.window, self.vocab_size);
        let Some(&last) = prompt.last() else {
            return Err(LlamaError::EmptyPrompt);
        };
        if prompt.len() > room {
            return Err(LlamaError::PromptTooLong {
                tokens: prompt.len(),
                room,
            });
        }
        if let Some((position, &token)) = prompt
            .iter()
            .enumerate()
            .find(|&(_, &token)| token as usize >= vocab_size)
        {
            return Err(LlamaError::Token {
                token,
                position,
                vocab_size,
            });
        }
        let Some(slot) = self.sequences.iter().position(Option::is_none) else {
            return Err(LlamaError::TooManySequences {
                asked: self.sequences.len() + 1,
                room: self.sequences.len(),
            });
        };
        self.engine.set_seen(slot, prompt);
        let suppressed = Suppressed::new(&options.suppression, &options.stop_tokens, prompt);
        let row = options
            .sampling
            .row(last, prompt.len() as u32 - 1, slot as u32, options.seed);
        let row = Row {
            suppresses: suppressed.is_some(),
            ..row
        };
        self.joined += 1;
        self.sequences[slot] = Some(Sequence {
            id: self.joined,
            prompt: prompt.to_vec(),
            read: 0,
            row,
            left: options.max_new_tokens,
            stop_tokens: options.stop_tokens.clone(),
            suppressed,
        });
        // The tokens that may not follow the prompt are already known.
        self.suppress([slot], 0);
        Ok(slot)
    }

    pub(super) fn leave(&mut self, slot: usize) {
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

    pub(super) fn step(&mut self) -> Result<Vec<Decoded>, LlamaError> {
        let rows: Vec<Row> = self.running().map(|(_, sequence)| sequence.row).collect();
        if self.waiting() > 0 && self.engine.joins(&rows) {
            self.step_with_prompts()
        } else {
            self.step_beside_prompts()
        }
    }

    /// Reads a chunk of prompts and continues the running sequences in the same pass; if none is
    /// running, reads prompts until one ends.
    fn step_with_prompts(&mut self) -> Result<Vec<Decoded>, LlamaError> {
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
            let size = self.engine.chunk(!chunks.is_empty());
            // A few running rows replace prompt tokens: a device that records passes only for some
            // numbers of rows would round the sum up by half.
            let room = if chunks.len() <= size / 4 {
                size - chunks.len()
            } else {
                size
            };
            chunks.extend(self.next_chunks(room, true));
            if chunks.is_empty() {
                return Ok(Vec::new());
            }
            let step = self.engine.prefill(&chunks);
            if let Some(step) = self.started(&chunks, step) {
                return self.finish(step);
            }
        }
    }

    /// Reads a chunk of prompts in one pass, and continues the running sequences in another.
    fn step_beside_prompts(&mut self) -> Result<Vec<Decoded>, LlamaError> {
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
            // All sequences of the step have left.
            self.engine.finish(step.step)?;
        }
        let is_ahead = ahead.is_some();
        let slots: Vec<usize> = running.iter().map(|&(slot, _)| slot).collect();
        if !is_ahead {
            self.suppress(slots.iter().copied(), 0);
        }
        let step = ahead.or_else(|| {
            let rows: Vec<Row> = running
                .iter()
                .filter_map(|&(slot, _)| Some(self.sequences[slot].as_ref()?.row))
                .collect();
            (!rows.is_empty()).then(|| Started {
                step: self.engine.start(&rows),
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
            self.ahead = self.engine.start_next(running.len()).map(|step| Started {
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
                self.engine.set_suppressed(slot, &tokens);
            }
        }
    }

    /// Waits for a step and returns its outcome, in the order of slots.
    fn finish(
        &mut self,
        Started { sequences, step }: Started<E::Step>,
    ) -> Result<Vec<Decoded>, LlamaError> {
        let rows = self.engine.finish(step)?;
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

    /// The sequences whose prompts are read, with their slots.
    fn running(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        let joined = self
            .sequences
            .iter()
            .enumerate()
            .filter_map(|(slot, sequence)| Some((slot, sequence.as_ref()?)));
        joined.filter(|(_, sequence)| sequence.is_running())
    }

    /// Reads chunks of prompts, oldest first, as many at once as one chunk has room for. While a
    /// sequence is running it reads once, otherwise until a sequence is running. Returns the step
    /// of the prompts whose first token the last pass chooses.
    fn read_prompts(&mut self) -> Option<Started<E::Step>> {
        let is_running = self.running().next().is_some();
        loop {
            let chunks = self.next_chunks(self.engine.chunk(is_running), false);
            if chunks.is_empty() {
                return None;
            }
            let step = self.engine.prefill(&chunks);
            if is_running || self.running().next().is_some() {
                return self.started(&chunks, step);
            }
        }
    }

    /// Takes the next chunks from their prompts, with at most `size` tokens together. If `fills` is
    /// set, a chunk is cut to fill the remaining room; otherwise a prompt is read in chunks of
    /// `size` tokens, and waits if a chunk has no room beside the others.
    fn next_chunks(&mut self, size: usize, fills: bool) -> Vec<PromptChunk> {
        let (mut chunks, mut room) = (Vec::new(), size);
        loop {
            let joined = self
                .sequences
                .iter_mut()
                .enumerate()
                .filter_map(|(slot, sequence)| Some((slot, sequence.as_mut()?)));
            let oldest = joined
                .filter(|(_, sequence)| !sequence.is_running())
                .min_by_key(|(_, sequence)| sequence.id);
            let size = if fills { room } else { size };
            let fits = |sequence: &Sequence| room > 0 && sequence.chunk(size).len() <= room;
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
            room -= tokens.len();
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
    /// `None` if it has left already.
    fn decoded(&mut self, slot: usize, id: u64, row: Row) -> Option<Decoded> {
        let sequence = self.sequences[slot]
            .as_mut()
            .filter(|sequence| sequence.id == id)?;
        sequence.row = row;
        let token = row.token;
        let decoded = match row.state {
            RowState::Failed | RowState::Idle => Decoded {
                slot,
                token: None,
                end: Some(Err(SamplingError::NoToken)),
            },
            _ if sequence.stop_tokens.contains(&token) => Decoded {
                slot,
                token: None,
                end: Some(Ok(StopReason::StopToken(token))),
            },
            state => {
                sequence.left = sequence.left.saturating_sub(1);
                if let Some(suppressed) = &mut sequence.suppressed {
                    suppressed.push(token);
                }
                let end = match (sequence.left, state) {
                    (0, _) => Some(Ok(StopReason::MaxNewTokens)),
                    (_, RowState::WindowFull) => Some(Ok(StopReason::CacheFull)),
                    _ => None,
                };
                Decoded {
                    slot,
                    token: Some(token),
                    end,
                }
            }
        };
        if decoded.end.is_some() {
            self.leave(slot);
        }
        Some(decoded)
    }
}

#[cfg(test)]
mod tests;
