//! Tests of `chat`.

use std::ffi::OsString;
use std::path::Path;

use crate::support::{Folder, args, run_with_input, shipped, succeed_json};

/// Returns the model's answer to the conversation so far, from `generate`.
fn answer(dir: &Path, history: &str) -> String {
    let args = args![
        "generate",
        dir,
        "--device",
        "flex",
        "--prompt",
        history,
        "--temperature",
        "0",
        "--max-new-tokens",
        "12",
        "--json"
    ];
    succeed_json(&args)["text"].as_str().unwrap().to_owned()
}

/// Returns arguments of `chat` for deterministic answers.
pub(crate) fn chat(dir: &Path, more: &[&str]) -> Vec<OsString> {
    let mut args = args![
        "chat",
        dir,
        "--device",
        "flex",
        "--temperature",
        "0",
        "--max-new-tokens",
        "12"
    ];
    args.extend(more.iter().map(OsString::from));
    args
}

#[test]
fn chat_remembers_the_turns_before() {
    let run = run_with_input(
        &chat(&shipped(), &["--system", "Be brief."]),
        b"Where is the dog?\nWhat did it eat?\n\nnot read\n",
    );
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert_eq!(
        run.stderr.matches("no chat template").count(),
        1,
        "{}",
        run.stderr
    );
    let answer = |history: &str| {
        answer(&shipped(), history)
            .split("\nUser:")
            .next()
            .unwrap()
            .to_owned()
    };
    let mut history = "System: Be brief.\nUser: Where is the dog?\nAssistant:".to_owned();
    let first = answer(&history);
    history.push_str(&format!("{first}\nUser: What did it eat?\nAssistant:"));
    let second = answer(&history);
    assert_eq!(run.stdout, format!("> {first}\n> {second}\n> "));
}

#[test]
fn chat_speaks_in_the_turns_of_the_models_template() {
    let template = "{{ bos_token }}{% for message in messages %}// {{ message.role }}\n{{ message.content }}\n{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}// assistant\n{% endif %}";
    let folder = Folder::shipped_with_template(template);
    let run = run_with_input(
        &chat(&folder.source, &["--system", "fn main() {"]),
        b"let x = 1;\nlet y = 2;\n",
    );
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(!run.stderr.contains("no chat template"), "{}", run.stderr);
    let mut history =
        "<|endoftext|>// system\nfn main() {\n// user\nlet x = 1;\n// assistant\n".to_owned();
    let first = answer(&folder.source, &history);
    history.push_str(&format!(
        "{first}\n<|endoftext|>// user\nlet y = 2;\n// assistant\n"
    ));
    let second = answer(&folder.source, &history);
    assert_eq!(run.stdout, format!("> {first}\n> {second}\n> "));
}

#[test]
fn the_reasoning_of_a_harmony_template_is_not_in_the_next_turn() {
    // The model knows no channels: all that it writes is in the one that the template opens.
    let template = "{% for message in messages %}// {{ message.role }}<|message|>\n{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|channel|>CHANNEL<|message|>{% endif %}";
    for (channel, heading) in [("analysis", "[analysis]\n"), ("final", "")] {
        let folder = Folder::shipped_with_template(&template.replace("CHANNEL", channel));
        let run = run_with_input(&chat(&folder.source, &[]), b"let x = 1;\nlet y = 2;\n");
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        let opening = format!("<|start|>assistant<|channel|>{channel}<|message|>");
        let mut history = format!("// user<|message|>\nlet x = 1;\n{opening}");
        let first = answer(&folder.source, &history);
        let content = match channel {
            "analysis" => "",
            _ => &first,
        };
        history = history.replace(
            &opening,
            &format!(
                "// assistant<|message|>\n{content}\n// user<|message|>\nlet y = 2;\n{opening}"
            ),
        );
        let second = answer(&folder.source, &history);
        let expected = format!("> {heading}{first}\n> {heading}{second}\n> ");
        assert_eq!(run.stdout, expected);
    }
}

#[test]
fn a_template_that_refuses_a_conversation_says_why() {
    let folder = Folder::shipped_with_template(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}x",
    );
    let run = run_with_input(
        &chat(&folder.source, &["--system", "Be brief."]),
        b"Hello\n",
    );
    assert_eq!(
        (run.code, run.stdout.as_str()),
        (Some(1), "> "),
        "{}",
        run.stderr
    );
    assert!(
        run.stderr.contains("error: ") && run.stderr.contains("tokenizer_config.json"),
        "{}",
        run.stderr
    );
    assert!(run.stderr.contains("no system here"), "{}", run.stderr);

    std::fs::write(folder.source.join("chat_template.jinja"), "{% if %}").unwrap();
    let run = run_with_input(&chat(&folder.source, &[]), b"Hello\n");
    assert_eq!(
        (run.code, run.stdout.as_str()),
        (Some(1), ""),
        "{}",
        run.stderr
    );
    assert!(
        run.stderr.contains("chat_template.jinja") && run.stderr.contains("syntax error"),
        "{}",
        run.stderr
    );
}
