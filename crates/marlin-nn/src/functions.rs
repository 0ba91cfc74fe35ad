//! The operations of a decode step as functions on tensors. The device of the tensors determines
//! the implementation.
//!
//! | device | implementation |
//! |---|---|
//! | a CubeCL runtime with integers of 64 bits and arithmetic in the activations' dtype | kernels |
//! | Flex | Rust on the host |
//! | others, and every device with autodiff | Burn's operations, which read the rows to the host |

use crate::attention_parts::AttentionParts;
use crate::cache::{CacheFormat, CacheShape, LayerCache};
use crate::device::{is_flex, takes};
use crate::kernels::SequenceState;
use crate::kernels::attention::AttentionPass;
use crate::kernels::sample::{LOGPROB_WORDS, TokenTable};
use crate::ops::DecodeBackend;
use crate::portable;
use burn::backend::Dispatch;
use burn::tensor::kind::Basic;
use burn::tensor::{FloatDType, Int, Tensor};
use burn_marlin::backend::activation_dtype;
use marlin_kernels::{ActivationDtype, Epilogue};

/// Returns the RMSNorm (arXiv 1910.07467) of `x` [.., hidden] over its last dimension: `x /
/// sqrt(mean(x^2) + epsilon) * weight`, in the shape and dtype of `x`.
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

/// Returns the RMSNorm of `residual + x`, and the sum `residual + x`. The sum is rounded to the
/// dtype before it is normalised.
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

/// Applies an epilogue to the output of a matmul. With a gated epilogue, the first half of the last
/// dimension of `out` [.., 2 * features] has gates, the second half ups, and the result is
/// [.., features].
pub fn apply<const D: usize>(epilogue: Epilogue, out: Tensor<D>) -> Tensor<D> {
    if !epilogue.is_gated() {
        return out;
    }
    if takes(&out) {
        let out = Dispatch::decode_gated(out.into_dispatch(), epilogue);
        return Tensor::from_dispatch(out);
    }
    portable::gated(epilogue, out)
}

/// Returns the embeddings [rows, hidden] of the rows' tokens from `table` [vocab, hidden]. Skipped
/// rows, and rows whose token is outside the vocabulary, get zeros.
pub fn embed(table: Tensor<2>, rows: &Tensor<2, Int>) -> Tensor<2> {
    if takes(&table) {
        return Tensor::from_dispatch(Dispatch::decode_embed(
            table.into_dispatch(),
            rows.clone().into_dispatch(),
        ));
    }
    portable::embed(table, rows)
}

/// Multiplies the matrices of a prompt's attention: [batch, heads, M, K] times [batch, heads, K,
/// N].
///
/// The product runs in Burn's matmul, but on CUDA in 16 bits it always runs in one of Burn's
/// kernels for tensor cores. [`Tensor::matmul`] would compile and time all of its kernels, which
/// takes minutes on an H200 for the first prompt (one kernel alone compiles for 70 s).
/// [`Tensor::matmul`] would also keep the fastest kernel for other lengths, and in Burn 0.22.1 some
/// kernels fail for those lengths.
pub fn matmul(lhs: Tensor<4>, rhs: Tensor<4>) -> Tensor<4> {
    if takes(&lhs) && lhs.dtype() == rhs.dtype() {
        return Tensor::from_dispatch(Dispatch::decode_matmul(
            lhs.into_dispatch(),
            rhs.into_dispatch(),
        ));
    }
    lhs.matmul(rhs)
}

/// Returns the attention of a step, [rows, heads * head_dim]. The function normalises the queries
/// and keys of `qkv` [rows, (heads + 2 * kv_heads) * head_dim], rotates them by each row's
/// position, writes keys and values to the cache, and attends to the positions of each row's slot
/// up to the row's own position.
///
/// `arrival_counters` are zeros [rows, heads] ([`words`](crate::words)) and are zero again after
/// the call. The output of skipped rows is undefined. No two rows may have the same slot.
///
/// In a [recorded](burn::tensor::capture) pass, `rows` and the cached keys and values before each
/// row's position must be complete before the pass begins. Kernels that
/// [overlap](marlin_kernels::pdl) read `rows` and the cache while earlier kernels of the pass still
/// run. A recording therefore contains exactly one step.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn attention(
    qkv: Tensor<2>,
    rows: &Tensor<2, Int>,
    cache: LayerCache<'_>,
    arrival_counters: &Tensor<2, Int>,
    parts: &AttentionParts,
) -> Tensor<2> {
    attend(
        AttentionPass::Step,
        qkv,
        rows,
        cache,
        arrival_counters,
        parts,
    )
}

/// Returns the attention of the tokens of prompts, as [`attention`] does for a step. The rows of a
/// slot must be in the order of their positions.
///
/// `tiles` is the table of the rows' tiles ([`tiles`](crate::tiles)), i32 [tiles,
/// [`TILE_WORDS`](crate::TILE_WORDS)].
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

/// Returns the attention of a pass. `words` are the arrival counters of a step, or the tiles of
/// prompts.
fn attend(
    pass: AttentionPass,
    qkv: Tensor<2>,
    rows: &Tensor<2, Int>,
    cache: LayerCache<'_>,
    words: &Tensor<2, Int>,
    parts: &AttentionParts,
) -> Tensor<2> {
    let [count, columns] = qkv.dims();
    let cache_shape = cache.shape();
    let CacheShape {
        kv_heads, head_dim, ..
    } = cache_shape;
    let heads = parts.heads;
    assert!(
        columns == (heads + 2 * kv_heads) * head_dim
            && rows.dims() == [count, SequenceState::WORDS]
            && cache.values.dims() == cache.keys.dims(),
        "{columns} features do not fit {heads} heads, {kv_heads} of keys, of {head_dim}"
    );
    let [cos, sin] = &parts.rope;
    let dtype = activation_dtype(qkv.dtype()).unwrap_or(ActivationDtype::F32);
    let shape = parts.shape(pass, count, cache_shape, dtype);
    if !takes(&qkv) || shape.check().is_err() {
        assert!(
            cache_shape.format == CacheFormat::Activations,
            "a KV cache in e4m3 needs a device with kernels, and activations in f16 or bf16"
        );
        return portable::attention(qkv, rows, cache, parts);
    }
    let norm = |index: usize| {
        parts
            .norms
            .as_ref()
            .map(|(weights, _)| weights[index].clone().into_dispatch())
            .into()
    };
    let sinks = parts.sinks.as_ref();
    let sinks = sinks.map(|sinks| sinks.clone().cast(FloatDType::from(qkv.dtype())));
    let wide = |index: usize| {
        let workspace = cache.workspace.map(|workspace| workspace[index].clone());
        workspace.map(Tensor::into_dispatch).into()
    };
    let (out, keys, values) = Dispatch::decode_attention(
        qkv.into_dispatch(),
        rows.clone().into_dispatch(),
        taken(cache.keys).into_dispatch(),
        taken(cache.values).into_dispatch(),
        wide(0),
        wide(1),
        cache
            .pages
            .map(|pages| pages.entries.clone().into_dispatch())
            .into(),
        cos.clone().into_dispatch(),
        sin.clone().into_dispatch(),
        norm(0),
        norm(1),
        sinks.map(Tensor::into_dispatch).into(),
        words.clone().into_dispatch(),
        shape,
    );
    (*cache.keys, *cache.values) = (Tensor::from_dispatch(keys), Tensor::from_dispatch(values));
    Tensor::from_dispatch(out)
}

/// Returns a tensor for an operation that writes it in place. The caller replaces `tensor` by the
/// result of the operation.
///
/// On Flex, an operation writes in place only if it holds the sole reference to the memory, so
/// `tensor` is extracted. Kernels write in place even if other tensors share the memory, so
/// `tensor` is cloned for other devices. There, [`Tensor::extract`] would leave a tensor of no
/// elements, whose allocation can be refused while a graph is recorded.
fn taken<const D: usize, K: Basic>(tensor: &mut Tensor<D, K>) -> Tensor<D, K> {
    if is_flex(&tensor.device()) {
        tensor.extract()
    } else {
        tensor.clone()
    }
}

/// Chooses the next token of each row from logits [rows, vocab], as documented in
/// [`kernels::sample`](crate::kernels::sample). The function writes the token and the next
/// position, or the status in which the sequence ended, to the row.
///
/// `token_table` has the layout [`TokenTable`]; the chosen tokens are added to it.
///
/// `max_len` is the number of positions of the context window.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn sample(
    logits: Tensor<2>,
    rows: &mut Tensor<2, Int>,
    token_table: &mut Tensor<2, Int>,
    max_len: usize,
) {
    let ([count, vocab], [table_rows, words]) = (logits.dims(), token_table.dims());
    assert!(
        rows.dims() == [count, SequenceState::WORDS]
            && words == TokenTable::words(vocab)
            && table_rows.is_multiple_of(TokenTable::ROWS),
        "logits [{count}, {vocab}], a token table [{table_rows}, {words}]"
    );
    if !takes(&logits) || !can_sample(&logits, table_rows / TokenTable::ROWS, max_len) {
        return portable::sample(logits, rows, token_table, max_len);
    }
    let (written, marked) = Dispatch::decode_sample(
        logits.into_dispatch(),
        taken(rows).into_dispatch(),
        taken(token_table).into_dispatch(),
        max_len,
    );
    (*rows, *token_table) = (
        Tensor::from_dispatch(written),
        Tensor::from_dispatch(marked),
    );
}

/// Writes the log probabilities of the tokens that [`sample`] chose for `rows` from logits
/// [rows, vocab], and of the most likely tokens, for the rows that ask for them
/// ([`SequenceState::logprobs`]). `out` is an i32 tensor [rows, [`LOGPROB_WORDS`]];
/// [`start_reading_logprobs`](crate::start_reading_logprobs) copies it to the host.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn logprobs(logits: Tensor<2>, rows: &Tensor<2, Int>, out: &mut Tensor<2, Int>) {
    let [count, vocab] = logits.dims();
    assert!(
        rows.dims() == [count, SequenceState::WORDS] && out.dims() == [count, LOGPROB_WORDS],
        "logits [{count}, {vocab}], rows {:?}, log probabilities {:?}",
        rows.dims(),
        out.dims()
    );
    if !takes(&logits) || !can_sample(&logits, 1, usize::MAX) {
        return portable::logprobs(logits, rows, out);
    }
    let written = Dispatch::decode_logprobs(
        logits.into_dispatch(),
        rows.clone().into_dispatch(),
        taken(out).into_dispatch(),
    );
    *out = Tensor::from_dispatch(written);
}

/// Returns the log-likelihoods log(softmax(logits)\[token\]), f32 `[rows]`, of `tokens`, i32
/// `[rows]`, under `logits` [rows, vocab]. The result is 0 for negative tokens, and NaN for tokens
/// outside the vocabulary.
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

/// Returns true if the device of `logits` can sample from a vocabulary of this size. The device
/// must run the operations of a step as kernels or in Rust ([`takes`]).
#[cfg_attr(
    not(feature = "cubecl-runtime"),
    allow(unused_variables, reason = "the host has no limit")
)]
fn can_sample(logits: &Tensor<2>, slots: usize, max_len: usize) -> bool {
    #[cfg(feature = "cubecl-runtime")]
    if let Some(client) = burn_marlin::device::client(&logits.device()) {
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
