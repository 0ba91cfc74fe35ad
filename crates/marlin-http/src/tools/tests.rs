use marlin_testing::random_pieces;
use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::{Value, json};

use super::*;

pub(crate) mod forced;
mod xml;

/// Returns the parts of an answer that comes in pieces, with neighbours of one kind joined.
fn parsed<'a>(format: ToolFormat, pieces: impl IntoIterator<Item = &'a str>) -> Vec<ToolDelta> {
    let mut parser = ToolParser::new(format, xml::types());
    let mut deltas: Vec<ToolDelta> = Vec::new();
    for piece in pieces {
        deltas.extend(parser.push(piece));
    }
    deltas.extend(parser.finish());
    let mut joined: Vec<ToolDelta> = Vec::new();
    for delta in deltas {
        match (joined.last_mut(), delta) {
            (Some(ToolDelta::Content(last)), ToolDelta::Content(text)) => last.push_str(&text),
            (Some(ToolDelta::Arguments { text: last, .. }), ToolDelta::Arguments { text, .. }) => {
                last.push_str(&text)
            }
            (_, delta) => joined.push(delta),
        }
    }
    joined
}

/// Checks the rules that hold for every answer, and returns its parts.
fn check(format: ToolFormat, text: &str) -> Vec<ToolDelta> {
    let deltas = parsed(format, [text]);
    let is_xml = matches!(format, ToolFormat::Qwen3Coder | ToolFormat::SeedOss);
    let mut open = None;
    let mut next = 0;
    for delta in &deltas {
        match delta {
            ToolDelta::Content(text) => assert!(open.is_none() && !text.is_empty()),
            ToolDelta::Start { index, name } => {
                assert!(open.is_none() && *index == next && !name.is_empty());
                (open, next) = (Some(String::new()), next + 1);
            }
            ToolDelta::Arguments { index, text } => {
                assert_eq!(index + 1, next);
                open.as_mut().expect("a call").push_str(text);
            }
            ToolDelta::End { index } => {
                assert_eq!(index + 1, next);
                let arguments = open.take().expect("a call");
                let is_object = arguments.starts_with('{') && arguments.ends_with('}');
                let json = serde_json::from_str::<serde::de::IgnoredAny>(&arguments);
                assert!(is_object && json.is_ok(), "{arguments} in {text:?}");
            }
            ToolDelta::Malformed { index, text: raw } => {
                assert_eq!(index + 1, next);
                let arguments = open.take().expect("a call");
                // The arguments of XML are written anew.
                assert!((is_xml || raw.contains(&arguments)) && text.contains(raw.as_str()));
            }
        }
    }
    assert!(open.is_none(), "{deltas:?}");
    let (content, calls) = collect(deltas.clone());
    if calls.is_empty() {
        assert_eq!(content, text, "content of {format:?}");
    }
    deltas
}

/// An answer, its content, and its calls.
type Case = (
    ToolFormat,
    &'static str,
    &'static str,
    &'static [[&'static str; 2]],
);

const CASES: &[Case] = {
    use ToolFormat::{Hermes, Llama3Json, Mistral};
    &[
        (Hermes, "Hello <b>.\n", "Hello <b>.\n", &[]),
        (
            Hermes,
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}}\n</tool_call>",
            "",
            &[["f", "{\"a\": [1, \"}\"]}"]],
        ),
        (
            Hermes,
            "Let me see.\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n<tool_call>\n{\"arguments\": {\"x\": \"</tool_call>\"}, \"id\": [1], \"name\": \"g\\u00e9\"}</tool_call>\nDone. ",
            "Let me see.Done. ",
            &[["f", "{}"], ["gé", "{\"x\": \"</tool_call>\"}"]],
        ),
        // The closing tag is missing.
        (
            Hermes,
            "<tool_call>{\"name\":\"f\",\"arguments\":{}} <tool_call>{\"name\":\"g\",\"arguments\":{}}",
            "",
            &[["f", "{}"], ["g", "{}"]],
        ),
        (
            Hermes,
            "<tool_call> {\"name\":\"f\",\"arguments\":{}}</tool_x",
            "</tool_x",
            &[["f", "{}"]],
        ),
        // Malformed: no arguments, no object, a name of the wrong type, a brace too few, too short.
        (
            Hermes,
            " <tool_call>{\"name\": \"f\"}</tool_call>",
            " <tool_call>{\"name\": \"f\"}</tool_call>",
            &[],
        ),
        (Hermes, "<tool_call>f(x)", "<tool_call>f(x)", &[]),
        (
            Hermes,
            "<tool_call>{\"arguments\": {}, \"name\": 1}",
            "<tool_call>{\"arguments\": {}, \"name\": 1}",
            &[],
        ),
        (
            Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}</tool_call> <tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>",
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}</tool_call>",
            &[["g", "{}"]],
        ),
        (
            Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b",
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b",
            &[],
        ),
        (
            Hermes,
            "<tool_call><tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>",
            "<tool_call>",
            &[["f", "{}"]],
        ),
        (
            Llama3Json,
            "{\"name\": \"f\", \"parameters\": {\"a\": -1.5e3}}",
            "",
            &[["f", "{\"a\": -1.5e3}"]],
        ),
        (
            Llama3Json,
            "\n<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {}}\n{\"name\": \"h\", \"parameters\": {}}",
            "",
            &[["f", "{}"], ["g", "{}"], ["h", "{}"]],
        ),
        (
            Llama3Json,
            "Look: <|python_tag|>{\"name\": \"f\", \"arguments\": {}}",
            "Look:",
            &[["f", "{}"]],
        ),
        (
            Llama3Json,
            "{\"name\": \"Bob\"}",
            "{\"name\": \"Bob\"}",
            &[],
        ),
        (Llama3Json, "{x} is a set; {}", "{x} is a set; {}", &[]),
        (
            Llama3Json,
            "a {\"name\": \"f\", \"parameters\": {}}",
            "a {\"name\": \"f\", \"parameters\": {}}",
            &[],
        ),
        (
            Llama3Json,
            "{\"name\": \"f\", \"parameters\": {}} ;; so",
            ";; so",
            &[["f", "{}"]],
        ),
        (
            Llama3Json,
            "<|python_tag|>search.call(query=\"x\")",
            "<|python_tag|>search.call(query=\"x\")",
            &[],
        ),
        (
            Mistral,
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": \"[\"}}, {\"arguments\": {}, \"name\": \"g\", \"id\": \"012345678\"}]",
            "",
            &[["f", "{\"a\": \"[\"}"], ["g", "{}"]],
        ),
        (
            Mistral,
            "So: [TOOL_CALLS]f[ARGS]{\"a\": {}}[TOOL_CALLS]g-2[CALL_ID]012345678[ARGS] {}[TOOL_CALLS]h{}",
            "So:",
            &[["f", "{\"a\": {}}"], ["g-2", "{}"], ["h", "{}"]],
        ),
        (Mistral, "a [TOOL] b[0]", "a [TOOL] b[0]", &[]),
        (Mistral, "[TOOL_CALLS][]", "[TOOL_CALLS][]", &[]),
        (Mistral, "[TOOL_CALLS]f g", "[TOOL_CALLS]f g", &[]),
        (Mistral, "[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS][ARGS]{}", &[]),
        (
            Mistral,
            "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}, x]",
            ", x]",
            &[["f", "{}"]],
        ),
        (
            Mistral,
            "[TOOL_CALLS]f[ARGS]{\"a\" 1}[TOOL_CALLS]g[ARGS]{}",
            "[TOOL_CALLS]f[ARGS]{\"a\" 1}",
            &[["g", "{}"]],
        ),
    ]
};

#[test]
fn answers_are_divided_into_content_and_calls() {
    for &(format, text, content, calls) in CASES {
        let found = collect(parsed(format, [text]));
        let call = |&[name, arguments]: &[&str; 2]| ToolCall {
            name: name.into(),
            arguments: arguments.into(),
        };
        let expected = (content.to_string(), calls.iter().map(call).collect());
        assert_eq!(found, expected, "{format:?}: {text:?}");
        check(format, text);
    }
}

#[test]
fn a_name_comes_before_arguments_are_complete() {
    let mut parser = ToolParser::new(ToolFormat::Hermes, ToolTypes::default());
    assert_eq!(parser.push("<tool_call>{\"name\": \"f\", \"argum"), []);
    let start = ToolDelta::Start {
        index: 0,
        name: "f".into(),
    };
    let arguments = |text: &str| ToolDelta::Arguments {
        index: 0,
        text: text.into(),
    };
    assert_eq!(parser.push("ents\": {\"a"), [start, arguments("{\"a")]);
    assert_eq!(parser.push("\": 1"), [arguments("\": 1")]);
    let end = ToolDelta::End { index: 0 };
    assert_eq!(parser.push("}} </tool"), [arguments("}"), end]);
    assert_eq!(parser.finish(), []);
}

/// Returns an answer that was changed in up to five places.
fn mutated(rng: &mut StdRng, text: &str) -> String {
    const PARTS: [&str; 26] = [
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        ",",
        ":",
        " ",
        "\n",
        "é",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<seed:tool_call>",
        "</seed:tool_call>",
        "<function=f>",
        "<function=",
        "</function>",
        "<parameter=i>",
        "<parameter=",
        "</parameter>",
        "<",
        ">",
    ];
    let mut text: Vec<char> = text.chars().collect();
    for _ in 0..rng.random_range(0..6) {
        let at = rng.random_range(0..=text.len());
        let end = rng.random_range(at..=text.len().min(at + 8));
        let part = PARTS[rng.random_range(0..PARTS.len())];
        match rng.random_range(0..4) {
            0 => drop(text.drain(at..end)),
            1 => drop(text.splice(at..at, part.chars())),
            2 => drop(text.splice(at..end, part.chars())),
            _ => {
                let copied = text[at..end].to_vec();
                let to = rng.random_range(0..=text.len());
                text.splice(to..to, copied);
            }
        }
    }
    text.into_iter().collect()
}

/// 50,000 changed answers take 5 s.
#[test]
fn changed_answers_are_divided_the_same_in_any_pieces() {
    let mut rng = marlin_testing::rng();
    for _ in 0..50_000 {
        let (_, text, ..) = CASES[rng.random_range(0..CASES.len())];
        let text = mutated(&mut rng, text);
        let format = ToolFormat::ALL[rng.random_range(0..ToolFormat::ALL.len())];
        let whole = check(format, &text);
        let longest = rng.random_range(1..19);
        let pieces = random_pieces(&text, longest, &mut rng);
        assert_eq!(parsed(format, pieces), whole, "{format:?}: {text:?}");
    }
}

#[test]
fn formats_are_found_in_templates_and_by_name() {
    for format in ToolFormat::ALL {
        assert_eq!(ToolFormat::from_name(format.name()), Some(format));
    }
    let qwen = ToolFormat::from_name("qwen3_xml");
    assert_eq!(qwen, Some(ToolFormat::Qwen3Coder));
    assert_eq!(ToolFormat::from_name("pythonic"), None);
    let hermes = "return a json object within <tool_call></tool_call> XML tags";
    let llama = "<|start_header_id|> {\"name\": function name, \"parameters\": dictionary}";
    for (template, format) in [
        (hermes, Some(ToolFormat::Hermes)),
        (llama, Some(ToolFormat::Llama3Json)),
        ("[TOOL_CALLS][", Some(ToolFormat::Mistral)),
        ("<tool_call>\n<function=f>", Some(ToolFormat::Qwen3Coder)),
        (
            "set toolcall_begin_token = '<seed:tool_call>'; <function=f>",
            Some(ToolFormat::SeedOss),
        ),
        ("<tool_call>f\n<arg_key>a</arg_key>", None),
        ("<|im_start|>{{ message.content }}", None),
    ] {
        assert_eq!(ToolFormat::of_template(template), format, "{template}");
    }
}

#[test]
fn grammars_write_calls_with_the_markers_of_the_vocabulary() {
    let schema = json!({ "properties": { "a": { "type": "integer" } } });
    let tools = [
        ToolSchema {
            name: "f",
            parameters: Some(&schema),
        },
        ToolSchema {
            name: "g-2",
            parameters: None,
        },
    ];
    let token = |text: &str| (text != "</tool_call>").then_some(text.len() as u32);
    let grammar = ToolFormat::Hermes.grammar(&tools, true, token).unwrap();
    let lines: Vec<&str> = grammar.lines().collect();
    assert_eq!(
        lines,
        [
            r#"start: call ("\n" call)*"#,
            r#"call: <[11]> "\n" object "\n" "</tool_call>""#,
            r#"arguments_0: %json {"properties":{"a":{"type":"integer"}},"type":"object"}"#,
            r#"arguments_1: %json {"type":"object","additionalProperties":false}"#,
            r#"object: "{\"name\": \"f\", \"arguments\": " arguments_0 "}" | "{\"name\": \"g-2\", \"arguments\": " arguments_1 "}""#,
        ]
    );
    let one = ToolFormat::Mistral
        .grammar(&tools[1..], false, token)
        .unwrap();
    assert!(
        one.starts_with("start: call\ncall: <[12]> object\n"),
        "{one}"
    );
    assert!(
        one.ends_with("object: \"g-2\" <[6]> arguments_0\n"),
        "{one}"
    );
}

#[test]
fn tools_without_a_grammar_are_refused() {
    let refused = |name: &str, parameters: Option<&Value>| {
        let tool = ToolSchema { name, parameters };
        ToolFormat::Hermes
            .grammar(&[tool], false, |_| None)
            .unwrap_err()
            .to_string()
    };
    let none = ToolFormat::Hermes.grammar(&[], false, |_| None);
    assert_eq!(none, Err(ToolGrammarError::NoTools));
    for name in ["", "a b", "é", "a\"", &"x".repeat(65)] {
        assert!(
            refused(name, None).contains("the name of the tool"),
            "{name}"
        );
    }
    for (schema, found) in [
        (json!({ "type": "string" }), "of `type` \"string\""),
        (json!([]), "a list"),
        (json!(true), "true"),
    ] {
        let error = refused("f", Some(&schema));
        assert!(error.contains("`f`") && error.ends_with(found), "{error}");
    }
}
