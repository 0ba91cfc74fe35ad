/// The state of one sequence in a decode step: a row of an i32 tensor [rows,
/// [`SequenceState::WORDS`]].
///
/// A step reads the row, and writes its token and its position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SequenceState {
    /// The token that the step embeds; after the step, the token that the step chose.
    pub token: u32,
    /// The status of the sequence, with the position of its token.
    pub status: SequenceStatus,
    /// The sequence's slot in the cache.
    pub slot: u32,
    /// The seed of the sequence's random choices.
    pub seed: u32,
    /// The limit of top-k: only this many of the most likely tokens may be chosen; 0 for all.
    pub top_k: u32,
    /// The divisor of the logits; at 0 the most likely token is always chosen.
    pub temperature: f32,
    /// The limit of top-p: only the most likely tokens that together reach this probability may be
    /// chosen; 1 for all.
    pub top_p: f32,
    /// The repetition penalty: positive logits of tokens that occurred before are divided by it,
    /// and negative logits are multiplied by it; 1 for no penalty.
    pub repetition_penalty: f32,
    /// The limit of min-p: only tokens at least this many times as likely as the most likely token
    /// may be chosen; 0 for all.
    pub min_p: f32,
    /// True if the tokens in the slot's bitmap of suppressed tokens may not be chosen. If false,
    /// kernels ignore the bitmap.
    pub suppresses: bool,
    /// True if the slot's biases are added to the logits, and the penalties below are applied to
    /// the biases. If false, kernels ignore the biases.
    pub is_biased: bool,
    /// The presence penalty: it is subtracted from the bias of a token when the token is generated
    /// for the first time.
    pub presence_penalty: f32,
    /// The frequency penalty: it is subtracted from the bias of a token each time the token is
    /// generated.
    pub frequency_penalty: f32,
    /// The number of most likely tokens whose log probabilities are computed, besides that of the
    /// chosen token; `None` for no log probabilities.
    pub logprobs: Option<u32>,
}

/// The status of a sequence. Kernels read the status as an i32 that holds a position or a negative
/// code, and skip rows with a negative value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SequenceStatus {
    /// The token is at this position, counted from 0.
    At(u32),
    /// The row is not used.
    Idle,
    /// No token could be chosen: a logit was NaN or plus infinity, or all were minus infinity.
    Failed,
    /// The position of the chosen token is past the end of the context window.
    WindowFull,
}

impl SequenceStatus {
    /// The position word of [`SequenceStatus::Failed`].
    pub const FAILED: i32 = -2;
    /// The position word of [`SequenceStatus::WindowFull`].
    pub const WINDOW_FULL: i32 = -3;
    const IDLE: i32 = -1;

    fn word(self) -> i32 {
        match self {
            Self::At(position) => position as i32,
            Self::Idle => Self::IDLE,
            Self::Failed => Self::FAILED,
            Self::WindowFull => Self::WINDOW_FULL,
        }
    }

    fn from_word(word: i32) -> Self {
        match word {
            Self::FAILED => Self::Failed,
            Self::WINDOW_FULL => Self::WindowFull,
            position => u32::try_from(position).map_or(Self::Idle, Self::At),
        }
    }
}

impl SequenceState {
    /// The number of words of a row.
    pub const WORDS: usize = 14;
    /// The word that holds the token.
    pub const TOKEN: usize = 0;
    /// The word that holds the position, which is negative if the row is skipped.
    pub const POSITION: usize = 1;
    /// The word that holds the slot.
    pub const SLOT: usize = 2;
    /// The word that holds the seed.
    pub const SEED: usize = 3;
    /// The word that holds top-k.
    pub const TOP_K: usize = 4;
    /// The word that holds the temperature's bits.
    pub const TEMPERATURE: usize = 5;
    /// The word that holds top-p's bits.
    pub const TOP_P: usize = 6;
    /// The word that holds the repetition penalty's bits.
    pub const REPETITION_PENALTY: usize = 7;
    /// The word that holds min-p's bits.
    pub const MIN_P: usize = 8;
    /// The word that is 1 if tokens are suppressed, 0 otherwise.
    pub const SUPPRESSES: usize = 9;
    /// The word that is 1 if the slot's biases are used, 0 otherwise.
    pub const IS_BIASED: usize = 10;
    /// The word that holds the presence penalty's bits.
    pub const PRESENCE_PENALTY: usize = 11;
    /// The word that holds the frequency penalty's bits.
    pub const FREQUENCY_PENALTY: usize = 12;
    /// The word that holds the number of most likely tokens with log probabilities, plus 1; 0 for
    /// no log probabilities.
    pub const LOGPROBS: usize = 13;

    /// A row that no sequence uses.
    pub const IDLE: Self = Self {
        token: 0,
        status: SequenceStatus::Idle,
        slot: 0,
        seed: 0,
        top_k: 0,
        temperature: 0.0,
        top_p: 1.0,
        repetition_penalty: 1.0,
        min_p: 0.0,
        suppresses: false,
        is_biased: false,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logprobs: None,
    };

    /// Returns the row of a prompt's token. Kernels only read the row, so its sampling parameters
    /// are not used.
    pub fn of_prompt(token: u32, position: u32, slot: u32) -> Self {
        Self {
            token,
            status: SequenceStatus::At(position),
            slot,
            ..Self::IDLE
        }
    }

    /// Returns the row as the words of the device's tensor.
    pub fn to_words(self) -> [i32; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        words[Self::TOKEN] = self.token as i32;
        words[Self::POSITION] = self.status.word();
        words[Self::SLOT] = self.slot as i32;
        words[Self::SEED] = self.seed as i32;
        words[Self::TOP_K] = self.top_k as i32;
        words[Self::TEMPERATURE] = self.temperature.to_bits() as i32;
        words[Self::TOP_P] = self.top_p.to_bits() as i32;
        words[Self::REPETITION_PENALTY] = self.repetition_penalty.to_bits() as i32;
        words[Self::MIN_P] = self.min_p.to_bits() as i32;
        words[Self::SUPPRESSES] = i32::from(self.suppresses);
        words[Self::IS_BIASED] = i32::from(self.is_biased);
        words[Self::PRESENCE_PENALTY] = self.presence_penalty.to_bits() as i32;
        words[Self::FREQUENCY_PENALTY] = self.frequency_penalty.to_bits() as i32;
        words[Self::LOGPROBS] = self.logprobs.map_or(0, |count| count as i32 + 1);
        words
    }

    /// Returns the row that the words of the device's tensor represent.
    pub fn from_words(words: [i32; Self::WORDS]) -> Self {
        let float = |word: usize| f32::from_bits(words[word] as u32);
        Self {
            token: words[Self::TOKEN] as u32,
            status: SequenceStatus::from_word(words[Self::POSITION]),
            slot: words[Self::SLOT] as u32,
            seed: words[Self::SEED] as u32,
            top_k: words[Self::TOP_K] as u32,
            temperature: float(Self::TEMPERATURE),
            top_p: float(Self::TOP_P),
            repetition_penalty: float(Self::REPETITION_PENALTY),
            min_p: float(Self::MIN_P),
            suppresses: words[Self::SUPPRESSES] != 0,
            is_biased: words[Self::IS_BIASED] != 0,
            presence_penalty: float(Self::PRESENCE_PENALTY),
            frequency_penalty: float(Self::FREQUENCY_PENALTY),
            logprobs: (words[Self::LOGPROBS] as u32).checked_sub(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_comes_back_from_its_words() {
        for status in [
            SequenceStatus::At(0),
            SequenceStatus::At(131_071),
            SequenceStatus::Idle,
            SequenceStatus::Failed,
            SequenceStatus::WindowFull,
        ] {
            let row = SequenceState {
                token: 128_255,
                status,
                slot: 127,
                seed: u32::MAX,
                top_k: 50,
                temperature: 0.7,
                top_p: 0.95,
                repetition_penalty: 1.05,
                min_p: 0.1,
                suppresses: true,
                is_biased: true,
                presence_penalty: 0.5,
                frequency_penalty: -0.25,
                logprobs: Some(20),
            };
            assert_eq!(SequenceState::from_words(row.to_words()), row);
        }
    }
}
