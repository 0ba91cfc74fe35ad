//! The tokenizer of a `tokenizer.json`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::tokenizer_config::TokenizerConfig;
use crate::worker::{Loaded, Request, Subject, Worker};
use crate::{Failure, TextError};

/// The tokenizer of a model, read from a `tokenizer.json`.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    worker: Arc<Worker>,
    path: PathBuf,
    vocab_size: usize,
    /// The number of tokens in the model's vocabulary; `usize::MAX` if no model is known.
    model_vocab_size: usize,
    /// The special tokens, which decoding skips.
    special: Arc<BTreeSet<u32>>,
    /// Tokens added to those of the tokenizer's algorithm, including special tokens.
    added: Arc<BTreeSet<u32>>,
    /// The special tokens that decoding does not skip, with their texts.
    shown: Arc<BTreeMap<u32, String>>,
    /// The texts, by token id, of tokens whose text does not depend on the tokens around them.
    plain: Arc<[Option<Box<str>>]>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`, and the tokens that the configs beside it add. As in
    /// `transformers`, tokens that are only in `tokenizer_config.json`, `special_tokens_map.json`
    /// or `added_tokens.json` get the ids after the last token of `tokenizer.json`.
    ///
    /// Truncation and padding in the file are ignored: a prompt is encoded as it is.
    ///
    /// # Errors
    /// [`TextError::Io`] if the file is missing, [`TextError::Tokenizer`] if it is not a tokenizer,
    /// [`TextError::Json`] if a config beside it does not have the expected form.
    pub fn open(path: &Path) -> Result<Self, TextError> {
        let config = TokenizerConfig::read(path.parent().unwrap_or(Path::new("")))?;
        let subject = Subject::Tokenizer {
            path: path.into(),
            tokens: config.into_tokens(),
        };
        let (worker, loaded): (_, Loaded) =
            Worker::open(subject).map_err(|source| match source {
                Failure::File(source) => TextError::io(path, source),
                source => TextError::Tokenizer {
                    path: path.into(),
                    source,
                },
            })?;
        let Loaded {
            vocab_size,
            special,
            added,
        } = loaded;
        let [special, added] =
            [special, added].map(|tokens| Arc::new(tokens.into_iter().collect()));
        Ok(Self {
            worker: Arc::new(worker),
            path: path.into(),
            vocab_size,
            model_vocab_size: usize::MAX,
            special,
            added,
            shown: Arc::default(),
            plain: Arc::default(),
        })
    }

    /// Reads the texts of tokens that do not depend on the tokens around them, which are most
    /// tokens of byte-level BPE and of SentencePiece. A [`TextStream`](crate::TextStream) then
    /// takes such a token without a call of the tokenizer's decoder.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if the call of the worker fails.
    pub fn with_plain_texts(mut self) -> Result<Self, TextError> {
        let texts: Vec<Option<Box<str>>> = self.call(Request::PlainTexts, "")?;
        self.plain = texts.into();
        Ok(self)
    }

    /// Returns the text of a token that does not depend on the tokens around it; `None` if it
    /// depends on them, or was not [read](Self::with_plain_texts).
    pub(crate) fn plain_text(&self, token: u32) -> Option<&str> {
        self.plain.get(token as usize)?.as_deref()
    }

    /// Makes decoding write these special tokens as their texts, such as the `[TOOL_CALLS]` that
    /// marks where a model calls a tool. Texts that are no token change nothing.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if the call of the worker fails.
    pub fn showing(mut self, tokens: &[&str]) -> Result<Self, TextError> {
        let mut shown = BTreeMap::clone(&self.shown);
        for &text in tokens {
            if let Some(token) = self.token_id(text)?.filter(|&token| self.is_special(token)) {
                shown.insert(token, text.to_string());
            }
        }
        self.shown = Arc::new(shown);
        Ok(self)
    }

    /// Returns one more than the largest token id.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Sets the size of the model's vocabulary.
    ///
    /// A tokenizer may have tokens that the model does not have, such as one for padding that a
    /// fine-tune added: this method then logs a warning, and encoding a text with such a token is
    /// an error. The model's vocabulary may also be larger: it is often padded.
    #[must_use]
    pub fn for_model(self, vocab_size: usize) -> Self {
        if self.vocab_size > vocab_size {
            tracing::warn!(
                "the tokenizer {} has {} tokens, the model's vocabulary has {vocab_size}: texts with a token from {vocab_size} on are refused",
                self.path.display(),
                self.vocab_size
            );
        }
        Self {
            model_vocab_size: vocab_size,
            ..self
        }
    }

    /// Encodes a text, with the tokens that the tokenizer's post-processor adds, such as a token
    /// that starts a text.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if the tokenizer has no tokens for the text,
    /// [`TextError::TokenOutsideVocabulary`] if the text has a token that the model does not have.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.tokens(text, true)
    }

    /// Encodes a text that contains special tokens as text, such as a rendered chat template. No
    /// token is added: the text already contains the token that starts it.
    ///
    /// # Errors
    /// See [`encode`](Self::encode).
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.tokens(text, false)
    }

    fn tokens(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let tokens: Vec<u32> = self.call(Request::Encode { add_special_tokens }, text)?;
        match tokens
            .iter()
            .find(|&&id| id as usize >= self.model_vocab_size)
        {
            None => Ok(tokens),
            Some(&id) => {
                let token: Option<String> = self.call(Request::TokenText { id }, "")?;
                let (path, token) = (self.path.clone(), token.unwrap_or_default());
                Err(TextError::TokenOutsideVocabulary {
                    path,
                    token,
                    id,
                    vocab_size: self.model_vocab_size,
                })
            }
        }
    }

    /// Returns true if a token is a special token, which decoding skips unless it is
    /// [shown](Self::showing).
    pub fn is_special(&self, token: u32) -> bool {
        self.special.contains(&token)
    }

    /// Returns true if a token was added to the tokens of the tokenizer's algorithm. Special tokens
    /// and the tokens of a fine-tune are added tokens.
    pub fn is_added(&self, token: u32) -> bool {
        self.added.contains(&token)
    }

    /// Decodes tokens to text, without the special tokens that are not [shown](Self::showing).
    /// Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if the tokenizer's decoder fails.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TextError> {
        let [text] = self.decode_each([tokens])?;
        Ok(text)
    }

    /// [Decodes](Self::decode) several sequences of tokens in one call of the worker.
    pub(crate) fn decode_each<const N: usize>(
        &self,
        sequences: [&[u32]; N],
    ) -> Result<[String; N], TextError> {
        let is_shown = |token: &u32| self.shown.contains_key(token);
        // The parts between shown tokens, one more than there are shown tokens.
        let parts: Vec<Vec<u32>> = sequences
            .iter()
            .flat_map(|tokens| tokens.split(is_shown).map(<[u32]>::to_vec))
            .collect();
        let expected = parts.len();
        let texts: Vec<String> = self.call(Request::Decode { sequences: parts }, "")?;
        if texts.len() != expected {
            return Err(self.error(Failure::Worker {
                what: format!("gave {} texts for {expected}", texts.len()),
            }));
        }
        let mut texts = texts.into_iter();
        Ok(sequences.map(|tokens| {
            let mut text = texts.next().unwrap_or_default();
            for shown in tokens.iter().filter_map(|token| self.shown.get(token)) {
                text.push_str(shown);
                text.push_str(&texts.next().unwrap_or_default());
            }
            text
        }))
    }

    /// Returns the id of the token with a text such as `<|endoftext|>`; `None` if there is no such
    /// token.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if the call of the worker fails.
    pub fn token_id(&self, token: &str) -> Result<Option<u32>, TextError> {
        self.call(Request::TokenId, token)
    }

    /// Returns the bytes that each token stands for, by token id. A token may be a part of a
    /// character. An added token has the bytes of its text.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if what the tokenizer's decoder writes for a token depends on the
    /// tokens around it.
    pub fn token_bytes(&self) -> Result<BTreeMap<u32, Vec<u8>>, TextError> {
        self.call(Request::Vocabulary, "")
    }

    fn call<T: serde::de::DeserializeOwned>(
        &self,
        request: Request,
        text: &str,
    ) -> Result<T, TextError> {
        self.worker
            .call(request, text.as_bytes())
            .map_err(|source| self.error(source))
    }

    fn error(&self, source: Failure) -> TextError {
        TextError::Tokenizer {
            path: self.path.clone(),
            source,
        }
    }
}
