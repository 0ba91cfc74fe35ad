//! The chunks of a text completion.

use crate::chunks::ChunkForm;
use crate::generate::{Finish, Logprobs};
use crate::logprobs::Vocabulary;
use crate::output::{Joined, Part};
use crate::sse;
use axum::response::sse::Event;
use openai_protocol::common::Usage;
use openai_protocol::completion::{CompletionStreamChoice, CompletionStreamResponse};

/// The form of `text_completion` objects.
pub(super) struct CompletionForm {
    /// A chunk without choices and usage.
    chunk: CompletionStreamResponse,
    /// The text before each answer, until it is written.
    echoes: Vec<String>,
    /// The number of characters before the next token of each answer.
    offsets: Vec<u32>,
}

impl CompletionForm {
    /// `echoes` has the text before each answer.
    pub fn new(id: String, created: u64, model: String, echoes: Vec<String>) -> Self {
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
            offsets: vec![0; echoes.len()],
            echoes,
        }
    }
}

impl ChunkForm for CompletionForm {
    type Choice = CompletionStreamChoice;

    fn choices(
        &mut self,
        index: usize,
        parts: Vec<Part>,
        logprobs: Option<(&Vocabulary, &Logprobs)>,
        finish: Option<Finish>,
    ) -> Vec<CompletionStreamChoice> {
        let mut joined = Joined::default();
        joined.extend(parts);
        let text = std::mem::take(&mut self.echoes[index]) + &joined.content;
        let logprobs = logprobs.map(|(vocabulary, logprobs)| {
            vocabulary.completion([logprobs], &mut self.offsets[index])
        });
        if text.is_empty() && logprobs.is_none() && finish.is_none() {
            return Vec::new();
        }
        vec![CompletionStreamChoice {
            text,
            index: index as u32,
            logprobs,
            finish_reason: finish.map(|finish| finish.openai(false).into()),
        }]
    }

    fn event(&mut self, choice: Option<CompletionStreamChoice>, usage: Option<Usage>) -> Event {
        self.chunk.choices.clear();
        self.chunk.choices.extend(choice);
        self.chunk.usage = usage;
        sse::data(&self.chunk)
    }
}
