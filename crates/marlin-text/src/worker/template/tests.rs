use marlin_testing::golden_json;

use super::*;

/// Templates that render differently from Python, and the reason why the difference is accepted.
const OTHERWISE: [(&str, &str); 40] = [
    ("{{ 'a' | center(5) ~ '|' }}", "in no published template"),
    ("{{ h | urlencode }}", "in no published template"),
    ("{{ 'a b&c/é' | urlencode }}", "in no published template"),
    (
        "{{ {'a': 'b c', 'd': 1} | urlencode }}",
        "in no published template",
    ),
    ("{{ '<b>a</b> c' | striptags }}", "in no published template"),
    ("{{ 'a b c' | wordcount }}", "in no published template"),
    (
        "{{ 'a b c d e' | truncate(5) }}",
        "in no published template",
    ),
    (
        "{{ 'a b c d e' | truncate(3, true) }}",
        "in no published template",
    ),
    (
        "{{ 'abcdefghijkl' | truncate(6, true, '..', 0) }}",
        "in no published template",
    ),
    ("{{ 'a b c d' | wordwrap(3) }}", "in no published template"),
    ("{{ 1000 | filesizeformat }}", "in no published template"),
    (
        "{{ {'a': 1, 'b': none} | xmlattr }}",
        "in no published template",
    ),
    ("{{ n | random is string }}", "in no published template"),
    ("{{ d | attr('b') }}", "in no published template"),
    (
        "{{ t | attr('count') is defined }}",
        "in no published template",
    ),
    ("{{ missing is callable }}", "in no published template"),
    ("{{ range is callable }}", "in no published template"),
    ("{{ namespace is callable }}", "in no published template"),
    ("{{ joiner(', ')() }}", "in no published template"),
    ("{{ cycler('a', 'b').next() }}", "in no published template"),
    ("{{ lipsum() | length > 0 }}", "in no published template"),
    ("{{ self }}", "in no published template"),
    (
        "{{ 'a b'.translate({97: 'x'}) }}",
        "in no published template",
    ),
    ("{{ 'a'.encode() }}", "in no published template"),
    (
        "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, x=2) }}",
        "in no published template",
    ),
    ("{{ +1 }}", "in no published template"),
    ("{{ dict([('a', 1)]) }}", "in no published template"),
    ("{{ (h | safe) + '<' }}", "in no published template"),
    (
        r#"{{ 'a\nb' | indent('> ') }}"#,
        "an argument or a format that is in no published template",
    ),
    (
        "{{ d | dictsort(true) }}",
        "an argument or a format that is in no published template",
    ),
    (
        "{{ n | unique(true) | list }}",
        "an argument or a format that is in no published template",
    ),
    (
        "{{ '%r' % 'a' }}",
        "an argument or a format that is in no published template",
    ),
    (
        "{{ '%d' % 3.7 }}",
        "an argument or a format that is in no published template",
    ),
    (
        "{{ '{!r}'.format('a') }}",
        "an argument or a format that is in no published template",
    ),
    (
        "{{ '{:%}'.format(0.5) }}",
        "an argument or a format that is in no published template",
    ),
    (
        "{{ rows | sort(attribute='v') }}",
        "refused in Python; a template that does it is not published",
    ),
    (
        "{{ none | list }}",
        "refused in Python; a template that does it is not published",
    ),
    (
        "{{ missing < 1 }}",
        "refused in Python; a template that does it is not published",
    ),
    ("{{ 1e20 ~ 'x' }}", "a value that no conversation has"),
    ("{{ 'x' ~ 0.00001 }}", "a value that no conversation has"),
];

#[test]
fn every_method_filter_and_operator_renders_as_jinja_renders_it() {
    let golden = golden_json("template_table.json");
    let messages = golden["messages"].as_array().unwrap().clone();
    let (prelude, tokens) = (
        golden["prelude"].as_str().unwrap(),
        BTreeMap::from([("bos_token".into(), "<s>".into())]),
    );
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() > 800, "{}", cases.len());
    let mut wrong = Vec::new();
    for case in cases {
        let text = case["template"].as_str().unwrap();
        let rendered = Template::compile(&format!("{prelude}{text}"), tokens.clone())
            .and_then(|template| template.render(&messages, &serde_json::Map::new(), true));
        let is_right = match case["rendered"].as_str() {
            Some(expected) => rendered.as_deref() == Ok(expected),
            None => rendered.is_err(),
        };
        if is_right == OTHERWISE.iter().any(|(template, _)| *template == text) {
            wrong.push(format!(
                "{text}\n    {rendered:?}\n    {}",
                case.get("rendered").unwrap_or(&case["error"])
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}
