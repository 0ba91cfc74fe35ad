//! The operations of a decode step in terms of Burn's operations, for every backend. Operations
//! that depend on the values of the rows copy the rows to the host.

use crate::attention_parts::AttentionParts;
use crate::cache::{CacheShape, LayerCache, read_cache, write_cache};
use crate::kernels::sample::{LOGPROB_WORDS, SlotTokens, logprobs_host, sample_host};
use crate::kernels::{SequenceState, SequenceStatus};
use crate::rows::{read_rows, write_rows, write_words};
use burn::tensor::{DType, Element, FloatDType, Int, Tensor, TensorData, activation};
use burn_marlin::experts;
use marlin_kernels::Epilogue;

pub(crate) fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, epsilon: f64) -> Tensor<D> {
    let dtype = FloatDType::from(x.dtype());
    let x = x.cast(FloatDType::F32);
    let rms = (x.clone().square().mean_dim(D - 1) + epsilon).sqrt();
    (x / rms).cast(dtype) * weight.unsqueeze()
}

pub(crate) fn gated<const D: usize>(epilogue: Epilogue, gate_up: Tensor<D>) -> Tensor<D> {
    let features = gate_up.dims()[D - 1] / 2;
    let gate = gate_up.clone().slice_dim(D - 1, 0..features);
    let up = gate_up.slice_dim(D - 1, features..2 * features);
    experts::gated(epilogue, gate, up)
}

pub(crate) fn embed(table: Tensor<2>, rows: &Tensor<2, Int>) -> Tensor<2> {
    let vocab = table.dims()[0];
    let known = |row: SequenceState| {
        matches!(row.status, SequenceStatus::At(_)) && (row.token as usize) < vocab
    };
    let rows = host_rows(rows);
    let tokens: Vec<i32> = rows
        .iter()
        .map(|&row| if known(row) { row.token as i32 } else { 0 })
        .collect();
    let kept: Vec<f32> = rows
        .iter()
        .map(|&row| f32::from(u8::from(known(row))))
        .collect();
    let (device, dtype) = (table.device(), table.dtype());
    let count = rows.len();
    let kept = Tensor::<2>::from_data(TensorData::new(kept, [count, 1]), (&device, dtype));
    table.select(
        0,
        Tensor::from_data(TensorData::new(tokens, [count]), (&device, DType::I32)),
    ) * kept
}

pub(crate) fn attention(
    qkv: Tensor<2>,
    rows: &Tensor<2, Int>,
    cache: LayerCache<'_>,
    parts: &AttentionParts,
) -> Tensor<2> {
    let CacheShape {
        slots,
        kv_heads,
        max_len,
        head_dim,
        ..
    } = cache.shape();
    let heads = parts.heads;
    let LayerCache {
        keys,
        values,
        pages,
        ..
    } = cache;
    let dtype = FloatDType::from(qkv.dtype());
    let outputs = host_rows(rows).into_iter().enumerate().map(|(index, row)| {
        let (slot, position) = match row.status {
            SequenceStatus::At(position)
                if (position as usize) < max_len && (row.slot as usize) < slots =>
            {
                (row.slot as usize, position as usize)
            }
            _ => return Tensor::zeros([1, heads * head_dim], (&qkv.device(), qkv.dtype())),
        };
        // [1, heads, 1, head_dim]
        let mut end = 0;
        let mut take = |count: usize| {
            let start = end;
            end += count * head_dim;
            qkv.clone()
                .slice([index..index + 1, start..end])
                .reshape([1, count, 1, head_dim])
        };
        let (queries, new_keys, new_values) = (take(heads), take(kv_heads), take(kv_heads));
        let normalise_and_rotate = |x: Tensor<4>, norm: usize| {
            let x = match &parts.norms {
                Some((weights, epsilon)) => rms_norm(x, weights[norm].clone(), *epsilon),
                None => x,
            };
            rotate_at(x, &parts.rope, position)
        };
        write_cache(
            keys,
            pages,
            normalise_and_rotate(new_keys, 1).cast(dtype),
            slot,
            position,
        );
        write_cache(values, pages, new_values, slot, position);

        let first = parts
            .window
            .map_or(0, |window| (position + 1).saturating_sub(window));
        // [kv_heads, positions, head_dim]
        let of_slot = |cache: &Tensor<4>| {
            read_cache(cache, pages, slot..slot + 1, first..position + 1)
                .reshape([kv_heads, position + 1 - first, head_dim])
                .cast(FloatDType::F32)
        };
        let queries =
            normalise_and_rotate(queries, 0).reshape([kv_heads, heads / kv_heads, head_dim])
                / (head_dim as f64).sqrt();
        let scores = queries.matmul(of_slot(keys).swap_dims(1, 2));
        let weights = softmax_with_sinks(scores, parts.sinks.clone());
        weights
            .matmul(of_slot(values))
            .reshape([1, heads * head_dim])
            .cast(dtype)
    });
    Tensor::cat(outputs.collect(), 0)
}

/// Returns the softmax of scores [kv_heads, heads of a key head, positions] over their positions,
/// to which each head's score of `sinks` `[heads]` belongs without a position.
pub fn softmax_with_sinks(scores: Tensor<3>, sinks: Option<Tensor<1>>) -> Tensor<3> {
    let [kv_heads, group, positions] = scores.dims();
    let Some(sinks) = sinks else {
        return activation::softmax(scores, 2);
    };
    let sinks = sinks
        .cast(FloatDType::from(scores.dtype()))
        .reshape([kv_heads, group, 1]);
    activation::softmax(Tensor::cat(vec![scores, sinks], 2), 2).slice_dim(2, 0..positions)
}

/// Computes [`log_likelihoods`](crate::log_likelihoods) with Burn's operations.
pub(crate) fn log_likelihoods(
    logits: Tensor<2>,
    tokens: Tensor<1, Int>,
    vocab: usize,
) -> Tensor<1> {
    let rows = logits.dims()[0];
    let likelihoods = activation::log_softmax(logits.cast(FloatDType::F32), 1);
    let (none, outside) = (
        tokens.clone().lower_elem(0),
        tokens.clone().greater_equal_elem(vocab as i64),
    );
    let chosen = likelihoods
        .gather(1, tokens.clamp(0, vocab as i64 - 1).reshape([rows, 1]))
        .reshape([rows]);
    chosen.mask_fill(none, 0.0).mask_fill(outside, f32::NAN)
}

/// Applies rotary position embedding (arXiv 2104.09864) to `x` [batch, heads, seq, head_dim], in
/// the dtype of `x`. Features `i` and `i + half` of a head are rotated as a pair, by the angle
/// whose cosine and sine are at `i` of `cos` and `sin` [1, 1, seq, half]. Features from `2 * half`
/// on are not changed.
pub fn rotate(x: Tensor<4>, cos: &Tensor<4>, sin: &Tensor<4>) -> Tensor<4> {
    let (half, head_dim) = (cos.dims()[3], x.dims()[3]);
    let first = x.clone().slice_dim(3, 0..half);
    let second = x.clone().slice_dim(3, half..2 * half);
    let rotated_first = first.clone() * cos.clone() - second.clone() * sin.clone();
    let rotated_second = second * cos.clone() + first * sin.clone();
    let mut parts = vec![rotated_first, rotated_second];
    if 2 * half < head_dim {
        parts.push(x.slice_dim(3, 2 * half..head_dim));
    }
    Tensor::cat(parts, 3)
}

/// Rotates heads by the angles of a position, in f32.
fn rotate_at(x: Tensor<4>, tables: &[Tensor<2>; 2], position: usize) -> Tensor<4> {
    let [cos, sin] = tables.each_ref().map(|table| {
        table
            .clone()
            .slice_dim(0, position..position + 1)
            .unsqueeze::<4>()
    });
    rotate(x.cast(FloatDType::F32), &cos, &sin)
}

pub(crate) fn sample(
    logits: Tensor<2>,
    rows: &mut Tensor<2, Int>,
    token_table: &mut Tensor<2, Int>,
    max_len: usize,
) {
    let vocab = logits.dims()[1];
    let logits: Vec<f32> = host(logits.into_data().convert::<f32>());
    let words = token_table.dims()[1];
    let mut table: Vec<i32> = host(token_table.clone().into_data().convert::<i32>());
    let mut sampled = host_rows(rows);
    for (row, logits) in sampled.iter_mut().zip(logits.chunks(vocab)) {
        let table = bytemuck::cast_slice_mut(&mut table);
        if let Some(mut tokens) = SlotTokens::of_slot(table, words, row.slot as usize) {
            sample_host(logits, row, &mut tokens, max_len as u32);
        }
    }
    write_words(token_table, 0, table);
    write_rows(rows, 0, &sampled);
}

pub(crate) fn logprobs(logits: Tensor<2>, rows: &Tensor<2, Int>, out: &mut Tensor<2, Int>) {
    let vocab = logits.dims()[1];
    let logits: Vec<f32> = host(logits.into_data().convert::<f32>());
    let rows = host_rows(rows);
    let mut words = vec![0; rows.len() * LOGPROB_WORDS];
    let of_rows = words.chunks_mut(LOGPROB_WORDS).zip(logits.chunks(vocab));
    for (row, (words, logits)) in rows.iter().zip(of_rows) {
        if let Some(count) = row.logprobs {
            let found = logprobs_host(logits, row.token, count as usize);
            words.copy_from_slice(&found.map(u32::cast_signed));
        }
    }
    write_words(out, 0, words);
}

fn host<E: Element>(data: TensorData) -> Vec<E> {
    data.try_into_vec::<E>()
        .unwrap_or_else(|error| panic!("{error:?}"))
}

/// Reads a step's rows to the host.
///
/// # Panics
/// Panics if the device fails, as all of Burn's operations do.
fn host_rows(rows: &Tensor<2, Int>) -> Vec<SequenceState> {
    read_rows(rows).unwrap_or_else(|error| panic!("{error}"))
}
