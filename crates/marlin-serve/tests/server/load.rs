//! Many requests at once.

use crate::model::continuation;
use crate::support::{Answer, Fixture, greedy, prompt};
use futures_lite::{StreamExt, future::block_on};
use marlin_serve::server::{EndReason, FailReason, GenerationRequest, SubmitError, TokenEvent};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::time::{Duration, Instant};

const CLIENTS: usize = 32;
const REQUESTS: usize = 1000;

/// What the clients have seen.
#[derive(Debug, Default)]
struct Counts {
    complete: u64,
    cancelled: u64,
    timeouts: u64,
}

/// 1,000 requests of 32 clients, of which 30 % are cancelled at a random time, over a KV cache that
/// is too small for those that run: in about 1 s.
#[test]
fn requests_are_complete_or_cancelled_and_no_page_is_lost() {
    let mut rng = marlin_testing::rng();
    let fixture = Fixture::new(|options| {
        options.scheduler.pages = 150;
        options.scheduler.max_sequences = 24;
        options.scheduler.max_step_tokens = 64;
        options.scheduler.fair = rng.random();
    });
    fixture.control.state().pause = Duration::from_micros(100);
    let prefixes: Vec<_> = (0..4).map(|_| prompt(&mut rng, 24)).collect();
    let counts: Vec<_> = std::thread::scope(|scope| {
        let clients = (0..CLIENTS).map(|client| {
            let mut rng = StdRng::seed_from_u64(rng.random());
            let (fixture, prefixes) = (&fixture, &prefixes);
            let requests = (client..REQUESTS).step_by(CLIENTS);
            scope.spawn(move || {
                let mut counts = Counts::default();
                for _ in requests {
                    run_request(fixture, prefixes, client as u64, &mut rng, &mut counts);
                }
                counts
            })
        });
        let clients: Vec<_> = clients.collect();
        clients
            .into_iter()
            .map(|client| client.join().unwrap())
            .collect()
    });
    let sum = |count: fn(&Counts) -> u64| counts.iter().map(count).sum::<u64>();
    let metrics = fixture.idle(REQUESTS as u64);
    println!("{counts:?}\n{metrics:?}");
    let ended = metrics.ended;
    // The last event may be there when a client cancels.
    assert!(ended.stop + ended.length >= sum(|c| c.complete));
    assert!(ended.timeout >= sum(|c| c.timeouts));
    assert!(ended.cancelled <= sum(|c| c.cancelled));
    assert_eq!(ended.failed, 0);
    assert!(ended.cancelled > 100, "few requests were cancelled");
    assert!(metrics.preemptions > 0, "no request was pre-empted");
    assert!(metrics.prefix_hits > 0, "no prefix was shared");
    fixture.control.set_closed(true);
    let last = fixture.submit(greedy(vec![1; 8], 4));
    fixture.control.set_closed(false);
    assert_eq!(
        Answer::read(last).tokens,
        continuation(&[1; 8], 0.0, 0, 0, 4)
    );
}

fn run_request(
    fixture: &Fixture,
    prefixes: &[Vec<u32>],
    key: u64,
    rng: &mut StdRng,
    counts: &mut Counts,
) {
    let mut tokens = prefixes[rng.random_range(0..prefixes.len())].clone();
    tokens.truncate(rng.random_range(0..=tokens.len()));
    let own = rng.random_range(1..20);
    tokens.extend(prompt(rng, own));
    let max_tokens = rng.random_range(1..100);
    let mut request = GenerationRequest {
        key,
        priority: rng.random_range(0..2),
        timeout: rng
            .random_bool(0.1)
            .then(|| Duration::from_millis(rng.random_range(1..200))),
        ..greedy(tokens.clone(), max_tokens)
    };
    let temperature = if rng.random() { 0.0 } else { 1.0 };
    let seed = rng.random();
    request.sampling.temperature = temperature;
    request.sampling.seed = Some(seed);
    let expected = continuation(&tokens, temperature, seed, 0, max_tokens);
    let cancel_after = rng
        .random_bool(0.3)
        .then(|| rng.random_range(0..max_tokens));
    let mut stream = fixture.submit(request);
    let mut read = Vec::new();
    loop {
        if cancel_after == Some(read.len()) {
            drop(stream);
            counts.cancelled += 1;
            break;
        }
        match block_on(stream.next()).unwrap() {
            TokenEvent::Token { token, .. } => {
                read.push(token);
                assert_eq!(read[..], expected[..read.len()], "after {tokens:?}");
            }
            TokenEvent::End { reason, usage } => {
                assert_eq!(read, expected, "after {tokens:?}");
                let ended = read.last() == Some(&crate::model::EOS);
                assert_eq!(reason == EndReason::EndOfSequence, ended);
                assert_eq!(usage.completion_tokens, read.len());
                assert_eq!(usage.prompt_tokens, tokens.len());
                assert!(usage.cached_tokens < tokens.len());
                counts.complete += 1;
                break;
            }
            TokenEvent::Failed { reason, usage } => {
                assert!(matches!(reason, FailReason::Timeout(_)), "{reason}");
                assert_eq!(usage.completion_tokens, read.len());
                counts.timeouts += 1;
                break;
            }
        }
    }
}

/// A request gets the same text alone and among 63 others, with a temperature and without; with and
/// without run-ahead. In about 0.5 s.
#[test]
fn a_text_is_the_same_alone_and_among_others() {
    let mut rng = marlin_testing::rng();
    let requests: Vec<_> = (0..64)
        .map(|n| {
            let mut request = greedy(prompt(&mut rng, 1 + n % 40), 80);
            request.sampling.temperature = (n % 2) as f32;
            request.sampling.seed = Some(n as u64);
            request.stop = vec![["ab", "ä", "€a", "😀"][n % 4].into()];
            request
        })
        .collect();
    let mut alone = Vec::new();
    for runs_ahead in [false, true] {
        let fixture = Fixture::with_model(runs_ahead, |options| options.scheduler.pages = 80);
        let answers: Vec<_> = requests
            .iter()
            .map(|request| fixture.run(request.clone()))
            .collect();
        fixture.idle(64);
        let fixture = Fixture::with_model(runs_ahead, |options| options.scheduler.pages = 80);
        let streams: Vec<_> = requests
            .iter()
            .map(|request| fixture.submit(request.clone()))
            .collect();
        let together: Vec<_> = streams.into_iter().map(Answer::read).collect();
        assert!(
            fixture.idle(64).preemptions > 0,
            "no request was pre-empted"
        );
        for (alone, among) in answers.iter().zip(&together) {
            assert_eq!(
                (&alone.text, &alone.tokens, &alone.end),
                (&among.text, &among.tokens, &among.end)
            );
        }
        alone.push(answers);
    }
    assert_eq!(alone[0], alone[1]);
    let lens: Vec<_> = alone[0].iter().map(|answer| answer.tokens.len()).collect();
    assert!(
        lens.iter().sum::<usize>() > 640,
        "the texts are short: {lens:?}"
    );
}

#[test]
fn requests_beyond_the_limit_of_the_queue_are_refused_at_once() {
    let fixture = Fixture::new(|options| {
        options.scheduler.max_waiting = 3;
        options.scheduler.max_sequences = 2;
    });
    fixture.control.set_closed(true);
    let running: Vec<_> = (0..2)
        .map(|n| fixture.submit(greedy(vec![n + 1; 3], 5)))
        .collect();
    fixture.control.wait_for_steps(1);
    while fixture.control.state().sequences < 2 {
        // The second one may be in the second step.
        std::thread::sleep(Duration::from_millis(1));
    }
    let waiting: Vec<_> = (0..3)
        .map(|n| fixture.submit(greedy(vec![n + 9; 3], 5)))
        .collect();
    let refused = fixture.handle.submit(greedy(vec![8], 5));
    let refused = refused.expect_err("the queue is full");
    assert_eq!(refused, SubmitError::QueueFull { max_waiting: 3 });
    drop(waiting);
    fixture.control.set_closed(false);
    for stream in running {
        assert!(Answer::read(stream).end.is_ok());
    }
    fixture.idle(5);
    assert!(fixture.run(greedy(vec![8], 5)).end.is_ok());
}

/// Prints the host's time of a step of 64 sequences: all that the server does but the model.
#[test]
#[ignore = "prints a time; with --release, in about 1 s"]
fn host_time_of_a_step() {
    let fixture = Fixture::new(|_| {});
    let requests = (0..64).map(|n| GenerationRequest {
        ignore_eos: true,
        stop: vec!["\n\n".into(), "</answer>".into()],
        // All fit in the KV cache: no request is pre-empted.
        ..greedy(vec![n + 1; 5], 200)
    });
    let start = Instant::now();
    let streams: Vec<_> = requests.map(|request| fixture.submit(request)).collect();
    for stream in streams {
        Answer::read(stream);
    }
    let elapsed = start.elapsed();
    let steps = fixture.idle(64).steps as u32;
    let host = elapsed.saturating_sub(fixture.control.state().computing) / steps;
    println!("{host:?} a step, of {:?}", elapsed / steps);
}
