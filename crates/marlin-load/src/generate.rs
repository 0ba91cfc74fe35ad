//! One request: what is sent, and when its tokens arrive.

use crate::client::{Client, check_status};
use crate::error::Failure;
use crate::record::{Outcome, RequestRecord};
use crate::sse::EventParser;
use http_body_util::BodyExt;
use hyper::Method;
use hyper::body::Bytes;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// The longest time for the rest of an answer after `[DONE]`.
const LAST_BYTES: Duration = Duration::from_secs(1);

/// A request that can be sent.
pub(crate) struct Prepared {
    pub index: usize,
    pub path: &'static str,
    /// The header `x-request-id`.
    pub id: String,
    pub body: Bytes,
    /// The tokens of the prompt, until the server has counted them.
    pub input_tokens: usize,
    /// The number of events with tokens after which the request is cancelled.
    pub cancel_after: Option<usize>,
}

/// Sends a request and reads its answer. `origin` is the start of the run.
pub(crate) async fn generate(
    client: &Client,
    request: &Prepared,
    origin: Instant,
    due: f64,
    limit: Duration,
) -> RequestRecord {
    let start = Instant::now();
    let mut times = Times::new(start, request);
    let deadline = start + limit;
    let outcome = match timeout_at(deadline, times.run(client, request)).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(failure)) => Outcome::Failed(failure),
        Err(_) => Outcome::Failed(Failure::Timeout(limit)),
    };
    let end = match outcome {
        Outcome::Completed => times.last,
        Outcome::Cancelled | Outcome::Failed(_) => Instant::now(),
    };
    RequestRecord {
        index: request.index,
        due,
        start: (start - origin).as_secs_f64(),
        ttft: times.ttft,
        latency: (end - start).as_secs_f64(),
        input_tokens: times.input_tokens,
        output_tokens: times.output_tokens.unwrap_or(times.events),
        itl: times.itl,
        outcome,
    }
}

/// The times of an answer.
struct Times {
    start: Instant,
    /// The last event with a choice.
    last: Instant,
    /// The last event with a token.
    last_token: Instant,
    ttft: Option<f64>,
    itl: Vec<f64>,
    events: usize,
    input_tokens: usize,
    output_tokens: Option<usize>,
    done: bool,
}

impl Times {
    fn new(start: Instant, request: &Prepared) -> Self {
        Self {
            start,
            last: start,
            last_token: start,
            ttft: None,
            itl: Vec::new(),
            events: 0,
            input_tokens: request.input_tokens,
            output_tokens: None,
            done: false,
        }
    }

    async fn run(&mut self, client: &Client, request: &Prepared) -> Result<Outcome, Failure> {
        let sent = client.send(
            &Method::POST,
            request.path,
            &request.id,
            request.body.clone(),
        );
        let (connection, answer) = sent.await?;
        let mut body = check_status(answer).await?.into_body();
        let mut parser = EventParser::default();
        while !self.done {
            let Some(frame) = body.frame().await else {
                return Err(Failure::Broken("it ended before [DONE]".into()));
            };
            let now = Instant::now();
            let frame = frame.map_err(|error| Failure::Broken(error.to_string()))?;
            let Some(bytes) = frame.data_ref() else {
                continue;
            };
            let mut result = Ok(());
            let pushed = parser.push(bytes, |data| {
                if result.is_ok() {
                    result = self.event(data, now);
                }
            });
            result?;
            pushed.map_err(|_| Failure::Malformed("an event is too long".into()))?;
            if request
                .cancel_after
                .is_some_and(|count| self.events >= count)
            {
                // The connection is dropped, and with it closed.
                return Ok(Outcome::Cancelled);
            }
        }
        // Only a connection without a rest can be used again.
        let end = timeout_at(Instant::now() + LAST_BYTES, body.frame()).await;
        if let Ok(None) = end {
            client.give_back(connection);
        }
        match self.ttft {
            Some(_) => Ok(Outcome::Completed),
            None => Err(Failure::NoToken),
        }
    }

    fn event(&mut self, data: &[u8], now: Instant) -> Result<(), Failure> {
        if self.done {
            return Ok(());
        }
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let chunk: Chunk =
            serde_json::from_slice(data).map_err(|error| Failure::Malformed(error.to_string()))?;
        if let Some(error) = chunk.error {
            return Err(Failure::Reported(error.to_string()));
        }
        if let Some(choice) = chunk.choices.first() {
            if choice.has_token() {
                self.events += 1;
                match self.ttft {
                    None => self.ttft = Some((now - self.start).as_secs_f64()),
                    Some(_) => self.itl.push((now - self.last_token).as_secs_f64()),
                }
                self.last_token = now;
            }
            self.last = now;
        }
        if let Some(usage) = chunk.usage {
            self.input_tokens = usage.prompt_tokens.unwrap_or(self.input_tokens);
            self.output_tokens = usage.completion_tokens.or(self.output_tokens);
        }
        Ok(())
    }
}

/// The parts of a chunk of either endpoint that are measured.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
    finish_reason: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<IgnoredAny>>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<usize>,
    completion_tokens: Option<usize>,
}

impl Choice {
    /// Returns whether the choice stands for a token. A token may have no text, such as a part of a
    /// character; but a choice without a text that ends the answer, and the first of a chat, which
    /// has the role, stand for none.
    fn has_token(&self) -> bool {
        match &self.delta {
            Some(delta) => {
                let texts = [&delta.content, &delta.reasoning, &delta.reasoning_content];
                let mut texts = texts.into_iter().flatten();
                texts.any(|text| !text.is_empty())
                    || delta
                        .tool_calls
                        .as_ref()
                        .is_some_and(|calls| !calls.is_empty())
            }
            None => {
                self.text.as_ref().is_some_and(|text| !text.is_empty())
                    || self.finish_reason.is_none()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has_token(choice: &str) -> bool {
        serde_json::from_str::<Choice>(choice).unwrap().has_token()
    }

    #[test]
    fn a_choice_stands_for_a_token_unless_it_is_a_role_or_an_end() {
        assert!(has_token(r#"{"text": "a", "finish_reason": null}"#));
        assert!(has_token(r#"{"text": "a", "finish_reason": "length"}"#));
        assert!(has_token(r#"{"text": ""}"#));
        assert!(!has_token(r#"{"text": "", "finish_reason": "stop"}"#));
        assert!(!has_token(
            r#"{"delta": {"role": "assistant", "content": ""}}"#
        ));
        assert!(!has_token(r#"{"delta": {}, "finish_reason": "stop"}"#));
        assert!(has_token(r#"{"delta": {"content": "a"}}"#));
        assert!(has_token(
            r#"{"delta": {"reasoning_content": "a", "content": null}}"#
        ));
        assert!(has_token(r#"{"delta": {"tool_calls": [{"index": 0}]}}"#));
    }
}
