//! The tokens of the corpus, and windows over them.

use std::fs;
use std::ops::Range;
use std::path::Path;

use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::error::Error;

/// Reads a file of 16-bit little-endian tokens. Checks that each token is below `vocab_size`, and
/// that the file has at least `least` tokens.
pub fn read(path: &Path, vocab_size: usize, least: usize) -> Result<Vec<i32>, Error> {
    let bytes = fs::read(path).map_err(Error::io(path))?;
    let corpus = |problem: String| Error::Corpus {
        path: path.to_owned(),
        problem,
    };
    let (pairs, rest) = bytes.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(corpus(format!(
            "{} bytes are not a whole number of 16-bit tokens",
            bytes.len()
        )));
    }
    if pairs.len() < least {
        return Err(corpus(format!(
            "{} tokens, but a window needs {least}",
            pairs.len()
        )));
    }
    let tokens: Vec<i32> = pairs
        .iter()
        .map(|pair| i32::from(u16::from_le_bytes(*pair)))
        .collect();
    match tokens
        .iter()
        .position(|token| *token as usize >= vocab_size)
    {
        Some(at) => Err(corpus(format!(
            "token {} at {at} is outside a vocabulary of {vocab_size}",
            tokens[at]
        ))),
        None => Ok(tokens),
    }
}

/// Random windows over tokens on the device. A step copies only the positions of its windows to the
/// device.
#[derive(Debug)]
pub struct Windows {
    tokens: Tensor<1, Int>,
    /// The possible positions of the first token of a window.
    starts: Range<i32>,
    /// The positions inside a window, [1, seq + 1].
    within: Tensor<2, Int>,
    rng: StdRng,
}

impl Windows {
    /// Creates windows of `seq` inputs over `tokens`, which must be more than `seq` tokens.
    pub fn new(tokens: Vec<i32>, seq: usize, rng: StdRng, device: &Device) -> Self {
        let starts = 0..(tokens.len() - seq) as i32;
        let within = Tensor::arange(0..seq as i64 + 1, device).unsqueeze_dim(0);
        let count = tokens.len();
        Self {
            tokens: Tensor::from_data(TensorData::new(tokens, [count]), device),
            starts,
            within,
            rng,
        }
    }

    /// Returns a batch of inputs, and of targets one position later: [batch, seq] each.
    pub fn batch(&mut self, batch: usize) -> (Tensor<2, Int>, Tensor<2, Int>) {
        let starts: Vec<i32> = (0..batch)
            .map(|_| self.rng.random_range(self.starts.clone()))
            .collect();
        let starts =
            Tensor::<2, Int>::from_data(TensorData::new(starts, [batch, 1]), &self.tokens.device());
        let positions = starts + self.within.clone();
        let [batch, width] = positions.dims();
        let tokens = self
            .tokens
            .clone()
            .select(0, positions.reshape([batch * width]))
            .reshape([batch, width]);
        split(tokens)
    }
}

/// Returns the inputs and targets of windows [batch, width]: [batch, width - 1] each.
pub fn split(windows: Tensor<2, Int>) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let [batch, width] = windows.dims();
    (
        windows.clone().slice([0..batch, 0..width - 1]),
        windows.slice([0..batch, 1..width]),
    )
}

/// Returns batches [batch, width] of windows of `seq` tokens that do not overlap, and a last batch
/// of one shorter window with the remaining tokens.
pub fn in_order(tokens: &[i32], seq: usize, batch: usize, device: &Device) -> Vec<Tensor<2, Int>> {
    let mut batches = Vec::new();
    let whole = tokens.len() / seq * seq;
    for part in tokens[..whole]
        .chunks(seq * batch)
        .chain(Some(&tokens[whole..]))
    {
        let width = part.len().min(seq);
        // A window of a single token has no target.
        if width > 1 {
            batches.push(Tensor::from_data(
                TensorData::new(part.to_vec(), [part.len() / width, width]),
                device,
            ));
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn values<const D: usize>(tensor: Tensor<D, Int>) -> Vec<i64> {
        tensor.into_data().iter::<i64>().collect()
    }

    #[test]
    fn batches_are_windows_and_targets_follow_inputs() {
        let device = Device::flex();
        let tokens: Vec<i32> = (100..120).collect();
        let mut windows = Windows::new(tokens, 4, StdRng::seed_from_u64(1), &device);
        let mut starts = std::collections::BTreeSet::new();
        for _ in 0..100 {
            let (inputs, targets) = windows.batch(3);
            assert_eq!((inputs.dims(), targets.dims()), ([3, 4], [3, 4]));
            let (inputs, targets) = (values(inputs), values(targets));
            for (row, start) in inputs.chunks(4).zip(inputs.iter().step_by(4)) {
                assert_eq!(row, (*start..*start + 4).collect::<Vec<_>>());
                starts.insert(*start);
            }
            assert_eq!(
                targets,
                inputs.iter().map(|token| token + 1).collect::<Vec<_>>()
            );
        }
        assert_eq!(
            starts,
            (100..116).collect(),
            "every window, the first and the last included"
        );
    }

    #[test]
    fn in_order_covers_every_token_once() {
        let device = Device::flex();
        let tokens: Vec<i32> = (0..29).collect();
        let batches = in_order(&tokens, 5, 3, &device);
        assert_eq!(
            batches.iter().map(Tensor::dims).collect::<Vec<_>>(),
            [[3, 5], [2, 5], [1, 4]]
        );
        assert_eq!(
            batches.into_iter().flat_map(values).collect::<Vec<_>>(),
            (0..29).collect::<Vec<_>>()
        );
        assert_eq!(
            in_order(&tokens[..26], 5, 9, &device).len(),
            1,
            "a single left-over token predicts nothing"
        );
        assert_eq!(in_order(&tokens[..3], 5, 9, &device)[0].dims(), [1, 3]);
    }

    #[test]
    fn bad_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens.bin");
        assert!(matches!(read(&path, 10, 1), Err(Error::Io { .. })));
        let refused = |bytes: &[u8], least: usize| {
            fs::write(&path, bytes).unwrap();
            read(&path, 10, least).unwrap_err().to_string()
        };
        assert!(refused(&[1, 0, 2], 1).contains("3 bytes"));
        assert!(refused(&[1, 0, 2, 0], 3).contains("2 tokens, but a window needs 3"));
        assert!(refused(&[1, 0, 10, 0], 1).contains("token 10 at 1"));
        fs::write(&path, [1, 0, 9, 0]).unwrap();
        assert_eq!(read(&path, 10, 2).unwrap(), [1, 9]);
    }
}
