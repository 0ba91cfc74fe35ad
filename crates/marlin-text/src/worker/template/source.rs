//! Conversion of templates from Jinja's syntax to minijinja's where they differ.
//!
//! | Jinja | minijinja |
//! |---|---|
//! | `a % b`, also the format of a text | `(a)|__mod__(b)`, a filter that implements both |
//! | `{% set a.b = c %}` | `{% set a.b = (c)|__store__ %}`, a filter that bounds the nesting of values |
//! | `{% generation %}` of transformers, which marks the text that a model is trained on and renders nothing itself | `{% if true %}` |

use crate::worker::request::Refusal;

/// The name of the filter that `%` becomes.
pub(super) const MOD: &str = "__mod__";

/// The name of the filter through which a value goes that is assigned to an attribute.
pub(super) const STORE: &str = "__store__";

/// The largest number of `%` in a tag, each of which becomes a pair of brackets around the
/// operators before it.
const MOST_REMAINDERS: usize = 1000;

/// The largest number of signs in a row. Jinja's parser recurses for each.
const MOST_SIGNS: usize = 1000;

/// Rewrites a template's text.
///
/// # Errors
/// [`Refusal::Nesting`] for a tag with too many operators `%`, or with too many signs in a row.
pub(super) fn rewritten(text: &str) -> Result<String, Refusal> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find('{') {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let length = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map_or(tag.len(), |end| end + 2),
            Some(b'%' | b'{') => rewrite_tag(tag, &mut out)?,
            _ => 1,
        };
        // `rewrite_tag` has already appended a tag; other text is appended here.
        if !matches!(tag.as_bytes().get(1), Some(b'%' | b'{')) {
            out.push_str(&tag[..length]);
        }
        rest = &tag[length..];
    }
    out.push_str(rest);
    Ok(out)
}

/// Appends the tag that `text` begins with, and after a `raw` tag all text up to the end of the
/// block. Returns the number of bytes read.
fn rewrite_tag(text: &str, out: &mut String) -> Result<usize, Refusal> {
    let found = tokens(text);
    let end = found.as_ref().map_or(text.len(), |(_, end)| *end);
    if longest_signs(&text[..end]) > MOST_SIGNS {
        return Err(Refusal::Nesting);
    }
    let Some((found, end)) = found else {
        // The tag does not end; minijinja reports that.
        out.push_str(text);
        return Ok(text.len());
    };
    let stored = stored(text, &found, end);
    let (tag, found) = match stored.as_deref() {
        Some(tag) => (tag, tokens(tag).map_or(found, |(found, _)| found)),
        None => (&text[..end], found),
    };
    let word = |token: &Token| &tag[token.start..token.end];
    let inner = found
        .first()
        .zip(found.last())
        .map(|(first, last)| &tag[first.start..last.end]);
    match inner {
        Some("generation") => out.push_str(&tag.replace("generation", "if true")),
        Some("endgeneration") => out.push_str(&tag.replace("endgeneration", "endif")),
        Some("raw") if text.starts_with("{%") => {
            let end = end + raw_length(&text[end..]);
            out.push_str(&text[..end]);
            return Ok(end);
        }
        _ => match found.iter().filter(|token| word(token) == "%").count() {
            0 => out.push_str(tag),
            1..=MOST_REMAINDERS => rewrite_expressions(tag, &found, tag.len(), out),
            _ => return Err(Refusal::Nesting),
        },
    }
    Ok(end)
}

/// Returns the length of the longest run of minus signs, between which there may be white space.
fn longest_signs(text: &str) -> usize {
    let (mut run, mut longest) = (0, 0);
    for byte in text.bytes().filter(|byte| !byte.is_ascii_whitespace()) {
        run = if byte == b'-' { run + 1 } else { 0 };
        longest = longest.max(run);
    }
    longest
}

/// Returns the tag with these tokens, which ends at `end`, with its value through the filter
/// [`STORE`], if the tag assigns to an attribute: `{% set a.b = c %}`, `{% set a.b | filter %}`.
fn stored(text: &str, tokens: &[Token], end: usize) -> Option<String> {
    let word = |token: &Token| &text[token.start..token.end];
    let (set, target) = tokens.split_first()?;
    let assigns = target
        .iter()
        .position(|token| matches!(word(token), "=" | "|"))?;
    let (target, value) = target.split_at(assigns);
    if word(set) != "set" || !target.iter().any(|token| word(token) == ".") {
        return None;
    }
    let (operator, last) = (value.first()?, value.last()?);
    let (before, value) = text[..last.end].split_at(operator.end);
    let (value, after) = (value.trim_start(), &text[last.end..end]);
    Some(match word(operator) {
        "=" => format!("{before} ({value})|{STORE}{after}"),
        _ => format!("{before} {value}|{STORE}{after}"),
    })
}

/// Returns the number of bytes up to the tag that ends a raw block.
fn raw_length(text: &str) -> usize {
    let ends = text.match_indices("{%").find(|(start, _)| {
        text[start + 2..]
            .trim_start_matches(['-', '+'])
            .trim_start()
            .starts_with("endraw")
    });
    ends.map_or(text.len(), |(start, _)| start)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A name or a keyword.
    Name,
    Number,
    Text,
    Operator,
}

#[derive(Debug, Clone, Copy)]
struct Token {
    kind: Kind,
    start: usize,
    end: usize,
}

/// Returns the tokens of the tag that `text` begins with, and the position of the tag's end; `None`
/// if the tag does not end.
fn tokens(text: &str) -> Option<(Vec<Token>, usize)> {
    let (bytes, close) = (
        text.as_bytes(),
        if text.starts_with("{%") { "%}" } else { "}}" },
    );
    let mut at = 2 + usize::from(matches!(bytes.get(2), Some(b'-' | b'+')));
    let (mut tokens, mut depth) = (Vec::new(), 0_usize);
    loop {
        let rest = &text[at..];
        let first = rest.chars().next()?;
        let signless = rest.strip_prefix(['-', '+']).unwrap_or(rest);
        if depth == 0 && (rest.starts_with(close) || signless.starts_with(close)) {
            let sign = usize::from(!rest.starts_with(close));
            return Some((tokens, at + sign + close.len()));
        }
        let count = |kept: fn(char) -> bool| {
            rest.find(|character| !kept(character))
                .unwrap_or(rest.len())
        };
        let (kind, length) = match first {
            _ if first.is_whitespace() => {
                at += count(char::is_whitespace);
                continue;
            }
            '\'' | '"' => (Kind::Text, text_length(rest, first)?),
            '0'..='9' => (Kind::Number, number_length(rest)),
            _ if first.is_alphanumeric() || first == '_' => (
                Kind::Name,
                count(|character| character.is_alphanumeric() || character == '_'),
            ),
            _ => (
                Kind::Operator,
                if ["**", "//", "==", "!=", "<=", ">="]
                    .iter()
                    .any(|two| rest.starts_with(two))
                {
                    2
                } else {
                    first.len_utf8()
                },
            ),
        };
        match first {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        tokens.push(Token {
            kind,
            start: at,
            end: at + length,
        });
        at += length;
    }
}

/// Returns the number of bytes of a quoted string, with its quotes; `None` if the string does not
/// end.
fn text_length(text: &str, quote: char) -> Option<usize> {
    let mut characters = text.char_indices().skip(1);
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => _ = characters.next(),
            _ if character == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// Returns the number of bytes of a numeric literal: `1_000`, `0x1f`, `1.5`, `1e-5`.
fn number_length(text: &str) -> usize {
    let bytes = text.as_bytes();
    let digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let exponent = matches!(byte, b'e' | b'E') && !text.starts_with("0x");
        let signed = exponent && matches!(bytes.get(at + 1), Some(b'+' | b'-')) && digit(at + 2);
        match byte {
            _ if signed => at += 2,
            b'.' if digit(at + 1) => at += 1,
            _ if byte.is_ascii_alphanumeric() || byte == b'_' => at += 1,
            _ => break,
        }
    }
    at
}

/// Names that are not operands. The text before and the text after such a name are separate
/// expressions.
const KEYWORDS: [&str; 19] = [
    "and",
    "block",
    "call",
    "elif",
    "else",
    "filter",
    "for",
    "from",
    "if",
    "import",
    "in",
    "include",
    "is",
    "macro",
    "not",
    "or",
    "recursive",
    "set",
    "with",
];

/// The state of an expression, or of a bracketed expression within it, up to the current token.
#[derive(Debug, Clone, Copy, Default)]
struct Level {
    /// The position in the output where a chain of operands begins. `*`, `/`, `//` and `%` join the
    /// operands of a chain and bind from left to right.
    chain: Option<usize>,
    /// True after an operand.
    operand: bool,
    /// True if the bracket around the right side of a `%` is open.
    open: bool,
}

impl Level {
    /// Ends the right side of a `%`.
    fn close(&mut self, out: &mut String) {
        if std::mem::take(&mut self.open) {
            out.push(')');
        }
    }

    /// Ends the chain of operands.
    fn end(&mut self, out: &mut String) {
        self.close(out);
        (self.chain, self.operand) = (None, false);
    }
}

/// Appends a tag with these tokens. `%` becomes a filter applied to its whole left side.
fn rewrite_expressions(text: &str, tokens: &[Token], end: usize, out: &mut String) {
    let (mut outer, mut level, mut last) = (Vec::new(), Level::default(), 0);
    // Any word after a dot or a bar is a name.
    let (mut named, mut kind_before) = (false, Kind::Operator);
    for token in tokens {
        let (gap, word) = (&text[last..token.start], &text[token.start..token.end]);
        last = token.end;
        let after_name = std::mem::replace(&mut named, matches!(word, "." | "|"));
        match (token.kind, word) {
            _ if after_name => {}
            (Kind::Name, _) if KEYWORDS.contains(&word) => level.end(out),
            (Kind::Operator, "." | "|" | "**") => level.operand = word != "**",
            (Kind::Operator, "(" | "[" | "{") => {
                if !level.operand || word == "{" {
                    begin(&mut level, gap, out);
                }
                out.push_str(gap);
                out.push_str(word);
                outer.push(std::mem::take(&mut level));
                kind_before = Kind::Operator;
                continue;
            }
            (Kind::Operator, ")" | "]" | "}") => {
                level.close(out);
                level = outer.pop().unwrap_or_default();
                level.operand = true;
            }
            (Kind::Operator, "*" | "/" | "//") => {
                level.close(out);
                level.operand = false;
            }
            (Kind::Operator, "%") => {
                level.close(out);
                out.insert(level.chain.unwrap_or(out.len()), '(');
                out.push_str(&format!(")|{MOD}("));
                (level.operand, level.open) = (false, true);
                kind_before = token.kind;
                continue;
            }
            (Kind::Operator, "-" | "+") if !level.operand => begin(&mut level, gap, out),
            (Kind::Operator, _) => level.end(out),
            // Adjacent strings are one operand.
            (Kind::Text, _) if level.operand && kind_before == Kind::Text => {}
            (Kind::Name | Kind::Number | Kind::Text, _) => {
                if level.operand {
                    level.end(out);
                }
                begin(&mut level, gap, out);
                level.operand = true;
            }
        }
        out.push_str(gap);
        out.push_str(word);
        kind_before = token.kind;
    }
    level.close(out);
    out.push_str(&text[last..end]);
}

/// Begins a chain of operands after `gap`, if none has begun.
fn begin(level: &mut Level, gap: &str, out: &str) {
    level.chain.get_or_insert(out.len() + gap.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remainder_is_a_filter_of_all_that_it_divides() {
        for (text, expected) in [
            ("{{ 7 % 4 }}", "{{ (7)|__mod__( 4) }}"),
            ("{{7%4}}", "{{(7)|__mod__(4)}}"),
            (
                "{{ a + b * c % d.e[f % g](h) | i - j }}",
                "{{ a + (b * c)|__mod__( d.e[(f)|__mod__( g)](h) | i) - j }}",
            ),
            (
                "{{ a % b % -c ** d }}",
                "{{ ((a)|__mod__( b))|__mod__( -c ** d) }}",
            ),
            (
                "{%- if not -a % 2 == 0 -%}",
                "{%- if not (-a)|__mod__( 2) == 0 -%}",
            ),
            (
                "{% set x = [1 % 2, {'a': 3 % 4}] %}",
                "{% set x = [(1)|__mod__( 2), {'a': (3)|__mod__( 4)}] %}",
            ),
            (
                "{{ '%s' 'b' % ('}}', x) ~ y }}",
                "{{ ('%s' 'b')|__mod__( ('}}', x)) ~ y }}",
            ),
            (
                "{{ 1e-5 % a if b is c else d.if % e }}",
                "{{ (1e-5)|__mod__( a) if b is c else (d.if)|__mod__( e) }}",
            ),
            (
                "{% raw %}{{ 5 % 3 }}{%- endraw %}{# 5 % 3 #} 5 % 3 {",
                "{% raw %}{{ 5 % 3 }}{%- endraw %}{# 5 % 3 #} 5 % 3 {",
            ),
            (
                "{{ '%' }}{% set x = '%}' %}{{ {'a': {}} }}",
                "{{ '%' }}{% set x = '%}' %}{{ {'a': {}} }}",
            ),
            (
                "{%- generation +%}a{% endgeneration -%}",
                "{%- if true +%}a{% endif -%}",
            ),
            ("{{ 7 % 4", "{{ 7 % 4"),
            ("{{ 'a", "{{ 'a"),
        ] {
            assert_eq!(rewritten(text).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn values_of_attributes_go_through_a_filter() {
        for (text, expected) in [
            (
                "{%- set ns.a = b % 2 -%}",
                "{%- set ns.a = ((b)|__mod__( 2))|__store__ -%}",
            ),
            (
                "{% set a.b, c = 1, [2] %}",
                "{% set a.b, c = (1, [2])|__store__ %}",
            ),
            (
                "{% set a.b | default(a, true) %}{% endset %}",
                "{% set a.b | default(a, true)|__store__ %}{% endset %}",
            ),
            ("{% set a.b %}1{% endset %}", "{% set a.b %}1{% endset %}"),
            ("{% set a = b.c %}", "{% set a = b.c %}"),
            ("{% if a.b == 'set' %}", "{% if a.b == 'set' %}"),
        ] {
            assert_eq!(rewritten(text).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn long_runs_of_signs_and_remainders_are_refused() {
        let tag = |inner: String| rewritten(&format!("{{{{ {inner} }}}}"));
        assert!(tag(format!("{}1", "- ".repeat(MOST_SIGNS))).is_ok());
        let more = format!("{}1", "- ".repeat(MOST_SIGNS + 1));
        assert_eq!(rewritten(&format!("{{{{ {more}")), Err(Refusal::Nesting));
        assert_eq!(tag(more), Err(Refusal::Nesting));
        assert!(tag(format!("1{}", "%1".repeat(MOST_REMAINDERS))).is_ok());
        assert_eq!(
            tag(format!("1{}", "%1".repeat(MOST_REMAINDERS + 1))),
            Err(Refusal::Nesting)
        );
    }
}
