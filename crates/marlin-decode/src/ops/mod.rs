//! The operations of a decode step as a Burn backend extension, for CubeCL's runtimes and for Flex.

#[cfg(feature = "cubecl-runtime")]
pub(crate) mod cube;
#[cfg(feature = "flex")]
mod flex;
pub(crate) mod portable;

use crate::kernels::attention::AttentionShape;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
use burn::tensor::Shape;
use burn_marlin::backend::{OptionalFloat, OptionalFloatMetadata, QuantTensors, QuantTensorsMetadata, linear_shape};
use marlin_format::WeightDescriptor;

/// The operations of a backend with the kernels of a decode step.
///
/// Operations that return a tensor which they took write it in place, and where it is a cache or a step's state, whoever else holds it: recorded
/// graphs read and write that very memory. The functions of this crate check shapes and choose; backends assume them.
#[backend_extension(
    Cube: cfg(feature = "cubecl-runtime"),
    Flex: cfg(feature = "flex"),
    Fusion
)]
pub trait DecodeBackend: Backend {
    /// RMSNorm over the last dimension.
    #[fusion(dtype = x, shape = x)]
    fn decode_rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self>;

    /// The norm of `residual + x`, and that sum.
    #[fusion(meta = |x: &TensorSpec, _: &TensorSpec, _: &TensorSpec, _: &f64| (x.clone(), x.clone()))]
    fn decode_add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// A linear layer of the norm of `residual + x`, and that sum.
    #[fusion(meta = norm_linear_spec)]
    fn decode_norm_linear(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        norm: FloatTensor<Self>,
        epsilon: f64,
        #[extension_type] weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        #[extension_type] bias: OptionalFloat<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// SiLU of the first half of the last dimension times the second half.
    #[fusion(meta = half_spec)]
    fn decode_silu_mul(gate_up: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The rows of a table that a step's tokens name.
    #[fusion(meta = embed_spec)]
    fn decode_embed(table: FloatTensor<Self>, rows: IntTensor<Self>) -> FloatTensor<Self>;

    /// Rows times a float weight [K, N].
    #[fusion(meta = product_spec)]
    fn decode_head(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Products of batches of matrices.
    #[fusion(meta = product_spec)]
    fn decode_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self>;

    /// `new` [1, kv_heads, seq, head_dim] at a slot and position of a cache.
    #[fusion(meta = |cache: &TensorSpec, _: &TensorSpec, _: &usize, _: &usize| cache.clone())]
    fn decode_write_cache(cache: FloatTensor<Self>, new: FloatTensor<Self>, slot: usize, start: usize) -> FloatTensor<Self>;

    /// Words of a step's state, from word `first` on.
    #[fusion(meta = |state: &TensorSpec, _: &usize, _: &Vec<i32>| state.clone())]
    fn decode_write_words(state: IntTensor<Self>, first: usize, words: Vec<i32>) -> IntTensor<Self>;

    /// Attention of a step; the output, the keys and the values.
    #[fusion(meta = attention_spec)]
    #[allow(clippy::too_many_arguments, reason = "as many as attention has")]
    fn decode_attention(
        qkv: FloatTensor<Self>,
        rows: IntTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        #[extension_type] q_norm: OptionalFloat<Self>,
        #[extension_type] k_norm: OptionalFloat<Self>,
        tickets: IntTensor<Self>,
        shape: AttentionShape,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// The next token of each row; the rows and the bitmaps of the tokens that each slot has seen.
    #[fusion(meta = |_: &TensorSpec, rows: &TensorSpec, seen: &TensorSpec, _: &usize| (rows.clone(), seen.clone()))]
    fn decode_sample(
        logits: FloatTensor<Self>,
        rows: IntTensor<Self>,
        seen: IntTensor<Self>,
        max_len: usize,
    ) -> (IntTensor<Self>, IntTensor<Self>);
}

fn norm_linear_spec(
    x: &TensorSpec,
    _residual: &TensorSpec,
    _norm: &TensorSpec,
    _epsilon: &f64,
    _weight: &QuantTensorsMetadata,
    descriptor: &WeightDescriptor,
    _bias: &OptionalFloatMetadata,
) -> (TensorSpec, TensorSpec) {
    (TensorSpec::new(linear_shape(&x.shape, descriptor.n), x.dtype), x.clone())
}

fn half_spec(gate_up: &TensorSpec) -> TensorSpec {
    TensorSpec::new(linear_shape(&gate_up.shape, gate_up.shape[gate_up.shape.rank() - 1] / 2), gate_up.dtype)
}

fn product_spec(lhs: &TensorSpec, rhs: &TensorSpec) -> TensorSpec {
    TensorSpec::new(linear_shape(&lhs.shape, rhs.shape[rhs.shape.rank() - 1]), lhs.dtype)
}

fn embed_spec(table: &TensorSpec, rows: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([rows.shape[0], table.shape[1]]), table.dtype)
}

#[allow(clippy::too_many_arguments, reason = "those of the operation")]
fn attention_spec(
    qkv: &TensorSpec,
    _rows: &TensorSpec,
    keys: &TensorSpec,
    values: &TensorSpec,
    _cos: &TensorSpec,
    _sin: &TensorSpec,
    _q_norm: &OptionalFloatMetadata,
    _k_norm: &OptionalFloatMetadata,
    _tickets: &TensorSpec,
    shape: &AttentionShape,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    let out = TensorSpec::new(Shape::new([shape.rows, shape.heads * shape.head_dim]), qkv.dtype);
    (out, keys.clone(), values.clone())
}
