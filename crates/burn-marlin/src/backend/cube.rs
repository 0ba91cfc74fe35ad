//! The operations on every CubeCL runtime.

use super::{
    OptionalFloat, QuantBackend, QuantTensors, activation_dtype, dequantize_adapted, linear_shape,
};
use crate::count::count_dequantized;
use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, FloatDType, Shape, Slice};
use burn_cubecl::kernel::{into_contiguous, into_contiguous_aligned};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl::bytes::Bytes;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::{CopyDescriptor, ServerError};
use marlin_format::{WeightDescriptor, WeightLayout, WeightTensors};
use marlin_kernels::problem::MAX_ELEMENTS;
use marlin_kernels::{
    ActivationDtype, Epilogue, KernelError, Operands, QuantProblem, Target, WeightBuffers, plan,
    repack,
};
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{LazyLock, Mutex, PoisonError};

impl QuantBackend for CubeBackend {
    fn quant_linear(
        x: FloatTensor<Self>,
        weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        bias: OptionalFloat<Self>,
    ) -> FloatTensor<Self> {
        launched(launch_linear(
            x,
            weight.into(),
            &descriptor,
            bias.into_option(),
            Epilogue::None,
        ))
    }

    fn quant_dequantize(
        weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        count_dequantized();
        launched(launch_dequantize(weight.into(), &descriptor, dtype.into()))
    }

    fn quant_dequantize_adapted(
        weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        scale: f64,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        dequantize_adapted(weight, descriptor, a, b, scale, dtype)
    }

    fn quant_repack(
        weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        to: WeightDescriptor,
    ) -> QuantTensors<Self> {
        launched(launch_repack(weight.into(), &descriptor, &to)).into()
    }
}

/// Unwraps the result of a launch.
///
/// # Panics
/// Panics if the launch was refused: backend operations have no way to return an error, and user
/// errors are checked before the operation.
pub fn launched<T>(result: Result<T, KernelError>) -> T {
    result.unwrap_or_else(|error| panic!("launch refused: {error}"))
}

/// Makes a tensor contiguous and returns it as a launch buffer.
pub fn buffer(tensor: CubeTensor) -> BufferArg {
    into_contiguous(tensor).into_buffer_arg()
}

/// Returns the tensors of a weight as launch buffers.
pub fn weight_buffers(weight: WeightTensors<CubeTensor>) -> WeightBuffers {
    weight.map(|_, tensor| buffer(tensor))
}

/// Allocates a contiguous tensor with uninitialised values on the device of `like`.
pub fn empty(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype)
}

type Copying = Pin<Box<dyn Future<Output = Result<Bytes, ServerError>> + Send>>;

/// A copy of a tensor's bytes to the host, in progress.
pub struct Reading(Option<Copying>);

/// Starts to copy a tensor to the host, after all work already submitted to its stream. The device
/// keeps the tensor until the copy is waited for.
pub fn start_reading(tensor: CubeTensor) -> Reading {
    let tensor = into_contiguous_aligned(tensor);
    let (shape, strides) = (tensor.meta.shape().clone(), tensor.meta.strides().clone());
    let (client, size) = (kept_client(&tensor), tensor.dtype.size());
    Reading(Some(Box::pin(client.read_one_tensor_async(
        CopyDescriptor::new(tensor.handle.binding(), shape, strides, size),
    ))))
}

/// Returns the client of a tensor's device with a static lifetime: the future of
/// [`Client::read_one_tensor_async`] borrows the client and outlives the tensor.
fn kept_client(tensor: &CubeTensor) -> &'static Client {
    static CLIENTS: LazyLock<Mutex<HashMap<CubeDevice, &'static Client>>> =
        LazyLock::new(Mutex::default);
    let mut clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
    clients
        .entry(tensor.device.clone())
        .or_insert_with(|| Box::leak(Box::new(tensor.client.clone())))
}

impl Reading {
    /// Waits for the copy and returns its bytes. The runtime allocates the memory of the bytes. On
    /// CUDA, the device can read this memory without a copy.
    ///
    /// # Errors
    /// The device failed. Kernels run asynchronously, so their faults are reported here.
    pub fn wait(mut self) -> Result<Bytes, ServerError> {
        self.0.take().map_or_else(
            || Ok(Bytes::from_bytes_vec(Vec::new())),
            cubecl::future::block_on,
        )
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        // If a read is not awaited, cubecl-wgpu 0.11.3 copies into its buffer again while the
        // buffer is still mapped, and the device is lost.
        if let Some(copying) = self.0.take()
            && let Err(error) = cubecl::future::block_on(copying)
        {
            tracing::debug!(?error, "a read that was not awaited failed");
        }
    }
}

/// Returns the problem of multiplying `m` rows of activations in a dtype with a weight.
///
/// # Errors
/// [`KernelError::Dtype`] for a dtype that no kernel takes.
pub fn weight_problem(
    weight: &WeightTensors<CubeTensor>,
    descriptor: &WeightDescriptor,
    m: usize,
    dtype: DType,
) -> Result<QuantProblem, KernelError> {
    let of = |dtype: DType, client: &Client| {
        activation_dtype(dtype).ok_or_else(|| KernelError::Dtype {
            runtime: Target::of(client).runtime,
            dtype: dtype.name(),
        })
    };
    let client = &weight.qweight.client;
    Ok(QuantProblem::new(m, *descriptor, of(dtype, client)?)
        .with_scales(of(weight.scales.dtype, client)?))
}

/// Multiplies activations `x` [.., K] with a weight, adds the bias and applies the epilogue. The
/// result is [.., N], or [.., N / 2] with SwiGLU.
///
/// # Errors
/// The errors of [`marlin_kernels::launch`], which also refuses an epilogue that the plan computes
/// after the matmul.
pub fn launch_linear(
    x: CubeTensor,
    weight: WeightTensors<CubeTensor>,
    descriptor: &WeightDescriptor,
    bias: Option<CubeTensor>,
    epilogue: Epilogue,
) -> Result<CubeTensor, KernelError> {
    launch_linear_in_parts(x, weight, descriptor, bias, epilogue, MAX_ELEMENTS)
}

/// Runs [`launch_linear`] in parts: if the activations or the output have more than `most_elements`
/// elements, which one launch cannot address, their rows are multiplied in blocks.
fn launch_linear_in_parts(
    x: CubeTensor,
    weight: WeightTensors<CubeTensor>,
    descriptor: &WeightDescriptor,
    bias: Option<CubeTensor>,
    epilogue: Epilogue,
    most_elements: usize,
) -> Result<CubeTensor, KernelError> {
    let WeightDescriptor { k, n, .. } = *descriptor;
    let out_shape = linear_shape(&x.shape(), n / epilogue.columns());
    let m = x.shape().num_elements() / k;
    let most_rows = (most_elements / k.max(n)).max(1);
    if m > most_rows {
        let x = CubeBackend::float_reshape(x, Shape::new([m, k]));
        let mut parts = Vec::new();
        for start in (0..m).step_by(most_rows) {
            let rows = start..m.min(start + most_rows);
            let x = CubeBackend::float_slice(x.clone(), &[Slice::from(rows), Slice::full()]);
            parts.push(launch_linear_in_parts(
                x,
                weight.clone(),
                descriptor,
                bias.clone(),
                epilogue,
                most_elements,
            )?);
        }
        return Ok(CubeBackend::float_reshape(
            CubeBackend::float_cat(parts, 0),
            out_shape,
        ));
    }
    let problem = weight_problem(&weight, descriptor, m, x.dtype)?.with_epilogue(epilogue);
    let (client, out) = (x.client.clone(), empty(&x, out_shape, x.dtype));
    let plan = plan(problem, &Target::of(&client));
    let operands = Operands {
        x: buffer(x),
        norm: None,
        weight: weight_buffers(weight),
        bias: bias.map(buffer),
        out: out.clone().into_buffer_arg(),
    };
    marlin_kernels::launch(&client, &problem, &plan, operands)?;
    Ok(out)
}

fn launch_dequantize(
    weight: WeightTensors<CubeTensor>,
    descriptor: &WeightDescriptor,
    dtype: DType,
) -> Result<CubeTensor, KernelError> {
    let problem = weight_problem(&weight, descriptor, 0, dtype)?;
    let out = empty(
        &weight.qweight,
        Shape::new([descriptor.k, descriptor.n]),
        dtype,
    );
    let client = weight.qweight.client.clone();
    marlin_kernels::dequantize(
        &client,
        &problem,
        weight_buffers(weight),
        out.clone().into_buffer_arg(),
    )?;
    Ok(out)
}

/// Converts a weight to the layout of `to`, and a 2:4 weight to a dense one if `to` is dense. The
/// expansion to a dense weight runs in the plain layout.
fn launch_repack(
    weight: WeightTensors<CubeTensor>,
    descriptor: &WeightDescriptor,
    to: &WeightDescriptor,
) -> Result<WeightTensors<CubeTensor>, KernelError> {
    let weight = WeightTensors {
        row_permutation: None,
        ..weight
    };
    if descriptor == to {
        return Ok(weight);
    }
    let scales = activation_dtype(weight.scales.dtype).unwrap_or(ActivationDtype::F32);
    let problem =
        |of: &WeightDescriptor| QuantProblem::new(0, *of, ActivationDtype::F32).with_scales(scales);
    let client = weight.qweight.client.clone();
    if descriptor.format.sparsity != to.format.sparsity {
        // The pruned values are inserted in the plain layout.
        let plain = descriptor.in_layout(WeightLayout::Plain);
        let weight = launch_repack(weight, descriptor, &plain)?;
        let dense = to.in_layout(WeightLayout::Plain);
        let qweight = empty(
            &weight.qweight,
            Shape::new(dense.tensors().qweight.matrix_shape()),
            weight.qweight.dtype,
        );
        repack::expand(
            &client,
            &problem(&plain),
            weight_buffers(weight.clone()),
            qweight.clone().into_buffer_arg(),
        )?;
        return launch_repack(
            WeightTensors {
                qweight,
                metadata: None,
                ..weight
            },
            &dense,
            to,
        );
    }
    let (one, shapes) = (problem(&descriptor.with_experts(1)), to.tensors());
    weight.try_map(|role, tensor| {
        let Some(shape) = shapes.get(role) else {
            return Ok(tensor);
        };
        let out = empty(&tensor, Shape::new(shape.matrix_shape()), tensor.dtype);
        let experts = parts(tensor, to.experts)
            .into_iter()
            .zip(parts(out.clone(), to.experts));
        for (tensor, out) in experts {
            repack::tensor(&client, &one, role, to.layout, tensor, out)?;
        }
        Ok(out)
    })
}

/// Returns the parts of a tensor of experts as launch buffers: the rows of each expert.
fn parts(tensor: CubeTensor, experts: usize) -> Vec<BufferArg> {
    let tensor = into_contiguous(tensor);
    if experts == 1 {
        return vec![tensor.into_buffer_arg()];
    }
    let elements = tensor.meta.shape().num_elements() / experts.max(1);
    let bytes = (elements * tensor.dtype.size()) as u64;
    let part = |expert: usize| {
        let handle = tensor.handle.clone().offset_start(expert as u64 * bytes);
        let handle = handle.offset_end((experts - expert - 1) as u64 * bytes);
        // SAFETY: the tensor is contiguous, and the handle is cut to these elements.
        unsafe { BufferArg::from_raw_parts(handle, elements) }
    };
    (0..experts).map(part).collect()
}
