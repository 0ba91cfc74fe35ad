//! Batches of tokens that the caller chooses, over a paged KV cache: the device's side of a server.

mod ahead;
mod chain;
mod sequence;
mod step;

use std::collections::VecDeque;
use std::sync::Arc;

use burn::tensor::StreamId;
use marlin_nn::{CacheFormat, MAX_LOGPROBS, Pages, SequenceState, SequenceStatus};

use self::chain::Chain;
use self::sequence::Sequence;
pub use self::step::{AllowedTokens, BatchOutput, BatchStep, DecodeToken, PromptPart};
use self::step::{ChoosingRow, Started, StartedPass};
use super::executor::ModelExecutors;
use super::scheduler::{Executor, PromptChunk};
use super::{RequestParams, check_prompt, check_slots};
use crate::biases::bias_rows;
use crate::model::CachePosition;
use crate::sampling::SamplingError;
use crate::{KvCache, Model, ModelError};

/// Runs batches of tokens of several sequences through a model, over a KV cache of pages.
///
/// The engine has no queue and no policy: the caller assigns slots and pages to sequences, and
/// decides which tokens each step computes. [`Engine`](crate::Engine) does these itself, without
/// pages. What is said there about threads and graphs holds here, too.
pub struct BatchEngine {
    /// The stream of the model's weights.
    stream: StreamId,
    executor: ModelExecutors,
    pages: Pages,
    /// The maximum number of positions of a sequence.
    window: usize,
    vocab_size: usize,
    /// The sequence of each slot.
    sequences: Vec<Option<Sequence>>,
    /// The number of sequences that were ever added.
    added: u64,
    /// The rows of the last decode step, whose tokens are on the device.
    chain: Option<Chain>,
    /// The steps that the caller has not finished, the oldest first.
    steps: VecDeque<Started>,
    next_step: u64,
}

impl BatchEngine {
    /// Creates an engine without sequences, with a KV cache of `pages` in a format that up to
    /// `slots` sequences share.
    ///
    /// # Errors
    /// [`ModelError::TooManySequences`] if `slots` is not from 1 to
    /// [`MAX_SEQUENCES`](crate::MAX_SEQUENCES), [`ModelError::CacheTooLarge`] if the pages do not
    /// fit the device, before anything is allocated, and [`ModelError::E4m3Cache`] if the device
    /// does not run the attention of prompts on tensor cores, which this format needs.
    ///
    /// # Panics
    /// Panics if the size of a page is not a power of two, at least [`Pages::MIN_SIZE`].
    pub fn new(
        model: Arc<Model>,
        slots: usize,
        pages: Pages,
        format: CacheFormat,
    ) -> Result<Self, ModelError> {
        check_slots(slots)?;
        let (stream, window, vocab_size) =
            (model.stream(), model.max_len(), model.config().vocab_size);
        let executor =
            stream.executes(|| ModelExecutors::new(model, slots, Some((pages, format))))?;
        Ok(Self {
            stream,
            executor,
            pages,
            window,
            vocab_size,
            sequences: (0..slots).map(|_| None).collect(),
            added: 0,
            chain: None,
            steps: VecDeque::new(),
            next_step: 0,
        })
    }

    /// Returns the size in bytes of a page of `page_size` positions of a model's KV cache, on each
    /// device of a split model; on devices that share the memory of the host, of all of them.
    pub fn page_bytes(model: &Model, page_size: usize, format: CacheFormat) -> usize {
        KvCache::page_bytes(model.config(), page_size, format, model.dtype())
            .saturating_mul(model.ranks_in_memory())
    }

    /// Releases memory that the allocator of a model's device keeps, and returns the free memory in
    /// bytes; `None` if the device does not report it. Of several devices, that of the one with
    /// least.
    pub fn free_memory(model: &Model) -> Option<usize> {
        model.free_memory()
    }

    /// Returns true if the memory of a model's device is that of the host.
    pub fn runs_on_host(model: &Model) -> bool {
        burn_marlin::device::is_host(&model.device())
    }

    /// Returns the pages of the KV cache.
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// Returns the largest number of tokens that one pass over the weights computes. A step of more
    /// takes several passes.
    pub fn pass_tokens(&self) -> usize {
        self.executor.chunk(false)
    }

    /// Returns true if the device runs a step beside the host, so that it helps to start the next
    /// step before the last one is finished; false before the first step or
    /// [`warm_up`](Self::warm_up).
    pub fn runs_ahead(&self) -> bool {
        self.executor.runs_ahead()
    }

    /// Takes a sequence into a free slot. `tokens` are its tokens so far: its prompt of
    /// `prompt_len` tokens, then those that were chosen before the sequence was
    /// [removed](Self::remove) from its slot to make room for others.
    /// [`RequestParams::max_new_tokens`] is not applied. With `logprobs`, steps return the log
    /// probability of each token of the sequence, and those of this number of most likely tokens,
    /// at most [`MAX_LOGPROBS`].
    ///
    /// # Errors
    /// [`ModelError::EmptyPrompt`], [`ModelError::PromptTooLong`], [`ModelError::Token`] for a
    /// token outside the vocabulary, [`ModelError::Sampling`] for options outside their range and
    /// empty bad words.
    ///
    /// # Panics
    /// Panics if the slot is in use, or if there are fewer than `prompt_len` tokens.
    pub fn add(
        &mut self,
        slot: usize,
        tokens: &[u32],
        prompt_len: usize,
        params: &RequestParams,
        logprobs: Option<usize>,
    ) -> Result<(), ModelError> {
        assert!(
            self.sequences[slot].is_none(),
            "slot {slot} has a sequence already"
        );
        params.validate(self.vocab_size)?;
        check_prompt(tokens, self.window, self.vocab_size)?;
        let [prompt, chosen]: [&[u32]; 2] = tokens.split_at(prompt_len).into();
        let biases = bias_rows(params, chosen, self.vocab_size);
        let most = self.vocab_size.min(MAX_LOGPROBS);
        let row = SequenceState {
            is_biased: biases.is_some(),
            logprobs: logprobs.map(|count| count.min(most) as u32),
            ..params.sampling.row(0, 0, slot as u32, params.seed)
        };
        self.stream.executes(|| {
            self.executor.set_token_bitmap(slot, tokens);
            if let Some(rows) = biases {
                self.executor.set_biases(slot, rows);
            }
        });
        self.added += 1;
        self.sequences[slot] = Some(Sequence::new(self.added, row, [prompt, chosen], params));
        Ok(())
    }

    /// Removes the sequence of a slot, if it has one. What steps in flight compute for it is
    /// written to its pages.
    pub fn remove(&mut self, slot: usize) {
        self.sequences[slot] = None;
        self.chain.iter_mut().for_each(|chain| chain.remove(slot));
    }

    /// Starts a step: parts of prompts, and tokens that continue sequences. Does not wait for the
    /// device, unless the step needs tokens on the host that a step in flight chooses: to compute
    /// decoded tokens beside prompts, or for a sequence with [`AllowedTokens`] or with bad words of
    /// several tokens.
    ///
    /// `allowed` has at most one entry for each slot.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    ///
    /// # Panics
    /// Panics if a slot has no sequence, if it has more than one entry, if positions or pages are
    /// outside the cache, or if a token is neither given nor known.
    pub fn start(
        &mut self,
        prompts: &[PromptPart<'_>],
        tokens: &[DecodeToken<'_>],
        allowed: Vec<AllowedTokens>,
    ) -> Result<BatchStep, ModelError> {
        self.stream
            .executes(|| self.start_on_stream(prompts, tokens, allowed))
    }

    /// Waits for a step, and returns the outcomes: of each part of a prompt, then of each token.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    ///
    /// # Panics
    /// Panics if another step was started before, and is not finished.
    pub fn finish(&mut self, step: BatchStep) -> Result<Vec<BatchOutput>, ModelError> {
        let first = self.steps.front().map(|step| step.id);
        assert_eq!(first, Some(step.0), "steps are finished in order, once");
        self.stream.executes(|| self.wait(1))?;
        Ok(self
            .steps
            .pop_front()
            .map_or(Vec::new(), |step| step.outputs))
    }

    fn start_on_stream(
        &mut self,
        prompts: &[PromptPart<'_>],
        tokens: &[DecodeToken<'_>],
        allowed: Vec<AllowedTokens>,
    ) -> Result<BatchStep, ModelError> {
        let of_prompts = prompts.iter().map(|part| (part.slot, part.pages));
        let of_tokens = tokens.iter().map(|token| (token.slot, token.pages));
        for (slot, pages) in of_prompts.chain(of_tokens) {
            let sequence = sequence(&mut self.sequences, slot);
            if sequence.pages != pages {
                self.executor.set_pages(slot, pages);
                pages.clone_into(&mut sequence.pages);
            }
        }
        // The slots whose next token this step chooses.
        let ended = prompts.iter().filter(|part| part.ends);
        let choosing: Vec<usize> = ended
            .map(|part| part.slot)
            .chain(tokens.iter().map(|token| token.slot))
            .collect();
        let is_mixed = !prompts.is_empty() && !tokens.is_empty() && {
            let rows: Vec<SequenceState> = tokens.iter().map(|token| self.row(token)).collect();
            self.executor.mixes(&rows)
        };
        let depends = choosing.iter().any(|&slot| {
            let sequence = self.sequences[slot].as_ref();
            sequence.is_some_and(Sequence::depends_on_tokens)
        });
        if is_mixed || depends || !allowed.is_empty() {
            self.wait(self.steps.len())?;
        }
        self.suppress(&choosing, allowed);

        let id = self.next_step;
        self.next_step += 1;
        let mut passes = Vec::new();
        if !prompts.is_empty() {
            let mixed = if is_mixed { tokens } else { &[] };
            passes = self.prefill(prompts, mixed);
        }
        if !tokens.is_empty() && !is_mixed {
            passes.push(self.decode(tokens, prompts.len())?);
        }
        for &slot in &choosing {
            sequence(&mut self.sequences, slot).unknown += 1;
        }
        self.steps.push_back(Started {
            id,
            passes,
            outputs: vec![BatchOutput::Computed; prompts.len() + tokens.len()],
        });
        Ok(BatchStep(id))
    }

    /// Sets the suppressed tokens of slots for the choice of their next token.
    fn suppress(&mut self, slots: &[usize], mut allowed: Vec<AllowedTokens>) {
        for &slot in slots {
            let mask = allowed.iter().position(|allowed| allowed.slot == slot);
            let mask = mask.map(|mask| allowed.swap_remove(mask).words);
            let sequence = sequence(&mut self.sequences, slot);
            if sequence.suppress(&mut self.executor, slot, mask) {
                self.chain.iter_mut().for_each(|chain| chain.remove(slot));
            }
        }
    }

    /// Computes parts of prompts, and tokens of sequences beside them, in as few passes as
    /// possible.
    fn prefill(
        &mut self,
        prompts: &[PromptPart<'_>],
        tokens: &[DecodeToken<'_>],
    ) -> Vec<StartedPass> {
        let size = self.executor.chunk(!tokens.is_empty());
        // A token that continues a sequence is a prompt of one token that ends.
        let known: Vec<[u32; 1]> = tokens.iter().map(|token| [self.row(token).token]).collect();
        let continued = tokens.iter().zip(&known).map(|(token, known)| PromptPart {
            slot: token.slot,
            start: token.position,
            tokens: known,
            pages: token.pages,
            ends: true,
        });
        let continued = (prompts.len()..).zip(continued);
        let parts = continued.chain(prompts.iter().copied().enumerate());
        let executor = &mut self.executor;
        let (mut passes, mut chunks, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        let mut room = size;
        for (output, part) in parts {
            let PromptPart { slot, tokens, .. } = part;
            let sequence = sequence(&mut self.sequences, slot);
            let mut read = 0;
            while read < tokens.len() {
                let chunk = &tokens[read..tokens.len().min(read + room)];
                let start = part.start + read;
                (read, room) = (read + chunk.len(), room - chunk.len());
                let ends = part.ends && read == tokens.len();
                let last = start + chunk.len() - 1;
                chunks.push(PromptChunk {
                    tokens: chunk.to_vec(),
                    position: CachePosition { slot, start },
                    end: ends.then(|| sequence.row_at(chunk[chunk.len() - 1], last)),
                });
                rows.extend(ends.then_some(Some(ChoosingRow {
                    output,
                    slot,
                    sequence: sequence.id,
                })));
                if room == 0 {
                    passes.extend(StartedPass::prefill(executor, &mut chunks, &mut rows));
                    room = size;
                }
            }
        }
        passes.extend(StartedPass::prefill(executor, &mut chunks, &mut rows));
        if !tokens.is_empty() {
            self.chain = None;
        }
        passes
    }

    /// Starts a decode step. The outputs of its rows follow `outputs` others.
    fn decode(
        &mut self,
        tokens: &[DecodeToken<'_>],
        outputs: usize,
    ) -> Result<StartedPass, ModelError> {
        let wanted: Vec<(usize, bool)> = tokens
            .iter()
            .map(|token| (token.slot, token.token.is_some()))
            .collect();
        let logprobs = tokens.iter().any(|token| {
            let sequence = self.sequences[token.slot].as_ref();
            sequence.is_some_and(Sequence::wants_logprobs)
        });
        let chain = self.chain.as_mut();
        let continued = chain
            .filter(|chain| chain.logprobs == logprobs)
            .and_then(|chain| chain.next(&wanted));
        let (step, indices) = match continued {
            Some(next) => {
                let replaced: Vec<(usize, SequenceState)> = next
                    .replaced
                    .iter()
                    .map(|&(index, token)| {
                        let row = token.map(|token| self.row(&tokens[token]));
                        (index, row.unwrap_or(SequenceState::IDLE))
                    })
                    .collect();
                (
                    self.executor.start_replaced(next.size, &replaced, logprobs),
                    next.rows,
                )
            }
            None => {
                self.wait(self.steps.len())?;
                let rows: Vec<SequenceState> = tokens.iter().map(|token| self.row(token)).collect();
                let slots: Vec<usize> = tokens.iter().map(|token| token.slot).collect();
                self.chain = Some(Chain::new(&slots, logprobs));
                (self.executor.start(&rows), (0..tokens.len()).collect())
            }
        };
        let mut rows = vec![None; indices.iter().max().map_or(0, |last| last + 1)];
        for ((output, token), &index) in (outputs..).zip(tokens).zip(&indices) {
            rows[index] = Some(ChoosingRow {
                output,
                slot: token.slot,
                sequence: sequence(&mut self.sequences, token.slot).id,
            });
        }
        Ok(StartedPass { step, rows })
    }

    /// Returns the row of a token that continues a sequence, with token 0 if it is not known.
    fn row(&self, token: &DecodeToken<'_>) -> SequenceState {
        let Some(sequence) = &self.sequences[token.slot] else {
            panic!("slot {} has no sequence", token.slot);
        };
        let known = token.token.or(sequence.last).unwrap_or(0);
        sequence.row_at(known, token.position)
    }

    /// Waits for the first `count` steps in flight.
    fn wait(&mut self, count: usize) -> Result<(), ModelError> {
        for step in self.steps.iter_mut().take(count) {
            for StartedPass { step: pass, rows } in step.passes.drain(..) {
                let states = self.executor.finish_with_logprobs(pass)?;
                for (row, (state, logprobs)) in rows.into_iter().zip(states) {
                    let Some(row) = row else {
                        continue;
                    };
                    step.outputs[row.output] = match state.status {
                        SequenceStatus::Failed | SequenceStatus::Idle => {
                            BatchOutput::Failed(SamplingError::NoToken)
                        }
                        SequenceStatus::At(_) | SequenceStatus::WindowFull => {
                            let token = state.token;
                            BatchOutput::Token { token, logprobs }
                        }
                    };
                    if let Some(sequence) = &mut self.sequences[row.slot]
                        && sequence.id == row.sequence
                    {
                        sequence.push(state.token);
                    }
                }
            }
        }
        Ok(())
    }
}

fn sequence(sequences: &mut [Option<Sequence>], slot: usize) -> &mut Sequence {
    match &mut sequences[slot] {
        Some(sequence) => sequence,
        None => panic!("slot {slot} has no sequence"),
    }
}
