//! Runs the scheduler against a device that knows what every position of the KV cache holds.
//!
//! Every episode has limits, arrivals, lengths, shared prefixes, cancellations, time-outs,
//! failures, priorities and keys of its own. After each step it checks that
//!
//! - each page is free, in the prefix tree or used by the sequences that its reference count says,
//!   and a page that a step writes to is used by no other request in any step in flight;
//! - the positions that a row reads hold the keys and values of its tokens, whatever was shared,
//!   evicted or computed anew;
//! - tokens come in their order without a gap, and each request ends once, in time;
//! - a cancelled request is in no later step;
//! - requests start in the order of their priorities, of equal priority in that of their arrival,
//!   and after a bounded number of steps.

mod client;
mod device;

use client::{Client, Counts};
use device::Device;
use marlin_serve::{Request, Scheduler, SchedulerConfig, SubmitError};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::VecDeque;
use std::time::Duration;

/// The environment variable with the number of requests.
const VARIABLE: &str = "MARLIN_SERVE_REQUESTS";
/// The requests of an episode.
const EPISODE: usize = 1000;

/// 100,000 requests, in about 10 s of CPU time; another number can be set with
/// `MARLIN_SERVE_REQUESTS`.
#[test]
fn every_request_ends_once_with_the_tokens_of_its_own_prefix() {
    let requests: usize = std::env::var(VARIABLE).map_or(100_000, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{VARIABLE}: `{text}` is not a number of requests"))
    });
    let mut rng = marlin_testing::rng();
    let mut counts = Counts::default();
    for start in (0..requests).step_by(EPISODE) {
        let mut episode = Episode::new(StdRng::seed_from_u64(rng.random()));
        episode.run(EPISODE.min(requests - start));
        counts.add(&episode.client.counts);
    }
    println!("{counts:?}");
    if requests >= 100_000 {
        counts.check_coverage();
    }
}

/// What the requests of an episode are like.
struct Traffic {
    /// Beginnings of prompts.
    prefixes: Vec<Vec<u32>>,
    /// The number of different tokens in prompts: few make equal prefixes by chance.
    alphabet: u32,
    longest_prompt: usize,
    longest_answer: usize,
    priorities: i32,
    keys: u64,
    /// The most arrivals between two steps, and the probability that there are any.
    burst: usize,
    arrival: f64,
    cancel: f64,
    timeout: f64,
}

impl Traffic {
    fn draw(rng: &mut StdRng) -> Self {
        let alphabet = rng.random_range(2..100);
        let mut tokens = |most| {
            let len = rng.random_range(0..=most);
            (0..len).map(|_| rng.random_range(0..alphabet)).collect()
        };
        Self {
            prefixes: (0..4).map(|_| tokens(40)).collect(),
            alphabet,
            longest_prompt: rng.random_range(1..40),
            longest_answer: rng.random_range(1..80),
            priorities: if rng.random() { 1 } else { 3 },
            keys: rng.random_range(1..5),
            burst: rng.random_range(1..8),
            arrival: rng.random_range(0.02..0.5),
            cancel: if rng.random() { 0.0 } else { 0.1 },
            timeout: if rng.random() { 0.0 } else { 0.3 },
        }
    }

    fn request(&self, rng: &mut StdRng) -> Request {
        let mut prompt = self.prefixes[rng.random_range(0..self.prefixes.len())].clone();
        prompt.truncate(rng.random_range(0..=prompt.len()).max(prompt.len() / 2));
        let own = rng.random_range(1..=self.longest_prompt);
        prompt.extend((0..own).map(|_| rng.random_range(0..self.alphabet)));
        let mut request = Request::new(prompt, rng.random_range(1..=self.longest_answer));
        request.priority = rng.random_range(0..self.priorities);
        request.key = rng.random_range(0..self.keys);
        let mut timeout = |most| {
            rng.random_bool(self.timeout)
                .then(|| Duration::from_millis(rng.random_range(1..most)))
        };
        request.queue_timeout = timeout(500);
        request.timeout = timeout(2000);
        request
    }
}

struct Episode {
    rng: StdRng,
    config: SchedulerConfig,
    traffic: Traffic,
    scheduler: Scheduler,
    device: Device,
    client: Client,
    in_flight: VecDeque<marlin_serve::Step>,
    now: Duration,
}

impl Episode {
    fn new(mut rng: StdRng) -> Self {
        let traffic = Traffic::draw(&mut rng);
        let max_sequences = rng.random_range(1..=32);
        let config = SchedulerConfig {
            pages: 1 << rng.random_range(3..9),
            page_size: [1, 2, 3, 4, 8, 16, 64][rng.random_range(0..7)],
            max_sequences,
            max_step_tokens: max_sequences + rng.random_range(0..64),
            max_waiting: rng.random_range(1..300),
            fair: rng.random(),
        };
        Self {
            scheduler: Scheduler::new(config.clone()).unwrap(),
            device: Device::new(
                &config,
                rng.random_range(0.0..0.05),
                rng.random_range(0.0..0.01),
            ),
            client: Client::new(!config.fair && traffic.priorities == 1, !config.fair),
            traffic,
            config,
            rng,
            in_flight: VecDeque::new(),
            now: Duration::ZERO,
        }
    }

    fn run(&mut self, requests: usize) {
        let mut submitted = 0;
        while submitted < requests || self.client.live() > 0 || !self.in_flight.is_empty() {
            if submitted < requests && self.rng.random_bool(self.traffic.arrival) {
                for _ in 0..self.rng.random_range(1..=self.traffic.burst) {
                    self.submit();
                    submitted += 1;
                }
            }
            if self.rng.random_bool(self.traffic.cancel)
                && let Some(request) = self.client.cancel(&mut self.rng)
            {
                assert!(self.scheduler.cancel(request));
                assert!(!self.scheduler.cancel(request), "it ended before");
            }
            self.schedule();
            if self.rng.random() {
                self.schedule();
            }
            self.complete();
        }
        let metrics = self.scheduler.metrics();
        assert_eq!((metrics.running, metrics.waiting), (0, 0));
        assert_eq!(metrics.used_pages, 0);
        self.client.counts.finish(&metrics);
    }

    fn submit(&mut self) {
        let request = self.traffic.request(&mut self.rng);
        let positions = request.prompt.len() + request.max_tokens - 1;
        let fits = positions <= self.config.pages as usize * self.config.page_size;
        let waiting = self.scheduler.metrics().waiting;
        match self.scheduler.submit(request.clone(), self.now) {
            Ok(id) => {
                assert!(fits);
                self.device.add(id, &request.prompt);
                self.client.add(id, request, self.now);
            }
            Err(SubmitError::TooLarge { needed, pages, .. }) => {
                assert!(!fits && needed > pages as usize);
                self.client.counts.refused += 1;
            }
            Err(SubmitError::QueueFull { max_waiting }) => {
                assert!(fits && waiting >= max_waiting);
                self.client.counts.refused += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn schedule(&mut self) {
        let step = self.scheduler.schedule(self.now);
        self.scheduler.check();
        self.client
            .events(self.scheduler.take_events(), &self.device, self.now);
        match step {
            Some(step) => {
                let sequences = step.prefill.len() + step.decode.len();
                assert!((1..=self.config.max_sequences).contains(&sequences));
                assert!((1..=self.config.max_step_tokens).contains(&step.tokens()));
                self.client.scheduled(&step);
                self.in_flight.push_back(step);
                self.device.check_writes(&self.in_flight);
            }
            None if self.in_flight.is_empty() => {
                assert_eq!(self.client.live(), 0, "no step although requests are there");
                self.now += Duration::from_millis(1);
            }
            None => {}
        }
    }

    fn complete(&mut self) {
        let Some(step) = self.in_flight.pop_front() else {
            return;
        };
        let outcomes = self.device.run(&step, &mut self.rng);
        self.now += Duration::from_millis(self.rng.random_range(1..20));
        let events = self.scheduler.complete(step, outcomes, self.now);
        self.scheduler.check();
        self.client.events(events, &self.device, self.now);
        self.client.completed(self.now);
        let metrics = self.scheduler.metrics();
        assert_eq!(metrics.running + metrics.waiting, self.client.live());
        assert!(metrics.used_pages + metrics.cached_pages <= self.config.pages as usize);
    }
}
