//! `burn-marlin bench-serve` against `serve` of the shipped model on Flex: about 5 s.

use serde_json::Value;

use crate::serve::Server;
use crate::support::{args, cells, read_json, refuse, run_with_input};

/// Returns the arguments for a short load test of a server.
fn bench(server: &Server, more: &[&str]) -> Vec<std::ffi::OsString> {
    let mut arguments = args!["bench-serve", format!("http://{}", server.address)];
    let short = "--input-len 8:24 --output-len 6 --ignore-eos --model tiny --api-key key-1";
    arguments.extend(short.split(' ').map(Into::into));
    let seed = marlin_testing::seed().to_string();
    arguments.extend(["--seed", &seed].map(Into::into));
    arguments.extend(more.iter().map(Into::into));
    arguments
}

/// Returns the value of a line of the table.
fn figure(table: &str, name: &str) -> f64 {
    let line = table.lines().find_map(|line| line.strip_prefix(name));
    let line = line.unwrap_or_else(|| panic!("`{name}` is not in: {table}"));
    line.trim().parse().unwrap()
}

#[test]
fn a_server_is_measured() {
    let server = Server::start(&["--api-key", "key-1", "--served-model-name", "tiny"]);
    let folder = tempfile::tempdir().unwrap();
    let (json, svg) = (folder.path().join("a.json"), folder.path().join("a.svg"));
    let mut arguments = bench(&server, &["--requests", "12", "--concurrency", "3"]);
    arguments.extend(args![
        "--slo-e2el",
        "600000",
        "--json",
        &json,
        "--svg",
        &svg
    ]);
    let run = run_with_input(&arguments, b"");
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let table = run.stdout;
    assert_eq!(figure(&table, "Successful requests:"), 12.0);
    assert_eq!(figure(&table, "Failed requests:"), 0.0);
    assert_eq!(figure(&table, "Total generated tokens:"), 72.0);
    assert!(figure(&table, "Mean TPOT (ms):") > 0.0);
    let throughput = figure(&table, "Request throughput (req/s):");
    assert_eq!(figure(&table, "Request goodput (req/s):"), throughput);
    let report = read_json(&json);
    assert_eq!(report["completed"], 12);
    assert_eq!(report["max_concurrency"], 3);
    assert_eq!(report["token_ids"], true);
    let requests = report["requests"].as_array().unwrap();
    assert_eq!(requests.len(), 12);
    let tokens = requests.iter().map(|request| &request["input_tokens"]);
    let tokens: Vec<u64> = tokens.map(|tokens| tokens.as_u64().unwrap()).collect();
    assert!(tokens.iter().all(|tokens| (8..=24).contains(tokens)));
    assert_eq!(report["total_input_tokens"], tokens.iter().sum::<u64>());
    let plot = std::fs::read_to_string(&svg).unwrap();
    assert!(plot.contains("<svg") && plot.contains("Inter-token latency"));

    // Several rates: a row, an object and a point for each.
    let mut arguments = bench(&server, &["--rate", "40,20", "--requests", "6"]);
    let chat = "--endpoint chat --poisson --cancel 0.3 --warmups 1 --prefix-len 4";
    arguments.extend(chat.split(' ').map(Into::into));
    arguments.extend(args!["--extra-body", r#"{"temperature": 0}"#]);
    arguments.extend(args!["--json", &json, "--svg", &svg]);
    let run = run_with_input(&arguments, b"");
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let lines: Vec<_> = run.stdout.lines().map(cells).collect();
    assert_eq!(lines.len(), 3, "{}", run.stdout);
    assert_eq!(lines[0][5..7], ["mean TTFT", "p99 TTFT"]);
    assert_eq!((lines[1][0], lines[2][0]), ("40", "20"));
    let Value::Array(reports) = read_json(&json) else {
        panic!("several rates are an array");
    };
    for (report, line) in reports.iter().zip(&lines[1..]) {
        let count = |name: &str| report[name].as_u64().unwrap();
        assert_eq!(count("completed") + count("cancelled"), 6);
        assert_eq!(count("completed").to_string(), line[1]);
        assert_eq!(report["request_rate"].to_string(), format!("{}.0", line[0]));
        assert_eq!(report["endpoint"], "chat");
    }
    assert_ne!(reports[0]["seed"], reports[1]["seed"]);
    let plot = std::fs::read_to_string(&svg).unwrap();
    assert!(plot.contains("requests a second") && plot.contains("tiny"));

    // The lines of earlier runs, under the names of their models.
    let earlier = folder.path().join("b.json");
    let text = std::fs::read_to_string(&json).unwrap();
    std::fs::write(&earlier, text.replace("tiny", "earlier")).unwrap();
    let mut arguments = bench(&server, &["--rate", "40", "--requests", "3"]);
    arguments.extend(args!["--svg", &svg, "--compare", &earlier]);
    let run = run_with_input(&arguments, b"");
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let plot = std::fs::read_to_string(&svg).unwrap();
    assert!(plot.contains("earlier") && plot.contains("tiny"));

    // Those that arrive in a time, at even distances.
    let rate = "--duration 0.52 --rate 20 --burstiness inf";
    let rate: Vec<_> = rate.split(' ').collect();
    let run = run_with_input(&bench(&server, &rate), b"");
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert_eq!(figure(&run.stdout, "Successful requests:"), 10.0);

    let url = format!("http://{}", server.address);
    refuse(
        &args!["bench-serve", url, "--api-key", "key-2"],
        &["/v1/models", "status 401"],
    );
}

#[test]
fn load_stays_on_this_machine() {
    // An address of documentation, which nobody has.
    let remote = args!["bench-serve", "http://192.0.2.1:8000", "--requests", "1"];
    refuse(
        &remote,
        &["192.0.2.1", "no loopback address", "--allow-remote"],
    );
}

#[test]
fn options_that_make_no_sense_are_named() {
    for (options, words) in [
        ("--rate 0", &["--rate: 0 is not a positive number"][..]),
        ("--rate 1,-2", &["--rate: -2"]),
        ("--rate NaN", &["--rate: NaN"]),
        ("--rate 1,inf", &["--rate: `inf`", "several"]),
        ("--burstiness 0", &["--burstiness: 0"]),
        ("--concurrency 0", &["--concurrency: "]),
        ("--requests 0", &["--requests: "]),
        ("--duration 5", &["--duration: ", "rate or a concurrency"]),
        ("--duration 0 --rate 1", &["--duration: 0"]),
        ("--input-len 0", &["--input-len: "]),
        ("--output-len 9:3", &["--output-len: 9 to 3"]),
        ("--cancel 1.5", &["--cancel: 1.5"]),
        ("--slo-tpot=-1", &["--slo-tpot: -1"]),
        ("--extra-body {\"stream\":0}", &["--extra-body: `stream`"]),
        ("--json no/such/file", &["cannot write no/such/file"]),
        ("--svg no/such/file", &["cannot write no/such/file"]),
        ("--svg a --compare no/such", &["--compare: no/such: "]),
        (
            "--svg a --compare Cargo.toml",
            &["--compare: Cargo.toml: no figures"],
        ),
        // Nothing listens there.
        ("http://127.0.0.1:1", &["/v1/models", "no connection"]),
        ("https://127.0.0.1", &["`https://127.0.0.1`", "http://"]),
    ] {
        let mut arguments = args!["bench-serve"];
        arguments.extend(options.split(' ').map(Into::into));
        refuse(&arguments, words);
    }
    // What is no number or no object is found while the command line is read.
    for (option, value) in [
        ("--rate", "fast"),
        ("--input-len", "3:"),
        ("--extra-body", "[1]"),
        ("--api-key", ""),
    ] {
        let run = run_with_input(&args!["bench-serve", option, value], b"");
        assert_eq!(run.code, Some(2), "{option}: {}", run.stderr);
        assert!(run.stderr.contains(option), "{}", run.stderr);
    }
}
