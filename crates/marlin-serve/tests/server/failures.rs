//! Executors that fail, and readers that are slow.

use crate::model::{Fault, continuation};
use crate::support::{Answer, Fixture, greedy};
use futures_lite::future::block_on;
use marlin_serve::server::{EndReason, FailReason, Health, SubmitError};
use std::time::{Duration, Instant};

/// The first token of the prompt for which something fails.
const BROKEN: u32 = 200;

/// Runs a request that fails beside one that does not. Returns the answers of both.
fn run_with(fault: Fault) -> (Fixture, [Answer; 2]) {
    let fixture = Fixture::new(|options| options.scheduler.max_sequences = 1);
    fixture.control.state().faults.insert(BROKEN, fault);
    let broken = fixture.submit(greedy(vec![BROKEN; 6], 10));
    let other = fixture.submit(greedy(vec![7; 6], 10));
    let answers = [broken, other].map(Answer::read);
    (fixture, answers)
}

fn executor_failure(reason: &str) -> Result<EndReason, FailReason> {
    Err(FailReason::Executor(reason.into()))
}

#[test]
fn a_failure_ends_the_requests_that_it_touches_and_no_others() {
    for (fault, reason) in [
        (Fault::Add, "a sequence is refused"),
        (Fault::Row, "a row fails"),
        (Fault::Start, "a step is not started"),
        (Fault::Finish, "a step fails"),
        (
            Fault::TooFewOutputs,
            "the executor returned 0 outputs for a step of 1 rows",
        ),
    ] {
        let (fixture, [broken, other]) = run_with(fault);
        assert_eq!(broken.end, executor_failure(reason), "{fault:?}");
        assert_eq!(
            other.tokens,
            continuation(&[7; 6], 0.0, 0, 0, 10),
            "{fault:?}"
        );
        assert_eq!(fixture.handle.health(), Health::Ok);
        assert_eq!(fixture.idle(2).ended.failed, 1);
    }
}

#[test]
fn a_failed_step_fails_all_its_requests_and_shows_in_the_health() {
    let fixture = Fixture::new(|_| {});
    fixture.control.state().faults.insert(BROKEN, Fault::Finish);
    fixture.control.set_closed(true);
    let mut other = greedy(vec![7; 6], 1000);
    other.ignore_eos = true;
    let other = fixture.submit(other);
    fixture.control.wait_for_steps(2);
    let broken = fixture.submit(greedy(vec![BROKEN; 6], 10));
    fixture.control.set_closed(false);
    for stream in [broken, other] {
        assert_eq!(Answer::read(stream).end, executor_failure("a step fails"));
    }
    let failed = Health::StepFailed("a step fails".into());
    assert_eq!(fixture.handle.health(), failed);
    assert!(fixture.run(greedy(vec![8; 6], 10)).end.is_ok());
    assert_eq!(fixture.handle.health(), Health::Ok);
    assert_eq!(fixture.idle(3).ended.failed, 2);
}

/// A server that failed is asked nothing by a router: it finds out by itself that steps succeed.
/// Takes about 0.3 s, the times between trials.
#[test]
fn a_server_without_requests_tries_steps_after_a_failure() {
    let fixture = Fixture::new(|options| options.retry = Duration::from_millis(20));
    // The prompt of a trial is token 0.
    for prompt in [BROKEN, 0] {
        let mut state = fixture.control.state();
        state.faults.insert(prompt, Fault::Finish);
    }
    let broken = fixture.run(greedy(vec![BROKEN; 6], 10));
    assert_eq!(broken.end, executor_failure("a step fails"));
    let start = Instant::now();
    // One or two steps of the request, and trials after times that double from 20 ms or 40 ms.
    fixture.control.wait_for_steps(4);
    assert!(start.elapsed() >= Duration::from_millis(100));
    let failed = Health::StepFailed("a step fails".into());
    assert_eq!(fixture.handle.health(), failed);
    fixture.control.state().faults.remove(&0);
    while fixture.handle.health() != Health::Ok {
        let waited = start.elapsed();
        assert!(waited < Duration::from_secs(60), "no trial succeeded");
        std::thread::sleep(Duration::from_millis(1));
    }
    let steps = fixture.control.state().steps.len();
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(
        fixture.control.state().steps.len(),
        steps,
        "a trial while all is well"
    );
    let metrics = fixture.idle(1);
    assert_eq!((metrics.ended.failed, metrics.generation_tokens), (1, 0));
}

#[test]
fn a_lost_device_and_a_panic_fail_all_requests_and_end_the_server() {
    for (fault, reason) in [
        (Fault::Lost, "the device is lost: it burns"),
        (Fault::Panic, "its thread panicked: the executor panics"),
    ] {
        let (fixture, answers) = run_with(fault);
        for answer in answers {
            assert_eq!(answer.end, Err(FailReason::Server(reason.into())));
        }
        block_on(fixture.handle.stopped());
        assert_eq!(fixture.handle.health(), Health::Failed(reason.into()));
        let refused = fixture.handle.submit(greedy(vec![7; 6], 10));
        let refused = refused.expect_err("the server has ended");
        assert_eq!(refused, SubmitError::ServerFailed(reason.into()));
        let metrics = fixture.handle.metrics();
        assert_eq!((metrics.running, metrics.waiting), (0, 0));
        assert_eq!(metrics.ended.failed, 2);
    }
}

#[test]
fn a_slow_reader_fails_after_its_buffer_and_holds_nobody_up() {
    let fixture = Fixture::new(|options| options.event_buffer = 5);
    let mut slow = greedy(vec![9; 6], 1000);
    slow.ignore_eos = true;
    let slow = fixture.submit(slow);
    let mut others = Vec::new();
    for prompt in 10..20 {
        others.push(std::thread::scope(|scope| {
            let fixture = &fixture;
            scope
                .spawn(move || fixture.run(greedy(vec![prompt; 6], 3)))
                .join()
                .unwrap()
        }));
    }
    assert!(others.iter().all(|answer| answer.end.is_ok()));
    let metrics = fixture.idle(11);
    assert_eq!(metrics.ended.cancelled, 1);
    let answer = Answer::read(slow);
    assert_eq!(answer.end, Err(FailReason::SlowReader { buffer: 5 }));
    assert_eq!(answer.tokens, continuation(&[9; 6], 0.0, 0, 0, 5));
}

#[test]
fn time_outs_name_their_length() {
    let fixture = Fixture::new(|options| options.scheduler.max_sequences = 1);
    fixture.control.state().pause = Duration::from_millis(2);
    let ms = Duration::from_millis;
    let mut running = greedy(vec![9; 6], 4000);
    running.timeout = Some(ms(100));
    running.ignore_eos = true;
    let mut waiting = greedy(vec![10; 6], 5);
    waiting.queue_timeout = Some(ms(20));
    let start = Instant::now();
    let [running, waiting] = [running, waiting].map(|request| fixture.submit(request));
    let waiting = Answer::read(waiting);
    assert_eq!(waiting.end, Err(FailReason::QueueTimeout(ms(20))));
    assert!(start.elapsed() >= ms(20));
    assert_eq!(waiting.tokens.len(), 0);
    let running = Answer::read(running);
    assert_eq!(running.end, Err(FailReason::Timeout(ms(100))));
    assert!(start.elapsed() >= ms(100));
    assert_eq!(running.usage.completion_tokens, running.tokens.len());
    assert_eq!(fixture.idle(2).ended.timeout, 2);
}
