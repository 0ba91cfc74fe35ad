//! `burn-marlin serve` with the shipped model on Flex: about 6 s.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command};

use serde_json::{Value, json};

use crate::support::{args, command, refuse, shipped};

/// A server that ends with the test.
pub struct Server {
    pub child: Child,
    pub address: String,
}

impl Server {
    /// Starts a server of the shipped model on a free port, and waits until it listens.
    pub fn start(more: &[&str]) -> Self {
        Self::of(&shipped(), more)
    }

    /// Starts a server of a model.
    pub fn of(model: &Path, more: &[&str]) -> Self {
        let mut arguments = args!["serve", model, "--device", "flex", "--port", "0"];
        arguments.extend(more.iter().map(Into::into));
        let mut child = command(&arguments).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        let address = loop {
            line.clear();
            assert!(
                log.read_line(&mut line).unwrap() > 0,
                "no address in the log"
            );
            if let Some((_, rest)) = line.split_once("127.0.0.1:") {
                let port: String = rest.chars().take_while(char::is_ascii_digit).collect();
                break format!("127.0.0.1:{port}");
            }
        };
        // The rest of the log is read, so that the server never waits for a reader.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        Self { child, address }
    }

    /// Sends a request, and returns the status and the body of the answer.
    pub fn ask(&self, request: &str, body: Option<&Value>) -> (u16, String) {
        let body = body.map(Value::to_string).unwrap_or_default();
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(
            stream,
            "{request} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nAuthorization: Bearer key-1\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        (status, body.to_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

#[test]
fn a_served_model_answers_as_generate_does() {
    let mut server = Server::start(&["--api-key", "key-1", "--served-model-name", "tiny"]);
    assert_eq!(server.ask("GET /health", None).0, 200);
    let (status, models) = server.ask("GET /v1/models", None);
    let models: Value = serde_json::from_str(&models).unwrap();
    assert_eq!((status, &models["data"][0]["id"]), (200, &json!("tiny")));

    let request = json!({
        "model": "tiny", "prompt": "fn main() {", "max_tokens": 12, "temperature": 0,
    });
    let (status, answer) = server.ask("POST /v1/completions", Some(&request));
    assert_eq!(status, 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let generated = crate::support::succeed_json(&args![
        "generate",
        shipped(),
        "--device",
        "flex",
        "--prompt",
        "fn main() {",
        "--max-new-tokens",
        "12",
        "--temperature",
        "0",
        "--json"
    ]);
    assert_eq!(answer["choices"][0]["text"], generated["text"]);
    assert_eq!(answer["usage"]["completion_tokens"], 12);

    // The text comes in pieces, which are those of the answer.
    let mut streamed = request.clone();
    streamed["stream"] = true.into();
    let (status, events) = server.ask("POST /v1/completions", Some(&streamed));
    let pieces = events
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    let pieces: Vec<Value> = pieces
        .filter(|data| *data != "[DONE]")
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let text = |piece: &Value| {
        piece["choices"][0]["text"]
            .as_str()
            .unwrap_or("")
            .to_owned()
    };
    let all: String = pieces.iter().map(text).collect();
    assert_eq!((status, json!(all)), (200, generated["text"].clone()));
    assert!(pieces.len() > 3, "{events}");

    #[cfg(unix)]
    {
        let killed = Command::new("kill")
            .arg(server.child.id().to_string())
            .status();
        assert!(killed.unwrap().success());
        assert_eq!(server.child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn a_served_model_takes_penalties_and_biases_and_gives_log_probabilities() {
    let server = Server::start(&["--served-model-name", "tiny"]);
    let complete = |fields: &[(&str, Value)]| -> Value {
        let mut request = json!({
            "model": "tiny", "prompt": "fn main() {", "max_tokens": 24, "temperature": 0,
        });
        for (field, value) in fields {
            request[field] = value.clone();
        }
        let (status, answer) = server.ask("POST /v1/completions", Some(&request));
        assert_eq!(status, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        answer["choices"][0].clone()
    };
    let free = complete(&[]);
    let with_logprobs = complete(&[("logprobs", 3.into())]);
    assert_eq!(with_logprobs["text"], free["text"]);
    let logprobs = &with_logprobs["logprobs"];
    let chosen = logprobs["token_logprobs"].as_array().unwrap();
    let top = logprobs["top_logprobs"].as_array().unwrap();
    assert_eq!([chosen.len(), top.len()], [24, 24]);
    for (chosen, top) in chosen.iter().zip(top) {
        let chosen = chosen.as_f64().unwrap();
        let top = top.as_object().unwrap().values();
        let top: Vec<f64> = top.map(|logprob| logprob.as_f64().unwrap()).collect();
        // The most likely token is chosen.
        assert_eq!(
            top.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            chosen
        );
        let sum: f64 = top.iter().map(|logprob| logprob.exp()).sum();
        assert!(chosen <= 0.0 && sum <= 1.0 + 1e-4, "{top:?}");
    }
    // The first token of the text is not chosen with a bias against it.
    let first = &logprobs["tokens"][0];
    let text = json!({ "model": "tiny", "prompt": first, "add_special_tokens": false });
    let (_, tokens) = server.ask("POST /tokenize", Some(&text));
    let tokens: Value = serde_json::from_str(&tokens).unwrap();
    assert_eq!(tokens["count"], 1, "{tokens}");
    let bias = json!({ tokens["tokens"][0].to_string(): -100 });
    let biased = complete(&[("logit_bias", bias), ("logprobs", 3.into())]);
    assert_ne!(&biased["logprobs"]["tokens"][0], first);
    // The log probabilities are those of the model, without the bias.
    assert_eq!(biased["logprobs"]["top_logprobs"][0], top[0]);
    // Frequent tokens become less likely.
    let penalised = complete(&[
        ("frequency_penalty", 2.into()),
        ("presence_penalty", 2.into()),
    ]);
    assert_ne!(penalised["text"], free["text"]);
    let refused = json!({
        "model": "tiny", "prompt": "a", "max_tokens": 1, "logit_bias": { "99999999": 1 },
    });
    let (status, answer) = server.ask("POST /v1/completions", Some(&refused));
    assert_eq!(status, 400, "{answer}");
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let flex = ["--device", "flex"];
    let serve = |more: &[&str]| {
        let mut arguments = args!["serve", shipped()];
        arguments.extend(flex.iter().chain(more).map(Into::into));
        arguments
    };
    refuse(&serve(&["--port", &port]), &["cannot listen on", "--port"]);
    refuse(
        &serve(&["--port", "0", "--page-size", "48"]),
        &["pages of 48", "power of two"],
    );
    refuse(
        &serve(&[
            "--port",
            "0",
            "--tls-certificate",
            "no.pem",
            "--tls-key",
            "no.pem",
        ]),
        &["no.pem"],
    );
}
