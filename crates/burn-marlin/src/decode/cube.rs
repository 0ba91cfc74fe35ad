//! The operations on CubeCL runtimes.

use super::ops::DecodeBackend;
use crate::ops::{
    OptionalFloat, W4A16Weight, activation_dtype, is_aligned, launch_linear, launched, linear_shape, tile_args, weight_problem,
};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{DispatchDevice, TensorMetadata};
use burn::tensor::{DType, Device, Shape};
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fusion::FusionTensor;
use bytemuck::cast_slice;
use cubecl::bytes::Bytes;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::ServerError;
use marlin_kernels::decode::attention::{self, AttentionArgs, AttentionPlan, AttentionShape, AttentionTarget};
use marlin_kernels::decode::sample::{self, SampleArgs, SampleShape};
use marlin_kernels::decode::{self, CacheShape, EmbedArgs, HeadArgs, RmsNormArgs, RowsShape, SiluMulArgs};
use marlin_kernels::marlin::Card;
use marlin_kernels::marlin::gemv::{self, NormMatmulArgs};
use marlin_kernels::{ActivationDtype, KernelError, WeightLayout};
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{LazyLock, Mutex, PoisonError};

impl DecodeBackend for CubeBackend {
    fn decode_rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self> {
        norm(x, None, weight, epsilon)
    }

    fn decode_add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let residual = into_contiguous(residual);
        let residual = if residual.can_mut() { residual } else { residual.copy() };
        (norm(x, Some(&residual), weight, epsilon), residual)
    }

    fn decode_add_norm_linear(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        norm: FloatTensor<Self>,
        epsilon: f64,
        weight: W4A16Weight<Self>,
        bias: OptionalFloat<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        launched(add_norm_linear(x, residual, norm, epsilon, weight, bias.into_option()))
    }

    fn decode_silu_mul(gate_up: FloatTensor<Self>) -> FloatTensor<Self> {
        let gate_up = into_contiguous(gate_up);
        let mut shape = gate_up.shape();
        let last = shape.rank() - 1;
        shape[last] /= 2;
        let out = empty(&gate_up, shape, gate_up.dtype);
        let (client, shape) = (gate_up.client.clone(), rows_shape(&out));
        launched(decode::silu_mul(&client, &shape, SiluMulArgs { gate_up: buffer(gate_up), out: buffer(out.clone()) }));
        out
    }

    fn decode_embed(table: FloatTensor<Self>, rows: IntTensor<Self>) -> FloatTensor<Self> {
        let [vocab, features] = table.shape().dims();
        let out = empty(&table, Shape::new([rows.shape()[0], features]), table.dtype);
        let (client, shape) = (table.client.clone(), rows_shape(&out));
        let args = EmbedArgs { table: buffer(table), row_state: buffer(rows), out: buffer(out.clone()) };
        launched(decode::embed(&client, &shape, vocab, args));
        out
    }

    fn decode_head(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let ([rows, features], [_, columns]) = (x.shape().dims(), weight.shape().dims());
        let most = decode::max_head_rows(&x.client, features, dtype_of(&x));
        let x = into_contiguous(x);
        if rows > most || **weight.meta.strides() != [1, features] || !is_aligned(&x) || !is_aligned(&weight) {
            return Self::float_matmul(x, weight);
        }
        let out = empty(&x, Shape::new([rows, columns]), x.dtype);
        let (client, shape) = (x.client.clone(), rows_shape(&x));
        // Its strides say that the transposed tensor is contiguous.
        let args = HeadArgs { x: buffer(x), weight: weight.into_buffer_arg(), out: buffer(out.clone()) };
        launched(decode::head(&client, &shape, columns, args));
        out
    }

    fn decode_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let dtype = lhs.dtype;
        matmul(lhs.clone(), rhs.clone(), None, MatmulStrategy::Cube, dtype).unwrap_or_else(|error| {
            tracing::debug!(?error, lhs = ?lhs.shape(), rhs = ?rhs.shape(), "Burn chooses another matmul");
            Self::float_matmul(lhs, rhs)
        })
    }

    fn decode_write_cache(cache: FloatTensor<Self>, new: FloatTensor<Self>, slot: usize, start: usize) -> FloatTensor<Self> {
        let [slots, kv_heads, max_len, head_dim] = cache.shape().dims();
        let cache_shape = CacheShape { slots, kv_heads, max_len, head_dim };
        let (client, shape) = (new.client.clone(), rows_shape(&new));
        launched(decode::write_cache(&client, &shape, &cache_shape, [slot, start], buffer(new), in_place(&cache)));
        cache
    }

    fn decode_write_words(state: IntTensor<Self>, first: usize, words: Vec<i32>) -> IntTensor<Self> {
        let after = state.shape().num_elements() - first - words.len();
        let handle = state.handle.clone().offset_start(4 * first as u64).offset_end(4 * after as u64);
        state.client.write(&handle, Bytes::from_bytes_vec(cast_slice(&words).to_vec()));
        state
    }

    fn decode_attention(
        qkv: FloatTensor<Self>,
        rows: IntTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        q_norm: OptionalFloat<Self>,
        k_norm: OptionalFloat<Self>,
        tickets: IntTensor<Self>,
        shape: AttentionShape,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let client = qkv.client.clone();
        let plan = launched(AttentionPlan::new(&shape, &AttentionTarget::of(&client)));
        let out = empty(&qkv, Shape::new([shape.rows, shape.heads * shape.head_dim]), qkv.dtype);
        let partials = empty(&qkv, Shape::new([plan.partials().max(1)]), DType::F32);
        let args = AttentionArgs {
            qkv: buffer(qkv),
            state: buffer(rows),
            keys: in_place(&keys),
            values: in_place(&values),
            cos: buffer(cos),
            sin: buffer(sin),
            q_norm: q_norm.into_option().map(buffer),
            k_norm: k_norm.into_option().map(buffer),
            out: buffer(out.clone()),
            partials: buffer(partials),
            tickets: in_place(&tickets),
        };
        launched(attention::attention(&client, &shape, args));
        (out, keys, values)
    }

    fn decode_sample(
        logits: FloatTensor<Self>,
        rows: IntTensor<Self>,
        seen: IntTensor<Self>,
        max_len: usize,
    ) -> (IntTensor<Self>, IntTensor<Self>) {
        let [count, vocab] = logits.shape().dims();
        let shape = SampleShape { rows: count, vocab, slots: seen.shape()[0], max_len, dtype: dtype_of(&logits) };
        let workspace = empty(&logits, Shape::new([sample::workspace_words(&shape).max(1)]), DType::I32);
        let client = logits.client.clone();
        let args = SampleArgs { logits: buffer(logits), state: in_place(&rows), seen: in_place(&seen), workspace: buffer(workspace) };
        launched(sample::sample(&client, &shape, args));
        (rows, seen)
    }
}

/// The client of a CubeCL device without autodiff.
#[allow(unreachable_patterns, reason = "without Flex there are CubeCL devices alone")]
pub(super) fn client(device: &Device) -> Option<Client> {
    match device.as_dispatch() {
        DispatchDevice::Cube(cube) => Some(cube.client()),
        _ => None,
    }
}

type Reading = Pin<Box<dyn Future<Output = Result<Vec<Bytes>, ServerError>> + Send>>;

/// Words of a tensor on their way to the host.
pub(super) struct WordsRead(Option<Reading>);

/// Starts to copy a tensor of i32 without gaps to the host, after the work that was given to its stream before.
pub(super) fn start_reading(tensor: FusionTensor<FusionCubeRuntime>) -> WordsRead {
    let client = tensor.client.clone();
    let tensor = client.resolve_tensor_int::<CubeBackend>(tensor);
    WordsRead(Some(Box::pin(kept_client(&tensor).read_async(vec![tensor.handle]))))
}

/// The client of a tensor's device, kept to the end of the program: what [`Client::read_async`] gives borrows the client, and outlives the tensor.
fn kept_client(tensor: &CubeTensor) -> &'static Client {
    static CLIENTS: LazyLock<Mutex<HashMap<CubeDevice, &'static Client>>> = LazyLock::new(Mutex::default);
    let mut clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
    clients.entry(tensor.device.clone()).or_insert_with(|| Box::leak(Box::new(tensor.client.clone())))
}

impl WordsRead {
    pub(super) fn wait(mut self) -> Result<Vec<i32>, ServerError> {
        let Some(reading) = self.0.take() else { return Ok(Vec::new()) };
        let bytes = cubecl::future::block_on(reading)?;
        let words = bytes.iter().flat_map(|bytes| bytes.chunks_exact(4));
        Ok(words.map(|word| i32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect())
    }
}

impl Drop for WordsRead {
    fn drop(&mut self) {
        // cubecl-wgpu 0.11.3 copies into a buffer again that a read has mapped which nobody waited for, and the device is lost.
        if let Some(reading) = self.0.take()
            && let Err(error) = cubecl::future::block_on(reading)
        {
            tracing::debug!(?error, "a read that nobody waited for failed");
        }
    }
}

fn norm(x: CubeTensor, residual: Option<&CubeTensor>, weight: CubeTensor, epsilon: f64) -> CubeTensor {
    let x = into_contiguous(x);
    let out = empty(&x, x.shape(), x.dtype);
    let (client, shape) = (x.client.clone(), rows_shape(&x));
    let args = RmsNormArgs { x: buffer(x), residual: residual.map(in_place), weight: buffer(weight), out: buffer(out.clone()) };
    launched(decode::rms_norm(&client, &shape, epsilon as f32, args));
    out
}

/// One launch where [`gemv`] takes the problem; the norm and then the matmul elsewhere.
fn add_norm_linear(
    x: CubeTensor,
    residual: CubeTensor,
    norm_weight: CubeTensor,
    epsilon: f64,
    weight: W4A16Weight<CubeBackend>,
    bias: Option<CubeTensor>,
) -> Result<(CubeTensor, CubeTensor), KernelError> {
    let (x, residual, norm_weight) = (into_contiguous(x), into_contiguous(residual), into_contiguous(norm_weight));
    let out_shape = linear_shape(&x.shape(), weight.n);
    let problem = weight_problem(&weight, x.shape().num_elements() / weight.k, x.dtype)?;
    let client = x.client.clone();
    let fits = weight.layout == WeightLayout::Tile
        && [&x, &residual, &norm_weight].into_iter().all(|tensor| is_aligned(tensor) && tensor.dtype == x.dtype);
    let blocks = Card::of(&client).filter(|_| fits).and_then(|card| gemv::plan(&problem, &card));
    let Some(blocks) = blocks else {
        let (normalised, sum) = CubeBackend::decode_add_rms_norm(x, residual, norm_weight, epsilon);
        return Ok((launch_linear(normalised, weight, bias, out_shape)?, sum));
    };
    let (out, sum) = (empty(&x, out_shape, x.dtype), empty(&x, x.shape(), x.dtype));
    let args = NormMatmulArgs {
        x: x.into_buffer_arg(),
        residual: residual.into_buffer_arg(),
        norm: norm_weight.into_buffer_arg(),
        sum: sum.clone().into_buffer_arg(),
        weight: tile_args(weight.words, weight.scales, weight.zero_points),
        bias: bias.map(buffer),
        out: out.clone().into_buffer_arg(),
    };
    gemv::norm_matmul(&client, &problem, blocks, epsilon as f32, args)?;
    Ok((out, sum))
}

fn empty(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype)
}

fn buffer(tensor: CubeTensor) -> BufferArg {
    into_contiguous(tensor).into_buffer_arg()
}

/// A tensor that is written: a copy would be written in its place.
fn in_place(tensor: &CubeTensor) -> BufferArg {
    assert!(tensor.is_contiguous(), "a tensor {:?} that is written in place must be contiguous", tensor.shape());
    tensor.clone().into_buffer_arg()
}

/// A tensor as rows of its last dimension.
fn rows_shape(tensor: &CubeTensor) -> RowsShape {
    let shape = tensor.shape();
    let features = shape[shape.rank() - 1];
    RowsShape { rows: shape.num_elements() / features.max(1), features, dtype: dtype_of(tensor) }
}

/// The functions of [`decode`](super) let no other dtype come here.
fn dtype_of(tensor: &CubeTensor) -> ActivationDtype {
    activation_dtype(tensor.dtype).unwrap_or(ActivationDtype::F32)
}
