//! A parser of server-sent events.

/// The most bytes of an event.
pub(crate) const EVENT_LIMIT: usize = 1 << 20;

/// An event was longer than [`EVENT_LIMIT`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooLong;

/// Finds the data of server-sent events in bytes that arrive in pieces, wherever these are cut.
/// Comments and fields other than `data` are ignored.
#[derive(Debug, Default)]
pub(crate) struct EventParser {
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    /// True after `\r`: a `\n` belongs to the same end of line.
    after_cr: bool,
}

impl EventParser {
    /// Reads a piece, and calls a function with the data of each event that it completes.
    pub fn push(&mut self, mut piece: &[u8], mut event: impl FnMut(&[u8])) -> Result<(), TooLong> {
        loop {
            if self.after_cr && !piece.is_empty() {
                self.after_cr = false;
                piece = piece.strip_prefix(b"\n").unwrap_or(piece);
            }
            let end = piece.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let taken = end.unwrap_or(piece.len());
            if self.line.len() + self.data.len() + taken > EVENT_LIMIT {
                return Err(TooLong);
            }
            self.line.extend_from_slice(&piece[..taken]);
            let Some(end) = end else {
                return Ok(());
            };
            self.after_cr = piece[end] == b'\r';
            piece = &piece[end + 1..];
            self.end_line(&mut event);
        }
    }

    fn end_line(&mut self, event: &mut impl FnMut(&[u8])) {
        if self.line.is_empty() {
            if self.has_data {
                event(&self.data);
            }
            self.data.clear();
            self.has_data = false;
        } else if let Some(value) = data_of(&self.line) {
            if self.has_data {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(value);
            self.has_data = true;
        }
        self.line.clear();
    }
}

/// Returns the value of a line `data: VALUE`.
fn data_of(line: &[u8]) -> Option<&[u8]> {
    let rest = line.strip_prefix(b"data")?;
    match rest.strip_prefix(b":") {
        Some(value) => Some(value.strip_prefix(b" ").unwrap_or(value)),
        None => rest.is_empty().then_some(rest),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::RngExt;

    fn parse<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<Vec<String>, TooLong> {
        let mut parser = EventParser::default();
        let mut events = Vec::new();
        for piece in pieces {
            parser.push(piece, |data| {
                events.push(String::from_utf8(data.to_vec()).unwrap());
            })?;
        }
        Ok(events)
    }

    const TEXT: &str = ": a comment\r\n\
        event: x\r\ndata: one\r\n\r\ndata:two\rdata:  three\r\rdata\n\ndata\ndata\n\nid: 1\n\n\
        database: no\n\ndata: {\"text\": \"\u{e9}\u{1f600}\"}\n\ndata: [DONE]\n\ndata: cut";

    #[test]
    fn events_are_those_of_the_format_however_they_are_cut() {
        let expected = [
            "one",
            "two\n three",
            "",
            "\n",
            "{\"text\": \"\u{e9}\u{1f600}\"}",
            "[DONE]",
        ];
        assert_eq!(parse([TEXT.as_bytes()]).unwrap(), expected);
        assert_eq!(parse(TEXT.as_bytes().chunks(1)).unwrap(), expected);
        let mut rng = marlin_testing::rng();
        for _ in 0..1000 {
            let mut rest = TEXT.as_bytes();
            let mut pieces = Vec::new();
            while !rest.is_empty() {
                // Empty pieces, too.
                let (piece, next) = rest.split_at(rng.random_range(0..=rest.len().min(20)));
                pieces.push(piece);
                rest = next;
            }
            assert_eq!(
                parse(pieces.iter().copied()).unwrap(),
                expected,
                "{pieces:?}"
            );
        }
    }

    #[test]
    fn an_event_is_bounded() {
        let line = [b"data: ".as_slice(), &[b'x'; 1000], b"\n"].concat();
        let ended = [line.as_slice(), b"\n"].concat();
        // Any number of events, but none of any length, in one line or in many.
        assert_eq!(
            parse((0..5000).map(|_| ended.as_slice())).unwrap().len(),
            5000
        );
        assert_eq!(parse((0..5000).map(|_| line.as_slice())), Err(TooLong));
        assert_eq!(
            parse((0..5000).map(|_| [b'x'; 1000].as_slice())),
            Err(TooLong)
        );
    }
}
