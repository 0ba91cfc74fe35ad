//! The operations of a decode step on Burn's Flex backend, in Rust on the CPU.

use super::DecodeBackend;
use crate::cache::CacheShape;
use crate::host::{self, Attention};
use crate::kernels::attention::AttentionShape;
use crate::kernels::sample::{LOGPROB_WORDS, SlotTokens, logprobs_host, sample_host};
use crate::kernels::{SequenceState, SequenceStatus};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, Element, Shape, TensorData};
use burn_marlin::backend::flex::{from_f32, to_f32};
use burn_marlin::backend::{
    OptionalFloat, OptionalInt, QuantBackend, QuantTensors, activation_dtype,
};
use bytemuck::{Pod, cast_slice_mut};
use half::{bf16, f16};
use marlin_format::WeightDescriptor;
use marlin_kernels::matmul::host::{HostFloat, lm_head};
use marlin_kernels::{ActivationDtype, Epilogue, FloatProblem, Kernel, Target, plan};

/// Calls a generic function with the Rust type of an activation dtype.
macro_rules! with_type {
    ($dtype:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $dtype {
            DType::F16 => $function::<f16>($($argument),*),
            DType::BF16 => $function::<bf16>($($argument),*),
            _ => $function::<f32>($($argument),*),
        }
    };
}

/// A Rust type of an activation dtype.
trait Float: HostFloat + Element + Pod {}
impl<T: HostFloat + Element + Pod> Float for T {}

impl DecodeBackend for Flex {
    fn decode_rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        with_type!(x.dtype(), rms_norm(x, weight, epsilon))
    }

    fn decode_add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let sum = Self::float_add(residual, x);
        (Self::decode_rms_norm(sum.clone(), weight, epsilon), sum)
    }

    fn decode_norm_linear(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        norm: FloatTensor<Self>,
        epsilon: f64,
        weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        bias: OptionalFloat<Self>,
        epilogue: Epilogue,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (normalised, sum) = Self::decode_add_rms_norm(x, residual, norm, epsilon);
        let out = Self::quant_linear(normalised, weight, descriptor, bias);
        if epilogue.is_gated() {
            (Self::decode_gated(out, epilogue), sum)
        } else {
            (out, sum)
        }
    }

    fn decode_gated(gate_up: FloatTensor<Self>, epilogue: Epilogue) -> FloatTensor<Self> {
        with_type!(gate_up.dtype(), gated(gate_up, epilogue))
    }

    fn decode_embed(table: FloatTensor<Self>, rows: IntTensor<Self>) -> FloatTensor<Self> {
        with_type!(table.dtype(), embed(table, rows))
    }

    fn decode_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: OptionalFloat<Self>,
    ) -> FloatTensor<Self> {
        let out = product(x, weight);
        match bias.into_option() {
            Some(bias) => {
                let n = bias.shape().num_elements();
                let bias = Self::float_reshape(bias, Shape::new([1, n]));
                Self::float_add(out, bias)
            }
            None => out,
        }
    }

    fn decode_norm_float_linear(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        norm: FloatTensor<Self>,
        epsilon: f64,
        weight: FloatTensor<Self>,
        bias: OptionalFloat<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (normalised, sum) = Self::decode_add_rms_norm(x, residual, norm, epsilon);
        let out = Self::decode_linear(normalised.clone(), weight, bias);
        (out, normalised, sum)
    }

    fn decode_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(lhs, rhs)
    }

    fn decode_write_cache(
        cache: FloatTensor<Self>,
        new: FloatTensor<Self>,
        pages: OptionalInt<Self>,
        shape: CacheShape,
        slot: usize,
        start: usize,
    ) -> FloatTensor<Self> {
        let table = pages.into_option().map(contiguous);
        with_type!(
            cache.dtype(),
            write_cache(cache, new, table, shape, slot, start)
        )
    }

    fn decode_write_words(
        state: IntTensor<Self>,
        first: usize,
        words: Vec<i32>,
    ) -> IntTensor<Self> {
        let mut state = owned(state);
        state.storage_mut::<i32>()[first..first + words.len()].copy_from_slice(&words);
        state
    }

    fn decode_attention(
        qkv: FloatTensor<Self>,
        rows: IntTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        _wide_keys: OptionalFloat<Self>,
        _wide_values: OptionalFloat<Self>,
        pages: OptionalInt<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        q_norm: OptionalFloat<Self>,
        k_norm: OptionalFloat<Self>,
        sinks: OptionalFloat<Self>,
        _words: IntTensor<Self>,
        shape: AttentionShape,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let norms = q_norm.into_option().zip(k_norm.into_option());
        let table = pages.into_option().map(contiguous);
        with_type!(
            qkv.dtype(),
            attention(
                qkv,
                rows,
                ([keys, values], table),
                [cos, sin],
                norms,
                sinks.into_option(),
                shape
            )
        )
    }

    fn decode_log_likelihoods(
        logits: FloatTensor<Self>,
        tokens: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let (rows, vocab) = (logits.shape()[0], logits.shape()[1]);
        let (logits, tokens) = (logits.to_contiguous(), tokens.to_contiguous());
        let (logits, tokens) = (to_f32(&logits), tokens.storage::<i32>());
        let likelihoods = logits
            .chunks(vocab)
            .zip(tokens)
            .map(|(logits, &token)| log_likelihood(logits, token))
            .collect();
        tensor::<f32>(likelihoods, Shape::new([rows]))
    }

    fn decode_sample(
        logits: FloatTensor<Self>,
        rows: IntTensor<Self>,
        token_table: IntTensor<Self>,
        max_len: usize,
    ) -> (IntTensor<Self>, IntTensor<Self>) {
        let (vocab, words) = (logits.shape()[1], token_table.shape()[1]);
        let (logits, mut rows, mut token_table) =
            (logits.to_contiguous(), owned(rows), owned(token_table));
        let table: &mut [u32] = cast_slice_mut(token_table.storage_mut::<i32>());
        let (states, _) = rows
            .storage_mut::<i32>()
            .as_chunks_mut::<{ SequenceState::WORDS }>();
        for (state, logits) in states.iter_mut().zip(to_f32(&logits).chunks(vocab)) {
            let mut row = SequenceState::from_words(*state);
            let Some(mut tokens) = SlotTokens::of_slot(table, words, row.slot as usize) else {
                continue;
            };
            sample_host(logits, &mut row, &mut tokens, max_len as u32);
            *state = row.to_words();
        }
        (rows, token_table)
    }

    fn decode_logprobs(
        logits: FloatTensor<Self>,
        rows: IntTensor<Self>,
        out: IntTensor<Self>,
    ) -> IntTensor<Self> {
        let vocab = logits.shape()[1];
        let (logits, rows, mut out) = (logits.to_contiguous(), contiguous(rows), owned(out));
        let (states, _) = rows
            .storage::<i32>()
            .as_chunks::<{ SequenceState::WORDS }>();
        let (records, _) = out.storage_mut::<i32>().as_chunks_mut::<LOGPROB_WORDS>();
        let logits = to_f32(&logits);
        for ((state, record), logits) in states.iter().zip(records).zip(logits.chunks(vocab)) {
            let row = SequenceState::from_words(*state);
            if let Some(count) = row.logprobs {
                *record = logprobs_host(logits, row.token, count as usize).map(u32::cast_signed);
            }
        }
        out
    }
}

/// Computes the log-likelihood of a token under one row of logits, as
/// [`log_likelihoods`](crate::kernels::log_likelihoods()) defines it.
fn log_likelihood(logits: &[f32], token: i32) -> f32 {
    if token < 0 {
        return 0.0;
    }
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = logits.iter().map(|logit| (logit - best).exp()).sum();
    logits
        .get(token as usize)
        .map_or(f32::NAN, |logit| logit - best - sum.ln())
}

/// Returns a contiguous tensor that starts at the beginning of its memory: `tensor` itself if it is
/// one, otherwise a copy.
fn owned(tensor: FloatTensor<Flex>) -> FloatTensor<Flex> {
    if tensor.is_contiguous() && tensor.layout().start_offset() == 0 {
        tensor
    } else {
        tensor.to_contiguous()
    }
}

/// Returns a contiguous tensor of words, whose storage starts with its first word.
fn contiguous(words: IntTensor<Flex>) -> IntTensor<Flex> {
    words.to_contiguous()
}

/// Returns the values of a contiguous tensor of dtype `T`.
fn values<T: Float>(tensor: &FloatTensor<Flex>) -> &[T] {
    tensor.storage()
}

/// Converts a tensor to a contiguous tensor of the dtype of `T`.
fn as_type<T: Float>(tensor: FloatTensor<Flex>) -> FloatTensor<Flex> {
    let tensor = tensor.to_contiguous();
    if tensor.dtype() == T::dtype() {
        return tensor;
    }
    let shape = tensor.shape();
    from_f32(to_f32(&tensor).into_owned(), shape, T::dtype())
}

fn tensor<T: Float>(values: Vec<T>, shape: Shape) -> FloatTensor<Flex> {
    FloatTensor::<Flex>::from_data(TensorData::new(values, shape))
}

fn rms_norm<T: Float>(
    x: FloatTensor<Flex>,
    weight: FloatTensor<Flex>,
    epsilon: f64,
) -> FloatTensor<Flex> {
    let (x, weight) = (x.to_contiguous(), as_type::<T>(weight));
    tensor(
        host::rms_norm::<T>(values(&x), values(&weight), epsilon),
        x.shape(),
    )
}

fn gated<T: Float>(gate_up: FloatTensor<Flex>, epilogue: Epilogue) -> FloatTensor<Flex> {
    let gate_up = gate_up.to_contiguous();
    let mut shape = gate_up.shape();
    let last = shape.rank() - 1;
    shape[last] /= 2;
    let features = shape[last];
    let gate_up = values::<T>(&gate_up);
    tensor(host::gated(gate_up, features, epilogue), shape)
}

fn embed<T: Float>(table: FloatTensor<Flex>, rows: IntTensor<Flex>) -> FloatTensor<Flex> {
    let ([vocab, features], table) = (table.shape().dims(), table.to_contiguous());
    let rows = rows_of(&rows);
    let mut out = vec![T::default(); rows.len() * features];
    for (row, out) in rows.iter().zip(out.chunks_exact_mut(features.max(1))) {
        if matches!(row.status, SequenceStatus::At(_)) && (row.token as usize) < vocab {
            out.copy_from_slice(&values::<T>(&table)[row.token as usize * features..][..features]);
        }
    }
    tensor(out, Shape::new([rows.len(), features]))
}

fn head<T: Float>(x: FloatTensor<Flex>, table: FloatTensor<Flex>) -> FloatTensor<Flex> {
    let ([rows, features], [columns, _]) = (x.shape().dims(), table.shape().dims());
    let x = x.to_contiguous();
    let table = &table.storage::<T>()[..columns * features];
    tensor(
        lm_head::head::<T>(values(&x), table, features),
        Shape::new([rows, columns]),
    )
}

fn write_cache<T: Float>(
    cache: FloatTensor<Flex>,
    new: FloatTensor<Flex>,
    table: Option<IntTensor<Flex>>,
    shape: CacheShape,
    slot: usize,
    start: usize,
) -> FloatTensor<Flex> {
    let [_, _, seq, head_dim] = new.shape().dims();
    let table = table.as_ref().map(|table| table.storage::<i32>());
    let (mut cache, new) = (owned(cache), as_type::<T>(new));
    let memory = cache.storage_mut::<T>();
    for (head, new) in values::<T>(&new)
        .chunks_exact((seq * head_dim).max(1))
        .enumerate()
    {
        let mut new = new;
        for run in shape.runs(table, [slot, head], start..start + seq) {
            let (of_page, rest) = new.split_at(run.len());
            memory[run].copy_from_slice(of_page);
            new = rest;
        }
    }
    cache
}

fn attention<T: Float>(
    qkv: FloatTensor<Flex>,
    rows: IntTensor<Flex>,
    ([keys, cache_values], page_table): ([FloatTensor<Flex>; 2], Option<IntTensor<Flex>>),
    tables: [FloatTensor<Flex>; 2],
    norms: Option<(FloatTensor<Flex>, FloatTensor<Flex>)>,
    sinks: Option<FloatTensor<Flex>>,
    shape: AttentionShape,
) -> (FloatTensor<Flex>, FloatTensor<Flex>, FloatTensor<Flex>) {
    let (qkv, [cos, sin]) = (
        qkv.to_contiguous(),
        tables.map(|table| table.to_contiguous()),
    );
    let norms = norms.map(|(q, k)| [as_type::<T>(q), as_type::<T>(k)]);
    let sinks = sinks.map(as_type::<T>);
    let (mut keys, mut cache_values) = (owned(keys), owned(cache_values));
    let attention = Attention {
        shape,
        pages: page_table.as_ref().map(|table| table.storage::<i32>()),
        cos: cos.storage(),
        sin: sin.storage(),
        norms: norms
            .as_ref()
            .map(|norms| norms.each_ref().map(values::<T>)),
        sinks: sinks.as_ref().map(values::<T>),
    };
    let out = attention.run(
        values(&qkv),
        &rows_of(&rows),
        keys.storage_mut(),
        cache_values.storage_mut(),
    );
    (
        tensor::<T>(
            out,
            Shape::new([shape.rows, shape.heads * shape.cache.head_dim]),
        ),
        keys,
        cache_values,
    )
}

/// Returns the rows of a step.
fn rows_of(rows: &IntTensor<Flex>) -> Vec<SequenceState> {
    let rows = rows.to_contiguous();
    rows.storage::<i32>()
        .as_chunks()
        .0
        .iter()
        .copied()
        .map(SequenceState::from_words)
        .collect()
}

/// Multiplies rows by a float weight [K, N].
fn product(x: FloatTensor<Flex>, weight: FloatTensor<Flex>) -> FloatTensor<Flex> {
    let ([m, k], [_, n]) = (x.shape().dims(), weight.shape().dims());
    let dtype = activation_dtype(x.dtype()).unwrap_or(ActivationDtype::F32);
    let problem = FloatProblem { m, k, n, dtype };
    let kernel = plan(problem, &Target::FLEX).kernel;
    let transposed = Flex::float_transpose(weight.clone());
    let is_table = transposed.is_contiguous() && transposed.layout().start_offset() == 0;
    if !is_table || kernel != Kernel::Host || k == 0 {
        return Flex::float_matmul(x, weight);
    }
    kernel.trace(&problem);
    with_type!(x.dtype(), head(x, transposed))
}
