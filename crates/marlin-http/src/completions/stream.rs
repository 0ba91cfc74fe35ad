//! The chunks of a text completion.

use super::finish_reason;
use crate::chat::done;
use crate::generate::{Answers, Logprobs, Total, Update};
use crate::logprobs::Vocabulary;
use crate::output::{Joined, Part};
use crate::sampling::StreamFields;
use crate::sse::{self, EventWriter};
use axum::response::sse::Event;
use openai_protocol::common::Usage;
use openai_protocol::completion::{CompletionStreamChoice, CompletionStreamResponse};
use std::sync::Arc;

/// Writes `text_completion` objects.
pub(super) struct ChunkWriter {
    /// A chunk without choices and usage.
    chunk: CompletionStreamResponse,
    options: StreamFields,
    vocabulary: Option<Arc<Vocabulary>>,
    /// The text before each answer.
    echoes: Vec<String>,
    /// For each answer, the number of characters before the next token.
    offsets: Vec<u32>,
    total: Total,
}

impl ChunkWriter {
    pub fn new(
        id: String,
        created: u64,
        model: String,
        answers: &Answers,
        options: StreamFields,
        vocabulary: Option<Arc<Vocabulary>>,
        echoes: Vec<String>,
    ) -> Self {
        Self {
            chunk: CompletionStreamResponse {
                id,
                object: "text_completion".into(),
                created,
                choices: Vec::new(),
                model,
                system_fingerprint: None,
                usage: None,
            },
            options,
            vocabulary,
            offsets: vec![0; answers.len()],
            echoes,
            total: answers.total(),
        }
    }

    /// Returns the event of a chunk with one choice or none.
    fn event(&mut self, choice: Option<CompletionStreamChoice>, usage: Option<Usage>) -> Event {
        self.chunk.choices.clear();
        self.chunk.choices.extend(choice);
        self.chunk.usage = usage;
        sse::data(&self.chunk)
    }

    /// Returns the event of a text, if there is anything to say.
    fn text(
        &mut self,
        index: usize,
        text: String,
        logprobs: Option<&Logprobs>,
        finish: Option<&str>,
    ) -> Option<Event> {
        let vocabulary = self.vocabulary.as_deref();
        let logprobs = vocabulary.zip(logprobs).map(|(vocabulary, logprobs)| {
            vocabulary.completion([logprobs], &mut self.offsets[index])
        });
        if text.is_empty() && logprobs.is_none() && finish.is_none() {
            return None;
        }
        let choice = CompletionStreamChoice {
            text,
            index: index as u32,
            logprobs,
            finish_reason: finish.map(Into::into),
        };
        let usage = self.options.continuous_usage;
        let usage = usage.then(|| self.total.counts.openai());
        Some(self.event(Some(choice), usage))
    }
}

impl EventWriter for ChunkWriter {
    fn start(&mut self) -> Vec<Event> {
        let echoes = std::mem::take(&mut self.echoes).into_iter().enumerate();
        echoes
            .filter_map(|(index, echo)| self.text(index, echo, None, None))
            .collect()
    }

    fn update(&mut self, index: usize, update: Update) -> Vec<Event> {
        self.total.count(index, &update);
        let event = match update {
            Update::Token { parts, logprobs } => {
                self.text(index, content(parts), logprobs.as_ref(), None)
            }
            Update::End { parts, finish, .. } => {
                self.text(index, content(parts), None, Some(finish_reason(&finish)))
            }
            Update::Failed(error) => return vec![sse::data(&error.openai()), done()],
        };
        event.into_iter().collect()
    }

    fn end(&mut self) -> Vec<Event> {
        let usage = self.options.usage.then(|| self.total.counts.openai());
        let usage = usage.map(|usage| self.event(None, Some(usage)));
        usage.into_iter().chain([done()]).collect()
    }
}

/// Returns the text of parts.
fn content(parts: Vec<Part>) -> String {
    let mut joined = Joined::default();
    joined.extend(parts);
    joined.content
}
