//! Reasoning in the text of a model, between `<think>` and `</think>`.

/// Divides the text of an answer into reasoning and content while it is generated.
///
/// An answer may begin with reasoning between `<think>` and `</think>`, or with reasoning alone if
/// the prompt ends with `<think>`. Later tags are content. White space around the tags is dropped.
/// Where the text is divided into pieces changes nothing but the pieces of the result.
#[derive(Debug)]
pub struct ReasoningParser {
    state: State,
    /// White space and the start of a tag, which may not belong to the result.
    held: String,
    /// The end of the white space at the start of `held`.
    mark: usize,
    deltas: Vec<ReasoningDelta>,
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReasoningDelta {
    /// What the model writes before its answer.
    Reasoning(String),
    /// The answer.
    Content(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The start of the answer: `<think>` may follow.
    Start,
    /// The place after `<think>` and white space.
    Opened,
    Reasoning,
    /// The place after `</think>` and white space.
    Closed,
    Content,
}

const OPENING: &str = "<think>";

impl ReasoningParser {
    /// What ends the reasoning.
    pub const CLOSING: &str = "</think>";

    /// Starts at the beginning of an answer to `prompt`, the text that a chat template rendered:
    /// the reasoning has begun if the prompt ends with `<think>`.
    pub fn new(prompt: &str) -> Self {
        Self {
            state: match Self::is_open(prompt) {
                true => State::Opened,
                false => State::Start,
            },
            held: String::new(),
            mark: 0,
            deltas: Vec::new(),
        }
    }

    /// Returns true if `prompt` ends with `<think>`, so that the answer begins with reasoning.
    pub fn is_open(prompt: &str) -> bool {
        prompt.trim_end().ends_with(OPENING)
    }

    /// Returns true if a chat template marks reasoning, so that a model with it writes `<think>`.
    pub fn is_in_template(template: &str) -> bool {
        template.contains(Self::CLOSING)
    }

    /// Adds text and returns the parts of the answer that it completes. White space, and text that
    /// may be the start of a tag, are held back.
    pub fn push(&mut self, text: &str) -> Vec<ReasoningDelta> {
        for character in text.chars() {
            self.step(character);
        }
        std::mem::take(&mut self.deltas)
    }

    /// Ends the answer and returns its last parts. Reasoning that was not closed stays reasoning.
    pub fn finish(mut self) -> Vec<ReasoningDelta> {
        let held = std::mem::take(&mut self.held);
        let is_space = self.mark == held.len();
        match self.state {
            State::Opened | State::Reasoning | State::Closed if is_space => {}
            State::Opened => self.give(held[self.mark..].into()),
            _ => self.give(held),
        }
        self.deltas
    }

    fn step(&mut self, character: char) {
        let tag = match self.state {
            State::Start => OPENING,
            State::Opened | State::Reasoning => Self::CLOSING,
            State::Closed if character.is_ascii_whitespace() => return,
            State::Closed | State::Content => {
                self.state = State::Content;
                return self.give(character.into());
            }
        };
        let rest = tag.strip_prefix(&self.held[self.mark..]);
        if rest.is_some_and(|rest| rest.starts_with(character)) {
            self.held.push(character);
            if &self.held[self.mark..] == tag {
                self.state = match self.state {
                    State::Start => State::Opened,
                    _ => State::Closed,
                };
                self.held.clear();
                self.mark = 0;
            }
            return;
        }
        if character.is_ascii_whitespace() && self.held.len() == self.mark {
            self.held.push(character);
            self.mark = self.held.len();
            return;
        }
        let held = std::mem::take(&mut self.held);
        let text = match self.state {
            State::Opened => held[self.mark..].to_string(),
            _ => held,
        };
        self.mark = 0;
        match self.state {
            State::Start => {
                self.state = State::Content;
                self.give(text);
                self.give(character.into());
            }
            _ => {
                self.state = State::Reasoning;
                self.give(text);
                if character.is_ascii_whitespace() || tag.starts_with(character) {
                    self.step(character);
                } else {
                    self.give(character.into());
                }
            }
        }
    }

    /// Gives out a text as what the current state says it is.
    fn give(&mut self, text: String) {
        let is_reasoning = matches!(self.state, State::Opened | State::Reasoning);
        match (self.deltas.last_mut(), is_reasoning) {
            (Some(ReasoningDelta::Reasoning(last)), true)
            | (Some(ReasoningDelta::Content(last)), false) => last.push_str(&text),
            _ if text.is_empty() => {}
            (_, true) => self.deltas.push(ReasoningDelta::Reasoning(text)),
            (_, false) => self.deltas.push(ReasoningDelta::Content(text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::*;

    /// Returns the reasoning and the content of an answer that comes in pieces.
    fn divided<'a>(prompt: &str, pieces: impl IntoIterator<Item = &'a str>) -> (String, String) {
        let mut parser = ReasoningParser::new(prompt);
        let mut deltas = Vec::new();
        for piece in pieces {
            deltas.extend(parser.push(piece));
        }
        deltas.extend(parser.finish());
        let (mut reasoning, mut content) = (String::new(), String::new());
        for delta in deltas {
            match delta {
                ReasoningDelta::Reasoning(text) => {
                    assert_eq!(content, "", "reasoning after content");
                    reasoning += &text;
                }
                ReasoningDelta::Content(text) => content += &text,
            }
        }
        (reasoning, content)
    }

    const OPEN: &str = "<|im_start|>assistant\n<think>\n";
    /// Qwen 3 closes the reasoning in the prompt if `enable_thinking` is false.
    const NONE: &str = "<|im_start|>assistant\n<think>\n\n</think>\n\n";

    /// A prompt, an answer, its reasoning and its content.
    const CASES: [[&str; 4]; 14] = [
        ["", "<think>\nWell.\n</think>\n\nYes.\n", "Well.", "Yes.\n"],
        ["", " \n<think>a  b</think>c", "a  b", "c"],
        ["", "Yes. <think>no</think>", "", "Yes. <think>no</think>"],
        ["", "  Yes.", "", "  Yes."],
        ["", "<thin", "", "<thin"],
        ["", "<think></think>Yes.", "", "Yes."],
        ["", "<think>\nNever ends. \n", "Never ends.", ""],
        ["", "<think>a < b <</think>c", "a < b <", "c"],
        ["", "<think>a</think>b</think>", "a", "b</think>"],
        ["", "<think><think>a</think>b", "<think>a", "b"],
        [OPEN, "Well.\n</think>\nYes.", "Well.", "Yes."],
        [OPEN, "\n</think>Yes.", "", "Yes."],
        [OPEN, "a </thin", "a </thin", ""],
        [NONE, "Yes.</think>", "", "Yes.</think>"],
    ];

    #[test]
    fn reasoning_is_apart() {
        for [prompt, answer, reasoning, content] in CASES {
            let expected = (reasoning.to_string(), content.to_string());
            assert_eq!(divided(prompt, [answer]), expected, "{answer:?}");
        }
    }

    /// 100,000 answers of random parts take 1 s.
    #[test]
    fn pieces_change_nothing() {
        let mut rng = marlin_testing::rng();
        const PARTS: [&str; 9] = [
            "<think>", "</think>", "<", "</", "think>", " ", "\n", "é", "text",
        ];
        for _ in 0..100_000 {
            let answer: String = (0..rng.random_range(0..12))
                .map(|_| PARTS[rng.random_range(0..PARTS.len())])
                .collect();
            let prompt = ["", OPEN, NONE][rng.random_range(0..3)];
            let whole = divided(prompt, [answer.as_str()]);
            let mut pieces = Vec::new();
            let mut rest = answer.as_str();
            while let Some(end) = rest
                .char_indices()
                .map(|(at, _)| at)
                .nth(rng.random_range(1..6))
            {
                let (piece, after) = rest.split_at(end);
                pieces.push(piece);
                rest = after;
            }
            pieces.push(rest);
            assert_eq!(divided(prompt, pieces), whole, "{answer:?}");
        }
    }
}
