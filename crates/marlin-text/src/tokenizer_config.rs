//! The special and added tokens of a folder's configs, as `transformers` 5 reads them.
//!
//! | file | fields that are used |
//! |---|---|
//! | `tokenizer_config.json` | `added_tokens_decoder`; special tokens: `bos_token` and the other common names, any other field named `.._token`, `extra_special_tokens`, or else `additional_special_tokens` |
//! | `special_tokens_map.json` | without an `added_tokens_decoder`: special tokens of the same names, which take precedence over those of `tokenizer_config.json` |
//! | `added_tokens.json` | without an `added_tokens_decoder`: texts and their tokens |

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use marlin_format::checkpoint::{MAX_CONFIG_BYTES, read_file};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::AddedToken;

use crate::TextError;
use crate::worker::ConfigTokens;

/// The special tokens that every tokenizer may have, in the order in which missing tokens are
/// added.
const NAMES: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// A `tokenizer_config.json` with the files beside it.
#[derive(Debug)]
pub(crate) struct TokenizerConfig {
    /// The path of `tokenizer_config.json`, which need not exist.
    pub path: PathBuf,
    /// The contents of the file; `null` if it does not exist.
    pub json: Value,
    /// Special tokens by name, [`NAMES`] first.
    named: Vec<(String, AddedToken)>,
    /// Special tokens without a name.
    extra: Vec<AddedToken>,
    /// The tokens of `added_tokens_decoder`, or else of `added_tokens.json`.
    added: BTreeMap<u32, AddedToken>,
}

impl TokenizerConfig {
    /// Reads the configs of a folder. None of them has to exist.
    ///
    /// # Errors
    /// [`TextError::Io`] if a file cannot be read, and [`TextError::Json`] if it does not have the
    /// expected form.
    pub fn read(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer_config.json");
        let json: Value = optional_json(&path)?.unwrap_or_default();
        let mut special = json.clone();
        if is_empty(&special["extra_special_tokens"])
            && !is_empty(&special["additional_special_tokens"])
        {
            special["extra_special_tokens"] = special["additional_special_tokens"].take();
        }
        let mut added = BTreeMap::new();
        match &json["added_tokens_decoder"] {
            Value::Null => {
                if let Some(map) =
                    optional_json::<serde_json::Map<_, _>>(&dir.join("special_tokens_map.json"))?
                {
                    merge(&mut special, map);
                }
                let texts: Option<BTreeMap<String, u32>> =
                    optional_json(&dir.join("added_tokens.json"))?;
                added.extend(
                    texts
                        .unwrap_or_default()
                        .into_iter()
                        .map(|(text, id)| (id, AddedToken::from(text, false))),
                );
            }
            decoder => {
                let tokens: BTreeMap<u32, Token> =
                    Deserialize::deserialize(decoder).map_err(|source| TextError::Json {
                        path: path.clone(),
                        source,
                    })?;
                added.extend(
                    tokens
                        .into_iter()
                        .map(|(id, token)| (id, token.with_special(false))),
                );
            }
        }
        let named = named(&special);
        let extra: Vec<_> = match extra_field(&special) {
            Value::Array(tokens) => tokens.iter().filter_map(special_token).collect(),
            _ => Vec::new(),
        };
        if json["added_tokens_decoder"].is_null() {
            let common = named
                .iter()
                .filter(|(name, _)| NAMES.contains(&name.as_str()))
                .map(|(_, token)| token);
            let listed = if is_empty(&special["extra_special_tokens"]) {
                &[]
            } else {
                extra.as_slice()
            };
            let special: BTreeSet<&str> = common
                .chain(listed)
                .map(|token| token.content.as_str())
                .collect();
            for token in added
                .values_mut()
                .filter(|token| special.contains(token.content.as_str()))
            {
                (token.special, token.normalized) = (true, false);
            }
        }
        Ok(Self {
            path,
            json,
            named,
            extra,
            added,
        })
    }

    /// Returns the names of the special tokens that a chat template can use, and their texts.
    pub fn template_tokens(&self) -> BTreeMap<String, String> {
        self.named
            .iter()
            .map(|(name, token)| (name.clone(), token.content.clone()))
            .collect()
    }

    /// Returns the tokens to add to `tokenizer.json`, if it does not have them.
    pub fn into_tokens(self) -> ConfigTokens {
        ConfigTokens {
            over_those_of_file: !self.json["added_tokens_decoder"].is_null(),
            added: self.added,
            named: self.named.into_iter().map(|(_, token)| token).collect(),
            extra: self.extra,
        }
    }
}

/// Reads a JSON file; `None` if it does not exist.
pub(crate) fn optional_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, TextError> {
    match read_file(path, MAX_CONFIG_BYTES) {
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .map_err(|source| TextError::Json {
                path: path.into(),
                source,
            }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::io(path, source)),
    }
}

/// A token of a config.
#[derive(Debug, Clone, Deserialize)]
struct Token {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    normalized: Option<bool>,
    special: Option<bool>,
}

impl Token {
    /// Converts the token; `default` applies if its `special` is not set.
    fn with_special(self, default: bool) -> AddedToken {
        let special = self.special.unwrap_or(default);
        AddedToken {
            content: self.content,
            single_word: self.single_word,
            lstrip: self.lstrip,
            rstrip: self.rstrip,
            normalized: self.normalized.unwrap_or(!special),
            special,
        }
    }
}

/// Returns the special token in a field, which is a string or an object; `None` for any other
/// value.
fn special_token(field: &Value) -> Option<AddedToken> {
    match field {
        Value::String(text) => Some(AddedToken::from(text.as_str(), true)),
        Value::Object(_) => Some(Token::deserialize(field).ok()?.with_special(true)),
        _ => None,
    }
}

fn is_empty(field: &Value) -> bool {
    match field {
        Value::Array(tokens) => tokens.is_empty(),
        Value::Object(tokens) => tokens.is_empty(),
        field => field.is_null(),
    }
}

/// Returns the field `extra_special_tokens`, or if it is empty the field of the older name,
/// `additional_special_tokens`.
fn extra_field(config: &Value) -> &Value {
    let field = &config["extra_special_tokens"];
    if is_empty(field) {
        &config["additional_special_tokens"]
    } else {
        field
    }
}

/// Returns the special tokens with a name, and their names.
fn named(config: &Value) -> Vec<(String, AddedToken)> {
    let own = config
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(name, _)| name.ends_with("_token") && !NAMES.contains(&name.as_str()));
    let extra = extra_field(config).as_object().into_iter().flatten();
    let others = own.chain(extra).map(|(name, field)| (name.as_str(), field));
    let fields = NAMES
        .iter()
        .map(|name| (*name, &config[name]))
        .chain(others);
    fields
        .filter_map(|(name, field)| Some((name.into(), special_token(field)?)))
        .collect()
}

/// Replaces fields of the config with those of a `special_tokens_map.json`.
fn merge(config: &mut Value, map: serde_json::Map<String, Value>) {
    if config.is_null() {
        *config = Value::Object(serde_json::Map::new());
    }
    let Some(config) = config.as_object_mut() else {
        return;
    };
    for (name, field) in map {
        match (config.get_mut("extra_special_tokens"), field) {
            // The tokens of both files are used.
            (Some(Value::Array(tokens)), Value::Array(more)) if name == "extra_special_tokens" => {
                tokens.extend(more)
            }
            (_, field) => _ = config.insert(name, field),
        }
    }
}

#[cfg(test)]
mod tests;
