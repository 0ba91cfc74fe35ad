//! A pseudo-model: the next token is a hash of all tokens before it and of the seed.
//!
//! Prompts can ask for what a model cannot be made to do:
//!
//! | in the prompt | the answer |
//! |---|---|
//! | `\u{1}text\u{2}` | `text`, then the end of the sequence |
//! | `\u{3}` | the first row fails |
//! | `\u{4}` | the first step fails |
//! | `\u{5}` | the device is lost |
//! | `\u{6}` | the text is a run of letters without end, and slow: [`SLOW_STEP`] for each token |

use marlin_serve::server::{
    Capabilities, Executor, ExecutorError, NewSequence, RowOutput, TokenLogprobs, TokenMask,
};
use marlin_serve::{RequestId, Step};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

/// The token that ends a sequence.
pub const EOS: u32 = 257;
/// The tokens of the smallest vocabulary: the bytes, `<s>` and `</s>`.
pub const VOCAB_SIZE: usize = 258;
/// The most tokens of a sequence.
pub const WINDOW: usize = 4096;
/// The time of a step with a slow sequence.
pub const SLOW_STEP: Duration = Duration::from_millis(5);

pub struct PseudoModel {
    sequences: HashMap<RequestId, Sequence>,
    vocab_size: usize,
    faults: bool,
}

impl PseudoModel {
    /// Makes a model with `vocab_size` tokens. Without `faults`, `\u{3}` to `\u{6}` are like other
    /// characters.
    pub fn new(vocab_size: usize, faults: bool) -> Self {
        Self {
            sequences: HashMap::new(),
            vocab_size,
            faults,
        }
    }
}

struct Sequence {
    tokens: Vec<u32>,
    prompt: usize,
    seed: Option<u64>,
    logprobs: Option<usize>,
    fault: Option<u8>,
    script: Option<Vec<u32>>,
}

/// A row of a step: its request, whether it samples, and what it may sample.
pub struct Row {
    request: RequestId,
    samples: bool,
    allowed: Option<Vec<u32>>,
}

impl Sequence {
    fn new(sequence: &NewSequence<'_>) -> Self {
        let prompt = &sequence.tokens[..sequence.prompt];
        let start = prompt.iter().rposition(|&token| token == 1);
        let script = start.map(|start| {
            let rest = &prompt[start + 1..];
            let end = rest.iter().position(|&token| token == 2);
            rest[..end.unwrap_or(rest.len())].to_vec()
        });
        Self {
            tokens: sequence.tokens.to_vec(),
            prompt: sequence.prompt,
            seed: (sequence.params.temperature > 0.0).then_some(sequence.seed),
            logprobs: sequence.params.logprobs,
            fault: prompt
                .iter()
                .find(|token| (3..=6).contains(*token))
                .map(|&token| token as u8),
            script,
        }
    }

    /// Returns the next token of `vocab_size`, among those that are allowed.
    fn next(&self, allowed: Option<&[u32]>, vocab_size: usize) -> u32 {
        let written = self.tokens.len() - self.prompt;
        let may = |token: u32| {
            allowed.is_none_or(|words| words[token as usize / 32] >> (token % 32) & 1 == 1)
        };
        if let Some(script) = &self.script {
            let token = script.get(written).copied().unwrap_or(EOS);
            if may(token) {
                return token;
            }
        }
        let mut hasher = DefaultHasher::new();
        (&self.tokens, self.seed).hash(&mut hasher);
        let hash = hasher.finish();
        if allowed.is_none() {
            return u32::from(b'a') + (hash % 26) as u32;
        }
        // Texts of grammars end as soon as they may.
        if may(EOS) {
            return EOS;
        }
        let choices: Vec<u32> = (0..vocab_size as u32).filter(|&token| may(token)).collect();
        let printable = choices.iter().filter(|token| (32..127).contains(*token));
        let choices = match printable.copied().collect::<Vec<_>>() {
            printable if printable.is_empty() => choices,
            printable => printable,
        };
        choices[hash as usize % choices.len()]
    }
}

impl Executor for PseudoModel {
    type InFlight = Vec<Row>;

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            vocab_size: self.vocab_size,
            max_len: WINDOW,
            penalties: true,
            logit_bias: false,
            masks: true,
            max_logprobs: Some(5),
        }
    }

    fn runs_ahead(&self) -> bool {
        false
    }

    fn add(&mut self, sequence: NewSequence<'_>) -> Result<(), ExecutorError> {
        let mut state = Sequence::new(&sequence);
        state.fault = state.fault.filter(|_| self.faults);
        self.sequences.insert(sequence.request, state);
        Ok(())
    }

    fn remove(&mut self, request: RequestId) {
        self.sequences.remove(&request);
    }

    fn start(&mut self, step: &Step, _masked: bool) -> Result<Self::InFlight, ExecutorError> {
        let chunks = step.prefill.iter();
        let chunks = chunks.map(|chunk| (chunk.request, chunk.ends_prompt));
        let rows = chunks.chain(step.decode.iter().map(|row| (row.request, true)));
        let rows: Vec<_> = rows
            .map(|(request, samples)| Row {
                request,
                samples,
                allowed: None,
            })
            .collect();
        let faults: Vec<_> = (rows.iter())
            .filter_map(|row| self.sequences.get(&row.request)?.fault)
            .collect();
        if faults.contains(&5) {
            return Err(ExecutorError::Lost("it was unplugged".into()));
        }
        if faults.contains(&4) {
            return Err(ExecutorError::Call("out of memory".into()));
        }
        if faults.contains(&6) {
            std::thread::sleep(SLOW_STEP);
        }
        Ok(rows)
    }

    fn mask(
        &mut self,
        rows: &mut Vec<Row>,
        _: &Step,
        masks: Vec<TokenMask>,
    ) -> Result<(), ExecutorError> {
        for mask in masks {
            rows[mask.row].allowed = Some(mask.allowed);
        }
        Ok(())
    }

    fn finish(&mut self, rows: Vec<Row>) -> Result<Vec<RowOutput>, ExecutorError> {
        let outputs = rows.into_iter().map(|row| {
            let Some(sequence) = self.sequences.get_mut(&row.request) else {
                return RowOutput::Failed("an unknown request".into());
            };
            if sequence.fault == Some(3) {
                return RowOutput::Failed("a broken row".into());
            }
            if !row.samples {
                return RowOutput::Computed;
            }
            let token = sequence.next(row.allowed.as_deref(), self.vocab_size);
            sequence.tokens.push(token);
            let logprobs = sequence.logprobs.map(|count| TokenLogprobs {
                logprob: -0.5,
                top: (0..count as u32)
                    .map(|rank| (u32::from(b'A') + rank, -1.0 - rank as f32))
                    .collect(),
            });
            RowOutput::Token { token, logprobs }
        });
        Ok(outputs.collect())
    }
}
