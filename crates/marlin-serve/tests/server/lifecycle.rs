//! Cancellation, the end of a server, and its figures.

use crate::support::{Answer, Fixture, greedy};
use futures_lite::future::block_on;
use marlin_serve::server::{
    FailReason, GenerationRequest, Health, Server, StartError, SubmitError,
};
use marlin_serve::{ConfigError, SchedulerConfig};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(3600);

/// A request that runs until it is cancelled or the cache is full.
fn long(token: u32) -> GenerationRequest {
    GenerationRequest {
        ignore_eos: true,
        ..greedy(vec![token; 6], 4000)
    }
}

#[test]
fn no_step_that_starts_after_a_cancellation_has_a_row_of_it() {
    // Nothing reads the events.
    let fixture = Fixture::new(|options| options.event_buffer = 10_000);
    let control = &fixture.control;
    control.set_closed(true);
    let other = fixture.submit(long(2));
    control.wait_for_steps(2);
    // With two steps in flight, each one that is finished lets another one start.
    let run_steps = |count| {
        let started = control.state().steps.len();
        control.permit(Some(count));
        control.wait_for_steps(started + count);
        started
    };
    for _ in 0..50 {
        let stream = fixture.submit(long(1));
        run_steps(5);
        drop(stream);
        let dropped = run_steps(5);
        let state = control.state();
        let is_cancelled = |step: &Vec<Vec<u32>>| step.iter().any(|prompt| prompt[0] == 1);
        let (before, later) = state.steps.split_at(dropped);
        assert!(before[dropped - 1..].iter().any(is_cancelled));
        assert!(!later.iter().any(is_cancelled), "{later:?}");
    }
    drop(other);
    control.set_closed(false);
    assert_eq!(fixture.idle(51).ended.cancelled, 51);
}

#[test]
fn waiting_requests_are_cancelled_too() {
    let fixture = Fixture::new(|options| options.scheduler.max_sequences = 1);
    let running = fixture.submit(long(1));
    fixture.control.wait_for_steps(1);
    let waiting: Vec<_> = (2..12).map(|token| fixture.submit(long(token))).collect();
    drop(waiting);
    drop(running);
    assert_eq!(fixture.idle(11).ended.cancelled, 11);
    let state = fixture.control.state();
    assert!(state.steps.iter().flatten().all(|prompt| prompt[0] == 1));
}

#[test]
fn a_shutdown_completes_what_was_submitted() {
    let fixture = Fixture::new(|options| options.scheduler.max_sequences = 2);
    fixture.control.set_closed(true);
    let streams: Vec<_> = (1..9)
        .map(|token| fixture.submit(greedy(vec![token; 5], 9)))
        .collect();
    fixture.handle.shutdown(LONG);
    assert_eq!(fixture.handle.health(), Health::ShuttingDown);
    let refused = fixture.handle.submit(greedy(vec![1], 1));
    assert_eq!(refused.expect_err("it ends"), SubmitError::ShuttingDown);
    fixture.control.set_closed(false);
    for stream in streams {
        assert!(Answer::read(stream).end.is_ok());
    }
    block_on(fixture.handle.stopped());
    assert_eq!(fixture.handle.health(), Health::Stopped);
    let refused = fixture.handle.submit(greedy(vec![1], 1));
    assert_eq!(
        refused.expect_err("it has ended"),
        SubmitError::ShuttingDown
    );
    // Only the test has the control: the executor was dropped.
    assert_eq!(Arc::strong_count(&fixture.control), 1);
}

#[test]
fn a_shutdown_ends_at_its_deadline_and_no_later_than_the_first_one() {
    let fixture = Fixture::new(|options| options.scheduler.max_sequences = 1);
    fixture.control.state().pause = Duration::from_millis(1);
    let streams: Vec<_> = (1..4).map(|token| fixture.submit(long(token))).collect();
    let start = Instant::now();
    fixture.handle.shutdown(Duration::from_millis(30));
    fixture.handle.shutdown(LONG);
    for stream in streams {
        assert_eq!(Answer::read(stream).end, Err(FailReason::ShutDown));
    }
    let elapsed = start.elapsed();
    assert!(elapsed >= Duration::from_millis(30), "{elapsed:?}");
    block_on(fixture.handle.stopped());
    assert_eq!(fixture.handle.metrics().ended.cancelled, 3);
}

#[test]
fn an_idle_server_shuts_down_at_once_and_one_without_handles_ends() {
    let Fixture { handle, control } = Fixture::new(|_| {});
    handle.shutdown(LONG);
    block_on(handle.stopped());
    assert_eq!(Arc::strong_count(&control), 1);

    let Fixture { handle, control } = Fixture::new(|_| {});
    let stream = handle.submit(greedy(vec![4; 4], 20)).unwrap();
    drop(handle);
    assert!(Answer::read(stream).end.is_ok());
    let start = Instant::now();
    while Arc::strong_count(&control) > 1 {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "the thread goes on"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn limits_of_zero_are_refused() {
    let options = |pages, event_buffer| {
        let mut options = marlin_serve::server::ServerOptions::new(SchedulerConfig::new(pages));
        options.event_buffer = event_buffer;
        let (model, _) = crate::model::Model::new(&options.scheduler, true);
        Server::start(model, crate::support::tokenizer(), options).expect_err("it is refused")
    };
    let error = options(0, 1);
    assert!(
        matches!(
            error,
            StartError::Config(ConfigError::Zero { name: "pages" })
        ),
        "{error}"
    );
    assert!(matches!(options(1, 0), StartError::EventBuffer));
}

#[test]
fn figures_add_up() {
    let fixture = Fixture::new(|_| {});
    let prompt = vec![3; 9];
    let answers: Vec<_> = (0..3)
        .map(|_| fixture.run(greedy(prompt.clone(), 12)))
        .collect();
    let metrics = fixture.idle(3);
    let generated: usize = answers.iter().map(|answer| answer.tokens.len()).sum();
    assert_eq!(metrics.prompt_tokens, 27);
    assert_eq!(metrics.generation_tokens, generated as u64);
    assert_eq!((metrics.prefix_queries, metrics.prefix_hits), (27, 16));
    assert_eq!(metrics.time_to_first_token.count(), 3);
    assert_eq!(metrics.inter_token_latency.count(), generated as u64 - 3);
    for histogram in [
        &metrics.request_latency,
        &metrics.queue_time,
        &metrics.prefill_time,
        &metrics.decode_time,
        &metrics.inference_time,
        &metrics.time_per_output_token,
        &metrics.request_prompt_tokens,
        &metrics.request_generation_tokens,
        &metrics.request_max_tokens,
    ] {
        assert_eq!(histogram.count(), 3);
        assert_eq!(histogram.buckets().map(|(_, count)| count).sum::<u64>(), 3);
    }
    assert_eq!(metrics.request_prompt_tokens.sum(), 27.0);
    let bounds: Vec<_> = metrics.request_prompt_tokens.buckets().collect();
    assert_eq!(
        (bounds[3], bounds[10]),
        ((10.0, 3), (2000.0, 0)),
        "{bounds:?}"
    );
    assert_eq!(bounds.last().map(|&(bound, _)| bound), Some(f64::INFINITY));
    assert_eq!(metrics.iteration_tokens.count(), metrics.steps);
    assert_eq!(metrics.iteration_tokens.sum() as usize, 27 + generated);
    let parts = metrics.queue_time.sum() + metrics.inference_time.sum();
    assert!(parts <= metrics.request_latency.sum());
}
