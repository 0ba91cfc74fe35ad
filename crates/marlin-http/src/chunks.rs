//! The chunks of OpenAI's streams.

use crate::generate::{Answers, Finish, Logprobs, Total, Update};
use crate::logprobs::Vocabulary;
use crate::output::Part;
use crate::sampling::StreamFields;
use crate::sse::{self, EventWriter};
use axum::response::sse::Event;
use openai_protocol::common::Usage;
use std::sync::Arc;

/// What the chunks of an endpoint are made of.
pub(crate) trait ChunkForm: Send + 'static {
    /// A choice of a chunk.
    type Choice;

    /// Returns the choices for the parts of a token of the answer `index`, one for each chunk.
    /// There is a `finish` with the last token, and then at least one choice.
    fn choices(
        &mut self,
        index: usize,
        parts: Vec<Part>,
        logprobs: Option<(&Vocabulary, &Logprobs)>,
        finish: Option<Finish>,
    ) -> Vec<Self::Choice>;

    /// Returns the event of a chunk with one choice or none.
    fn event(&mut self, choice: Option<Self::Choice>, usage: Option<Usage>) -> Event;
}

/// Writes the chunks of a stream. Nothing is written before the first token, so that clients which
/// take the time of the first chunk take that of the first token.
pub(crate) struct ChunkWriter<F> {
    form: F,
    options: StreamFields,
    /// The texts of tokens, if log probabilities are asked for.
    vocabulary: Option<Arc<Vocabulary>>,
    total: Total,
}

impl<F: ChunkForm> ChunkWriter<F> {
    pub fn new(
        form: F,
        answers: &Answers,
        options: StreamFields,
        vocabulary: Option<Arc<Vocabulary>>,
    ) -> Self {
        Self {
            form,
            options,
            vocabulary,
            total: answers.total(),
        }
    }

    /// Returns the usage so far if it is asked for.
    fn usage(&self, asked: bool) -> Option<Usage> {
        asked.then(|| self.total.counts.openai())
    }
}

impl<F: ChunkForm> EventWriter for ChunkWriter<F> {
    fn start(&mut self) -> Vec<Event> {
        Vec::new()
    }

    fn update(&mut self, index: usize, update: Update) -> Vec<Event> {
        self.total.count(index, &update);
        let (parts, logprobs, finish) = match update {
            Update::Token { parts, logprobs } => (parts, logprobs, None),
            Update::End {
                parts,
                logprobs,
                finish,
                ..
            } => (parts, logprobs, Some(finish)),
            Update::Failed(error) => return vec![sse::data(&error.openai()), done()],
        };
        let logprobs = self.vocabulary.as_deref().zip(logprobs.as_ref());
        let choices = self.form.choices(index, parts, logprobs, finish);
        let usage = self.usage(self.options.continuous_usage);
        choices
            .into_iter()
            .map(|choice| self.form.event(Some(choice), usage.clone()))
            .collect()
    }

    fn end(&mut self) -> Vec<Event> {
        let usage = self.usage(self.options.usage);
        let usage = usage.map(|usage| self.form.event(None, Some(usage)));
        usage.into_iter().chain([done()]).collect()
    }
}

/// Returns the event that ends a stream.
fn done() -> Event {
    Event::default().data("[DONE]")
}
