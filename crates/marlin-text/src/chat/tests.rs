use marlin_format::with_causes;
use marlin_testing::{byte_level_tokenizer, golden_json};
use serde_json::{Value as Json, json};

use super::*;

/// Creates a temporary folder with these files.
fn folder(files: &[(&str, String)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn open(files: &[(&str, String)]) -> Result<Option<ChatTemplate>, TextError> {
    ChatTemplate::open(folder(files).path())
}

/// Renders one message with the template in `template`.
fn render(template: &str) -> Result<String, TextError> {
    let files = [("chat_template.jinja", template.to_string())];
    open(&files)
        .map(Option::unwrap)?
        .render(&[Message::user("Größe <4> \"µm\"")], true)
}

#[test]
fn published_templates_render_as_transformers_renders_them() {
    let golden = golden_json("chat_templates.json");
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() > 70, "{}", cases.len());
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let config = json!({
            "chat_template": golden["templates"][name], "bos_token": case["bos_token"], "eos_token": { "content": case["eos_token"] },
        });
        let template = open(&[("tokenizer_config.json", config.to_string())])
            .unwrap()
            .unwrap();
        let messages = case["messages"].as_array().unwrap().clone();
        let variables = case["variables"].as_object().cloned().unwrap_or_default();
        let rendered = template.render_with(
            messages.clone(),
            variables,
            case["add_generation_prompt"].as_bool().unwrap(),
        );
        match case["expected"].as_str() {
            Some(expected) => assert_eq!(rendered.unwrap(), expected, "{name}: {messages:?}"),
            None => {
                let error = with_causes(&rendered.expect_err("the template refuses"));
                assert!(
                    error.contains(case["error"].as_str().unwrap())
                        && error.contains("tokenizer_config.json"),
                    "{name}: {error}"
                );
            }
        }
    }
}

#[test]
fn templates_are_found_where_files_have_them() {
    let field = |text: &str| json!({ "chat_template": text }).to_string();
    let path = |files: &[(&str, String)]| {
        open(files)
            .unwrap()
            .map(|template| template.path().file_name().unwrap().to_owned())
    };
    assert_eq!(path(&[]), None);
    assert_eq!(path(&[("tokenizer_config.json", "{}".into())]), None);
    let all = [
        ("chat_template.json", field("c")),
        ("tokenizer_config.json", field("b")),
        ("chat_template.jinja", "a".into()),
    ];
    for (count, name, text) in [
        (1, "chat_template.json", "c"),
        (2, "tokenizer_config.json", "b"),
        (3, "chat_template.jinja", "a"),
    ] {
        assert_eq!(path(&all[..count]).unwrap(), name);
        assert_eq!(
            open(&all[..count])
                .unwrap()
                .unwrap()
                .render(&[], true)
                .unwrap(),
            text
        );
    }
    let named = json!({ "chat_template": [{ "name": "tool_use", "template": "t" }, { "name": "default", "template": "d" }] });
    assert_eq!(
        open(&[("tokenizer_config.json", named.to_string())])
            .unwrap()
            .unwrap()
            .render(&[], true)
            .unwrap(),
        "d"
    );
}

#[test]
fn special_tokens_come_from_either_file() {
    for (decoder, expected) in [
        (json!(null), "other</s><pad><image>False"),
        (json!({}), "<s></s><image>False"),
    ] {
        let config = json!({
            "bos_token": "<s>", "eos_token": { "content": "</s>" }, "pad_token": null, "image_token": "<image>", "added_tokens_decoder": decoder,
        });
        let files = [
            ("chat_template.jinja", "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ image_token }}{{ unk_token is defined }}".to_string()),
            ("tokenizer_config.json", config.to_string()),
            ("special_tokens_map.json", json!({ "bos_token": "other", "pad_token": "<pad>" }).to_string()),
        ];
        assert_eq!(
            open(&files).unwrap().unwrap().render(&[], true).unwrap(),
            expected
        );
    }
}

#[test]
fn jinja_is_set_up_as_in_python() {
    assert_eq!(
        render("{% if true %}\n  {% if add_generation_prompt %}\nx\n  {% endif %}\n{% endif %}\n")
            .unwrap(),
        "x\n"
    );
    assert_eq!(
        render("{{ messages[0]['content'] | tojson }}").unwrap(),
        r#""Größe <4> \"µm\"""#
    );
    assert_eq!(
        render("{{ {'b': [1, 2], 'a': none} | tojson }}").unwrap(),
        r#"{"b": [1, 2], "a": null}"#
    );
    assert_eq!(
        render("{{ {'b': [1]} | tojson(indent=2) }}").unwrap(),
        "{\n  \"b\": [\n    1\n  ]\n}"
    );
    assert_eq!(
        render("{{ messages[0].content.split(' ')[0].upper() }}{{ tools is none }}").unwrap(),
        "GRÖßETrue".replace('ß', "SS")
    );
    assert_eq!(
        render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}")
            .unwrap(),
        "1"
    );
    let year: u32 = render("{{ strftime_now('%Y') }}").unwrap().parse().unwrap();
    assert!((2024..2200).contains(&year));
    assert_eq!(
        render("a {%- generation -%} {{ 'b' }} {%- endgeneration %} c{# {% generation %} #}")
            .unwrap(),
        "ab c"
    );
}

#[test]
fn refusals_name_the_file_and_the_reason() {
    let refused =
        |files: &[(&str, String)]| with_causes(&open(files).expect_err("must be refused"));
    let error = refused(&[("chat_template.jinja", "{% for %}".into())]);
    assert!(
        error.contains("chat_template.jinja") && error.contains("syntax error"),
        "{error}"
    );
    let error = refused(&[(
        "tokenizer_config.json",
        json!({ "chat_template": 3 }).to_string(),
    )]);
    assert!(
        error.contains("tokenizer_config.json") && error.contains("holds 3"),
        "{error}"
    );
    let error = refused(&[(
        "tokenizer_config.json",
        json!({ "chat_template": [{ "name": "rag", "template": "" }] }).to_string(),
    )]);
    assert!(
        error.contains("\"rag\"") && error.contains("`default`"),
        "{error}"
    );
    let error = refused(&[("tokenizer_config.json", "{".into())]);
    assert!(
        error.contains("tokenizer_config.json") && error.contains("EOF"),
        "{error}"
    );

    let error =
        with_causes(&render("{{ raise_exception('no system message') }}").expect_err("refused"));
    assert!(
        error.contains("chat_template.jinja") && error.contains("no system message"),
        "{error}"
    );
    let error =
        with_causes(&render("{{ messages[0].content.bark() }}").expect_err("no such method"));
    assert!(error.contains("bark"), "{error}");
    let error = with_causes(&render("{{ strftime_now('%!') }}").expect_err("no such directive"));
    assert!(error.contains("strftime_now"), "{error}");
    let endless = "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}";
    let error = with_causes(&render(endless).expect_err("a hundred million steps"));
    assert!(error.contains("4000000 steps"), "{error}");
}

#[test]
fn rendered_texts_keep_their_special_tokens_and_gain_none() {
    let dir = folder(&[
        ("tokenizer.json", byte_level_tokenizer().to_string()),
        ("tokenizer_config.json", json!({ "bos_token": "<s>", "eos_token": "</s>" }).to_string()),
        (
            "chat_template.jinja",
            "{{ bos_token }}{% for m in messages %}{{ m.role[0] + ':' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}".into(),
        ),
    ]);
    let tokenizer = Tokenizer::open(&dir.path().join("tokenizer.json")).unwrap();
    let template = ChatTemplate::open(dir.path()).unwrap().unwrap();
    let messages = [
        Message::user("x"),
        Message::assistant("y"),
        Message::user("z"),
    ];
    let text = template.render(&messages, true).unwrap();
    assert_eq!(text, "<s>u:x\na:y</s>\nu:z\na:");
    let (bos, eos) = (
        tokenizer.token_id("<s>").unwrap().unwrap(),
        tokenizer.token_id("</s>").unwrap().unwrap(),
    );
    let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let expected = [vec![bos], bytes("u:x\na:y"), vec![eos], bytes("\nu:z\na:")].concat();
    assert_eq!(tokenizer.encode_rendered(&text).unwrap(), expected);
    assert_eq!(
        tokenizer.encode(&text).unwrap()[..2],
        [bos, bos],
        "what `encode` adds would be a second one"
    );

    assert_eq!(template.end_of_turn(&tokenizer), Some(eos));
    assert_eq!(template.stop_tokens(&tokenizer), [eos, eos]);
    let plain = ChatTemplate::compile(
        "{{ messages[-1].content }}.",
        "plain".into(),
        BTreeMap::new(),
    )
    .unwrap();
    assert_eq!(
        (plain.end_of_turn(&tokenizer), plain.stop_tokens(&tokenizer)),
        (None, vec![])
    );
}

#[test]
fn variables_reach_the_template_and_do_not_replace_the_messages() {
    let text = "{{ tools | tojson }} {{ enable_thinking }} {{ bos_token }} {{ messages | length }} \
                {{ add_generation_prompt }}";
    let tokens = BTreeMap::from([("bos_token".into(), "<s>".into())]);
    let template = ChatTemplate::compile(text, "template".into(), tokens).unwrap();
    let Json::Object(variables) = json!({
        "tools": [{ "z": 1, "a": 2 }],
        "enable_thinking": false,
        "messages": [1, 2, 3],
        "add_generation_prompt": true,
    }) else {
        unreachable!()
    };
    let text = template.render_with(Vec::new(), variables, false).unwrap();
    assert_eq!(text, r#"[{"z": 1, "a": 2}] False <s> 0 False"#);
}
