//! The events of a response.

use super::item::{self, COMPLETED, IN_PROGRESS};
use crate::generate::Update;
use crate::logprobs::ContentLogprobs;
use crate::output::Part;
use crate::sse::{self, EventWriter};
use crate::state::seconds;
use axum::response::sse::Event;
use openai_protocol::common::to_value_exact;
use openai_protocol::event_types::{
    ContentPartEvent, FunctionCallEvent, OutputItemEvent, OutputTextEvent, ResponseEvent,
};
use openai_protocol::responses::{ResponseStatus, ResponsesResponse};
use serde_json::{Value, json};
use uuid::Uuid;

const REASONING_DELTA: &str = "response.reasoning_text.delta";
const REASONING_DONE: &str = "response.reasoning_text.done";

/// Writes the events from `response.created` to `response.completed`.
pub(super) struct ResponseWriter {
    /// The response, with the items that are complete.
    response: ResponsesResponse,
    open: Option<Open>,
    /// What finds the log probabilities of the text, if they are asked for.
    logprobs: Option<ContentLogprobs>,
    /// The number of events so far.
    sequence: u64,
    events: Vec<Event>,
}

/// An item that is not complete.
struct Open {
    id: String,
    kind: Kind,
    /// The text or the arguments so far.
    text: String,
    /// The log probabilities of the text so far.
    logprobs: Vec<Value>,
}

enum Kind {
    Message,
    Reasoning,
    Call { call_id: String, name: String },
}

impl ResponseWriter {
    /// `response` is in progress and has no items. `logprobs` if log probabilities are asked for.
    pub fn new(response: ResponsesResponse, logprobs: Option<ContentLogprobs>) -> Self {
        Self {
            response,
            open: None,
            logprobs,
            sequence: 0,
            events: Vec::new(),
        }
    }

    /// Adds an event. `fields` is an object.
    fn event(&mut self, name: &str, mut fields: Value) {
        fields["type"] = name.into();
        fields["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        self.events.push(sse::named(name, &fields));
    }

    fn response_event(&mut self, event: ResponseEvent) {
        let response = to_value_exact(&self.response).unwrap_or_default();
        let fields = json!({ "response": response });
        self.event(event.as_str(), fields);
    }

    /// Adds an event of the open item.
    fn item_event(&mut self, name: &str, mut fields: Value) {
        let Some(open) = &self.open else {
            return;
        };
        fields["item_id"] = open.id.as_str().into();
        fields["output_index"] = self.response.output.len().into();
        if !matches!(open.kind, Kind::Call { .. }) {
            fields["content_index"] = 0.into();
        }
        self.event(name, fields);
    }

    /// Begins an item.
    fn begin(&mut self, prefix: &str, kind: Kind) {
        self.close(COMPLETED);
        let id = format!("{prefix}{}", Uuid::new_v4().simple());
        let item = match &kind {
            Kind::Message => item::message(id.clone(), Vec::new(), IN_PROGRESS),
            Kind::Reasoning => item::reasoning(id.clone(), Vec::new(), IN_PROGRESS),
            Kind::Call { call_id, name } => {
                let (call_id, name) = (call_id.clone(), name.clone());
                item::call(id.clone(), call_id, name, String::new(), IN_PROGRESS)
            }
        };
        let is_message = matches!(kind, Kind::Message);
        let output_index = self.response.output.len();
        let fields = json!({ "output_index": output_index, "item": item });
        self.event(OutputItemEvent::Added.as_str(), fields);
        self.open = Some(Open {
            id,
            kind,
            text: String::new(),
            logprobs: Vec::new(),
        });
        if is_message {
            let part = item::output_text(String::new(), self.logprobs.is_some().then(Vec::new));
            self.item_event(ContentPartEvent::Added.as_str(), json!({ "part": part }));
        }
    }

    /// Ends the open item, if one is.
    fn close(&mut self, status: &str) {
        let Some(open) = &self.open else {
            return;
        };
        let text = open.text.clone();
        let logprobs = self.logprobs.is_some().then(|| open.logprobs.clone());
        match &open.kind {
            Kind::Message => {
                let fields = json!({ "text": text, "logprobs": open.logprobs });
                self.item_event(OutputTextEvent::Done.as_str(), fields);
                let part = item::output_text(text.clone(), logprobs.clone());
                self.item_event(ContentPartEvent::Done.as_str(), json!({ "part": part }));
            }
            Kind::Reasoning => self.item_event(REASONING_DONE, json!({ "text": text })),
            Kind::Call { name, .. } => {
                let fields = json!({ "arguments": text, "name": name });
                self.item_event(FunctionCallEvent::ArgumentsDone.as_str(), fields);
            }
        }
        let Some(Open { id, kind, .. }) = self.open.take() else {
            return;
        };
        let item = match kind {
            Kind::Message => item::message(id, vec![item::output_text(text, logprobs)], status),
            Kind::Reasoning => item::reasoning(id, vec![item::reasoning_text(text)], status),
            Kind::Call { call_id, name } => item::call(id, call_id, name, text, status),
        };
        let output_index = self.response.output.len();
        let fields = json!({ "output_index": output_index, "item": item });
        self.event(OutputItemEvent::Done.as_str(), fields);
        self.response.output.push(item);
    }

    fn parts(&mut self, parts: Vec<Part>) {
        for part in parts {
            let logprobs = self
                .logprobs
                .as_mut()
                .map(|of_content| of_content.take(&part));
            self.part(part, logprobs.unwrap_or_default());
        }
    }

    /// Adds a part. `logprobs` are those of its text.
    fn part(&mut self, part: Part, logprobs: Vec<Value>) {
        let kind = self.open.as_ref().map(|open| &open.kind);
        let (name, text) = match part {
            Part::Content(text) => {
                if !matches!(kind, Some(Kind::Message)) {
                    self.begin("msg_", Kind::Message);
                }
                (OutputTextEvent::Delta.as_str(), text)
            }
            Part::Reasoning(text) => {
                if !matches!(kind, Some(Kind::Reasoning)) {
                    self.begin("rs_", Kind::Reasoning);
                }
                (REASONING_DELTA, text)
            }
            Part::Call { id, name, .. } => {
                return self.begin("fc_", Kind::Call { call_id: id, name });
            }
            Part::Arguments { text, .. } => (FunctionCallEvent::ArgumentsDelta.as_str(), text),
            Part::Malformed { .. } => return,
        };
        let mut fields = json!({ "delta": text });
        if name == OutputTextEvent::DELTA {
            fields["logprobs"] = json!(logprobs);
        }
        if let Some(open) = &mut self.open {
            open.text += &text;
            open.logprobs.extend(logprobs);
        }
        self.item_event(name, fields);
    }
}

impl EventWriter for ResponseWriter {
    fn start(&mut self) -> Vec<Event> {
        self.response_event(ResponseEvent::Created);
        self.response_event(ResponseEvent::InProgress);
        std::mem::take(&mut self.events)
    }

    fn update(&mut self, _index: usize, update: Update) -> Vec<Event> {
        if let Some(of_content) = &mut self.logprobs {
            of_content.add(&update);
        }
        match update {
            Update::Token { parts, .. } => self.parts(parts),
            Update::End {
                parts,
                finish,
                counts,
                ..
            } => {
                self.parts(parts);
                let status = super::finish(&mut self.response, &finish, counts, seconds());
                self.close(status);
                self.response_event(match self.response.status {
                    ResponseStatus::Incomplete => ResponseEvent::Incomplete,
                    _ => ResponseEvent::Completed,
                });
            }
            Update::Failed(error) => {
                let error = error.openai().error;
                self.response.status = ResponseStatus::Failed;
                self.response.error = Some(json!({
                    "code": "server_error",
                    "message": error.message,
                }));
                self.response_event(ResponseEvent::Failed);
            }
        }
        std::mem::take(&mut self.events)
    }

    fn end(&mut self) -> Vec<Event> {
        Vec::new()
    }
}
