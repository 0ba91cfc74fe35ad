//! Chat templates that are expensive or nested without end.

use std::collections::BTreeMap;

use libtest_mimic::{Failed, Trial};
use marlin_text::{ChatTemplate, Message, TextError};

use crate::support::{Expected, trial};

pub fn render(text: &str) -> Result<String, TextError> {
    let template = ChatTemplate::compile(text, "chat_template.jinja".into(), BTreeMap::new())?;
    template.render(&[Message::user("Hello")], true)
}

pub fn tests() -> Vec<Trial> {
    use Expected::{Bound, Nesting, Refused, Steps, Survived};
    let doubled = |first: &str, join: &str| {
        format!(
            "{{% set ns = namespace(a={first}) %}}{{% for i in range(60) %}}{{% set ns.a = ns.a {join} ns.a %}}{{% endfor %}}{{{{ ns.a | length }}}}"
        )
    };
    let cases: Vec<(&str, String, Expected)> = vec![
        ("a_namespace_in_itself", "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}".into(), Nesting),
        ("a_namespace_in_itself_as_json", "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns | tojson }}".into(), Nesting),
        (
            "nested_lists",
            "{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}".into(),
            Nesting,
        ),
        ("signs_in_a_row", format!("{{{{ {}1 }}}}", "-".repeat(20_000)), Nesting),
        // The stack of a worker process is too small for this number of operators.
        ("operators_in_a_row", format!("{{{{ 1{} }}}}", "+1".repeat(100_000)), Nesting),
        ("much_output", "{% set a = 'a' * 1048576 %}{% for i in range(33) %}{{ a }}{% endfor %}".into(), Expected::Output),
        ("brackets_in_a_row", format!("{{{{ {} }}}}", "[".repeat(20_000)), Refused("recursion")),
        ("a_wide_indent", "{{ 'a\nb' | indent(100000000000) }}".into(), Bound),
        ("a_wide_format", "{{ '%100000000000d' | format(1) }}".into(), Bound),
        ("a_slice_of_the_largest_end", "{{ [1, 2, 3][:9223372036854775807:-1] }}".into(), Survived),
        ("a_text_doubled", doubled("'a'", "~"), Bound),
        ("a_list_doubled", doubled("[1]", "+"), Bound),
        ("an_endless_range", "{% for i in range(1000000000) %}{% endfor %}".into(), Refused("range")),
        ("a_text_repeated", "{{ 'a' * 100000000000 }}".into(), Refused("too large")),
        ("steps_without_end", "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}".into(), Steps),
        (
            "little_fuel_and_much_work",
            "{% set a = 'a' * 50000000 %}{% for i in range(100000) %}{% set b = a | upper %}{% endfor %}".into(),
            Bound,
        ),
        ("macros_that_call_themselves", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into(), Refused("recursion")),
    ];
    let mut tests: Vec<Trial> = cases
        .into_iter()
        .map(|(name, text, expected)| trial(name, expected, move || render(&text).map(drop)))
        .collect();
    tests.push(Trial::test(
        "a_template_works_again_after_a_failure",
        works_again,
    ));
    tests
}

/// Checks that after a conversation that kills the worker, the next one is rendered.
fn works_again() -> Result<(), Failed> {
    let text = "{% if messages[0].content == 'bad' %}{{ 'a\nb' | indent(100000000000) }}{% endif %}{{ messages[0].content }}";
    let template = ChatTemplate::compile(text, "chat_template.jinja".into(), BTreeMap::new())?;
    for _ in 0..3 {
        template
            .render(&[Message::user("bad")], true)
            .expect_err("more memory than there is");
        assert_eq!(template.render(&[Message::user("good")], true)?, "good");
    }
    Ok(())
}
