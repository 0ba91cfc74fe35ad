//! A device whose KV cache holds, at each position, a hash of the tokens up to there.

use marlin_serve::{Outcome, PageId, RequestId, SchedulerConfig, Step};
use rand::RngExt;
use rand::rngs::StdRng;
use std::collections::{HashMap, VecDeque};

/// The tokens that the device generates are below this.
const VOCABULARY: u64 = 50;

/// The tokens of a request, with the hash of the tokens up to each.
#[derive(Default)]
pub struct History {
    tokens: Vec<u32>,
    hashes: Vec<u64>,
    /// True once a row of it failed: what follows is not defined.
    failed: bool,
}

impl History {
    fn push(&mut self, token: u32) {
        let hash = self.hashes.last().unwrap_or(&0) ^ u64::from(token + 1);
        let hash = (hash ^ (hash >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.hashes.push(hash ^ (hash >> 29));
        self.tokens.push(token);
    }
}

pub struct Device {
    page_size: usize,
    /// The hash at each position of each page; 0 where nothing valid is.
    memory: Vec<u64>,
    histories: HashMap<RequestId, History>,
    stop: f64,
    fail: f64,
    /// The request that writes to each page; for `check_writes`.
    writers: Vec<Option<RequestId>>,
}

impl Device {
    /// Makes a device on which a token is a stop, and a row fails, with these probabilities.
    pub fn new(config: &SchedulerConfig, stop: f64, fail: f64) -> Self {
        let pages = config.pages as usize;
        Self {
            page_size: config.page_size,
            memory: vec![0; pages * config.page_size],
            histories: HashMap::new(),
            stop,
            fail,
            writers: vec![None; pages],
        }
    }

    pub fn add(&mut self, request: RequestId, prompt: &[u32]) {
        let history = self.histories.entry(request).or_default();
        prompt.iter().for_each(|&token| history.push(token));
    }

    /// Returns the token of a request at a position.
    pub fn token(&self, request: RequestId, position: usize) -> u32 {
        self.histories[&request].tokens[position]
    }

    /// Returns true if the sequence ends with the token at a position.
    pub fn is_stop(&self, request: RequestId, position: usize) -> bool {
        self.stops(self.histories[&request].hashes[position])
    }

    fn stops(&self, hash: u64) -> bool {
        ((hash >> 11) as f64) < self.stop * (1u64 << 53) as f64
    }

    /// Checks that no page which a row writes to is used by another request in any of the steps.
    pub fn check_writes(&mut self, steps: &VecDeque<Step>) {
        self.writers.fill(None);
        for (request, start, end, pages) in steps.iter().flat_map(rows) {
            assert!(end <= pages.len() * self.page_size, "too few pages");
            for page in &pages[start / self.page_size..end.div_ceil(self.page_size)] {
                let writer = self.writers[page.index()].replace(request);
                assert!(writer.is_none_or(|writer| writer == request), "two writers");
            }
        }
        for (request, _, end, pages) in steps.iter().flat_map(rows) {
            for page in &pages[..end.div_ceil(self.page_size)] {
                let writer = self.writers[page.index()];
                assert!(
                    writer.is_none_or(|writer| writer == request),
                    "{page:?} is read while it is written"
                );
            }
        }
    }

    /// Runs a step: checks what its rows read, writes to their pages, and samples tokens.
    pub fn run(&mut self, step: &Step, rng: &mut StdRng) -> Vec<Outcome> {
        for chunk in &step.prefill {
            let history = &self.histories[&chunk.request];
            let end = chunk.start + chunk.tokens.len();
            if !history.failed {
                assert_eq!(chunk.tokens, history.tokens[chunk.start..end]);
                assert_eq!(chunk.ends_prompt, end == history.tokens.len());
            }
        }
        for row in &step.decode {
            let history = &self.histories[&row.request];
            if !history.failed {
                assert_eq!(row.position + 1, history.tokens.len());
                let token = history.tokens[row.position];
                assert!(row.token.is_none_or(|known| known == token));
            }
        }
        let ends_prompt = step.prefill.iter().map(|chunk| chunk.ends_prompt);
        let samples: Vec<_> = ends_prompt
            .chain(step.decode.iter().map(|_| true))
            .collect();
        rows(step)
            .zip(samples)
            .map(|((request, start, end, pages), samples)| {
                let fails = rng.random_bool(self.fail);
                self.run_row(request, start..end, pages, samples, fails)
            })
            .collect()
    }

    fn run_row(
        &mut self,
        request: RequestId,
        positions: std::ops::Range<usize>,
        pages: &[PageId],
        samples: bool,
        fails: bool,
    ) -> Outcome {
        let page_size = self.page_size;
        let place = |p: usize| pages[p / page_size].index() * page_size + p % page_size;
        let history = self.histories.get_mut(&request).unwrap();
        history.failed |= fails;
        if history.failed {
            positions.for_each(|p| self.memory[place(p)] = 0);
            return Outcome::Failed("as the test wants".into());
        }
        for p in 0..positions.start {
            assert_eq!(
                self.memory[place(p)],
                history.hashes[p],
                "{request:?} reads other keys and values than its own at position {p}"
            );
        }
        for p in positions.clone() {
            self.memory[place(p)] = history.hashes[p];
        }
        if !samples {
            return Outcome::Computed;
        }
        let token = (self.memory[place(positions.end - 1)] % VOCABULARY) as u32;
        history.push(token);
        let hash = history.hashes[positions.end];
        if self.stops(hash) {
            Outcome::Stop(token)
        } else {
            Outcome::Token(token)
        }
    }
}

/// Returns the request, the first position, the end and the pages of each chunk and row.
fn rows(step: &Step) -> impl Iterator<Item = (RequestId, usize, usize, &[PageId])> {
    let prefill = step.prefill.iter().map(|chunk| {
        let end = chunk.start + chunk.tokens.len();
        (chunk.request, chunk.start, end, &chunk.pages[..])
    });
    let decode = step.decode.iter();
    prefill.chain(decode.map(|row| (row.request, row.position, row.position + 1, &row.pages[..])))
}
