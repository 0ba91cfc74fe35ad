//! The form that an answer must have: a grammar, or a call of a tool.

use crate::conversation::Conversation;
use crate::error::ApiError;
use crate::generate::Prompt;
use crate::harmony;
use crate::output::AnswerFormat;
use crate::state::ApiState;
use crate::tools::grammar::literal;
use crate::tools::{ToolGrammarError, ToolSchema, ToolTypes};
use marlin_serve::grammar::{GrammarCompiler, GrammarError, GrammarSource};
use marlin_serve::server::GenerationRequest;
use openai_protocol::common::Function;
use serde_json::{Map, Value};

/// The field that has the form of an answer in vLLM's API.
pub(crate) const STRUCTURED_OUTPUTS: &str = "structured_outputs";

/// The grammar of an answer, and the field that asks for it.
#[derive(Debug, Clone)]
pub(crate) struct Structure {
    pub grammar: GrammarSource,
    pub param: &'static str,
    /// The JSON schema, if it is one.
    pub schema: Option<NamedSchema>,
}

/// A JSON schema of answers, as a prompt can tell the model of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedSchema {
    pub name: String,
    pub description: Option<String>,
    /// The schema itself.
    pub text: String,
}

impl NamedSchema {
    /// The name of a schema to which a request gives none.
    const UNNAMED: &str = "response";

    /// A schema without a name.
    pub fn new(schema: &Value) -> Self {
        Self {
            name: Self::UNNAMED.into(),
            description: None,
            text: schema.to_string(),
        }
    }

    /// Sets the name.
    pub fn named(mut self, name: &str) -> Self {
        self.name = name.into();
        self
    }
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

impl ToolUse {
    /// Returns the types of the parameters of all tools.
    pub fn types(&self) -> ToolTypes {
        let functions = self.definitions.iter().map(|tool| &tool["function"]);
        ToolTypes::new(functions.filter_map(|function| {
            Some(ToolSchema {
                name: function["name"].as_str()?,
                parameters: function.get("parameters"),
            })
        }))
    }

    /// Returns the tools that may be called.
    fn schemas(&self) -> Vec<ToolSchema<'_>> {
        let tools = self.callable.iter();
        let schemas = tools.map(|tool| ToolSchema {
            name: &tool.name,
            parameters: Some(&tool.parameters).filter(|schema| **schema != empty()),
        });
        schemas.collect()
    }
}

impl Structure {
    /// A grammar, of which the prompt does not tell.
    pub fn new(grammar: GrammarSource, param: &'static str) -> Self {
        Self {
            grammar,
            param,
            schema: None,
        }
    }

    /// A JSON schema.
    pub fn json_schema(schema: NamedSchema, param: &'static str) -> Self {
        Self {
            grammar: GrammarSource::JsonSchema(schema.text.clone()),
            param,
            schema: Some(schema),
        }
    }

    /// Any object of JSON.
    pub fn json_object(param: &'static str) -> Self {
        Self::new(GrammarSource::json_object(), param)
    }

    /// Text that a regular expression matches.
    pub fn regex(regex: &str, param: &'static str) -> Self {
        Self::new(GrammarSource::Regex(regex.into()), param)
    }

    /// Returns the form that vLLM's field `structured_outputs` asks for, which is one of the
    /// `fields` of a request that OpenAI's API does not have.
    pub fn of_vllm(fields: &Map<String, Value>) -> Result<Option<Self>, ApiError> {
        const PARAM: &str = STRUCTURED_OUTPUTS;
        let invalid = || {
            let message = "It must be an object with one of `json`, `regex`, `choice`, `grammar` \
                           and `json_object`.";
            ApiError::invalid(PARAM, message)
        };
        let Some(form) = fields.get(PARAM).filter(|form| !form.is_null()) else {
            return Ok(None);
        };
        let form = form.as_object().ok_or_else(invalid)?;
        let mut given = form
            .iter()
            .filter(|(_, value)| !matches!(value, Value::Null | Value::Bool(false)));
        let (Some((name, value)), None) = (given.next(), given.next()) else {
            return Err(invalid());
        };
        Ok(Some(match (name.as_str(), value) {
            ("json", Value::Object(_)) => Self::json_schema(NamedSchema::new(value), PARAM),
            ("json", Value::String(text)) => {
                let schema: Value = serde_json::from_str(text)
                    .map_err(|error| ApiError::invalid(PARAM, format!("`json`: {error}")))?;
                Self::json_schema(NamedSchema::new(&schema), PARAM)
            }
            ("regex", Value::String(regex)) => Self::regex(regex, PARAM),
            ("grammar", Value::String(lark)) => Self::new(GrammarSource::Lark(lark.into()), PARAM),
            ("json_object", Value::Bool(true)) => Self::json_object(PARAM),
            ("choice", Value::Array(choices)) if !choices.is_empty() => {
                let choices = choices.iter().map(|choice| choice.as_str().map(literal));
                let choices: Option<Vec<_>> = choices.collect();
                let choices = choices.ok_or_else(invalid)?.join(" | ");
                Self::new(GrammarSource::Lark(format!("start: {choices}\n")), PARAM)
            }
            _ => return Err(invalid()),
        }))
    }

    /// Returns the one form that a request asks for, in one of several fields.
    pub fn one(forms: impl IntoIterator<Item = Self>) -> Result<Option<Self>, ApiError> {
        let mut forms = forms.into_iter();
        match (forms.next(), forms.next()) {
            (Some(first), Some(second)) => Err(ApiError::invalid(
                second.param,
                format!(
                    "`{}` and `{}` exclude each other.",
                    first.param, second.param
                ),
            )),
            (form, _) => Ok(form),
        }
    }
}

/// Returns the tools of a request in the form of templates.
pub(crate) fn definitions(tools: Option<&ToolUse>) -> Vec<Value> {
    tools.map_or(Vec::new(), |tools| tools.definitions.clone())
}

/// Returns the schema that the prompt of a request tells of.
pub(crate) fn told_schema(
    structure: Option<&Structure>,
    tools: Option<&ToolUse>,
) -> Option<NamedSchema> {
    // A call of a tool does not have the form of the answer.
    structure.filter(|_| tools.is_none())?.schema.clone()
}

/// Encodes a conversation with the tools of a request, and [applies](apply) the form of the answer.
/// Returns the prompt.
pub(crate) async fn encode(
    state: &ApiState,
    request: &mut GenerationRequest,
    conversation: Conversation,
    structure: Option<Structure>,
    tools: Option<&ToolUse>,
) -> Result<Prompt, ApiError> {
    let conversation = Conversation {
        schema: told_schema(structure.as_ref(), tools),
        tools: definitions(tools),
        ..conversation
    };
    let prompt = state.encode(conversation).await?;
    state.add_plain_stop(request);
    let format = state.format();
    apply(state, request, format, &prompt.text, structure, tools).await?;
    Ok(prompt)
}

/// Makes the engine keep to the form of an answer to `prompt`, after the reasoning that `format`
/// has.
pub(crate) async fn apply(
    state: &ApiState,
    request: &mut GenerationRequest,
    format: AnswerFormat,
    prompt: &str,
    structure: Option<Structure>,
    tools: Option<&ToolUse>,
) -> Result<(), ApiError> {
    if tools.is_some() && !format.has_calls() {
        return Err(no_calls());
    }
    let (form, param) = match (tools, structure) {
        (Some(tools), _) if tools.forced => (Form::Calls(tools.clone()), "tool_choice"),
        // A model that may call a tool writes either that or the form.
        (Some(_), Some(structure)) => {
            return Err(ApiError::unsupported(
                structure.param,
                "A form of the answer and tools that the model may or may not call exclude each \
                 other; set `tool_choice` to `none` or `required`.",
            ));
        }
        (None, Some(Structure { grammar, param, .. })) => (Form::Content(grammar), param),
        (_, None) => return Ok(()),
    };
    if !state.engine().capabilities().masks {
        return Err(ApiError::unsupported(
            param,
            "Structured output is not supported by this server's executor.",
        ));
    }
    let (compiler, prompt) = (state.grammars().clone(), prompt.to_string());
    let compile = move || {
        let grammar = form.grammar(format, &prompt, &compiler, param)?;
        let compiled = compiler.compile(&grammar);
        compiled.map_err(|error| refused(&error, param))
    };
    request.grammar = Some(state.blocking(compile).await?);
    Ok(())
}

/// The form of an answer.
enum Form {
    /// Content that follows a grammar.
    Content(GrammarSource),
    /// A call of a tool.
    Calls(ToolUse),
}

impl Form {
    /// Returns the grammar of an answer to `prompt`. `param` is the field that errors name.
    fn grammar(
        self,
        format: AnswerFormat,
        prompt: &str,
        compiler: &GrammarCompiler,
        param: &'static str,
    ) -> Result<GrammarSource, ApiError> {
        let token_id = |text: &str| compiler.token_id(text).ok().flatten();
        let (grammar, reasoning) = match (self, format) {
            (Self::Content(grammar), AnswerFormat::Harmony) => {
                return Ok(harmony::final_grammar(prompt, &grammar, token_id));
            }
            (Self::Calls(tools), AnswerFormat::Harmony) => {
                let grammar = harmony::calls_grammar(prompt, &tools.schemas(), token_id);
                return grammar.map_err(|error| of_tools(&error));
            }
            (Self::Content(grammar), AnswerFormat::Tagged { reasoning, .. }) => {
                (grammar, reasoning)
            }
            (
                Self::Calls(tools),
                AnswerFormat::Tagged {
                    reasoning,
                    tools: format,
                },
            ) => {
                let format = format.ok_or_else(no_calls)?;
                let grammar = format.grammar(&tools.schemas(), tools.several, token_id);
                let grammar = grammar.map_err(|error| of_tools(&error))?;
                (GrammarSource::Lark(grammar), reasoning)
            }
        };
        // A template may open the reasoning, and say nothing of its end.
        let tags = reasoning.unwrap_or_default();
        if !tags.is_open(prompt) {
            return Ok(grammar);
        }
        let end = tags.closing();
        let token = compiler
            .token_id(end)
            .map_err(|error| refused(&error, param))?;
        Ok(grammar.after_reasoning(end, token))
    }
}

/// Returns the error for a model that calls no tools.
fn no_calls() -> ApiError {
    ApiError::unsupported(
        "tools",
        "The model's chat template does not call tools in a form that this server reads.",
    )
}

/// Returns the error for tools without a grammar.
fn of_tools(error: &ToolGrammarError) -> ApiError {
    ApiError::invalid("tools", error.to_string())
}

/// The parameters of a tool without any.
fn empty() -> Value {
    Value::Object(Map::new())
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
