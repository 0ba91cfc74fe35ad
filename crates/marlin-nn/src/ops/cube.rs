//! The operations of a decode step on CubeCL runtimes.

mod attention;
mod linear;

use super::DecodeBackend;
use crate::kernels::attention::{AttentionPass, AttentionShape};
use crate::kernels::sample::{self, LogprobArgs, SampleArgs, SampleShape, TokenTable};
use crate::kernels::{
    self, CacheShape, EmbedArgs, GatedArgs, LikelihoodArgs, RmsNormArgs, RowsShape,
};
use attention::AttentionTensors;
use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::FusionTensor;
use burn_marlin::backend::cube::{self, Reading, buffer, empty, launched};
use burn_marlin::backend::{OptionalFloat, OptionalInt, QuantTensors, activation_dtype};
use bytemuck::cast_slice;
use cubecl::bytes::Bytes;
use cubecl::prelude::BufferArg;
use cubecl::server::ServerError;
use linear::{Normed, float_linear, norm_float_linear, norm_linear};
use marlin_format::WeightDescriptor;
use marlin_kernels::{ActivationDtype, Epilogue, Runtime, Target};

impl DecodeBackend for CubeBackend {
    fn decode_rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        norm(x, None, weight, epsilon)
    }

    fn decode_add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let residual = into_contiguous(residual);
        let residual = if residual.can_mut() {
            residual
        } else {
            residual.copy()
        };
        (norm(x, Some(&residual), weight, epsilon), residual)
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
        let normed = Normed {
            x,
            residual,
            norm,
            epsilon,
        };
        launched(norm_linear(
            normed,
            weight.into(),
            &descriptor,
            bias.into_option(),
            epilogue,
        ))
    }

    fn decode_gated(gate_up: FloatTensor<Self>, epilogue: Epilogue) -> FloatTensor<Self> {
        let gate_up = into_contiguous(gate_up);
        let mut shape = gate_up.shape();
        let last = shape.rank() - 1;
        shape[last] /= 2;
        let out = empty(&gate_up, shape, gate_up.dtype);
        let (client, shape) = (gate_up.client.clone(), rows_shape(&out));
        launched(kernels::gated(
            &client,
            &shape,
            epilogue,
            GatedArgs {
                gate_up: buffer(gate_up),
                out: buffer(out.clone()),
            },
        ));
        out
    }

    fn decode_embed(table: FloatTensor<Self>, rows: IntTensor<Self>) -> FloatTensor<Self> {
        let [vocab, features] = table.shape().dims();
        let out = empty(&table, Shape::new([rows.shape()[0], features]), table.dtype);
        let (client, shape) = (table.client.clone(), rows_shape(&out));
        let args = EmbedArgs {
            table: buffer(table),
            row_state: buffer(rows),
            out: buffer(out.clone()),
        };
        launched(kernels::embed(&client, &shape, vocab, args));
        out
    }

    fn decode_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: OptionalFloat<Self>,
    ) -> FloatTensor<Self> {
        launched(float_linear(x, weight, bias.into_option()))
    }

    fn decode_norm_float_linear(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        norm: FloatTensor<Self>,
        epsilon: f64,
        weight: FloatTensor<Self>,
        bias: OptionalFloat<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let normed = Normed {
            x,
            residual,
            norm,
            epsilon,
        };
        launched(norm_float_linear(normed, weight, bias.into_option()))
    }

    fn decode_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let dtype = lhs.dtype;
        if Target::of(&lhs.client).runtime != Runtime::Cuda || dtype.size() != 2 {
            return Self::float_matmul(lhs, rhs);
        }
        matmul(lhs.clone(), rhs.clone(), None, MatmulStrategy::Cube, dtype).unwrap_or_else(|error| {
            tracing::debug!(?error, lhs = ?lhs.shape(), rhs = ?rhs.shape(), "Burn chooses another matmul");
            Self::float_matmul(lhs, rhs)
        })
    }

    fn decode_write_cache(
        cache: FloatTensor<Self>,
        new: FloatTensor<Self>,
        pages: OptionalInt<Self>,
        cache_shape: CacheShape,
        slot: usize,
        start: usize,
    ) -> FloatTensor<Self> {
        let (client, shape) = (new.client.clone(), rows_shape(&new));
        launched(kernels::write_cache(
            &client,
            &shape,
            &cache_shape,
            [slot, start],
            buffer(new),
            in_place(&cache),
            pages.into_option().map(buffer),
        ));
        cache
    }

    fn decode_write_words(
        state: IntTensor<Self>,
        first: usize,
        words: Vec<i32>,
    ) -> IntTensor<Self> {
        let after = state.shape().num_elements() - first - words.len();
        let handle = state
            .handle
            .clone()
            .offset_start(4 * first as u64)
            .offset_end(4 * after as u64);
        state
            .client
            .write(&handle, Bytes::from_bytes_vec(cast_slice(&words).to_vec()));
        state
    }

    fn decode_attention(
        qkv: FloatTensor<Self>,
        rows: IntTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        wide_keys: OptionalFloat<Self>,
        wide_values: OptionalFloat<Self>,
        pages: OptionalInt<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        q_norm: OptionalFloat<Self>,
        k_norm: OptionalFloat<Self>,
        sinks: OptionalFloat<Self>,
        words: IntTensor<Self>,
        shape: AttentionShape,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let operands = AttentionTensors {
            qkv,
            rows,
            keys,
            values,
            workspace: wide_keys.into_option().zip(wide_values.into_option()),
            pages: pages.into_option(),
            cos,
            sin,
            norms: [q_norm, k_norm].map(OptionalFloat::into_option),
            sinks: sinks.into_option(),
        };
        let out = match shape.pass {
            AttentionPass::Step => operands.step(words, &shape),
            AttentionPass::Prompt => operands.prompt(words, &shape),
        };
        (launched(out), operands.keys, operands.values)
    }

    fn decode_log_likelihoods(
        logits: FloatTensor<Self>,
        tokens: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let logits = into_contiguous(logits);
        let (client, shape) = (logits.client.clone(), rows_shape(&logits));
        let out = empty(&logits, Shape::new([shape.rows]), DType::F32);
        let args = LikelihoodArgs {
            logits: buffer(logits),
            tokens: buffer(tokens),
            out: buffer(out.clone()),
        };
        launched(kernels::log_likelihoods(&client, &shape, args));
        out
    }

    fn decode_sample(
        logits: FloatTensor<Self>,
        rows: IntTensor<Self>,
        token_table: IntTensor<Self>,
        max_len: usize,
    ) -> (IntTensor<Self>, IntTensor<Self>) {
        let [count, vocab] = logits.shape().dims();
        let shape = SampleShape {
            rows: count,
            vocab,
            slots: token_table.shape()[0] / TokenTable::ROWS,
            max_len,
            dtype: dtype_of(&logits),
        };
        let workspace = empty(
            &logits,
            Shape::new([sample::workspace_words(&shape).max(1)]),
            DType::I32,
        );
        let client = logits.client.clone();
        let args = SampleArgs {
            logits: buffer(logits),
            state: in_place(&rows),
            token_table: in_place(&token_table),
            workspace: buffer(workspace),
        };
        launched(sample::sample(&client, &shape, args));
        (rows, token_table)
    }

    fn decode_logprobs(
        logits: FloatTensor<Self>,
        rows: IntTensor<Self>,
        out: IntTensor<Self>,
    ) -> IntTensor<Self> {
        let logits = into_contiguous(logits);
        let (client, shape) = (logits.client.clone(), rows_shape(&logits));
        let args = LogprobArgs {
            logits: buffer(logits),
            state: buffer(rows),
            out: in_place(&out),
        };
        launched(sample::logprobs(&client, &shape, args));
        out
    }
}

/// A copy of a tensor's words to the host, in progress.
pub(crate) struct WordsRead(Reading);

/// Starts copying an i32 tensor to the host, after the work that was submitted to its stream
/// before.
pub(crate) fn start_reading(tensor: FusionTensor<FusionCubeRuntime>) -> WordsRead {
    let client = tensor.client.clone();
    WordsRead(cube::start_reading(
        client.resolve_tensor_int::<CubeBackend>(tensor),
    ))
}

impl WordsRead {
    pub(crate) fn wait(self) -> Result<Vec<i32>, ServerError> {
        let bytes = self.0.wait()?;
        Ok(bytes
            .as_chunks()
            .0
            .iter()
            .map(|&word| i32::from_le_bytes(word))
            .collect())
    }
}

fn norm(
    x: CubeTensor,
    residual: Option<&CubeTensor>,
    weight: CubeTensor,
    epsilon: f64,
) -> CubeTensor {
    let x = into_contiguous(x);
    let out = empty(&x, x.shape(), x.dtype);
    let (client, shape) = (x.client.clone(), rows_shape(&x));
    let args = RmsNormArgs {
        x: buffer(x),
        residual: residual.map(in_place),
        weight: buffer(weight),
        out: buffer(out.clone()),
    };
    launched(kernels::rms_norm(&client, &shape, epsilon as f32, args));
    out
}

/// Returns true if a tensor's memory is aligned to 16 bytes, as vector loads require. A view into
/// another tensor may start anywhere.
fn is_aligned(tensor: &CubeTensor) -> bool {
    tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16)
}

/// Returns a contiguous tensor aligned to 16 bytes: `tensor` itself if it is one, otherwise a copy.
fn aligned(tensor: CubeTensor) -> CubeTensor {
    let tensor = into_contiguous(tensor);
    if is_aligned(&tensor) {
        tensor
    } else {
        tensor.copy()
    }
}

/// Returns the buffer of a tensor that a kernel writes in place.
///
/// # Panics
/// Panics if the tensor is not contiguous, because the kernel would then write to a copy.
fn in_place(tensor: &CubeTensor) -> BufferArg {
    assert!(
        tensor.is_contiguous(),
        "a tensor {:?} that is written in place must be contiguous",
        tensor.shape()
    );
    tensor.clone().into_buffer_arg()
}

/// Returns the shape of a tensor as rows of its last dimension.
fn rows_shape(tensor: &CubeTensor) -> RowsShape {
    let shape = tensor.shape();
    let features = shape[shape.rank() - 1];
    RowsShape {
        rows: shape.num_elements() / features.max(1),
        features,
        dtype: dtype_of(tensor),
    }
}

/// Returns the dtype of a tensor. The functions of this crate call the operations only with
/// activation dtypes.
fn dtype_of(tensor: &CubeTensor) -> ActivationDtype {
    activation_dtype(tensor.dtype).unwrap_or(ActivationDtype::F32)
}
