//! Many requests at once to `burn-marlin serve` with the smaller shipped model on Flex.

use crate::serve::Server;
use crate::support::{heldout, shipped};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The environment variable with the number of requests.
const VARIABLE: &str = "MARLIN_SERVE_REQUESTS";
/// The clients, each of which has one request at a time.
const CLIENTS: usize = 32;
/// The different requests.
const CASES: usize = 48;
/// The tokens with which half of the prompts begin.
const PREFIX: usize = 64;
/// The part of the requests that are cancelled.
const CANCELLED: f64 = 0.3;
/// The longest time that a client waits for the next bytes.
const PATIENCE: Duration = Duration::from_secs(120);
/// The most bytes by which the server's memory may grow after the first fifth of the requests.
const GROWTH: usize = 24 << 20;

/// A request, and the text that it gets alone.
struct Case {
    path: &'static str,
    body: Value,
    text: String,
}

impl Case {
    /// Draws a request whose prompt is a part of a text with these tokens. What is not in whole
    /// pages is short: each request computes it anew.
    fn draw(index: usize, text: &[u32], rng: &mut StdRng) -> Self {
        let start = rng.random_range(PREFIX..text.len() - 16);
        let own = &text[start..start + rng.random_range(1..15)];
        let mut body = json!({
            "model": "tiny", "max_tokens": rng.random_range(1..=8), "seed": index,
            "temperature": if rng.random() { 0.0 } else { 0.9 },
        });
        if rng.random_bool(0.2) {
            body["stop"] = json!(["(", "\n"]);
        }
        let path = match index % 4 {
            0 => {
                let content = format!("Request {index}");
                body["messages"] = json!([{ "role": "user", "content": content }]);
                "/v1/chat/completions"
            }
            1 => {
                body["prompt"] = json!(own);
                "/v1/completions"
            }
            // Half of the prompts begin alike, for a few pages.
            _ => {
                body["prompt"] = json!([&text[..PREFIX], own].concat());
                "/v1/completions"
            }
        };
        Self {
            path,
            body,
            text: String::new(),
        }
    }

    /// Sends the request.
    fn send(&self, server: &Server, stream: bool) -> BufReader<TcpStream> {
        let mut body = self.body.clone();
        body["stream"] = stream.into();
        let body = body.to_string();
        let mut connection = TcpStream::connect(&server.address).unwrap();
        connection.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(
            connection,
            "POST {} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            self.path,
            body.len()
        )
        .unwrap();
        BufReader::new(connection)
    }

    /// Returns the text of a choice that ended.
    fn whole(&self, server: &Server) -> String {
        let mut answer = String::new();
        self.send(server, false)
            .read_to_string(&mut answer)
            .unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let body: Value = serde_json::from_str(body).unwrap();
        let choice = &body["choices"][0];
        assert!(choice["finish_reason"].is_string(), "{body}");
        let text = choice["text"].as_str();
        let text = text.or_else(|| choice["message"]["content"].as_str());
        text.unwrap_or_default().into()
    }

    /// Reads a stream to its end, and returns its text; `None` if the client goes away after
    /// `events` events.
    fn streamed(&self, server: &Server, events: usize) -> Option<String> {
        let mut text = String::new();
        let mut is_ended = false;
        let lines = self.send(server, true).lines();
        let data = lines.filter_map(|line| line.unwrap().strip_prefix("data: ").map(String::from));
        for (index, data) in data.enumerate() {
            if data == "[DONE]" {
                assert!(is_ended, "no reason of the end after {text:?}");
                return Some(text);
            }
            if index == events {
                return None;
            }
            let piece: Value = serde_json::from_str(&data).unwrap();
            assert!(piece["error"].is_null(), "{piece}");
            let choice = &piece["choices"][0];
            is_ended |= choice["finish_reason"].is_string();
            let part = choice["text"].as_str();
            text += part
                .or_else(|| choice["delta"]["content"].as_str())
                .unwrap_or_default();
        }
        panic!("a stream without an end after {text:?}");
    }

    /// Sends the request and compares the text with that of the request alone. Returns false if the
    /// client went away.
    fn run(&self, server: &Server, rng: &mut StdRng) -> bool {
        let cancelled = rng.random_bool(CANCELLED);
        let text = match (rng.random_bool(0.8), cancelled) {
            (true, true) => self.streamed(server, rng.random_range(0..6)),
            (true, false) => self.streamed(server, usize::MAX),
            (false, true) => {
                let connection = self.send(server, false);
                std::thread::sleep(Duration::from_millis(rng.random_range(0..100)));
                drop(connection);
                None
            }
            (false, false) => Some(self.whole(server)),
        };
        if let Some(text) = &text {
            assert_eq!(text, &self.text, "{} {}", self.path, self.body);
        }
        text.is_some()
    }
}

/// Returns the sum of the figures of a metric whose labels contain `label`.
fn metric(server: &Server, name: &str, label: &str) -> f64 {
    let (status, text) = server.ask("GET /metrics", None);
    assert_eq!(status, 200);
    let lines = text.lines().filter(|line| {
        line.split_once('{')
            .is_some_and(|(own, labels)| own == name && labels.contains(label))
    });
    lines
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .sum()
}

/// Returns the memory of the server that is not swapped out, in bytes; 0 where the system does not
/// say.
fn memory(server: &Server) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id()));
    let status = status.unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<usize>().ok());
    kib.unwrap_or_default() << 10
}

/// 1,000 requests of 32 clients, of which 30 % are cancelled at a random time, over a KV cache that
/// has no room for all of them; another number can be set with `MARLIN_SERVE_REQUESTS`.
#[test]
fn texts_are_those_of_requests_alone_and_no_page_is_lost() {
    let count: usize = std::env::var(VARIABLE).map_or(1000, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{VARIABLE}: `{text}` is not a number of requests"))
    });
    let mut rng = marlin_testing::rng();
    let start = Instant::now();
    let pages = ["--page-size", "16", "--pages", "20"];
    // In f16, rows of batches of other sizes are rounded differently, and the likeliest of two
    // tokens is another one now and then.
    let options = ["--served-model-name", "tiny", "--dtype", "f32"];
    let model = shipped().with_file_name("model-1m");
    let server = Server::of(&model, &[&options[..], &pages[..]].concat());
    let text: String = std::fs::read_to_string(heldout()).unwrap();
    let text: String = text.chars().take(8000).collect();
    let (_, tokens) = server.ask("POST /tokenize", Some(&json!({ "prompt": text })));
    let tokens: Value = serde_json::from_str(&tokens).unwrap();
    let tokens: Vec<u32> = serde_json::from_value(tokens["tokens"].clone()).unwrap();
    let mut cases: Vec<_> = (0..CASES)
        .map(|index| Case::draw(index, &tokens, &mut rng))
        .collect();
    for case in &mut cases {
        case.text = case.whole(&server);
    }
    let alone = start.elapsed();
    let [next, complete, early] = [0; 3].map(AtomicUsize::new);
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            let mut rng = StdRng::seed_from_u64(rng.random());
            let (server, cases, next, complete, early) =
                (&server, &cases, &next, &complete, &early);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count {
                        break;
                    }
                    if index == count / 5 {
                        early.store(memory(server), Ordering::Relaxed);
                    }
                    let case = &cases[rng.random_range(0..CASES)];
                    complete.fetch_add(case.run(server, &mut rng).into(), Ordering::Relaxed);
                }
            });
        }
    });
    let idle = Instant::now();
    let used = [
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
    ];
    while used
        .iter()
        .any(|name| metric(&server, &format!("vllm:{name}"), "") != 0.0)
    {
        assert!(idle.elapsed() < PATIENCE, "requests or pages are left");
        std::thread::sleep(Duration::from_millis(10));
    }
    let (complete, early, late) = (complete.into_inner(), early.into_inner(), memory(&server));
    let ended = |reason: &str| {
        let label = format!("finished_reason=\"{reason}\"");
        metric(&server, "vllm:request_success_total", &label) as usize
    };
    let [stop, length, abort] = ["stop", "length", "abort"].map(ended);
    let hits = metric(&server, "vllm:prefix_cache_hits_total", "");
    println!(
        "{CASES} requests alone in {alone:.1?}, {count} at once in {:.1?}: {complete} complete, \
         {stop} by a stop, {length} by their length, {abort} cancelled, \
         {hits} tokens from shared pages, memory {} MiB after a fifth, {} MiB at the end",
        start.elapsed() - alone,
        early >> 20,
        late >> 20
    );
    assert!(stop + length >= complete + CASES);
    assert_eq!(ended("error") + ended("timeout"), 0);
    let cancelled = count - complete;
    assert!(
        abort <= cancelled && abort > cancelled / 4,
        "{abort} of {cancelled}"
    );
    assert!(hits > 0.0, "no prefix was shared");
    assert!(
        late <= early + GROWTH,
        "the memory grows: {early} to {late} bytes"
    );
    // The texts are still those of the start.
    for case in cases.iter().take(4) {
        assert_eq!(case.whole(&server), case.text);
    }
}
