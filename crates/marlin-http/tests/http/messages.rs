//! `/v1/messages`.

use crate::support::client::{ask, post};
use crate::support::server::TestServer;
use crate::support::tool::{CALL, parameters};
use marlin_testing::with_fields;
use serde_json::{Value, json};

const PATH: &str = "/v1/messages";

/// A request with one message and further fields.
fn body(content: impl Into<Value>, fields: Value) -> Value {
    let messages = json!([{ "role": "user", "content": content.into() }]);
    with_fields(
        json!({ "model": "test/model", "max_tokens": 100, "messages": messages }),
        &fields,
    )
}

/// A request whose answer is `text`.
fn say(text: &str, fields: Value) -> Value {
    body(format!("\u{1}{text}\u{2}"), fields)
}

fn tool() -> Value {
    json!({
        "name": "add",
        "description": "Adds.",
        "input_schema": parameters(),
    })
}

#[test]
fn an_answer_in_one_piece_has_the_fields_of_the_api() {
    let server = TestServer::start();
    let answer = ask(
        server.address,
        PATH,
        &say("Grüße", json!({ "system": "s" })),
    );
    let id = answer["id"].as_str().unwrap();
    assert!(id.starts_with("msg_"), "{id}");
    assert_eq!(
        answer,
        json!({
            "id": id,
            "type": "message",
            "role": "assistant",
            "content": [{ "type": "text", "text": "Grüße" }],
            "model": "test/model",
            "stop_reason": "end_turn",
            "stop_sequence": null,
            "stop_details": null,
            "usage": {
                // `[system]s</s>`, `[user]`, the message, `</s>`, `[assistant]`.
                "input_tokens": 10 + 6 + 9 + 1 + 11,
                "output_tokens": 8,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "cache_creation": {
                    "ephemeral_5m_input_tokens": 0,
                    "ephemeral_1h_input_tokens": 0,
                },
                "service_tier": "standard",
                "inference_geo": "not_available",
            },
            "container": null,
        })
    );
    let answer = ask(
        server.address,
        PATH,
        &say("a END", json!({ "stop_sequences": ["END"] })),
    );
    assert_eq!(
        (&answer["stop_reason"], &answer["stop_sequence"]),
        (&json!("stop_sequence"), &json!("END"))
    );
    assert_eq!(answer["content"][0]["text"], "a ");
    let answer = ask(
        server.address,
        PATH,
        &body("Go on.", json!({ "max_tokens": 3 })),
    );
    assert_eq!(answer["stop_reason"], "max_tokens");
}

#[test]
fn the_events_of_a_stream_are_those_of_the_api_to_the_byte() {
    let server = TestServer::start();
    let response = post(
        server.address,
        PATH,
        &say("<think>a</think>hé", json!({ "stream": true })),
    );
    let first: Value = serde_json::from_str(&response.events()[0].1).unwrap();
    let id = &first["message"]["id"];
    let event = |name: &str, fields: &str| {
        format!("event: {name}\ndata: {{\"type\":\"{name}\"{fields}}}\n\n")
    };
    let start = |index: u32, block: &str| {
        event(
            "content_block_start",
            &format!(",\"index\":{index},\"content_block\":{{{block}}}"),
        )
    };
    let delta = |index: u32, delta: &str| {
        event(
            "content_block_delta",
            &format!(",\"index\":{index},\"delta\":{{{delta}}}"),
        )
    };
    let stop = |index: u32| event("content_block_stop", &format!(",\"index\":{index}"));
    let expected = [
        event(
            "message_start",
            &format!(
                ",\"message\":{{\"id\":{id},\"type\":\"message\",\"role\":\"assistant\",\"content\":[],\"model\":\"test/model\",\"stop_reason\":null,\"stop_sequence\":null,\"stop_details\":null,\"usage\":{{\"input_tokens\":39,\"output_tokens\":0,\"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":0,\"cache_creation\":{{\"ephemeral_5m_input_tokens\":0,\"ephemeral_1h_input_tokens\":0}},\"service_tier\":\"standard\",\"inference_geo\":\"not_available\"}},\"container\":null}}"
            ),
        ),
        start(
            0,
            "\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"",
        ),
        delta(0, "\"type\":\"thinking_delta\",\"thinking\":\"a\""),
        delta(0, "\"type\":\"signature_delta\",\"signature\":\"\""),
        stop(0),
        start(1, "\"type\":\"text\",\"text\":\"\""),
        delta(1, "\"type\":\"text_delta\",\"text\":\"h\""),
        delta(1, "\"type\":\"text_delta\",\"text\":\"é\""),
        stop(1),
        event(
            "message_delta",
            ",\"delta\":{\"stop_reason\":\"end_turn\",\"stop_sequence\":null,\"stop_details\":null,\"container\":null},\"usage\":{\"output_tokens\":20,\"input_tokens\":39,\"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":0}",
        ),
        event("message_stop", ""),
    ];
    assert_eq!(response.text(), expected.concat());
}

#[test]
fn tools_are_called_and_their_results_are_read() {
    let server = TestServer::start();
    let tools = json!({ "tools": [tool()] });
    let answer = ask(server.address, PATH, &say(CALL, tools.clone()));
    assert_eq!(answer["stop_reason"], "tool_use");
    assert_eq!(
        answer["content"][0],
        json!({ "type": "text", "text": "Let me see." })
    );
    let call = &answer["content"][1];
    assert!(call["id"].as_str().unwrap().starts_with("toolu_"));
    assert_eq!(
        (&call["name"], &call["input"]),
        (&json!("add"), &json!({ "a": 1 }))
    );
    let mut request = say("2 it is", tools.clone());
    request["messages"] = json!([
        { "role": "user", "content": "2?" },
        { "role": "assistant", "content": [
            { "type": "thinking", "thinking": "Hm.", "signature": "" },
            { "type": "tool_use", "id": "t", "name": "add", "input": { "a": 1 } },
        ] },
        { "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": "t", "content": [{ "type": "text", "text": "2" }] },
            { "type": "text", "text": "\u{1}2 it is\u{2}" },
        ] },
    ]);
    assert_eq!(
        ask(server.address, PATH, &request)["content"][0]["text"],
        "2 it is"
    );
    let mut request = say(CALL, tools.clone());
    request["stream"] = true.into();
    let events = post(server.address, PATH, &request).events();
    let events: Vec<Value> = events
        .iter()
        .map(|(_, data)| serde_json::from_str(data).unwrap())
        .collect();
    let json: String = events
        .iter()
        .filter_map(|event| event["delta"]["partial_json"].as_str())
        .collect();
    assert_eq!(json, "{\"a\": 1}");
    let blocks: Vec<_> = (events.iter())
        .filter_map(|event| event["content_block"]["type"].as_str())
        .collect();
    assert_eq!(blocks, ["text", "tool_use"]);
    for choice in [
        json!({ "type": "any" }),
        json!({ "type": "tool", "name": "add" }),
    ] {
        let fields = json!({ "tools": [tool()], "tool_choice": choice });
        let answer = ask(server.address, PATH, &body("Go.", fields));
        assert!(answer["content"][0]["input"]["a"].is_u64(), "{answer}");
    }
}

#[test]
fn an_answer_continues_the_last_message_of_the_assistant() {
    let server = TestServer::start();
    let mut request = say("the end", json!({}));
    let message = json!({ "role": "assistant", "content": "This is" });
    request["messages"].as_array_mut().unwrap().push(message);
    let answer = ask(server.address, PATH, &request);
    assert_eq!(answer["content"][0]["text"], "the end");
    assert_eq!(answer["usage"]["input_tokens"], 6 + 9 + 1 + 11 + 7);
}

#[test]
fn tokens_are_counted_without_an_answer() {
    let server = TestServer::start();
    let mut request = body("h", json!({}));
    request.as_object_mut().unwrap().remove("max_tokens");
    let answer = ask(server.address, "/v1/messages/count_tokens", &request);
    assert_eq!(answer, json!({ "input_tokens": 6 + 1 + 1 + 11 }));
}

#[test]
fn errors_have_the_form_of_the_api() {
    let server = TestServer::start();
    let image = json!([{ "type": "image", "source": { "type": "url", "url": "http://a" } }]);
    let bash = json!([{ "type": "bash_20250124", "name": "bash" }]);
    for (body, status, kind) in [
        (
            body("a", json!({ "max_tokens": 0 })),
            400,
            "invalid_request_error",
        ),
        (
            body("a", json!({ "temperature": 2 })),
            400,
            "invalid_request_error",
        ),
        (
            body("a", json!({ "messages": [] })),
            400,
            "invalid_request_error",
        ),
        (
            body("a", json!({ "what": 1 })),
            400,
            "invalid_request_error",
        ),
        (
            body("a", json!({ "tools": bash })),
            400,
            "invalid_request_error",
        ),
        (
            body("a", json!({ "mcp_servers": [] })),
            400,
            "invalid_request_error",
        ),
        (body(image, json!({})), 400, "invalid_request_error"),
        (
            body("x".repeat(5000), json!({})),
            400,
            "invalid_request_error",
        ),
        (
            body("a", json!({ "model": "claude" })),
            404,
            "not_found_error",
        ),
        (body("\u{3}", json!({})), 500, "api_error"),
        (json!([]), 400, "invalid_request_error"),
    ] {
        let response = post(server.address, PATH, &body);
        let error = response.json();
        assert_eq!(response.status, status, "{error}");
        assert_eq!(
            (&error["type"], &error["error"]["type"]),
            (&json!("error"), &json!(kind))
        );
        let id = response.header("x-request-id");
        assert_eq!(error["request_id"].as_str(), id);
    }
    let response = post(
        server.address,
        PATH,
        &body("\u{3}", json!({ "stream": true })),
    );
    let (name, data) = response.events().pop().unwrap();
    let error: Value = serde_json::from_str(&data).unwrap();
    assert_eq!(
        (name.as_deref(), &error["error"]["type"]),
        (Some("error"), &json!("api_error"))
    );
}
