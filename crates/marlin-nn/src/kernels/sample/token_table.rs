use super::BLOCK;

/// The layout of the token table: what the choice of the next token knows about the tokens of each
/// slot's sequence.
///
/// The table is an i32 tensor [slots * [`ROWS`](Self::ROWS), [`words`](Self::words)]. The rows of a
/// slot are:
///
/// | row | contents |
/// |---|---|
/// | [`OCCURRED`](Self::OCCURRED) | the bitmap of the tokens that occurred, in the prompt or after it |
/// | [`SUPPRESSED`](Self::SUPPRESSED) | the bitmap of the tokens that may not be chosen |
/// | [`GENERATED`](Self::GENERATED) | the bitmap of the tokens that were generated |
/// | [`BIASES`](Self::BIASES) and the 31 rows after it | the bias of each token, f32 |
///
/// In a [bitmap](super::bitmap), bit `token % 32` of word `token / 32` is set if the token belongs
/// to the set. The bias of a token is what is added to its logit: the logit bias of the request,
/// less the presence and frequency penalties of the generated tokens. The biases of tokens past the
/// vocabulary are 0.
#[derive(Debug, Clone, Copy)]
pub struct TokenTable;

impl TokenTable {
    /// The number of rows of a slot: three bitmaps, and 32 rows of biases, since a word of a bitmap
    /// has 32 tokens.
    pub const ROWS: usize = 3 + BLOCK;
    /// The row of the bitmap of the tokens that occurred.
    pub const OCCURRED: usize = 0;
    /// The row of the bitmap of the suppressed tokens.
    pub const SUPPRESSED: usize = 1;
    /// The row of the bitmap of the generated tokens.
    pub const GENERATED: usize = 2;
    /// The first row of the biases.
    pub const BIASES: usize = 3;

    /// Returns the number of words of a row for a vocabulary of `vocab` tokens.
    pub const fn words(vocab: usize) -> usize {
        vocab.div_ceil(BLOCK)
    }

    /// Returns the index of a row of a slot in the table.
    pub const fn row(slot: usize, row: usize) -> usize {
        slot * Self::ROWS + row
    }
}

/// Returns the bitmap of tokens in the format of [`TokenTable`]. Tokens outside the vocabulary are
/// ignored.
pub fn bitmap(tokens: &[u32], vocab: usize) -> Vec<u32> {
    let mut words = vec![0; TokenTable::words(vocab)];
    for &token in tokens.iter().filter(|&&token| (token as usize) < vocab) {
        mark(&mut words, token);
    }
    words
}

/// Sets the bit of a token. Tokens past the end of the bitmap are ignored.
pub(super) fn mark(bitmap: &mut [u32], token: u32) {
    if let Some(word) = bitmap.get_mut(token as usize / BLOCK) {
        *word |= 1 << (token as usize % BLOCK);
    }
}

/// Returns true if the bit of a token is set; false for tokens past the end of the bitmap.
pub(super) fn is_marked(bitmap: &[u32], token: u32) -> bool {
    let word = bitmap.get(token as usize / BLOCK);
    word.is_some_and(|word| word >> (token as usize % BLOCK) & 1 == 1)
}

/// The rows of one slot of a [`TokenTable`], on the host.
#[derive(Debug)]
pub struct SlotTokens<'a> {
    /// The bitmap of the tokens that occurred.
    pub occurred: &'a mut [u32],
    /// The bitmap of the suppressed tokens.
    pub suppressed: &'a [u32],
    /// The bitmap of the generated tokens.
    pub generated: &'a mut [u32],
    /// The bits of the biases.
    pub biases: &'a mut [u32],
}

impl<'a> SlotTokens<'a> {
    /// Returns the rows of a slot in the words of a table whose rows have `words` words; `None` if
    /// the table has no such slot.
    pub fn of_slot(table: &'a mut [u32], words: usize, slot: usize) -> Option<Self> {
        let rows = table.chunks_exact_mut(TokenTable::ROWS * words).nth(slot)?;
        let (occurred, rest) = rows.split_at_mut(words);
        let (suppressed, rest) = rest.split_at_mut(words);
        let (generated, biases) = rest.split_at_mut(words);
        Some(Self {
            occurred,
            suppressed,
            generated,
            biases,
        })
    }

    /// Adds a generated token to the bitmap of generated tokens, and subtracts the penalties from
    /// its bias. Kernels do the same, with the same rounding.
    pub fn generate(&mut self, token: u32, presence_penalty: f32, frequency_penalty: f32) {
        let Some(bias) = self.biases.get_mut(token as usize) else {
            return;
        };
        let mut penalised = f32::from_bits(*bias) - frequency_penalty;
        if !is_marked(self.generated, token) {
            penalised -= presence_penalty;
        }
        mark(self.generated, token);
        *bias = penalised.to_bits();
    }
}
