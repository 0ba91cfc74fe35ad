//! The tokens of a model as a trie over their bytes.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use marlin_text::Tokenizer;

use super::GrammarError;

/// Makes the trie of a tokenizer's tokens for a model with `vocab_size` tokens, which `stop_tokens`
/// end.
///
/// Special tokens, and added tokens in angle brackets, are never a part of text: a grammar only
/// allows them by name or id. The remaining tokens of the model's vocabulary are never allowed.
pub(super) fn token_trie(
    tokenizer: &Tokenizer,
    vocab_size: usize,
    stop_tokens: &[u32],
) -> Result<TokEnv, GrammarError> {
    let mut words = vec![Vec::new(); vocab_size];
    for (id, bytes) in tokenizer.token_bytes()? {
        let Some(word) = words.get_mut(id as usize) else {
            continue;
        };
        let in_brackets = bytes.starts_with(b"<") && bytes.ends_with(b">");
        if tokenizer.is_special(id) || (tokenizer.is_added(id) && in_brackets) {
            word.push(TokTrie::SPECIAL_TOKEN_MARKER);
        }
        word.extend(bytes);
    }
    token_env(&words, stop_tokens)
}

/// Makes the trie of tokens with these bytes.
pub(super) fn token_env(words: &[Vec<u8>], stop_tokens: &[u32]) -> Result<TokEnv, GrammarError> {
    let vocab_size = words.len();
    let stop_tokens: Vec<u32> = stop_tokens
        .iter()
        .copied()
        .filter(|&token| (token as usize) < vocab_size)
        .collect();
    let first = *stop_tokens.first().ok_or(GrammarError::NoStopToken)?;
    let info = TokRxInfo::new(vocab_size as u32, first);
    let trie = TokTrie::from(&info, words).with_eos_tokens(&stop_tokens);
    // Any division of a text into tokens is allowed, so that no mask waits for the tokenizer.
    Ok(Arc::new(ApproximateTokEnv::new(trie)))
}
