//! A request that has not ended, as the thread of the server sees it.

use super::ServerOptions;
use super::event::{EndReason, FailReason, TokenEvent, Usage};
use super::executor::{NewSequence, TokenLogprobs};
use super::handle::Submission;
use super::params::GenerationRequest;
use super::text::Text;
use crate::grammar::{GrammarError, GrammarState};
use crate::scheduler::{Outcome, Request, RequestId};
use futures_channel::mpsc;
use marlin_format::with_causes;
use marlin_text::{TextError, Tokenizer};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// The last event of a request.
#[derive(Debug)]
pub(super) enum Last {
    End(EndReason),
    Failed(FailReason),
    /// The reader has gone.
    Cancelled,
}

impl Last {
    pub fn failed_grammar(error: &GrammarError) -> Self {
        Self::Failed(FailReason::Grammar(with_causes(error)))
    }
}

/// A request that has not ended.
#[derive(Debug)]
pub(super) struct Live<'t> {
    pub ticket: u64,
    request: GenerationRequest,
    /// The tokens of the prompt, then the generated ones.
    tokens: Vec<u32>,
    prompt_tokens: usize,
    max_tokens: usize,
    seed: u64,
    /// Those of the request, then the end-of-sequence tokens, unless it ignores them.
    stop_tokens: Vec<u32>,
    /// `None` before the first admission and after the last token.
    text: Option<Text<'t>>,
    /// The state of the grammar; `None` without a grammar, before the first admission, and once the
    /// text is complete.
    grammar: Option<GrammarState>,
    events: mpsc::Sender<TokenEvent>,
    /// The most events that wait to be read.
    buffer: usize,
    /// The sender whose place in the channel is kept for the last event.
    last_event: mpsc::Sender<TokenEvent>,
    /// The last event, if it is known before the scheduler ends the request.
    pub last: Option<Last>,
    /// True while the executor has the sequence.
    pub in_executor: bool,
    /// True for a request of the server itself.
    pub is_trial: bool,
    cached_tokens: usize,
    pub times: Times,
}

/// The times at which a request came to its stages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    pub arrival: Duration,
    /// The time at which it first left the waiting queue.
    pub admitted: Option<Duration>,
    pub first_token: Option<Duration>,
    pub last_token: Option<Duration>,
}

impl<'t> Live<'t> {
    pub fn new(submission: Submission, options: &ServerOptions) -> Self {
        let Submission {
            ticket,
            mut request,
            max_tokens,
            arrival,
            events,
            is_trial,
        } = submission;
        let mut stop_tokens = request.stop_token_ids.clone();
        if !request.ignore_eos {
            stop_tokens.extend(&options.eos_tokens);
        }
        let seed = request.sampling.seed;
        Self {
            ticket,
            prompt_tokens: request.prompt.len(),
            tokens: std::mem::take(&mut request.prompt),
            max_tokens,
            seed: seed.unwrap_or_else(|| RandomState::new().hash_one(ticket)),
            stop_tokens,
            text: None,
            grammar: None,
            last_event: events.clone(),
            events,
            buffer: options.event_buffer,
            last: None,
            in_executor: false,
            is_trial,
            cached_tokens: 0,
            times: Times {
                arrival,
                admitted: None,
                first_token: None,
                last_token: None,
            },
            request,
        }
    }

    /// Returns the request for the scheduler.
    pub fn to_scheduler(&self) -> Request {
        Request {
            prompt: self.tokens.clone(),
            max_tokens: self.max_tokens,
            priority: self.request.priority,
            key: self.request.key,
            queue_timeout: self.request.queue_timeout,
            timeout: self.request.timeout,
        }
    }

    /// Returns the sequence for the executor.
    pub fn to_executor(&self, request: RequestId) -> NewSequence<'_> {
        NewSequence {
            request,
            tokens: &self.tokens,
            prompt: self.prompt_tokens,
            params: &self.request.sampling,
            seed: self.seed,
            stop_tokens: &self.stop_tokens,
        }
    }

    /// Notes that the sequence is in a step for the first time, with `cached` tokens of its prompt
    /// in the KV cache.
    pub fn admit(
        &mut self,
        tokenizer: &'t Tokenizer,
        cached: usize,
        now: Duration,
    ) -> Result<(), TextError> {
        self.cached_tokens = cached;
        self.times.admitted = Some(now);
        let text = Text::after(tokenizer, &self.tokens, &self.request.stop)?;
        self.text = Some(text);
        self.grammar = self.request.grammar.as_ref().map(|grammar| grammar.start());
        Ok(())
    }

    /// Returns true if the tokens of the request follow a grammar.
    pub fn has_grammar(&self) -> bool {
        self.request.grammar.is_some()
    }

    /// Returns the state of the grammar, if the sequence has more tokens of it.
    pub fn grammar(&mut self) -> Option<&mut GrammarState> {
        self.grammar.as_mut()
    }

    /// Advances the grammar by a token that was sampled, before it is [pushed](Self::push).
    pub fn accept(&mut self, token: u32) {
        if self.stop_token(token).is_some() {
            return;
        }
        let Some(grammar) = &mut self.grammar else {
            return;
        };
        match grammar.accept(token) {
            Ok(()) if !grammar.is_stopped() => return,
            Ok(()) => self.last = Some(Last::End(EndReason::Grammar)),
            Err(error) => self.last = Some(Last::failed_grammar(&error)),
        }
        self.grammar = None;
    }

    /// Takes a token that was sampled, and sends it. Returns what that means for the scheduler.
    pub fn push(&mut self, token: u32, logprobs: Option<TokenLogprobs>) -> Outcome {
        self.tokens.push(token);
        let text = match self.decode(token) {
            Ok(text) => text,
            Err(error) => {
                let reason = with_causes(&error);
                self.last = Some(Last::Failed(FailReason::Text(reason.clone())));
                return Outcome::Failed(reason);
            }
        };
        let is_last = match &self.last {
            Some(last) => matches!(last, Last::End(_)),
            None => self.usage().completion_tokens == self.max_tokens,
        };
        let event = TokenEvent::Token {
            token,
            text,
            logprobs,
            is_last,
        };
        if let Err(error) = self.events.try_send(event) {
            self.last = Some(if error.is_disconnected() {
                Last::Cancelled
            } else {
                Last::Failed(FailReason::SlowReader {
                    buffer: self.buffer,
                })
            });
        }
        if self.last.is_some() {
            Outcome::Stop(token)
        } else {
            Outcome::Token(token)
        }
    }

    /// Returns the text that a token completes, and sets the last event if the token ends the
    /// sequence.
    fn decode(&mut self, token: u32) -> Result<String, TextError> {
        let generated = self.usage().completion_tokens;
        let Some(mut stream) = self.text.take() else {
            return Ok(String::new());
        };
        let stop = self.stop_token(token);
        let can_stop = generated > self.request.sampling.min_tokens;
        let (mut text, mut string) = match stop {
            Some(_) => (String::new(), None),
            None => stream.push(token, can_stop)?,
        };
        if let Some(reason) = stop {
            self.last = Some(Last::End(reason));
        }
        if string.is_none() && (self.last.is_some() || generated == self.max_tokens) {
            let (rest, found) = stream.finish()?;
            text += &rest;
            string = found;
        } else {
            self.text = Some(stream);
        }
        if let Some(index) = string {
            let string = self.request.stop[index].clone();
            self.last = Some(Last::End(EndReason::StopString(string)));
        }
        Ok(text)
    }

    /// Returns the reason for which a token ends the sequence, if it does.
    fn stop_token(&self, token: u32) -> Option<EndReason> {
        let (asked, eos) = self.stop_tokens.split_at(self.request.stop_token_ids.len());
        if eos.contains(&token) {
            Some(EndReason::EndOfSequence)
        } else {
            asked
                .contains(&token)
                .then_some(EndReason::StopToken(token))
        }
    }

    /// Sends the last event.
    pub fn end(mut self, last: Last) {
        let usage = self.usage();
        let event = match last {
            Last::End(reason) => TokenEvent::End { reason, usage },
            Last::Failed(reason) => TokenEvent::Failed { reason, usage },
            Last::Cancelled => return,
        };
        // The reader may have gone.
        let _ = self.last_event.try_send(event);
    }

    /// Returns the number of tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Returns the most tokens that are generated.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Returns the tokens of the request so far.
    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            completion_tokens: self.tokens.len() - self.prompt_tokens,
        }
    }
}
