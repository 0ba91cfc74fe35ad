//! Log probabilities with the texts of their tokens.

use crate::generate::Logprobs;
use marlin_text::Tokenizer;
use openai_protocol::common::{ChatLogProbs, ChatLogProbsContent, LogProbs, TopLogProb};
use std::collections::{BTreeMap, HashMap};

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
        let content = logprobs.into_iter().map(|logprobs| ChatLogProbsContent {
            token: self.text(logprobs.token),
            logprob: finite(logprobs.values.logprob),
            bytes: Some(self.bytes(logprobs.token).to_vec()),
            top_logprobs: (logprobs.values.top.iter())
                .map(|&(token, logprob)| TopLogProb {
                    token: self.text(token),
                    logprob: finite(logprob),
                    bytes: Some(self.bytes(token).to_vec()),
                })
                .collect(),
        });
        ChatLogProbs::Detailed {
            content: Some(content.collect()),
            refusal: None,
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

/// JSON has no infinities; the API writes -9999 for a token that is never chosen.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() {
        logprob
    } else {
        -9999.0
    }
}
