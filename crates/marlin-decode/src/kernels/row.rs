/// The state of one sequence in a decode step: a row of an i32 tensor [rows, [`Row::WORDS`]].
///
/// A step reads it, and writes the token and the position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// The token that the step embeds; after the step, the token that it chose.
    pub token: u32,
    /// The state of the sequence.
    pub state: RowState,
    /// The sequence's slot in the cache.
    pub slot: u32,
    /// The seed of its sampling.
    pub seed: u32,
    /// Top-k: only this many of the most likely tokens may be chosen; 0 for all.
    pub top_k: u32,
    /// The divisor of the logits; at 0 the most likely token is always chosen.
    pub temperature: f32,
    /// Top-p: only the most likely tokens that together reach this probability may be chosen; 1 for
    /// all.
    pub top_p: f32,
    /// Positive logits of tokens that occurred before are divided by this, negative ones
    /// multiplied; 1 for no penalty.
    pub repetition_penalty: f32,
    /// Min-p: only tokens at least this many times as likely as the most likely one may be chosen;
    /// 0 for all.
    pub min_p: f32,
    /// True if the slot's bitmap of suppressed tokens counts: none of them may be chosen. False if
    /// there are none.
    pub suppresses: bool,
}

/// The state of a sequence. Kernels see the position as an i32 and skip negative ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowState {
    /// The token is at this position, counted from 0.
    At(u32),
    /// The row is not used.
    Idle,
    /// No token could be chosen: a logit was NaN or plus infinity, or all were minus infinity.
    Failed,
    /// The last token takes the sequence past the window.
    WindowFull,
}

impl RowState {
    /// The position word of [`RowState::Failed`].
    pub const FAILED: i32 = -2;
    /// The position word of [`RowState::WindowFull`].
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

impl Row {
    /// The number of words of a row.
    pub const WORDS: usize = 10;
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

    /// A row that no sequence uses.
    pub const IDLE: Self = Self {
        token: 0,
        state: RowState::Idle,
        slot: 0,
        seed: 0,
        top_k: 0,
        temperature: 0.0,
        top_p: 1.0,
        repetition_penalty: 1.0,
        min_p: 0.0,
        suppresses: false,
    };

    /// A token of a prompt: it is only read, so that it needs no sampling.
    pub fn of_prompt(token: u32, position: u32, slot: u32) -> Self {
        Self {
            token,
            state: RowState::At(position),
            slot,
            ..Self::IDLE
        }
    }

    /// Returns the row as the words of the device's tensor.
    pub fn to_words(self) -> [i32; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        words[Self::TOKEN] = self.token as i32;
        words[Self::POSITION] = self.state.word();
        words[Self::SLOT] = self.slot as i32;
        words[Self::SEED] = self.seed as i32;
        words[Self::TOP_K] = self.top_k as i32;
        words[Self::TEMPERATURE] = self.temperature.to_bits() as i32;
        words[Self::TOP_P] = self.top_p.to_bits() as i32;
        words[Self::REPETITION_PENALTY] = self.repetition_penalty.to_bits() as i32;
        words[Self::MIN_P] = self.min_p.to_bits() as i32;
        words[Self::SUPPRESSES] = i32::from(self.suppresses);
        words
    }

    /// Returns the row of such words.
    pub fn from_words(words: [i32; Self::WORDS]) -> Self {
        let float = |word: usize| f32::from_bits(words[word] as u32);
        Self {
            token: words[Self::TOKEN] as u32,
            state: RowState::from_word(words[Self::POSITION]),
            slot: words[Self::SLOT] as u32,
            seed: words[Self::SEED] as u32,
            top_k: words[Self::TOP_K] as u32,
            temperature: float(Self::TEMPERATURE),
            top_p: float(Self::TOP_P),
            repetition_penalty: float(Self::REPETITION_PENALTY),
            min_p: float(Self::MIN_P),
            suppresses: words[Self::SUPPRESSES] != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_comes_back_from_its_words() {
        for state in [
            RowState::At(0),
            RowState::At(131_071),
            RowState::Idle,
            RowState::Failed,
            RowState::WindowFull,
        ] {
            let row = Row {
                token: 128_255,
                state,
                slot: 127,
                seed: u32::MAX,
                top_k: 50,
                temperature: 0.7,
                top_p: 0.95,
                repetition_penalty: 1.05,
                min_p: 0.1,
                suppresses: true,
            };
            assert_eq!(Row::from_words(row.to_words()), row);
        }
    }
}
