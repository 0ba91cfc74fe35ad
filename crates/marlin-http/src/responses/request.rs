//! The engine's request for the request of a response.

use crate::asked::Asked;
use crate::conversation::{Conversation, tool_call};
use crate::error::ApiError;
use crate::sampling::{Fields, refuse_if, stop};
use crate::state::ApiState;
use crate::structure::{NamedSchema, Structure, ToolUse};
use openai_protocol::chat::thinking_from_reasoning_effort;
use openai_protocol::common::{Function, ToolReference};
use openai_protocol::responses::{
    IncludeField, ResponseContentPart, ResponseInput, ResponseInputOutputItem,
    ResponseReasoningContent, ResponseTool, ResponsesRequest, ResponsesToolChoice,
    StringOrContentParts, TextFormat, ToolChoiceOptions, Truncation,
};
use serde_json::{Map, Value, json};

/// What a response asks for.
pub(crate) struct ResponseJob {
    pub asked: Asked,
    /// True if the log probabilities of the text are asked for.
    pub logprobs: bool,
    pub stream: bool,
}

impl ResponseJob {
    /// Reads a request.
    pub fn read(mut request: ResponsesRequest) -> Result<Self, ApiError> {
        refuse(&request)?;
        let logprobs = includes(&request, IncludeField::MessageOutputTextLogprobs);
        let structure = form(&request);
        let tools = tool_use(&request)?;
        let fields = Fields {
            max_tokens: request.max_output_tokens,
            temperature: request.temperature,
            top_p: request.top_p,
            top_k: Some(request.top_k),
            min_p: Some(request.min_p),
            repetition_penalty: Some(request.repetition_penalty),
            presence_penalty: request.presence_penalty,
            frequency_penalty: request.frequency_penalty,
            stop: stop(request.stop.take()),
            priority: request.priority,
            // Alternatives are part of what `include` asks for.
            logprobs: logprobs.then(|| request.top_logprobs.unwrap_or_default()),
            ..Fields::default()
        };
        let conversation = Conversation {
            variables: variables(&request),
            messages: conversation(request.instructions, request.input)?,
            ..Conversation::default()
        };
        Ok(Self {
            asked: Asked {
                fields,
                conversation,
                structure,
                tools,
                choices: 1,
                reasoning: true,
                first_call_only: request.parallel_tool_calls == Some(false),
            },
            logprobs,
            stream: request.stream == Some(true),
        })
    }

    /// Refuses log probabilities, or as many alternatives, if the model's executor has none.
    pub fn check_logprobs(&self, state: &ApiState) -> Result<(), ApiError> {
        let Some(asked) = self.asked.fields.logprobs else {
            return Ok(());
        };
        match state.engine().capabilities().max_logprobs {
            None => refuse_if(true, "include"),
            Some(most) if asked as usize > most => Err(ApiError::invalid(
                "top_logprobs",
                format!("{asked} alternatives are asked for; a token has at most {most}."),
            )),
            Some(_) => Ok(()),
        }
    }
}

/// Refuses what this server does not do.
fn refuse(request: &ResponsesRequest) -> Result<(), ApiError> {
    let truncation = request.truncation;
    refuse_if(request.background == Some(true), "background")?;
    refuse_if(request.conversation.is_some(), "conversation")?;
    refuse_if(
        request.previous_response_id.is_some(),
        "previous_response_id",
    )?;
    refuse_if(request.prompt.is_some(), "prompt")?;
    refuse_if(request.context_management.is_some(), "context_management")?;
    refuse_if(request.max_tool_calls.is_some(), "max_tool_calls")?;
    refuse_if(matches!(truncation, Some(Truncation::Auto)), "truncation")?;
    let include = request.include.as_deref().unwrap_or_default();
    let is_known = |field: &IncludeField| match field {
        IncludeField::MessageOutputTextLogprobs => true,
        // Clients that keep nothing ask for it, to send it back: it is sent in the clear.
        IncludeField::ReasoningEncryptedContent => true,
        _ => false,
    };
    refuse_if(!include.iter().all(is_known), "include")
}

/// Returns true if a field is among those that the response is to have.
fn includes(request: &ResponsesRequest, field: IncludeField) -> bool {
    let include = request.include.as_deref().unwrap_or_default();
    include.contains(&field)
}

/// Returns the variables of the template.
fn variables(request: &ResponsesRequest) -> Map<String, Value> {
    let mut variables = Map::new();
    let effort = request.reasoning.as_ref();
    if let Some(effort) = effort.and_then(|reasoning| reasoning.effort) {
        variables.insert("reasoning_effort".into(), effort.as_str().into());
        if let Some(thinking) = thinking_from_reasoning_effort(Some(effort.as_str())) {
            // Qwen's templates read the one, DeepSeek's the other.
            variables.insert("enable_thinking".into(), thinking.into());
            variables.insert("thinking".into(), thinking.into());
        }
    }
    variables
}

/// Returns the form that the answer must have.
fn form(request: &ResponsesRequest) -> Option<Structure> {
    const PARAM: &str = "text.format";
    match request.text.as_ref()?.format.as_ref()? {
        TextFormat::Text => None,
        TextFormat::JsonObject => Some(Structure::json_object(PARAM)),
        TextFormat::JsonSchema {
            name,
            schema,
            description,
            ..
        } => {
            let mut schema = NamedSchema::new(schema).named(name);
            schema.description = description.clone();
            Some(Structure::json_schema(schema, PARAM))
        }
    }
}

/// Returns the tools that the model may call; `None` if it may not.
fn tool_use(request: &ResponsesRequest) -> Result<Option<ToolUse>, ApiError> {
    let tools = request.tools.iter().flatten().enumerate();
    let functions = tools.map(|(index, tool)| match tool {
        ResponseTool::Function(tool) => Ok(tool.function.clone()),
        _ => Err(ApiError::unsupported(
            format!("tools[{index}]"),
            "Only tools of the type `function` are supported; the server runs none itself.",
        )),
    });
    let functions = functions.collect::<Result<Vec<Function>, _>>()?;
    let mut several = request.parallel_tool_calls != Some(false);
    let (forced, names) = match &request.tool_choice {
        None | Some(ResponsesToolChoice::Options(ToolChoiceOptions::Auto)) => (false, None),
        Some(ResponsesToolChoice::Options(ToolChoiceOptions::None)) => return Ok(None),
        Some(ResponsesToolChoice::Options(ToolChoiceOptions::Required)) => (true, None),
        Some(ResponsesToolChoice::Function(choice)) => {
            several = false;
            (true, Some(vec![choice.name.as_str()]))
        }
        Some(ResponsesToolChoice::AllowedTools { mode, tools, .. }) => {
            let names = tools.iter().filter_map(ToolReference::function_name);
            (mode == "required", Some(names.collect()))
        }
        Some(_) => {
            return Err(ApiError::unsupported(
                "tool_choice",
                "Only tools of the type `function` can be chosen.",
            ));
        }
    };
    let definition = |tool: &Function| json!({ "type": "function", "function": tool });
    let definitions: Vec<_> = functions.iter().map(definition).collect();
    let is_callable = |tool: &Function| match &names {
        None => true,
        Some(names) => names.contains(&tool.name.as_str()),
    };
    Ok((!definitions.is_empty()).then(|| ToolUse {
        definitions,
        callable: functions.into_iter().filter(is_callable).collect(),
        forced,
        several,
    }))
}

/// Returns the messages in the form of templates.
fn conversation(
    instructions: Option<String>,
    input: ResponseInput,
) -> Result<Vec<Value>, ApiError> {
    let mut conversation = Conversation::default();
    if let Some(instructions) = instructions {
        conversation.push("system", instructions);
    }
    match input {
        ResponseInput::Text(text) => conversation.push("user", text),
        ResponseInput::Items(items) => {
            // Reasoning and calls belong to the message of the assistant that they surround.
            let mut reasoning = String::new();
            for (index, item) in items.into_iter().enumerate() {
                add_item(&mut conversation, &mut reasoning, item)
                    .map_err(|reason| ApiError::unsupported(format!("input[{index}]"), reason))?;
            }
        }
    }
    Ok(conversation.messages)
}

fn add_item(
    conversation: &mut Conversation,
    reasoning: &mut String,
    item: ResponseInputOutputItem,
) -> Result<(), String> {
    let (role, text) = match item {
        ResponseInputOutputItem::Message { role, content, .. } => (role, join(content)?),
        ResponseInputOutputItem::SimpleInputMessage { role, content, .. } => (role, text(content)?),
        ResponseInputOutputItem::FunctionCallOutput {
            call_id, output, ..
        } => {
            conversation.messages.push(json!({
                "role": "tool",
                "tool_call_id": call_id,
                "content": text(output)?,
            }));
            return Ok(());
        }
        ResponseInputOutputItem::Reasoning { content, .. } => {
            for part in content {
                let ResponseReasoningContent::ReasoningText { text } = part;
                *reasoning += &text;
            }
            return Ok(());
        }
        ResponseInputOutputItem::FunctionToolCall {
            call_id,
            name,
            arguments,
            ..
        } => {
            let call = tool_call(&call_id, &name, Some(&arguments))?;
            let is_of_assistant = |last: &Value| last["role"] == "assistant";
            if !conversation.messages.last().is_some_and(is_of_assistant) {
                push(conversation, "assistant", String::new(), reasoning);
            }
            if let Some(last) = conversation.messages.last_mut() {
                match last["tool_calls"].as_array_mut() {
                    Some(calls) => calls.push(call),
                    None => last["tool_calls"] = json!([call]),
                }
            }
            return Ok(());
        }
        _ => {
            return Err(
                "Only messages, reasoning, function calls and their outputs are supported.".into(),
            );
        }
    };
    let role = if role == "developer" { "system" } else { &role };
    push(conversation, role, text, reasoning);
    Ok(())
}

/// Adds a message, that of the assistant with the reasoning before it.
fn push(conversation: &mut Conversation, role: &str, text: String, reasoning: &mut String) {
    conversation.push(role, text);
    let reasoning = std::mem::take(reasoning);
    if let Some(last) = conversation.messages.last_mut()
        && role == "assistant"
        && !reasoning.is_empty()
    {
        last["reasoning_content"] = reasoning.into();
    }
}

/// Returns the text of a content.
fn text(content: StringOrContentParts) -> Result<String, String> {
    match content {
        StringOrContentParts::String(text) => Ok(text),
        StringOrContentParts::Array(parts) => join(parts),
    }
}

/// Joins the texts of parts.
fn join(parts: Vec<ResponseContentPart>) -> Result<String, String> {
    let texts = parts.into_iter().map(|part| match part {
        ResponseContentPart::InputText { text } | ResponseContentPart::OutputText { text, .. } => {
            Ok(text)
        }
        ResponseContentPart::Refusal { refusal } => Ok(refusal),
        _ => Err("Only texts are supported; the model reads no images and files."),
    });
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}
