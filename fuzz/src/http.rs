//! Seeds and operations for fuzz targets of what clients of a server send and of what models write.
//!
//! `crates/marlin-http/tests/http/fuzz.rs` includes this module, and runs it on mutated inputs
//! wherever the tests run.

use std::collections::BTreeSet;

use marlin_http::check_body;
use marlin_http::harmony::{HarmonyDelta, HarmonyParser};
use marlin_http::reasoning::{ReasoningDelta, ReasoningParser, ReasoningTags};
use marlin_http::tools::{ToolCall, ToolFormat, ToolParser, ToolSchema, ToolTypes, collect};
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::errors::check_error;

/// Returns valid requests of every route that takes a body, for a model with the name `alias`.
pub fn requests() -> Vec<(&'static str, Value)> {
    let tool = json!({
        "type": "function",
        "function": { "name": "f", "description": "d", "parameters": { "type": "object" } },
    });
    let messages = json!([
        { "role": "system", "content": "s" },
        { "role": "user", "content": [{ "type": "text", "text": "\u{1}a\u{2}" }] },
    ]);
    let bodies = [
        (
            "/v1/chat/completions",
            json!({
                "model": "alias", "messages": messages, "max_tokens": 4, "n": 2, "seed": 1,
                "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "stream": true,
                "stream_options": { "include_usage": true }, "tools": [tool],
                "tool_choice": "auto", "logprobs": true, "top_logprobs": 1,
            }),
        ),
        (
            "/v1/chat/completions",
            json!({
                "model": "alias", "messages": messages, "max_completion_tokens": 4,
                "response_format": { "type": "json_object" }, "logit_bias": {}, "min_p": 0.1,
                "top_k": 4, "presence_penalty": 1, "repetition_penalty": 1.1, "user": "u",
            }),
        ),
        (
            "/v1/completions",
            json!({
                "model": "alias", "prompt": ["a", "b"], "max_tokens": 4, "n": 1, "echo": true,
                "stop": "x", "stream": false, "seed": -1, "suffix": null,
            }),
        ),
        (
            "/v1/completions",
            json!({ "model": "alias", "prompt": [256, 97], "max_tokens": 2 }),
        ),
        (
            "/tokenize",
            json!({ "model": "alias", "messages": messages, "tools": [tool] }),
        ),
        (
            "/detokenize",
            json!({ "model": "alias", "tokens": [97, 98] }),
        ),
        (
            "/v1/messages",
            json!({
                "model": "alias", "max_tokens": 4, "system": "s", "stop_sequences": ["x"],
                "messages": [{ "role": "user", "content": [{ "type": "text", "text": "a" }] }],
                "tools": [{ "name": "f", "input_schema": { "type": "object" } }],
                "tool_choice": { "type": "auto" }, "stream": true, "temperature": 0.5,
            }),
        ),
        (
            "/v1/messages/count_tokens",
            json!({
                "model": "alias", "system": [{ "type": "text", "text": "s" }],
                "tools": [{ "name": "f", "input_schema": { "type": "object" } }],
                "messages": [
                    { "role": "user", "content": "a" },
                    {
                        "role": "assistant",
                        "content": [{ "type": "tool_use", "id": "t", "name": "f", "input": {} }],
                    },
                    {
                        "role": "user",
                        "content": [{ "type": "tool_result", "tool_use_id": "t", "content": "2" }],
                    },
                ],
            }),
        ),
        (
            "/v1/chat/completions",
            json!({
                "model": "alias", "messages": messages, "max_tokens": 40, "tools": [tool],
                "tool_choice": { "type": "function", "function": { "name": "f" } },
            }),
        ),
        (
            "/v1/chat/completions",
            json!({
                "model": "alias", "messages": messages, "max_tokens": 20,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "s",
                        "schema": {
                            "type": "object", "required": ["a"], "additionalProperties": false,
                            "properties": {
                                "a": { "anyOf": [{ "type": "boolean" }, { "enum": ["x", 1] }] },
                                "b": { "type": "array", "items": { "type": "string" } },
                            },
                        },
                    },
                },
            }),
        ),
        (
            "/v1/completions",
            json!({ "model": "alias", "prompt": "a", "max_tokens": 9, "regex": "[a-c]{2}x?" }),
        ),
        (
            "/v1/responses",
            json!({
                "model": "alias", "max_output_tokens": 4, "instructions": "i", "stream": true,
                "input": [{ "role": "user", "content": [{ "type": "input_text", "text": "a" }] }],
                "text": { "format": { "type": "text" } }, "store": false,
                "include": ["message.output_text.logprobs"], "top_logprobs": 1,
            }),
        ),
        (
            "/v1/responses",
            json!({
                "model": "alias", "max_output_tokens": 4, "tool_choice": "auto",
                "tools": [{ "type": "function", "name": "f", "parameters": { "type": "object" } }],
                "input": [
                    { "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}" },
                    { "type": "function_call_output", "call_id": "c", "output": "2" },
                ],
            }),
        ),
    ];
    bodies.into()
}

/// Returns the routes that take a body.
fn routes() -> Vec<&'static str> {
    let routes: BTreeSet<_> = requests().into_iter().map(|(path, _)| path).collect();
    routes.into_iter().collect()
}

/// Returns [`requests`] as inputs of [`body`].
pub fn body_seeds() -> Vec<Vec<u8>> {
    let routes = routes();
    let seeds = requests().into_iter().map(|(path, body)| {
        let route = routes.iter().position(|route| *route == path);
        let selector = route.expect("it is of a request") as u8;
        [&[selector], body.to_string().as_bytes()].concat()
    });
    seeds.collect()
}

/// Checks a body. The first byte of `data` selects the route; the body follows. Returns true if the
/// body is a request.
pub fn body(data: &[u8]) -> bool {
    let Some((&selector, body)) = data.split_first() else {
        return false;
    };
    let routes = routes();
    match check_body(routes[usize::from(selector) % routes.len()], body) {
        Ok(()) => true,
        Err(error) => {
            check_error(&error);
            assert!(error.status().is_client_error(), "{error}");
            false
        }
    }
}

/// Returns answers with calls, as inputs of [`tool_call`].
pub fn tool_call_seeds() -> Vec<Vec<u8>> {
    let xml = "\n<function=f>\n<parameter=i>\n1\n</parameter>\n<parameter=s>\na <b>\n</parameter>\n\
        <parameter=o>\n{\"a\": [null]}\n</parameter>\n</function>\n";
    let seeds = ToolFormat::ALL.into_iter().enumerate();
    let seeds = seeds.map(|(selector, format)| {
        let object = r#"{"name": "f", "arguments": {"i": 1, "s": "a", "o": [{}]}}"#;
        let call = match format {
            ToolFormat::Hermes => format!("<tool_call>\n{object}\n</tool_call>"),
            ToolFormat::Llama3Json => format!("<|python_tag|>{object}; {object}"),
            ToolFormat::Mistral => format!("[TOOL_CALLS][{object}][TOOL_CALLS]f[ARGS]{{}}"),
            ToolFormat::Qwen3Coder => format!("<tool_call>{xml}</tool_call>"),
            ToolFormat::SeedOss => format!("<seed:tool_call>{xml}</seed:tool_call>"),
        };
        [
            &[selector as u8, 3],
            "Let me see.\n".as_bytes(),
            call.as_bytes(),
        ]
        .concat()
    });
    seeds.collect()
}

/// Divides the text of an answer into content and calls. The first byte of `data` selects the
/// format, the second is the length of the pieces in which the text also comes; the text follows.
/// Returns true if there is a call.
pub fn tool_call(data: &[u8]) -> bool {
    let [selector, length, text @ ..] = data else {
        return false;
    };
    let format = ToolFormat::ALL[usize::from(*selector) % ToolFormat::ALL.len()];
    let schema = json!({
        "properties": {
            "i": { "type": "integer" },
            "s": { "type": ["string", "null"] },
            "o": { "type": "object" },
        },
    });
    let types = ToolTypes::new([ToolSchema {
        name: "f",
        parameters: Some(&schema),
    }]);
    let text = String::from_utf8_lossy(text);
    let parse = |length| {
        let mut parser = ToolParser::new(format, types.clone());
        let pieces = pieces(&text, length);
        let mut deltas: Vec<_> = pieces.flat_map(|piece| parser.push(piece)).collect();
        deltas.extend(parser.finish());
        collect(deltas)
    };
    let (content, calls) = parse(usize::MAX);
    assert_eq!(
        parse(usize::from(*length)),
        (content.clone(), calls.clone())
    );
    for call in &calls {
        let arguments = call.arguments.as_str();
        assert!(arguments.starts_with('{') && arguments.ends_with('}'));
        assert!(serde_json::from_str::<IgnoredAny>(arguments).is_ok());
        assert!(!call.name.is_empty());
    }
    assert!(!calls.is_empty() || content == text);
    !calls.is_empty()
}

/// Returns answers with reasoning, as inputs of [`answer`].
pub fn answer_seeds() -> Vec<Vec<u8>> {
    let texts = [
        "<think>\nHm.\n</think>\n\nYes.",
        "Hm.\n</think>\nYes.",
        "<seed:think>Hm.</seed:think>Yes.",
        "Hm.</seed:think>Yes.",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": [1]}<|call|>",
    ];
    let texts = texts.into_iter().enumerate();
    let seeds = texts.map(|(selector, text)| [&[selector as u8, 3], text.as_bytes()].concat());
    seeds.collect()
}

/// Divides the text of an answer into reasoning and content. The first byte of `data` selects the
/// tags, and whether the prompt opens the reasoning, or the harmony format; the second is the
/// length of the pieces in which the text also comes; the text follows. Returns true if there is
/// reasoning or a call.
pub fn answer(data: &[u8]) -> bool {
    let [selector, length, text @ ..] = data else {
        return false;
    };
    let text = String::from_utf8_lossy(text);
    let divide = |length| {
        let pieces = pieces(&text, length);
        match selector % 6 {
            0 => tagged(ReasoningTags::Think, "", pieces),
            1 => tagged(ReasoningTags::Think, "<think>\n", pieces),
            2 => tagged(ReasoningTags::Seed, "", pieces),
            3 => tagged(ReasoningTags::Seed, "<seed:think>", pieces),
            _ => channels(pieces),
        }
    };
    let whole = divide(usize::MAX);
    assert_eq!(divide(usize::from(*length)), whole);
    let (reasoning, _, calls) = whole;
    !reasoning.is_empty() || !calls.is_empty()
}

/// The reasoning, the content and the calls of an answer.
type Parts = (String, String, Vec<ToolCall>);

fn tagged<'a>(tags: ReasoningTags, prompt: &str, pieces: impl Iterator<Item = &'a str>) -> Parts {
    let mut parser = ReasoningParser::new(tags, prompt);
    let mut deltas: Vec<_> = pieces.flat_map(|piece| parser.push(piece)).collect();
    deltas.extend(parser.finish());
    let (mut reasoning, mut content) = (String::new(), String::new());
    for delta in deltas {
        match delta {
            ReasoningDelta::Reasoning(text) => reasoning += &text,
            ReasoningDelta::Content(text) => content += &text,
        }
    }
    (reasoning, content, Vec::new())
}

fn channels<'a>(pieces: impl Iterator<Item = &'a str>) -> Parts {
    let mut parser = HarmonyParser::new("<|start|>assistant", true);
    let mut deltas: Vec<_> = pieces.flat_map(|piece| parser.push(piece)).collect();
    deltas.extend(parser.finish());
    let (mut reasoning, mut answer) = (String::new(), Vec::new());
    for delta in deltas {
        match delta {
            HarmonyDelta::Reasoning(text) => reasoning += &text,
            HarmonyDelta::Answer(delta) => answer.push(delta),
        }
    }
    let (content, calls) = collect(answer);
    (reasoning, content, calls)
}

/// Divides a text into pieces of `length` characters.
fn pieces(text: &str, length: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = rest.char_indices().nth(length.max(1));
        let (piece, after) = rest.split_at(end.map_or(rest.len(), |(at, _)| at));
        rest = after;
        Some(piece)
    })
}
