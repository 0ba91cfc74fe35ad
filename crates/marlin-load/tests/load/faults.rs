//! Requests that fail or are cancelled are counted, and none hangs.

use crate::server::{Behaviour, Fault, Server};
use marlin_load::{Amount, Failure, Length, LoadError, LoadOptions, Outcome, run};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const FAULTS: [(Fault, &str); 8] = [
    (Fault::Status, "status 503"),
    (Fault::Closed, "broken stream"),
    (Fault::Cut, "broken stream"),
    (Fault::Silent, "timeout"),
    (Fault::Malformed, "malformed answer"),
    (Fault::Huge, "malformed answer"),
    (Fault::Reported, "error in the stream"),
    (Fault::NoToken, "no token"),
];

#[test]
fn each_failure_is_counted_under_its_kind() {
    let server = Server::start(Behaviour {
        // Every third request fails, each fault in turn.
        fault: |number| {
            number
                .is_multiple_of(3)
                .then(|| FAULTS[number / 3 % FAULTS.len()].0)
        },
        ..Behaviour::default()
    });
    let mut options = LoadOptions::new(server.url());
    options.input_len = Length::fixed(4);
    options.output_len = Length::fixed(6);
    options.load.concurrency = Some(5);
    options.amount = Amount::Requests(3 * FAULTS.len() * 2);
    options.request_timeout = Duration::from_secs(1);
    options.seed = marlin_testing::seed();
    let begin = Instant::now();
    let report = run(&options).unwrap();
    println!("{report}");
    assert!(
        begin.elapsed() < Duration::from_secs(8),
        "{:?}",
        begin.elapsed()
    );
    let mut expected = BTreeMap::new();
    for (_, kind) in FAULTS {
        *expected.entry(kind.to_string()).or_insert(0) += 2;
    }
    assert_eq!(report.metrics.failures, expected);
    assert_eq!(report.metrics.completed, 2 * 2 * FAULTS.len());
    for request in &report.requests {
        let fails = request.index.is_multiple_of(3);
        assert_eq!(
            matches!(request.outcome, Outcome::Failed(_)),
            fails,
            "{request:?}"
        );
    }
}

#[test]
fn a_cancelled_request_closes_its_connection() {
    let server = Server::start(Behaviour {
        gap: Duration::from_millis(5),
        ..Behaviour::default()
    });
    let mut options = LoadOptions::new(server.url());
    options.input_len = Length::fixed(4);
    options.output_len = Length::fixed(20);
    options.load.concurrency = Some(8);
    options.amount = Amount::Requests(40);
    options.cancel_fraction = 0.5;
    options.seed = marlin_testing::seed();
    let report = run(&options).unwrap();
    let metrics = &report.metrics;
    println!("{} of 40 cancelled", metrics.cancelled);
    assert_eq!(metrics.failed, 0, "{report}");
    assert!((5..=35).contains(&metrics.cancelled));
    assert_eq!(metrics.completed + metrics.cancelled, 40);
    let seen = server.log.seen.lock().unwrap();
    for request in &report.requests {
        let sent = seen[&format!("load-{}-{}", report.seed, request.index)]
            .tokens
            .len();
        match request.outcome {
            Outcome::Completed => assert_eq!(sent, 20),
            // Cancelled as soon as the client had this number of tokens, of which the first is
            // sent at once: the server sends some more until it notices.
            _ => assert!(request.output_tokens <= sent, "{request:?}"),
        }
    }
    let cancelled = report
        .requests
        .iter()
        .filter(|request| request.outcome == Outcome::Cancelled);
    let early = cancelled.filter(|request| request.output_tokens < 8);
    let sent: Vec<usize> = early
        .map(|request| {
            seen[&format!("load-{}-{}", report.seed, request.index)]
                .tokens
                .len()
        })
        .collect();
    println!("tokens sent to those cancelled before 8: {sent:?}");
    // On a machine that is not stopped for 60 ms at every one of them.
    assert!(sent.is_empty() || sent.iter().any(|&sent| sent < 20));
}

#[test]
fn a_server_that_is_not_there_is_an_error() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let mut options = LoadOptions::new(format!("http://{address}"));
    for model in [None, Some("m".to_string())] {
        options.model = model;
        let error = run(&options).unwrap_err();
        let LoadError::Setup { failure, .. } = &error else {
            panic!("{error}");
        };
        assert!(matches!(failure, Failure::Connect(_)), "{error}");
    }
}

#[test]
fn a_server_that_fails_before_the_measurement_is_an_error() {
    // It accepts connections, and never answers.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut options = LoadOptions::new(format!("http://{}", listener.local_addr().unwrap()));
    options.model = Some("m".into());
    options.vocab_size = Some(10);
    options.request_timeout = Duration::from_millis(200);
    let error = run(&options).unwrap_err();
    let LoadError::Setup { failure, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(failure.kind(), "timeout");
}
