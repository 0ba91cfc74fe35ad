//! The executor of a model on a device: the steps of a server in a
//! [`BatchEngine`].

mod cache;

use self::cache::page_count;
use crate::pages::PageId;
use crate::scheduler::{RequestId, SchedulerConfig, Step};
use crate::server::{
    Capabilities, Executor, ExecutorError, NewSequence, RowOutput, Server, ServerHandle,
    ServerOptions, StartError, TokenMask,
};
use marlin_lm::{
    AllowedTokens, BatchEngine, BatchOutput, BatchStep, CacheFormat, CompiledAhead, DecodeToken,
    LanguageModel, MAX_LOGPROBS, Model, ModelError, Pages, PromptPart, RequestParams, Sampling,
    Suppression, Tokenizer,
};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

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
    /// The format of the KV cache; by default that of the activations.
    pub cache_format: CacheFormat,
    /// The number of pages of the KV cache; by default as many as fit
    /// [`memory_fraction`](Self::memory_fraction) of the device's free memory. In the memory of the
    /// host, which other programs need, and on a device that does not report its memory, pages for
    /// 8 sequences of the model's window, in 4 GiB at most.
    pub pages: Option<u32>,
    /// The part of the device's free memory that the KV cache takes at most; by default 0.9.
    /// Activations need the rest.
    pub memory_fraction: f64,
    /// The most tokens of a step, prefill and decode together; by default as many as one pass over
    /// the weights computes.
    pub max_step_tokens: Option<usize>,
    /// True to share out service evenly among the keys of requests
    /// ([`SchedulerConfig::fair`]); by default false.
    pub fair: bool,
    /// The length of the prompt whose kernels are compiled before the server starts; by default 64.
    pub warm_up_tokens: usize,
    /// The first part of the names of files that record whose kernels are in CubeCL's cache on
    /// disk. With it, all kernels of a model are compiled on all cores before the server starts,
    /// once for each kind of model and options: 10 s for Llama 2 7B in int4 on 16 cores. By default
    /// `None`: kernels are compiled when they are first launched, and requests wait for them.
    pub compiled_marks: Option<PathBuf>,
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
            cache_format: CacheFormat::Activations,
            pages: None,
            memory_fraction: 0.9,
            max_step_tokens: None,
            fair: false,
            warm_up_tokens: 64,
            compiled_marks: None,
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
/// Compiles the kernels of a prompt and of a step of one sequence first, and with
/// [`ModelOptions::compiled_marks`] all others; without, they are compiled when they are needed.
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
        .and_then(Tokenizer::with_plain_texts)
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

/// Compiles all kernels of an engine, unless a file says that they are in CubeCL's cache on disk.
/// `marks` is the first part of the name of the file.
fn compile_once(engine: &mut BatchEngine, marks: &Path) {
    let Some(set) = engine.kernel_set() else {
        return;
    };
    let mut mark = marks.as_os_str().to_owned();
    mark.push(format!("-{set:016x}"));
    let mark = Path::new(&mark);
    if mark.exists() {
        return;
    }
    tracing::info!(
        "compiling the kernels of this model for this card, once: this takes from ten seconds to minutes, by the number of cores"
    );
    let start = Instant::now();
    let CompiledAhead { operations, failed } = engine.compile_all();
    tracing::info!(
        operations,
        failed,
        seconds = start.elapsed().as_secs(),
        "compiled"
    );
    if failed == 0
        && let Err(error) = std::fs::write(mark, "")
    {
        tracing::info!(path = %mark.display(), %error, "the next start compiles again");
    }
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
pub struct ModelStep {
    /// The step on the device; `None` while it waits for the tokens that its rows may choose.
    started: Option<BatchStep>,
    /// True for each row that the device computes: its request had not ended.
    computed: Vec<bool>,
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
            penalties: true,
            logit_bias: true,
            masks: true,
            max_logprobs: Some(MAX_LOGPROBS),
        };
        let mut engine =
            BatchEngine::new(model, slots, Pages { count, size }, options.cache_format)?;
        if let Some(marks) = &options.compiled_marks {
            compile_once(&mut engine, marks);
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

    /// Gives a step to the device, without the rows of requests that ended since it was scheduled.
    fn launch(&mut self, step: &Step, masks: Vec<TokenMask>) -> Result<ModelStep, ExecutorError> {
        let prefilled = step.prefill.iter().map(|chunk| chunk.request);
        let decoded = step.decode.iter().map(|row| row.request);
        let requests = prefilled.chain(decoded);
        let slots: Vec<Option<usize>> = requests
            .map(|request| self.slots.get(&request).copied())
            .collect();
        let prefilled = step.prefill.iter().map(|chunk| &chunk.pages);
        let decoded = step.decode.iter().map(|row| &row.pages);
        let pages = prefilled.chain(decoded).map(|pages| indices(pages));
        let pages: Vec<Vec<u32>> = pages.collect();
        let mut rows = slots.iter().zip(&pages);
        let prompts: Vec<PromptPart<'_>> = (step.prefill.iter().zip(&mut rows))
            .filter_map(|(chunk, (&slot, pages))| {
                Some(PromptPart {
                    slot: slot?,
                    start: chunk.start,
                    tokens: &chunk.tokens,
                    pages,
                    ends: chunk.ends_prompt,
                })
            })
            .collect();
        let tokens: Vec<DecodeToken<'_>> = (step.decode.iter().zip(rows))
            .filter_map(|(row, (&slot, pages))| {
                Some(DecodeToken {
                    slot: slot?,
                    token: row.token,
                    position: row.position,
                    pages,
                })
            })
            .collect();
        let allowed = masks.into_iter().filter_map(|TokenMask { row, allowed }| {
            let (&slot, words) = (slots.get(row)?, allowed);
            Some(AllowedTokens { slot: slot?, words })
        });
        let started = self.engine.start(&prompts, &tokens, allowed.collect());
        Ok(ModelStep {
            started: Some(started.map_err(lost)?),
            computed: slots.iter().map(Option::is_some).collect(),
        })
    }
}

/// Returns the indices of pages.
fn indices(pages: &[PageId]) -> Vec<u32> {
    pages.iter().map(|page| page.index() as u32).collect()
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

    fn prepare(&mut self) -> bool {
        self.engine.record_next()
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
        let logprobs = params.logprobs;
        let params = RequestParams {
            sampling: Sampling {
                temperature: params.temperature,
                top_k: params.top_k,
                top_p: params.top_p,
                min_p: params.min_p,
                repetition_penalty: params.repetition_penalty,
                presence_penalty: params.presence_penalty,
                frequency_penalty: params.frequency_penalty,
            },
            logit_bias: params.logit_bias.clone(),
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
        let added = self.engine.add(slot, tokens, prompt, &params, logprobs);
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
        match masked {
            true => Ok(ModelStep {
                started: None,
                computed: Vec::new(),
            }),
            false => self.launch(step, Vec::new()),
        }
    }

    fn mask(
        &mut self,
        in_flight: &mut ModelStep,
        step: &Step,
        masks: Vec<TokenMask>,
    ) -> Result<(), ExecutorError> {
        *in_flight = self.launch(step, masks)?;
        Ok(())
    }

    fn finish(&mut self, step: ModelStep) -> Result<Vec<RowOutput>, ExecutorError> {
        let ModelStep { started, computed } = step;
        let Some(started) = started else {
            let reason = "the step was given no masks";
            return Err(ExecutorError::Call(reason.into()));
        };
        let output = |output| match output {
            BatchOutput::Computed => RowOutput::Computed,
            BatchOutput::Token { token, logprobs } => RowOutput::Token { token, logprobs },
            BatchOutput::Failed(error) => RowOutput::Failed(error.to_string()),
        };
        let mut outputs = self.engine.finish(started).map_err(lost)?.into_iter();
        let rows = computed.into_iter().map(|is_computed| {
            let found = is_computed.then(|| outputs.next()).flatten();
            found.map_or_else(|| RowOutput::Failed("the request has ended".into()), output)
        });
        Ok(rows.collect())
    }
}
