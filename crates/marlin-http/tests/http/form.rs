//! The form of answers: calls of tools, structured output, reasoning.

use crate::chat::{PATH, body, refused, say};
use crate::support::client::{ask, post};
use crate::support::server::TestServer;
use crate::support::tool::{CALL, chat_tool};
use serde_json::{Value, json};

#[test]
fn calls_of_tools_are_found_and_forced() {
    let server = TestServer::start();
    let tool = chat_tool();
    let request = say(CALL, json!({ "tools": [tool] }));
    let answer = ask(server.address, PATH, &request);
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Let me see.");
    let calls = &choice["message"]["tool_calls"];
    assert_eq!(calls[0]["type"], "function");
    assert_eq!(
        calls[0]["function"],
        json!({ "name": "add", "arguments": "{\"a\": 1}" })
    );
    let mut streamed = request.clone();
    streamed["stream"] = true.into();
    let chunks = post(server.address, PATH, &streamed).chunks();
    let deltas: Vec<_> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array())
        .flatten()
        .collect();
    assert_eq!(deltas[0]["index"], 0);
    assert!(deltas[0]["id"].as_str().unwrap().starts_with("call_"));
    assert_eq!(deltas[0]["function"]["name"], "add");
    let arguments = deltas
        .iter()
        .filter_map(|delta| delta["function"]["arguments"].as_str());
    assert_eq!(arguments.collect::<String>(), "{\"a\": 1}");
    assert_eq!(
        chunks.last().unwrap()["choices"][0]["finish_reason"],
        "tool_calls"
    );
    // Without a script the model writes what the grammar allows.
    for choice in [
        json!("required"),
        json!({ "type": "function", "function": { "name": "add" } }),
    ] {
        let fields = json!({ "tools": [tool], "tool_choice": choice, "max_tokens": 200 });
        let answer = ask(server.address, PATH, &body("Go.", fields));
        let message = &answer["choices"][0]["message"];
        let function = &message["tool_calls"][0]["function"];
        assert_eq!(function["name"], "add", "{answer}");
        let arguments: Value =
            serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
        assert!(arguments["a"].is_u64());
    }
    let request = say(CALL, json!({ "tools": [tool], "tool_choice": "none" }));
    let message = &ask(server.address, PATH, &request)["choices"][0]["message"];
    assert_eq!(message["content"], CALL);
    // The conversation goes on after a call.
    let mut request = say("Done.", json!({ "tools": [tool] }));
    let messages = request["messages"].as_array_mut().unwrap();
    let arguments = json!({ "name": "add", "arguments": "{\"a\": 1}" });
    messages.insert(
        0,
        json!({ "role": "tool", "tool_call_id": "c", "content": "2" }),
    );
    messages.insert(
        0,
        json!({
            "role": "assistant",
            "content": null,
            "tool_calls": [{ "id": "c", "type": "function", "function": arguments }],
        }),
    );
    let message = &ask(server.address, PATH, &request)["choices"][0]["message"];
    assert_eq!(message["content"], "Done.");
}

#[test]
fn structured_output_follows_its_schema() {
    let server = TestServer::start();
    let schema = json!({
        "type": "object",
        "properties": { "on": { "type": "boolean" } },
        "required": ["on"],
        "additionalProperties": false,
    });
    let format = json!({
        "type": "json_schema",
        "json_schema": { "name": "switch", "schema": schema, "strict": true },
    });
    let fields = json!({ "response_format": format, "max_tokens": 200, "seed": 3 });
    let answer = ask(server.address, PATH, &body("Go.", fields));
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let value: Value = serde_json::from_str(content).unwrap();
    assert!(value["on"].is_boolean(), "{value}");
    let fields = json!({ "regex": "[0-9]{4}-[0-9]{2}", "max_tokens": 50 });
    let answer = ask(server.address, PATH, &body("Go.", fields));
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(content.len(), 7);
    let fields = json!({ "regex": "(", "max_tokens": 50 });
    let (status, error) = refused(server.address, &body("Go.", fields));
    assert_eq!((status, error["param"].as_str()), (400, Some("regex")));
}

#[test]
fn structured_outputs_of_vllm_are_followed() {
    let server = TestServer::start();
    let schema = json!({
        "type": "object",
        "properties": { "on": { "type": "boolean" } },
        "required": ["on"],
        "additionalProperties": false,
    });
    let is_switch = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap();
        value["on"].is_boolean()
    };
    let is_choice = |text: &str| ["yes", "no \"never\""].contains(&text);
    let is_sum = |text: &str| {
        let numbers: Vec<_> = text.split('+').collect();
        numbers.len() > 1 && numbers.iter().all(|number| number.len() == 1)
    };
    let is_number = |text: &str| text.len() == 3 && text.parse::<u32>().is_ok();
    let sum = "start: DIGIT (\"+\" DIGIT)+\nDIGIT: /[0-9]/\n";
    type Check<'a> = &'a dyn Fn(&str) -> bool;
    let forms: [(Value, Check<'_>); 5] = [
        (json!({ "json": schema }), &is_switch),
        (
            json!({ "json": schema.to_string(), "regex": null }),
            &is_switch,
        ),
        (json!({ "choice": ["yes", "no \"never\""] }), &is_choice),
        (json!({ "grammar": sum }), &is_sum),
        (
            json!({ "regex": "[0-9]{3}", "json_object": false }),
            &is_number,
        ),
    ];
    for (form, check) in forms {
        let fields = json!({ "structured_outputs": form, "max_tokens": 300 });
        let answer = ask(server.address, PATH, &body("Go.", fields.clone()));
        let content = &answer["choices"][0]["message"]["content"];
        assert!(check(content.as_str().unwrap()), "{form}: {answer}");
        let prompt = json!({ "model": "test/model", "prompt": "Go." });
        let request = marlin_testing::with_fields(prompt, &fields);
        let answer = ask(server.address, "/v1/completions", &request);
        let text = answer["choices"][0]["text"].as_str().unwrap();
        assert!(check(text), "{form}: {answer}");
    }
    for form in [
        json!({}),
        json!([]),
        json!("a"),
        json!({ "regex": "a", "json_object": true }),
        json!({ "regex": 1 }),
        json!({ "choice": [] }),
        json!({ "choice": ["a", 1] }),
        json!({ "json": "{" }),
        json!({ "structural_tag": "{}" }),
        json!({ "grammar": "start: nothing" }),
    ] {
        let fields = json!({ "structured_outputs": form });
        let (status, error) = refused(server.address, &body("Go.", fields));
        let param = error["param"].as_str();
        assert_eq!((status, param), (400, Some("structured_outputs")), "{form}");
    }
    // Of two forms none is ignored.
    let fields = json!({
        "structured_outputs": { "regex": "a" },
        "response_format": { "type": "json_object" },
    });
    let (status, error) = refused(server.address, &body("Go.", fields));
    assert_eq!(status, 400);
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("exclude each other"), "{message}");
}

#[test]
fn a_form_comes_after_the_reasoning_that_a_template_opens() {
    let server = TestServer::start();
    let opened = json!({ "opens_reasoning": true });
    let fields = json!({
        "response_format": { "type": "json_object" },
        "chat_template_kwargs": opened,
        "max_tokens": 200,
    });
    let request = say("Well, {.</think>{\"on\":true}", fields);
    let message = &ask(server.address, PATH, &request)["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "Well, {.");
    assert_eq!(message["content"], "{\"on\":true}");

    let tool = json!({ "type": "function", "function": { "name": "add" } });
    let fields = json!({
        "tools": [tool],
        "tool_choice": "required",
        "chat_template_kwargs": opened,
        "max_tokens": 200,
    });
    let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>";
    let request = say(&format!("Hm.</think>{call}"), fields);
    let message = &ask(server.address, PATH, &request)["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "Hm.");
    assert_eq!(message["tool_calls"][0]["function"]["name"], "add");
}

#[test]
fn reasoning_is_apart_from_the_answer() {
    let server = TestServer::start();
    let request = say("<think>Hm.</think>Yes.", json!({}));
    let message = &ask(server.address, PATH, &request)["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "Hm.");
    assert_eq!(message["content"], "Yes.");
    let mut streamed = request.clone();
    streamed["stream"] = true.into();
    let chunks = post(server.address, PATH, &streamed).chunks();
    let joined = |field: &str| -> String {
        let deltas = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]);
        deltas.filter_map(|delta| delta[field].as_str()).collect()
    };
    assert_eq!(
        (joined("reasoning_content"), joined("content")),
        ("Hm.".into(), "Yes.".into())
    );
    let mut whole = request;
    whole["separate_reasoning"] = false.into();
    let message = &ask(server.address, PATH, &whole)["choices"][0]["message"];
    assert_eq!(message["content"], "<think>Hm.</think>Yes.");
}
