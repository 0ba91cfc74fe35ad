//! `/v1/completions`.

use crate::support::client::{ask, post};
use crate::support::server::TestServer;
use marlin_testing::with_fields;
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";

fn body(prompt: Value, fields: Value) -> Value {
    with_fields(json!({ "model": "test/model", "prompt": prompt }), &fields)
}

#[test]
fn an_answer_in_one_piece_has_the_fields_of_the_api() {
    let server = TestServer::start();
    let answer = ask(
        server.address,
        PATH,
        &body(json!("\u{1}Hi\u{2}"), json!({})),
    );
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(
        answer["choices"],
        json!([{ "text": "Hi", "index": 0, "finish_reason": "stop" }])
    );
    // `<s>` and four bytes; two bytes and the end.
    assert_eq!(answer["usage"]["prompt_tokens"], 5);
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    // 16 tokens, if nothing is said.
    let answer = ask(server.address, PATH, &body(json!("Hi"), json!({})));
    assert_eq!(answer["choices"][0]["text"].as_str().unwrap().len(), 16);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[test]
fn prompts_are_texts_or_tokens_or_several_of_these() {
    let server = TestServer::start();
    let fields = json!({ "temperature": 0, "n": 2 });
    let texts = |prompt: Value| -> Vec<String> {
        let answer = ask(server.address, PATH, &body(prompt, fields.clone()));
        let choices = answer["choices"].as_array().unwrap();
        let indexes = choices
            .iter()
            .map(|choice| choice["index"].as_u64().unwrap());
        assert!(indexes.eq(0..choices.len() as u64));
        let text = |choice: &Value| choice["text"].as_str().unwrap().to_string();
        choices.iter().map(text).collect()
    };
    let (a, b) = (texts(json!("a")), texts(json!("b")));
    assert_eq!(a[0], a[1]);
    assert_ne!(a, b);
    assert_eq!(texts(json!(["a", "b"])), [a.clone(), b.clone()].concat());
    assert_eq!(texts(json!([256, 97])), a);
    assert_eq!(texts(json!([[256, 97], [256, 98]])), [a, b].concat());
    for prompt in [
        json!([]),
        json!([[]]),
        json!([97, "a"]),
        json!([300]),
        json!([[97], 97]),
        json!([-1]),
        json!(5),
        json!(null),
        json!({}),
    ] {
        let response = post(server.address, PATH, &body(prompt.clone(), json!({})));
        assert_eq!(response.status, 400, "{prompt}");
        assert_eq!(response.json()["error"]["type"], "invalid_request_error");
    }
}

#[test]
fn the_events_of_a_stream_are_those_of_the_api_to_the_byte() {
    let server = TestServer::start();
    let fields =
        json!({ "stream": true, "echo": true, "stream_options": { "include_usage": true } });
    let response = post(server.address, PATH, &body(json!("\u{1}ab\u{2}"), fields));
    let first: Value = serde_json::from_str(&response.events()[0].1).unwrap();
    let (id, created) = (&first["id"], &first["created"]);
    let head = format!(
        "data: {{\"id\":{id},\"object\":\"text_completion\",\"created\":{created},\"choices\":["
    );
    let chunk = |text: &str, finish: &str| {
        format!(
            "{head}{{\"text\":\"{text}\",\"index\":0,\"finish_reason\":{finish}}}],\"model\":\"test/model\"}}\n\n"
        )
    };
    let usage = "\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":3,\"total_tokens\":8,\"prompt_tokens_details\":{\"cached_tokens\":0}}";
    let expected = [
        // The prompt comes with the first token.
        chunk("\\u0001ab\\u0002a", "null"),
        chunk("b", "null"),
        chunk("", "\"stop\""),
        format!("{head}],\"model\":\"test/model\",{usage}}}\n\n"),
        "data: [DONE]\n\n".to_string(),
    ];
    assert_eq!(response.text(), expected.concat());
}

#[test]
fn the_reason_of_the_end_is_in_the_chunk_of_the_last_text() {
    let server = TestServer::start();
    let fields = json!({ "stream": true, "max_tokens": 2, "logprobs": 1 });
    let request = body(json!("\u{1}abc\u{2}"), fields);
    let chunks = post(server.address, PATH, &request).chunks();
    let choices = chunks.iter().map(|chunk| &chunk["choices"][0]);
    let choices = choices.map(|choice| {
        let tokens = &choice["logprobs"]["tokens"];
        json!([choice["text"], tokens, choice["finish_reason"]])
    });
    assert_eq!(
        choices.collect::<Vec<_>>(),
        [json!(["a", ["a"], null]), json!(["b", ["b"], "length"])]
    );
}

#[test]
fn log_probabilities_and_echo() {
    let server = TestServer::start();
    let answer = ask(
        server.address,
        PATH,
        &body(json!("\u{1}ab\u{2}"), json!({ "logprobs": 1 })),
    );
    assert_eq!(
        answer["choices"][0]["logprobs"],
        json!({
            "tokens": ["a", "b", "</s>"],
            "token_logprobs": [-0.5, -0.5, -0.5],
            "top_logprobs": [{ "A": -1.0 }, { "A": -1.0 }, { "A": -1.0 }],
            "text_offset": [0, 1, 2],
        })
    );
    let fields = json!({ "echo": true, "n": 2 });
    let answer = ask(server.address, PATH, &body(json!("Q\u{1}ab\u{2}"), fields));
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(choice["text"], "Q\u{1}ab\u{2}ab");
    }
    let fields = json!({ "echo": true, "logprobs": 1 });
    let response = post(server.address, PATH, &body(json!("a"), fields));
    assert_eq!(
        (response.status, response.json()["error"]["param"].as_str()),
        (400, Some("echo"))
    );
}

#[test]
fn what_cannot_be_done_is_refused_with_its_field() {
    let server = TestServer::start();
    for (fields, param) in [
        (json!({ "n": 1_000_000_000 }), "n"),
        (json!({ "n": 65 }), "n"),
        (json!({ "best_of": 2 }), "best_of"),
        (json!({ "suffix": "x" }), "suffix"),
        (json!({ "max_tokens": 0 }), "max_tokens"),
        (json!({ "logprobs": 21 }), "logprobs"),
        (json!({ "json_schema": "{" }), "json_schema"),
        (json!({ "best_of": 21 }), "best_of"),
        (json!({ "something": 1 }), "something"),
    ] {
        let response = post(server.address, PATH, &body(json!("a"), fields.clone()));
        let error = &response.json()["error"];
        assert_eq!(
            (response.status, error["param"].as_str()),
            (400, Some(param)),
            "{error}"
        );
    }
}
