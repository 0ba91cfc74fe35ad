//! Tests of calibration samples from texts and conversations.

use std::fs;

use serde_json::json;

use super::support::byte_level_tokenizer;
use crate::{ChatTemplate, ModelError, SampleOptions, Tokenizer, calibration_samples};

#[test]
fn samples_are_parts_of_documents() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join("tokenizer.json"),
        byte_level_tokenizer().to_string(),
    )
    .unwrap();
    let tokenizer = Tokenizer::open(&dir.path().join("tokenizer.json")).unwrap();
    let file = |name: &str, text: &str| {
        fs::write(dir.path().join(name), text).unwrap();
        dir.path().join(name)
    };
    let options = SampleOptions {
        samples: 3,
        max_len: 40,
        seed: 1,
    };
    let take = |files: &[std::path::PathBuf], options: &SampleOptions| {
        calibration_samples(files, &tokenizer, None, options)
    };
    // 1 + 100 tokens: two whole samples, and one of 21.
    let text = file("a.txt", &"0123456789".repeat(10));
    let mut found = take(std::slice::from_ref(&text), &options).unwrap();
    assert_eq!(
        take(std::slice::from_ref(&text), &options).unwrap(),
        found,
        "the same seed"
    );
    found.sort_by_key(Vec::len);
    assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [21, 40, 40]);
    // A long text has the same tokens although it is encoded in pieces; the last token, which would
    // be a sample of 1, is left out.
    let long = file("b.txt", &"a line of text\n".repeat(20_000));
    let all = take(
        &[long],
        &SampleOptions {
            samples: 7_500,
            max_len: 40,
            seed: 0,
        },
    )
    .unwrap();
    assert_eq!(all.iter().map(Vec::len).sum::<usize>(), 300_000);
    let documents = file(
        "c.jsonl",
        &format!(
            "{}\n\n{}\n",
            json!({ "text": "x".repeat(50) }),
            json!({ "text": "y".repeat(20) })
        ),
    );
    let mut found = take(
        &[documents],
        &SampleOptions {
            samples: 2,
            ..options
        },
    )
    .unwrap();
    found.sort_by_key(Vec::len);
    assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [21, 40]);

    let error = take(
        &[text],
        &SampleOptions {
            samples: 4,
            ..options
        },
    )
    .expect_err("too little text");
    assert!(matches!(
        error,
        ModelError::FewSamples {
            asked: 4,
            found: 3,
            max_len: 40
        }
    ));
    for line in [
        "{}",
        "text",
        r#"{"text": 3}"#,
        r#"{"messages": [{"role": "user", "content": "Hello"}]}"#,
    ] {
        let error = take(&[file("d.jsonl", &format!("\n{line}"))], &options).expect_err(line);
        assert!(
            matches!(error, ModelError::CalibrationLine { line: 2, .. }),
            "{line}: {error}"
        );
    }
}

/// Tests that a conversation in each form that files have gives the tokens of its rendered text.
#[test]
fn conversations_in_every_form_are_used() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join("tokenizer.json"),
        byte_level_tokenizer().to_string(),
    )
    .unwrap();
    let tokenizer = Tokenizer::open(&dir.path().join("tokenizer.json")).unwrap();
    let template = "{% for message in messages %}{% if message.role == 'critic' %}{{ raise_exception('no critic') }}{% endif %}<{{ message.role }}>{{ message.content }}\
                    {% for call in message.tool_calls %}[{{ call.function.name }} {{ call.function.arguments.city }}]{% endfor %}{% endfor %}";
    let template =
        ChatTemplate::compile(template, "chat_template.jinja".into(), Default::default()).unwrap();
    let take = |text: &str, samples| {
        let file = dir.path().join("chat.jsonl");
        fs::write(&file, text).unwrap();
        calibration_samples(
            &[file],
            &tokenizer,
            Some(&template),
            &SampleOptions {
                samples,
                max_len: 200,
                seed: 0,
            },
        )
    };
    let line = |messages: serde_json::Value| json!({ "messages": messages }).to_string();
    let call = |arguments: serde_json::Value| json!([{ "type": "function", "function": { "name": "weather", "arguments": arguments } }]);
    let question = json!({ "role": "user", "content": "What is the weather?" });
    let answer = |message: serde_json::Value| line(json!([question, message]));
    let asked = "<user>What is the weather?<assistant>";
    let used = [
        (
            answer(json!({ "role": "assistant", "content": "It rains." })),
            format!("{asked}It rains."),
        ),
        (
            answer(
                json!({ "role": "assistant", "content": [{ "type": "text", "text": "It " }, { "type": "text", "text": "rains." }] }),
            ),
            format!("{asked}It rains."),
        ),
        (
            answer(
                json!({ "role": "assistant", "content": null, "tool_calls": call(json!("{\"city\": \"Oslo\"}")) }),
            ),
            format!("{asked}[weather Oslo]"),
        ),
        (
            answer(json!({ "role": "assistant", "tool_calls": call(json!({ "city": "Bergen" })) })),
            format!("{asked}[weather Bergen]"),
        ),
    ];
    for (line, expected) in &used {
        for mark in ["", "\u{feff}"] {
            let found = take(&format!("{mark}{line}\n"), 1).unwrap();
            assert_eq!(
                found,
                [tokenizer.encode_rendered(expected).unwrap()],
                "{line}"
            );
        }
    }
    // Conversations that the model does not support are left out, and other conversations are used.
    let image = answer(
        json!({ "role": "assistant", "content": [{ "type": "image_url", "image_url": "https://example.org/a.png" }] }),
    );
    let critic = answer(json!({ "role": "critic", "content": "Well." }));
    let text = [&image, &used[0].0, &critic, &used[2].0]
        .map(String::as_str)
        .join("\n");
    assert_eq!(take(&text, 2).unwrap().len(), 2);
    assert!(matches!(
        take(&text, 3),
        Err(ModelError::FewSamples {
            asked: 3,
            found: 2,
            ..
        })
    ));
    for message in [
        json!({ "content": "no role" }),
        json!({ "role": "user" }),
        json!({ "role": "user", "content": 3 }),
    ] {
        let error = take(&line(json!([message])), 1).expect_err("no message");
        assert!(
            matches!(error, ModelError::CalibrationLine { line: 1, .. }),
            "{message}: {error}"
        );
    }
}
