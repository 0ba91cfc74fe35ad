//! The engine's request for the request of a chat completion.

use crate::asked::Asked;
use crate::conversation::{Conversation, chat_messages, chat_tools};
use crate::error::ApiError;
use crate::sampling::{Fields, StreamFields, refuse_if, refuse_unknown, stop};
use crate::structure::{NamedSchema, STRUCTURED_OUTPUTS, Structure, ToolUse};
use openai_protocol::chat::ChatCompletionRequest;
use openai_protocol::common::{ResponseFormat, ToolChoice, ToolChoiceValue};
use openai_protocol::validated::Normalizable;
use serde_json::{Map, Value};

/// What a chat completion asks for.
pub(crate) struct ChatJob {
    pub asked: Asked,
    /// The name of the model in the request.
    pub model: String,
    /// True if log probabilities are asked for.
    pub logprobs: bool,
    /// What is asked of the stream; `None` for an answer in one piece.
    pub stream: Option<StreamFields>,
}

impl ChatJob {
    /// Reads a request.
    pub fn read(mut request: ChatCompletionRequest) -> Result<Self, ApiError> {
        request.normalize();
        refuse(&request)?;
        let stream = StreamFields::new(request.stream, request.stream_options.as_ref())?;
        let tools = tool_use(&request)?;
        let structure = structure(&request)?;
        let fields = Fields {
            max_tokens: request.output_token_cap(),
            temperature: request.temperature,
            top_p: request.top_p,
            top_k: request.top_k,
            min_p: request.min_p,
            repetition_penalty: request.repetition_penalty,
            presence_penalty: request.presence_penalty,
            frequency_penalty: request.frequency_penalty,
            logit_bias: request.logit_bias.take().unwrap_or_default(),
            seed: seed(&request),
            min_tokens: request.min_tokens,
            stop: stop(request.stop.take()),
            stop_token_ids: request.stop_token_ids.take().unwrap_or_default(),
            ignore_eos: request.ignore_eos,
            logprobs: request
                .logprobs
                .then(|| request.top_logprobs.unwrap_or_default()),
            priority: priority(&request.other)?,
        };
        let conversation = Conversation {
            variables: variables(&mut request),
            continues: request.continues_final_assistant(),
            messages: chat_messages(std::mem::take(&mut request.messages))?,
            ..Conversation::default()
        };
        Ok(Self {
            asked: Asked {
                fields,
                conversation,
                structure,
                tools,
                choices: request.n.unwrap_or(1) as usize,
                reasoning: request.separate_reasoning,
                first_call_only: request.disables_parallel_tool_calls(),
            },
            model: request.model,
            logprobs: request.logprobs,
            stream,
        })
    }
}

/// Refuses what this server does not do.
fn refuse(request: &ChatCompletionRequest) -> Result<(), ApiError> {
    let is_text = |modality: &String| modality == "text";
    let not_text = |modalities: &Vec<String>| !modalities.iter().all(is_text);
    refuse_if(
        request.modalities.as_ref().is_some_and(not_text),
        "modalities",
    )?;
    refuse_if(request.return_audio == Some(true), "return_audio")?;
    refuse_if(request.lora_path.is_some(), "lora_path")?;
    refuse_if(request.session_params.is_some(), "session_params")?;
    refuse_if(request.return_hidden_states, "return_hidden_states")?;
    refuse_if(request.no_stop_trim, "no_stop_trim")?;
    refuse_if(!request.skip_special_tokens, "skip_special_tokens")?;
    refuse_if(!request.stream_reasoning, "stream_reasoning")?;
    refuse_if(request.ebnf.is_some(), "ebnf")?;
    let verbosity = request.verbosity.as_deref();
    refuse_if(
        verbosity.is_some_and(|level| level != "medium"),
        "verbosity",
    )?;
    let continues = request.continues_final_assistant();
    if request.continue_final_message && !continues {
        return Err(ApiError::invalid(
            "continue_final_message",
            "The last message must be of the role `assistant` to be continued.",
        ));
    }
    refuse_unknown(&request.other, "", &["priority", STRUCTURED_OUTPUTS])
}

/// Returns the seed. Engines have it under two names.
fn seed(request: &ChatCompletionRequest) -> Option<i64> {
    #[expect(deprecated, reason = "clients send it")]
    let seed = request.seed;
    seed.or(request.sampling_seed.map(u64::cast_signed))
}

/// Returns the priority, which vLLM's clients send.
pub(crate) fn priority(fields: &Map<String, Value>) -> Result<i32, ApiError> {
    match fields.get("priority") {
        None | Some(Value::Null) => Ok(0),
        Some(value) => {
            let priority = value.as_i64().and_then(|value| i32::try_from(value).ok());
            priority.ok_or_else(|| {
                ApiError::invalid("priority", "The priority must be a 32-bit integer.")
            })
        }
    }
}

/// Returns the variables of the template that the request sets.
fn variables(request: &mut ChatCompletionRequest) -> Map<String, Value> {
    let mut variables = Map::new();
    if let Some(thinking) = request.template_thinking() {
        // Qwen's templates read the one, DeepSeek's the other.
        variables.insert("enable_thinking".into(), thinking.into());
        variables.insert("thinking".into(), thinking.into());
    }
    if let Some(effort) = request.effective_reasoning_effort() {
        variables.insert("reasoning_effort".into(), effort.into());
    }
    variables.extend(request.chat_template_kwargs.take().unwrap_or_default());
    variables
}

/// Returns the tools that the model may call; `None` if it may not.
fn tool_use(request: &ChatCompletionRequest) -> Result<Option<ToolUse>, ApiError> {
    let several = !request.disables_parallel_tool_calls();
    let forced = match &request.tool_choice {
        Some(ToolChoice::Value(ToolChoiceValue::None)) => return Ok(None),
        Some(ToolChoice::Value(ToolChoiceValue::Required) | ToolChoice::Function { .. }) => true,
        Some(ToolChoice::AllowedTools { mode, .. }) => mode == "required",
        Some(ToolChoice::Value(ToolChoiceValue::Auto)) | None => false,
    };
    let definitions = chat_tools(request.tools.as_deref().unwrap_or_default())?;
    let is_named = matches!(request.tool_choice, Some(ToolChoice::Function { .. }));
    let callable = request.callable_tools();
    Ok((!definitions.is_empty()).then(|| ToolUse {
        definitions,
        callable: callable.into_iter().map(|tool| tool.function).collect(),
        forced,
        several: several && !is_named,
    }))
}

/// Returns the form that the answer must have.
fn structure(request: &ChatCompletionRequest) -> Result<Option<Structure>, ApiError> {
    const PARAM: &str = "response_format";
    let regex = request.regex.as_deref();
    let format = match &request.response_format {
        None | Some(ResponseFormat::Text) => None,
        Some(ResponseFormat::JsonObject) => Some(Structure::json_object(PARAM)),
        Some(ResponseFormat::JsonSchema { json_schema }) => {
            let schema = NamedSchema::new(&json_schema.schema).named(&json_schema.name);
            Some(Structure::json_schema(schema, PARAM))
        }
    };
    let forms = [
        regex.map(|regex| Structure::regex(regex, "regex")),
        Structure::of_vllm(&request.other)?,
        format,
    ];
    Structure::one(forms.into_iter().flatten())
}
