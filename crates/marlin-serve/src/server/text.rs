//! The text of a sequence.

use super::stop::StopStrings;
use marlin_text::{TextError, TextStream, Tokenizer};

/// The text of a sequence, without its stop string.
#[derive(Debug)]
pub(super) struct Text<'t> {
    stream: TextStream<'t>,
    stops: StopStrings,
}

impl<'t> Text<'t> {
    /// Starts the text that follows `prompt`.
    pub fn after(
        tokenizer: &'t Tokenizer,
        prompt: &[u32],
        stops: &[String],
    ) -> Result<Self, TextError> {
        Ok(Self {
            stream: TextStream::after(tokenizer, prompt)?,
            stops: StopStrings::new(stops),
        })
    }

    /// Adds a token. Returns the text that it completes, and the index of the stop string if one
    /// is complete. If the token `can_stop` is false, its text is not searched.
    pub fn push(
        &mut self,
        token: u32,
        can_stop: bool,
    ) -> Result<(String, Option<usize>), TextError> {
        let piece = self.stream.push(token)?.unwrap_or_default();
        Ok(if can_stop {
            self.stops.push(piece)
        } else {
            (piece, None)
        })
    }

    /// Returns what is held back, and the index of the stop string if that completes one.
    pub fn finish(mut self) -> Result<(String, Option<usize>), TextError> {
        let piece = self.stream.finish()?.unwrap_or_default();
        let (mut text, stop) = self.stops.push(piece);
        if stop.is_none() {
            text += &self.stops.finish();
        }
        Ok((text, stop))
    }
}
