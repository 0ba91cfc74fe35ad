//! Stop strings, found across the borders of the pieces of a text.

/// Finds the first of several stop strings in a text that comes in pieces, and holds back what may
/// still become one.
///
/// What is found does not depend on the pieces: it is the stop string that is complete first, of
/// those that end together the longest.
#[derive(Debug)]
pub(super) struct StopStrings {
    matchers: Vec<Matcher>,
    /// The text that was not returned: as long as the longest beginning of a stop string that the
    /// text ends with.
    held: String,
}

impl StopStrings {
    pub fn new(stops: &[String]) -> Self {
        Self {
            matchers: stops.iter().map(|stop| Matcher::new(stop)).collect(),
            held: String::new(),
        }
    }

    /// Adds a piece. Returns the text that cannot become a part of a stop string, and the index of
    /// the stop string if one is complete: the text before it is then all there is.
    pub fn push(&mut self, piece: String) -> (String, Option<usize>) {
        if self.matchers.is_empty() {
            return (piece, None);
        }
        for (index, byte) in piece.bytes().enumerate() {
            let complete = |matcher: &mut Matcher| matcher.push(byte).then_some(matcher.len());
            let matchers = self.matchers.iter_mut().enumerate();
            let found = matchers.filter_map(|(stop, matcher)| Some((complete(matcher)?, stop)));
            if let Some((len, stop)) = found.max() {
                self.held.push_str(&piece[..=index]);
                self.held.truncate(self.held.len() - len);
                return (std::mem::take(&mut self.held), Some(stop));
            }
        }
        self.held.push_str(&piece);
        let matchers = self.matchers.iter();
        let keep = matchers.map(|matcher| matcher.matched).max().unwrap_or(0);
        let kept = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, kept), None)
    }

    /// Returns the text that is held back: no stop string comes any more.
    pub fn finish(self) -> String {
        self.held
    }
}

/// Knuth, Morris and Pratt's search for one string: its time does not depend on the string.
#[derive(Debug)]
struct Matcher {
    pattern: Vec<u8>,
    /// The longest shorter beginning that each beginning of the pattern ends with.
    borders: Vec<usize>,
    /// The bytes of the longest beginning of the pattern that the text ends with.
    matched: usize,
}

impl Matcher {
    fn new(pattern: &str) -> Self {
        let pattern = pattern.as_bytes().to_vec();
        let mut borders = vec![0; pattern.len()];
        for end in 1..pattern.len() {
            borders[end] = extend(&pattern, &borders, borders[end - 1], pattern[end]);
        }
        Self {
            pattern,
            borders,
            matched: 0,
        }
    }

    fn len(&self) -> usize {
        self.pattern.len()
    }

    /// Adds a byte of the text. Returns true if the text ends with the pattern.
    fn push(&mut self, byte: u8) -> bool {
        self.matched = extend(&self.pattern, &self.borders, self.matched, byte);
        self.matched == self.pattern.len()
    }
}

/// Returns the length of the longest beginning of `pattern` that a text ends with after `byte`, if
/// it was `matched` before.
fn extend(pattern: &[u8], borders: &[usize], mut matched: usize, byte: u8) -> usize {
    loop {
        if pattern.get(matched) == Some(&byte) {
            return matched + 1;
        }
        if matched == 0 {
            return 0;
        }
        matched = borders[matched - 1];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::RngExt;

    /// Returns the text before the first stop string, and its index.
    fn expected(text: &str, stops: &[String]) -> (String, Option<usize>) {
        for end in text.char_indices().map(|(at, char)| at + char.len_utf8()) {
            let ends = stops.iter().enumerate();
            let ends = ends.filter(|(_, stop)| text[..end].ends_with(stop.as_str()));
            if let Some((index, stop)) = ends.max_by_key(|(index, stop)| (stop.len(), *index)) {
                return (text[..end - stop.len()].into(), Some(index));
            }
        }
        (text.into(), None)
    }

    #[test]
    fn the_pieces_of_a_text_do_not_matter() {
        let mut rng = marlin_testing::rng();
        let mut found = 0;
        for _ in 0..20_000 {
            let mut text = |most| -> String {
                let len = rng.random_range(0..=most);
                (0..len)
                    .map(|_| ['a', 'b', 'ä', '€'][rng.random_range(0..4)])
                    .collect()
            };
            let whole = text(12);
            let mut stops: Vec<_> = (0..3).map(|_| text(4)).collect();
            stops.retain(|stop| !stop.is_empty());
            let expected = expected(&whole, &stops);
            let mut strings = StopStrings::new(&stops);
            let mut shown = String::new();
            let mut piece = String::new();
            let mut stop = None;
            for char in whole.chars() {
                piece.push(char);
                if rng.random() {
                    let (text, matched) = strings.push(std::mem::take(&mut piece));
                    shown += &text;
                    stop = matched;
                    if stop.is_some() {
                        break;
                    }
                    let held = strings.held.as_str();
                    assert!(
                        held.is_empty() || stops.iter().any(|stop| stop.starts_with(held)),
                        "{held:?} is held back"
                    );
                }
            }
            if stop.is_none() {
                let (text, matched) = strings.push(piece);
                shown += &text;
                stop = matched;
            }
            if stop.is_none() {
                shown += &strings.finish();
            }
            found += usize::from(stop.is_some());
            assert_eq!((shown, stop), expected, "{whole:?} with {stops:?}");
        }
        assert!(found > 5_000, "only {found} texts have a stop string");
    }
}
