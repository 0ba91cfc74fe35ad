//! The engine's request for the request of a message.

use crate::asked::Asked;
use crate::conversation::{Conversation, tool_call};
use crate::error::ApiError;
use crate::sampling::{Fields, refuse_if, refuse_unknown};
use crate::structure::{self, NamedSchema, Structure, ToolUse};
use openai_protocol::common::Function;
use openai_protocol::messages::{
    CountMessageTokensRequest, CreateMessageRequest, CustomTool, InputContent, InputContentBlock,
    InputMessage, Role, SystemContent, SystemContentBlock, Tool, ToolChoice, ToolResultContent,
    ToolResultContentBlock,
};
use serde_json::{Map, Value, json};

/// What a message asks for.
pub(crate) struct MessageJob {
    pub asked: Asked,
    /// The name of the model in the request.
    pub model: String,
    pub stream: bool,
}

impl MessageJob {
    /// Reads a request.
    pub fn read(request: CreateMessageRequest) -> Result<Self, ApiError> {
        refuse_if(request.container.is_some(), "container")?;
        refuse_if(request.mcp_servers.is_some(), "mcp_servers")?;
        refuse_unknown(&request.other, "", &["output_format"])?;
        if request.max_tokens == 0 {
            let message = "At least one token must be asked for.";
            return Err(ApiError::invalid("max_tokens", message));
        }
        let structure = form(&request)?;
        let tools = tool_use(request.tools.as_deref(), request.tool_choice.as_ref())?;
        let fields = Fields {
            max_tokens: Some(request.max_tokens),
            temperature: request.temperature.map(|value| value as f32),
            top_p: request.top_p.map(|value| value as f32),
            top_k: request
                .top_k
                .map(|top_k| i32::try_from(top_k).unwrap_or(i32::MAX)),
            stop: request.stop_sequences.clone().unwrap_or_default(),
            ..Fields::default()
        };
        let (thinking, effort) = (request.template_thinking(), request.reasoning_effort());
        let conversation = Conversation {
            variables: variables(thinking, effort),
            continues: request.continues_final_assistant(),
            messages: conversation(request.system, request.messages)?,
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
                first_call_only: (request.tool_choice.as_ref())
                    .is_some_and(ToolChoice::disables_parallel_tool_use),
            },
            model: request.model,
            stream: request.stream == Some(true),
        })
    }
}

/// Returns the conversation whose tokens are to be counted.
pub(crate) fn count_conversation(
    request: CountMessageTokensRequest,
) -> Result<Conversation, ApiError> {
    refuse_unknown(&request.other, "", &[])?;
    let tools = tool_use(request.tools.as_deref(), request.tool_choice.as_ref())?;
    let config = request.output_config.as_ref();
    let format = config.and_then(|config| config.other.get("format"));
    let structure = format
        .filter(|format| !format.is_null())
        .map(|format| of_format(format, "output_config.format"))
        .transpose()?;
    Ok(Conversation {
        schema: structure::told_schema(structure.as_ref(), tools.as_ref()),
        variables: variables(request.template_thinking(), request.reasoning_effort()),
        continues: request.continues_final_assistant(),
        tools: structure::definitions(tools.as_ref()),
        messages: conversation(request.system, request.messages)?,
    })
}

/// Returns the variables of the template.
fn variables(thinking: Option<bool>, effort: Option<&str>) -> Map<String, Value> {
    let mut variables = Map::new();
    if let Some(thinking) = thinking {
        // Qwen's templates read the one, DeepSeek's the other.
        variables.insert("enable_thinking".into(), thinking.into());
        variables.insert("thinking".into(), thinking.into());
    }
    if let Some(effort) = effort {
        variables.insert("reasoning_effort".into(), effort.into());
    }
    variables
}

/// Returns the form of the answer, which the API has in two places.
fn form(request: &CreateMessageRequest) -> Result<Option<Structure>, ApiError> {
    let Some(param) = request.output_format_field() else {
        return Ok(None);
    };
    let of_config = request.output_config.as_ref();
    let format = match param {
        "output_format" => request.other.get(param),
        _ => of_config.and_then(|config| config.other.get("format")),
    };
    of_format(format.unwrap_or(&Value::Null), param).map(Some)
}

/// Returns the form of the answer that a format asks for. `param` is the field that has it.
fn of_format(format: &Value, param: &'static str) -> Result<Structure, ApiError> {
    match (format["type"].as_str(), &format["schema"]) {
        (Some("json_schema"), schema @ Value::Object(_)) => {
            Ok(Structure::json_schema(NamedSchema::new(schema), param))
        }
        _ => Err(ApiError::invalid(
            param,
            "The format must be an object with `type` `json_schema` and a `schema`.",
        )),
    }
}

/// Returns the tools that the model may call; `None` if it may not.
fn tool_use(
    tools: Option<&[Tool]>,
    choice: Option<&ToolChoice>,
) -> Result<Option<ToolUse>, ApiError> {
    let functions = tools.unwrap_or_default().iter().enumerate();
    let functions = functions.map(|(index, tool)| function(index, tool));
    let functions = functions.collect::<Result<Vec<_>, _>>()?;
    let named = match choice {
        Some(ToolChoice::None) => return Ok(None),
        Some(ToolChoice::Tool { name, .. }) => Some(name),
        _ => None,
    };
    let forced = matches!(
        choice,
        Some(ToolChoice::Any { .. } | ToolChoice::Tool { .. })
    );
    let definition = |tool: &Function| json!({ "type": "function", "function": tool });
    let definitions: Vec<_> = functions.iter().map(definition).collect();
    let is_callable = |tool: &Function| named.is_none_or(|name| tool.name == *name);
    Ok((!definitions.is_empty()).then(|| ToolUse {
        definitions,
        callable: functions.into_iter().filter(is_callable).collect(),
        forced,
        several: named.is_none() && !choice.is_some_and(ToolChoice::disables_parallel_tool_use),
    }))
}

/// Returns a tool in OpenAI's form.
fn function(index: usize, tool: &Tool) -> Result<Function, ApiError> {
    let Tool::Custom(CustomTool {
        name,
        description,
        input_schema,
        extra,
        ..
    }) = tool
    else {
        return Err(ApiError::unsupported(
            format!("tools.{index}"),
            "Only tools with an `input_schema` are supported; the server runs none itself.",
        ));
    };
    let parameters = serde_json::to_value(input_schema).map_err(|error| ApiError::json(&error))?;
    Ok(Function {
        name: name.clone(),
        description: description.clone(),
        parameters,
        strict: extra.get("strict").and_then(Value::as_bool),
        extra: Map::new(),
    })
}

/// Returns the messages in the form of templates.
fn conversation(
    system: Option<SystemContent>,
    messages: Vec<InputMessage>,
) -> Result<Vec<Value>, ApiError> {
    let mut conversation = Conversation::default();
    match system {
        None => {}
        Some(SystemContent::String(text)) => conversation.push("system", text),
        Some(SystemContent::Blocks(blocks)) => {
            let texts = blocks.into_iter();
            let texts = texts.map(|SystemContentBlock::Text(block)| block.text);
            conversation.push("system", texts.collect::<Vec<_>>().join("\n"));
        }
    }
    for (index, message) in messages.into_iter().enumerate() {
        let role = match message.role {
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::System => "system",
        };
        match message.content {
            InputContent::String(text) => conversation.push(role, text),
            InputContent::Blocks(blocks) => {
                blocks_message(&mut conversation, role, blocks).map_err(|reason| {
                    ApiError::unsupported(format!("messages.{index}.content"), reason)
                })?;
            }
        }
    }
    Ok(conversation.messages)
}

/// Adds the blocks of a message. Results of tools are messages of their own.
fn blocks_message(
    conversation: &mut Conversation,
    role: &str,
    blocks: Vec<InputContentBlock>,
) -> Result<(), String> {
    let (mut texts, mut calls, mut reasoning) = (Vec::new(), Vec::new(), String::new());
    for block in blocks {
        match block {
            InputContentBlock::Text(block) => texts.push(block.text),
            InputContentBlock::Thinking(block) => reasoning += &block.thinking,
            InputContentBlock::ToolUse(block) => {
                let input = block.input.to_string();
                calls.push(tool_call(&block.id, &block.name, Some(&input))?);
            }
            InputContentBlock::ToolResult(block) => {
                if !texts.is_empty() {
                    conversation.push(role, std::mem::take(&mut texts).join("\n"));
                }
                conversation.messages.push(json!({
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": result_text(block.content)?,
                }));
            }
            _ => {
                return Err(
                    "Only blocks of text, thinking, tool use and tool results are supported."
                        .into(),
                );
            }
        }
    }
    if texts.is_empty() && calls.is_empty() && reasoning.is_empty() {
        return Ok(());
    }
    conversation.push(role, texts.join("\n"));
    let message = conversation.messages.last_mut();
    if let Some(message) = message.and_then(Value::as_object_mut) {
        if !calls.is_empty() {
            message.insert("tool_calls".into(), calls.into());
        }
        if !reasoning.is_empty() {
            message.insert("reasoning_content".into(), reasoning.into());
        }
    }
    Ok(())
}

/// Returns the text of a tool's result.
fn result_text(content: Option<ToolResultContent>) -> Result<String, String> {
    let blocks = match content {
        None => return Ok(String::new()),
        Some(ToolResultContent::String(text)) => return Ok(text),
        Some(ToolResultContent::Blocks(blocks)) => blocks,
    };
    let texts = blocks.into_iter().map(|block| match block {
        ToolResultContentBlock::Text(block) => Ok(block.text),
        _ => Err("Only texts are supported as results of tools; the model reads no others."),
    });
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}
