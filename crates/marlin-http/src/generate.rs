//! Requests to the engine, and their answers.

use crate::error::ApiError;
use crate::output::{Joined, OutputOptions, OutputParser, Part};
use crate::state::ApiState;
use futures_util::stream::{SelectAll, Stream, StreamExt, select_all};
use marlin_serve::server::{
    EndReason, EventStream, FailReason, GenerationRequest, ParamError, SubmitError, TokenEvent,
    TokenLogprobs, Usage,
};
use openai_protocol::common;
use serde_json::Value;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

/// The tokens of a prompt, and the text that they stand for.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    pub tokens: Vec<u32>,
    pub text: String,
}

/// What is asked of the engine: `choices` answers to each prompt.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub prompts: Vec<Prompt>,
    /// The number of answers to each prompt.
    pub choices: usize,
    /// The request without its prompt.
    pub request: GenerationRequest,
    pub output: OutputOptions,
}

/// The log probabilities of a generated token.
#[derive(Debug, Clone)]
pub(crate) struct Logprobs {
    pub token: u32,
    pub values: TokenLogprobs,
}

/// The reason why an answer is complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The model ended its turn.
    Stop,
    /// A stop token of the request.
    StopToken(u32),
    /// A stop string of the request.
    StopString(String),
    /// The answer has all tokens that it may have.
    Length,
}

impl Finish {
    /// Returns the reason in OpenAI's words. `has_calls` says whether the answer calls tools.
    pub fn openai(&self, has_calls: bool) -> &'static str {
        match self {
            Self::Length => "length",
            _ if has_calls => "tool_calls",
            Self::Stop | Self::StopToken(_) | Self::StopString(_) => "stop",
        }
    }

    /// Returns which of the request's own stops ended the answer.
    pub fn matched_stop(&self) -> Option<Value> {
        match self {
            Self::StopString(text) => Some(text.as_str().into()),
            Self::StopToken(token) => Some((*token).into()),
            Self::Stop | Self::Length => None,
        }
    }
}

/// Something new of an answer. The last update is `End` or `Failed`.
#[derive(Debug)]
pub(crate) enum Update {
    /// A token that is not the last. Its text may be held back, and come with a later token.
    Token {
        parts: Vec<Part>,
        logprobs: Option<Logprobs>,
    },
    /// The last token, with the parts that were held back: the answer is complete.
    End {
        parts: Vec<Part>,
        logprobs: Option<Logprobs>,
        finish: Finish,
        counts: Counts,
    },
    /// The answer could not be completed.
    Failed(ApiError),
}

/// The tokens of an answer, or of several.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub prompt: u32,
    /// The tokens of the prompt that were in the cache.
    pub cached: u32,
    pub completion: u32,
}

impl Counts {
    /// Returns the tokens of the prompt that were not in the cache.
    pub fn computed(&self) -> u32 {
        self.prompt.saturating_sub(self.cached)
    }

    /// Returns the counts in OpenAI's form.
    pub fn openai(&self) -> common::Usage {
        common::Usage::from_counts(self.prompt, self.completion).with_cached_tokens(self.cached)
    }
}

impl From<Usage> for Counts {
    fn from(usage: Usage) -> Self {
        let count = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
        Self {
            prompt: count(usage.prompt_tokens),
            cached: count(usage.cached_tokens),
            completion: count(usage.completion_tokens),
        }
    }
}

impl Job {
    /// Hands the requests to the engine. If it refuses one, the others are cancelled.
    pub fn submit(self, state: &ApiState) -> Result<Answers, ApiError> {
        let Self {
            prompts,
            choices,
            mut request,
            output,
        } = self;
        let most = state.options().max_choices;
        let answers = prompts.len().saturating_mul(choices);
        if answers > most {
            return Err(ApiError::invalid(
                "n",
                format!("{answers} completions are asked for; one request may have {most}."),
            ));
        }
        let seed = request.sampling.seed;
        let mut streams = Vec::with_capacity(answers);
        for prompt in &prompts {
            for choice in 0..choices {
                // Choices with one seed would be equal.
                request.sampling.seed = seed.map(|seed| seed.wrapping_add(choice as u64));
                request.prompt.clone_from(&prompt.tokens);
                let events = state.engine().submit(request.clone());
                streams.push(Answer {
                    index: streams.len(),
                    events: events.map_err(refused)?,
                    output: OutputParser::new(output.clone(), &prompt.text),
                    last: None,
                });
            }
        }
        Ok(Answers {
            choices,
            prompt_tokens: prompts.iter().map(|prompt| prompt.tokens.len()).collect(),
            len: streams.len(),
            streams: select_all(streams),
        })
    }
}

/// The answer to one prompt.
struct Answer {
    index: usize,
    events: EventStream,
    output: OutputParser,
    /// The last token, until the engine has told why it is the last.
    last: Option<(Vec<Part>, Option<Logprobs>)>,
}

impl Answer {
    /// Returns the update for an event; none for the last token, whose update is that of the end.
    fn update(&mut self, event: TokenEvent) -> Option<Update> {
        match event {
            TokenEvent::Token {
                token,
                text,
                logprobs,
                is_last,
            } => {
                let parts = self.output.push(&text);
                let logprobs = logprobs.map(|values| Logprobs { token, values });
                if is_last {
                    self.last = Some((parts, logprobs));
                    return None;
                }
                Some(Update::Token { parts, logprobs })
            }
            TokenEvent::End { reason, usage } => {
                let (mut parts, logprobs) = self.last.take().unwrap_or_default();
                parts.extend(self.output.finish());
                Some(Update::End {
                    parts,
                    logprobs,
                    finish: finish(reason),
                    counts: usage.into(),
                })
            }
            TokenEvent::Failed { reason, .. } => Some(Update::Failed(failed(reason))),
        }
    }
}

impl Stream for Answer {
    type Item = (usize, Update);

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(event) = ready!(self.events.poll_next_unpin(context)) else {
                return Poll::Ready(None);
            };
            if let Some(update) = self.update(event) {
                return Poll::Ready(Some((self.index, update)));
            }
        }
    }
}

/// The answers to a job, as they are generated: each update with the number of its answer. The
/// answers to the first prompt are counted first.
pub(crate) struct Answers {
    streams: SelectAll<Answer>,
    len: usize,
    choices: usize,
    prompt_tokens: Vec<usize>,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Reply {
    pub parts: Joined,
    pub logprobs: Vec<Logprobs>,
    pub finish: Finish,
}

impl Answers {
    /// The number of answers.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the sum of the answers' tokens, of which none has been counted yet.
    pub fn total(&self) -> Total {
        Total {
            choices: self.choices,
            cached: vec![None; self.prompt_tokens.len()],
            completion: vec![0; self.len],
            counts: Counts {
                prompt: u32::try_from(self.prompt_tokens.iter().sum::<usize>()).unwrap_or(u32::MAX),
                ..Counts::default()
            },
        }
    }

    /// Waits for the next update.
    pub async fn next(&mut self) -> Option<(usize, Update)> {
        self.streams.next().await
    }

    /// Waits for all answers.
    pub async fn collect(self) -> Result<(Vec<Reply>, Counts), ApiError> {
        self.collect_with(|_| {}).await
    }

    /// Waits for all answers, and shows each update to `see`.
    pub async fn collect_with(
        mut self,
        mut see: impl FnMut(&Update),
    ) -> Result<(Vec<Reply>, Counts), ApiError> {
        let mut total = self.total();
        let replies = (0..self.len).map(|_| Reply {
            parts: Joined::default(),
            logprobs: Vec::new(),
            finish: Finish::Stop,
        });
        let mut replies: Vec<_> = replies.collect();
        while let Some((index, update)) = self.next().await {
            total.count(index, &update);
            see(&update);
            let reply = &mut replies[index];
            match update {
                Update::Token { parts, logprobs } => {
                    reply.parts.extend(parts);
                    reply.logprobs.extend(logprobs);
                }
                Update::End {
                    parts,
                    logprobs,
                    finish,
                    ..
                } => {
                    reply.parts.extend(parts);
                    reply.logprobs.extend(logprobs);
                    reply.finish = finish;
                }
                Update::Failed(error) => return Err(error),
            }
        }
        Ok((replies, total.counts))
    }
}

/// The tokens of several answers together. Each prompt is counted once.
#[derive(Debug)]
pub(crate) struct Total {
    choices: usize,
    /// The cached tokens of each prompt, by the first of its answers that ended.
    cached: Vec<Option<u32>>,
    /// The tokens of each answer.
    completion: Vec<u32>,
    pub counts: Counts,
}

impl Total {
    /// Counts the tokens of an update.
    pub fn count(&mut self, index: usize, update: &Update) {
        match update {
            Update::Token { .. } => self.count_completion(index, self.completion[index] + 1),
            Update::End { counts, .. } => {
                self.count_completion(index, counts.completion);
                let cached = &mut self.cached[index / self.choices];
                if cached.replace(counts.cached).is_none() {
                    self.counts.cached += counts.cached;
                }
            }
            Update::Failed(_) => {}
        }
    }

    /// Sets the tokens of an answer.
    fn count_completion(&mut self, index: usize, completion: u32) {
        let before = std::mem::replace(&mut self.completion[index], completion);
        self.counts.completion = self.counts.completion - before + completion;
    }
}

fn finish(reason: EndReason) -> Finish {
    match reason {
        EndReason::StopToken(token) => Finish::StopToken(token),
        EndReason::StopString(text) => Finish::StopString(text),
        EndReason::Length => Finish::Length,
        _ => Finish::Stop,
    }
}

/// Returns the error for a request that ended before it was complete.
fn failed(reason: FailReason) -> ApiError {
    match reason {
        FailReason::QueueTimeout(_) => ApiError::Busy,
        FailReason::Timeout(_) => ApiError::Timeout(reason.to_string()),
        FailReason::ShutDown => ApiError::ShuttingDown,
        _ => ApiError::Engine(reason.to_string()),
    }
}

/// Returns the error for a request that the engine does not take.
fn refused(error: SubmitError) -> ApiError {
    match error {
        SubmitError::ContextLength {
            prompt,
            max_tokens,
            window,
        }
        | SubmitError::CacheCapacity {
            prompt,
            max_tokens,
            capacity: window,
        } => ApiError::ContextLength {
            window,
            prompt,
            completion: max_tokens,
        },
        SubmitError::Param(ParamError::Unsupported { param }) => {
            ApiError::unsupported(param, error.to_string())
        }
        SubmitError::Param(ParamError::Invalid { param, .. }) => {
            ApiError::invalid(param, error.to_string())
        }
        SubmitError::EmptyPrompt => ApiError::invalid("prompt", error.to_string()),
        SubmitError::QueueFull { .. } => ApiError::Busy,
        SubmitError::ShuttingDown => ApiError::ShuttingDown,
        _ => ApiError::Engine(error.to_string()),
    }
}
