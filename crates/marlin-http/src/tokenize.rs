//! `/tokenize` and `/detokenize`, with vLLM's fields.

use crate::body::Json;
use crate::conversation::{Conversation, chat_messages, chat_tools};
use crate::error::{ApiError, json};
use crate::state::ApiState;
use axum::extract::State;
use axum::response::Response;
use openai_protocol::chat::ChatMessage;
use openai_protocol::common::Tool;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What is asked of `/tokenize`: a text or a conversation.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TokenizeRequest {
    model: Option<String>,
    prompt: Option<String>,
    /// True if the tokens that the tokenizer adds to a text belong to it.
    #[serde(default = "yes")]
    add_special_tokens: bool,
    messages: Option<Vec<ChatMessage>>,
    #[serde(default)]
    tools: Vec<Tool>,
    #[serde(default)]
    chat_template_kwargs: Map<String, Value>,
}

#[derive(Serialize)]
struct TokenizeResponse {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
}

/// What is asked of `/detokenize`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DetokenizeRequest {
    model: Option<String>,
    tokens: Vec<u32>,
}

#[derive(Serialize)]
struct DetokenizeResponse {
    prompt: String,
}

/// What has tokens.
pub(crate) enum Source {
    Text {
        text: String,
        /// True if the tokens that the tokenizer adds to a text belong to it.
        special: bool,
    },
    Conversation(Conversation),
}

impl TokenizeRequest {
    /// Returns what has the tokens that are asked for.
    pub fn source(self) -> Result<Source, ApiError> {
        match (self.prompt, self.messages) {
            (Some(text), None) => Ok(Source::Text {
                text,
                special: self.add_special_tokens,
            }),
            (None, Some(messages)) => Ok(Source::Conversation(Conversation {
                messages: chat_messages(messages)?,
                tools: chat_tools(&self.tools)?,
                variables: self.chat_template_kwargs,
                ..Conversation::default()
            })),
            _ => Err(ApiError::invalid(
                "prompt",
                "Either `prompt` or `messages` must be given.",
            )),
        }
    }
}

fn yes() -> bool {
    true
}

/// Answers `POST /tokenize`.
pub(crate) async fn tokenize(
    State(state): State<ApiState>,
    Json(request): Json<TokenizeRequest>,
) -> Result<Response, ApiError> {
    if let Some(model) = &request.model {
        state.check_model(model)?;
    }
    let tokens = match request.source()? {
        Source::Text { text, special } => {
            state
                .text(move |own| {
                    Ok(match special {
                        true => own.tokenizer.encode(&text)?,
                        false => own.tokenizer.encode_rendered(&text)?,
                    })
                })
                .await?
        }
        Source::Conversation(conversation) => state.encode(conversation).await?.tokens,
    };
    Ok(json(&TokenizeResponse {
        count: tokens.len(),
        max_model_len: state.window(),
        tokens,
    }))
}

/// Answers `POST /detokenize`. Special tokens have no text.
pub(crate) async fn detokenize(
    State(state): State<ApiState>,
    Json(request): Json<DetokenizeRequest>,
) -> Result<Response, ApiError> {
    if let Some(model) = &request.model {
        state.check_model(model)?;
    }
    let tokens = request.tokens;
    let vocabulary = state.engine().capabilities().vocab_size;
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
        return Err(ApiError::invalid(
            "tokens",
            format!("Token {token} is not in the vocabulary of {vocabulary} tokens."),
        ));
    }
    let prompt = state
        .text(move |text| Ok(text.tokenizer.decode(&tokens)?))
        .await?;
    Ok(json(&DetokenizeResponse { prompt }))
}
