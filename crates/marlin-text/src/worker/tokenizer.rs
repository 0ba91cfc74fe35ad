//! The tokenizer that a worker runs.

use std::collections::{BTreeMap, HashSet};

use marlin_format::with_causes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper};

use super::oniguruma::rewrite_patterns;
use super::request::{ConfigTokens, Loaded};
use super::vocabulary::TokenBytes;

/// A tokenizer, without the truncation and padding of its file: a prompt is encoded as it is.
#[derive(Debug)]
pub(super) struct LoadedTokenizer(tokenizers::Tokenizer);

impl LoadedTokenizer {
    pub fn load(json: &[u8], tokens: ConfigTokens) -> Result<(Self, Loaded), String> {
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(json).map_err(described)?;
        tokenizer.with_truncation(None).map_err(described)?;
        tokenizer.with_padding(None);
        read_patterns_as_oniguruma(&mut tokenizer)?;
        let tokens = config_tokens(&tokenizer, tokens);
        tokenizer.add_tokens(tokens).map_err(described)?;
        let vocab_size = tokenizer
            .get_vocab(true)
            .values()
            .max()
            .map_or(0, |&largest| largest as usize + 1);
        let added = tokenizer.get_added_tokens_decoder();
        let special = added
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(&id, _)| id)
            .collect();
        let added = added.into_iter().map(|(id, _)| id).collect();
        Ok((
            Self(tokenizer),
            Loaded {
                vocab_size,
                special,
                added,
            },
        ))
    }

    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, String> {
        Ok(self
            .0
            .encode_fast(text, add_special_tokens)
            .map_err(described)?
            .get_ids()
            .to_vec())
    }

    pub fn decode(&self, sequences: &[Vec<u32>]) -> Result<Vec<String>, String> {
        sequences
            .iter()
            .map(|tokens| self.0.decode(tokens, true).map_err(described))
            .collect()
    }

    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    pub fn token_text(&self, id: u32) -> Option<String> {
        self.0.id_to_token(id)
    }

    /// Returns the [plain text](TokenBytes::plain_text) of each token, by id; nothing if the text
    /// of every token depends on the tokens around it.
    pub fn plain_texts(&self) -> Vec<Option<String>> {
        let Ok(bytes) = TokenBytes::of_decoder(self.0.get_decoder()) else {
            return Vec::new();
        };
        let added = self.0.get_added_tokens_decoder();
        let vocabulary = self.0.get_vocab(false);
        let len = vocabulary.values().max().map_or(0, |&id| id as usize + 1);
        let mut texts = vec![None; len];
        for (token, id) in vocabulary {
            if !added.contains_key(&id) {
                texts[id as usize] = bytes.plain_text(&token);
            }
        }
        texts
    }

    /// Returns the ids of all tokens in ascending order, each with its bytes.
    pub fn token_bytes(&self) -> Result<BTreeMap<u32, Vec<u8>>, String> {
        let bytes = TokenBytes::of_decoder(self.0.get_decoder())?;
        let added = self.0.get_added_tokens_decoder();
        let vocabulary = self.0.get_vocab(true).into_iter();
        Ok(vocabulary
            .map(|(text, id)| match added.get(&id) {
                Some(token) => (id, token.content.clone().into_bytes()),
                None => (id, bytes.of(&text)),
            })
            .collect())
    }
}

/// Replaces the patterns of a tokenizer so that they match as in Oniguruma, which `transformers`
/// uses.
fn read_patterns_as_oniguruma(tokenizer: &mut tokenizers::Tokenizer) -> Result<(), String> {
    if let Some(normalizer) = rewritten::<NormalizerWrapper>(tokenizer.get_normalizer())? {
        tokenizer
            .with_normalizer(Some(normalizer))
            .map_err(described)?;
    }
    if let Some(pre_tokenizer) = rewritten::<PreTokenizerWrapper>(tokenizer.get_pre_tokenizer())? {
        tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
    }
    if let Some(decoder) = rewritten::<DecoderWrapper>(tokenizer.get_decoder())? {
        tokenizer.with_decoder(Some(decoder));
    }
    Ok(())
}

/// Returns a part of a tokenizer with rewritten patterns; `None` if the patterns stay the same.
fn rewritten<T: Serialize + DeserializeOwned>(part: Option<&T>) -> Result<Option<T>, String> {
    let mut json = serde_json::to_value(part).map_err(|error| with_causes(&error))?;
    if !rewrite_patterns(&mut json) {
        return Ok(None);
    }
    serde_json::from_value(json)
        .map(Some)
        .map_err(|error| with_causes(&error))
}

/// Returns the tokens of the configs in the order in which `transformers` adds them. Tokens that
/// the tokenizer already has change nothing.
fn config_tokens(tokenizer: &tokenizers::Tokenizer, tokens: ConfigTokens) -> Vec<AddedToken> {
    let known = tokenizer.get_added_tokens_decoder();
    let ConfigTokens {
        mut added,
        over_those_of_file,
        named,
        extra,
    } = tokens;
    if !over_those_of_file {
        added.extend(known.iter().map(|(&id, token)| (id, token.clone())));
    }
    let names: HashSet<String> = named.iter().map(|token| token.content.clone()).collect();
    let mut tokens: Vec<AddedToken> = added.into_values().collect();
    let mut texts: HashSet<String> = tokens
        .iter()
        .chain(known.values())
        .map(|token| token.content.clone())
        .collect();
    tokens.extend(
        named
            .into_iter()
            .chain(extra)
            .filter(|token| texts.insert(token.content.clone())),
    );
    for token in tokens
        .iter_mut()
        .filter(|token| names.contains(&token.content))
    {
        token.special = true;
    }
    tokens
}

fn described(error: tokenizers::Error) -> String {
    with_causes(error.as_ref())
}

#[cfg(test)]
mod tests {
    use marlin_testing::{byte_level_tokenizer, golden_json};
    use serde_json::json;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    fn pieces(engine: &LoadedTokenizer, text: &str) -> Vec<String> {
        let mut pieces = PreTokenizedString::from(text);
        engine
            .0
            .get_pre_tokenizer()
            .unwrap()
            .pre_tokenize(&mut pieces)
            .unwrap();
        pieces
            .get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .map(|(piece, ..)| piece.to_string())
            .collect()
    }

    #[test]
    fn patterns_split_as_in_transformers() {
        let golden = golden_json("tokenizer_patterns.json");
        let cases = golden["cases"].as_array().unwrap();
        assert!(cases.len() > 30, "{}", cases.len());
        for case in cases {
            let mut tokenizer = byte_level_tokenizer();
            let pattern = json!({ "Regex": case["pattern"] });
            tokenizer["pre_tokenizer"] = json!({ "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false });
            let (engine, _) =
                LoadedTokenizer::load(tokenizer.to_string().as_bytes(), ConfigTokens::default())
                    .unwrap();
            for (text, expected) in case["texts"].as_object().unwrap() {
                assert_eq!(
                    json!(pieces(&engine, text)),
                    *expected,
                    "{} in {text:?}",
                    case["pattern"]
                );
            }
        }
    }

    #[test]
    fn patterns_are_read_so_wherever_they_are() {
        let pattern = json!({ "Regex": "a{1,2}+" });
        let replace = json!({ "type": "Replace", "pattern": pattern, "content": "x" });
        let mut tokenizer = byte_level_tokenizer();
        tokenizer["normalizer"] =
            json!({ "type": "Sequence", "normalizers": [{ "type": "NFC" }, replace] });
        tokenizer["decoder"] = json!({ "type": "Sequence", "decoders": [tokenizer["decoder"], { "type": "Fuse" }, replace] });
        let (engine, _) =
            LoadedTokenizer::load(tokenizer.to_string().as_bytes(), ConfigTokens::default())
                .unwrap();
        assert_eq!(engine.encode("aaab", false).unwrap(), [120, 98]);
        assert_eq!(engine.decode(&[vec![97, 97, 97, 98]]).unwrap(), ["xb"]);
    }
}
