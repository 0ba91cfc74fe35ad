//! A model without weights: the next token is a hash of all earlier ones, which it reads from the
//! pages of its KV cache.
//!
//! Each position of a page holds a hash of its token and its position. If a page was lost, shared
//! with another sequence or not written, the tokens after it are others. The text has characters of
//! one to four bytes, which are tokens of their own.

use marlin_serve::server::{
    Capabilities, Executor, ExecutorError, NewSequence, RowOutput, TokenLogprobs, TokenMask,
};
use marlin_serve::{PageTable, RequestId, SchedulerConfig, Step};
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The token that ends a text.
pub const EOS: u32 = 257;
pub const VOCAB_SIZE: usize = 258;
/// The first bytes of the characters of a text.
const CHARACTERS: [u8; 8] = [b'a', b'b', b'c', b' ', b'.', 0xc3, 0xe2, 0xf0];

/// What a test sets and sees of a model that a server owns.
#[derive(Default)]
pub struct Control {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
pub struct State {
    /// The steps that may still be finished; all if `None`.
    permits: Option<usize>,
    /// The time that a step takes.
    pub pause: Duration,
    /// What fails, for the prompts that begin with a token.
    pub faults: HashMap<u32, Fault>,
    /// The prompts of the rows of each step that was started.
    pub steps: Vec<Vec<Vec<u32>>>,
    /// The sequences that the executor has.
    pub sequences: usize,
    /// The masks that were given.
    pub masks: usize,
    /// The time that steps took to be computed.
    pub computing: Duration,
}

/// What fails as soon as a sequence has a row, or is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Add,
    Row,
    Start,
    Finish,
    TooFewOutputs,
    Lost,
    Panic,
}

impl Control {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Lets steps be finished, or not.
    pub fn set_closed(&self, closed: bool) {
        self.permit(closed.then_some(0));
    }

    /// Lets so many steps be finished; all if `None`.
    pub fn permit(&self, steps: Option<usize>) {
        self.state().permits = steps;
        self.changed.notify_all();
    }

    /// Waits until a number of steps were started.
    pub fn wait_for_steps(&self, count: usize) {
        let state = self.state();
        let (_state, timeout) = self
            .changed
            .wait_timeout_while(state, Duration::from_secs(60), |state| {
                state.steps.len() < count
            })
            .unwrap();
        assert!(!timeout.timed_out(), "{count} steps were never started");
    }

    fn wait_to_finish(&self) {
        let state = self.state();
        let is_closed = |state: &mut State| state.permits == Some(0);
        let mut state = self.changed.wait_while(state, is_closed).unwrap();
        state.permits = state.permits.map(|permits| permits - 1);
        let pause = state.pause;
        drop(state);
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
}

pub struct Model {
    page_size: usize,
    max_sequences: usize,
    runs_ahead: bool,
    memory: Vec<u64>,
    sequences: HashMap<RequestId, Sequence>,
    control: Arc<Control>,
}

struct Sequence {
    prompt: Vec<u32>,
    seed: u64,
    min_len: usize,
    logprobs: bool,
    last: Option<u32>,
}

/// The rows of a step that was started.
pub struct InFlight {
    /// The hash that each row samples from, or `None` if it does not sample.
    rows: Vec<(RequestId, Option<Sample>)>,
    outputs: Option<Vec<RowOutput>>,
    fault: Option<Fault>,
}

/// What a token is sampled from.
#[derive(Clone, Copy)]
struct Sample {
    hash: u64,
    /// The token before.
    last: u32,
    /// True if the sequence may end.
    may_end: bool,
}

impl Model {
    pub fn new(config: &SchedulerConfig, runs_ahead: bool) -> (Self, Arc<Control>) {
        let control = Arc::new(Control::default());
        let model = Self {
            page_size: config.page_size,
            max_sequences: config.max_sequences,
            runs_ahead,
            memory: vec![0; config.pages as usize * config.page_size],
            sequences: HashMap::new(),
            control: Arc::clone(&control),
        };
        (model, control)
    }

    /// Writes tokens to the pages of a sequence, and returns the hash of all positions up to there.
    fn write(&mut self, tokens: &[u32], start: usize, pages: &PageTable) -> u64 {
        let place =
            |p: usize| pages[p / self.page_size].index() * self.page_size + p % self.page_size;
        for (position, &token) in (start..).zip(tokens) {
            self.memory[place(position)] = position_hash(token, position);
        }
        let end = start + tokens.len();
        (0..end).fold(0, |hash, p| mix(hash, self.memory[place(p)]))
    }

    fn sample(&mut self, step: &mut InFlight, masks: &[TokenMask]) {
        let masks: HashMap<_, _> = masks.iter().map(|mask| (mask.row, &mask.allowed)).collect();
        let rows = step.rows.iter().enumerate();
        let outputs = rows.map(|(row, (request, sample))| {
            let Some(sample) = sample else {
                return RowOutput::Computed;
            };
            let token = sample.token(masks.get(&row).map(|allowed| &allowed[..]));
            let Some(sequence) = self.sequences.get_mut(request) else {
                return RowOutput::Token {
                    token,
                    logprobs: None,
                }; // It was removed meanwhile.
            };
            sequence.last = Some(token);
            let fault = self
                .control
                .state()
                .faults
                .get(&sequence.prompt[0])
                .copied();
            if fault == Some(Fault::Row) {
                return RowOutput::Failed("a row fails".into());
            }
            let logprobs = sequence.logprobs.then(|| TokenLogprobs {
                logprob: -1.0,
                top: vec![(token, -1.0)],
            });
            RowOutput::Token { token, logprobs }
        });
        step.outputs = Some(outputs.collect());
    }
}

impl Executor for Model {
    type InFlight = InFlight;

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            vocab_size: VOCAB_SIZE,
            max_len: 4096,
            penalties: false,
            logit_bias: false,
            masks: true,
            max_logprobs: Some(1),
        }
    }

    fn runs_ahead(&self) -> bool {
        self.runs_ahead
    }

    fn add(&mut self, sequence: NewSequence<'_>) -> Result<(), ExecutorError> {
        let prompt = sequence.tokens[..sequence.prompt].to_vec();
        let fault = self.control.state().faults.get(&prompt[0]).copied();
        if fault == Some(Fault::Add) {
            return Err(ExecutorError::Call("a sequence is refused".into()));
        }
        assert!(
            sequence
                .stop_tokens
                .iter()
                .all(|&token| token < VOCAB_SIZE as u32)
        );
        let new = Sequence {
            seed: seed(sequence.params.temperature, sequence.seed),
            min_len: sequence.prompt + sequence.params.min_tokens,
            logprobs: sequence.params.logprobs.is_some(),
            prompt,
            last: None,
        };
        let before = self.sequences.insert(sequence.request, new);
        assert!(before.is_none(), "{:?} is added twice", sequence.request);
        assert!(
            self.sequences.len() <= self.max_sequences,
            "too many sequences"
        );
        self.control.state().sequences = self.sequences.len();
        Ok(())
    }

    fn remove(&mut self, request: RequestId) {
        let before = self.sequences.remove(&request);
        assert!(before.is_some(), "{request:?} is removed twice");
        self.control.state().sequences = self.sequences.len();
    }

    fn start(&mut self, step: &Step, masked: bool) -> Result<InFlight, ExecutorError> {
        let begin = Instant::now();
        let mut rows = Vec::new();
        let mut prompts = Vec::new();
        for chunk in &step.prefill {
            let hash = self.write(&chunk.tokens, chunk.start, &chunk.pages);
            let sequence = &self.sequences[&chunk.request];
            let end = chunk.start + chunk.tokens.len();
            let last = *chunk.tokens.last().unwrap();
            let sample = Sample::new(sequence, hash, last, end);
            rows.push((chunk.request, chunk.ends_prompt.then_some(sample)));
            prompts.push(sequence.prompt.clone());
        }
        for row in &step.decode {
            let last = self.sequences[&row.request].last;
            let token = row.token.or(last).expect("the step before sampled a token");
            assert_eq!(Some(token), last, "the token of {:?}", row.request);
            let hash = self.write(&[token], row.position, &row.pages);
            let sequence = &self.sequences[&row.request];
            let sample = Sample::new(sequence, hash, token, row.position + 1);
            rows.push((row.request, Some(sample)));
            prompts.push(sequence.prompt.clone());
        }
        let mut state = self.control.state();
        let faults = prompts
            .iter()
            .filter_map(|prompt| state.faults.get(&prompt[0]).copied());
        let fault = faults.into_iter().next();
        state.steps.push(prompts);
        drop(state);
        self.control.changed.notify_all();
        if fault == Some(Fault::Start) {
            return Err(ExecutorError::Call("a step is not started".into()));
        }
        let mut step = InFlight {
            rows,
            outputs: None,
            fault,
        };
        if !masked {
            self.sample(&mut step, &[]);
        }
        self.control.state().computing += begin.elapsed();
        Ok(step)
    }

    fn mask(
        &mut self,
        step: &mut InFlight,
        _: &Step,
        masks: Vec<TokenMask>,
    ) -> Result<(), ExecutorError> {
        assert!(step.outputs.is_none(), "masks for a step that has sampled");
        self.control.state().masks += masks.len();
        self.sample(step, &masks);
        Ok(())
    }

    fn finish(&mut self, step: InFlight) -> Result<Vec<RowOutput>, ExecutorError> {
        self.control.wait_to_finish();
        let mut outputs = step.outputs.expect("masks were given");
        match step.fault {
            Some(Fault::Finish) => return Err(ExecutorError::Call("a step fails".into())),
            Some(Fault::Lost) => return Err(ExecutorError::Lost("it burns".into())),
            Some(Fault::Panic) => panic!("the executor panics"),
            Some(Fault::TooFewOutputs) => drop(outputs.pop()),
            Some(Fault::Add | Fault::Row | Fault::Start) | None => {}
        }
        Ok(outputs)
    }
}

impl Sample {
    /// A token that is sampled after `len` tokens, of which the last is `last`.
    fn new(sequence: &Sequence, hash: u64, last: u32, len: usize) -> Self {
        Self {
            hash: mix(hash, sequence.seed),
            last,
            may_end: len >= sequence.min_len,
        }
    }

    fn token(self, allowed: Option<&[u32]>) -> u32 {
        if let Some(allowed) = allowed {
            let is_allowed = |token: &u32| allowed[*token as usize / 32] >> (token % 32) & 1 == 1;
            let tokens: Vec<_> = (0..VOCAB_SIZE as u32).filter(is_allowed).collect();
            return tokens[(self.hash >> 20) as usize % tokens.len()];
        }
        // A character goes on; else the text ends, or another one begins.
        let next = match self.last {
            0xc3 => 0xa4,
            0xe2 => 0x82,
            0x82 => 0xac,
            0xf0 => 0x9f,
            0x9f => 0x98,
            0x98 => 0x80,
            _ if self.may_end && self.hash.is_multiple_of(41) => return EOS,
            _ => CHARACTERS[(self.hash >> 20) as usize % CHARACTERS.len()],
        };
        u32::from(next)
    }
}

/// Returns the tokens that follow a prompt without a mask, up to the end of the text or `most`.
pub fn continuation(
    prompt: &[u32],
    temperature: f32,
    seed: u64,
    min: usize,
    most: usize,
) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    let hashes = tokens.iter().enumerate();
    let mut hash = hashes.fold(0, |hash, (p, &token)| mix(hash, position_hash(token, p)));
    while tokens.len() < prompt.len() + most
        && (tokens.len() == prompt.len() || tokens.last() != Some(&EOS))
    {
        let sample = Sample {
            hash: mix(hash, self::seed(temperature, seed)),
            last: tokens[tokens.len() - 1],
            may_end: tokens.len() >= prompt.len() + min,
        };
        let token = sample.token(None);
        hash = mix(hash, position_hash(token, tokens.len()));
        tokens.push(token);
    }
    tokens.split_off(prompt.len())
}

/// Returns the seed, which does not matter without a temperature.
fn seed(temperature: f32, seed: u64) -> u64 {
    if temperature == 0.0 { 0 } else { seed | 1 }
}

fn position_hash(token: u32, position: usize) -> u64 {
    mix(u64::from(token) + 1, position as u64 + 1)
}

fn mix(hash: u64, value: u64) -> u64 {
    let hash = hash.rotate_left(17) ^ value.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let hash = (hash ^ (hash >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash ^ (hash >> 32)
}
