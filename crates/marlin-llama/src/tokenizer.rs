//! `tokenizer.json`, and text that comes token by token.

use std::path::{Path, PathBuf};

use crate::LlamaError;
use marlin_format::checkpoint::{MAX_TOKENIZER_BYTES, read_file};

/// The tokenizer of a model, read from a `tokenizer.json`.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// Truncation and padding that the file asks for are left out: a prompt is taken as it is.
    ///
    /// # Errors
    /// [`LlamaError::Io`] where the file is missing, [`LlamaError::Tokenizer`] where it is not a tokenizer.
    pub fn open(path: &Path) -> Result<Self, LlamaError> {
        let bytes = read_file(path, MAX_TOKENIZER_BYTES).map_err(|source| LlamaError::io("read", path, source))?;
        let error = |source| LlamaError::Tokenizer { path: path.into(), source };
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(error)?;
        inner.with_truncation(None).map_err(error)?;
        inner.with_padding(None);
        Ok(Self { inner, path: path.into() })
    }

    /// One more than the largest token id.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab(true).values().max().map_or(0, |&largest| largest as usize + 1)
    }

    /// Whether every token is in a model's vocabulary. A model's may be larger: it is often padded.
    ///
    /// # Errors
    /// [`LlamaError::TokenizerMismatch`] with both sizes.
    pub fn check_vocab(&self, model: usize) -> Result<(), LlamaError> {
        let tokenizer = self.vocab_size();
        if tokenizer <= model { Ok(()) } else { Err(LlamaError::TokenizerMismatch { path: self.path.clone(), tokenizer, model }) }
    }

    /// The tokens of a text, with what the tokenizer's post-processor adds, such as a token that starts a text.
    ///
    /// # Errors
    /// [`LlamaError::Tokenizer`] for a text that the tokenizer has no tokens for.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, LlamaError> {
        Ok(self.inner.encode_fast(text, true).map_err(|source| self.error(source))?.get_ids().to_vec())
    }

    /// The tokens of a text that holds special tokens as text, as a rendered chat template does. Nothing is added: what starts a text is in it.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, LlamaError> {
        Ok(self.inner.encode_fast(text, false).map_err(|source| self.error(source))?.get_ids().to_vec())
    }

    /// Whether a token is a special one, which stands for no text.
    pub fn is_special(&self, token: u32) -> bool {
        self.inner.get_added_tokens_decoder().get(&token).is_some_and(|added| added.special)
    }

    /// The text of tokens, without special tokens. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`LlamaError::Tokenizer`] where the tokenizer's decoder fails.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, LlamaError> {
        self.inner.decode(tokens, true).map_err(|source| self.error(source))
    }

    /// The token of a word such as `<|endoftext|>`.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    fn error(&self, source: tokenizers::Error) -> LlamaError {
        LlamaError::Tokenizer { path: self.path.clone(), source }
    }
}

/// Text from tokens, one at a time: each piece is whole characters, and all pieces together are the text.
///
/// A character may span tokens, for byte-level BPE and byte fallback alike; its bytes are held back until it is whole. A token's text may also
/// depend on the token before (a first token loses its space), so tokens are decoded together with those of the last piece.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens of the last piece, then those since.
    window: Vec<u32>,
    /// How many of the window's tokens belong to the last piece.
    settled: usize,
    /// What of the window's text was given out.
    shown: String,
    /// Tokens since then that did not complete a character.
    held: usize,
}

impl<'a> TextStream<'a> {
    /// Tokens of a prompt that are kept before the text; enough that one of them is not a special token.
    const CONTEXT: usize = 8;
    /// Bytes of the longest UTF-8 character: tokens have one at least, so that no character waits for more.
    const LONGEST: usize = 4;

    /// A stream of the text that follows `prompt`.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn after(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Result<Self, LlamaError> {
        let window = prompt[prompt.len().saturating_sub(Self::CONTEXT)..].to_vec();
        let shown = tokenizer.decode(&window)?;
        Ok(Self { tokenizer, settled: window.len(), window, shown, held: 0 })
    }

    /// Adds a token; returns the text that is whole now.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, token: u32) -> Result<Option<String>, LlamaError> {
        self.window.push(token);
        let text = self.tokenizer.decode(&self.window)?;
        let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        if whole.len() == text.len() {
            self.held = 0;
            let piece = self.show_all(&text)?;
            if piece.is_some() {
                self.settle()?;
            }
            return Ok(piece);
        }
        self.held += 1;
        if self.held < Self::LONGEST {
            return Ok(self.show(whole));
        }
        // Replacement characters, or bytes that are none: only the last three tokens can still become a character.
        let before = self.tokenizer.decode(&self.window[..self.window.len() + 1 - Self::LONGEST])?;
        let settled = text.chars().zip(before.chars()).take_while(|(now, before)| now == before);
        let settled: usize = settled.map(|(now, _)| now.len_utf8()).sum();
        Ok(self.show(&text[..settled]))
    }

    /// The rest, where bytes of an unfinished character are held back.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(mut self) -> Result<Option<String>, LlamaError> {
        let text = self.tokenizer.decode(&self.window)?;
        self.show_all(&text)
    }

    /// What `text`, the beginning of the window's text, adds to what was given out.
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

    /// What `text`, all of the window's text, adds to what was given out.
    fn show_all(&mut self, text: &str) -> Result<Option<String>, LlamaError> {
        if text.starts_with(self.shown.as_str()) {
            return Ok(self.show(text));
        }
        // Byte fallback makes all of a run of bytes U+FFFD where a part of it is not UTF-8, even what was whole before. Start again after that.
        self.window.drain(..self.settled);
        self.settled = 0;
        self.shown.clear();
        let text = self.tokenizer.decode(&self.window)?;
        Ok(self.show(&text))
    }

    /// Forgets the tokens before the last piece, where that piece has a text of its own.
    fn settle(&mut self) -> Result<(), LlamaError> {
        let text = self.tokenizer.decode(&self.window[self.settled..])?;
        if !text.is_empty() {
            self.window.drain(..self.settled);
            self.shown = text;
        }
        self.settled = self.window.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
