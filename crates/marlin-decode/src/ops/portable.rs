//! The parts of a decode step in Burn's own operations, for every backend. Rows are read to the host where an operation needs their numbers.

use crate::functions::{AttentionParts, LayerCache, read_rows, rotate, write_cache as write, write_rows, write_words as write_state};
use crate::kernels::sample::sample_host;
use crate::kernels::{Row, RowState};
use burn::tensor::{DType, Element, FloatDType, Int, Tensor, TensorData, activation};

pub(crate) fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, epsilon: f64) -> Tensor<D> {
    let dtype = FloatDType::from(x.dtype());
    let x = x.cast(FloatDType::F32);
    let rms = (x.clone().square().mean_dim(D - 1) + epsilon).sqrt();
    (x / rms).cast(dtype) * weight.unsqueeze()
}

pub(crate) fn silu_mul<const D: usize>(gate_up: Tensor<D>) -> Tensor<D> {
    let features = gate_up.dims()[D - 1] / 2;
    let gate = gate_up.clone().slice_dim(D - 1, 0..features);
    activation::silu(gate) * gate_up.slice_dim(D - 1, features..2 * features)
}

pub(crate) fn embed(table: Tensor<2>, rows: &Tensor<2, Int>) -> Tensor<2> {
    let vocab = table.dims()[0];
    let known = |row: Row| matches!(row.state, RowState::At(_)) && (row.token as usize) < vocab;
    let rows = host_rows(rows);
    let tokens: Vec<i32> = rows.iter().map(|&row| if known(row) { row.token as i32 } else { 0 }).collect();
    let kept: Vec<f32> = rows.iter().map(|&row| f32::from(u8::from(known(row)))).collect();
    let (device, dtype) = (table.device(), table.dtype());
    let count = rows.len();
    let kept = Tensor::<2>::from_data(TensorData::new(kept, [count, 1]), (&device, dtype));
    table.select(0, Tensor::from_data(TensorData::new(tokens, [count]), (&device, DType::I32))) * kept
}

pub(crate) fn write_cache(cache: Tensor<4>, new: Tensor<4>, slot: usize, start: usize) -> Tensor<4> {
    let [_, heads, seq, head_dim] = new.dims();
    cache.slice_assign([slot..slot + 1, 0..heads, start..start + seq, 0..head_dim], new)
}

pub(crate) fn write_words(tensor: Tensor<2, Int>, first: usize, words: Vec<i32>) -> Tensor<2, Int> {
    let (shape, device, count) = (tensor.dims(), tensor.device(), words.len());
    let new = Tensor::from_data(TensorData::new(words, [count]), (&device, DType::I32));
    tensor.reshape([shape[0] * shape[1]]).slice_assign(first..first + count, new).reshape(shape)
}

pub(crate) fn attention(qkv: Tensor<2>, rows: &Tensor<2, Int>, cache: LayerCache<'_>, parts: &AttentionParts) -> Tensor<2> {
    let [slots, kv_heads, max_len, head_dim] = cache.keys.dims();
    let heads = parts.heads;
    let LayerCache { keys, values } = cache;
    let dtype = FloatDType::from(qkv.dtype());
    let outputs = host_rows(rows).into_iter().enumerate().map(|(index, row)| {
        let (slot, position) = match row.state {
            RowState::At(position) if (position as usize) < max_len && (row.slot as usize) < slots => {
                (row.slot as usize, position as usize)
            }
            _ => return Tensor::zeros([1, heads * head_dim], (&qkv.device(), qkv.dtype())),
        };
        // [1, heads, 1, head_dim]
        let mut end = 0;
        let mut take = |count: usize| {
            let start = end;
            end += count * head_dim;
            qkv.clone().slice([index..index + 1, start..end]).reshape([1, count, 1, head_dim])
        };
        let (queries, new_keys, new_values) = (take(heads), take(kv_heads), take(kv_heads));
        let turn = |x: Tensor<4>, norm: usize| {
            let x = match &parts.norms {
                Some((weights, epsilon)) => rms_norm(x, weights[norm].clone(), *epsilon),
                None => x,
            };
            rotate_at(x, &parts.rope, position)
        };
        write(keys, turn(new_keys, 1).cast(dtype), slot, position);
        write(values, new_values, slot, position);

        let first = parts.window.map_or(0, |window| (position + 1).saturating_sub(window));
        // [kv_heads, positions, head_dim]
        let of_slot = |cache: &Tensor<4>| {
            let part = cache.clone().slice([slot..slot + 1, 0..kv_heads, first..position + 1, 0..head_dim]);
            part.reshape([kv_heads, position + 1 - first, head_dim]).cast(FloatDType::F32)
        };
        let queries = turn(queries, 0).reshape([kv_heads, heads / kv_heads, head_dim]) / (head_dim as f64).sqrt();
        let weights = activation::softmax(queries.matmul(of_slot(keys).swap_dims(1, 2)), 2);
        weights.matmul(of_slot(values)).reshape([1, heads * head_dim]).cast(dtype)
    });
    Tensor::cat(outputs.collect(), 0)
}

/// Turns heads by a position, in f32.
fn rotate_at(x: Tensor<4>, tables: &[Tensor<2>; 2], position: usize) -> Tensor<4> {
    let [cos, sin] = tables.each_ref().map(|table| table.clone().slice_dim(0, position..position + 1).unsqueeze::<4>());
    rotate(x.cast(FloatDType::F32), &cos, &sin)
}

pub(crate) fn sample(logits: Tensor<2>, rows: &mut Tensor<2, Int>, seen: &mut Tensor<2, Int>, max_len: usize) {
    let vocab = logits.dims()[1];
    let logits: Vec<f32> = host(logits.into_data().convert::<f32>());
    let words = seen.dims()[1];
    let mut bitmaps: Vec<i32> = host(seen.clone().into_data().convert::<i32>());
    let mut sampled = host_rows(rows);
    for (row, logits) in sampled.iter_mut().zip(logits.chunks(vocab)) {
        let Some(bitmap) = bitmaps.chunks_mut(words).nth(row.slot as usize) else { continue };
        let mut of_slot: Vec<u32> = bitmap.iter().map(|&word| word as u32).collect();
        sample_host(logits, row, &mut of_slot, max_len as u32);
        bitmap.iter_mut().zip(of_slot).for_each(|(word, new)| *word = new as i32);
    }
    write_state(seen, 0, bitmaps);
    write_rows(rows, 0, &sampled);
}

fn host<E: Element>(data: TensorData) -> Vec<E> {
    data.try_into_vec::<E>().unwrap_or_else(|error| panic!("{error:?}"))
}

/// A step's rows on the host.
///
/// # Panics
/// Where the device fails, as all of Burn's operations do.
fn host_rows(rows: &Tensor<2, Int>) -> Vec<Row> {
    read_rows(rows).unwrap_or_else(|error| panic!("{error}"))
}
