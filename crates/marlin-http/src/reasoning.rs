//! Reasoning in the text of a model, between two tags.

/// The tags around the reasoning of a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReasoningTags {
    /// `<think>` and `</think>`.
    #[default]
    Think,
    /// `<seed:think>` and `</seed:think>`: Seed-OSS.
    Seed,
}

impl ReasoningTags {
    /// Returns the tags with which a chat template marks reasoning, so that a model with it writes
    /// them; `None` if it has none.
    pub fn of_template(template: &str) -> Option<Self> {
        [Self::Seed, Self::Think]
            .into_iter()
            .find(|tags| template.contains(tags.closing()))
    }

    /// Returns both tags, the opening one first.
    pub fn texts(self) -> &'static [&'static str; 2] {
        match self {
            Self::Think => &["<think>", "</think>"],
            Self::Seed => &["<seed:think>", "</seed:think>"],
        }
    }

    /// Returns what begins the reasoning.
    pub fn opening(self) -> &'static str {
        self.texts()[0]
    }

    /// Returns what ends the reasoning.
    pub fn closing(self) -> &'static str {
        self.texts()[1]
    }

    /// Returns true if `prompt` ends with the opening tag: the answer begins with reasoning then.
    pub fn is_open(self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.opening())
    }
}

/// Divides the text of an answer into reasoning and content while it is generated.
///
/// An answer may begin with reasoning between the tags, or with reasoning alone if the prompt ends
/// with the opening tag. Later tags are content. White space around the tags is dropped. Where the
/// text is divided into pieces changes nothing but the pieces of the result.
#[derive(Debug)]
pub struct ReasoningParser {
    tags: ReasoningTags,
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
    /// The start of the answer: the opening tag may follow.
    Start,
    /// The place after the opening tag and white space.
    Opened,
    Reasoning,
    /// The place after the closing tag and white space.
    Closed,
    Content,
}

impl ReasoningParser {
    /// Starts at the beginning of an answer to `prompt`, the text that a chat template rendered:
    /// the reasoning has begun if the prompt ends with the opening tag.
    pub fn new(tags: ReasoningTags, prompt: &str) -> Self {
        Self {
            tags,
            state: match tags.is_open(prompt) {
                true => State::Opened,
                false => State::Start,
            },
            held: String::new(),
            mark: 0,
            deltas: Vec::new(),
        }
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
            State::Start => self.tags.opening(),
            State::Opened | State::Reasoning => self.tags.closing(),
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
        divided_by(ReasoningTags::Think, prompt, pieces)
    }

    fn divided_by<'a>(
        tags: ReasoningTags,
        prompt: &str,
        pieces: impl IntoIterator<Item = &'a str>,
    ) -> (String, String) {
        let mut parser = ReasoningParser::new(tags, prompt);
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

    #[test]
    fn tags_are_those_of_the_template() {
        let seed = "{%- set think_end_token = '</seed:think>' -%}";
        for (template, tags) in [
            (seed, Some(ReasoningTags::Seed)),
            (
                "{{ content.split('</think>') }}",
                Some(ReasoningTags::Think),
            ),
            ("{{ content }}", None),
        ] {
            assert_eq!(ReasoningTags::of_template(template), tags, "{template}");
        }
        let expected = ("a </think>".to_string(), "b".to_string());
        for (prompt, answer) in [
            ("", "<seed:think>\na </think>\n</seed:think>\nb"),
            (
                "<seed:bos>assistant\n<seed:think>\n",
                "a </think></seed:think>b",
            ),
        ] {
            let pieces = answer.split_inclusive(':');
            assert_eq!(divided_by(ReasoningTags::Seed, prompt, pieces), expected);
        }
        let [think, seed] = [ReasoningTags::Think, ReasoningTags::Seed];
        assert!(seed.is_open("<seed:think>\n") && !think.is_open("<seed:think>\n"));
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
