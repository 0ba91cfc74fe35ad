//! A worker in the program's own process.

use std::thread;

use super::request::Request;
use super::session::{Session, panic_message};
use crate::Failure;

/// A session that runs in the program's own process.
#[derive(Debug, Default)]
pub(super) struct Local {
    session: Session,
}

/// The size of the stack on which files are parsed and templates run.
///
/// The recursion of both is bounded by the length of a template and by the depth of JSON. Without
/// optimisation, the deepest found overflows 192 MiB and fits 256 MiB. Memory is only taken as far
/// as the stack is used.
const STACK: usize = 512 << 20;

impl Local {
    /// Runs a request and returns the reply as JSON.
    pub fn call(&mut self, request: Request, body: &[u8]) -> Result<Vec<u8>, Failure> {
        if is_shallow(&request) {
            return Ok(self.session.answer(request, body));
        }
        thread::scope(|scope| {
            let thread = thread::Builder::new()
                .name("marlin-text".into())
                .stack_size(STACK)
                .spawn_scoped(scope, || self.session.answer(request, body))
                .map_err(Failure::Thread)?;
            thread
                .join()
                .map_err(|panic| Failure::Panicked(panic_message(panic.as_ref()).into()))
        })
    }
}

/// Returns true if a request recurses no deeper than the components of a `tokenizer.json` are
/// nested, which is at most 128 levels. Such requests run on the stack of the caller, because a
/// thread takes longer to start than a token to decode.
fn is_shallow(request: &Request) -> bool {
    match request {
        Request::LoadTemplate { .. } | Request::Render { .. } | Request::LoadTokenizer { .. } => {
            false
        }
        Request::Encode { .. }
        | Request::Decode { .. }
        | Request::TokenId
        | Request::TokenText { .. }
        | Request::Vocabulary
        | Request::PlainTexts => true,
    }
}
