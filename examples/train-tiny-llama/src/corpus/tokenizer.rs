//! A byte-level BPE tokenizer in the format of Hugging Face.

use serde_json::json;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    Tokenizer, TokenizerImpl,
};

use crate::error::Error;

/// The token that separates files; a model ends its text with it.
pub const END_OF_TEXT: &str = "<|endoftext|>";
/// The number of tokens of the vocabulary, including the special token.
pub const VOCAB_SIZE: usize = 4096;

/// Trains a tokenizer of at most `vocab_size` tokens on `texts`; [`END_OF_TEXT`] is token 0.
///
/// Words are split as in GPT-2. Every byte is a token, so that every text can be encoded.
pub fn train<'a>(
    texts: impl Iterator<Item = &'a str> + Send,
    vocab_size: usize,
) -> Result<Tokenizer, Error> {
    let mut trainer = BpeTrainer::builder()
        .vocab_size(vocab_size)
        .min_frequency(2)
        .show_progress(false)
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let split = ByteLevel::new(false, true, true);
    let mut tokenizer: TokenizerImpl<
        BPE,
        NormalizerWrapper,
        PreTokenizerWrapper,
        PostProcessorWrapper,
        DecoderWrapper,
    > = TokenizerImpl::new(BPE::default());
    tokenizer
        .with_pre_tokenizer(Some(split))
        .with_decoder(Some(split));
    tokenizer
        .train(&mut trainer, texts)
        .map_err(Error::Tokenizer)?;
    // The only public conversion to a tokenizer of any model is through its JSON text.
    let text = tokenizer.to_string(false).map_err(Error::Tokenizer)?;
    Tokenizer::from_bytes(text).map_err(Error::Tokenizer)
}

/// Returns the tokens of each text. [`END_OF_TEXT`] in a text is encoded as text, not as the
/// special token.
pub fn encode(tokenizer: &Tokenizer, texts: &[&str]) -> Result<Vec<Vec<u16>>, Error> {
    let mut plain = tokenizer.clone();
    plain.set_encode_special_tokens(true);
    let encodings = plain
        .encode_batch_fast(texts.to_vec(), false)
        .map_err(Error::Tokenizer)?;
    encodings
        .iter()
        .map(|encoding| {
            let ids = encoding.get_ids().iter().map(|id| u16::try_from(*id));
            ids.collect::<Result<_, _>>()
                .map_err(|_| Error::Tokenizer("a token id does not fit 16 bits".into()))
        })
        .collect()
}

/// Returns the `tokenizer_config.json` for Python tools; `context` is the longest input in tokens.
pub fn config(context: usize) -> serde_json::Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": false,
        "clean_up_tokenization_spaces": false,
        "model_max_length": context,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_special_tokens() {
        let texts = ["pub fn main() {\n    println!(\"hello\");\n}\n"; 8];
        let tokenizer = train(texts.into_iter(), 300).unwrap();
        assert_eq!(tokenizer.token_to_id(END_OF_TEXT), Some(0));
        assert!(tokenizer.get_vocab_size(true) <= 300);

        let text = "let größe = \"→ 日本\";\t// <|endoftext|>\n";
        let ids = encode(&tokenizer, &[text, texts[0]]).unwrap();
        assert!(
            ids[0].iter().all(|id| *id != 0),
            "written-out markers are text"
        );
        assert!(
            ids[1].len() < texts[0].len() / 2,
            "merges are used: {} tokens",
            ids[1].len()
        );
        let wide: Vec<u32> = ids[0].iter().map(|id| u32::from(*id)).collect();
        assert_eq!(tokenizer.decode(&wide, false).unwrap(), text);
        let marked = tokenizer
            .encode_fast(format!("{END_OF_TEXT}fn"), true)
            .unwrap();
        assert_eq!(
            marked.get_ids()[0],
            0,
            "elsewhere the marker is the special token"
        );
    }
}
