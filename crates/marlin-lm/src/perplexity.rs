//! The perplexity of texts.

use std::fmt::Display;

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData, activation};
use marlin_nn::{self as decode, SequenceState, SequenceStatus};

use crate::folder::LanguageModel;
use crate::tokens::token_tensor;
use crate::{Model, ModelError};

/// The perplexity of a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Perplexity {
    /// e to the power of `nll`.
    pub perplexity: f64,
    /// The mean negative log-likelihood of the predicted tokens, in nats.
    pub nll: f64,
    /// The number of predicted tokens.
    pub tokens: usize,
}

/// The progress of a perplexity computation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PerplexityProgress {
    /// The number of completed windows.
    pub windows: usize,
    /// The number of all windows.
    pub total: usize,
    /// The perplexity of the completed windows.
    pub so_far: f64,
}

/// The limit on the number of elements of the largest tensor in a batch of windows: 256 MiB in f32.
const BATCH_ELEMENTS: usize = 1 << 26;

impl LanguageModel {
    /// Computes the perplexity of a text; see [`perplexity`].
    ///
    /// # Errors
    /// See [`perplexity`]; also [`ModelError::NoTokenizer`].
    pub fn perplexity(
        &self,
        text: &str,
        window: usize,
        on_progress: impl FnMut(PerplexityProgress),
    ) -> Result<Perplexity, ModelError> {
        perplexity(
            &self.model,
            &self.tokenizer()?.encode(text)?,
            window,
            on_progress,
        )
    }
}

/// Computes the perplexity of tokens, in windows of `window` tokens that do not overlap.
///
/// Every token except a window's first is predicted once, from the tokens before it in its window.
/// The last window may be shorter; a last window of a single token is omitted. Log-likelihoods are
/// computed in f32 and summed in f64.
///
/// # Errors
/// [`ModelError::Window`], [`ModelError::TextTooShort`], [`ModelError::Token`] for tokens outside
/// the vocabulary; [`ModelError::LogLikelihood`] if the model's output is not a number;
/// [`ModelError::Read`] if the device fails.
pub fn perplexity(
    model: &Model,
    tokens: &[u32],
    window: usize,
    mut on_progress: impl FnMut(PerplexityProgress),
) -> Result<Perplexity, ModelError> {
    check_text(model, tokens, window)?;
    let vocab_size = model.config().vocab_size;
    let is_flash =
        decode::has_flash_attention(&model.device(), model.dtype(), model.config().head_dim);
    let batch = if is_flash {
        (pass_rows(vocab_size) / window).max(1)
    } else {
        dense_batch(model, window)
    };
    let total = tokens.len() / window + usize::from(tokens.len() % window > 1);
    let (mut sum, mut predicted, mut windows) = (0.0, 0, 0);
    for batch in batches(tokens, window, batch) {
        let likelihoods = if is_flash {
            row_likelihoods(model, &batch)
        } else {
            log_likelihoods(model, &batch)
        }?;
        model.check_ranks()?;
        check_likelihoods(model, &batch, &likelihoods)?;
        sum -= likelihoods
            .iter()
            .map(|&value| f64::from(value))
            .sum::<f64>();
        predicted += likelihoods.len();
        windows += batch.windows();
        on_progress(PerplexityProgress {
            windows,
            total,
            so_far: (sum / predicted as f64).exp(),
        });
    }
    let nll = sum / predicted as f64;
    Ok(Perplexity {
        perplexity: nll.exp(),
        nll,
        tokens: predicted,
    })
}

/// A batch of windows of one length, for one call of a model.
pub(crate) struct WindowBatch<'a> {
    /// The tokens of all windows.
    pub tokens: &'a [u32],
    /// The number of tokens in a window.
    pub seq: usize,
    /// The position in the text of the batch's first token.
    start: usize,
}

impl WindowBatch<'_> {
    pub fn windows(&self) -> usize {
        self.tokens.len() / self.seq
    }
}

/// Splits a text into batches of `batch` windows, and a last shorter window if the rest has more
/// than one token.
pub(crate) fn batches(
    tokens: &[u32],
    window: usize,
    batch: usize,
) -> impl Iterator<Item = WindowBatch<'_>> {
    let (whole, rest) = tokens.split_at(tokens.len() / window * window);
    let rest = (rest.len() > 1).then_some(WindowBatch {
        tokens: rest,
        seq: rest.len(),
        start: whole.len(),
    });
    let size = batch * window;
    whole
        .chunks(size)
        .enumerate()
        .map(move |(index, tokens)| WindowBatch {
            tokens,
            seq: window,
            start: index * size,
        })
        .chain(rest)
}

/// Returns the number of windows in one forward pass without a cache.
pub(crate) fn dense_batch(model: &Model, window: usize) -> usize {
    let widest = model
        .config()
        .vocab_size
        .max(model.config().num_attention_heads * window);
    (BATCH_ELEMENTS / window / widest).max(1)
}

/// Checks that the log-likelihoods of a batch are numbers.
pub(crate) fn check_likelihoods(
    model: &Model,
    batch: &WindowBatch<'_>,
    likelihoods: &[f32],
) -> Result<(), ModelError> {
    let Some((index, &value)) = likelihoods
        .iter()
        .enumerate()
        .find(|(_, value)| !value.is_finite())
    else {
        return Ok(());
    };
    let predicted = batch.seq - 1;
    let position = batch.start + index / predicted * batch.seq + index % predicted + 1;
    Err(ModelError::LogLikelihood {
        position,
        value,
        dtype: model.dtype(),
    })
}

/// Checks that a model can compute the likelihoods of tokens in windows of this length.
pub(crate) fn check_text(model: &Model, tokens: &[u32], window: usize) -> Result<(), ModelError> {
    let (max_len, vocab_size) = (model.max_len(), model.config().vocab_size);
    if window < 2 || window > max_len {
        return Err(ModelError::Window { window, max_len });
    }
    if tokens.len() < 2 {
        return Err(ModelError::TextTooShort {
            tokens: tokens.len(),
        });
    }
    if let Some((position, &token)) = tokens
        .iter()
        .enumerate()
        .find(|&(_, &token)| token as usize >= vocab_size)
    {
        return Err(ModelError::Token {
            token,
            position,
            vocab_size,
        });
    }
    Ok(())
}

/// Returns the largest number of rows in a pass: enough rows for the speed of a long prompt, few
/// enough that their logits fit in memory.
fn pass_rows(vocab_size: usize) -> usize {
    (BATCH_ELEMENTS / vocab_size).clamp(128, 4096)
}

/// Computes the same values as [`log_likelihoods`], but passes tokens as rows, as an engine does
/// with prompts.
fn row_likelihoods(model: &Model, batch: &WindowBatch<'_>) -> Result<Vec<f32>, ModelError> {
    let &WindowBatch { tokens, seq, .. } = batch;
    let (slots, device) = (batch.windows(), model.device());
    let mut cache = model.cache_of(slots, seq);
    let mut likelihoods = Vec::with_capacity(tokens.len());
    let size = pass_rows(model.config().vocab_size);
    for (pass, part) in tokens.chunks(size).enumerate() {
        let first = pass * size;
        let (mut rows, mut next) = (
            Vec::with_capacity(part.len()),
            Vec::with_capacity(part.len()),
        );
        for (index, &token) in (first..).zip(part) {
            let (slot, position) = (index / seq, index % seq);
            rows.push(SequenceState::of_prompt(
                token,
                position as u32,
                slot as u32,
            ));
            // The last token of a window predicts no token.
            next.push(if position + 1 < seq {
                tokens[index + 1] as i32
            } else {
                -1
            });
        }
        let next =
            Tensor::<1, Int>::from_data(TensorData::new(next, [part.len()]), (&device, DType::I32));
        let found = decode::log_likelihoods(model.row_logits(&rows, slots, &mut cache), next);
        let found = found.try_into_vec_as::<f32>().map_err(unread)?;
        likelihoods.extend(
            rows.iter()
                .zip(found)
                .filter(|(row, _)| row.status != SequenceStatus::At(seq as u32 - 1))
                .map(|(_, found)| found),
        );
    }
    Ok(likelihoods)
}

pub(crate) fn unread(error: impl Display) -> ModelError {
    ModelError::Read {
        tensor: "log-likelihoods".into(),
        reason: error.to_string(),
    }
}

/// Computes the log-likelihoods of all tokens except each window's first, [windows * (seq - 1)].
fn log_likelihoods(model: &Model, batch: &WindowBatch<'_>) -> Result<Vec<f32>, ModelError> {
    let (_, likelihoods) = log_probabilities(model, batch);
    likelihoods.try_into_vec_as::<f32>().map_err(unread)
}

/// Computes log-probabilities in f32 after each position of a window except its last: for all
/// tokens of the vocabulary, [windows, seq - 1, vocab], and for the actual next tokens, [windows,
/// seq - 1, 1].
pub(crate) fn log_probabilities(model: &Model, batch: &WindowBatch<'_>) -> (Tensor<3>, Tensor<3>) {
    let (windows, seq, vocab) = (batch.windows(), batch.seq, model.config().vocab_size);
    let tokens = token_tensor(batch.tokens, [windows, seq], &model.device());
    let logits = model
        .forward_full(tokens.clone())
        .slice([0..windows, 0..seq - 1, 0..vocab]);
    let targets = tokens
        .slice([0..windows, 1..seq])
        .reshape([windows, seq - 1, 1]);
    let all = activation::log_softmax(logits.cast(FloatDType::F32), 2);
    (all.clone(), all.gather(2, targets))
}
