//! The rows of a step as i32 tensors: allocation, writes from the host and reads to the host.

use crate::DecodeError;
use crate::device::{has_kernels, is_flex};
use crate::kernels::SequenceState;
use crate::kernels::sample::LOGPROB_WORDS;
use crate::ops::DecodeBackend;
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// Allocates an i32 tensor [rows, words] of zeros: the rows of a step, the token table, or the
/// arrival counters of attention.
pub fn words(shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::<1, Int>::zeros([shape[0] * shape[1]], (device, DType::I32)).reshape(shape)
}

/// Writes words to an i32 tensor [rows, words], starting at the first word of row `row`.
///
/// # Panics
/// Panics if the words reach past the end of the tensor.
pub fn write_words(tensor: &mut Tensor<2, Int>, row: usize, words: Vec<i32>) {
    let [rows, columns] = tensor.dims();
    assert!(
        row * columns + words.len() <= rows * columns,
        "{} words from row {row} of {rows} of {columns}",
        words.len()
    );
    tensor.inplace(
        |tensor| match is_flex(&tensor.device()) || has_kernels(&tensor.device()) {
            true => Tensor::from_dispatch(Dispatch::decode_write_words(
                tensor.into_dispatch(),
                row * columns,
                words,
            )),
            false => assign(tensor, row * columns, words),
        },
    );
}

/// Writes words to a tensor with Burn's operations, as [`write_words`] does, starting at word
/// `first`.
fn assign(tensor: Tensor<2, Int>, first: usize, words: Vec<i32>) -> Tensor<2, Int> {
    let (shape, device, count) = (tensor.dims(), tensor.device(), words.len());
    let new = Tensor::from_data(TensorData::new(words, [count]), (&device, DType::I32));
    tensor
        .reshape([shape[0] * shape[1]])
        .slice_assign(first..first + count, new)
        .reshape(shape)
}

/// Writes rows of a step, starting at row `first`.
///
/// # Panics
/// Panics if the rows reach past the end of the tensor.
pub fn write_rows(tensor: &mut Tensor<2, Int>, first: usize, rows: &[SequenceState]) {
    write_words(
        tensor,
        first,
        rows.iter().flat_map(|row| row.to_words()).collect(),
    );
}

/// A pending copy of a step's rows to the host. The copy runs after the work that was submitted to
/// the device before, and does not wait for work that is submitted later.
pub struct RowsRead(Reading);

/// A pending copy of the log probabilities of a step to the host, as [`RowsRead`].
pub struct LogprobsRead(Reading);

/// The log probability of a token, and those of the most likely tokens in its place.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The natural logarithm of the token's probability under the logits of the model, before
    /// penalties, biases, suppressed tokens and temperature.
    pub logprob: f32,
    /// The most likely tokens with their log probabilities, the most likely first.
    pub top: Vec<(u32, f32)>,
}

enum Reading {
    /// The copy is in progress.
    #[cfg(feature = "cubecl-runtime")]
    Cube(crate::ops::cube::WordsRead),
    /// The copy is complete.
    Done(Result<Vec<i32>, DecodeError>),
}

/// Starts copying the rows of a step to the host.
pub fn start_reading(tensor: &Tensor<2, Int>) -> RowsRead {
    RowsRead(reading(tensor))
}

/// Starts copying the output of [`logprobs`](crate::logprobs) to the host.
pub fn start_reading_logprobs(tensor: &Tensor<2, Int>) -> LogprobsRead {
    LogprobsRead(reading(tensor))
}

fn reading(tensor: &Tensor<2, Int>) -> Reading {
    #[cfg(feature = "cubecl-runtime")]
    if has_kernels(&tensor.device())
        && let Ok(tensor) = tensor.clone().try_into_primitive::<burn::backend::Cube>()
    {
        return Reading::Cube(crate::ops::cube::start_reading(tensor));
    }
    let words = tensor
        .clone()
        .try_into_data()
        .map_err(|error| unread(&error))
        .and_then(|data| {
            let words = data.convert::<i32>().try_into_vec::<i32>();
            words.map_err(|error| unread(&error))
        });
    Reading::Done(words)
}

/// Copies the rows of a step to the host.
///
/// # Errors
/// Returns an error in the same cases as [`RowsRead::wait`].
pub fn read_rows(tensor: &Tensor<2, Int>) -> Result<Vec<SequenceState>, DecodeError> {
    start_reading(tensor).wait()
}

impl Reading {
    /// Waits for the copy and returns the words.
    fn wait(self) -> Result<Vec<i32>, DecodeError> {
        match self {
            #[cfg(feature = "cubecl-runtime")]
            Self::Cube(read) => read.wait().map_err(|error| unread(&error)),
            Self::Done(words) => words,
        }
    }
}

impl RowsRead {
    /// Waits for the copy and returns the rows.
    ///
    /// # Errors
    /// Returns an error if the device failed. Kernels run asynchronously, so their faults are
    /// reported here.
    pub fn wait(self) -> Result<Vec<SequenceState>, DecodeError> {
        Ok(self
            .0
            .wait()?
            .as_chunks::<{ SequenceState::WORDS }>()
            .0
            .iter()
            .copied()
            .map(SequenceState::from_words)
            .collect())
    }
}

impl LogprobsRead {
    /// Waits for the copy. Returns the log probabilities of each of `rows`; `None` for rows that
    /// did not ask for them.
    ///
    /// # Errors
    /// Returns an error if the device failed.
    pub fn wait(self, rows: &[SequenceState]) -> Result<Vec<Option<TokenLogprobs>>, DecodeError> {
        let words = self.0.wait()?;
        let records = words.as_chunks::<LOGPROB_WORDS>().0.iter();
        let logprobs = rows.iter().zip(records).map(|(row, record)| {
            let float = |word: i32| f32::from_bits(word.cast_unsigned());
            let (pairs, _) = record[1..].as_chunks();
            let pairs = pairs.iter().take(row.logprobs? as usize);
            Some(TokenLogprobs {
                logprob: float(record[0]),
                top: pairs
                    .map(|&[token, logprob]| (token.cast_unsigned(), float(logprob)))
                    .collect(),
            })
        });
        Ok(logprobs.collect())
    }
}

fn unread(error: &dyn std::fmt::Debug) -> DecodeError {
    DecodeError::Step {
        reason: format!("{error:?}"),
    }
}
