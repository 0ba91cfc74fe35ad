//! The executor of a model on a device: the steps of a server in a
//! [`BatchEngine`].

use crate::pages::PageId;
use crate::scheduler::{RequestId, SchedulerConfig, Step};
use crate::server::{
    Capabilities, Executor, ExecutorError, NewSequence, RowOutput, Server, ServerHandle,
    ServerOptions, StartError, TokenMask,
};
use marlin_lm::{
    AllowedTokens, BatchEngine, BatchOutput, BatchStep, DecodeToken, LanguageModel, Model,
    ModelError, Pages, PromptPart, RequestParams, Sampling, Suppression,
};
use std::collections::HashMap;
use std::sync::Arc;

/// The number of sequences of the model's window for which a device that does not report its memory
/// has pages by default.
const DEFAULT_SEQUENCES: usize = 8;
/// The most bytes of these pages.
const DEFAULT_BYTES: usize = 1 << 30;

/// The size of a model's server.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ModelOptions {
    /// The most sequences that run at once, at most
    /// [`MAX_SEQUENCES`](marlin_lm::MAX_SEQUENCES); by default 64.
    pub max_sequences: usize,
    /// The most requests that wait; by default 1024.
    pub max_waiting: usize,
    /// The positions in a page of the KV cache, a power of two; by default 64, which is the fastest
    /// on an H200.
    pub page_size: usize,
    /// The number of pages of the KV cache; by default as many as fit
    /// [`memory_fraction`](Self::memory_fraction) of the device's free memory, or on a device that
    /// does not report it, pages for 8 sequences of the model's window, in 1 GiB at most.
    pub pages: Option<u32>,
    /// The part of the device's free memory that the KV cache takes; by default 0.9. Activations
    /// need the rest.
    pub memory_fraction: f64,
    /// The most tokens of a step, prefill and decode together; by default as many as one pass over
    /// the weights computes.
    pub max_step_tokens: Option<usize>,
    /// True to share out service evenly among the keys of requests
    /// ([`SchedulerConfig::fair`]); by default false.
    pub fair: bool,
    /// The length of the prompt whose kernels are compiled before the server starts; by default 64.
    pub warm_up_tokens: usize,
    /// True to compile these kernels on all cores, for a process that finds no compiled kernels on
    /// disk; by default false.
    pub compile_ahead: bool,
    /// Tokens that end a sequence besides those of the model's generation config, such as the end
    /// of a turn in a chat template.
    pub stop_tokens: Vec<u32>,
    /// Special tokens whose texts belong to the text, such as those that mark where a model calls a
    /// tool.
    pub shown_tokens: Vec<&'static str>,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self {
            max_sequences: 64,
            max_waiting: 1024,
            page_size: 64,
            pages: None,
            memory_fraction: 0.9,
            max_step_tokens: None,
            fair: false,
            warm_up_tokens: 64,
            compile_ahead: false,
            stop_tokens: Vec::new(),
            shown_tokens: Vec::new(),
        }
    }
}

/// An error while a model's server starts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelServerError {
    /// The model cannot be run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The server cannot be started.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A size of a page that kernels do not support.
    #[error("pages of {page_size} positions; it must be a power of two, at least {least}")]
    PageSize {
        /// The positions of a page.
        page_size: usize,
        /// The fewest positions of a page.
        least: usize,
    },
    /// Too little memory for a page.
    #[error(
        "the KV cache has no page: one of {page_size} positions takes {page_bytes} bytes, which is more than the part of the free memory that the cache may have"
    )]
    NoPages {
        /// The positions of a page.
        page_size: usize,
        /// The bytes of a page.
        page_bytes: usize,
    },
}

/// Starts a server of a model.
///
/// Compiles the kernels of a prompt and of a step of one sequence first; other kernels are compiled
/// when they are needed.
///
/// # Errors
/// If the model has no tokenizer, an option is outside its range, or the KV cache does not fit the
/// device.
pub fn start(
    model: &LanguageModel,
    options: &ModelOptions,
) -> Result<ServerHandle, ModelServerError> {
    let tokenizer = model.tokenizer()?.clone();
    let tokenizer = tokenizer
        .showing(&options.shown_tokens)
        .map_err(ModelError::from)?;
    let executor = ModelExecutor::new(model.model.clone(), options)?;
    let scheduler = SchedulerConfig {
        page_size: options.page_size,
        max_sequences: options.max_sequences,
        max_step_tokens: (options.max_step_tokens)
            .unwrap_or_else(|| executor.engine.pass_tokens().max(options.max_sequences)),
        max_waiting: options.max_waiting,
        fair: options.fair,
        ..SchedulerConfig::new(executor.engine.pages().count as u32)
    };
    let mut eos_tokens = model.generation.eos_token_ids.clone();
    for &token in &options.stop_tokens {
        if !eos_tokens.contains(&token) {
            eos_tokens.push(token);
        }
    }
    let options = ServerOptions {
        eos_tokens,
        ..ServerOptions::new(scheduler)
    };
    Ok(Server::start(executor, tokenizer, options)?)
}

/// Runs the steps of a model.
pub struct ModelExecutor {
    engine: BatchEngine,
    capabilities: Capabilities,
    /// The slot of each request.
    slots: HashMap<RequestId, usize>,
    free_slots: Vec<usize>,
}

/// A step of a [`ModelExecutor`].
#[derive(Debug)]
pub struct ModelStep(State);

#[derive(Debug)]
enum State {
    /// The step was given to the device.
    Started(BatchStep),
    /// The step waits for the tokens that its rows may choose.
    Held(Rows),
}

/// The rows of a step, in slots.
#[derive(Debug)]
struct Rows {
    prompts: Vec<PromptRows>,
    tokens: Vec<TokenRow>,
}

#[derive(Debug)]
struct PromptRows {
    slot: usize,
    start: usize,
    tokens: Vec<u32>,
    pages: Vec<u32>,
    ends: bool,
}

#[derive(Debug)]
struct TokenRow {
    slot: usize,
    token: Option<u32>,
    position: usize,
    pages: Vec<u32>,
}

impl ModelExecutor {
    /// Creates an executor, with its KV cache, and compiles its first kernels.
    ///
    /// # Errors
    /// If an option is outside its range, or the KV cache does not fit the device.
    pub fn new(model: Arc<Model>, options: &ModelOptions) -> Result<Self, ModelServerError> {
        let (size, slots) = (options.page_size, options.max_sequences);
        let count = page_count(&model, options)?;
        let capabilities = Capabilities {
            vocab_size: model.config().vocab_size,
            max_len: model.max_len(),
            penalties: false,
            logit_bias: false,
            masks: true,
            max_logprobs: None,
        };
        let mut engine = BatchEngine::new(model, slots, Pages { count, size })?;
        if options.compile_ahead {
            engine.compile_ahead(options.warm_up_tokens);
        }
        let took = engine.warm_up(options.warm_up_tokens);
        tracing::info!(
            pages = count,
            page_size = size,
            positions = count * size,
            warm_up_ms = took.as_millis() as u64,
            "the KV cache is ready"
        );
        Ok(Self {
            engine,
            capabilities,
            slots: HashMap::new(),
            free_slots: (0..slots).rev().collect(),
        })
    }

    /// Returns the rows of a step.
    fn rows(&self, step: &Step) -> Result<Rows, ExecutorError> {
        let slot = |request: RequestId| {
            self.slots.get(&request).copied().ok_or_else(|| {
                ExecutorError::Call(format!("the executor has no sequence of {request:?}"))
            })
        };
        let indices = |pages: &[PageId]| pages.iter().map(|page| page.index() as u32).collect();
        let prompts = step.prefill.iter().map(|chunk| {
            Ok(PromptRows {
                slot: slot(chunk.request)?,
                start: chunk.start,
                tokens: chunk.tokens.clone(),
                pages: indices(&chunk.pages),
                ends: chunk.ends_prompt,
            })
        });
        let tokens = step.decode.iter().map(|row| {
            Ok(TokenRow {
                slot: slot(row.request)?,
                token: row.token,
                position: row.position,
                pages: indices(&row.pages),
            })
        });
        Ok(Rows {
            prompts: prompts.collect::<Result<_, _>>()?,
            tokens: tokens.collect::<Result<_, _>>()?,
        })
    }

    /// Gives a step to the device.
    fn launch(&mut self, rows: &Rows, masks: Vec<TokenMask>) -> Result<BatchStep, ExecutorError> {
        let prompts: Vec<PromptPart<'_>> = (rows.prompts.iter())
            .map(|part| PromptPart {
                slot: part.slot,
                start: part.start,
                tokens: &part.tokens,
                pages: &part.pages,
                ends: part.ends,
            })
            .collect();
        let tokens: Vec<DecodeToken<'_>> = (rows.tokens.iter())
            .map(|row| DecodeToken {
                slot: row.slot,
                token: row.token,
                position: row.position,
                pages: &row.pages,
            })
            .collect();
        let slots: Vec<usize> = (prompts.iter().map(|part| part.slot))
            .chain(tokens.iter().map(|token| token.slot))
            .collect();
        let allowed = masks.into_iter().filter_map(|TokenMask { row, allowed }| {
            let (&slot, words) = (slots.get(row)?, allowed);
            Some(AllowedTokens { slot, words })
        });
        let allowed = allowed.collect();
        self.engine.start(&prompts, &tokens, allowed).map_err(lost)
    }
}

/// Returns the number of pages of the KV cache.
fn page_count(model: &Model, options: &ModelOptions) -> Result<usize, ModelServerError> {
    let page_size = options.page_size;
    let size = Pages {
        count: 1,
        size: page_size,
    };
    if !size.has_valid_size() {
        let least = Pages::MIN_SIZE;
        return Err(ModelServerError::PageSize { page_size, least });
    }
    let fraction = options.memory_fraction;
    let page_bytes = BatchEngine::page_bytes(model, page_size);
    let fitting = BatchEngine::free_memory(model).map_or_else(
        || {
            (DEFAULT_SEQUENCES * model.max_len().div_ceil(page_size))
                .min(DEFAULT_BYTES / page_bytes)
        },
        |free| (free as f64 * fraction) as usize / page_bytes,
    );
    match options.pages.map_or(fitting, |pages| pages as usize) {
        0 => Err(ModelServerError::NoPages {
            page_size,
            page_bytes,
        }),
        pages => Ok(pages.min(u32::MAX as usize)),
    }
}

/// Returns the error of a device that failed: what is in its KV cache is not known.
fn lost(error: ModelError) -> ExecutorError {
    ExecutorError::Lost(error.to_string())
}

impl Executor for ModelExecutor {
    type InFlight = ModelStep;

    fn capabilities(&self) -> Capabilities {
        self.capabilities.clone()
    }

    fn runs_ahead(&self) -> bool {
        self.engine.runs_ahead()
    }

    fn add(&mut self, sequence: NewSequence<'_>) -> Result<(), ExecutorError> {
        let NewSequence {
            request,
            tokens,
            prompt,
            params,
            seed,
            stop_tokens,
        } = sequence;
        let params = RequestParams {
            sampling: Sampling {
                temperature: params.temperature,
                top_k: params.top_k,
                top_p: params.top_p,
                min_p: params.min_p,
                repetition_penalty: params.repetition_penalty,
            },
            suppression: Suppression {
                suppress_tokens: params.suppress_tokens.clone(),
                bad_words_ids: params.bad_words_ids.clone(),
                min_new_tokens: params.min_tokens,
                min_length: 0,
            },
            seed,
            stop_tokens: stop_tokens.to_vec(),
            max_new_tokens: usize::MAX,
        };
        let Some(&slot) = self.free_slots.last() else {
            return Err(ExecutorError::Call(format!(
                "all {} slots are in use",
                self.slots.len()
            )));
        };
        let added = self.engine.add(slot, tokens, prompt, &params);
        added.map_err(|error| ExecutorError::Call(error.to_string()))?;
        self.free_slots.pop();
        self.slots.insert(request, slot);
        Ok(())
    }

    fn remove(&mut self, request: RequestId) {
        if let Some(slot) = self.slots.remove(&request) {
            self.engine.remove(slot);
            self.free_slots.push(slot);
        }
    }

    fn start(&mut self, step: &Step, masked: bool) -> Result<ModelStep, ExecutorError> {
        let rows = self.rows(step)?;
        Ok(ModelStep(if masked {
            State::Held(rows)
        } else {
            State::Started(self.launch(&rows, Vec::new())?)
        }))
    }

    fn mask(&mut self, step: &mut ModelStep, masks: Vec<TokenMask>) -> Result<(), ExecutorError> {
        if let State::Held(rows) = &step.0 {
            step.0 = State::Started(self.launch(rows, masks)?);
        }
        Ok(())
    }

    fn finish(&mut self, step: ModelStep) -> Result<Vec<RowOutput>, ExecutorError> {
        let State::Started(step) = step.0 else {
            let reason = "the step was given no masks";
            return Err(ExecutorError::Call(reason.into()));
        };
        let output = |output| match output {
            BatchOutput::Computed => RowOutput::Computed,
            BatchOutput::Token(token) => RowOutput::Token {
                token,
                logprobs: None,
            },
            BatchOutput::Failed(error) => RowOutput::Failed(error.to_string()),
        };
        let outputs = self.engine.finish(step).map_err(lost)?;
        Ok(outputs.into_iter().map(output).collect())
    }
}
