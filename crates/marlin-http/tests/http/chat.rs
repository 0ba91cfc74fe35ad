//! `/v1/chat/completions`.

use crate::support::client::{Response, ask, post};
use crate::support::server::{TestOptions, TestServer};
use marlin_testing::with_fields;
use serde_json::{Value, json};
use std::net::SocketAddr;

pub const PATH: &str = "/v1/chat/completions";

/// A request with one message and further fields.
pub fn body(content: &str, fields: Value) -> Value {
    let messages = json!([{ "role": "user", "content": content }]);
    with_fields(
        json!({ "model": "test/model", "messages": messages }),
        &fields,
    )
}

/// A request whose answer is `text`.
pub fn say(text: &str, fields: Value) -> Value {
    body(&format!("\u{1}{text}\u{2}"), fields)
}

pub fn refused(address: SocketAddr, body: &Value) -> (u16, Value) {
    let response = post(address, PATH, body);
    let error = response.json()["error"].clone();
    assert!(error["message"].is_string(), "{error}");
    (response.status, error)
}

/// The joined contents of a stream's choice.
fn content(response: &Response, choice: usize) -> String {
    let chunks = response.chunks();
    let deltas = chunks
        .iter()
        .flat_map(|chunk| chunk["choices"].as_array().unwrap());
    deltas
        .filter(|delta| delta["index"] == choice)
        .filter_map(|delta| delta["delta"]["content"].as_str())
        .collect()
}

#[test]
fn an_answer_in_one_piece_has_the_fields_of_the_api() {
    let server = TestServer::start();
    let answer = ask(server.address, PATH, &say("Grüße", json!({})));
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "test/model");
    assert!(answer["created"].as_u64().unwrap() > 1_700_000_000);
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 1);
    assert_eq!(
        choices[0],
        json!({
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Grüße",
                "refusal": null,
                "annotations": [],
                "reasoning_content": null,
            },
            "logprobs": null,
            "finish_reason": "stop",
        })
    );
    // `[user]`, the message of 9 bytes, `</s>`, `[assistant]`; 7 bytes and the end.
    let usage = &answer["usage"];
    assert_eq!(usage["prompt_tokens"], 6 + 9 + 1 + 11);
    assert_eq!(usage["completion_tokens"], 7 + 1);
    assert_eq!(usage["total_tokens"], 27 + 8);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
}

#[test]
fn the_events_of_a_stream_are_those_of_the_api_to_the_byte() {
    let server = TestServer::start();
    let fields = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let response = post(server.address, PATH, &say("hé", fields));
    assert_eq!(response.status, 200);
    assert_eq!(response.header("content-type"), Some("text/event-stream"));
    let first: Value = serde_json::from_str(&response.events()[0].1).unwrap();
    let (id, created) = (&first["id"], &first["created"]);
    let head = format!(
        "data: {{\"id\":{id},\"object\":\"chat.completion.chunk\",\"created\":{created},\"model\":\"test/model\",\"choices\":["
    );
    let chunk = |delta: &str, finish: &str| {
        format!(
            "{head}{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n"
        )
    };
    let usage = "\"usage\":{\"prompt_tokens\":23,\"completion_tokens\":4,\"total_tokens\":27,\"prompt_tokens_details\":{\"cached_tokens\":0}}";
    let expected = [
        chunk("{\"role\":\"assistant\",\"content\":\"\"}", "null"),
        chunk("{\"content\":\"h\"}", "null"),
        chunk("{\"content\":\"é\"}", "null"),
        chunk("{}", "\"stop\""),
        format!("{head}],{usage}}}\n\n"),
        "data: [DONE]\n\n".to_string(),
    ];
    assert_eq!(response.text(), expected.concat());
}

#[test]
fn a_stream_has_the_text_of_the_answer_in_one_piece() {
    let server = TestServer::start();
    let fields = json!({ "n": 3, "seed": 5, "max_tokens": 40 });
    let whole = ask(server.address, PATH, &body("Tell me.", fields.clone()));
    let mut streamed = body("Tell me.", fields);
    streamed["stream"] = true.into();
    let response = post(server.address, PATH, &streamed);
    let mut texts = Vec::new();
    for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
        let text = choice["message"]["content"].as_str().unwrap();
        assert_eq!(text.len(), 40);
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(content(&response, index), text);
        assert!(!texts.contains(&text), "the choices differ");
        texts.push(text);
    }
    assert_eq!(texts.len(), 3);
    assert_eq!(whole["usage"]["completion_tokens"], 120);
    let chunks = response.chunks();
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
    // The role of each choice is right before its first text.
    let choices = chunks.iter().map(|chunk| &chunk["choices"][0]);
    let choices: Vec<&Value> = choices.collect();
    let roles = choices
        .windows(2)
        .filter(|pair| pair[0]["delta"]["role"] == "assistant");
    let starts: Vec<_> = roles
        .map(|pair| {
            assert_eq!(pair[0]["index"], pair[1]["index"]);
            let text = pair[1]["delta"]["content"].as_str().unwrap();
            let index = pair[0]["index"].as_u64().unwrap() as usize;
            assert!(!text.is_empty() && texts[index].starts_with(text));
            index
        })
        .collect();
    assert_eq!(starts.len(), 3, "{starts:?}");
}

#[test]
fn the_reason_of_the_end_is_in_the_chunk_of_the_last_text() {
    let server = TestServer::start();
    for (text, fields, last, reason) in [
        ("héllo", json!({ "max_tokens": 3 }), Some("é"), "length"),
        // What may become a stop string is held back until the end of the sequence.
        ("one EN", json!({ "stop": "END" }), Some("EN"), "stop"),
        // The token that ends a text has none itself.
        ("one END", json!({ "stop": "END" }), None, "stop"),
        ("one", json!({}), None, "stop"),
    ] {
        let mut request = say(text, fields);
        request["stream"] = true.into();
        let chunks = post(server.address, PATH, &request).chunks();
        let choices = chunks.iter().map(|chunk| &chunk["choices"][0]);
        let mut choices: Vec<&Value> = choices.collect();
        let end = choices.pop().unwrap();
        assert_eq!(end["finish_reason"], reason, "{end}");
        assert_eq!(end["delta"]["content"].as_str(), last, "{end}");
        assert!(
            choices
                .iter()
                .all(|choice| choice["finish_reason"].is_null())
        );
    }
}

#[test]
fn a_seed_repeats_the_answer_and_temperature_0_needs_none() {
    let server = TestServer::start();
    let text = |fields: Value| {
        let answer = ask(server.address, PATH, &body("Hello", fields));
        answer["choices"][0]["message"]["content"].to_string()
    };
    let seeded = |seed: i64| text(json!({ "seed": seed, "max_tokens": 30 }));
    assert_eq!(seeded(1), seeded(1));
    assert_ne!(seeded(1), seeded(2));
    assert_eq!(seeded(-7), seeded(-7));
    let greedy = || text(json!({ "temperature": 0, "max_completion_tokens": 30 }));
    assert_eq!(greedy(), greedy());
    let free = || text(json!({ "max_tokens": 30 }));
    assert_ne!(free(), free());
}

#[test]
fn stop_strings_end_the_text_before_them() {
    let server = TestServer::start();
    for stop in [json!("END"), json!(["nothing", "END"])] {
        let request = say("before END after", json!({ "stop": stop }));
        let answer = ask(server.address, PATH, &request);
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"]["content"], "before ");
        assert_eq!(choice["finish_reason"], "stop");
        assert_eq!(choice["matched_stop"], "END");
        let mut streamed = request.clone();
        streamed["stream"] = true.into();
        assert_eq!(
            content(&post(server.address, PATH, &streamed), 0),
            "before "
        );
    }
    let request = say("xay", json!({ "stop_token_ids": [97] }));
    let choice = &ask(server.address, PATH, &request)["choices"][0];
    assert_eq!(choice["message"]["content"], "x");
    assert_eq!(choice["matched_stop"], 97);
    let request = say("ab", json!({ "ignore_eos": true, "max_tokens": 9 }));
    let choice = &ask(server.address, PATH, &request)["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
}

#[test]
fn log_probabilities_come_with_the_bytes_of_tokens() {
    let server = TestServer::start();
    let fields = json!({ "logprobs": true, "top_logprobs": 2 });
    let request = say("é", fields);
    let answer = ask(server.address, PATH, &request);
    let content = &answer["choices"][0]["logprobs"]["content"];
    assert_eq!(content[0]["bytes"], json!([0xc3]));
    assert_eq!(content[1]["bytes"], json!([0xa9]));
    assert_eq!(content[0]["logprob"], -0.5);
    assert_eq!(
        content[0]["top_logprobs"],
        json!([
            { "token": "A", "logprob": -1.0, "bytes": [65] },
            { "token": "B", "logprob": -2.0, "bytes": [66] },
        ])
    );
    let mut streamed = request;
    streamed["stream"] = true.into();
    let chunks = post(server.address, PATH, &streamed).chunks();
    let tokens: Vec<_> = chunks
        .iter()
        .flat_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(Value::from(tokens), *content);
}

#[test]
fn a_model_without_a_template_talks_in_lines() {
    let server = TestServer::with(TestOptions {
        template: None,
        ..TestOptions::default()
    });
    let request = say(" I am.\nUser: And", json!({}));
    let choice = &ask(server.address, PATH, &request)["choices"][0];
    assert_eq!(choice["message"]["content"], " I am.");
    let tool = json!({ "type": "function", "function": { "name": "f" } });
    let (status, error) = refused(server.address, &body("a", json!({ "tools": [tool] })));
    assert_eq!((status, error["param"].as_str()), (400, Some("tools")));
}

#[test]
fn the_last_message_is_continued_if_it_is_asked_for() {
    let server = TestServer::start();
    let mut request = say("the end", json!({ "continue_final_message": true }));
    let message = json!({ "role": "assistant", "content": "This is" });
    request["messages"].as_array_mut().unwrap().push(message);
    let answer = ask(server.address, PATH, &request);
    assert_eq!(answer["choices"][0]["message"]["content"], "the end");
    // Neither the end of the turn nor the beginning of another.
    assert_eq!(answer["usage"]["prompt_tokens"], 6 + 9 + 1 + 11 + 7);
}

#[test]
fn what_cannot_be_done_is_refused_with_its_field() {
    let server = TestServer::start();
    for (fields, param) in [
        (json!({ "n": 1_000_000_000 }), "n"),
        (json!({ "n": 0 }), "n"),
        (json!({ "max_tokens": 0 }), "max_tokens"),
        (json!({ "temperature": -1 }), "temperature"),
        (json!({ "temperature": 1e300 }), "temperature"),
        (json!({ "top_p": 1.5 }), "top_p"),
        (json!({ "top_k": -5 }), "top_k"),
        (json!({ "min_p": 2 }), "min_p"),
        (json!({ "presence_penalty": 3 }), "presence_penalty"),
        (json!({ "frequency_penalty": -3 }), "frequency_penalty"),
        (json!({ "repetition_penalty": 9 }), "repetition_penalty"),
        (
            json!({ "logprobs": true, "top_logprobs": 21 }),
            "top_logprobs",
        ),
        (json!({ "logprobs": true, "top_logprobs": 6 }), "logprobs"),
        (json!({ "logit_bias": { "5": 1 } }), "logit_bias"),
        (json!({ "stop_token_ids": [258] }), "stop_token_ids"),
        (json!({ "stop": ["x".repeat(2000)] }), "stop"),
        (json!({ "min_tokens": 9, "max_tokens": 5 }), ""),
        (json!({ "top_logprobs": 2 }), ""),
        (json!({ "stream_options": { "include_usage": true } }), ""),
        (json!({ "modalities": ["audio"] }), "modalities"),
        (json!({ "lora_path": "a" }), "lora_path"),
        (
            json!({ "skip_special_tokens": false }),
            "skip_special_tokens",
        ),
        (json!({ "never_heard_of": 1 }), "never_heard_of"),
        (json!({ "priority": "high" }), "priority"),
        (json!({ "ebnf": "root ::= a" }), "ebnf"),
    ] {
        let (status, error) = refused(server.address, &body("a", fields.clone()));
        assert_eq!(status, 400, "{fields}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(
            error["param"].as_str().unwrap_or(""),
            param,
            "{fields}: {error}"
        );
    }
    let image = json!([{ "type": "image_url", "image_url": { "url": "http://a" } }]);
    let mut request = body("a", json!({}));
    request["messages"][0]["content"] = image;
    let (status, error) = refused(server.address, &request);
    assert_eq!(
        (status, error["param"].as_str()),
        (400, Some("messages[0]"))
    );
    request["messages"] = json!([]);
    let (status, error) = refused(server.address, &request);
    assert_eq!((status, error["param"].as_str()), (400, Some("messages")));
}

#[test]
fn a_prompt_past_the_window_and_an_unknown_model_have_their_codes() {
    let server = TestServer::start();
    let (status, error) = refused(server.address, &body(&"x".repeat(5000), json!({})));
    assert_eq!(
        (status, error["code"].as_str()),
        (400, Some("context_length_exceeded"))
    );
    let (status, error) = refused(server.address, &body("x", json!({ "max_tokens": 4096 })));
    assert_eq!(
        (status, error["code"].as_str()),
        (400, Some("context_length_exceeded"))
    );
    let (status, error) = refused(server.address, &body("x", json!({ "model": "gpt" })));
    assert_eq!(
        (status, error["code"].as_str()),
        (404, Some("model_not_found"))
    );
    ask(server.address, PATH, &say("x", json!({ "model": "alias" })));
}

#[test]
fn failures_of_the_executor_have_a_reason_and_health_says_so() {
    let server = TestServer::start();
    let (status, error) = refused(server.address, &body("\u{3}", json!({})));
    assert_eq!(
        (status, error["type"].as_str()),
        (500, Some("server_error"))
    );
    assert!(error["message"].as_str().unwrap().contains("a broken row"));
    let (status, error) = refused(server.address, &body("\u{4}", json!({})));
    assert_eq!(status, 500);
    assert!(error["message"].as_str().unwrap().contains("out of memory"));
    ask(server.address, PATH, &say("still here", json!({})));
    let response = post(
        server.address,
        PATH,
        &body("\u{3}", json!({ "stream": true })),
    );
    assert_eq!(response.status, 200);
    let chunks = response.chunks();
    assert_eq!(chunks.len(), 1, "no chunk comes before the first token");
    assert_eq!(chunks[0]["error"]["code"], "engine_error");
    let (status, _) = refused(server.address, &body("\u{5}", json!({})));
    assert_eq!(status, 500);
    let health = crate::support::client::get(server.address, "/health");
    assert_eq!(health.status, 503);
    assert_eq!(health.json()["status"], "failed");
}
