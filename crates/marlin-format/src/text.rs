//! Functions that make untrusted text safe for messages and names.

/// The maximum number of characters of a file's text in a message.
const SHOWN: usize = 200;
/// The maximum length of a name, in bytes. Names of published tensors have at most 120 bytes.
const MAX_NAME_BYTES: usize = 1024;

/// Returns the beginning of a file's text for a message. Control characters, which a terminal would
/// obey, are escaped.
pub fn excerpt(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN).flat_map(shown_char).collect();
    if text.chars().nth(SHOWN).is_some() {
        shown.push_str("...");
    }
    shown
}

/// Returns a text with its control characters escaped, except line breaks and tabs.
pub fn without_control(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            if matches!(c, '\n' | '\t') {
                vec![c]
            } else {
                shown_char(c)
            }
        })
        .collect()
}

/// Returns the message of an error and the messages of its causes, joined by `: `. The first
/// message often names the file; the last often states both sides of a mismatch.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source())
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}

fn shown_char(c: char) -> Vec<char> {
    if c.is_control() {
        c.escape_default().collect()
    } else {
        vec![c]
    }
}

/// Returns true if a name is short and has no control characters.
pub(crate) fn is_plain(name: &str) -> bool {
    name.len() <= MAX_NAME_BYTES && !name.chars().any(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_escaped_and_long_texts_are_cut() {
        assert_eq!(excerpt("a\u{1b}[31mb\n\u{9b}"), "a\\u{1b}[31mb\\n\\u{9b}");
        assert_eq!(
            excerpt(&"ä".repeat(100_000)),
            format!("{}...", "ä".repeat(200))
        );
        assert_eq!(excerpt(&"x".repeat(200)), "x".repeat(200));
        assert_eq!(without_control("a\n\tb\u{1b}c"), "a\n\tb\\u{1b}c");
        assert!(
            is_plain("model.layers.0.mlp.up_proj.weight")
                && !is_plain("a\u{1b}")
                && !is_plain(&"x".repeat(1025))
        );
    }
}
