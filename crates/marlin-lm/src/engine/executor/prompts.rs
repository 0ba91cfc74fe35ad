//! The tokens of prompts that are read as rows.

use marlin_nn as decode;

use super::super::scheduler::PromptChunk;
use crate::Model;

/// The prompt tokens that are read as rows of one pass. Other tokens are read as matrices, prompt
/// by prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PromptRows {
    /// All tokens: attention shares keys and values among a prompt's rows.
    All,
    /// The tokens up to [`LAST_ROW_POSITION`].
    First,
    /// Only a prompt's last token, from which the first new token is chosen.
    Last,
}

/// The last position of a prompt that is read as rows if each row reads the keys and values before
/// it separately. Beyond it matrices are faster. On an H200 with Llama 2 7B, 64 tokens took 7 ms as
/// such rows and 32 ms as matrices, 1024 tokens 94 ms as rows and 76 ms as matrices.
const LAST_ROW_POSITION: usize = 511;
/// The largest number of prompt tokens in a pass if attention runs on tensor cores. Llama 2 7B on
/// an H200: 512 tokens take 12 ms, 1024 take 23 ms, 2000 take 50 ms.
const FLASH_CHUNK: usize = 1024;
/// The largest number of prompt tokens in a pass if attention does not run on tensor cores: enough
/// tokens to be bound by arithmetic, few enough that the scores of a long prompt fit.
const MATRIX_CHUNK: usize = 512;
impl PromptRows {
    /// Returns the tokens that are read as rows on the device of a model.
    pub(super) fn of(model: &Model) -> Self {
        let (device, dtype) = (model.device(), model.dtype());
        if decode::has_flash_attention(&device, dtype, model.config().head_dim) {
            Self::All
        } else if decode::takes_prompts(&device, dtype) {
            Self::First
        } else {
            Self::Last
        }
    }

    /// Returns the largest number of prompt tokens in a pass.
    pub(super) fn chunk(self) -> usize {
        if self == Self::All {
            FLASH_CHUNK
        } else {
            MATRIX_CHUNK
        }
    }

    /// Returns the number of tokens at the end of a chunk that are read as rows.
    pub(super) fn of_chunk(self, chunk: &PromptChunk) -> usize {
        let count = chunk.tokens.len();
        match self {
            Self::All => count,
            Self::First if chunk.position.start + count <= LAST_ROW_POSITION + 1 => count,
            Self::First | Self::Last => usize::from(chunk.end.is_some()),
        }
    }
}
