//! Answers in the harmony format, on all routes.

use crate::chat::{PATH, body, say};
use crate::support::client::{ask, post};
use crate::support::server::{HARMONY, TestOptions, TestServer};
use crate::support::tool::{chat_tool, parameters};
use marlin_text::harmony::MARKERS;
use serde_json::{Value, json};

/// Reasoning, what is said before a call, and a call.
const CALL: &str = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary\
    <|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.add \
    <|constrain|>json<|message|>{\"a\": 1}<|call|>";
/// Reasoning and content.
const FINAL: &str = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final\
    <|message|>Yes.<|return|>";

fn server() -> TestServer {
    TestServer::with(TestOptions {
        template: Some(HARMONY),
        special: &MARKERS,
        ..TestOptions::default()
    })
}

/// The joined texts of the events of one type, in a field of each.
fn joined(events: &[Value], kind: &str, field: &str) -> String {
    let events = events.iter().filter(|event| event["type"] == kind);
    events
        .filter_map(|event| event.pointer(field)?.as_str())
        .collect()
}

#[test]
fn chat_completions_have_reasoning_content_and_calls_apart() {
    let server = server();
    let message = &ask(server.address, PATH, &say(FINAL, json!({})))["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "Hm.");
    assert_eq!(message["content"], "Yes.");
    // The tokens of the ends are in no generation config.
    let request = say(&format!("{FINAL} No."), json!({}));
    let answer = ask(server.address, PATH, &request);
    assert_eq!(answer["choices"][0]["message"]["content"], "Yes.");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let fields = json!({ "separate_reasoning": false });
    let message = &ask(server.address, PATH, &say(FINAL, fields))["choices"][0]["message"];
    assert_eq!(message["content"], "Hm.Yes.");

    let call = format!("{CALL} No.");
    let mut request = say(&call, json!({ "tools": [chat_tool()] }));
    let answer = ask(server.address, PATH, &request);
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let message = &choice["message"];
    assert_eq!(message["reasoning_content"], "Hm.");
    assert_eq!(message["content"], "Let me see.");
    assert_eq!(
        message["tool_calls"][0]["function"],
        json!({ "name": "add", "arguments": "{\"a\": 1}" })
    );
    request["stream"] = true.into();
    let chunks = post(server.address, PATH, &request).chunks();
    let text = |field: &str| -> String {
        let deltas = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]);
        deltas
            .filter_map(|delta| delta.pointer(field)?.as_str())
            .collect()
    };
    assert_eq!(text("/reasoning_content"), "Hm.");
    assert_eq!(text("/content"), "Let me see.");
    assert_eq!(text("/tool_calls/0/function/name"), "add");
    assert_eq!(text("/tool_calls/0/function/arguments"), "{\"a\": 1}");
    let last = chunks.last().unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "tool_calls");
    // Without tools the call is text.
    let message = &ask(server.address, PATH, &say(CALL, json!({})))["choices"][0]["message"];
    assert_eq!(message["content"], "Let me see.\n\n{\"a\": 1}");
}

#[test]
fn responses_have_items_for_reasoning_content_and_calls() {
    let server = server();
    let tool = json!({ "type": "function", "name": "add", "parameters": parameters() });
    let mut request = json!({
        "model": "test/model",
        "input": format!("\u{1}{CALL}\u{2}"),
        "tools": [tool],
    });
    let answer = ask(server.address, "/v1/responses", &request);
    let [reasoning, message, call] = answer["output"].as_array().unwrap().as_slice() else {
        panic!("{answer}");
    };
    assert_eq!(reasoning["content"][0]["text"], "Hm.");
    assert_eq!(message["content"][0]["text"], "Let me see.");
    assert_eq!(
        (&call["name"], &call["arguments"]),
        (&json!("add"), &json!("{\"a\": 1}"))
    );
    request["stream"] = true.into();
    let events = post(server.address, "/v1/responses", &request).events();
    let events: Vec<Value> = (events.iter())
        .map(|(_, data)| serde_json::from_str(data).unwrap())
        .collect();
    let joined = |kind: &str| joined(&events, &format!("response.{kind}.delta"), "/delta");
    assert_eq!(joined("reasoning_text"), "Hm.");
    assert_eq!(joined("output_text"), "Let me see.");
    assert_eq!(joined("function_call_arguments"), "{\"a\": 1}");
    let output = &events.last().unwrap()["response"]["output"];
    assert_eq!(output.as_array().unwrap().len(), 3);
}

#[test]
fn messages_have_blocks_for_reasoning_content_and_calls() {
    let server = server();
    let mut request = json!({
        "model": "test/model",
        "max_tokens": 300,
        "messages": [{ "role": "user", "content": format!("\u{1}{CALL}\u{2}") }],
        "tools": [{ "name": "add", "input_schema": parameters() }],
    });
    let answer = ask(server.address, "/v1/messages", &request);
    assert_eq!(answer["stop_reason"], "tool_use");
    let [thinking, text, call] = answer["content"].as_array().unwrap().as_slice() else {
        panic!("{answer}");
    };
    assert_eq!(thinking["thinking"], "Hm.");
    assert_eq!(text["text"], "Let me see.");
    assert_eq!(
        (&call["name"], &call["input"]),
        (&json!("add"), &json!({ "a": 1 }))
    );
    request["stream"] = true.into();
    let events = post(server.address, "/v1/messages", &request).events();
    let events: Vec<Value> = (events.iter())
        .map(|(_, data)| serde_json::from_str(data).unwrap())
        .collect();
    let joined = |field: &str| joined(&events, "content_block_delta", field);
    assert_eq!(joined("/delta/thinking"), "Hm.");
    assert_eq!(joined("/delta/text"), "Let me see.");
    assert_eq!(joined("/delta/partial_json"), "{\"a\": 1}");
}

#[test]
fn calls_and_forms_are_forced_after_reasoning() {
    let server = server();
    // What is not allowed is not said: the model writes what the grammar allows instead.
    for (script, reasoning) in [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
            json!("Hm."),
        ),
        ("", Value::Null),
    ] {
        for choice in [
            json!("required"),
            json!({ "type": "function", "function": { "name": "add" } }),
        ] {
            let script = format!(
                "{script}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{\"a\":"
            );
            let fields = json!({
                "tools": [chat_tool()], "tool_choice": choice, "max_tokens": 300,
            });
            let answer = ask(server.address, PATH, &say(&script, fields));
            let message = &answer["choices"][0]["message"];
            assert_eq!(message["reasoning_content"], reasoning, "{answer}");
            let function = &message["tool_calls"][0]["function"];
            assert_eq!(function["name"], "add", "{answer}");
            let arguments = function["arguments"].as_str().unwrap();
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            assert!(arguments["a"].is_u64());
        }
        let schema = json!({ "type": "object", "properties": { "on": { "type": "boolean" } },
            "required": ["on"], "additionalProperties": false });
        let format = json!({
            "type": "json_schema",
            "json_schema": { "name": "switch", "schema": schema },
        });
        let script = format!("{script}<|channel|>final<|message|>Well, ");
        let fields = json!({ "response_format": format, "max_tokens": 300 });
        let answer = ask(server.address, PATH, &say(&script, fields));
        let message = &answer["choices"][0]["message"];
        assert_eq!(message["reasoning_content"], reasoning, "{answer}");
        let content: Value = serde_json::from_str(message["content"].as_str().unwrap()).unwrap();
        assert!(content["on"].is_boolean(), "{answer}");
    }
    // The text of a completion has no channels.
    let fields = json!({ "model": "test/model", "prompt": "Go.", "regex": "[0-9]{4}" });
    let answer = ask(server.address, "/v1/completions", &fields);
    assert_eq!(answer["choices"][0]["text"].as_str().unwrap().len(), 4);
}

#[test]
fn the_effort_and_a_conversation_with_calls_reach_the_template() {
    let server = server();
    let prompt = |body: Value| {
        let tokens = ask(server.address, "/tokenize", &body)["tokens"].clone();
        ask(server.address, "/detokenize", &json!({ "tokens": tokens }))["prompt"].clone()
    };
    let call = |id: &str, arguments: &str| {
        json!({
            "id": id, "type": "function",
            "function": { "name": "add", "arguments": arguments },
        })
    };
    let messages = json!([
        { "role": "user", "content": "Add." },
        {
            "role": "assistant", "content": null, "reasoning_content": "Twice.",
            "tool_calls": [call("x", "{\"a\": 1}"), call("y", "{\"a\": 2}")],
        },
        { "role": "tool", "tool_call_id": "x", "content": "2" },
        { "role": "tool", "tool_call_id": "y", "content": "3" },
    ]);
    assert_eq!(
        prompt(json!({
            "messages": messages,
            "tools": [chat_tool()],
            "chat_template_kwargs": { "reasoning_effort": "high" },
        })),
        // Special tokens have no text.
        "systemReasoning: highdeveloper// \ntype adduserAdd.assistantanalysisTwice.\
         assistant to=functions.addcommentary json{\"a\": 1}functions to=assistantcommentary\"2\"\
         assistant to=functions.addcommentary json{\"a\": 2}functions to=assistantcommentary\"3\"\
         assistant"
    );
    // The length of the prompt tells which effort is in it.
    let tokens = |path: &str, usage: &str, body: Value| {
        ask(server.address, path, &body)["usage"][usage]
            .as_u64()
            .unwrap()
    };
    let chat = |effort: &str| {
        let body = body(
            "Hi.",
            json!({ "reasoning_effort": effort, "max_tokens": 1 }),
        );
        tokens(PATH, "prompt_tokens", body)
    };
    let response = |effort: &str| {
        let body = json!({
            "model": "test/model", "input": "Hi.", "max_output_tokens": 1,
            "reasoning": { "effort": effort },
        });
        tokens("/v1/responses", "input_tokens", body)
    };
    let message = |effort: &str| {
        let body = json!({
            "model": "test/model", "max_tokens": 1,
            "messages": [{ "role": "user", "content": "Hi." }],
            "output_config": { "effort": effort },
        });
        tokens("/v1/messages", "input_tokens", body)
    };
    assert_eq!(chat("low") + 1, chat("high"));
    assert_eq!(response("low") + 1, response("high"));
    assert_eq!(message("low") + 1, message("high"));
}

#[test]
fn the_schema_of_the_answer_is_in_the_prompt() {
    let server = server();
    let tokens = |path: &str, usage: &str, body: Value| {
        let answer = ask(server.address, path, &body);
        answer["usage"][usage].as_u64().unwrap() as usize
    };
    let schema = json!({ "type": "boolean" });
    // A byte is a token, and so is each of three markers of the message.
    let added = |title: &str| {
        format!("system# Response Formats\n\n## {title}\n{{\"type\":\"boolean\"}}").len() + 3
    };

    let chat = |fields: Value| tokens(PATH, "prompt_tokens", say("", fields));
    let named = json!({ "name": "on", "schema": schema });
    let format = json!({ "type": "json_schema", "json_schema": named });
    let plain = chat(json!({ "response_format": { "type": "json_object" } }));
    assert_eq!(plain, chat(json!({})));
    let with_schema = chat(json!({ "response_format": format }));
    assert_eq!(with_schema, plain + added("on\n"));
    // A call of a tool does not follow the schema.
    let tools = json!({ "tools": [chat_tool()], "tool_choice": "required" });
    let mut both = tools.clone();
    both["response_format"] = format;
    assert_eq!(chat(both), chat(tools));

    let response = |text: Value| {
        let body = json!({ "model": "test/model", "input": "Hi.", "text": text });
        tokens("/v1/responses", "input_tokens", body)
    };
    let format = json!({
        "type": "json_schema", "name": "on", "schema": schema, "description": "On?",
    });
    let with_schema = response(json!({ "format": format }));
    assert_eq!(with_schema, response(json!({})) + added("on\n\n// On?"));

    let mut message = json!({
        "model": "test/model", "max_tokens": 20,
        "messages": [{ "role": "user", "content": "Hi." }],
    });
    let plain = tokens("/v1/messages", "input_tokens", message.clone());
    message["output_config"] = json!({ "format": { "type": "json_schema", "schema": schema } });
    let with_schema = tokens("/v1/messages", "input_tokens", message.clone());
    assert_eq!(with_schema, plain + added("response\n"));
    message.as_object_mut().unwrap().remove("max_tokens");
    let count = ask(server.address, "/v1/messages/count_tokens", &message);
    assert_eq!(count["input_tokens"], with_schema);
}

#[test]
fn an_answer_continues_a_message() {
    let server = server();
    let messages = json!([
        { "role": "user", "content": "\u{1} day.<|return|>\u{2}" },
        { "role": "assistant", "content": "A fine" },
    ]);
    let request = json!({
        "model": "test/model", "messages": messages, "continue_final_message": true,
    });
    let message = &ask(server.address, PATH, &request)["choices"][0]["message"];
    assert_eq!(message["content"], " day.");
}
