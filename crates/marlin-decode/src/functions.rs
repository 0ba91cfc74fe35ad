//! The parts of a decode step as functions on tensors.
//!
//! | device | runs |
//! |---|---|
//! | a CubeCL runtime with integers of 64 bits and arithmetic in the activations' dtype | kernels |
//! | Flex | Rust on the host |
//! | others, and every device with autodiff | Burn's operations, which read the rows |

use crate::DecodeError;
use crate::kernels::Row;
use crate::kernels::attention::AttentionShape;
use crate::ops::{DecodeBackend, portable};
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_marlin::QuantLinear;
use burn_marlin::backend::activation_dtype;
use marlin_kernels::{ActivationDtype, Runtime};

/// Returns true if a device runs the parts of a step as kernels: a CubeCL runtime that has the features they need, without autodiff.
/// [`burn::tensor::Graph::is_hardware`] tells whether it also records them as a graph.
pub fn has_kernels(device: &Device) -> bool {
    runs_kernels(device, ActivationDtype::F32)
}

/// [`has_kernels`], of activations in a dtype.
#[cfg_attr(not(feature = "cubecl-runtime"), allow(unused_variables, reason = "only CubeCL's runtimes run kernels"))]
fn runs_kernels(device: &Device, dtype: ActivationDtype) -> bool {
    #[cfg(feature = "cubecl-runtime")]
    if !device.is_autodiff()
        && let Some(client) = crate::ops::cube::client(device)
    {
        return match crate::kernels::lacks(&client, dtype) {
            None => true,
            Some(reason) => {
                tracing::debug!(%dtype, reason, "a step runs in Burn's operations");
                false
            }
        };
    }
    false
}

/// Whether a device is Flex without autodiff, which has the parts of a step in Rust.
#[cfg_attr(not(feature = "flex"), allow(unused_variables, reason = "without Flex no device is it"))]
fn is_flex(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    if matches!(device.as_dispatch(), burn::backend::DispatchDevice::Flex(_)) {
        return !device.is_autodiff();
    }
    false
}

/// Whether a tensor's device has the parts of a step, and they take its dtype.
pub(crate) fn takes<const D: usize>(x: &Tensor<D>) -> bool {
    let device = x.device();
    activation_dtype(x.dtype()).is_some_and(|dtype| is_flex(&device) || runs_kernels(&device, dtype))
}

/// RMSNorm (arXiv 1910.07467) over the last dimension: `x / sqrt(mean(x^2) + epsilon) * weight`, [.., hidden] to the same shape and dtype.
///
/// The normalisation is done in f32 and rounded to the dtype of `x` before the weight is applied, as Hugging Face's Llama does.
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, epsilon: f64) -> Tensor<D> {
    if takes(&x) {
        return Tensor::from_dispatch(Dispatch::decode_rms_norm(x.into_dispatch(), weight.into_dispatch(), epsilon));
    }
    portable::rms_norm(x, weight, epsilon)
}

/// The norm of `residual + x`, and that sum; the sum is rounded before it is normalised.
pub fn add_rms_norm<const D: usize>(x: Tensor<D>, residual: Tensor<D>, weight: Tensor<1>, epsilon: f64) -> (Tensor<D>, Tensor<D>) {
    if takes(&x) {
        let (normalised, sum) = Dispatch::decode_add_rms_norm(x.into_dispatch(), residual.into_dispatch(), weight.into_dispatch(), epsilon);
        return (Tensor::from_dispatch(normalised), Tensor::from_dispatch(sum));
    }
    let sum = residual + x;
    (portable::rms_norm(sum.clone(), weight, epsilon), sum)
}

/// A linear layer of the norm of `residual + x`, and that sum: as [`add_rms_norm`] before the layer, and for one row on NVIDIA cards from compute
/// capability 9.0 on one launch for both.
///
/// # Panics
/// Where the last dimension of `x` is not K, or `residual` has another shape than `x`, as Burn's own layers do.
pub fn norm_linear<const D: usize>(
    linear: &QuantLinear,
    x: Tensor<D>,
    residual: Tensor<D>,
    norm: Tensor<1>,
    epsilon: f64,
) -> (Tensor<D>, Tensor<D>) {
    let weight = linear.weight();
    if !takes(&x) || weight.adapter().is_some() {
        let (x, sum) = add_rms_norm(x, residual, norm, epsilon);
        return (linear.forward(x), sum);
    }
    let ([k, _], found, features) = (weight.dims(), x.dims(), norm.dims()[0]);
    assert!(
        found.last() == Some(&k) && residual.dims() == found && features == k,
        "activations {found:?}, a residual stream {:?} and a norm of {features} features, the weight has K = {k}",
        residual.dims()
    );
    let bias = linear.bias_in(x.dtype()).map(Tensor::into_dispatch).into();
    let [x, residual, norm] = [x.into_dispatch(), residual.into_dispatch(), norm.into_dispatch()];
    let (out, sum) = Dispatch::decode_norm_linear(x, residual, norm, epsilon, weight.to_op(), weight.descriptor(), bias);
    (Tensor::from_dispatch(out), Tensor::from_dispatch(sum))
}

/// `silu(gate) * up` of [.., 2 * features], gates first: [.., features] (SwiGLU, arXiv 2002.05202).
pub fn silu_mul<const D: usize>(gate_up: Tensor<D>) -> Tensor<D> {
    if takes(&gate_up) {
        return Tensor::from_dispatch(Dispatch::decode_silu_mul(gate_up.into_dispatch()));
    }
    portable::silu_mul(gate_up)
}

/// The embeddings [rows, hidden] of the rows' tokens, from a table [vocab, hidden]; zeros for rows that are skipped.
pub fn embed(table: Tensor<2>, rows: &Tensor<2, Int>) -> Tensor<2> {
    if takes(&table) {
        return Tensor::from_dispatch(Dispatch::decode_embed(table.into_dispatch(), rows.clone().into_dispatch()));
    }
    portable::embed(table, rows)
}

/// Rows [rows, K] times a float weight [K, N]: the head of a step, for which Burn's matmul reads a weight at a quarter of the card's rate.
pub fn head(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    if takes(&x) && weight.dtype() == x.dtype() {
        return Tensor::from_dispatch(Dispatch::decode_head(x.into_dispatch(), weight.into_dispatch()));
    }
    x.matmul(weight)
}

/// [batch, heads, M, K] times [batch, heads, K, N]: what attention of a prompt is made of.
///
/// Burn's matmul, but on a card and in 16 bits always its kernel for tensor cores. [`Tensor::matmul`] would compile and time every kernel it has, a
/// minute's work on an H200 for the first prompt, and keep the fastest for lengths it was not tried with: in Burn 0.22.1 some of them fail there.
pub fn matmul(lhs: Tensor<4>, rhs: Tensor<4>) -> Tensor<4> {
    if takes(&lhs)
        && burn_marlin::device::target(&lhs.device()).runtime == Runtime::Cuda
        && lhs.dtype().size() == 2
        && lhs.dtype() == rhs.dtype()
    {
        return Tensor::from_dispatch(Dispatch::decode_matmul(lhs.into_dispatch(), rhs.into_dispatch()));
    }
    lhs.matmul(rhs)
}

/// Rotary position embedding (arXiv 2104.09864) of [batch, heads, seq, head_dim]: features `i` and `i + half` of a head turn together by the angle whose
/// cosine and sine are at `i` of `cos` and `sin` [1, 1, seq, half], in the dtype of `x`. Features past both halves stay as they are.
pub fn rotate(x: Tensor<4>, cos: &Tensor<4>, sin: &Tensor<4>) -> Tensor<4> {
    let (half, head_dim) = (cos.dims()[3], x.dims()[3]);
    let first = x.clone().slice_dim(3, 0..half);
    let second = x.clone().slice_dim(3, half..2 * half);
    let turned_first = first.clone() * cos.clone() - second.clone() * sin.clone();
    let turned_second = second * cos.clone() + first * sin.clone();
    let mut parts = vec![turned_first, turned_second];
    if 2 * half < head_dim {
        parts.push(x.slice_dim(3, 2 * half..head_dim));
    }
    Tensor::cat(parts, 3)
}

/// Keys or values of a layer, [slots, kv_heads, max_len, head_dim], of zeros.
pub fn cache(shape: [usize; 4], dtype: FloatDType, device: &Device) -> Tensor<4> {
    // Rows of tensors of more than one dimension may have gaps between them; in-place kernels want none.
    Tensor::<1>::zeros([shape.iter().product::<usize>()], (device, DType::from(dtype))).reshape(shape)
}

/// A tensor [rows, words] of i32, of zeros: rows of a step, or what slots have seen.
pub fn words(shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::<1, Int>::zeros([shape[0] * shape[1]], (device, DType::I32)).reshape(shape)
}

/// Writes keys or values `new` [1, kv_heads, seq, head_dim] to positions `start..start + seq` of a slot of a cache.
///
/// # Panics
/// Where slot or positions are outside the cache.
pub fn write_cache(cache: &mut Tensor<4>, new: Tensor<4>, slot: usize, start: usize) {
    let ([slots, _, max_len, _], seq) = (cache.dims(), new.dims()[2]);
    assert!(slot < slots && start + seq <= max_len, "slot {slot} of {slots}, positions {start}..{} of {max_len}", start + seq);
    cache.inplace(|cache| match takes(&cache) {
        true => Tensor::from_dispatch(Dispatch::decode_write_cache(cache.into_dispatch(), new.into_dispatch(), slot, start)),
        false => portable::write_cache(cache, new, slot, start),
    });
}

/// Writes words of a tensor [rows, words] of i32, from the first word of row `row` on.
///
/// # Panics
/// Where there are more words than the tensor has from there on.
pub fn write_words(tensor: &mut Tensor<2, Int>, row: usize, words: Vec<i32>) {
    let [rows, columns] = tensor.dims();
    assert!(row * columns + words.len() <= rows * columns, "{} words from row {row} of {rows} of {columns}", words.len());
    tensor.inplace(|tensor| match is_flex(&tensor.device()) || has_kernels(&tensor.device()) {
        true => Tensor::from_dispatch(Dispatch::decode_write_words(tensor.into_dispatch(), row * columns, words)),
        false => portable::write_words(tensor, row * columns, words),
    });
}

/// Writes rows of a step from row `first` on.
///
/// # Panics
/// Where there are more than the tensor has from there on.
pub fn write_rows(tensor: &mut Tensor<2, Int>, first: usize, rows: &[Row]) {
    write_words(tensor, first, rows.iter().flat_map(|row| row.to_words()).collect());
}

/// The rows of a step, on their way to the host: the copy follows the work that was given to the device before, and does not wait for what comes
/// after.
pub struct RowsRead(Reading);

enum Reading {
    /// The copy is under way.
    #[cfg(feature = "cubecl-runtime")]
    Cube(crate::ops::cube::WordsRead),
    /// It is done.
    Done(Result<Vec<i32>, DecodeError>),
}

/// Starts to read the rows of a step.
pub fn start_reading(tensor: &Tensor<2, Int>) -> RowsRead {
    #[cfg(feature = "cubecl-runtime")]
    if has_kernels(&tensor.device())
        && let Ok(tensor) = tensor.clone().try_into_primitive::<burn::backend::Cube>()
    {
        return RowsRead(Reading::Cube(crate::ops::cube::start_reading(tensor)));
    }
    let words = tensor.clone().try_into_data().map_err(|error| unread(&error)).and_then(|data| {
        let words = data.convert::<i32>().try_into_vec::<i32>();
        words.map_err(|error| unread(&error))
    });
    RowsRead(Reading::Done(words))
}

/// The rows of a step, on the host.
///
/// # Errors
/// As [`RowsRead::wait`].
pub fn read_rows(tensor: &Tensor<2, Int>) -> Result<Vec<Row>, DecodeError> {
    start_reading(tensor).wait()
}

impl RowsRead {
    /// The rows.
    ///
    /// # Errors
    /// The device fails: here is where a kernel's fault comes out.
    pub fn wait(self) -> Result<Vec<Row>, DecodeError> {
        #[cfg_attr(
            not(feature = "cubecl-runtime"),
            allow(clippy::infallible_destructuring_match, reason = "with a runtime there are two cases")
        )]
        let words = match self.0 {
            #[cfg(feature = "cubecl-runtime")]
            Reading::Cube(read) => read.wait().map_err(|error| unread(&error)),
            Reading::Done(words) => words,
        };
        Ok(words?.as_chunks::<{ Row::WORDS }>().0.iter().copied().map(Row::from_words).collect())
    }
}

fn unread(error: &dyn std::fmt::Debug) -> DecodeError {
    DecodeError::Step { reason: format!("{error:?}") }
}

/// A layer's cache in a step.
#[derive(Debug)]
pub struct LayerCache<'a> {
    /// [slots, kv_heads, max_len, head_dim].
    pub keys: &'a mut Tensor<4>,
    /// As the keys.
    pub values: &'a mut Tensor<4>,
}

/// What attention of a layer is made of beside its cache.
#[derive(Debug, Clone)]
pub struct AttentionParts {
    /// Query heads.
    pub heads: usize,
    /// Cosines and sines, f32 [positions, rotary_dim / 2] each: features `i` and `i + rotary_dim / 2` of a head turn together.
    pub rope: [Tensor<2>; 2],
    /// Weights of the RMSNorms of each head of queries and keys, `[head_dim]`, and their epsilon, where the model has them.
    pub norms: Option<([Tensor<1>; 2], f64)>,
    /// Only the last so many positions count.
    pub window: Option<usize>,
}

/// Attention of a step: normalises and turns queries and keys of `qkv` [rows, (heads + 2 * kv_heads) * head_dim] by each row's position, writes
/// keys and values to the cache, and attends to all positions of each row's slot up to its own: [rows, heads * head_dim].
///
/// `tickets` are zeros [rows, heads] ([`words`]), which a call leaves as they are. Rows that are skipped have no defined output. Two rows must not
/// have the same slot.
///
/// # Panics
/// Where shapes do not fit each other.
pub fn attention(
    qkv: Tensor<2>,
    rows: &Tensor<2, Int>,
    cache: LayerCache<'_>,
    tickets: &Tensor<2, Int>,
    parts: &AttentionParts,
) -> Tensor<2> {
    let [count, columns] = qkv.dims();
    let [slots, kv_heads, max_len, head_dim] = cache.keys.dims();
    let heads = parts.heads;
    assert!(
        columns == (heads + 2 * kv_heads) * head_dim && rows.dims() == [count, Row::WORDS] && cache.values.dims() == cache.keys.dims(),
        "{columns} features do not fit {heads} heads, {kv_heads} of keys, of {head_dim}"
    );
    let [cos, sin] = &parts.rope;
    let (max_positions, rotary_dim) = (cos.dims()[0], 2 * cos.dims()[1]);
    let shape = AttentionShape {
        rows: count,
        heads,
        kv_heads,
        head_dim,
        rotary_dim,
        slots,
        max_len,
        max_positions,
        window: parts.window,
        norm_epsilon: parts.norms.as_ref().map(|(_, epsilon)| *epsilon as f32),
        dtype: activation_dtype(qkv.dtype()).unwrap_or(ActivationDtype::F32),
    };
    if !takes(&qkv) || shape.check().is_err() {
        return portable::attention(qkv, rows, cache, parts);
    }
    let norm = |index: usize| parts.norms.as_ref().map(|(weights, _)| weights[index].clone().into_dispatch()).into();
    let (out, keys, values) = Dispatch::decode_attention(
        qkv.into_dispatch(),
        rows.clone().into_dispatch(),
        cache.keys.extract().into_dispatch(),
        cache.values.extract().into_dispatch(),
        cos.clone().into_dispatch(),
        sin.clone().into_dispatch(),
        norm(0),
        norm(1),
        tickets.clone().into_dispatch(),
        shape,
    );
    (*cache.keys, *cache.values) = (Tensor::from_dispatch(keys), Tensor::from_dispatch(values));
    Tensor::from_dispatch(out)
}

/// Chooses the next token of each row from logits [rows, vocab], as [`kernels::sample`](crate::kernels::sample) says: the row gets the token and the next
/// position, or how it ended; `seen` [slots, vocab / 32 up], the bitmaps of the tokens in each slot's sequence, gets the token.
///
/// `max_len` are the positions of the window.
///
/// # Panics
/// Where shapes do not fit each other.
pub fn sample(logits: Tensor<2>, rows: &mut Tensor<2, Int>, seen: &mut Tensor<2, Int>, max_len: usize) {
    let ([count, vocab], [_, words]) = (logits.dims(), seen.dims());
    assert!(rows.dims() == [count, Row::WORDS] && words == vocab.div_ceil(32), "logits [{count}, {vocab}], {words} words of bitmaps");
    if !takes(&logits) || !can_sample(&logits, seen.dims()[0], max_len) {
        return portable::sample(logits, rows, seen, max_len);
    }
    let (written, marked) =
        Dispatch::decode_sample(logits.into_dispatch(), rows.extract().into_dispatch(), seen.extract().into_dispatch(), max_len);
    (*rows, *seen) = (Tensor::from_dispatch(written), Tensor::from_dispatch(marked));
}

/// Whether the device of logits, which has the parts of a step, can sample from so many.
#[cfg_attr(not(feature = "cubecl-runtime"), allow(unused_variables, reason = "the host samples from any"))]
fn can_sample(logits: &Tensor<2>, slots: usize, max_len: usize) -> bool {
    #[cfg(feature = "cubecl-runtime")]
    if let Some(client) = crate::ops::cube::client(&logits.device()) {
        use crate::kernels::sample::{SampleShape, check_device};
        let ([rows, vocab], dtype) = (logits.dims(), activation_dtype(logits.dtype()).unwrap_or(ActivationDtype::F32));
        let checked = check_device(&client, &SampleShape { rows, vocab, slots, max_len, dtype });
        return match checked {
            Ok(_) => true,
            Err(error) => {
                tracing::debug!(%error, "the host samples");
                false
            }
        };
    }
    true
}
