//! Mutations of valid inputs, for machines without libFuzzer.

use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

/// The punctuation and keywords of JSON, and numbers that are edge cases.
pub const JSON: [&str; 17] = [
    "{", "}", "[", "]", ",", ":", "\"", "null", "true", "false", "{}", "[]", "\"\"", "0", "1",
    "-1", "1e308",
];

/// Returns the number of inputs for each target: the value of `MARLIN_FUZZ_INPUTS`, or `otherwise`.
pub fn inputs(otherwise: usize) -> usize {
    std::env::var("MARLIN_FUZZ_INPUTS")
        .ok()
        .and_then(|count| count.parse().ok())
        .unwrap_or(otherwise)
}

/// Returns a text with one to four changes. `tokens` are the texts that may be inserted.
pub fn mutated(rng: &mut StdRng, text: &[u8], tokens: &[&str]) -> Vec<u8> {
    let mut text = text.to_vec();
    for _ in 0..rng.random_range(1..=4) {
        let start = rng.random_range(0..=text.len());
        let end = (start + rng.random_range(0..=12)).min(text.len());
        match rng.random_range(0..6) {
            0 if start < text.len() => text[start] ^= 1 << rng.random_range(0..8),
            0 | 1 => drop(text.splice(start..start, tokens.choose(rng).unwrap().bytes())),
            2 => drop(text.drain(start..end)),
            3 => {
                let range = text[start..end].to_vec();
                let to = rng.random_range(0..=text.len());
                text.splice(to..to, range);
            }
            // Replaces a whole number or word, or the text of a whole string.
            4 | 5 => {
                let word = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(byte);
                let begin = text[..start]
                    .iter()
                    .rposition(|byte| !word(byte))
                    .map_or(0, |before| before + 1);
                let end = start
                    + text[start..]
                        .iter()
                        .position(|byte| !word(byte))
                        .unwrap_or(text.len() - start);
                text.splice(begin..end, tokens.choose(rng).unwrap().bytes());
            }
            _ => text.truncate(start),
        }
    }
    text
}
