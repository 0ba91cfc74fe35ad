//! The bytes that each token of a tokenizer stands for.

use serde_json::Value;
use tokenizers::DecoderWrapper;

/// The bytes that the decoder of a tokenizer writes for the text of a token in the vocabulary.
#[derive(Debug, Default)]
pub(super) struct TokenBytes {
    /// True if each character stands for a byte, as in GPT-2.
    byte_level: bool,
    /// True if a token such as `<0x0A>` stands for a byte.
    byte_fallback: bool,
    /// Texts that are replaced, in order.
    replaced: Vec<(String, String)>,
    /// The texts that are removed from the start of a text.
    stripped: Vec<String>,
    /// True if the end of a text may be removed.
    strips_end: bool,
}

impl TokenBytes {
    /// Reads how a decoder writes tokens. A decoder that only changes the start or the end of a
    /// text, such as `Strip`, changes no token.
    ///
    /// # Errors
    /// Names the decoder if what it writes for a token depends on other tokens.
    pub fn of_decoder(decoder: Option<&DecoderWrapper>) -> Result<Self, String> {
        let mut bytes = Self::default();
        let decoder = serde_json::to_value(decoder).map_err(|error| error.to_string())?;
        bytes.read(&decoder)?;
        Ok(bytes)
    }

    fn read(&mut self, decoder: &Value) -> Result<(), String> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        match decoder["type"].as_str() {
            None | Some("Fuse") => {}
            Some("Strip") => {
                self.stripped.push(text(&decoder["content"]));
                self.strips_end |= decoder["stop"] != 0;
            }
            Some("ByteLevel") => self.byte_level = true,
            Some("ByteFallback") => self.byte_fallback = true,
            Some("Metaspace") => {
                self.replaced
                    .push((text(&decoder["replacement"]), " ".into()));
                self.stripped.push(" ".into());
            }
            Some("Replace") if decoder["pattern"]["String"].is_string() => self.replaced.push((
                text(&decoder["pattern"]["String"]),
                text(&decoder["content"]),
            )),
            Some("Sequence") => {
                for inner in decoder["decoders"].as_array().into_iter().flatten() {
                    self.read(inner)?;
                }
            }
            Some(other) => {
                return Err(format!(
                    "its decoder `{other}` does not write tokens one by one, so that the bytes of a token are not known"
                ));
            }
        }
        Ok(())
    }

    /// Returns the text that a token that is not an added token has after any text of whole
    /// characters; `None` if its text depends on the tokens around it, or may be removed at the
    /// start of a text.
    pub fn plain_text(&self, token: &str) -> Option<String> {
        let is_one_character = |(from, _): &(String, String)| from.chars().count() == 1;
        // A run of fallback bytes is decoded as a whole.
        if self.strips_end
            || !self.replaced.iter().all(is_one_character)
            || (self.byte_level && !self.replaced.is_empty())
            || (self.byte_fallback && fallback_byte(token).is_some())
        {
            return None;
        }
        let text = String::from_utf8(self.of(token)).ok()?;
        let is_removed = self
            .stripped
            .iter()
            .any(|part| part.is_empty() || text.replace(part.as_str(), "").is_empty());
        let is_plain = !text.is_empty() && !is_removed && !text.contains('\u{fffd}');
        is_plain.then_some(text)
    }

    /// Returns the bytes of a token that is not an added token.
    pub fn of(&self, token: &str) -> Vec<u8> {
        if self.byte_fallback
            && let Some(byte) = fallback_byte(token)
        {
            return vec![byte];
        }
        if self.byte_level {
            // A character that stands for no byte is written as it is, as the decoder does.
            let bytes: Option<Vec<u8>> = token.chars().map(byte_of).collect();
            return bytes.unwrap_or_else(|| token.as_bytes().to_vec());
        }
        let replaced = self
            .replaced
            .iter()
            .filter(|(from, _)| !from.is_empty())
            .fold(token.to_string(), |text, (from, to)| text.replace(from, to));
        replaced.into_bytes()
    }
}

/// Returns the byte of a token such as `<0x0A>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2)
        .then(|| u8::from_str_radix(hex, 16).ok())
        .flatten()
}

/// Returns the byte that a character stands for in byte-level BPE: printable bytes of Latin-1 are
/// themselves, and the other 68 bytes, in order, are the characters from U+0100 on.
fn byte_of(character: char) -> Option<u8> {
    let printable = |byte: &u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    match u32::from(character) {
        code @ 0..=0xFF => u8::try_from(code).ok().filter(printable),
        code => (0..=0xFF)
            .filter(|byte| !printable(byte))
            .nth(code as usize - 0x100),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn bytes(decoder: Value) -> Result<TokenBytes, String> {
        TokenBytes::of_decoder(Some(&serde_json::from_value(decoder).unwrap()))
    }

    #[test]
    fn every_byte_has_a_character_of_its_own() {
        let mut found: Vec<u8> = (0..0x200)
            .filter_map(char::from_u32)
            .filter_map(byte_of)
            .collect();
        found.sort_unstable();
        assert_eq!(found, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
    }

    #[test]
    fn tokens_of_sentencepiece_are_texts_and_bytes() {
        let replace = json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " });
        let strip = json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 });
        let bytes = bytes(json!({ "type": "Sequence", "decoders": [replace, { "type": "ByteFallback" }, { "type": "Fuse" }, strip] })).unwrap();
        assert_eq!(bytes.of("▁a▁é"), " a é".as_bytes());
        assert_eq!(bytes.of("<0xE2>"), [0xE2]);
        for text in ["<0x>", "<0x123>", "<0xé>", "<0x+1>a"] {
            assert_eq!(bytes.of(text), text.as_bytes());
        }
    }

    #[test]
    fn a_decoder_that_joins_words_is_refused() {
        let decoder = json!({ "type": "WordPiece", "prefix": "##", "cleanup": true });
        assert!(bytes(decoder).unwrap_err().contains("`WordPiece`"));
    }
}
