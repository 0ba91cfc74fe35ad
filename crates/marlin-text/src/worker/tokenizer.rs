//! A `tokenizer.json` at work.

use std::collections::HashSet;

use marlin_format::with_causes;
use tokenizers::AddedToken;

use super::protocol::{ConfigTokens, Loaded};

/// A tokenizer, without the truncation and padding of its file: a prompt is encoded as it is.
#[derive(Debug)]
pub(super) struct Engine(tokenizers::Tokenizer);

impl Engine {
    pub fn load(json: &[u8], tokens: ConfigTokens) -> Result<(Self, Loaded), String> {
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(json).map_err(described)?;
        tokenizer.with_truncation(None).map_err(described)?;
        tokenizer.with_padding(None);
        let tokens = config_tokens(&tokenizer, tokens);
        tokenizer.add_tokens(tokens).map_err(described)?;
        let vocab_size = tokenizer.get_vocab(true).values().max().map_or(0, |&largest| largest as usize + 1);
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special).map(|(&id, _)| id).collect();
        let added = added.into_iter().map(|(id, _)| id).collect();
        Ok((Self(tokenizer), Loaded { vocab_size, special, added }))
    }

    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, String> {
        Ok(self.0.encode_fast(text, add_special_tokens).map_err(described)?.get_ids().to_vec())
    }

    pub fn decode(&self, sequences: &[Vec<u32>]) -> Result<Vec<String>, String> {
        sequences.iter().map(|tokens| self.0.decode(tokens, true).map_err(described)).collect()
    }

    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    pub fn token_text(&self, id: u32) -> Option<String> {
        self.0.id_to_token(id)
    }
}

/// The tokens of configs in the order in which `transformers` adds them; those that the tokenizer has already change nothing.
fn config_tokens(tokenizer: &tokenizers::Tokenizer, tokens: ConfigTokens) -> Vec<AddedToken> {
    let known = tokenizer.get_added_tokens_decoder();
    let ConfigTokens { mut added, over_those_of_file, named, extra } = tokens;
    if !over_those_of_file {
        added.extend(known.iter().map(|(&id, token)| (id, token.clone())));
    }
    let names: HashSet<String> = named.iter().map(|token| token.content.clone()).collect();
    let mut tokens: Vec<AddedToken> = added.into_values().collect();
    let mut texts: HashSet<String> = tokens.iter().chain(known.values()).map(|token| token.content.clone()).collect();
    tokens.extend(named.into_iter().chain(extra).filter(|token| texts.insert(token.content.clone())));
    for token in tokens.iter_mut().filter(|token| names.contains(&token.content)) {
        token.special = true;
    }
    tokens
}

fn described(error: tokenizers::Error) -> String {
    with_causes(error.as_ref())
}
