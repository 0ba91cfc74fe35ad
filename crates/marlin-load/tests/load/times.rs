//! The times of the report are those that the server took.

use crate::server::{Behaviour, Server};
use marlin_load::{Amount, Length, LoadOptions, LoadReport, Outcome, run};
use std::time::Duration;

const FIRST: Duration = Duration::from_millis(60);
const GAP: Duration = Duration::from_millis(15);
const TOKENS: usize = 20;

/// Returns the median of times in seconds.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Compares times with those of the server: at most 2 ms or 10 % apart.
fn compare(name: &str, report: f64, server: f64) {
    println!(
        "{name}: {:.3} ms, of the server {:.3} ms",
        report * 1e3,
        server * 1e3
    );
    let bound = (0.1 * server).max(0.002);
    assert!(
        (report - server).abs() <= bound,
        "{name}: {report} s, of the server {server} s"
    );
}

fn run_delayed() -> (Server, LoadReport) {
    let server = Server::start(Behaviour {
        first: FIRST,
        gap: GAP,
        ..Behaviour::default()
    });
    let mut options = LoadOptions::new(server.url());
    options.load.concurrency = Some(8);
    options.amount = Amount::Requests(24);
    options.input_len = Length { min: 5, max: 50 };
    options.output_len = Length::fixed(TOKENS);
    options.seed = marlin_testing::seed();
    let report = run(&options).unwrap();
    (server, report)
}

#[test]
fn first_tokens_and_gaps_take_as_long_as_the_server_took() {
    let (server, report) = run_delayed();
    let seen = server.log.seen.lock().unwrap();
    assert_eq!(report.metrics.completed, 24, "{report}");
    let mut ttft_differences = Vec::new();
    let mut server_itl = Vec::new();
    let mut server_tpot = Vec::new();
    for request in &report.requests {
        let id = format!("load-{}-{}", report.seed, request.index);
        let seen = &seen[&id];
        let ttft = (seen.tokens[0] - seen.arrival).as_secs_f64();
        // The request started before it arrived, and the token arrived after it was written.
        let difference = request.ttft.unwrap() - ttft;
        assert!(difference >= 0.0, "{request:?}");
        ttft_differences.push(difference);
        let gaps = seen
            .tokens
            .windows(2)
            .map(|pair| (pair[1] - pair[0]).as_secs_f64());
        server_itl.extend(gaps);
        let later = (seen.tokens[TOKENS - 1] - seen.tokens[0]).as_secs_f64();
        server_tpot.push(later / (TOKENS - 1) as f64);
        assert_eq!(request.itl.len(), TOKENS - 1);
        assert_eq!(request.output_tokens, TOKENS);
        assert_eq!(
            request.input_tokens,
            seen.body["prompt"].as_array().unwrap().len()
        );
    }
    let metrics = &report.metrics;
    // On a loaded machine, requests wait for the server's threads before their arrival. What the
    // generator itself adds, it adds to each, also to the one that waits the least.
    let least = ttft_differences
        .iter()
        .copied()
        .fold(f64::INFINITY, f64::min);
    println!(
        "median difference of TTFT: {:.3} ms",
        median(ttft_differences) * 1e3
    );
    compare("TTFT", FIRST.as_secs_f64() + least, FIRST.as_secs_f64());
    // A late reader of one token waits less for the next: means are not changed by it.
    let mean = server_itl.iter().sum::<f64>() / server_itl.len() as f64;
    compare("mean ITL", metrics.itl.mean, mean);
    compare("TPOT", metrics.tpot.median, median(server_tpot));
}

#[test]
fn the_report_is_a_table_json_and_a_plot() {
    let (_server, report) = run_delayed();
    let table = report.to_string();
    println!("{table}");
    for line in [
        "Successful requests:                     24",
        "Median ITL (ms):",
        "P99 E2EL (ms):",
    ] {
        assert!(table.contains(line), "{line:?} is not in\n{table}");
    }
    let json = report.to_json();
    assert_eq!(json["completed"], 24);
    assert_eq!(json["total_output_tokens"], 24 * TOKENS);
    assert_eq!(json["requests"].as_array().unwrap().len(), 24);
    assert_eq!(json["requests"][3]["outcome"], "completed");
    assert_eq!(
        json["requests"][3]["itl"].as_array().unwrap().len(),
        TOKENS - 1
    );
    let mean = json["mean_ttft_ms"].as_f64().unwrap();
    assert!((mean - 1e3 * report.metrics.ttft.mean).abs() < 1e-9);
    assert!(
        report
            .requests
            .iter()
            .all(|request| request.outcome == Outcome::Completed)
    );
    let svg = report.to_svg().unwrap();
    assert!(svg.matches("<polyline").count() >= 4, "{svg}");
}
