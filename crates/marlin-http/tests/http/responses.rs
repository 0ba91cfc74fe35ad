//! `/v1/responses`.

use crate::support::client::{ask, post};
use crate::support::server::TestServer;
use crate::support::tool::{CALL, parameters};
use marlin_testing::with_fields;
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";

fn body(input: impl Into<Value>, fields: Value) -> Value {
    with_fields(
        json!({ "model": "test/model", "input": input.into() }),
        &fields,
    )
}

/// A request whose answer is `text`.
fn say(text: &str, fields: Value) -> Value {
    body(format!("\u{1}{text}\u{2}"), fields)
}

fn tool() -> Value {
    json!({
        "type": "function",
        "name": "add",
        "parameters": parameters(),
    })
}

#[test]
fn an_answer_in_one_piece_has_the_fields_of_the_api() {
    let server = TestServer::start();
    let fields = json!({ "instructions": "s", "metadata": { "a": "b" } });
    let answer = ask(
        server.address,
        PATH,
        &say("<think>Hm.</think>Grüße", fields),
    );
    assert!(answer["id"].as_str().unwrap().starts_with("resp_"));
    assert_eq!(
        (&answer["object"], &answer["status"]),
        (&json!("response"), &json!("completed"))
    );
    assert_eq!(
        (&answer["store"], &answer["metadata"]),
        (&json!(false), &json!({ "a": "b" }))
    );
    let [reasoning, message] = answer["output"].as_array().unwrap().as_slice() else {
        panic!("{answer}");
    };
    assert_eq!(
        reasoning["content"],
        json!([{ "type": "reasoning_text", "text": "Hm." }])
    );
    assert_eq!(
        (&message["role"], &message["status"]),
        (&json!("assistant"), &json!("completed"))
    );
    assert_eq!(
        message["content"],
        json!([{ "type": "output_text", "text": "Grüße", "annotations": [] }])
    );
    let usage = &answer["usage"];
    assert_eq!(
        (&usage["input_tokens"], &usage["output_tokens"]),
        (&json!(10 + 6 + 27 + 1 + 11), &json!(26))
    );
    let answer = ask(
        server.address,
        PATH,
        &body("Go on.", json!({ "max_output_tokens": 4 })),
    );
    assert_eq!(answer["status"], "incomplete");
    assert_eq!(
        answer["incomplete_details"],
        json!({ "reason": "max_output_tokens" })
    );
    assert_eq!(answer["output"][0]["status"], "incomplete");
}

#[test]
fn the_events_of_a_stream_are_those_of_the_api() {
    let server = TestServer::start();
    let text = "<think>a</think>hé<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    let fields = json!({ "stream": true, "tools": [tool()] });
    let response = post(server.address, PATH, &say(text, fields.clone()));
    let events = response.events();
    let objects: Vec<Value> = events
        .iter()
        .map(|(_, data)| serde_json::from_str(data).unwrap())
        .collect();
    for (index, ((name, _), object)) in events.iter().zip(&objects).enumerate() {
        assert_eq!(object["sequence_number"], index);
        assert_eq!(object["type"].as_str(), name.as_deref());
    }
    let mut names: Vec<_> = objects
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect();
    names.dedup();
    assert_eq!(
        names,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let deltas = objects
        .iter()
        .filter(|event| event["type"] == "response.output_text.delta");
    assert_eq!(
        deltas
            .map(|event| event["delta"].as_str().unwrap())
            .collect::<String>(),
        "hé"
    );
    let last = &objects.last().unwrap()["response"];
    let mut whole = say(text, fields);
    whole["stream"] = false.into();
    let whole = ask(server.address, PATH, &whole);
    let outline = |output: &Value| -> Vec<Value> {
        let items = output.as_array().unwrap().iter();
        let items = items.map(|item| {
            json!([
                item["type"],
                item["status"],
                item["content"],
                item["name"],
                item["arguments"]
            ])
        });
        items.collect()
    };
    assert_eq!(outline(&last["output"]), outline(&whole["output"]));
    assert_eq!(
        last["usage"]["output_tokens"],
        whole["usage"]["output_tokens"]
    );
}

#[test]
fn log_probabilities_are_those_of_the_tokens_of_the_text() {
    let server = TestServer::start();
    let include = json!(["message.output_text.logprobs"]);
    let text = "<think>Hm.</think>\né a";
    let call = "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    let fields = json!({ "include": include, "top_logprobs": 2, "tools": [tool()] });
    let mut request = say(&format!("{text}{call}"), fields);
    let answer = ask(server.address, PATH, &request);
    assert_eq!(answer["top_logprobs"], 2);
    let part = &answer["output"][1]["content"][0];
    assert_eq!(part["text"], "é a");
    let logprobs = part["logprobs"].as_array().unwrap();
    // A token is a byte; the end of the sequence is none of the text.
    let bytes: Vec<_> = logprobs.iter().map(|token| &token["bytes"][0]).collect();
    assert_eq!(bytes, [0xc3, 0xa9, 0x20, 0x61]);
    assert_eq!(logprobs[3]["token"], "a");
    assert_eq!(logprobs[3]["logprob"], -0.5);
    assert_eq!(
        logprobs[3]["top_logprobs"],
        json!([
            { "token": "A", "logprob": -1.0, "bytes": [65] },
            { "token": "B", "logprob": -2.0, "bytes": [66] },
        ])
    );
    request["stream"] = true.into();
    let events = post(server.address, PATH, &request).events();
    let events: Vec<Value> = events
        .iter()
        .map(|(_, data)| serde_json::from_str(data).unwrap())
        .collect();
    let of_type = |kind: &str| {
        let events = events.iter().filter(|event| event["type"] == kind);
        events.collect::<Vec<_>>()
    };
    let deltas = of_type("response.output_text.delta");
    let streamed: Vec<_> = (deltas.iter())
        .flat_map(|event| event["logprobs"].as_array().unwrap().clone())
        .collect();
    assert_eq!(streamed, *logprobs);
    assert_eq!(deltas[0]["delta"], "é");
    assert_eq!(deltas[0]["logprobs"].as_array().unwrap().len(), 2);
    let done = of_type("response.output_text.done")[0];
    assert_eq!(done["logprobs"], part["logprobs"]);
    let done = of_type("response.content_part.done")[0];
    assert_eq!(done["part"], *part);
    let last = &events.last().unwrap()["response"]["output"][1];
    assert_eq!(last["content"][0], *part);

    // Text that is held back, since it may become a stop string, comes with its tokens.
    let fields = json!({ "include": include, "stop": ["END"] });
    let answer = ask(server.address, PATH, &say("an EN", fields));
    let part = &answer["output"][0]["content"][0];
    assert_eq!(part["text"], "an EN");
    let logprobs = part["logprobs"].as_array().unwrap();
    let tokens = logprobs
        .iter()
        .map(|token| token["token"].as_str().unwrap());
    assert_eq!(tokens.collect::<String>(), "an EN");
    assert_eq!(logprobs[0]["top_logprobs"], json!([]));
    // Without `include` there are none, as in OpenAI's API.
    let answer = ask(
        server.address,
        PATH,
        &say("a", json!({ "top_logprobs": 2 })),
    );
    assert!(answer["output"][0]["content"][0].get("logprobs").is_none());
    // The executor has five alternatives at most.
    let fields = json!({ "include": include, "top_logprobs": 6 });
    let response = post(server.address, PATH, &say("a", fields));
    assert_eq!(response.status, 400);
    assert_eq!(response.json()["error"]["param"], "top_logprobs");
}

#[test]
fn a_conversation_is_sent_whole() {
    let server = TestServer::start();
    let tools = json!({ "tools": [tool()] });
    let answer = ask(server.address, PATH, &say(CALL, tools.clone()));
    let mut input = vec![json!({ "role": "user", "content": "2?" })];
    input.extend(answer["output"].as_array().unwrap().clone());
    let call_id = &answer["output"][1]["call_id"];
    input.push(json!({ "type": "function_call_output", "call_id": call_id, "output": "2" }));
    let last = json!([{ "type": "input_text", "text": "\u{1}2 it is\u{2}" }]);
    input.push(json!({ "role": "user", "content": last }));
    let answer = ask(server.address, PATH, &body(input, tools));
    assert_eq!(answer["output"][0]["content"][0]["text"], "2 it is");
    for choice in [
        json!("required"),
        json!({ "type": "function", "name": "add" }),
    ] {
        let fields = json!({ "tools": [tool()], "tool_choice": choice, "max_output_tokens": 200 });
        let answer = ask(server.address, PATH, &body("Go.", fields));
        assert_eq!(answer["output"][0]["name"], "add", "{answer}");
    }
    let schema = json!({ "type": "object", "properties": { "on": { "type": "boolean" } },
        "required": ["on"], "additionalProperties": false });
    let format = json!({ "format": { "type": "json_schema", "name": "s", "schema": schema } });
    let fields = json!({ "text": format, "max_output_tokens": 200 });
    let answer = ask(server.address, PATH, &body("Go.", fields));
    let text = answer["output"][0]["content"][0]["text"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap();
    assert!(value["on"].is_boolean());
}

#[test]
fn what_cannot_be_done_is_refused_with_its_field() {
    let server = TestServer::start();
    for (fields, param) in [
        (json!({ "background": true }), "background"),
        (
            json!({ "previous_response_id": "resp_1" }),
            "previous_response_id",
        ),
        (json!({ "truncation": "auto" }), "truncation"),
        (json!({ "include": ["web_search_call.results"] }), "include"),
        (json!({ "top_logprobs": 21 }), "top_logprobs"),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0]"),
        (json!({ "max_output_tokens": 0 }), "max_output_tokens"),
        (json!({ "temperature": 3 }), "temperature"),
        (json!({ "input": [] }), "input"),
        (json!({ "what": 1 }), ""),
    ] {
        let response = post(server.address, PATH, &body("a", fields.clone()));
        let error = &response.json()["error"];
        assert_eq!(response.status, 400, "{fields} {error}");
        assert_eq!(error["param"].as_str().unwrap_or(""), param, "{error}");
    }
    let response = post(
        server.address,
        PATH,
        &body("\u{3}", json!({ "stream": true })),
    );
    let (name, data) = response.events().pop().unwrap();
    let event: Value = serde_json::from_str(&data).unwrap();
    assert_eq!(name.as_deref(), Some("response.failed"));
    assert_eq!(event["response"]["error"]["code"], "server_error");
}
