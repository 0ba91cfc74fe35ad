//! The engine's request for the request of a text completion.

use crate::auth::Client;
use crate::body::validated;
use crate::chat::priority;
use crate::error::ApiError;
use crate::generate::{Job, Prompt};
use crate::output::{AnswerFormat, OutputOptions};
use crate::sampling::{Fields, StreamFields, refuse_if, refuse_unknown, stop};
use crate::state::ApiState;
use crate::structure::{self, STRUCTURED_OUTPUTS, Structure};
use marlin_serve::grammar::GrammarSource;
use openai_protocol::common::StringOrArray;
use openai_protocol::completion::CompletionRequest;
use serde::Deserialize;
use serde_json::{Map, Value};

/// The tokens that a completion has where the request does not say, as in OpenAI's API.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// What a text completion asks for.
pub(super) struct CompletionJob {
    pub job: Job,
    /// The name of the model in the request.
    pub model: String,
    /// True if log probabilities are asked for.
    pub logprobs: bool,
    /// What is asked of the stream; `None` for an answer in one piece.
    pub stream: Option<StreamFields>,
    /// True if the prompt comes before the answer.
    echo: bool,
}

/// Prompts in the form of tokens.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokenPrompts {
    One(Vec<u32>),
    Several(Vec<Vec<u32>>),
}

impl CompletionJob {
    pub async fn new(
        state: &ApiState,
        body: Map<String, Value>,
        client: Client,
    ) -> Result<Self, ApiError> {
        let (mut request, tokens) = read(body)?;
        state.check_model(&request.model)?;
        let (stream, form) = check(&request)?;
        let seed = request.sampling_seed.map(u64::cast_signed);
        let fields = Fields {
            max_tokens: request.max_tokens.or(Some(DEFAULT_MAX_TOKENS)),
            temperature: request.temperature,
            top_p: request.top_p,
            top_k: request.top_k,
            min_p: request.min_p,
            repetition_penalty: request.repetition_penalty,
            presence_penalty: request.presence_penalty,
            frequency_penalty: request.frequency_penalty,
            logit_bias: request.logit_bias.take().unwrap_or_default(),
            seed: request.seed.or(seed),
            min_tokens: request.min_tokens,
            stop: stop(request.stop.take()),
            stop_token_ids: request.stop_token_ids.take().unwrap_or_default(),
            ignore_eos: request.ignore_eos,
            logprobs: request.logprobs,
            priority: priority(&request.other)?,
        };
        let mut engine_request = fields.request(state, client)?;
        // The text of a prompt is not that of a template, so that its answer has no format.
        let format = AnswerFormat::default();
        structure::apply(state, &mut engine_request, format, "", form, None).await?;
        let prompts = match tokens {
            Some(prompts) => state.decode(prompts, request.echo).await?,
            None => {
                let texts = match request.prompt {
                    StringOrArray::String(text) => vec![text],
                    StringOrArray::Array(texts) => texts,
                };
                state.encode_texts(texts).await?
            }
        };
        Ok(Self {
            job: Job {
                prompts,
                choices: request.n.unwrap_or(1) as usize,
                request: engine_request,
                output: OutputOptions::default(),
            },
            model: request.model,
            logprobs: request.logprobs.is_some(),
            stream,
            echo: request.echo,
        })
    }

    /// Returns the text that comes before each answer.
    pub fn echoes(&self) -> Vec<String> {
        let echo = |prompt: &Prompt| match self.echo {
            true => prompt.text.clone(),
            false => String::new(),
        };
        let prompts = self.job.prompts.iter();
        prompts
            .flat_map(|prompt| std::iter::repeat_n(echo(prompt), self.job.choices))
            .collect()
    }
}

/// The tokens of prompts; `None` if they are texts.
type Tokens = Option<Vec<Vec<u32>>>;

/// Reads a request, and its prompts if they are tokens.
pub(super) fn read(mut body: Map<String, Value>) -> Result<(CompletionRequest, Tokens), ApiError> {
    let tokens = take_token_prompts(&mut body)?;
    let request = CompletionRequest::deserialize(Value::Object(body))
        .map_err(|error| ApiError::json(&error))?;
    Ok((validated(request)?, tokens))
}

/// Returns what is asked of the stream, and the form that the answer must have.
pub(super) fn check(
    request: &CompletionRequest,
) -> Result<(Option<StreamFields>, Option<Structure>), ApiError> {
    refuse(request)?;
    let stream = StreamFields::new(request.stream, request.stream_options.as_ref())?;
    Ok((stream, form(request)?))
}

/// Takes prompts in the form of tokens, for which the type of the request has no place, and puts a
/// text in their place.
fn take_token_prompts(body: &mut Map<String, Value>) -> Result<Tokens, ApiError> {
    let Some(prompt) = body.get_mut("prompt") else {
        return Ok(None);
    };
    let first = prompt.as_array().and_then(|prompt| prompt.first());
    if !first.is_some_and(|first| first.is_number() || first.is_array()) {
        return Ok(None);
    }
    let prompts = TokenPrompts::deserialize(prompt.take()).map_err(|_| {
        ApiError::invalid(
            "prompt",
            "The prompt must be a text, a list of texts, a list of token IDs, or a list of these.",
        )
    })?;
    *prompt = Value::String(String::new());
    Ok(Some(match prompts {
        TokenPrompts::One(tokens) => vec![tokens],
        TokenPrompts::Several(prompts) => prompts,
    }))
}

/// Refuses what this server does not do.
fn refuse(request: &CompletionRequest) -> Result<(), ApiError> {
    refuse_if(request.best_of.is_some_and(|best| best > 1), "best_of")?;
    refuse_if(
        request.suffix.as_deref().is_some_and(|s| !s.is_empty()),
        "suffix",
    )?;
    refuse_if(request.lora_path.is_some(), "lora_path")?;
    refuse_if(request.session_params.is_some(), "session_params")?;
    refuse_if(request.return_hidden_states, "return_hidden_states")?;
    refuse_if(request.no_stop_trim, "no_stop_trim")?;
    refuse_if(!request.skip_special_tokens, "skip_special_tokens")?;
    refuse_if(request.ebnf.is_some(), "ebnf")?;
    if request.max_tokens == Some(0) {
        return Err(ApiError::invalid(
            "max_tokens",
            "At least one token must be asked for.",
        ));
    }
    if request.echo && request.logprobs.is_some() {
        return Err(ApiError::unsupported(
            "echo",
            "The log probabilities of a prompt's tokens are not supported by this server.",
        ));
    }
    refuse_unknown(&request.other, "", &["priority", STRUCTURED_OUTPUTS])
}

/// Returns the form that the answer must have.
fn form(request: &CompletionRequest) -> Result<Option<Structure>, ApiError> {
    let regex = request.regex.as_deref();
    let schema = request.json_schema.clone().map(GrammarSource::JsonSchema);
    let forms = [
        regex.map(|regex| Structure::regex(regex, "regex")),
        Structure::of_vllm(&request.other)?,
        schema.map(|schema| Structure::new(schema, "json_schema")),
    ];
    Structure::one(forms.into_iter().flatten())
}
