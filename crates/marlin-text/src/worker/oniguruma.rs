//! Conversion of a tokenizer's patterns from the syntax of Oniguruma, in which `transformers` reads
//! them, to the syntax of `fancy-regex`.
//!
//! | Oniguruma | `fancy-regex` | meaning of the first column in `fancy-regex` |
//! |---|---|---|
//! | `a{1,3}+`, a repeat of a repeat | `(?:a{1,3})+` | a repeat without backtracking |
//! | `a{2}?`, none or two | `(?:a{2})?` | two |
//! | `a{2}{3}` | `(?:a{2}){3}` | literal braces |
//! | `{,}`, literal | `\{,}` | any number |
//! | `^`, `$` at the ends of lines | `(?:\A|(?m:^)(?!\z))`, `(?m:$)` | at the ends of the text |

use serde_json::Value;

/// Rewrites the patterns of a part of a `tokenizer.json`. Returns true if one of them changed.
pub(super) fn rewrite_patterns(part: &mut Value) -> bool {
    match part {
        Value::Array(parts) => parts
            .iter_mut()
            .fold(false, |changed, part| rewrite_patterns(part) | changed),
        Value::Object(fields) => fields.iter_mut().fold(false, |changed, (name, field)| {
            let rewritten = field
                .as_str()
                .filter(|_| name == "Regex")
                .and_then(|pattern| Some(rewritten(pattern)).filter(|new| new != pattern));
            match rewritten {
                Some(pattern) => {
                    *field = Value::String(pattern);
                    true
                }
                None => rewrite_patterns(field) | changed,
            }
        }),
        _ => false,
    }
}

/// An open group.
#[derive(Debug, Clone, Copy, Default)]
struct Group {
    /// The position in the output where the group begins.
    start: usize,
    /// True if the flag `x` is set: white space and comments are ignored.
    extended: bool,
}

/// Rewrites a pattern in the syntax of `fancy-regex`.
fn rewritten(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len());
    let (mut outer, mut group) = (Vec::new(), Group::default());
    // The position in the output of the atom that a quantifier would repeat, and whether the atom
    // already has a quantifier.
    let (mut atom, mut repeated) = (None, false);
    let mut rest = pattern;
    while let Some(first) = rest.chars().next() {
        if let (Some(start), Some(length)) = (atom, quantifier(rest)) {
            if repeated {
                out.insert_str(start, "(?:");
                out.push(')');
            }
            out.push_str(&rest[..length]);
            rest = &rest[length..];
            repeated = true;
            continue;
        }
        let start = out.len();
        let length = match first {
            '\\' => escape_length(rest),
            '[' => class_length(rest),
            '(' if rest.starts_with("(?#") => rest.find(')').map_or(rest.len(), |end| end + 1),
            '#' if group.extended => rest.find('\n').unwrap_or(rest.len()),
            _ => first.len_utf8(),
        };
        let (piece, after) = rest.split_at(length);
        rest = after;
        match first {
            '(' if piece.len() > 1 => out.push_str(piece),
            '(' => {
                let flags = flags(rest);
                // Flags without a group of their own apply up to the end of the enclosing group.
                match flags {
                    Some((extended, true)) => group.extended = extended.unwrap_or(group.extended),
                    _ => {
                        let extended = flags
                            .and_then(|(extended, _)| extended)
                            .unwrap_or(group.extended);
                        outer.push(group);
                        group = Group { start, extended };
                    }
                }
                let skipped = flags.map_or(0, |_| rest.find([':', ')']).map_or(0, |end| end + 1));
                out.push('(');
                out.push_str(&rest[..skipped]);
                rest = &rest[skipped..];
                atom = None;
            }
            ')' => {
                out.push(')');
                (atom, repeated) = (Some(group.start), false);
                group = outer.pop().unwrap_or_default();
            }
            '|' => {
                out.push('|');
                atom = None;
            }
            '^' | '$' => {
                out.push_str(if first == '^' {
                    r"(?:\A|(?m:^)(?!\z))"
                } else {
                    "(?m:$)"
                });
                (atom, repeated) = (Some(start), false);
            }
            '#' | ' ' | '\t' | '\n' | '\r' if group.extended => out.push_str(piece),
            _ => {
                if first == '{' {
                    out.push('\\');
                }
                out.push_str(piece);
                (atom, repeated) = (Some(start), false);
            }
        }
    }
    out
}

/// Returns the number of bytes of the quantifier that `text` begins with; `None` if there is none.
/// As in Oniguruma, a `+` after braces is a second quantifier, and so is a `?` after `{n}`.
fn quantifier(text: &str) -> Option<usize> {
    let (base, suffixes): (usize, &[u8]) = match text.as_bytes().first()? {
        b'?' | b'*' | b'+' => (1, &b"?+"[..]),
        b'{' => {
            let inner = &text[1..text.find('}')?];
            let is_number = |bound: &str| bound.bytes().all(|byte| byte.is_ascii_digit());
            let (least, most) = inner.split_once(',').unwrap_or((inner, inner));
            if !is_number(least) || !is_number(most) || (least.is_empty() && most.is_empty()) {
                return None;
            }
            (
                inner.len() + 2,
                if inner.contains(',') { &b"?"[..] } else { &[] },
            )
        }
        _ => return None,
    };
    Some(
        base + usize::from(
            text.as_bytes()
                .get(base)
                .is_some_and(|suffix| suffixes.contains(suffix)),
        ),
    )
}

/// Parses the flags at the beginning of a group. Returns the value that they give to the flag `x`,
/// and true if the group contains only flags. `text` is the text after the group's bracket.
fn flags(text: &str) -> Option<(Option<bool>, bool)> {
    let flags = text.strip_prefix('?')?;
    let end = flags.find(|flag: char| !flag.is_ascii_alphabetic() && flag != '-')?;
    let alone = match flags[end..].chars().next()? {
        ':' => false,
        ')' => true,
        _ => return None,
    };
    let (set, unset) = flags[..end].split_once('-').unwrap_or((&flags[..end], ""));
    let extended = if unset.contains('x') {
        Some(false)
    } else {
        set.contains('x').then_some(true)
    };
    Some((extended, alone))
}

/// Returns the number of bytes of the escape that `text` begins with: `\n`, `\p{L}`, `\x{1F}`,
/// `\x1f`, `\u00e9`, `\012`, `\k<name>`.
fn escape_length(text: &str) -> usize {
    let Some(letter) = text[1..].chars().next() else {
        return 1;
    };
    let length = 1 + letter.len_utf8();
    let after = &text[length..];
    let closed = |close: char| after.find(close).map_or(0, |end| end + 1);
    let digits = |most: usize| {
        after
            .bytes()
            .take(most)
            .take_while(u8::is_ascii_hexdigit)
            .count()
    };
    length
        + match letter {
            'p' | 'P' | 'x' | 'o' if after.starts_with('{') => closed('}'),
            'k' | 'g' if after.starts_with('<') => closed('>'),
            'k' | 'g' if after.starts_with('\'') => after[1..].find('\'').map_or(0, |end| end + 2),
            'x' => digits(2),
            'u' => digits(4),
            '0'..='9' => after.bytes().take(2).take_while(u8::is_ascii_digit).count(),
            'c' => after.chars().next().map_or(0, char::len_utf8),
            _ => 0,
        }
}

/// Returns the number of bytes of the character class that `text` begins with, including nested
/// classes.
fn class_length(text: &str) -> usize {
    let (mut depth, mut is_first) = (0_usize, false);
    let mut characters = text.char_indices().peekable();
    while let Some((at, character)) = characters.next() {
        let was_first = std::mem::take(&mut is_first);
        match character {
            '\\' => _ = characters.next(),
            '[' => {
                depth += 1;
                _ = characters.next_if(|&(_, next)| next == '^');
                is_first = true;
            }
            // Directly after the opening bracket, `]` is a member of the class.
            ']' if !was_first => {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantifiers_are_repeats_of_repeats() {
        for (pattern, expected) in [
            (r"\p{N}{1,3}+", r"(?:\p{N}{1,3})+"),
            (r"(?i:ab){2}?[^\]x]{2}+", r"(?:(?i:ab){2})?(?:[^\]x]{2})+"),
            (r"a{1,2}?b++c*+d??e{3,}?", r"a{1,2}?b++c*+d??e{3,}?"),
            (r"a{2}{3}*", r"(?:(?:a{2}){3})*"),
            (r"a**|\x41{2}+", r"(?:a*)*|(?:\x41{2})+"),
            (r"a{,3}+b{,}c{x}", r"(?:a{,3})+b\{,}c\{x}"),
            (r"^a$|[$^]\$", r"(?:\A|(?m:^)(?!\z))a(?m:$)|[$^]\$"),
            (r"(?x) a {2} + # {2}+", r"(?x) (?:a {2} )+ # {2}+"),
            (r"(?#{2}+)[]a]{2}+(?=x)", r"(?#{2}+)(?:[]a]{2})+(?=x)"),
        ] {
            assert_eq!(rewritten(pattern), expected);
        }
    }
}
