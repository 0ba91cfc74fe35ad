//! What a request for an answer in a conversation asks for.

use crate::auth::Client;
use crate::conversation::Conversation;
use crate::error::ApiError;
use crate::generate::Job;
use crate::output::OutputOptions;
use crate::sampling::Fields;
use crate::state::ApiState;
use crate::structure::{self, Structure, ToolUse};

/// What the body of a request asks for, whatever the API and the model.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub fields: Fields,
    /// The conversation, without the tools.
    pub conversation: Conversation,
    /// The form that the answer must have.
    pub structure: Option<Structure>,
    /// The tools that the model may call; `None` if it may call none.
    pub tools: Option<ToolUse>,
    /// The number of answers.
    pub choices: usize,
    /// True if reasoning is told apart from content.
    pub reasoning: bool,
    /// True to leave out all calls but the first.
    pub first_call_only: bool,
}

impl Asked {
    /// Returns what is asked of the engine.
    pub async fn job(self, state: &ApiState, client: Client) -> Result<Job, ApiError> {
        let mut request = self.fields.request(state, client)?;
        let tools = self.tools.as_ref();
        let prompt = structure::encode(
            state,
            &mut request,
            self.conversation,
            self.structure,
            tools,
        )
        .await?;
        Ok(Job {
            prompts: vec![prompt],
            choices: self.choices,
            request,
            output: OutputOptions {
                format: state.format(),
                reasoning: self.reasoning,
                tools: tools.map(ToolUse::types),
                first_call_only: self.first_call_only,
            },
        })
    }
}
