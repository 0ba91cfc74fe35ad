//! Open and closed loops, prompts and connections.

use crate::server::{Behaviour, Server};
use marlin_load::{
    Amount, Length, LoadError, LoadOptions, LoadProgress, PromptKind, run, run_with,
};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn options(server: &Server) -> LoadOptions {
    let mut options = LoadOptions::new(server.url());
    options.input_len = Length::fixed(10);
    options.output_len = Length::fixed(5);
    options.seed = marlin_testing::seed();
    options
}

fn slow() -> Server {
    Server::start(Behaviour {
        first: Duration::from_millis(100),
        gap: Duration::from_millis(10),
        ..Behaviour::default()
    })
}

#[test]
fn an_open_loop_does_not_wait_for_answers() {
    let server = slow();
    let mut options = options(&server);
    options.load.rate = Some(100.0);
    options.amount = Amount::Requests(50);
    let report = run(&options).unwrap();
    println!("{report}");
    assert_eq!(report.metrics.completed, 50);
    // 0.14 s each, one after the other, would take 7 s.
    assert!(report.duration >= Duration::from_millis(500));
    assert!(
        report.metrics.peak_concurrency > 3,
        "{}",
        report.metrics.peak_concurrency
    );
    assert!(
        report
            .requests
            .iter()
            .all(|request| request.start >= request.due)
    );
    assert!((report.requests[49].due - 0.5).abs() < 1e-9);
}

#[test]
fn a_closed_loop_has_as_many_requests_as_it_may() {
    let server = slow();
    let mut options = options(&server);
    options.load.concurrency = Some(6);
    options.amount = Amount::Requests(30);
    options.api_key = Some("secret".into());
    let mut progress = Vec::new();
    let report = run_with(&options, |now| progress.push(now)).unwrap();
    assert_eq!(report.metrics.completed, 30);
    let all = LoadProgress {
        sent: 30,
        ended: 30,
        failed: 0,
    };
    assert_eq!(progress.last(), Some(&all));
    let most = |now: &LoadProgress| now.ended <= now.sent && now.sent <= now.ended + 6;
    assert!(
        progress.len() > 3 && progress.iter().all(most),
        "{progress:?}"
    );
    assert_eq!(server.log.most_running.load(Ordering::SeqCst), 6);
    let connections = server.log.connections.load(Ordering::SeqCst);
    assert!(
        connections <= 6,
        "{connections} connections for 6 requests at a time"
    );
    let seen = server.log.seen.lock().unwrap();
    // And the first before the measurement.
    assert_eq!(seen.len(), 31);
    let mut keys = seen.values().map(|seen| seen.authorization.as_deref());
    assert!(keys.all(|key| key == Some("Bearer secret")));
}

#[test]
fn a_duration_ends_either_loop() {
    for (rate, concurrency) in [(Some(50.0), None), (None, Some(4)), (Some(1000.0), Some(2))] {
        let server = slow();
        let mut options = options(&server);
        options.load.rate = rate;
        options.load.concurrency = concurrency;
        options.amount = Amount::Duration(Duration::from_millis(400));
        let begin = Instant::now();
        let report = run(&options).unwrap();
        println!(
            "{rate:?} {concurrency:?}: {} requests",
            report.metrics.completed
        );
        assert!(report.metrics.completed > 0);
        assert!(report.requests.iter().all(|request| request.due < 0.4));
        assert!(begin.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn a_server_without_token_ids_gets_words() {
    let server = Server::start(Behaviour {
        token_ids: false,
        ..Behaviour::default()
    });
    let mut options = options(&server);
    options.amount = Amount::Requests(4);
    // Without and with token IDs to try: there is no `/tokenize`.
    for vocab_size in [None, Some(100)] {
        options.vocab_size = vocab_size;
        let report = run(&options).unwrap();
        assert!(!report.token_ids);
        // The server counts a token more than there are words.
        assert_eq!(report.metrics.input_tokens, 4 * 11);
    }
    options.prompt = PromptKind::TokenIds;
    let refused = run(&options).unwrap_err().to_string();
    assert!(
        refused.contains("status 400") && refused.contains("no token IDs"),
        "{refused}"
    );
}

#[test]
fn options_without_a_meaning_are_refused() {
    let refused = |change: fn(&mut LoadOptions)| {
        let mut options = LoadOptions::new("http://127.0.0.1:1");
        change(&mut options);
        run(&options).unwrap_err()
    };
    let changes: [fn(&mut LoadOptions); 10] = [
        |options| _ = options.extra_body.insert("stream".into(), false.into()),
        |options| options.load.rate = Some(0.0),
        |options| options.load.burstiness = f64::NAN,
        |options| options.load.concurrency = Some(0),
        |options| options.amount = Amount::Requests(0),
        |options| options.amount = Amount::Duration(Duration::from_secs(1)),
        |options| options.input_len = Length { min: 3, max: 2 },
        |options| options.cancel_fraction = 1.5,
        |options| options.threads = 0,
        |options| options.api_key = Some("a\nb".into()),
    ];
    for change in changes {
        let error = refused(change);
        assert!(matches!(error, LoadError::Option { .. }), "{error}");
    }
    for url in ["https://127.0.0.1", "127.0.0.1:80", "", "http://", "/v1"] {
        let error = run(&LoadOptions::new(url)).unwrap_err();
        assert!(matches!(error, LoadError::Url { .. }), "{url}: {error}");
    }
}

#[test]
fn load_stays_on_this_machine_unless_it_is_told_otherwise() {
    // Addresses of documentation, which nobody has.
    for url in [
        "http://192.0.2.1:8000",
        "http://[2001:db8::1]",
        "http://0.0.0.0:1",
    ] {
        let error = run(&LoadOptions::new(url)).unwrap_err();
        assert!(matches!(error, LoadError::Remote { .. }), "{url}: {error}");
    }
    let server = slow();
    for allow_remote in [false, true] {
        let mut options = options(&server);
        options.allow_remote = allow_remote;
        options.amount = Amount::Requests(1);
        for host in ["127.0.0.1", "localhost"] {
            options.base_url = server.url().replace("127.0.0.1", host);
            assert_eq!(run(&options).unwrap().metrics.completed, 1, "{host}");
        }
    }
}
