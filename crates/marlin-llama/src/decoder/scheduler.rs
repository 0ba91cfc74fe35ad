//! The order of prompts and steps, independent of the device that runs them.

use marlin_decode::{Row, RowState};

use super::{Decoded, PREFILL_CHUNK, SequenceOptions, StopReason};
use crate::LlamaError;
use crate::model::CachePosition;
use crate::sampling::SamplingError;

/// Tokens of a prompt that are read together.
pub(super) struct PromptChunk {
    pub(super) tokens: Vec<u32>,
    /// The slot, and the position of the first of them.
    pub(super) position: CachePosition,
}

/// A device with a model, as the scheduler sees it. Work that it is given runs in the order in which it is given.
pub(super) trait Engine {
    /// A step that was given to the device.
    type Step;

    /// Runs chunks of prompts through the model, to their positions of the cache: at most [`PREFILL_CHUNK`] tokens.
    fn prefill(&mut self, chunks: &[PromptChunk]);

    /// Sets the tokens that a slot's sequence has, for the repetition penalty.
    fn set_seen(&mut self, slot: usize, tokens: &[u32]);

    /// Starts a step of these rows.
    fn start(&mut self, rows: &[Row]) -> Self::Step;

    /// Starts the step that follows the last one of `count` rows, which the host need not know. None on a device that waits for the host.
    fn start_next(&mut self, count: usize) -> Option<Self::Step>;

    /// The rows after a step. Steps are finished in the order in which they were started.
    fn finish(&mut self, step: Self::Step) -> Result<Vec<Row>, LlamaError>;
}

/// The sequences of a decoder.
pub(super) struct Scheduler<E: Engine> {
    engine: E,
    /// By slot.
    sequences: Vec<Option<Sequence>>,
    /// Positions of a slot.
    window: usize,
    vocab_size: usize,
    /// Sequences that ever joined.
    joined: u64,
    /// The step after the last one whose tokens the host has.
    ahead: Option<Started<E::Step>>,
}

struct Started<S> {
    /// Slots and ids of the sequences of its rows.
    sequences: Vec<(usize, u64)>,
    step: S,
}

struct Sequence {
    /// No other sequence of this decoder has it; later ones have greater ones.
    id: u64,
    /// The tokens of the prompt that go through the model before the first step: all but the last.
    prompt: Vec<u32>,
    /// Tokens of `prompt` that did.
    read: usize,
    row: Row,
    /// Tokens that may follow.
    left: usize,
    stop_tokens: Vec<u32>,
}

impl Sequence {
    /// True if the prompt is read to its end.
    fn is_running(&self) -> bool {
        self.read == self.prompt.len()
    }

    /// The tokens that are read next. Chunk boundaries do not depend on other sequences: other boundaries round differently.
    fn chunk(&self) -> &[u32] {
        &self.prompt[self.read..self.prompt.len().min(self.read + PREFILL_CHUNK)]
    }
}

impl<E: Engine> Scheduler<E> {
    pub(super) fn new(engine: E, slots: usize, window: usize, vocab_size: usize) -> Self {
        Self { engine, sequences: (0..slots).map(|_| None).collect(), window, vocab_size, joined: 0, ahead: None }
    }

    pub(super) fn engine(&self) -> &E {
        &self.engine
    }

    pub(super) fn engine_mut(&mut self) -> &mut E {
        &mut self.engine
    }

    pub(super) fn join(&mut self, prompt: &[u32], options: &SequenceOptions) -> Result<usize, LlamaError> {
        options.sampling.validate()?;
        let (room, vocab_size) = (self.window, self.vocab_size);
        let Some((&last, before)) = prompt.split_last() else { return Err(LlamaError::EmptyPrompt) };
        if prompt.len() > room {
            return Err(LlamaError::PromptTooLong { tokens: prompt.len(), room });
        }
        if let Some((position, &token)) = prompt.iter().enumerate().find(|&(_, &token)| token as usize >= vocab_size) {
            return Err(LlamaError::Token { token, position, vocab_size });
        }
        let Some(slot) = self.sequences.iter().position(Option::is_none) else {
            return Err(LlamaError::TooManySequences { asked: self.sequences.len() + 1, room: self.sequences.len() });
        };
        self.engine.set_seen(slot, prompt);
        let row = options.sampling.row(last, before.len() as u32, slot as u32, options.seed);
        self.joined += 1;
        self.sequences[slot] = Some(Sequence {
            id: self.joined,
            prompt: before.to_vec(),
            read: 0,
            row,
            left: options.max_new_tokens,
            stop_tokens: options.stop_tokens.clone(),
        });
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
        self.sequences.iter().flatten().filter(|sequence| !sequence.is_running()).count()
    }

    pub(super) fn step(&mut self) -> Result<Vec<Decoded>, LlamaError> {
        self.read_prompts();
        let running: Vec<(usize, u64)> = self.running().map(|(slot, sequence)| (slot, sequence.id)).collect();
        let mut ahead = self.ahead.take();
        if let Some(step) = ahead.take_if(|step| !step.sequences.iter().any(|sequence| running.contains(sequence))) {
            // All of its sequences have left.
            self.engine.finish(step.step)?;
        }
        let step = match ahead {
            Some(step) => step,
            None if running.is_empty() => return Ok(Vec::new()),
            None => {
                let rows: Vec<Row> = self.running().map(|(_, sequence)| sequence.row).collect();
                Started { step: self.engine.start(&rows), sequences: running.clone() }
            }
        };
        // The same sequences continue, and the device has the state of all of them: it need not wait for the host.
        if step.sequences == running && self.running().all(|(_, sequence)| sequence.left > 1) {
            self.ahead = self.engine.start_next(running.len()).map(|step| Started { sequences: running, step });
        }
        let rows = self.engine.finish(step.step)?;
        Ok(step.sequences.into_iter().zip(rows).filter_map(|((slot, id), row)| self.decoded(slot, id, row)).collect())
    }

    /// The sequences whose prompts are read, with their slots.
    fn running(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        let joined = self.sequences.iter().enumerate().filter_map(|(slot, sequence)| Some((slot, sequence.as_ref()?)));
        joined.filter(|(_, sequence)| sequence.is_running())
    }

    /// Reads chunks of prompts, oldest first, as many together as one chunk has room for: once while a sequence is running, otherwise until one is.
    fn read_prompts(&mut self) {
        let is_running = self.running().next().is_some();
        loop {
            let chunks = self.next_chunks();
            if chunks.is_empty() {
                return;
            }
            self.engine.prefill(&chunks);
            if is_running || self.running().next().is_some() {
                return;
            }
        }
    }

    /// Takes the chunks that are read next from their prompts.
    fn next_chunks(&mut self) -> Vec<PromptChunk> {
        let (mut chunks, mut room) = (Vec::new(), PREFILL_CHUNK);
        loop {
            let joined = self.sequences.iter_mut().enumerate().filter_map(|(slot, sequence)| Some((slot, sequence.as_mut()?)));
            let oldest = joined.filter(|(_, sequence)| !sequence.is_running()).min_by_key(|(_, sequence)| sequence.id);
            let Some((slot, sequence)) = oldest.filter(|(_, sequence)| sequence.chunk().len() <= room) else { return chunks };
            let (tokens, position) = (sequence.chunk().to_vec(), CachePosition { slot, start: sequence.read });
            room -= tokens.len();
            sequence.read += tokens.len();
            chunks.push(PromptChunk { tokens, position });
        }
    }

    /// The outcome of a step for a sequence, which leaves where it ended; none for one that has left.
    fn decoded(&mut self, slot: usize, id: u64, row: Row) -> Option<Decoded> {
        let sequence = self.sequences[slot].as_mut().filter(|sequence| sequence.id == id)?;
        sequence.row = row;
        let token = row.token;
        let decoded = match row.state {
            RowState::Failed | RowState::Idle => Decoded { slot, token: None, end: Some(Err(SamplingError::NoToken)) },
            _ if sequence.stop_tokens.contains(&token) => Decoded { slot, token: None, end: Some(Ok(StopReason::StopToken(token))) },
            state => {
                sequence.left = sequence.left.saturating_sub(1);
                let end = match (sequence.left, state) {
                    (0, _) => Some(Ok(StopReason::MaxNewTokens)),
                    (_, RowState::WindowFull) => Some(Ok(StopReason::CacheFull)),
                    _ => None,
                };
                Decoded { slot, token: Some(token), end }
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
