//! Log probabilities with the texts of their tokens.

use crate::generate::{Finish, Logprobs, Update};
use crate::output::Part;
use marlin_text::Tokenizer;
use openai_protocol::common::{
    ChatLogProbs, ChatLogProbsContent, LogProbs, TopLogProb, to_value_exact,
};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The bytes of the tokens, for log probabilities.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    bytes: BTreeMap<u32, Vec<u8>>,
}

impl Vocabulary {
    /// Reads the tokens of a tokenizer.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, marlin_text::TextError> {
        let bytes = tokenizer.token_bytes()?;
        Ok(Self { bytes })
    }

    fn bytes(&self, token: u32) -> &[u8] {
        self.bytes.get(&token).map_or(&[], Vec::as_slice)
    }

    /// The text of a token. Bytes that are not a character are U+FFFD.
    fn text(&self, token: u32) -> String {
        String::from_utf8_lossy(self.bytes(token)).into_owned()
    }

    /// Returns log probabilities in the form of chat completions.
    pub fn chat<'a>(&self, logprobs: impl IntoIterator<Item = &'a Logprobs>) -> ChatLogProbs {
        let content = logprobs.into_iter().map(|logprobs| self.token(logprobs));
        ChatLogProbs::Detailed {
            content: Some(content.collect()),
            refusal: None,
        }
    }

    /// Returns the log probabilities of one token in the form of chat completions and responses.
    fn token(&self, logprobs: &Logprobs) -> ChatLogProbsContent {
        let top = logprobs.values.top.iter();
        let top = top.map(|&(token, logprob)| TopLogProb {
            token: self.text(token),
            logprob: finite(logprob),
            bytes: Some(self.bytes(token).to_vec()),
        });
        ChatLogProbsContent {
            token: self.text(logprobs.token),
            logprob: finite(logprobs.values.logprob),
            bytes: Some(self.bytes(logprobs.token).to_vec()),
            top_logprobs: top.collect(),
        }
    }

    /// Returns log probabilities in the form of text completions. `offset` is the number of
    /// characters before the first of the tokens; it becomes that after the last.
    pub fn completion<'a>(
        &self,
        logprobs: impl IntoIterator<Item = &'a Logprobs>,
        offset: &mut u32,
    ) -> LogProbs {
        let mut all = LogProbs {
            tokens: Vec::new(),
            token_logprobs: Vec::new(),
            top_logprobs: Vec::new(),
            text_offset: Vec::new(),
        };
        for logprobs in logprobs {
            let text = self.text(logprobs.token);
            all.text_offset.push(*offset);
            *offset += text.chars().count() as u32;
            all.tokens.push(text);
            all.token_logprobs
                .push(Some(finite(logprobs.values.logprob)));
            let top = logprobs.values.top.iter();
            let top: HashMap<_, _> = top
                .map(|&(token, logprob)| (self.text(token), finite(logprob)))
                .collect();
            all.top_logprobs.push((!top.is_empty()).then_some(top));
        }
        all
    }
}

/// Finds the log probabilities of the tokens of an answer's content, which is apart from its
/// reasoning and its calls.
#[derive(Debug)]
pub(crate) struct ContentLogprobs {
    vocabulary: Arc<Vocabulary>,
    /// The tokens that end a sequence and have no text.
    ends: Vec<u32>,
    /// The last tokens, whose texts may still come.
    pending: Vec<Logprobs>,
}

impl ContentLogprobs {
    /// Starts at the beginning of an answer. `ends` are the tokens that end a sequence.
    pub fn new(vocabulary: Arc<Vocabulary>, ends: Vec<u32>) -> Self {
        Self {
            vocabulary,
            ends,
            pending: Vec::new(),
        }
    }

    /// Adds the token of an update. Its parts are [taken](Self::take) after that.
    pub fn add(&mut self, update: &Update) {
        let (logprobs, end) = match update {
            Update::Token { logprobs, .. } => (logprobs, None),
            Update::End {
                logprobs, finish, ..
            } => match finish {
                Finish::StopToken(token) => (logprobs, Some(*token)),
                _ => (logprobs, None),
            },
            Update::Failed(_) => return,
        };
        let has_text = |logprobs: &&Logprobs| {
            Some(logprobs.token) != end && !self.ends.contains(&logprobs.token)
        };
        let logprobs = logprobs.iter().find(has_text).cloned();
        self.pending.extend(logprobs);
    }

    /// Returns the log probabilities of the tokens of a part of the answer as JSON; none if it is not
    /// content. The text of a part ends with that of a token, unless the end is held back: the last
    /// tokens that are as long are its own.
    pub fn take(&mut self, part: &Part) -> Vec<Value> {
        let pending = std::mem::take(&mut self.pending);
        let Part::Content(text) = part else {
            return Vec::new();
        };
        let (mut start, mut length) = (pending.len(), 0);
        while start > 0 && length < text.len() {
            start -= 1;
            length += self.vocabulary.bytes(pending[start].token).len();
        }
        let own = pending[start..].iter();
        let own = own.map(|logprobs| self.vocabulary.token(logprobs));
        own.filter_map(|token| to_value_exact(&token).ok())
            .collect()
    }

    /// Returns the log probabilities of the content of an update as JSON.
    pub fn of_update(&mut self, update: &Update) -> Vec<Value> {
        self.add(update);
        let (Update::Token { parts, .. } | Update::End { parts, .. }) = update else {
            return Vec::new();
        };
        parts.iter().flat_map(|part| self.take(part)).collect()
    }
}

/// JSON has no infinities; the API writes -9999 for a token that is never chosen.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() {
        logprob
    } else {
        -9999.0
    }
}
