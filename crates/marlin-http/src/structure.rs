//! The form that an answer must have: a grammar, or a call of a tool.

use crate::conversation::Conversation;
use crate::error::ApiError;
use crate::generate::Prompt;
use crate::reasoning::ReasoningParser;
use crate::state::ApiState;
use crate::tools::{ToolFormat, ToolSchema};
use marlin_serve::grammar::{GrammarError, GrammarSource};
use marlin_serve::server::GenerationRequest;
use openai_protocol::common::Function;
use serde_json::Value;

/// The grammar of an answer, and the field that asks for it.
#[derive(Debug, Clone)]
pub(crate) struct Structure {
    pub grammar: GrammarSource,
    pub param: &'static str,
}

/// The tools that a model may call.
#[derive(Debug, Clone)]
pub(crate) struct ToolUse {
    /// All tools in the form of templates.
    pub definitions: Vec<Value>,
    /// Those that may be called.
    pub callable: Vec<Function>,
    /// True if one of them must be called.
    pub forced: bool,
    /// True if several may be called.
    pub several: bool,
}

impl Structure {
    /// A JSON schema.
    pub fn json_schema(schema: &Value, param: &'static str) -> Self {
        let grammar = GrammarSource::JsonSchema(schema.to_string());
        Self { grammar, param }
    }

    /// Any object of JSON.
    pub fn json_object(param: &'static str) -> Self {
        let grammar = GrammarSource::json_object();
        Self { grammar, param }
    }

    /// Text that a regular expression matches.
    pub fn regex(regex: &str, param: &'static str) -> Self {
        let grammar = GrammarSource::Regex(regex.into());
        Self { grammar, param }
    }
}

/// Returns the tools of a request in the form of templates.
pub(crate) fn definitions(tools: Option<&ToolUse>) -> Vec<Value> {
    tools.map_or(Vec::new(), |tools| tools.definitions.clone())
}

/// Encodes a conversation with the tools of a request, and [applies](apply) the form of the answer.
/// Returns the prompt, and how calls of tools are found in the answer.
pub(crate) async fn encode(
    state: &ApiState,
    request: &mut GenerationRequest,
    conversation: Conversation,
    structure: Option<Structure>,
    tools: Option<&ToolUse>,
) -> Result<(Prompt, Option<ToolFormat>), ApiError> {
    let conversation = Conversation {
        tools: definitions(tools),
        ..conversation
    };
    let prompt = state.encode(conversation).await?;
    state.add_plain_stop(request);
    let format = apply(state, request, &prompt.text, structure, tools).await?;
    Ok((prompt, format))
}

/// Makes the engine keep to the form of an answer to `prompt`, after the reasoning if the prompt
/// opens it. Returns how calls of tools are found in the answer, if the model may call any.
pub(crate) async fn apply(
    state: &ApiState,
    request: &mut GenerationRequest,
    prompt: &str,
    structure: Option<Structure>,
    tools: Option<&ToolUse>,
) -> Result<Option<ToolFormat>, ApiError> {
    let format = match tools {
        None => None,
        Some(_) => Some(state.tool_format().ok_or_else(|| {
            ApiError::unsupported(
                "tools",
                "The model's chat template does not call tools in a form that this server reads.",
            )
        })?),
    };
    let forced = tools.zip(format).filter(|(tools, _)| tools.forced);
    let structure = match forced {
        Some((tools, format)) => Some(Structure {
            grammar: calls(state, tools, format).await?,
            param: "tool_choice",
        }),
        // A model that may call a tool writes either that or the form.
        None if structure.is_some() && format.is_some() => {
            return Err(ApiError::unsupported(
                "response_format",
                "A form of the answer and tools that the model may or may not call exclude each \
                 other; set `tool_choice` to `none` or `required`.",
            ));
        }
        None => structure,
    };
    if let Some(Structure { grammar, param }) = structure {
        if !state.engine().capabilities().masks {
            return Err(ApiError::unsupported(
                param,
                "Structured output is not supported by this server's executor.",
            ));
        }
        let (compiler, is_open) = (state.grammars().clone(), ReasoningParser::is_open(prompt));
        let compile = move || {
            if !is_open {
                return compiler.compile(&grammar);
            }
            let end = ReasoningParser::CLOSING;
            compiler.compile(&grammar.after_reasoning(end, compiler.token_id(end)?))
        };
        let compiled = state.blocking(move || Ok(compile())).await?;
        request.grammar = Some(compiled.map_err(|error| refused(&error, param))?);
    }
    Ok(format)
}

/// Returns the grammar of answers that call a tool.
async fn calls(
    state: &ApiState,
    tools: &ToolUse,
    format: ToolFormat,
) -> Result<GrammarSource, ApiError> {
    let (tools, compiler) = (tools.clone(), state.grammars().clone());
    let grammar = state.blocking(move || {
        let schemas: Vec<_> = (tools.callable.iter())
            .map(|tool| ToolSchema {
                name: &tool.name,
                parameters: Some(&tool.parameters).filter(|schema| **schema != empty()),
            })
            .collect();
        let token_id = |text: &str| compiler.token_id(text).ok().flatten();
        let grammar = format.grammar(&schemas, tools.several, token_id);
        grammar.map_err(|error| ApiError::invalid("tools", error.to_string()))
    });
    Ok(GrammarSource::Lark(grammar.await?))
}

/// The parameters of a tool without any.
fn empty() -> Value {
    Value::Object(serde_json::Map::new())
}

/// Returns the error for a grammar that is not compiled.
fn refused(error: &GrammarError, param: &'static str) -> ApiError {
    match error {
        GrammarError::Busy { .. } => ApiError::Busy,
        GrammarError::NoStopToken | GrammarError::Tokenizer(_) => {
            ApiError::unsupported(param, error.to_string())
        }
        error if error.is_of_grammar() => ApiError::invalid(param, error.to_string()),
        error => ApiError::Engine(error.to_string()),
    }
}
