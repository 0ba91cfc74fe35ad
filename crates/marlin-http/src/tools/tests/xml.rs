//! Calls as XML: `qwen3_coder` and `seed_oss`.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use super::*;
use crate::tools::tests::forced::{compiler, written};
use marlin_serve::grammar::GrammarSource;

/// The schema of the arguments of `f`, with a parameter of each type.
static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    json!({
        "type": "object",
        "properties": {
            "s": { "type": "string" },
            "i": { "type": "integer" },
            "x": { "type": "number" },
            "b": { "type": "boolean" },
            "z": { "type": "null" },
            "o": { "type": "object" },
            "l": { "type": "array" },
            "t": { "type": ["string", "null"] },
            "u": { "anyOf": [{ "type": "null" }, { "type": "integer" }] },
            "e": { "enum": ["a", null] },
            "r": { "$ref": "#/$defs/n" },
            "any": {},
            "loop": { "$ref": "#/properties/loop" },
        },
        "$defs": { "n": { "type": "integer" } },
    })
});

/// Returns the types of `f` and `digit`; the latter has a parameter `n`.
pub(super) fn types() -> ToolTypes {
    let digit = json!({ "properties": { "n": { "type": "integer" } } });
    let tool = |name, parameters| ToolSchema {
        name,
        parameters: Some(parameters),
    };
    ToolTypes::new([tool("f", &*SCHEMA), tool("digit", &digit)])
}

/// Returns an answer that calls `f`, as templates ask for it.
fn call(parameters: &[[&str; 2]]) -> String {
    let parameters = parameters
        .iter()
        .map(|[key, value]| format!("<parameter={key}>\n{value}\n</parameter>\n"));
    let parameters = parameters.collect::<String>();
    format!("<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>")
}

/// Returns the content and the calls of an answer in the form of Qwen, as `name arguments`.
fn found(text: &str) -> (String, Vec<String>) {
    let (content, calls) = collect(check(ToolFormat::Qwen3Coder, text));
    let calls = calls
        .into_iter()
        .map(|call| format!("{} {}", call.name, call.arguments));
    (content, calls.collect())
}

#[track_caller]
fn check_case(text: &str, content: &str, calls: &[&str]) {
    let (found_content, found_calls) = found(text);
    assert_eq!(found_content, content, "{text}");
    assert_eq!(found_calls, calls, "{text}");
}

#[test]
fn values_have_the_types_of_the_schema() {
    for (key, text, value) in [
        ("s", "a \"b\"\\\u{1}\té", r#""a \"b\"\\\u0001\té""#),
        ("s", "null", "\"null\""),
        ("s", "12", "\"12\""),
        ("s", "", "\"\""),
        ("s", "\n", "\"\\n\""),
        ("s", "\n a\n\n", r#""\n a\n\n""#),
        ("s", "a < b && c</b>", "\"a < b && c</b>\""),
        ("i", "-12", "-12"),
        ("i", " 7 ", "7"),
        ("i", "12345678901234567890123", "12345678901234567890123"),
        ("i", "seven", "\"seven\""),
        ("i", "null", "null"),
        ("x", "1.50", "1.50"),
        ("x", "1e999", "\"1e999\""),
        ("x", "NaN", "\"NaN\""),
        ("b", "true", "true"),
        ("b", "False", "false"),
        ("b", "yes", "\"yes\""),
        ("z", "None", "null"),
        ("o", "{\"a\": [1, {}]}", "{\"a\": [1, {}]}"),
        ("o", "{'a': 1}", "\"{'a': 1}\""),
        ("l", "[\n1,\n2\n]", "[\n1,\n2\n]"),
        ("l", "[1", "\"[1\""),
        ("t", "null", "null"),
        ("t", "None", "null"),
        ("t", "nul", "\"nul\""),
        ("t", "nullify", "\"nullify\""),
        ("t", "a\nb", "\"a\\nb\""),
        ("u", "null", "null"),
        ("u", "3", "3"),
        ("e", "a", "\"a\""),
        ("e", "null", "null"),
        ("r", "4", "4"),
        ("any", "5", "\"5\""),
        ("loop", "6", "\"6\""),
        ("unknown \"key\"", "7", "\"7\""),
    ] {
        let key_json = Value::from(key);
        check_case(
            &call(&[[key, text]]),
            "",
            &[&format!("f {{{key_json}: {value}}}")],
        );
    }
    // Without line breaks around values, and for a tool that is unknown.
    let calls = ["g {\"i\": \"1\", \"k\": \" a\"}"];
    let text = "<tool_call><function=g><parameter=i>1</parameter><parameter=k> a</parameter></function></tool_call>";
    check_case(text, "", &calls);
}

#[test]
fn calls_are_apart_from_content() {
    let one = call(&[["i", "1"], ["s", "a\nb"]]);
    let json = r#"f {"i": 1, "s": "a\nb"}"#;
    check_case(&one, "", &[json]);
    check_case(&format!("Let me see.\n\n{one}\n"), "Let me see.", &[json]);
    let text = format!("{one}\n{one}\n\n{} Done.", call(&[]));
    check_case(&text, "Done.", &[json, json, "f {}"]);
    // A value with the tags of a call.
    for value in [
        "</parameter>",
        "a</parameter> b",
        "</parameter>\n</parameter>",
        "<parameter=i>",
        "\n<parameter=new>1",
        "</function>",
        "</function>\nreturn",
        "</tool_call> a",
        "<tool_call>\n<function=g>",
        "</",
        "<",
    ] {
        let json = Value::from(value);
        let text = call(&[["i", "1"], ["s", value], ["x", "2"]]);
        check_case(
            &text,
            "",
            &[&format!(r#"f {{"i": 1, "s": {json}, "x": 2}}"#)],
        );
    }
    // Several functions in one block.
    let text = "<tool_call>\n<function=f>\n</function>\n\n<function=digit>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>";
    check_case(text, "", &["f {}", "digit {\"n\": 1}"]);
    let (content, calls) = collect(check(
        ToolFormat::SeedOss,
        "Well.\n<seed:tool_call>\n<function=f>\n<parameter=i>1</parameter>\n<parameter=s>a\nb</parameter>\n</function>\n</seed:tool_call>",
    ));
    assert_eq!(content, "Well.");
    assert_eq!(calls[0].arguments, r#"{"i": 1, "s": "a\nb"}"#);
}

#[test]
fn tags_may_be_missing() {
    let whole = r#"f {"i": 1, "s": "a"}"#;
    for text in [
        // No `</parameter>`.
        "<tool_call>\n<function=f>\n<parameter=i>\n1\n<parameter=s>\na\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=i>\n1\n</parameter>\n<parameter=s>\na\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=i>\n1\n</parameter>\n<parameter=s>\na\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=i>\n1\n</parameter>\n<parameter=s>\na\n</function>",
        // No `</function>`, no `</tool_call>`, neither.
        "<tool_call>\n<function=f>\n<parameter=i>\n1\n</parameter>\n<parameter=s>\na\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=i>\n1\n</parameter>\n<parameter=s>\na\n</parameter>\n</function>",
        "<tool_call>\n<function=f>\n<parameter=i>\n1\n</parameter>\n<parameter=s>\na\n</parameter>\n</function>\n</tool_",
        "<tool_call>\n<function=f>\n<parameter=i>\n1\n</parameter>\n<parameter=s>\na\n</parameter>",
        // No `<tool_call>`.
        "<function=f>\n<parameter=i>\n1\n</parameter>\n<parameter=s>\na\n</parameter>\n</function>\n</tool_call>",
        " <function=f><parameter=i>1</parameter><parameter=s>a</parameter></function>",
    ] {
        let (content, calls) = found(text);
        assert_eq!(calls, [whole], "{text}");
        assert!(content.is_empty() || content == "</tool_", "{text}");
    }
    let two = "<tool_call>\n<function=f>\n<parameter=s>\na\n</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>";
    check_case(two, "", &["f {\"s\": \"a\"}", "f {}"]);
}

#[test]
fn a_text_that_is_no_call_is_content() {
    for text in [
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>\n<function=",
        "<tool_call>\n<function=f",
        "<tool_call>\n<function=f>",
        "<tool_call>\n<function=f>\n",
        "<tool_call>\n<function=>\n</function>",
        "<tool_call>\n<function=f g>\n</function>",
        "<tool_call>\n<function={{ name }}>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nnow\n</function>\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=>\n1\n</parameter>\n</function>",
        "<tool_call>\n<function=f>\n<parameter=i\n1\n</parameter>\n</function>",
        // The value may not be whole.
        "<tool_call>\n<function=f>\n<parameter=s>\nrm -r /tm",
        "<tool_call>\n<function=f>\n<parameter=s>\na\n",
        "<tool_call>\n<function=f>\n<parameter=s>\na\n</param",
        "<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n<para",
        // Not a tool of the request.
        "Write <function=main> or <function=g>\n</function>",
        "a <function> b </function> <function=",
    ] {
        check_case(text, text, &[]);
    }
    let inner = call(&[]);
    for before in [
        "<tool_call>",
        "<tool_call>\n<function=f>\n",
        "<tool_call>\n<function=f g>\n",
        "<function=what>",
    ] {
        let (content, calls) = found(&format!("{before}{inner}"));
        assert_eq!(calls, ["f {}"], "{before}");
        assert_eq!(content.trim_end(), before.trim_end());
    }
    let space = " ".repeat(300);
    let text = format!("<tool_call>{space}<function=f>{space}</function>");
    check_case(&text, &text, &[]);
    let long = "f".repeat(300);
    let text = format!("<tool_call><function={long}></function></tool_call>");
    check_case(&text, &text, &[]);
}

#[test]
fn the_text_of_a_value_comes_while_it_is_written() {
    let mut parser = ToolParser::new(ToolFormat::Qwen3Coder, types());
    assert_eq!(parser.push("<tool_call>\n<function=f>\n"), []);
    let arguments = |text: &str| ToolDelta::Arguments {
        index: 0,
        text: text.into(),
    };
    let start = ToolDelta::Start {
        index: 0,
        name: "f".into(),
    };
    let first = parser.push("<parameter=s>\nIt");
    assert_eq!(first, [start, arguments("{\"s\": \"It")]);
    assert_eq!(parser.push(" is\n"), [arguments(" is")]);
    assert_eq!(parser.push("so.\n</para"), [arguments("\\nso.")]);
    assert_eq!(
        parser.push("meter>\n<parameter=i>"),
        [arguments("\", \"i\": ")]
    );
    assert_eq!(parser.push("\n12"), []);
    assert_eq!(parser.push("\n</parameter>\n"), []);
    let end = [arguments("12}"), ToolDelta::End { index: 0 }];
    assert_eq!(parser.push("</function>\n</tool_call>"), end);
    assert_eq!(parser.finish(), []);
}

/// 10,000 answers take 2 s.
#[test]
fn changed_calls_are_divided_the_same_in_any_pieces() {
    let mut rng = marlin_testing::rng();
    let seeds = [
        call(&[["i", "1"], ["s", "a\n</b>"]]),
        format!(
            "Well.\n{}\n{}",
            call(&[["t", "null"]]),
            call(&[["l", "[1, {}]"]])
        ),
        "<function=f>\n<parameter=o>\n{\"a\": 1}\n</function>\n</tool_call>".into(),
        "<tool_call><function=g></function><function=f></function></tool_call> so".into(),
    ];
    let (start, mut calls) = (Instant::now(), 0);
    for index in 0..10_000 {
        let text = mutated(&mut rng, &seeds[index % seeds.len()]);
        let (format, text) = match rng.random_bool(0.5) {
            true => (ToolFormat::Qwen3Coder, text),
            false => (
                ToolFormat::SeedOss,
                text.replace("tool_call", "seed:tool_call"),
            ),
        };
        let whole = check(format, &text);
        let pieces = random_pieces(&text, rng.random_range(1..19), &mut rng);
        assert_eq!(parsed(format, pieces), whole, "{format:?}: {text:?}");
        calls += collect(whole).1.len();
    }
    assert!((1000..20_000).contains(&calls), "{calls}");
    assert!(start.elapsed() < Duration::from_secs(60));
}

/// Texts of 100,000 bytes take 1 s together, of parts that make a parser look far ahead or back.
#[test]
fn long_answers_take_time_in_proportion() {
    let head = "<tool_call>\n<function=f>\n<parameter=s>\n";
    for part in [
        "</parameter> ",
        "</parameter>\n</",
        "\n<parameter=",
        "\n<parameter=s>",
        "</function>\n<",
        "</tool_call>\n",
        "<tool_call>\n<function=f>\n",
        "<function=f><function=",
        "<",
        " ",
    ] {
        for head in ["", head] {
            let text = format!("{head}{}", part.repeat(100_000 / part.len()));
            let start = Instant::now();
            check(ToolFormat::Qwen3Coder, &text);
            let elapsed = start.elapsed();
            assert!(elapsed < Duration::from_secs(5), "{elapsed:?} for {part:?}");
        }
    }
}

/// Random calls under the grammar have the arguments that the schema asks for. Takes 3 s.
#[test]
fn forced_calls_follow_the_schemas_of_texts() {
    let mut rng = marlin_testing::rng();
    let schema = json!({
        "properties": {
            "color": { "enum": ["red", "blue\n\"sky\""] },
            "word": { "type": "string", "minLength": 1, "maxLength": 3 },
            "code": { "type": ["string", "null"], "pattern": "^[a-f]{2}$" },
            "part": { "anyOf": [{ "const": "x" }, { "type": "null" }] },
            "size": { "$ref": "#/$defs/size" },
            "any": { "type": ["integer", "string"], "enum": [1, "one"] },
            "bad<name": { "type": "integer" },
        },
        "required": ["color", "word", "size"],
        "$defs": { "size": { "type": "integer", "minimum": 1, "maximum": 3 } },
    });
    let tool = ToolSchema {
        name: "paint",
        parameters: Some(&schema),
    };
    let types = ToolTypes::new([tool]);
    for format in [ToolFormat::Qwen3Coder, ToolFormat::SeedOss] {
        let (tokenizer, compiler) = compiler(format.markers());
        let token_id = |text: &str| compiler.token_id(text).unwrap();
        let text = format.grammar(&[tool], true, token_id).unwrap();
        let grammar = compiler.compile(&GrammarSource::Lark(text)).unwrap();
        let mut optional = 0;
        for _ in 0..40 {
            let text = written(&grammar, &tokenizer, &mut rng);
            let mut parser = ToolParser::new(format, types.clone());
            let mut deltas = parser.push(&text);
            deltas.extend(parser.finish());
            let (content, calls) = collect(deltas);
            assert!(content.is_empty() && !calls.is_empty(), "{text}");
            for call in calls {
                let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
                let text_of = |name: &str| arguments[name].as_str().unwrap_or_default();
                assert!(
                    ["red", "blue\n\"sky\""].contains(&text_of("color")),
                    "{text}"
                );
                let length = text_of("word").chars().count();
                assert!((1..=3).contains(&length), "{text}");
                let code = text_of("code");
                let is_code = code.len() == 2 && code.bytes().all(|b| (b'a'..=b'f').contains(&b));
                assert!(arguments.get("code").is_none() || is_code, "{text}");
                assert!(
                    arguments.get("part").is_none_or(|part| part == "x"),
                    "{text}"
                );
                assert!(
                    arguments["size"]
                        .as_u64()
                        .is_some_and(|n| (1..=3).contains(&n))
                );
                let any = [&json!(1), &json!("one")];
                assert!(
                    arguments.get("any").is_none_or(|v| any.contains(&v)),
                    "{text}"
                );
                optional += arguments.as_object().unwrap().len() - 3;
            }
        }
        assert!(optional > 0);
    }
    let required = json!({ "required": ["bad<name"] });
    let tool = ToolSchema {
        name: "f",
        parameters: Some(&required),
    };
    let error = ToolFormat::Qwen3Coder
        .grammar(&[tool], false, |_| None)
        .unwrap_err();
    assert!(error.to_string().contains("bad<name"), "{error}");
}
