//! Decoding of tokens to text, one token at a time.

use crate::{TextError, Tokenizer};

/// Decodes tokens to text, one token at a time. Each piece consists of whole characters, and all
/// pieces together are the text.
///
/// A character may span tokens, for byte-level BPE and byte fallback alike; its bytes are held back
/// until it is whole. A token's text may also depend on the token before (a first token loses its
/// space), so tokens are decoded together with those of the last piece.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens of the last piece, then the tokens after it.
    window: Vec<u32>,
    /// The number of the window's tokens that belong to the last piece.
    settled: usize,
    /// The part of the window's text that was returned.
    shown: String,
    /// The number of tokens since then that did not complete a character.
    held: usize,
    /// True if all of the window's text was returned, and it ends with a whole character.
    is_whole: bool,
    /// True if `shown` is not set: it is all of the window's text.
    is_unread: bool,
}

impl<'a> TextStream<'a> {
    /// The number of a prompt's tokens that are kept before the text; enough that one of them is
    /// not a special token.
    const CONTEXT: usize = 8;
    /// The bytes of the longest UTF-8 character. A token has at least one byte, so that no
    /// character waits for more tokens than this.
    const LONGEST: usize = 4;

    /// Creates a stream of the text that follows `prompt`.
    ///
    /// # Errors
    /// See [`Tokenizer::decode`].
    pub fn after(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Result<Self, TextError> {
        let window = prompt[prompt.len().saturating_sub(Self::CONTEXT)..].to_vec();
        let shown = tokenizer.decode(&window)?;
        Ok(Self {
            tokenizer,
            settled: window.len(),
            window,
            is_whole: !shown.is_empty() && !shown.ends_with(char::REPLACEMENT_CHARACTER),
            shown,
            held: 0,
            is_unread: false,
        })
    }

    /// Adds a token and returns the text that it completes.
    ///
    /// # Errors
    /// See [`Tokenizer::decode`].
    pub fn push(&mut self, token: u32) -> Result<Option<String>, TextError> {
        if self.is_whole
            && let Some(text) = self.tokenizer.plain_text(token)
        {
            self.window.clear();
            self.window.push(token);
            (self.settled, self.is_unread) = (1, true);
            return Ok(Some(text.into()));
        }
        self.window.push(token);
        let [text, own] = self.texts()?;
        let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        self.is_whole = whole.len() == text.len() && !text.is_empty();
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
        // The text ends with replacement characters, or with bytes that are not a character. Only
        // the last three tokens can still become a character.
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

    /// Returns the rest of the text, if bytes of an unfinished character are held back.
    ///
    /// # Errors
    /// See [`Tokenizer::decode`].
    pub fn finish(mut self) -> Result<Option<String>, TextError> {
        let [text, own] = self.texts()?;
        Ok(self.show_all(&text, &own))
    }

    /// Decodes the window, and separately its tokens after the last piece.
    fn texts(&mut self) -> Result<[String; 2], TextError> {
        let (shown, rest) = self.window.split_at(self.settled);
        if std::mem::take(&mut self.is_unread) {
            let [shown, text, own] = self.tokenizer.decode_each([shown, &self.window, rest])?;
            self.shown = shown;
            return Ok([text, own]);
        }
        self.tokenizer.decode_each([&self.window, rest])
    }

    /// Returns the part of `text`, the beginning of the window's text, that was not returned
    /// before.
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

    /// Returns the part of `text`, all of the window's text, that was not returned before. `own` is
    /// the text of the tokens after the last piece.
    fn show_all(&mut self, text: &str, own: &str) -> Option<String> {
        if text.starts_with(self.shown.as_str()) {
            return self.show(text);
        }
        // If a part of a run of bytes is not UTF-8, byte fallback decodes the whole run to U+FFFD,
        // even characters that were complete before. Start again after that.
        self.window.drain(..self.settled);
        self.settled = 0;
        self.shown.clear();
        self.show(own)
    }

    /// Drops the tokens before the last piece, if that piece has a text of its own.
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
