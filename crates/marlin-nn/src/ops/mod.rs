//! The operations of a decode step as a Burn backend extension, for CubeCL's runtimes and for Flex.

#[cfg(feature = "cubecl-runtime")]
pub(crate) mod cube;
#[cfg(feature = "flex")]
mod flex;

use crate::cache::CacheShape;
use crate::kernels::attention::AttentionShape;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
use burn::tensor::{DType, Shape};
use burn_marlin::backend::{
    OptionalFloat, OptionalFloatMetadata, OptionalInt, OptionalIntMetadata, QuantTensors,
    QuantTensorsMetadata, linear_shape,
};
use marlin_format::WeightDescriptor;
use marlin_kernels::Epilogue;

/// A backend with the operations of a decode step.
///
/// An operation that returns one of its operands writes the operand in place. A cache or a step's
/// state is written in place even if other tensors share its memory, because recorded graphs read
/// and write the same memory. Backends do not check shapes: the functions of this crate check
/// shapes before they call an operation.
#[backend_extension(
    Cube: cfg(feature = "cubecl-runtime"),
    Flex: cfg(feature = "flex"),
    Fusion
)]
pub trait DecodeBackend: Backend {
    /// Computes RMSNorm over the last dimension of `x`.
    #[fusion(dtype = x, shape = x)]
    fn decode_rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;

    /// Computes the RMSNorm of `residual + x`, and the sum `residual + x`.
    #[fusion(meta = |x: &TensorSpec, _: &TensorSpec, _: &TensorSpec, _: &f64| (x.clone(), x.clone()))]
    fn decode_add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Applies a linear layer and an epilogue to the RMSNorm of `residual + x`. Returns the output
    /// and the sum `residual + x`.
    #[fusion(meta = norm_linear_spec)]
    #[allow(
        clippy::too_many_arguments,
        reason = "the operands of a norm and of a linear layer"
    )]
    fn decode_norm_linear(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        norm: FloatTensor<Self>,
        epsilon: f64,
        #[extension_type] weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        #[extension_type] bias: OptionalFloat<Self>,
        epilogue: Epilogue,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Computes the outputs of a gated epilogue: the first half of the last dimension has gates,
    /// the second half ups.
    #[fusion(meta = half_spec)]
    fn decode_gated(gate_up: FloatTensor<Self>, epilogue: Epilogue) -> FloatTensor<Self>;

    /// Returns the rows of an embedding table [vocab, hidden] at the tokens of a step.
    #[fusion(meta = embed_spec)]
    fn decode_embed(table: FloatTensor<Self>, rows: IntTensor<Self>) -> FloatTensor<Self>;

    /// Multiplies rows `x` [M, K] by a float weight [K, N], and adds a bias `[N]`.
    #[fusion(meta = linear_spec)]
    fn decode_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: OptionalFloat<Self>,
    ) -> FloatTensor<Self>;

    /// Multiplies the RMSNorm of `residual + x` [M, K] by a float weight [K, N], and adds a bias
    /// `[N]`. Returns the output, the RMSNorm and the sum `residual + x`.
    #[fusion(meta = norm_float_linear_spec)]
    fn decode_norm_float_linear(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        norm: FloatTensor<Self>,
        epsilon: f64,
        weight: FloatTensor<Self>,
        #[extension_type] bias: OptionalFloat<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// Computes a batched matmul.
    #[fusion(meta = product_spec)]
    fn decode_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Writes `new` [1, kv_heads, seq, head_dim] to slot `slot` of a cache, from position `start`
    /// on. `pages` is the page table if the cache has pages.
    #[fusion(meta = |cache: &TensorSpec, _: &TensorSpec, _: &OptionalIntMetadata, _: &CacheShape, _: &usize, _: &usize| cache.clone())]
    fn decode_write_cache(
        cache: FloatTensor<Self>,
        new: FloatTensor<Self>,
        #[extension_type] pages: OptionalInt<Self>,
        shape: CacheShape,
        slot: usize,
        start: usize,
    ) -> FloatTensor<Self>;

    /// Writes words to a step's state, from word `first` on.
    #[fusion(meta = |state: &TensorSpec, _: &usize, _: &Vec<i32>| state.clone())]
    fn decode_write_words(state: IntTensor<Self>, first: usize, words: Vec<i32>)
    -> IntTensor<Self>;

    /// Computes the attention of a step or of prompts, as the pass of `shape` says. Returns the
    /// output, the keys and the values. `pages` is the page table if the cache has pages.
    /// `wide_keys` and `wide_values` are the workspace of prompts if the cache has another format
    /// than the activations; the operation writes it, and does not read what was there. `words` are
    /// the arrival counters of a step, or the tiles of prompts.
    #[fusion(meta = attention_spec)]
    #[allow(
        clippy::too_many_arguments,
        reason = "attention has this many operands"
    )]
    fn decode_attention(
        qkv: FloatTensor<Self>,
        rows: IntTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        #[extension_type] wide_keys: OptionalFloat<Self>,
        #[extension_type] wide_values: OptionalFloat<Self>,
        #[extension_type] pages: OptionalInt<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        #[extension_type] q_norm: OptionalFloat<Self>,
        #[extension_type] k_norm: OptionalFloat<Self>,
        #[extension_type] sinks: OptionalFloat<Self>,
        words: IntTensor<Self>,
        shape: AttentionShape,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// Computes the log-likelihood of a token under each row of logits, f32 `[rows]`.
    #[fusion(meta = |logits: &TensorSpec, _: &TensorSpec| TensorSpec::new(Shape::new([logits.shape[0]]), DType::F32))]
    fn decode_log_likelihoods(
        logits: FloatTensor<Self>,
        tokens: IntTensor<Self>,
    ) -> FloatTensor<Self>;

    /// Chooses the next token of each row. Returns the rows and the token table.
    #[fusion(meta = |_: &TensorSpec, rows: &TensorSpec, table: &TensorSpec, _: &usize| (rows.clone(), table.clone()))]
    fn decode_sample(
        logits: FloatTensor<Self>,
        rows: IntTensor<Self>,
        token_table: IntTensor<Self>,
        max_len: usize,
    ) -> (IntTensor<Self>, IntTensor<Self>);

    /// Writes the log probabilities of the chosen tokens, and of the most likely tokens, of the
    /// rows that ask for them. Returns `out`.
    #[fusion(meta = |_: &TensorSpec, _: &TensorSpec, out: &TensorSpec| out.clone())]
    fn decode_logprobs(
        logits: FloatTensor<Self>,
        rows: IntTensor<Self>,
        out: IntTensor<Self>,
    ) -> IntTensor<Self>;
}

#[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
fn norm_linear_spec(
    x: &TensorSpec,
    _residual: &TensorSpec,
    _norm: &TensorSpec,
    _epsilon: &f64,
    _weight: &QuantTensorsMetadata,
    descriptor: &WeightDescriptor,
    _bias: &OptionalFloatMetadata,
    epilogue: &Epilogue,
) -> (TensorSpec, TensorSpec) {
    (
        TensorSpec::new(
            linear_shape(&x.shape, descriptor.n / epilogue.columns()),
            x.dtype,
        ),
        x.clone(),
    )
}

fn linear_spec(x: &TensorSpec, weight: &TensorSpec, _bias: &OptionalFloatMetadata) -> TensorSpec {
    product_spec(x, weight)
}

fn norm_float_linear_spec(
    x: &TensorSpec,
    _residual: &TensorSpec,
    _norm: &TensorSpec,
    _epsilon: &f64,
    weight: &TensorSpec,
    _bias: &OptionalFloatMetadata,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    (product_spec(x, weight), x.clone(), x.clone())
}

fn half_spec(gate_up: &TensorSpec, _epilogue: &Epilogue) -> TensorSpec {
    TensorSpec::new(
        linear_shape(&gate_up.shape, gate_up.shape[gate_up.shape.rank() - 1] / 2),
        gate_up.dtype,
    )
}

fn product_spec(lhs: &TensorSpec, rhs: &TensorSpec) -> TensorSpec {
    TensorSpec::new(
        linear_shape(&lhs.shape, rhs.shape[rhs.shape.rank() - 1]),
        lhs.dtype,
    )
}

fn embed_spec(table: &TensorSpec, rows: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([rows.shape[0], table.shape[1]]), table.dtype)
}

#[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
fn attention_spec(
    qkv: &TensorSpec,
    _rows: &TensorSpec,
    keys: &TensorSpec,
    values: &TensorSpec,
    _wide_keys: &OptionalFloatMetadata,
    _wide_values: &OptionalFloatMetadata,
    _pages: &OptionalIntMetadata,
    _cos: &TensorSpec,
    _sin: &TensorSpec,
    _q_norm: &OptionalFloatMetadata,
    _k_norm: &OptionalFloatMetadata,
    _sinks: &OptionalFloatMetadata,
    _words: &TensorSpec,
    shape: &AttentionShape,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    let out = TensorSpec::new(
        Shape::new([shape.rows, shape.heads * shape.cache.head_dim]),
        qkv.dtype,
    );
    (out, keys.clone(), values.clone())
}
