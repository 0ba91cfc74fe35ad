//! Operations on strings, with the behaviour of Python's `str`.

use std::ops::Range;
use std::sync::LazyLock;

use regex::Regex;

/// Returns true for the characters that Python strips and splits at: Unicode's white space, and the
/// separators of ASCII.
pub(super) fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

/// Returns the part of a text between two character positions; `None` if the part would begin after
/// the end of the text.
pub(super) fn part(text: &str, bounds: Range<usize>) -> Option<&str> {
    let mut places = text.char_indices().map(|(at, _)| at).chain([text.len()]);
    let start = places.nth(bounds.start)?;
    match bounds.end.checked_sub(bounds.start)? {
        0 => Some(&text[start..start]),
        length => Some(&text[start..places.nth(length - 1)?]),
    }
}

/// Returns the position, in characters, of the first or last occurrence of another text within
/// bounds.
pub(super) fn find(text: &str, other: &str, bounds: Range<usize>, last: bool) -> Option<usize> {
    let part = part(text, bounds.clone())?;
    let at = if last {
        part.rfind(other)
    } else {
        part.find(other)
    }?;
    Some(bounds.start + part[..at].chars().count())
}

/// Returns the words of a text. After `most` splits the rest of the text is one word.
pub(super) fn split_spaces(text: &str, most: usize) -> Vec<&str> {
    let (mut parts, mut rest) = (Vec::new(), text.trim_start_matches(is_space));
    while !rest.is_empty() {
        let end = if parts.len() < most {
            rest.find(is_space)
        } else {
            None
        };
        let (word, after) = rest.split_at(end.unwrap_or(rest.len()));
        parts.push(word);
        rest = after.trim_start_matches(is_space);
    }
    parts
}

/// Returns the words of a text like [`split_spaces`], but splits from the end.
pub(super) fn rsplit_spaces(text: &str, most: usize) -> Vec<&str> {
    let (mut parts, mut rest) = (Vec::new(), text.trim_end_matches(is_space));
    while !rest.is_empty() {
        let space = if parts.len() < most {
            rest.char_indices()
                .rfind(|&(_, character)| is_space(character))
        } else {
            None
        };
        let start = space.map_or(0, |(at, character)| at + character.len_utf8());
        parts.push(&rest[start..]);
        rest = rest[..start].trim_end_matches(is_space);
    }
    parts.reverse();
    parts
}

/// Returns the lines of a text, with or without their line ends.
pub(super) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let ends = |character| {
        matches!(
            character,
            '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let (mut lines, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let end = rest.find(ends).unwrap_or(rest.len());
        let length = if rest[end..].starts_with("\r\n") {
            2
        } else {
            rest[end..].chars().next().map_or(0, char::len_utf8)
        };
        lines.push(&rest[..end + if keep_ends { length } else { 0 }]);
        rest = &rest[end + length..];
    }
    lines
}

/// Pads a text to `width` characters: `ljust` after the text, `rjust` before it, `center` on both
/// sides.
pub(super) fn justify(text: &str, width: usize, fill: char, how: &str) -> String {
    let missing = width.saturating_sub(text.chars().count());
    let before = match how {
        "ljust" => 0,
        "rjust" => missing,
        // If the number is odd, the smaller half; the larger half before a text of even width.
        _ => missing / 2 + (missing & width & 1),
    };
    let fill = |count| std::iter::repeat_n(fill, count);
    fill(before)
        .chain(text.chars())
        .chain(fill(missing - before))
        .collect()
}

/// Replaces tabs with spaces up to the next multiple of `size`.
pub(super) fn expand_tabs(text: &str, size: usize) -> String {
    let (mut out, mut column) = (String::with_capacity(text.len()), 0);
    for character in text.chars() {
        match character {
            '\t' => {
                let count = if size == 0 { 0 } else { size - column % size };
                out.extend(std::iter::repeat_n(' ', count));
                column += count;
            }
            _ => {
                out.push(character);
                column = if matches!(character, '\n' | '\r') {
                    0
                } else {
                    column + 1
                };
            }
        }
    }
    out
}

/// Converts the first character of a word to title case: `Ss` for `ß`; for a character that is two
/// letters, such as `ǆ`, the form with one capital.
fn title_case(character: char) -> String {
    match character {
        'Ǆ'..='ǆ' => "ǅ".into(),
        'Ǉ'..='ǉ' => "ǈ".into(),
        'Ǌ'..='ǌ' => "ǋ".into(),
        'Ǳ'..='ǳ' => "ǲ".into(),
        // Georgian has capitals only for whole words.
        'ა'..='ჺ' | 'ჽ'..='ჿ' => character.into(),
        _ => {
            let mut upper = character.to_uppercase();
            upper
                .next()
                .into_iter()
                .chain(upper.flat_map(char::to_lowercase))
                .collect()
        }
    }
}

fn is_title_case(character: char) -> bool {
    matches!(character, 'ǅ' | 'ǈ' | 'ǋ' | 'ǲ' | 'ᾈ'..='ᾏ' | 'ᾘ'..='ᾟ' | 'ᾨ'..='ᾯ' | 'ᾼ' | 'ῌ' | 'ῼ')
}

fn is_upper(character: char) -> bool {
    character.is_uppercase() && !is_title_case(character)
}

fn is_cased(character: char) -> bool {
    character.is_lowercase() || character.is_uppercase() || is_title_case(character)
}

/// Converts a text to title case: every word begins with a capital. A word is a run of letters that
/// have capitals.
pub(super) fn title(text: &str) -> String {
    let (lower, mut in_word) = (text.to_lowercase(), false);
    if lower.chars().count() != text.chars().count() {
        // A character becomes several in lower case. Characters are then converted one by one; a
        // final sigma beside such a character is too rare to matter.
        return text
            .chars()
            .flat_map(|character| {
                word_character(character, character.to_lowercase().collect(), &mut in_word)
            })
            .collect();
    }
    text.chars()
        .zip(lower.chars())
        .flat_map(|(character, lower)| word_character(character, lower.into(), &mut in_word))
        .collect()
}

fn word_character(character: char, lower: String, in_word: &mut bool) -> Vec<char> {
    let is_first = !std::mem::replace(in_word, is_cased(character));
    if is_first {
        title_case(character)
    } else {
        lower
    }
    .chars()
    .collect()
}

/// Converts the first character to title case and the rest to lower case.
pub(super) fn capitalize(text: &str) -> String {
    let mut characters = text.chars();
    match characters.next() {
        None => String::new(),
        Some(first) => title_case(first) + &characters.as_str().to_lowercase(),
    }
}

/// Swaps upper and lower case.
pub(super) fn swapcase(text: &str) -> String {
    let swapped = |character: char| -> Vec<char> {
        match character {
            _ if is_upper(character) => character.to_lowercase().collect(),
            _ if character.is_lowercase() => character.to_uppercase().collect(),
            _ => vec![character],
        }
    };
    text.chars().flat_map(swapped).collect()
}

/// Folds the case: letters that differ only in case become equal.
pub(super) fn casefold(text: &str) -> String {
    let folded = |character: char| -> Vec<char> {
        match character {
            // Its capital is also the capital of another letter.
            'ı' => vec![character],
            _ => character
                .to_uppercase()
                .flat_map(char::to_lowercase)
                .collect(),
        }
    };
    text.chars().flat_map(folded).collect()
}

/// Compiles a pattern of Unicode categories that must match a whole text.
fn whole(class: &str) -> Regex {
    Regex::new(&format!(r"\A{class}\z"))
        .unwrap_or_else(|error| unreachable!("a constant pattern: {error}"))
}

/// Returns the result of a method that tests a text, by the method's name; `None` for another
/// method.
pub(super) fn is(text: &str, method: &str) -> Option<bool> {
    static ALPHA: LazyLock<Regex> = LazyLock::new(|| whole(r"\p{L}+"));
    static ALNUM: LazyLock<Regex> = LazyLock::new(|| whole(r"[\p{L}\p{N}]+"));
    static DECIMAL: LazyLock<Regex> = LazyLock::new(|| whole(r"\p{Nd}+"));
    // Superscript, subscript and circled digits count, numbers from ten on do not.
    static DIGIT: LazyLock<Regex> =
        LazyLock::new(|| whole("[\\p{Nd}²³¹⁰⁴-⁹₀-₉፩-፱①-⑨⑴-⑼⒈-⒐⓪⓵-⓽⓿❶-❾➀-➈➊-➒🄀-🄊]+"));
    static NUMERIC: LazyLock<Regex> =
        LazyLock::new(|| whole(r"[\p{N}〇零一二三四五六七八九十百千万萬億亿兆]+"));
    static IDENTIFIER: LazyLock<Regex> =
        LazyLock::new(|| whole(r"[_\p{XID_Start}]\p{XID_Continue}*"));
    static PRINTABLE: LazyLock<Regex> = LazyLock::new(|| whole(r"[ [^\p{C}\p{Z}]]*"));
    let cased = || text.chars().any(is_cased);
    Some(match method {
        "isalpha" => ALPHA.is_match(text),
        "isalnum" => ALNUM.is_match(text),
        "isdecimal" => DECIMAL.is_match(text),
        "isdigit" => DIGIT.is_match(text),
        "isnumeric" => NUMERIC.is_match(text),
        "isidentifier" => IDENTIFIER.is_match(text),
        "isprintable" => PRINTABLE.is_match(text),
        "isascii" => text.is_ascii(),
        "isspace" => !text.is_empty() && text.chars().all(is_space),
        "islower" => {
            cased()
                && !text
                    .chars()
                    .any(|character| character.is_uppercase() || is_title_case(character))
        }
        "isupper" => {
            cased()
                && !text
                    .chars()
                    .any(|character| character.is_lowercase() || is_title_case(character))
        }
        "istitle" => {
            let (mut in_word, mut found) = (false, false);
            for character in text.chars() {
                let starts = is_upper(character) || is_title_case(character);
                if (starts && in_word) || (character.is_lowercase() && !in_word) {
                    return Some(false);
                }
                in_word = is_cased(character);
                found |= in_word;
            }
            found
        }
        _ => return None,
    })
}
