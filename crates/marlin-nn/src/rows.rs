//! The rows of a step as i32 tensors: allocation, writes from the host and reads to the host.

use crate::DecodeError;
use crate::device::{has_kernels, is_flex};
use crate::kernels::SequenceState;
use crate::ops::DecodeBackend;
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// Allocates an i32 tensor [rows, words] of zeros: the rows of a step, the token bitmaps of the
/// slots, or the arrival counters of attention.
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

enum Reading {
    /// The copy is in progress.
    #[cfg(feature = "cubecl-runtime")]
    Cube(crate::ops::cube::WordsRead),
    /// The copy is complete.
    Done(Result<Vec<i32>, DecodeError>),
}

/// Starts copying the rows of a step to the host.
pub fn start_reading(tensor: &Tensor<2, Int>) -> RowsRead {
    #[cfg(feature = "cubecl-runtime")]
    if has_kernels(&tensor.device())
        && let Ok(tensor) = tensor.clone().try_into_primitive::<burn::backend::Cube>()
    {
        return RowsRead(Reading::Cube(crate::ops::cube::start_reading(tensor)));
    }
    let words = tensor
        .clone()
        .try_into_data()
        .map_err(|error| unread(&error))
        .and_then(|data| {
            let words = data.convert::<i32>().try_into_vec::<i32>();
            words.map_err(|error| unread(&error))
        });
    RowsRead(Reading::Done(words))
}

/// Copies the rows of a step to the host.
///
/// # Errors
/// Returns an error in the same cases as [`RowsRead::wait`].
pub fn read_rows(tensor: &Tensor<2, Int>) -> Result<Vec<SequenceState>, DecodeError> {
    start_reading(tensor).wait()
}

impl RowsRead {
    /// Waits for the copy and returns the rows.
    ///
    /// # Errors
    /// Returns an error if the device failed. Kernels run asynchronously, so their faults are
    /// reported here.
    pub fn wait(self) -> Result<Vec<SequenceState>, DecodeError> {
        #[cfg_attr(
            not(feature = "cubecl-runtime"),
            allow(
                clippy::infallible_destructuring_match,
                reason = "with a runtime there are two cases"
            )
        )]
        let words = match self.0 {
            #[cfg(feature = "cubecl-runtime")]
            Reading::Cube(read) => read.wait().map_err(|error| unread(&error)),
            Reading::Done(words) => words,
        };
        Ok(words?
            .as_chunks::<{ SequenceState::WORDS }>()
            .0
            .iter()
            .copied()
            .map(SequenceState::from_words)
            .collect())
    }
}

fn unread(error: &dyn std::fmt::Debug) -> DecodeError {
    DecodeError::Step {
        reason: format!("{error:?}"),
    }
}
