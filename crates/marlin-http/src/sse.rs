//! Answers as server-sent events.

use crate::generate::{Answers, Update};
use axum::http::HeaderName;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use serde::Serialize;
use std::convert::Infallible;
use std::time::Duration;

/// The time after which a sign of life is sent while there is nothing else.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Writes the events of an API.
pub(crate) trait EventWriter: Send + 'static {
    /// The events before the first update.
    fn start(&mut self) -> Vec<Event>;
    /// The events for an update of the answer `index`.
    fn update(&mut self, index: usize, update: Update) -> Vec<Event>;
    /// The events after all answers have ended.
    fn end(&mut self) -> Vec<Event>;
    /// The sign of life.
    fn ping(&self) -> Event {
        Event::default().comment("")
    }
}

enum Phase {
    Start,
    Updates,
    End,
}

/// Returns a response whose events are sent as the answers are generated. An answer that failed
/// ends the stream.
pub(crate) fn respond(answers: Answers, writer: impl EventWriter) -> Response {
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE).event(writer.ping());
    let start = (Phase::Start, answers, writer);
    let events = stream::unfold(start, |(phase, mut answers, mut writer)| async move {
        let (phase, events) = match phase {
            Phase::Start => (Phase::Updates, writer.start()),
            Phase::Updates => match answers.next().await {
                Some((index, update)) => {
                    let is_last = matches!(update, Update::Failed(_));
                    let next = if is_last { Phase::End } else { Phase::Updates };
                    (next, writer.update(index, update))
                }
                None => (Phase::End, writer.end()),
            },
            Phase::End => return None,
        };
        Some((events, (phase, answers, writer)))
    });
    let events =
        events.flat_map(|events| stream::iter(events.into_iter().map(Ok::<_, Infallible>)));
    // A proxy must not wait for the end of the answer.
    let headers = [(HeaderName::from_static("x-accel-buffering"), "no")];
    (headers, Sse::new(events).keep_alive(keep_alive)).into_response()
}

/// Returns an event with an object as JSON.
pub(crate) fn data(value: &impl Serialize) -> Event {
    with_data(Event::default(), value)
}

/// Returns an event with a name and an object as JSON.
pub(crate) fn named(name: &str, value: &impl Serialize) -> Event {
    // The fields are written in the order in which they are set.
    with_data(Event::default().event(name), value)
}

fn with_data(event: Event, value: &impl Serialize) -> Event {
    // Objects of the APIs have no keys that are not texts.
    let text = serde_json::to_string(value).unwrap_or_default();
    event.data(text)
}
