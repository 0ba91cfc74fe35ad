//! What the handlers share.

use crate::auth::Keys;
use crate::conversation::{Conversation, PLAIN_STOP};
use crate::error::ApiError;
use crate::generate::{Answers, Job, Prompt};
use crate::logprobs::Vocabulary;
use crate::options::ApiOptions;
use crate::output::AnswerFormat;
use crate::status::Exposition;
use crate::tools::ToolFormat;
use axum::http::HeaderValue;
use marlin_serve::grammar::{CompilerOptions, GrammarCompiler};
use marlin_serve::server::{GenerationRequest, SamplingParams, ServerHandle};
use marlin_text::{ChatTemplate, Tokenizer};
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::Semaphore;
use uuid::Uuid;

/// The model that a server serves.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Model {
    /// The name under which clients ask for the model.
    pub name: String,
    /// Further names of the model.
    pub aliases: Vec<String>,
    /// How tokens are chosen where a request does not say, as the model's generation config says.
    pub sampling: SamplingParams,
    /// How the model calls tools; by default what its chat template says. A template of the
    /// [harmony](mod@crate::harmony) format has a form of its own, which stays.
    pub tool_format: Option<ToolFormat>,
}

impl Model {
    /// A model with this name.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            aliases: Vec::new(),
            sampling: SamplingParams::default(),
            tool_format: None,
        }
    }

    /// All names of the model.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let aliases = self.aliases.iter().map(String::as_str);
        std::iter::once(self.name.as_str()).chain(aliases)
    }
}

/// An option that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// An origin that is not one.
    #[error(
        "the CORS origin `{origin}` is not one: write it like `https://example.com`, or `*` for all"
    )]
    CorsOrigin {
        /// The text.
        origin: String,
    },
    /// A key without characters, which every client has.
    #[error("an API key is empty: leave it out, or give it characters")]
    EmptyKey,
}

/// What the handlers share: the engine, the texts of the model, the options.
#[derive(Clone)]
pub struct ApiState(Arc<Shared>);

struct Shared {
    engine: ServerHandle,
    text: Text,
    /// One at a time: calls of a tokenizer wait for each other, and would hold a thread meanwhile.
    text_permit: Semaphore,
    model: Model,
    options: ApiOptions,
    keys: Keys,
    /// The time at which the server started, in seconds since 1970.
    started: u64,
    exposition: Exposition,
    grammars: GrammarCompiler,
    vocabulary: OnceLock<Arc<Vocabulary>>,
    format: AnswerFormat,
}

/// The texts of a model.
#[derive(Debug)]
pub(crate) struct Text {
    pub tokenizer: Tokenizer,
    pub template: Option<ChatTemplate>,
}

impl ApiState {
    /// Puts together what the handlers need.
    ///
    /// `tokenizer` encodes prompts. It is not a clone of the engine's, but was opened again: calls
    /// of clones wait for each other, so that a long prompt would hold up the texts of all answers.
    /// The tokens that end a turn by the [template](ChatTemplate::stop_tokens) belong to the
    /// [engine's](marlin_serve::server::ServerOptions::eos_tokens), and its tokenizer
    /// [shows](Tokenizer::showing) the [tokens](crate::shown_tokens) that mark parts of an answer.
    /// Without a template, conversations are lines that begin with `User:` and `Assistant:`.
    ///
    /// # Errors
    /// If an option cannot be used.
    pub fn new(
        engine: ServerHandle,
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
        model: Model,
        options: ApiOptions,
    ) -> Result<Self, OptionsError> {
        if options.api_keys.iter().any(String::is_empty) {
            return Err(OptionsError::EmptyKey);
        }
        for origin in &options.cors_origins {
            let is_origin = origin == "*" || origin.contains("://");
            if !is_origin || HeaderValue::from_str(origin).is_err() {
                let origin = origin.clone();
                return Err(OptionsError::CorsOrigin { origin });
            }
        }
        let format = template.as_ref().map(AnswerFormat::of_template);
        let format = format.unwrap_or_default().calling(model.tool_format);
        Ok(Self(Arc::new(Shared {
            exposition: Exposition::new(engine.clone(), &model.name),
            grammars: GrammarCompiler::new(
                tokenizer.clone(),
                engine.capabilities().vocab_size,
                engine.options().eos_tokens.clone(),
                CompilerOptions::default(),
            ),
            format,
            text: Text {
                tokenizer,
                template,
            },
            text_permit: Semaphore::new(1),
            keys: Keys::new(&options.api_keys),
            started: seconds(),
            vocabulary: OnceLock::new(),
            engine,
            model,
            options,
        })))
    }

    pub(crate) fn engine(&self) -> &ServerHandle {
        &self.0.engine
    }

    pub(crate) fn model(&self) -> &Model {
        &self.0.model
    }

    pub(crate) fn options(&self) -> &ApiOptions {
        &self.0.options
    }

    pub(crate) fn keys(&self) -> &Keys {
        &self.0.keys
    }

    pub(crate) fn exposition(&self) -> &Exposition {
        &self.0.exposition
    }

    /// Returns the time at which the server started, in seconds since 1970.
    pub(crate) fn started(&self) -> u64 {
        self.0.started
    }

    /// The time, in seconds since 1970.
    pub(crate) fn now(&self) -> u64 {
        seconds()
    }

    /// Returns a new id.
    pub(crate) fn new_id(&self, prefix: &str) -> String {
        format!("{prefix}{}", Uuid::new_v4().simple())
    }

    /// The most tokens of a prompt and its answer.
    pub(crate) fn window(&self) -> usize {
        self.0.engine.max_len()
    }

    /// How the model marks the parts of its answers.
    pub(crate) fn format(&self) -> AnswerFormat {
        self.0.format
    }

    /// Refuses a model that is not served.
    pub(crate) fn check_model(&self, name: &str) -> Result<(), ApiError> {
        if self.0.model.names().any(|own| own == name) {
            return Ok(());
        }
        Err(ApiError::ModelNotFound {
            model: name.into(),
            served: self.0.model.name.clone(),
        })
    }

    /// Runs a call of the tokenizer or the template, which may take long.
    pub(crate) async fn text<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Text) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        // Never closed.
        let _permit = self.0.text_permit.acquire().await.ok();
        let shared = self.0.clone();
        self.blocking(move || call(&shared.text)).await
    }

    /// Runs a call that may take long on a thread for such.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        tokio::task::spawn_blocking(call)
            .await
            .unwrap_or_else(|error| Err(ApiError::Engine(format!("A call failed: {error}"))))
    }

    /// Returns the prompt of a conversation.
    pub(crate) async fn encode(&self, conversation: Conversation) -> Result<Prompt, ApiError> {
        self.text(|text| {
            let (tokens, text) = conversation.encode(text.template.as_ref(), &text.tokenizer)?;
            Ok(Prompt { tokens, text })
        })
        .await
    }

    /// Returns the prompts of texts.
    pub(crate) async fn encode_texts(&self, texts: Vec<String>) -> Result<Vec<Prompt>, ApiError> {
        self.text(|text| {
            let prompts = texts.into_iter().map(|prompt| {
                Ok(Prompt {
                    tokens: text.tokenizer.encode(&prompt)?,
                    text: prompt,
                })
            });
            prompts.collect()
        })
        .await
    }

    /// Returns the prompts of tokens, with their texts if `text`.
    pub(crate) async fn decode(
        &self,
        prompts: Vec<Vec<u32>>,
        text: bool,
    ) -> Result<Vec<Prompt>, ApiError> {
        let vocabulary = self.0.engine.capabilities().vocab_size;
        let mut tokens = prompts.iter().flatten();
        if let Some(token) = tokens.find(|&&token| token as usize >= vocabulary) {
            return Err(ApiError::invalid(
                "prompt",
                format!("Token {token} is not in the vocabulary of {vocabulary} tokens."),
            ));
        }
        self.text(move |own| {
            let prompts = prompts.into_iter().map(|tokens| {
                let text = match text {
                    true => own.tokenizer.decode(&tokens)?,
                    false => String::new(),
                };
                Ok(Prompt { tokens, text })
            });
            prompts.collect()
        })
        .await
    }

    /// Adds what ends the answer of a model without a chat template.
    pub(crate) fn add_plain_stop(&self, request: &mut GenerationRequest) {
        if self.0.text.template.is_none() {
            request.stop.push(PLAIN_STOP.into());
        }
    }

    /// Returns the bytes of the tokens if log probabilities are asked for.
    pub(crate) async fn vocabulary(
        &self,
        logprobs: bool,
    ) -> Result<Option<Arc<Vocabulary>>, ApiError> {
        if !logprobs {
            return Ok(None);
        }
        if let Some(vocabulary) = self.0.vocabulary.get() {
            return Ok(Some(vocabulary.clone()));
        }
        let vocabulary = self
            .text(|text| Ok(Vocabulary::new(&text.tokenizer)?))
            .await?;
        Ok(Some(
            self.0
                .vocabulary
                .get_or_init(|| Arc::new(vocabulary))
                .clone(),
        ))
    }

    /// Hands requests to the engine.
    pub(crate) fn generate(&self, job: Job) -> Result<Answers, ApiError> {
        job.submit(self)
    }

    /// Compiles the grammars of answers.
    pub(crate) fn grammars(&self) -> &GrammarCompiler {
        &self.0.grammars
    }

    /// Shuts the engine down, and waits until it has ended.
    pub(crate) async fn shut_down(&self, deadline: Duration) {
        self.0.engine.shutdown(deadline);
        self.0.engine.stopped().await;
    }
}

impl fmt::Debug for ApiState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = formatter.debug_struct("ApiState");
        debug.field("model", &self.0.model).finish_non_exhaustive()
    }
}

/// The time in seconds since 1970.
pub(crate) fn seconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}
