//! Text that comes token by token.

use crate::{TextError, Tokenizer};

/// Text from tokens, one at a time: each piece is whole characters, and all pieces together are the
/// text.
///
/// A character may span tokens, for byte-level BPE and byte fallback alike; its bytes are held back
/// until it is whole. A token's text may also depend on the token before (a first token loses its
/// space), so tokens are decoded together with those of the last piece.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens of the last piece, then those since.
    window: Vec<u32>,
    /// The number of the window's tokens that belong to the last piece.
    settled: usize,
    /// The part of the window's text that was given out.
    shown: String,
    /// Tokens since then that did not complete a character.
    held: usize,
}

impl<'a> TextStream<'a> {
    /// Tokens of a prompt that are kept before the text; enough that one of them is not a special
    /// token.
    const CONTEXT: usize = 8;
    /// Bytes of the longest UTF-8 character: tokens have one at least, so that no character waits
    /// for more.
    const LONGEST: usize = 4;

    /// A stream of the text that follows `prompt`.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn after(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Result<Self, TextError> {
        let window = prompt[prompt.len().saturating_sub(Self::CONTEXT)..].to_vec();
        let shown = tokenizer.decode(&window)?;
        Ok(Self {
            tokenizer,
            settled: window.len(),
            window,
            shown,
            held: 0,
        })
    }

    /// Adds a token; returns the text that is whole now.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, token: u32) -> Result<Option<String>, TextError> {
        self.window.push(token);
        let [text, own] = self.texts()?;
        let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        if whole.len() == text.len() {
            self.held = 0;
            let piece = self.show_all(&text, &own);
            if piece.is_some() {
                self.settle(own);
            }
            return Ok(piece);
        }
        self.held += 1;
        if self.held < Self::LONGEST {
            return Ok(self.show(whole));
        }
        // Replacement characters, or bytes that are none: only the last three tokens can still
        // become a character.
        let before = self
            .tokenizer
            .decode(&self.window[..self.window.len() + 1 - Self::LONGEST])?;
        let settled = text
            .chars()
            .zip(before.chars())
            .take_while(|(now, before)| now == before);
        let settled: usize = settled.map(|(now, _)| now.len_utf8()).sum();
        Ok(self.show(&text[..settled]))
    }

    /// The rest, where bytes of an unfinished character are held back.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(mut self) -> Result<Option<String>, TextError> {
        let [text, own] = self.texts()?;
        Ok(self.show_all(&text, &own))
    }

    /// The text of the window, and that of its tokens since the last piece by themselves.
    fn texts(&self) -> Result<[String; 2], TextError> {
        self.tokenizer
            .decode_each([&self.window, &self.window[self.settled..]])
    }

    /// Returns what `text`, the beginning of the window's text, adds to the text given out.
    fn show(&mut self, text: &str) -> Option<String> {
        let piece = text.strip_prefix(self.shown.as_str())?;
        if piece.is_empty() {
            return None;
        }
        let piece = piece.to_string();
        self.shown.push_str(&piece);
        self.held = 0;
        Some(piece)
    }

    /// Returns what `text`, all of the window's text, adds to the text given out. `own` is that of
    /// the tokens since the last piece.
    fn show_all(&mut self, text: &str, own: &str) -> Option<String> {
        if text.starts_with(self.shown.as_str()) {
            return self.show(text);
        }
        // Byte fallback makes all of a run of bytes U+FFFD where a part of it is not UTF-8, even
        // what was whole before. Start again after that.
        self.window.drain(..self.settled);
        self.settled = 0;
        self.shown.clear();
        self.show(own)
    }

    /// Forgets the tokens before the last piece, where that piece has a text of its own.
    fn settle(&mut self, own: String) {
        if !own.is_empty() {
            self.window.drain(..self.settled);
            self.shown = own;
        }
        self.settled = self.window.len();
    }
}

#[cfg(test)]
mod tests;
