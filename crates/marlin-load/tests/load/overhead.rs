//! What the generator itself costs.

use crate::server::{Behaviour, Server};
use marlin_load::{Amount, Length, LoadOptions, LoadReport, run};
use std::time::Duration;

const STREAMS: usize = 64;

/// Returns the processor time of the threads of the generator so far, in seconds.
fn processor_time(before: &mut std::collections::HashMap<String, f64>) {
    // Clock ticks are 1/100 s on Linux.
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let Ok(stat) = std::fs::read_to_string(task.path().join("stat")) else {
            continue;
        };
        let (name, rest) = stat.split_once(") ").unwrap();
        if name.ends_with("(load") {
            let fields: Vec<&str> = rest.split(' ').collect();
            let ticks: f64 = fields[11..13]
                .iter()
                .map(|ticks| ticks.parse::<f64>().unwrap())
                .sum();
            before.insert(name.to_string(), ticks / 100.0);
        }
    }
}

/// Runs 64 streams, and returns the processor seconds of the generator.
fn measure(gap: Duration, tokens: usize) -> (Server, LoadReport, f64) {
    let server = Server::start(Behaviour {
        first: gap,
        gap,
        ..Behaviour::default()
    });
    let mut options = LoadOptions::new(server.url());
    options.load.concurrency = Some(STREAMS);
    options.amount = Amount::Requests(STREAMS * 4);
    options.input_len = Length::fixed(64);
    options.output_len = Length::fixed(tokens);
    options.seed = marlin_testing::seed();
    // The threads end with the run: their times are read while it runs.
    let mut times = std::collections::HashMap::new();
    let report = std::thread::scope(|scope| {
        let runner = scope.spawn(|| run(&options).unwrap());
        while !runner.is_finished() {
            processor_time(&mut times);
            std::thread::sleep(Duration::from_millis(5));
        }
        runner.join().unwrap()
    });
    (server, report, times.values().sum())
}

/// Prints the overhead; for a machine without other work, in release mode:
/// `cargo test --release -p marlin-load -- --ignored --nocapture overhead`.
#[test]
#[ignore = "a measurement, 20 s"]
fn overhead_at_64_streams() {
    for (gap, tokens) in [(0, 2000), (5, 300)] {
        let (server, report, processor) = measure(Duration::from_millis(gap), tokens);
        let seen = server.log.seen.lock().unwrap();
        let mut lags: Vec<f64> = (report.requests.iter())
            .map(|request| {
                let seen = &seen[&format!("load-{}-{}", report.seed, request.index)];
                request.ttft.unwrap() - (seen.tokens[0] - seen.arrival).as_secs_f64()
            })
            .collect();
        lags.sort_by(f64::total_cmp);
        let tokens = report.metrics.output_tokens;
        println!(
            "gap {gap} ms: {tokens} events in {:.2} s ({:.0}/s), processor {:.2} us an event, \
             {:.0} % of a core; the first token is seen {:.0} us (median), {:.0} us (p99) later",
            report.duration.as_secs_f64(),
            report.metrics.output_throughput,
            processor / tokens as f64 * 1e6,
            100.0 * processor / report.duration.as_secs_f64(),
            lags[lags.len() / 2] * 1e6,
            lags[lags.len() * 99 / 100] * 1e6,
        );
    }
}
