//! Tests of the `BatchEngine` against sequences that an `Engine` decodes alone.

use marlin_nn::TokenLogprobs;
use rand::RngExt;
use rand::rngs::StdRng;

use super::*;
use crate::{
    AllowedTokens, BatchEngine, BatchOutput, BatchStep, CacheFormat, DecodeToken, Pages, PromptPart,
};

const PAGE: usize = 16;
const SLOTS: usize = 6;

/// A sequence as a scheduler sees it.
struct Request {
    prompt_len: usize,
    /// The prompt, then the tokens that are known.
    tokens: Vec<u32>,
    /// The tokens that the sequence has in the end.
    expected: Vec<u32>,
    params: RequestParams,
    logprobs: Option<usize>,
    /// The number of positions whose keys and values steps have computed, or compute.
    scheduled: usize,
    slot: Option<usize>,
    pages: Vec<u32>,
}

impl Request {
    fn is_complete(&self) -> bool {
        self.tokens.len() == self.expected.len()
    }
}

/// A step in flight: the request of each output.
struct Flight {
    step: BatchStep,
    requests: Vec<usize>,
}

/// Runs requests in random steps: parts of prompts of any length, beside any of the running
/// sequences, with steps started ahead, and sequences that are removed and computed anew on other
/// pages.
struct Driver<'a> {
    model: Arc<Model>,
    engine: BatchEngine,
    requests: Vec<Request>,
    free_pages: Vec<u32>,
    flights: Vec<Flight>,
    rng: &'a mut StdRng,
}

impl Driver<'_> {
    fn run(&mut self) {
        while self.requests.iter().any(|request| !request.is_complete()) || !self.flights.is_empty()
        {
            if self.flights.len() == 2 || self.flights.len() == 1 && self.rng.random_bool(0.5) {
                self.finish();
            } else {
                self.preempt();
                self.admit();
                if !self.start() && !self.flights.is_empty() {
                    self.finish();
                }
            }
        }
    }

    fn finish(&mut self) {
        let Flight { step, requests } = self.flights.remove(0);
        let outputs = self.engine.finish(step).unwrap();
        assert_eq!(outputs.len(), requests.len());
        for (output, request) in outputs.into_iter().zip(requests) {
            let request = &mut self.requests[request];
            if request.is_complete() {
                continue;
            }
            match output {
                BatchOutput::Computed => {}
                BatchOutput::Token { token, logprobs } => {
                    let at = request.tokens.len();
                    assert_eq!(token, request.expected[at], "token {at} of a sequence");
                    let count = logprobs.as_ref().map(|logprobs| logprobs.top.len());
                    assert_eq!(count, request.logprobs);
                    if let Some(logprobs) = logprobs {
                        expect_logprobs(&self.model, &request.tokens, token, &logprobs);
                    }
                    request.tokens.push(token);
                }
                BatchOutput::Failed(error) => panic!("{error}"),
            }
            if request.is_complete()
                && let Some(slot) = request.slot.take()
            {
                self.engine.remove(slot);
                self.free_pages.append(&mut request.pages);
            }
        }
    }

    /// Removes a sequence now and then, if no step is in flight.
    fn preempt(&mut self) {
        let index = self.rng.random_range(0..self.requests.len());
        let request = &mut self.requests[index];
        if self.flights.is_empty()
            && self.rng.random_bool(0.1)
            && let Some(slot) = request.slot.take()
        {
            self.engine.remove(slot);
            self.free_pages.append(&mut request.pages);
            request.scheduled = 0;
        }
    }

    fn admit(&mut self) {
        let used: Vec<usize> = self
            .requests
            .iter()
            .filter_map(|request| request.slot)
            .collect();
        let mut slots = (0..SLOTS).filter(|slot| !used.contains(slot));
        for request in &mut self.requests {
            if request.slot.is_none() && !request.is_complete() && self.rng.random_bool(0.4) {
                let Some(slot) = slots.next() else {
                    return;
                };
                let (tokens, params) = (&request.tokens, &request.params);
                let (prompt, logprobs) = (request.prompt_len, request.logprobs);
                let added = self.engine.add(slot, tokens, prompt, params, logprobs);
                added.unwrap();
                request.slot = Some(slot);
            }
        }
    }

    fn start(&mut self) -> bool {
        let (mut prompts, mut tokens) = (Vec::new(), Vec::new());
        for index in 0..self.requests.len() {
            let request = &mut self.requests[index];
            let known = request.tokens.len();
            let in_flight = self.flights.iter().flat_map(|flight| &flight.requests);
            let is_in_flight = in_flight.filter(|&&flying| flying == index).count() > 0;
            if request.slot.is_none() || self.rng.random_bool(0.2) {
                continue;
            }
            let count = if request.scheduled + 1 < known {
                let count = self.rng.random_range(1..=known - request.scheduled);
                prompts.push((index, request.scheduled, count));
                count
            } else if request.scheduled + 1 < request.expected.len()
                && (request.scheduled < known || is_in_flight && request.scheduled == known)
            {
                tokens.push((index, request.scheduled));
                1
            } else {
                continue;
            };
            request.scheduled += count;
            while request.pages.len() * PAGE < request.scheduled {
                let page = self.rng.random_range(0..self.free_pages.len());
                request.pages.push(self.free_pages.swap_remove(page));
            }
        }
        if prompts.is_empty() && tokens.is_empty() {
            return false;
        }
        let requests = prompts.iter().map(|&(index, ..)| index);
        let requests = requests
            .chain(tokens.iter().map(|&(index, _)| index))
            .collect();
        let of = |index: usize| &self.requests[index];
        let prompts: Vec<PromptPart<'_>> = prompts
            .iter()
            .map(|&(index, start, count)| PromptPart {
                slot: of(index).slot.unwrap(),
                start,
                tokens: &of(index).tokens[start..start + count],
                pages: &of(index).pages,
                ends: start + count == of(index).tokens.len(),
            })
            .collect();
        let tokens: Vec<DecodeToken<'_>> = tokens
            .iter()
            .map(|&(index, position)| DecodeToken {
                slot: of(index).slot.unwrap(),
                token: of(index).tokens.get(position).copied(),
                position,
                pages: &of(index).pages,
            })
            .collect();
        let step = self.engine.start(&prompts, &tokens, Vec::new()).unwrap();
        self.flights.push(Flight { step, requests });
        true
    }
}

/// Compares log probabilities with those of the logits after `tokens`, computed anew.
fn expect_logprobs(model: &Model, tokens: &[u32], token: u32, found: &TokenLogprobs) {
    let logits = last_logits(model, tokens);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    let expect = |token: u32, found: f32| {
        let expected = f64::from(logits[token as usize]) - sum.ln();
        let error = (f64::from(found) - expected).abs();
        assert!(error < 1e-4, "token {token}: {found} instead of {expected}");
    };
    expect(token, found.logprob);
    for &(token, logprob) in &found.top {
        expect(token, logprob);
    }
    let is_sorted = found.top.is_sorted_by(|(_, a), (_, b)| a >= b);
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let is_first = |&(token, _): &(u32, f32)| largest - logits[token as usize] < 1e-4;
    assert!(
        is_sorted && found.top.first().is_none_or(is_first),
        "{found:?}"
    );
}

#[test]
fn random_steps_over_pages_give_the_tokens_of_a_sequence_alone() {
    let mut rng = rng();
    let config = config_with(json!({ "max_position_embeddings": 90 }));
    let model = model(&config);
    let vocab = config.vocab_size;
    for _ in 0..3 {
        let requests: Vec<Request> = (0..14)
            .map(|index| {
                let prompt_len = rng.random_range(1..50);
                let prompt = random_tokens(prompt_len, vocab, &mut rng);
                let params = RequestParams {
                    sampling: Sampling {
                        temperature: [0.0, 0.9][index % 2],
                        repetition_penalty: [1.0, 1.3, 1.0][index % 3],
                        presence_penalty: [0.0, 0.0, 0.4, 1.0][index % 4],
                        frequency_penalty: [0.0, -0.3, 0.0, 0.0, 0.7][index % 5],
                        ..Sampling::GREEDY
                    },
                    logit_bias: match index % 7 {
                        0 => BTreeMap::from([(4, 1.5), (6, -100.0)]),
                        _ => BTreeMap::new(),
                    },
                    suppression: Suppression {
                        bad_words_ids: match index % 5 {
                            0 => vec![vec![1, 2], vec![5]],
                            1 => vec![vec![7], vec![9]],
                            _ => Vec::new(),
                        },
                        min_new_tokens: index % 4 * 3,
                        ..Suppression::NONE
                    },
                    seed: index as u64,
                    stop_tokens: vec![3],
                    max_new_tokens: rng.random_range(2..30),
                };
                let (new, _) = alone(&model, &prompt, &params);
                Request {
                    prompt_len,
                    expected: [prompt.clone(), new].concat(),
                    tokens: prompt,
                    params,
                    logprobs: [None, None, Some(0), None, Some(5)][index % 5],
                    scheduled: 0,
                    slot: None,
                    pages: Vec::new(),
                }
            })
            .collect();
        let count = SLOTS * 90usize.div_ceil(PAGE);
        let pages = Pages { count, size: PAGE };
        Driver {
            model: model.clone(),
            engine: BatchEngine::new(model.clone(), SLOTS, pages, CacheFormat::Activations)
                .unwrap(),
            requests,
            free_pages: (0..count as u32).collect(),
            flights: Vec::new(),
            rng: &mut rng,
        }
        .run();
    }
}

fn chosen(token: u32) -> BatchOutput {
    let logprobs = None;
    BatchOutput::Token { token, logprobs }
}

#[test]
fn rows_choose_among_allowed_tokens() {
    let mut rng = rng();
    let config = config();
    let model = model(&config);
    let vocab = config.vocab_size;
    let (count, size) = (4, PAGE);
    let mut engine = BatchEngine::new(
        model.clone(),
        2,
        Pages { count, size },
        CacheFormat::Activations,
    )
    .unwrap();
    let prompt = random_tokens(5, vocab, &mut rng);
    let (free, _) = alone(
        &model,
        &prompt,
        &RequestParams {
            max_new_tokens: 9,
            ..GREEDY
        },
    );
    engine.add(0, &prompt, 5, &GREEDY, None).unwrap();
    engine.add(1, &prompt, 5, &GREEDY, None).unwrap();
    let part = |slot: usize| PromptPart {
        slot,
        start: 0,
        tokens: &prompt,
        pages: &[[0, 1], [3, 2]][slot],
        ends: true,
    };
    let step = engine.start(&[part(0), part(1)], &[], Vec::new()).unwrap();
    let first = chosen(free[0]);
    assert_eq!(engine.finish(step).unwrap(), [first.clone(), first]);
    let mut last = [free[0]; 2];
    for position in 5..12 {
        // The second sequence chooses freely, then among two tokens, then freely again.
        let is_masked = (7..10).contains(&position);
        let two = [position as u32, position as u32 + 20];
        let allowed = is_masked.then(|| {
            let mut words = vec![0; vocab.div_ceil(32)];
            two.iter()
                .for_each(|token| words[*token as usize / 32] |= 1 << (token % 32));
            AllowedTokens { slot: 1, words }
        });
        let token = |slot: usize| DecodeToken {
            slot,
            token: Some(last[slot]),
            position,
            pages: &[[0, 1], [3, 2]][slot],
        };
        let tokens = [token(0), token(1)];
        let step = engine
            .start(&[], &tokens, allowed.into_iter().collect())
            .unwrap();
        let outputs = engine.finish(step).unwrap();
        let token = |output: &BatchOutput| match output {
            BatchOutput::Token { token, .. } => *token,
            other => panic!("{other:?}"),
        };
        let [of_free, of_masked] = [0, 1].map(|row| token(&outputs[row]));
        assert_eq!(of_free, free[position - 4], "position {position}");
        if is_masked {
            assert!(two.contains(&of_masked), "{of_masked} at {position}");
        } else if position < 7 {
            assert_eq!(of_masked, of_free);
        }
        last = [of_free, of_masked];
    }
}
