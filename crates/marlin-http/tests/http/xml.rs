//! Calls of tools as XML, on all routes.

use crate::chat::{PATH, body, say};
use crate::support::client::{ask, post};
use crate::support::server::{TestOptions, TestServer};
use serde_json::{Value, json};

/// A template like that of Qwen 3 Coder.
const QWEN: &str = "\
{%- if tools %}{{ tools | tojson }} <tool_call>\n<function=NAME>\n</function>\n</tool_call>{% endif %}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}<parameter={{ key }}>\n{{ value | tojson if value is mapping else value | string }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor -%}
</s>{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}";

/// A template like that of Seed-OSS, which can open the reasoning.
const SEED: &str = "\
{%- set think_end_token = '</seed:think>' %}
{%- if tools %}{{ tools | tojson }} <seed:tool_call>\n<function=NAME>\n</function>\n</seed:tool_call>{% endif %}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}</s>{% endfor %}
{%- if add_generation_prompt %}[assistant]{% if opens_reasoning %}<seed:think>\n{% endif %}{% endif %}";

/// What is said before a call, and the call.
const CALL: &str = "Let me see.\n<tool_call>\n<function=write>\n<parameter=path>\n/tmp/\"a\"\n\
    </parameter>\n<parameter=lines>\n3\n</parameter>\n<parameter=options>\n{\"new\": true}\n\
    </parameter>\n</function>\n</tool_call>";
/// The arguments of the call.
const ARGUMENTS: &str = r#"{"path": "/tmp/\"a\"", "lines": 3, "options": {"new": true}}"#;

fn parameters() -> Value {
    json!({
        "type": "object",
        "properties": {
            "path": { "type": "string", "maxLength": 12 },
            "lines": { "type": "integer", "minimum": 0, "maximum": 9 },
            "options": {
                "type": "object",
                "properties": { "new": { "type": "boolean" } },
                "additionalProperties": false,
            },
        },
        "required": ["path", "lines"],
    })
}

/// The tool as chat completions have it.
fn tool() -> Value {
    json!({ "type": "function", "function": { "name": "write", "parameters": parameters() } })
}

fn server() -> TestServer {
    TestServer::with(TestOptions {
        template: Some(QWEN),
        special: &["<tool_call>", "</tool_call>"],
        ..TestOptions::default()
    })
}

/// The objects of the events of a stream.
fn events(server: &TestServer, path: &str, request: &Value) -> Vec<Value> {
    let events = post(server.address, path, request).events();
    let events = events.iter();
    events
        .map(|(_, data)| serde_json::from_str(data).unwrap())
        .collect()
}

/// The joined texts of a field of events.
fn joined(events: &[Value], field: &str) -> String {
    events
        .iter()
        .filter_map(|event| event.pointer(field)?.as_str())
        .collect()
}

/// Checks that arguments follow the schema.
#[track_caller]
fn check_arguments(arguments: &Value) {
    let path = arguments["path"].as_str().unwrap();
    assert!(path.chars().count() <= 12, "{arguments}");
    assert!(arguments["lines"].as_u64().unwrap() <= 9, "{arguments}");
    let options = arguments.get("options");
    assert!(options.is_none_or(Value::is_object), "{arguments}");
}

#[test]
fn chat_completions_have_calls_with_typed_arguments() {
    let server = server();
    let mut request = say(CALL, json!({ "tools": [tool()] }));
    let answer = ask(server.address, PATH, &request);
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Let me see.");
    assert_eq!(
        choice["message"]["tool_calls"][0]["function"],
        json!({ "name": "write", "arguments": ARGUMENTS })
    );
    request["stream"] = true.into();
    let chunks = post(server.address, PATH, &request).chunks();
    let field = |field: &str| joined(&chunks, &format!("/choices/0/delta/{field}"));
    assert_eq!(field("content"), "Let me see.");
    assert_eq!(field("tool_calls/0/function/name"), "write");
    assert_eq!(field("tool_calls/0/function/arguments"), ARGUMENTS);
    let last = &chunks.last().unwrap()["choices"][0];
    assert_eq!(last["finish_reason"], "tool_calls");

    // An answer that is cut within a value is no call.
    let cut = CALL.split("a\"").next().unwrap();
    let request = say(cut, json!({ "tools": [tool()] }));
    let choice = &ask(server.address, PATH, &request)["choices"][0];
    assert_eq!(choice["message"]["content"], cut);
    // Without tools a call is text.
    let choice = &ask(server.address, PATH, &say(CALL, json!({})))["choices"][0];
    assert_eq!(choice["message"]["content"], CALL);
    let two = format!("{CALL}\n{}", CALL.replace("Let me see.\n", ""));
    for (parallel, count) in [(true, 2), (false, 1)] {
        let fields = json!({ "tools": [tool()], "parallel_tool_calls": parallel });
        let message = &ask(server.address, PATH, &say(&two, fields))["choices"][0]["message"];
        assert_eq!(message["tool_calls"].as_array().unwrap().len(), count);
    }
}

#[test]
fn messages_and_responses_have_calls_with_typed_arguments() {
    let server = server();
    let arguments: Value = serde_json::from_str(ARGUMENTS).unwrap();
    let mut request = json!({
        "model": "test/model",
        "max_tokens": 300,
        "messages": [{ "role": "user", "content": format!("\u{1}{CALL}\u{2}") }],
        "tools": [{ "name": "write", "input_schema": parameters() }],
    });
    let answer = ask(server.address, "/v1/messages", &request);
    assert_eq!(answer["stop_reason"], "tool_use");
    assert_eq!(answer["content"][0]["text"], "Let me see.");
    assert_eq!(answer["content"][1]["input"], arguments);
    request["stream"] = true.into();
    let events_of = events(&server, "/v1/messages", &request);
    assert_eq!(joined(&events_of, "/delta/partial_json"), ARGUMENTS);

    let tool = json!({ "type": "function", "name": "write", "parameters": parameters() });
    let mut request = json!({
        "model": "test/model",
        "input": format!("\u{1}{CALL}\u{2}"),
        "tools": [tool],
    });
    let answer = ask(server.address, "/v1/responses", &request);
    assert_eq!(answer["output"][0]["content"][0]["text"], "Let me see.");
    assert_eq!(answer["output"][1]["arguments"], ARGUMENTS);
    request["stream"] = true.into();
    let events_of = events(&server, "/v1/responses", &request);
    let deltas: Vec<_> = (events_of.into_iter())
        .filter(|event| event["type"] == "response.function_call_arguments.delta")
        .collect();
    assert_eq!(joined(&deltas, "/delta"), ARGUMENTS);
}

#[test]
fn calls_are_forced() {
    let server = server();
    for choice in [
        json!("required"),
        json!({ "type": "function", "function": { "name": "write" } }),
    ] {
        // A text that the grammar does not allow, a call, and a start of one.
        for script in [
            "No.",
            &CALL["Let me see.\n".len()..],
            "<tool_call>\n<function=write",
        ] {
            let fields = json!({ "tools": [tool()], "tool_choice": choice, "max_tokens": 400 });
            let answer = ask(server.address, PATH, &say(script, fields));
            let message = &answer["choices"][0]["message"];
            assert!(message["content"].is_null(), "{answer}");
            let function = &message["tool_calls"][0]["function"];
            assert_eq!(function["name"], "write", "{answer}");
            let arguments = function["arguments"].as_str().unwrap();
            check_arguments(&serde_json::from_str(arguments).unwrap());
        }
    }
    let request = json!({
        "model": "test/model",
        "max_tokens": 400,
        "messages": [{ "role": "user", "content": "Go." }],
        "tools": [{ "name": "write", "input_schema": parameters() }],
        "tool_choice": { "type": "any" },
    });
    let answer = ask(server.address, "/v1/messages", &request);
    check_arguments(&answer["content"][0]["input"]);
    let request = json!({
        "model": "test/model",
        "input": "Go.",
        "max_output_tokens": 400,
        "tools": [{ "type": "function", "name": "write", "parameters": parameters() }],
        "tool_choice": "required",
    });
    let answer = ask(server.address, "/v1/responses", &request);
    let arguments = answer["output"][0]["arguments"].as_str().unwrap();
    check_arguments(&serde_json::from_str(arguments).unwrap());
}

#[test]
fn the_template_writes_calls_of_a_conversation() {
    let server = server();
    let call = json!({ "name": "write", "arguments": ARGUMENTS });
    let messages = json!([
        { "role": "user", "content": "Write." },
        {
            "role": "assistant", "content": "Let me see.",
            "tool_calls": [{ "id": "c", "type": "function", "function": call }],
        },
        { "role": "tool", "tool_call_id": "c", "content": "done" },
    ]);
    let body = json!({ "messages": messages });
    let tokens = ask(server.address, "/tokenize", &body)["tokens"].clone();
    let text = ask(server.address, "/detokenize", &json!({ "tokens": tokens }));
    // Special tokens have no text.
    assert_eq!(
        text["prompt"],
        "[user]Write.[assistant]Let me see.\n<function=write>\n<parameter=path>\n/tmp/\"a\"\n\
         </parameter>\n<parameter=lines>\n3\n</parameter>\n<parameter=options>\n{\"new\": true}\n\
         </parameter>\n</function>\n[tool]done[assistant]"
    );
    // The other APIs have the same conversation.
    let count = |path: &str, field: &str, body: &Value| {
        let answer = ask(server.address, path, body);
        answer.pointer(field).unwrap().as_u64()
    };
    let tokens = tokens.as_array().map(|tokens| tokens.len() as u64);
    let input: Value = serde_json::from_str(ARGUMENTS).unwrap();
    let request = json!({
        "model": "test/model",
        "messages": [
            { "role": "user", "content": "Write." },
            { "role": "assistant", "content": [
                { "type": "text", "text": "Let me see." },
                { "type": "tool_use", "id": "c", "name": "write", "input": input },
            ] },
            { "role": "user", "content": [
                { "type": "tool_result", "tool_use_id": "c", "content": "done" },
            ] },
        ],
    });
    let path = "/v1/messages/count_tokens";
    assert_eq!(count(path, "/input_tokens", &request), tokens);
    let request = json!({
        "model": "test/model",
        "max_output_tokens": 1,
        "input": [
            { "role": "user", "content": "Write." },
            { "role": "assistant", "content": "Let me see." },
            { "type": "function_call", "call_id": "c", "name": "write", "arguments": ARGUMENTS },
            { "type": "function_call_output", "call_id": "c", "output": "done" },
        ],
    });
    assert_eq!(
        count("/v1/responses", "/usage/input_tokens", &request),
        tokens
    );
    let request = json!({ "model": "test/model", "messages": messages, "max_tokens": 1 });
    assert_eq!(count(PATH, "/usage/prompt_tokens", &request), tokens);
}

#[test]
fn seed_oss_has_its_own_tags() {
    let server = TestServer::with(TestOptions {
        template: Some(SEED),
        special: &[
            "<seed:think>",
            "</seed:think>",
            "<seed:tool_call>",
            "</seed:tool_call>",
        ],
        ..TestOptions::default()
    });
    let call = "<seed:tool_call>\n<function=write>\n<parameter=path>a</parameter>\n\
        <parameter=lines>2</parameter>\n</function>\n</seed:tool_call>";
    let request = say(
        &format!("<seed:think>\nHm.\n</seed:think>\nYes.\n{call}"),
        json!({ "tools": [tool()] }),
    );
    let message = &ask(server.address, PATH, &request)["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "Hm.");
    assert_eq!(message["content"], "Yes.");
    let function = &message["tool_calls"][0]["function"];
    assert_eq!(function["arguments"], r#"{"path": "a", "lines": 2}"#);
    // Reasoning comes before a call that is forced.
    for script in ["Hm.</seed:think>", "Hm.\n</seed:think>\n\nNo."] {
        let fields = json!({
            "tools": [tool()],
            "tool_choice": "required",
            "chat_template_kwargs": { "opens_reasoning": true },
            "max_tokens": 400,
        });
        let answer = ask(server.address, PATH, &say(script, fields));
        let message = &answer["choices"][0]["message"];
        assert_eq!(message["reasoning_content"], "Hm.", "{answer}");
        let arguments = &message["tool_calls"][0]["function"]["arguments"];
        check_arguments(&serde_json::from_str(arguments.as_str().unwrap()).unwrap());
    }
    let body = body(
        "Go.",
        json!({ "tools": [tool()], "tool_choice": "required", "max_tokens": 400 }),
    );
    let message = &ask(server.address, PATH, &body)["choices"][0]["message"];
    assert_eq!(message["tool_calls"][0]["function"]["name"], "write");
}
