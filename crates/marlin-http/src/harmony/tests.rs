use marlin_testing::random_pieces;
use marlin_text::harmony::{CONSTRAIN, MARKERS, MESSAGE};
use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::{Value, json};

use super::*;
use crate::structure::NamedSchema;
use crate::tools::ToolDelta;

mod forced;

/// What a template ends with.
const PROMPT: &str = "<|start|>user<|message|>Well?<|end|><|start|>assistant";

/// A message of reasoning, and the start of the next.
const THOUGHT: &str = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";

/// The reasoning, the content and the calls of an answer.
type Parts = (String, String, Vec<[String; 2]>);

/// Divides an answer that comes in pieces, and checks the rules that hold for every answer.
fn divided<'a>(
    prompt: &str,
    tells_calls: bool,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Parts {
    let mut parser = HarmonyParser::new(prompt, tells_calls);
    let mut deltas = Vec::new();
    for piece in pieces {
        deltas.extend(parser.push(piece));
    }
    deltas.extend(parser.finish());
    let (mut reasoning, mut content, mut calls) = Parts::default();
    let mut open: Option<[String; 2]> = None;
    let mut next = 0;
    for delta in deltas {
        match delta {
            HarmonyDelta::Reasoning(text) => {
                assert!(open.is_none() && !text.is_empty());
                reasoning += &text;
            }
            HarmonyDelta::Answer(ToolDelta::Content(text)) => {
                assert!(open.is_none() && !text.is_empty());
                content += &text;
            }
            HarmonyDelta::Answer(ToolDelta::Start { index, name }) => {
                assert!(open.is_none() && index == next && tells_calls);
                (open, next) = (Some([name, String::new()]), next + 1);
            }
            HarmonyDelta::Answer(ToolDelta::Arguments { index, text }) => {
                assert_eq!(index + 1, next);
                open.as_mut().expect("a call")[1] += &text;
            }
            HarmonyDelta::Answer(ToolDelta::End { index }) => {
                assert_eq!(index + 1, next);
                let call = open.take().expect("a call");
                let arguments: Value = serde_json::from_str(&call[1]).unwrap();
                assert!(arguments.is_object());
                calls.push(call);
            }
            HarmonyDelta::Answer(ToolDelta::Malformed { index, text }) => {
                assert_eq!(index + 1, next);
                let call = open.take().expect("a call");
                assert!(text.contains(&call[1]), "{text} {call:?}");
                content += &text;
            }
        }
    }
    assert!(open.is_none());
    (reasoning, content, calls)
}

/// An answer, its reasoning, its content, and its calls.
type Case = (
    &'static str,
    &'static str,
    &'static str,
    &'static [[&'static str; 2]],
);

const CASES: &[Case] = &[
    (
        "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>final<|message|>Yes.\n<|return|>",
        "Hm. ",
        "Yes.\n",
        &[],
    ),
    ("<|channel|>final<|message|>Yes.", "", "Yes.", &[]),
    (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b",
        "a\n\nb",
        "",
        &[],
    ),
    // The recipient is after the channel, or after the role.
    (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": \"<|message|>}\"}<|call|>",
        "",
        "",
        &[["f", "{\"a\": \"<|message|>}\"}"]],
    ),
    (
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant to=functions.g-2<|channel|>commentary json<|message|> {}\n<|call|>",
        "Look.",
        "",
        &[["g-2", "{}"]],
    ),
    (
        " to=functions.f<|channel|>commentary<|message|>{\"a\":[1]}",
        "",
        "",
        &[["f", "{\"a\":[1]}"]],
    ),
    (
        "<|channel|>analysis to=functions.f code<|message|>{}<|call|>",
        "",
        "",
        &[["f", "{}"]],
    ),
    (
        "<|channel|>commentary to=functions.f<|channel|>commentary<|constrain|>json<|message|>{}",
        "",
        "",
        &[["f", "{}"]],
    ),
    // What is said before a call, and two calls.
    (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|end|><|start|>assistant<|channel|>commentary to=g<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>Done.",
        "",
        "I look.\n\nDone.",
        &[["f", "{}"], ["g", "{}"]],
    ),
    // Tools of the model's own, and a message to a speaker.
    (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        "print(1)",
        "",
        &[],
    ),
    (
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{}<|end|>",
        "",
        "{}",
        &[],
    ),
    // The channel is unknown or missing, or all of the header is.
    ("<|channel|>other<|message|>a", "", "a", &[]),
    ("<|message|>a<|end|><|message|>b", "", "a\n\nb", &[]),
    ("Hello, <b>.\n", "", "Hello, <b>.\n", &[]),
    (" <|mess", "", " <|mess", &[]),
    ("", "", "", &[]),
    // Headers without a body.
    ("<|channel|>ana", "", "", &[]),
    ("<|channel|>final <|constrain|>js", "", "", &[]),
    (
        "<|channel|>commentary to=functions.f json<|end|>",
        "",
        "",
        &[],
    ),
    (
        "<|channel|>final Yes, \n<i> it is.<|end|>",
        "",
        " Yes, \n<i> it is.",
        &[],
    ),
    ("<|channel|>analysis<|end|><|start|>assis", "", "", &[]),
    // Ends of messages that are missing, markers within texts, text outside of messages.
    (
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b<|channel|>final<|message|>c",
        "a",
        "b\n\nc",
        &[],
    ),
    (
        "<|channel|>final<|message|>a<|message|>b<|constrain|><|end|><|end|> \n c<|return|>",
        "",
        "ab\n\nc",
        &[],
    ),
    // Bodies that are not an object, not whole, or followed by text.
    (
        "<|channel|>commentary to=functions.f<|message|>f(x)<|call|>",
        "",
        "f(x)",
        &[],
    ),
    (
        "<|channel|>commentary to=functions.f<|message|>{\"a\" 1}<|call|>",
        "",
        "{\"a\" 1}",
        &[],
    ),
    (
        "<|channel|>commentary to=functions.f<|message|>{\"a\": [1<|call|><|start|>assistant<|channel|>final<|message|>Oh.",
        "",
        "{\"a\": [1\n\nOh.",
        &[],
    ),
    (
        "<|channel|>commentary to=functions.f<|message|>{} and {}<|call|>",
        "",
        "and {}",
        &[["f", "{}"]],
    ),
    (
        "<|channel|>commentary to=functions.f<|message|><|call|>",
        "",
        "",
        &[],
    ),
];

fn parts(reasoning: &str, content: &str, calls: &[[&str; 2]]) -> Parts {
    let calls = calls.iter().map(|call| call.map(String::from));
    (reasoning.into(), content.into(), calls.collect())
}

#[test]
fn answers_are_divided_by_their_channels() {
    for &(text, reasoning, content, calls) in CASES {
        let expected = parts(reasoning, content, calls);
        assert_eq!(divided(PROMPT, true, [text]), expected, "{text:?}");
    }
    // No tool may be called, or the answer goes on in a message.
    let call = "<|channel|>commentary to=functions.f json<|message|>{}<|call|>";
    assert_eq!(divided(PROMPT, false, [call]), parts("", "{}", &[]));
    let goes_on = format!("{PROMPT}<|channel|>final<|message|>It ");
    let text = "is.<|end|><|start|>assistant<|channel|>analysis<|message|>So.";
    assert_eq!(divided(&goes_on, true, [text]), parts("So.", "is.", &[]));
    let opened = format!("{PROMPT}<|channel|>analysis");
    assert_eq!(
        divided(&opened, true, ["<|message|>So."]),
        parts("So.", "", &[])
    );
    assert_eq!(
        divided("", true, [CASES[0].0]),
        divided(PROMPT, true, [CASES[0].0])
    );
}

#[test]
fn text_without_a_header_is_not_held_back() {
    let mut parser = HarmonyParser::new(PROMPT, true);
    let content = |text: &str| vec![HarmonyDelta::Answer(ToolDelta::Content(text.into()))];
    assert_eq!(parser.push("He"), content("He"));
    assert_eq!(parser.push("llo <"), content("llo "));
    let long = "x".repeat(1000);
    let header = format!("<|channel|>final {long}");
    assert_eq!(divided(PROMPT, true, [header.as_str()]).1.trim(), long);
    let header = format!("<|start|>assistant {long}");
    assert_eq!(divided(PROMPT, true, [header.as_str()]).1.trim(), long);
    let mut parser = HarmonyParser::new(PROMPT, true);
    let header = "<|channel|>commentary to=functions.f<|message|>";
    assert_eq!(parser.push(header), []);
    let start = ToolDelta::Start {
        index: 0,
        name: "f".into(),
    };
    let arguments = ToolDelta::Arguments {
        index: 0,
        text: "{\"a".into(),
    };
    let expected = [start, arguments].map(HarmonyDelta::Answer);
    assert_eq!(parser.push(" {\"a"), expected);
}

/// Returns an answer of random parts of others.
fn random_answer(rng: &mut StdRng) -> String {
    const PARTS: [&str; 14] = [
        "<|",
        "|>",
        "<",
        " ",
        "\n",
        "é",
        "text",
        "{\"a\": 1}",
        "{",
        "assistant",
        " to=functions.f",
        "analysis",
        "final",
        "commentary",
    ];
    let mut text = String::new();
    for _ in 0..rng.random_range(0..16) {
        text += match rng.random_range(0..9) {
            0..4 => MARKERS[rng.random_range(0..MARKERS.len())],
            4..8 => PARTS[rng.random_range(0..PARTS.len())],
            _ => CASES[rng.random_range(0..CASES.len())].0,
        };
    }
    text
}

fn of_arguments(marker: &str) -> bool {
    matches!(marker, MESSAGE | CONSTRAIN)
}

/// 50,000 answers of random parts take 2 s.
#[test]
fn pieces_change_nothing() {
    let mut rng = marlin_testing::rng();
    for _ in 0..50_000 {
        let text = random_answer(&mut rng);
        let tells_calls = rng.random_bool(0.8);
        let whole = divided(PROMPT, tells_calls, [text.as_str()]);
        let longest = rng.random_range(1..19);
        let pieces = random_pieces(&text, longest, &mut rng);
        assert_eq!(divided(PROMPT, tells_calls, pieces), whole, "{text:?}");
        // The bodies of an answer have no markers, but the arguments of a call may.
        for marker in MARKERS.into_iter().filter(|marker| !of_arguments(marker)) {
            assert!(!whole.0.contains(marker), "{text:?}");
        }
    }
}

#[test]
fn conversations_have_the_form_that_the_template_reads() {
    let call = |id: &str| json!({ "id": id, "function": { "name": id, "arguments": {} } });
    let result = |id: &str| json!({ "role": "tool", "tool_call_id": id, "content": id });
    let messages = vec![
        json!({ "role": "system", "content": "a" }),
        json!({ "role": "user", "content": "u" }),
        json!({
            "role": "assistant",
            "content": "c",
            "reasoning_content": "r",
            "tool_calls": [call("x"), call("y"), call("z")],
        }),
        result("y"),
        result("x"),
        result("w"),
        json!({ "role": "system", "content": "b" }),
        json!({ "role": "assistant", "content": "c", "reasoning_content": "r" }),
    ];
    let tools = vec![
        json!({ "type": "function", "function": { "name": "f" } }),
        json!({ "type": "function", "function": { "name": "g", "description": "G." } }),
    ];
    let adapted = Adapted::new(messages, tools, None);
    let with = |id: &str| json!({ "role": "assistant", "content": "", "tool_calls": [call(id)] });
    let mut first = with("x");
    first["thinking"] = "r\n\nc".into();
    assert_eq!(
        adapted.messages,
        [
            json!({ "role": "system", "content": "a\n\nb" }),
            json!({ "role": "user", "content": "u" }),
            first,
            result("x"),
            with("y"),
            result("y"),
            with("z"),
            result("w"),
            json!({ "role": "assistant", "content": "c", "thinking": "r" }),
        ]
    );
    let descriptions = adapted.tools.iter();
    let descriptions = descriptions.map(|tool| &tool["function"]["description"]);
    assert!(descriptions.eq(["", "G."]));
}

#[test]
fn the_schema_of_the_answer_is_at_the_end_of_the_instructions() {
    let user = json!({ "role": "user", "content": "u" });
    let system = json!({ "role": "system", "content": "Be brief." });
    let content = |messages: &[&Value], schema: &NamedSchema| {
        let messages = messages.iter().copied().cloned().collect();
        let adapted = Adapted::new(messages, Vec::new(), Some(schema));
        assert_eq!(adapted.messages.len(), 2);
        assert_eq!(adapted.messages[1], user);
        adapted.messages[0]["content"].clone()
    };
    let mut schema = NamedSchema::new(&json!({ "type": "object" }));
    assert_eq!(
        content(&[&user], &schema),
        "# Response Formats\n\n## response\n\n{\"type\":\"object\"}"
    );
    schema = schema.named("switch");
    schema.description = Some("A switch.\nOn or off.".into());
    assert_eq!(
        content(&[&system, &user], &schema),
        "Be brief.\n\n# Response Formats\n\n## switch\n\n// A switch.\n// On or off.\n{\"type\":\"object\"}"
    );
}
