//! Perplexity of texts.

use std::fmt::Display;

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData, activation};
use marlin_decode::{self as decode, Row, RowState};

use crate::folder::Llama;
use crate::tokens::token_tensor;
use crate::{KvCache, LlamaError, LlamaModel};

/// The perplexity of a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Perplexity {
    /// e to the power of `nll`.
    pub perplexity: f64,
    /// The mean negative log-likelihood of the predicted tokens, in nats.
    pub nll: f64,
    /// Tokens that were predicted.
    pub tokens: usize,
}

/// The progress of a perplexity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PerplexityProgress {
    /// Windows that are done.
    pub windows: usize,
    /// All windows.
    pub total: usize,
    /// The perplexity of the windows that are done.
    pub so_far: f64,
}

/// Elements of the largest tensor that windows are batched up to: 256 MiB in f32.
pub(crate) const BATCH_ELEMENTS: usize = 1 << 26;

impl Llama {
    /// The perplexity of a text: see [`perplexity`].
    ///
    /// # Errors
    /// As [`perplexity`]; [`LlamaError::NoTokenizer`].
    pub fn perplexity(&self, text: &str, window: usize, on_progress: impl FnMut(PerplexityProgress)) -> Result<Perplexity, LlamaError> {
        perplexity(&self.model, &self.tokenizer()?.encode(text)?, window, on_progress)
    }
}

/// The perplexity of tokens, in windows of `window` tokens that do not overlap.
///
/// Every token but a window's first is predicted once, from those before it in its window. The last window may be shorter; where it would be
/// a single token, that is left out. Log-likelihoods are computed in f32 and summed in f64.
///
/// # Errors
/// [`LlamaError::Window`], [`LlamaError::TextTooShort`], [`LlamaError::Token`] for tokens outside the vocabulary;
/// [`LlamaError::LogLikelihood`] if the model's output is not a number; [`LlamaError::Read`] where the device fails.
pub fn perplexity(
    model: &LlamaModel,
    tokens: &[u32],
    window: usize,
    mut on_progress: impl FnMut(PerplexityProgress),
) -> Result<Perplexity, LlamaError> {
    check_text(model, tokens, window)?;
    let vocab_size = model.config().vocab_size;
    // Whole windows in batches, then what is left over.
    let is_flash = decode::has_flash_attention(&model.device(), model.dtype(), model.config().head_dim);
    let batch = match is_flash {
        true => pass_rows(vocab_size) / window,
        false => BATCH_ELEMENTS / window / vocab_size.max(model.config().num_attention_heads * window),
    }
    .max(1);
    let (whole, rest) = tokens.split_at(tokens.len() / window * window);
    let batches = whole.chunks(batch * window).map(|tokens| (tokens, window)).chain((rest.len() > 1).then_some((rest, rest.len())));
    let total = whole.len() / window + usize::from(rest.len() > 1);
    let (mut sum, mut predicted, mut windows, mut position) = (0.0, 0, 0, 0);
    for (tokens, seq) in batches {
        let likelihoods = if is_flash { row_likelihoods(model, tokens, seq) } else { log_likelihoods(model, tokens, seq) }?;
        if let Some((index, &value)) = likelihoods.iter().enumerate().find(|(_, value)| !value.is_finite()) {
            let position = position + index / (seq - 1) * seq + index % (seq - 1) + 1;
            return Err(LlamaError::LogLikelihood { position, value, dtype: model.dtype() });
        }
        sum -= likelihoods.iter().map(|&value| f64::from(value)).sum::<f64>();
        predicted += likelihoods.len();
        windows += tokens.len() / seq;
        position += tokens.len();
        on_progress(PerplexityProgress { windows, total, so_far: (sum / predicted as f64).exp() });
    }
    let nll = sum / predicted as f64;
    Ok(Perplexity { perplexity: nll.exp(), nll, tokens: predicted })
}

/// Checks that a model can be asked for the likelihoods of tokens in windows.
pub(crate) fn check_text(model: &LlamaModel, tokens: &[u32], window: usize) -> Result<(), LlamaError> {
    let (max_len, vocab_size) = (model.max_len(), model.config().vocab_size);
    if window < 2 || window > max_len {
        return Err(LlamaError::Window { window, max_len });
    }
    if tokens.len() < 2 {
        return Err(LlamaError::TextTooShort { tokens: tokens.len() });
    }
    if let Some((position, &token)) = tokens.iter().enumerate().find(|&(_, &token)| token as usize >= vocab_size) {
        return Err(LlamaError::Token { token, position, vocab_size });
    }
    Ok(())
}

/// Most rows of a pass over rows: enough for the speed of a long prompt, few enough that their logits fit.
fn pass_rows(vocab_size: usize) -> usize {
    (BATCH_ELEMENTS / vocab_size).clamp(128, 4096)
}

/// As [`log_likelihoods`], with all tokens of a pass as rows, as those of prompts in a decoder.
fn row_likelihoods(model: &LlamaModel, tokens: &[u32], seq: usize) -> Result<Vec<f32>, LlamaError> {
    let (slots, device) = (tokens.len() / seq, model.device());
    let mut cache = KvCache::new(model.config(), slots, seq, model.dtype(), &device);
    let mut likelihoods = Vec::with_capacity(tokens.len());
    let size = pass_rows(model.config().vocab_size);
    for (pass, part) in tokens.chunks(size).enumerate() {
        let first = pass * size;
        let (mut rows, mut next) = (Vec::with_capacity(part.len()), Vec::with_capacity(part.len()));
        for (index, &token) in (first..).zip(part) {
            let (slot, position) = (index / seq, index % seq);
            rows.push(Row::of_prompt(token, position as u32, slot as u32));
            // The last token of a window predicts none.
            next.push(if position + 1 < seq { tokens[index + 1] as i32 } else { -1 });
        }
        let next = Tensor::<1, Int>::from_data(TensorData::new(next, [part.len()]), (&device, DType::I32));
        let found = decode::log_likelihoods(model.row_logits(&rows, slots, &mut cache), next);
        let found = found.try_into_vec_as::<f32>().map_err(unread)?;
        likelihoods.extend(rows.iter().zip(found).filter(|(row, _)| row.state != RowState::At(seq as u32 - 1)).map(|(_, found)| found));
    }
    Ok(likelihoods)
}

pub(crate) fn unread(error: impl Display) -> LlamaError {
    LlamaError::Read { tensor: "log-likelihoods".into(), reason: error.to_string() }
}

/// The log-likelihoods of all tokens but each window's first, [windows * (seq - 1)].
fn log_likelihoods(model: &LlamaModel, tokens: &[u32], seq: usize) -> Result<Vec<f32>, LlamaError> {
    let (batch, vocab) = (tokens.len() / seq, model.config().vocab_size);
    let tokens = token_tensor(tokens, [batch, seq], &model.device());
    let logits = model.forward_full(tokens.clone()).slice([0..batch, 0..seq - 1, 0..vocab]);
    let targets = tokens.slice([0..batch, 1..seq]).reshape([batch, seq - 1, 1]);
    let likelihoods: Tensor<3> = activation::log_softmax(logits.cast(FloatDType::F32), 2).gather(2, targets);
    likelihoods.try_into_vec_as::<f32>().map_err(unread)
}
