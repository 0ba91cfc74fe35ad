//! The compilation of grammars.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use marlin_text::Tokenizer;

use super::vocabulary::token_trie;
use super::{GrammarError, GrammarSource, GrammarState, MAX_GRAMMAR_BYTES, message, schema};

/// A compiled grammar.
pub struct Grammar {
    /// A matcher at the start of a text, whose lexer has the states of the first mask.
    start: Matcher,
    vocab_size: usize,
}

impl Grammar {
    /// Returns the state at the start of a text. States are independent of each other, so that
    /// their masks can be computed at the same time.
    pub fn start(&self) -> GrammarState {
        GrammarState::new(self.start.deep_clone(), self.vocab_size)
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar")
            .field("vocab_size", &self.vocab_size)
            .finish_non_exhaustive()
    }
}

/// What limits the compilation of grammars.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompilerOptions {
    /// The time after which a caller gets an error. The compilation itself then ends at
    /// `llguidance`'s limits, and counts as running until it does. By default 2 s.
    pub time_limit: Duration,
    /// The most grammars that are compiled at the same time, by default 4.
    pub max_running: usize,
    /// The number of compiled grammars that are kept, the last used ones; by default 64.
    pub kept: usize,
}

impl Default for CompilerOptions {
    fn default() -> Self {
        Self {
            time_limit: Duration::from_secs(2),
            max_running: 4,
            kept: 64,
        }
    }
}

/// Compiles grammars for a model. Clones share what they compiled.
#[derive(Clone)]
pub struct GrammarCompiler(Arc<Shared>);

struct Shared {
    tokenizer: Tokenizer,
    vocab_size: usize,
    stop_tokens: Vec<u32>,
    options: CompilerOptions,
    /// The tokens in the form that `llguidance` needs.
    factory: OnceLock<ParserFactory>,
    /// Held while the factory is made.
    factory_lock: Mutex<()>,
    /// The last used first.
    kept: Mutex<VecDeque<(GrammarSource, Arc<Grammar>)>>,
    running: AtomicUsize,
}

impl GrammarCompiler {
    /// Makes a compiler for a model with `vocab_size` tokens, those of `tokenizer` and perhaps
    /// more. `stop_tokens` end a text. Nothing is compiled yet.
    pub fn new(
        tokenizer: Tokenizer,
        vocab_size: usize,
        stop_tokens: Vec<u32>,
        options: CompilerOptions,
    ) -> Self {
        Self(Arc::new(Shared {
            tokenizer,
            vocab_size,
            stop_tokens,
            options,
            factory: OnceLock::new(),
            factory_lock: Mutex::new(()),
            kept: Mutex::default(),
            running: AtomicUsize::new(0),
        }))
    }

    /// Reads the tokenizer's tokens, if this was not done. It takes 0.7 s for 128,000 tokens, and
    /// the first [`compile`](Self::compile) does it otherwise.
    ///
    /// # Errors
    /// [`GrammarError::NoStopToken`], and [`GrammarError::Tokenizer`] if the bytes of tokens are
    /// not known.
    pub fn prepare(&self) -> Result<(), GrammarError> {
        if self.0.factory.get().is_some() {
            return Ok(());
        }
        let shared = Arc::clone(&self.0);
        let thread = move || shared.factory().map(|_| ());
        let thread = with_stack().spawn(thread).map_err(GrammarError::Thread)?;
        thread.join().unwrap_or(Err(GrammarError::Panicked))
    }

    /// Compiles a grammar, or returns it if it was compiled before. The call blocks for at most
    /// [`time_limit`](CompilerOptions::time_limit), once the compiler is
    /// [prepared](Self::prepare).
    ///
    /// # Errors
    /// See [`GrammarError`].
    pub fn compile(&self, source: &GrammarSource) -> Result<Arc<Grammar>, GrammarError> {
        let shared = &self.0;
        if let Some(grammar) = shared.find(source) {
            return Ok(grammar);
        }
        let bytes = source.text().len();
        if bytes > MAX_GRAMMAR_BYTES {
            return Err(GrammarError::TooLong { bytes });
        }
        let running = Running::start(shared)?;
        self.prepare()?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let thread = {
            let (shared, source) = (Arc::clone(shared), source.clone());
            move || {
                let result = shared.compile(&source);
                drop(running);
                // The caller may have given up.
                let _ = sender.send(result);
            }
        };
        with_stack().spawn(thread).map_err(GrammarError::Thread)?;
        let limit = shared.options.time_limit;
        match receiver.recv_timeout(limit) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(GrammarError::TimeOut { limit }),
            Err(RecvTimeoutError::Disconnected) => Err(GrammarError::Panicked),
        }
    }

    /// Returns the token of a text such as `<tool_call>` that a grammar can name by its id; `None`
    /// if the vocabulary has no such token.
    ///
    /// # Errors
    /// [`GrammarError::Tokenizer`] if the tokenizer fails.
    pub fn token_id(&self, text: &str) -> Result<Option<u32>, GrammarError> {
        let token = self.0.tokenizer.token_id(text)?;
        Ok(token.filter(|&token| (token as usize) < self.0.vocab_size))
    }
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler")
            .field("vocab_size", &self.0.vocab_size)
            .field("options", &self.0.options)
            .finish_non_exhaustive()
    }
}

/// Returns a thread to start, with a stack for compilations.
fn with_stack() -> thread::Builder {
    thread::Builder::new()
        .name("marlin-grammar".into())
        .stack_size(STACK)
}

/// The size of the stack on which a grammar is compiled. A chain of rules as long as a text of
/// [`MAX_GRAMMAR_BYTES`] can hold takes 16,000 levels. Memory is only taken as far as it is used.
const STACK: usize = 512 << 20;

impl Shared {
    fn find(&self, source: &GrammarSource) -> Option<Arc<Grammar>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let index = kept.iter().position(|(other, _)| other == source)?;
        let found = kept.remove(index)?;
        let grammar = Arc::clone(&found.1);
        kept.push_front(found);
        Some(grammar)
    }

    fn compile(&self, source: &GrammarSource) -> Result<Arc<Grammar>, GrammarError> {
        let grammar = match source {
            GrammarSource::JsonSchema(text) => {
                TopLevelGrammar::from_json_schema(schema::read(text)?)
            }
            GrammarSource::Regex(text) => TopLevelGrammar::from_regex(text),
            GrammarSource::Lark(text) => TopLevelGrammar::from_lark(schema::read_lark(text)?),
        };
        let refused = |error| GrammarError::Refused(message(&error));
        let parser = self.factory()?.create_parser(grammar).map_err(refused)?;
        let mut start = Matcher::new(Ok(parser));
        if start.compute_mask().is_err() {
            return Err(match start.get_error() {
                Some(error) if !error.starts_with(NO_TOKEN) => {
                    GrammarError::Refused(message(&error))
                }
                _ => GrammarError::Empty,
            });
        }
        let vocab_size = self.vocab_size;
        let grammar = Arc::new(Grammar { start, vocab_size });
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(other, _)| other != source);
        kept.push_front((source.clone(), Arc::clone(&grammar)));
        kept.truncate(self.options.kept);
        Ok(grammar)
    }

    fn factory(&self) -> Result<&ParserFactory, GrammarError> {
        let _guard = self
            .factory_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(factory) = self.factory.get() {
            return Ok(factory);
        }
        let tokens = token_trie(&self.tokenizer, self.vocab_size, &self.stop_tokens)?;
        let mut factory = ParserFactory::new_simple(&tokens)
            .map_err(|error| GrammarError::Refused(message(&error)))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        limits.initial_lexer_fuel = 250_000;
        limits.step_lexer_fuel = 20_000;
        limits.max_lexer_states = 20_000;
        limits.max_grammar_size = 200_000;
        Ok(self.factory.get_or_init(|| factory))
    }
}

/// How `llguidance` says that no token can come next.
const NO_TOKEN: &str = "NoExtension";

/// Counts a compilation until it is dropped.
struct Running(Arc<Shared>);

impl Running {
    fn start(shared: &Arc<Shared>) -> Result<Self, GrammarError> {
        let most = shared.options.max_running;
        let more = |running| (running < most).then_some(running + 1);
        shared
            .running
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, more)
            .map(|_| Self(Arc::clone(shared)))
            .map_err(|running| GrammarError::Busy { running })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::AcqRel);
    }
}
