use marlin_testing::random_pieces;
use rand::RngExt;

use super::*;

/// What a template ends with.
const PROMPT: &str = "<|start|>user<|message|>Well?<|end|><|start|>assistant";

/// What a message is, its tool and its text.
type Message<T> = (MessageKind, Option<T>, T);

/// Returns the messages of an answer that comes in pieces.
fn messages<'a>(prompt: &str, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Message<String>> {
    let mut parser = MessageParser::new(prompt);
    let mut deltas = Vec::new();
    for piece in pieces {
        deltas.extend(parser.push(piece));
    }
    deltas.extend(parser.finish());
    assert_eq!(parser.finish(), []);
    let mut messages = Vec::new();
    let mut is_open = false;
    for delta in deltas {
        match delta {
            MessageDelta::Start { kind, tool } => {
                assert!(!is_open);
                is_open = true;
                messages.push((kind, tool, String::new()));
            }
            MessageDelta::Text(text) => {
                assert!(is_open && !text.is_empty());
                messages.last_mut().unwrap().2 += &text;
            }
            MessageDelta::End => {
                assert!(is_open);
                is_open = false;
            }
        }
    }
    assert!(!is_open);
    messages
}

#[test]
fn an_answer_is_divided_into_messages() {
    use MessageKind::{Content, Reasoning};
    let cases: [(&str, &[Message<&str>]); 8] = [
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
            &[(Reasoning, None, "a"), (Content, None, "b")],
        ),
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"<|message|>\"}<|call|>",
            &[(Content, Some("f"), "{\"<|message|>\"}")],
        ),
        (
            "<|channel|>final<|message|>a<|message|>b<|end|> \n c",
            &[(Content, None, "ab"), (Content, None, "c")],
        ),
        (
            "<|channel|>analysis to=python code<|message|>x<|call|>",
            &[(Reasoning, None, "x")],
        ),
        ("Hello, <b>", &[(Content, None, "Hello, <b>")]),
        // Headers without a body; what follows a name and a type is text.
        ("<|channel|>commentary to=functions.f json<|end|>", &[]),
        (
            "<|channel|>analysis Hm.<|end|>",
            &[(Reasoning, None, " Hm.")],
        ),
        ("<|channel|>final<|message|><|end|>", &[(Content, None, "")]),
    ];
    for (text, expected) in cases {
        let own =
            |&(kind, tool, text): &Message<&str>| (kind, tool.map(String::from), text.to_string());
        let expected: Vec<_> = expected.iter().map(own).collect();
        assert_eq!(messages(PROMPT, [text]), expected, "{text:?}");
    }
}

#[test]
fn an_answer_may_continue_a_message() {
    let start = |kind| vec![(kind, None, "So.".to_string())];
    for (header, kind, text) in [
        (
            "<|channel|>analysis",
            MessageKind::Reasoning,
            "<|message|>So.",
        ),
        (
            "<|channel|>analysis<|message|>",
            MessageKind::Reasoning,
            "So.",
        ),
        (
            "<|channel|>final<|message|>Well. <|mess",
            MessageKind::Content,
            "So.",
        ),
        // The start of the call is not in the answer.
        (
            " to=functions.f<|channel|>commentary<|message|>{",
            MessageKind::Content,
            "So.",
        ),
    ] {
        let prompt = format!("{PROMPT}{header}");
        assert_eq!(continues_body(&prompt), header.contains(MESSAGE));
        assert_eq!(messages(&prompt, [text]), start(kind), "{prompt}");
    }
    assert_eq!(messages("", ["So."]), start(MessageKind::Content));
}

/// Returns the text and the content of an answer that comes in pieces.
fn transcript<'a>(pieces: impl IntoIterator<Item = &'a str>) -> [String; 2] {
    let mut transcript = Transcript::new(PROMPT);
    let mut text: String = pieces
        .into_iter()
        .map(|piece| transcript.push(piece))
        .collect();
    let TranscriptEnd { rest, content } = transcript.finish();
    text += &rest;
    [text, content]
}

#[test]
fn a_transcript_has_reasoning_under_a_heading() {
    let cases = [
        (
            "<|channel|>final<|message|>Yes.<|return|>",
            ["Yes.", "Yes."],
        ),
        ("Yes. <|mess", ["Yes. <|mess", "Yes. <|mess"]),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>c",
            ["[analysis]\na\n\nb\n\n[final]\nc", "c"],
        ),
        (
            "<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>c",
            ["a\n\n[analysis]\nb\n\n[final]\nc", "a\n\nc"],
        ),
        ("<|channel|>analysis<|message|>a", ["[analysis]\na", ""]),
        ("<|channel|>analysis<|message|><|end|>", ["", ""]),
        ("", ["", ""]),
    ];
    for (text, expected) in cases {
        assert_eq!(transcript([text]), expected, "{text:?}");
    }
}

/// 50,000 answers of random parts take 1 s.
#[test]
fn pieces_change_nothing() {
    const PARTS: [&str; 12] = [
        "<|",
        "|>",
        "<",
        " ",
        "\n",
        "é",
        "text",
        "assistant",
        " to=functions.f",
        "analysis",
        "final",
        "<|channel|>analysis<|message|>",
    ];
    let mut rng = marlin_testing::rng();
    for _ in 0..50_000 {
        let text: String = (0..rng.random_range(0..16))
            .map(|_| match rng.random_bool(0.5) {
                true => MARKERS[rng.random_range(0..MARKERS.len())],
                false => PARTS[rng.random_range(0..PARTS.len())],
            })
            .collect();
        let pieces = random_pieces(&text, 11, &mut rng);
        let whole = messages(PROMPT, [text.as_str()]);
        assert_eq!(messages(PROMPT, pieces.iter().copied()), whole, "{text:?}");
        let whole = transcript([text.as_str()]);
        assert_eq!(transcript(pieces), whole, "{text:?}");
    }
}
