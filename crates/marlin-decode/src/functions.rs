//! The parts of a decode step as functions on tensors, which choose the implementation by device.
//!
//! | device | implementation |
//! |---|---|
//! | a CubeCL runtime with integers of 64 bits and arithmetic in the activations' dtype | kernels |
//! | Flex | Rust on the host |
//! | others, and every device with autodiff | Burn's operations, which read the rows to the host |

use crate::attention_parts::AttentionParts;
use crate::cache::LayerCache;
use crate::device::{is_flex, takes};
use crate::kernels::Row;
use crate::kernels::attention::AttentionPass;
use crate::kernels::sample::BITMAPS;
use crate::ops::DecodeBackend;
use crate::portable;
use burn::backend::Dispatch;
use burn::tensor::kind::Basic;
use burn::tensor::{Int, Tensor};
use burn_marlin::QuantLinear;
use burn_marlin::backend::activation_dtype;
use marlin_kernels::{ActivationDtype, Epilogue};

/// RMSNorm (arXiv 1910.07467) over the last dimension of `x` [.., hidden]: `x / sqrt(mean(x^2) +
/// epsilon) * weight`, in the shape and dtype of `x`.
///
/// The normalisation is computed in f32 and rounded to the dtype of `x` before the weight is
/// applied, as Hugging Face's Llama does.
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, epsilon: f64) -> Tensor<D> {
    if takes(&x) {
        return Tensor::from_dispatch(Dispatch::decode_rms_norm(
            x.into_dispatch(),
            weight.into_dispatch(),
            epsilon,
        ));
    }
    portable::rms_norm(x, weight, epsilon)
}

/// Returns the RMSNorm of `residual + x`, and that sum, which is rounded before it is normalised.
pub fn add_rms_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    epsilon: f64,
) -> (Tensor<D>, Tensor<D>) {
    if takes(&x) {
        let (normalised, sum) = Dispatch::decode_add_rms_norm(
            x.into_dispatch(),
            residual.into_dispatch(),
            weight.into_dispatch(),
            epsilon,
        );
        return (
            Tensor::from_dispatch(normalised),
            Tensor::from_dispatch(sum),
        );
    }
    let sum = residual + x;
    (portable::rms_norm(sum.clone(), weight, epsilon), sum)
}

/// Applies a linear layer to the RMSNorm of `residual + x`, and returns the output and that sum: as
/// [`add_rms_norm`] before the layer. For one row on NVIDIA cards from compute capability 9.0 on,
/// both run in one launch.
///
/// With [`Epilogue::SwiGlu`] the layer's outputs are those of gate and up side by side, and the
/// result is [`silu_mul`] of them, on tensor cores computed by the matmul before it rounds.
///
/// # Panics
/// Panics if the last dimension of `x` is not K, or if `residual` has another shape than `x`.
pub fn norm_linear<const D: usize>(
    linear: &QuantLinear,
    x: Tensor<D>,
    residual: Tensor<D>,
    norm: Tensor<1>,
    epsilon: f64,
    epilogue: Epilogue,
) -> (Tensor<D>, Tensor<D>) {
    let weight = linear.weight();
    if !takes(&x) || weight.adapter().is_some() {
        let (x, sum) = add_rms_norm(x, residual, norm, epsilon);
        return (apply(epilogue, linear.forward(x)), sum);
    }
    let ([k, _], found, features) = (weight.dims(), x.dims(), norm.dims()[0]);
    assert!(
        found.last() == Some(&k) && residual.dims() == found && features == k,
        "activations {found:?}, a residual stream {:?} and a norm of {features} features, the weight has K = {k}",
        residual.dims()
    );
    let bias = linear.bias_in(x.dtype()).map(Tensor::into_dispatch).into();
    let [x, residual, norm] = [
        x.into_dispatch(),
        residual.into_dispatch(),
        norm.into_dispatch(),
    ];
    let (out, sum) = Dispatch::decode_norm_linear(
        x,
        residual,
        norm,
        epsilon,
        weight.to_op(),
        weight.descriptor(),
        bias,
        epilogue,
    );
    (Tensor::from_dispatch(out), Tensor::from_dispatch(sum))
}

/// Applies an epilogue to the output of a matmul.
pub fn apply<const D: usize>(epilogue: Epilogue, out: Tensor<D>) -> Tensor<D> {
    match epilogue {
        Epilogue::None => out,
        Epilogue::SwiGlu => silu_mul(out),
    }
}

/// SwiGLU (arXiv 2002.05202): `silu(gate) * up` [.., features] of `gate_up` [.., 2 * features],
/// gates first.
pub fn silu_mul<const D: usize>(gate_up: Tensor<D>) -> Tensor<D> {
    if takes(&gate_up) {
        return Tensor::from_dispatch(Dispatch::decode_silu_mul(gate_up.into_dispatch()));
    }
    portable::silu_mul(gate_up)
}

/// Returns the embeddings [rows, hidden] of the rows' tokens, from a table [vocab, hidden]; zeros
/// for rows that are skipped.
pub fn embed(table: Tensor<2>, rows: &Tensor<2, Int>) -> Tensor<2> {
    if takes(&table) {
        return Tensor::from_dispatch(Dispatch::decode_embed(
            table.into_dispatch(),
            rows.clone().into_dispatch(),
        ));
    }
    portable::embed(table, rows)
}

/// A float linear layer: `x` [.., K] times `weight` [K, N], plus `bias` `[N]`, in the shape [..,
/// N].
///
/// Few rows run in [a kernel of their own](marlin_kernels::matmul::head), if the weight is a
/// transposed [N, K], as checkpoints hold it: Burn's matmul would read it at a quarter of the
/// card's bandwidth. Others run on Burn's matmul, on CUDA in 16 bits on one of its kernels for
/// tensor cores, as in [`matmul`].
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    if !takes(&x) || weight.dtype() != x.dtype() {
        return burn::tensor::module::linear(x, weight, bias);
    }
    let (mut shape, [k, n]) = (x.shape(), weight.dims());
    let rows = shape.num_elements() / k.max(1);
    shape[D - 1] = n;
    let out = Dispatch::decode_linear(x.reshape([rows, k]).into_dispatch(), weight.into_dispatch());
    let out = Tensor::<2>::from_dispatch(out).reshape(shape);
    match bias {
        Some(bias) => out + bias.unsqueeze(),
        None => out,
    }
}

/// The matmul of a prompt's attention: [batch, heads, M, K] times [batch, heads, K, N].
///
/// This is Burn's matmul, but on CUDA in 16 bits it always runs on one of Burn's kernels for tensor
/// cores. [`Tensor::matmul`] would compile and time every kernel it has, which takes minutes on an
/// H200 for the first prompt (one kernel alone compiles for 70 s), and keep the fastest for other
/// lengths, too; in Burn 0.22.1 some kernels fail for those.
pub fn matmul(lhs: Tensor<4>, rhs: Tensor<4>) -> Tensor<4> {
    if takes(&lhs) && lhs.dtype() == rhs.dtype() {
        return Tensor::from_dispatch(Dispatch::decode_matmul(
            lhs.into_dispatch(),
            rhs.into_dispatch(),
        ));
    }
    lhs.matmul(rhs)
}

/// The attention of a step, [rows, heads * head_dim]: normalises queries and keys of `qkv` [rows,
/// (heads + 2 * kv_heads) * head_dim], rotates them by each row's position, writes keys and values
/// to the cache, and attends to the positions of each row's slot up to its own.
///
/// `tickets` are zeros [rows, heads] ([`words`](crate::words)) and are zero again after the call.
/// The output of skipped rows is undefined. No two rows may have the same slot.
///
/// In a [recorded](burn::tensor::capture) pass `state`, and what the cache holds of positions
/// before each row's, must be there before the pass begins: where kernels
/// [overlap](marlin_kernels::overlap) they are read while earlier kernels of the pass still run. So
/// one recording is one step.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn attention(
    qkv: Tensor<2>,
    rows: &Tensor<2, Int>,
    cache: LayerCache<'_>,
    tickets: &Tensor<2, Int>,
    parts: &AttentionParts,
) -> Tensor<2> {
    attend(AttentionPass::Step, qkv, rows, cache, tickets, parts)
}

/// As [`attention`], of the tokens of prompts: rows of one slot follow each other by position.
///
/// `tiles` are the tiles of the rows ([`tiles`](crate::tiles)).
///
/// # Panics
/// Panics if the shapes do not match.
pub fn prompt_attention(
    qkv: Tensor<2>,
    rows: &Tensor<2, Int>,
    cache: LayerCache<'_>,
    tiles: &Tensor<2, Int>,
    parts: &AttentionParts,
) -> Tensor<2> {
    attend(AttentionPass::Prompt, qkv, rows, cache, tiles, parts)
}

/// The attention of a pass. `words` are the tickets of a step, or the tiles of prompts.
fn attend(
    pass: AttentionPass,
    qkv: Tensor<2>,
    rows: &Tensor<2, Int>,
    cache: LayerCache<'_>,
    words: &Tensor<2, Int>,
    parts: &AttentionParts,
) -> Tensor<2> {
    let [count, columns] = qkv.dims();
    let [_, kv_heads, _, head_dim] = cache.keys.dims();
    let heads = parts.heads;
    assert!(
        columns == (heads + 2 * kv_heads) * head_dim
            && rows.dims() == [count, Row::WORDS]
            && cache.values.dims() == cache.keys.dims(),
        "{columns} features do not fit {heads} heads, {kv_heads} of keys, of {head_dim}"
    );
    let [cos, sin] = &parts.rope;
    let dtype = activation_dtype(qkv.dtype()).unwrap_or(ActivationDtype::F32);
    let shape = parts.shape(pass, count, cache.keys.dims(), dtype);
    if !takes(&qkv) || shape.check().is_err() {
        return portable::attention(qkv, rows, cache, parts);
    }
    let norm = |index: usize| {
        parts
            .norms
            .as_ref()
            .map(|(weights, _)| weights[index].clone().into_dispatch())
            .into()
    };
    let (out, keys, values) = Dispatch::decode_attention(
        qkv.into_dispatch(),
        rows.clone().into_dispatch(),
        taken(cache.keys).into_dispatch(),
        taken(cache.values).into_dispatch(),
        cos.clone().into_dispatch(),
        sin.clone().into_dispatch(),
        norm(0),
        norm(1),
        words.clone().into_dispatch(),
        shape,
    );
    (*cache.keys, *cache.values) = (Tensor::from_dispatch(keys), Tensor::from_dispatch(values));
    Tensor::from_dispatch(out)
}

/// Takes a tensor that an operation writes in place, and that the result then replaces.
///
/// On the host only the sole owner of the memory writes in place. Kernels write it whoever else
/// holds it, so there a second reference stays behind: [`Tensor::extract`] would leave a tensor of
/// no elements, whose allocation a recording of a graph can refuse.
fn taken<const D: usize, K: Basic>(tensor: &mut Tensor<D, K>) -> Tensor<D, K> {
    if is_flex(&tensor.device()) {
        tensor.extract()
    } else {
        tensor.clone()
    }
}

/// Chooses the next token of each row from logits [rows, vocab], as documented in
/// [`kernels::sample`](crate::kernels::sample), and writes the token and the next position, or the
/// state in which the sequence ended, to the row. Of `bitmaps` [[`BITMAPS`] * slots, vocab / 32,
/// rounded up] a slot has two rows, one after the other: the bitmap of the tokens in its sequence,
/// to which the token is added, and that of its suppressed tokens.
///
/// `max_len` is the number of positions of the window.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn sample(
    logits: Tensor<2>,
    rows: &mut Tensor<2, Int>,
    bitmaps: &mut Tensor<2, Int>,
    max_len: usize,
) {
    let ([count, vocab], [of_slots, words]) = (logits.dims(), bitmaps.dims());
    assert!(
        rows.dims() == [count, Row::WORDS]
            && words == vocab.div_ceil(32)
            && of_slots.is_multiple_of(BITMAPS),
        "logits [{count}, {vocab}], {of_slots} bitmaps of {words} words"
    );
    if !takes(&logits) || !can_sample(&logits, of_slots / BITMAPS, max_len) {
        return portable::sample(logits, rows, bitmaps, max_len);
    }
    let (written, marked) = Dispatch::decode_sample(
        logits.into_dispatch(),
        taken(rows).into_dispatch(),
        taken(bitmaps).into_dispatch(),
        max_len,
    );
    (*rows, *bitmaps) = (
        Tensor::from_dispatch(written),
        Tensor::from_dispatch(marked),
    );
}

/// The log-likelihoods log(softmax(logits)\[token\]), f32 `[rows]`, of `tokens` `[rows]`, in i32,
/// under logits [rows, vocab]: 0 for negative tokens, NaN for tokens outside the vocabulary.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn log_likelihoods(logits: Tensor<2>, tokens: Tensor<1, Int>) -> Tensor<1> {
    let ([rows, vocab], [count]) = (logits.dims(), tokens.dims());
    assert!(rows == count, "{count} tokens under {rows} rows of logits");
    if !takes(&logits) {
        return portable::log_likelihoods(logits, tokens, vocab);
    }
    Tensor::from_dispatch(Dispatch::decode_log_likelihoods(
        logits.into_dispatch(),
        tokens.into_dispatch(),
    ))
}

/// Returns true if the logits' device, which has the parts of a step, can sample from a vocabulary
/// of this size.
#[cfg_attr(
    not(feature = "cubecl-runtime"),
    allow(unused_variables, reason = "the host has no limit")
)]
fn can_sample(logits: &Tensor<2>, slots: usize, max_len: usize) -> bool {
    #[cfg(feature = "cubecl-runtime")]
    if let Some(client) = crate::ops::cube::client(&logits.device()) {
        use crate::kernels::sample::{SampleShape, check_device};
        let ([rows, vocab], dtype) = (
            logits.dims(),
            activation_dtype(logits.dtype()).unwrap_or(ActivationDtype::F32),
        );
        let checked = check_device(
            &client,
            &SampleShape {
                rows,
                vocab,
                slots,
                max_len,
                dtype,
            },
        );
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
