//! The part of a worker that handles requests.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::Serialize;

use super::request::{Refusal, Request};
use super::template::Template;
use super::tokenizer::LoadedTokenizer;

/// The loaded template or tokenizer.
#[derive(Debug, Default)]
pub(super) struct Session {
    template: Option<Template>,
    tokenizer: Option<LoadedTokenizer>,
}

/// The number of characters of an error message that are returned.
const SHOWN: usize = 1000;

impl Session {
    /// Returns the reply to a request, a `Result<_, Refusal>` as JSON. A panic becomes a
    /// [`Refusal::Panic`]; after it the session is not used again.
    pub fn answer(&mut self, request: Request, body: &[u8]) -> Vec<u8> {
        let reply = catch_unwind(AssertUnwindSafe(|| self.reply(request, body)));
        let refusal = match reply {
            Ok(Ok(reply)) => return reply,
            Ok(Err(refusal)) => refusal,
            Err(panic) => Refusal::Panic(panic_message(panic.as_ref()).into()),
        };
        let shown = |message: String| message.chars().take(SHOWN).collect();
        let refusal = match refusal {
            Refusal::Message(message) => Refusal::Message(shown(message)),
            Refusal::Panic(message) => Refusal::Panic(shown(message)),
            other => other,
        };
        to_json(&Err::<(), _>(refusal)).unwrap_or_default()
    }

    fn reply(&mut self, request: Request, body: &[u8]) -> Result<Vec<u8>, Refusal> {
        let text = || std::str::from_utf8(body).map_err(|error| error.to_string());
        let (template, tokenizer) = (self.template.as_ref(), self.tokenizer.as_ref());
        let template = || template.ok_or("no template is loaded");
        let tokenizer = || tokenizer.ok_or("no tokenizer is loaded");
        match request {
            Request::LoadTemplate { special_tokens } => {
                self.template = Some(Template::compile(text()?, special_tokens)?);
                ok(())
            }
            Request::Render {
                messages,
                variables,
                add_generation_prompt,
            } => ok(template()?.render(&messages, &variables, add_generation_prompt)?),
            Request::LoadTokenizer { tokens } => {
                let (tokenizer, loaded) = LoadedTokenizer::load(body, tokens)?;
                self.tokenizer = Some(tokenizer);
                ok(loaded)
            }
            Request::Encode { add_special_tokens } => {
                ok(tokenizer()?.encode(text()?, add_special_tokens)?)
            }
            Request::Decode { sequences } => ok(tokenizer()?.decode(&sequences)?),
            Request::TokenId => ok(tokenizer()?.token_id(text()?)),
            Request::TokenText { id } => ok(tokenizer()?.token_text(id)),
            Request::Vocabulary => ok(tokenizer()?.token_bytes()?),
            Request::PlainTexts => ok(tokenizer()?.plain_texts()),
        }
    }
}

fn ok(value: impl Serialize) -> Result<Vec<u8>, Refusal> {
    to_json(&Ok(value))
}

fn to_json(reply: &Result<impl Serialize, Refusal>) -> Result<Vec<u8>, Refusal> {
    serde_json::to_vec(reply).map_err(|error| error.to_string().into())
}

/// Returns the message that a panic was raised with.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}
