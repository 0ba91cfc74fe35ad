//! Chat templates.

use std::collections::BTreeMap;

use marlin_text::{ChatTemplate, Failure, Message, TextError};

use crate::failure;

/// The length limit of a template.
const MOST_BYTES: usize = 256 << 10;
/// The largest rendered text.
const MOST_OUTPUT: usize = 32 << 20;

fn compile(text: &str) -> Result<ChatTemplate, TextError> {
    ChatTemplate::compile(text, "chat_template.jinja".into(), BTreeMap::new())
}

fn render(text: &str) -> Result<String, TextError> {
    compile(text)?.render(&[Message::user("Hello")], true)
}

#[track_caller]
fn is_nested_too_deeply(text: &str) {
    let result = render(text);
    assert!(matches!(failure(&result), Failure::Nesting), "{result:?}");
}

#[test]
fn endless_loops_run_out_of_steps() {
    let result =
        render("{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}");
    assert!(
        matches!(failure(&result), Failure::Steps { limit: 4_000_000 }),
        "{result:?}"
    );
}

#[test]
fn values_that_contain_themselves_are_refused() {
    for text in [
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.a = [{'b': ns}] %}{{ ns | tojson }}",
        "{% set ns = namespace() %}{% set ns.a, b = ns, 1 %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.a | default(ns, true) %}{% endset %}{{ ns ~ '' }}",
        "{% set n = namespace() %}{% set m = namespace() %}{% set n.a = m %}{% set m.a = n %}\
         {{ n == m }}",
    ] {
        is_nested_too_deeply(text);
    }
}

#[test]
fn values_that_grow_deeper_in_a_loop_are_refused() {
    for value in ["[ns.a]", "{'b': ns.a}", "(ns.a,)", "[1, [ns.a]]"] {
        let text = |times: usize| {
            format!(
                "{{% set ns = namespace(a=[]) %}}{{% for i in range({times}) %}}\
                 {{% set ns.a = {value} %}}{{% endfor %}}{{{{ ns.a | length > 0 }}}}"
            )
        };
        is_nested_too_deeply(&text(100_000));
        assert_eq!(render(&text(40)).unwrap(), "True");
    }
}

#[test]
fn signs_in_a_row_are_refused() {
    is_nested_too_deeply(&format!("{{{{ {}1 }}}}", "-".repeat(20_000)));
    is_nested_too_deeply(&format!("{{{{ {}1", "- ".repeat(20_000)));
    assert_eq!(render("{{ --1 }}").unwrap(), "1");
}

#[test]
fn recursion_of_macros_brackets_and_loops_is_refused() {
    let brackets = format!("{{{{ {} }}}}", "[".repeat(20_000));
    for text in [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(a) %}{{ f([a]) }}{% endmacro %}{{ f(1) }}",
        "{% for a in [1] recursive %}{{ loop([a]) }}{% endfor %}",
        &brackets,
    ] {
        let result = render(text);
        assert!(
            matches!(failure(&result), Failure::Refused(why) if why.contains("recursion")),
            "{result:?}"
        );
    }
    // The message is cut before it comes to the recursion.
    let result = render("{% include 'chat_template' %}");
    assert!(
        matches!(failure(&result), Failure::Refused(why) if why.contains("include")),
        "{result:?}"
    );
}

/// The longest templates of every form that the parser nests without a limit of its own.
#[test]
fn long_chains_do_not_overflow_the_stack() {
    let chains = [
        ("{{ 1", "+1", " }}"),
        ("{{ 1", "~1", " }}"),
        ("{{ 1", "*1", " }}"),
        ("{{ 1", "**1", " }}"),
        ("{{ 1", "<1", " }}"),
        ("{{ a", ".a", " }}"),
        ("{{ a", "[0]", " }}"),
        ("{{ a", "()", " }}"),
        ("{{ a", "|e", " }}"),
        ("{{ 1", " and 1", " }}"),
        ("{{ 1", " or 1", " }}"),
        ("{{ 1", " is e", " }}"),
        ("{{ 1", " in 1", " }}"),
        ("{{ ", "not ", "1 }}"),
        ("{{ 1", " if 1 else 1", " }}"),
        ("{% if a %}", "{%elif a%}", "{% endif %}"),
        ("{% set a", ".a", " = 1 %}"),
    ];
    for (first, link, last) in chains {
        let links = (MOST_BYTES - first.len() - last.len()) / link.len();
        // Whether the template is valid does not matter: this test ends if it is not bounded.
        match render(&[first, &link.repeat(links), last].concat()) {
            Ok(_) => {}
            result => assert!(
                matches!(
                    failure(&result),
                    Failure::Refused(_) | Failure::Steps { .. }
                ),
                "{link}: {result:?}"
            ),
        }
    }
}

#[test]
fn the_deepest_values_of_a_long_template_do_not_overflow_the_stack() {
    let nested = |name: &str| {
        let one = format!("{{%set {name}=[{name}]%}}");
        format!("{{%set {name}=1%}}") + &one.repeat(120_000 / one.len())
    };
    let both = [nested("a"), nested("b")].concat();
    for (expression, expected) in [
        ("a == b", "True"),
        ("a < b", "False"),
        ("a | length", "1"),
        ("(a | tojson) == (b | tojson)", "True"),
        ("(a ~ '') == (b ~ '')", "True"),
        ("(a | string) == (b | string)", "True"),
        ("[a, b] | unique | list | length", "1"),
    ] {
        let text = format!("{both}{{{{ {expression} }}}}");
        assert_eq!(render(&text).unwrap(), expected, "{expression}");
    }
}

#[test]
fn much_output_is_refused() {
    let text = |repeats: usize| {
        format!(
            "{{% set a = 'a' * 1048576 %}}{{% for i in range({repeats}) %}}{{{{ a }}}}{{% endfor %}}"
        )
    };
    let result = render(&text(33));
    assert!(
        matches!(failure(&result), Failure::Output { limit: MOST_OUTPUT }),
        "{result:?}"
    );
    assert_eq!(render(&text(32)).unwrap().len(), MOST_OUTPUT);
}

#[test]
fn long_templates_are_refused() {
    assert_eq!(render(&"a".repeat(MOST_BYTES)).unwrap().len(), MOST_BYTES);
    let result = render(&"a".repeat(MOST_BYTES + 1));
    assert!(
        matches!(
            failure(&result),
            Failure::Length { bytes, limit: MOST_BYTES } if *bytes == MOST_BYTES + 1
        ),
        "{result:?}"
    );
}

#[test]
fn a_template_works_again_after_each_failure() {
    let template = compile(
        "{% set ns = namespace() %}{% set content = messages[0].content %}\
         {% if content == 'steps' %}\
         {% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}\
         {% elif content == 'nesting' %}{% set ns.a = ns %}\
         {% elif content == 'output' %}{% for i in range(40) %}{{ 'a' * 1048576 }}{% endfor %}\
         {% elif content == 'refused' %}{{ raise_exception('no') }}\
         {% else %}{{ content }}{% endif %}",
    )
    .unwrap();
    let render = |content: &str| template.render(&[Message::user(content)], true);
    for _ in 0..2 {
        assert!(matches!(failure(&render("steps")), Failure::Steps { .. }));
        assert_eq!(render("good").unwrap(), "good");
        assert!(matches!(failure(&render("nesting")), Failure::Nesting));
        assert_eq!(render("good").unwrap(), "good");
        assert!(matches!(failure(&render("output")), Failure::Output { .. }));
        assert_eq!(render("good").unwrap(), "good");
        assert!(matches!(failure(&render("refused")), Failure::Refused(why) if why.contains("no")));
        assert_eq!(render("good").unwrap(), "good");
    }
}
