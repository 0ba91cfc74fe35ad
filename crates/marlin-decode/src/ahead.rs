//! Compilation of a pass's kernels ahead of the pass, on all cores.
//!
//! CubeCL compiles a kernel on its device's thread when it is first launched there: one after the
//! other. Here each operation of a pass runs once on one of several servers of the same card, which
//! have a thread each, on tensors that nobody reads. The kernels that they compile are in CubeCL's
//! cache on disk then, where the device finds them.

use crate::kernels::attention::AttentionShape;
use burn::tensor::Device;
use marlin_format::WeightDescriptor;
use marlin_kernels::{Epilogue, Prologue};

/// What the kernels of a pass depend on.
#[derive(Debug, Clone, PartialEq)]
pub struct PassShape {
    /// The attention of the pass, once for each kind of layer.
    pub attention: Vec<AttentionShape>,
    /// Rows of which the head has logits: those of a step, or the last ones of prompts.
    pub ends: usize,
    /// The matmuls of the layers.
    pub layers: Vec<LinearShape>,
    /// The matmul of the head, [hidden, vocab].
    pub head: LinearShape,
}

/// A linear layer, and what the matmul's kernel computes beside it.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearShape {
    /// The weight.
    pub weight: LinearWeight,
    /// True for a layer with a bias.
    pub bias: bool,
    /// The operation on its activations.
    pub prologue: Prologue,
    /// The operation on its outputs.
    pub epilogue: Epilogue,
}

/// The weight of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LinearWeight {
    /// A transposed [N, K] in the dtype of activations, by its K and N.
    Float([usize; 2]),
    /// A quantised one.
    Quantized(WeightDescriptor),
}

impl LinearWeight {
    /// [K, N].
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Float(dims) => *dims,
            Self::Quantized(descriptor) => [descriptor.k, descriptor.n],
        }
    }
}

/// The operations that were run so that their kernels are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CompiledAhead {
    /// All of them; 0 on a device that is not CUDA's.
    pub operations: usize,
    /// Those that could not run, whose kernels are compiled when they are launched.
    pub failed: usize,
}

/// Compiles the kernels of passes on a CUDA device whose kernels CubeCL keeps on disk, and waits
/// for it. On other devices this does nothing.
///
/// Memory for the operands of as many operations as the machine has cores is taken meanwhile, the
/// weights among them.
#[cfg_attr(
    not(feature = "cuda"),
    allow(
        unused_variables,
        reason = "other runtimes compile on the thread that launches"
    )
)]
pub fn compile(device: &Device, passes: &[PassShape]) -> CompiledAhead {
    #[cfg(feature = "cuda")]
    if let burn::backend::DispatchDevice::Cube(device) = device.as_dispatch() {
        return servers::compile(device, passes);
    }
    CompiledAhead::default()
}

#[cfg(feature = "cuda")]
mod servers {
    use super::{CompiledAhead, LinearShape, LinearWeight, PassShape};
    use crate::kernels::attention::{AttentionPass, AttentionShape};
    use crate::kernels::flash::TILE_WORDS;
    use crate::kernels::sample::BITMAPS;
    use crate::kernels::{Row, flash};
    use crate::ops::DecodeBackend;
    use burn::tensor::{DType, Shape};
    use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
    use burn_cubecl::tensor::CubeTensor;
    use burn_cubecl::{CubeBackend, CubeDevice};
    use burn_marlin::backend::{OptionalFloat, QuantBackend, float_dtype};
    use cubecl::bytes::Bytes;
    use cubecl::client::Client;
    use marlin_format::{TensorDescriptor, TensorDtype, WeightTensor, WeightTensors};
    use marlin_kernels::{ActivationDtype, Epilogue, Prologue, further_server};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    /// The epsilon of norms: any, since it is no part of a kernel.
    const EPSILON: f64 = 1e-5;

    pub(super) fn compile(device: &CubeDevice, passes: &[PassShape]) -> CompiledAhead {
        let client = device.client();
        if further_server(&client, 0).is_none() {
            return CompiledAhead::default();
        }
        let operations: Vec<Operation> = passes.iter().flat_map(operations).collect();
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let take = |number: usize| {
            let Some(client) = further_server(&client, number) else {
                return;
            };
            let tensors = Tensors {
                client,
                device: device.clone(),
            };
            while let Some(operation) = operations.get(next.fetch_add(1, Ordering::Relaxed)) {
                operation(&tensors);
                match cubecl::future::block_on(tensors.client.sync()) {
                    Ok(()) => _ = done.fetch_add(1, Ordering::Relaxed),
                    Err(error) => tracing::debug!(?error, "a kernel was not compiled ahead"),
                }
            }
            if let Err(error) = tensors.client.memory_cleanup() {
                tracing::debug!(
                    ?error,
                    "memory of operations that were compiled ahead is kept"
                );
            }
        };
        let cores = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            let take = &take;
            let threads: Vec<_> = (0..cores.min(operations.len()))
                .map(|number| scope.spawn(move || take(number)))
                .collect();
            // A launch that is refused ends its thread; the others go on.
            threads.into_iter().for_each(|thread| _ = thread.join());
        });
        CompiledAhead {
            operations: operations.len(),
            failed: operations.len() - done.into_inner(),
        }
    }

    type Operation = Box<dyn Fn(&Tensors) + Send + Sync>;

    /// The operations of a pass, those whose kernels take longest to compile first.
    fn operations(pass: &PassShape) -> Vec<Operation> {
        let (ends, head) = (pass.ends, pass.head.clone());
        let Some(first) = pass.attention.first().copied() else {
            return Vec::new();
        };
        let ([hidden, vocab], rows, dtype) = (head.weight.dims(), first.rows, first.dtype);
        let mut operations: Vec<Operation> = Vec::new();
        operations.extend(
            pass.attention
                .iter()
                .map(|&shape| -> Operation { Box::new(move |tensors| attend(tensors, shape)) }),
        );
        if ends > 0 {
            operations.push(Box::new(move |tensors| {
                let (rows, bitmaps) = (
                    tensors.rows(ends),
                    tensors.words([BITMAPS * first.slots, vocab.div_ceil(32)]),
                );
                CubeBackend::decode_sample(
                    tensors.floats([ends, vocab], dtype),
                    rows,
                    bitmaps,
                    first.max_len,
                );
            }));
            operations.push(Box::new(move |tensors| {
                multiply(tensors, &head, ends, dtype)
            }));
        }
        let layers = pass.layers.iter().cloned();
        operations.extend(layers.map(|layer| -> Operation {
            Box::new(move |tensors| multiply(tensors, &layer, rows, dtype))
        }));
        operations.push(Box::new(move |tensors| {
            // The kernel is the same for a vocabulary of one token.
            CubeBackend::decode_embed(tensors.floats([1, hidden], dtype), tensors.rows(rows));
        }));
        operations.push(Box::new(move |tensors| {
            CubeBackend::decode_rms_norm(
                tensors.floats([rows, hidden], dtype),
                tensors.floats([hidden], dtype),
                EPSILON,
            );
        }));
        operations.push(Box::new(move |tensors| {
            let [x, residual] = [(); 2].map(|()| tensors.floats([ends.max(1), hidden], dtype));
            CubeBackend::decode_add_rms_norm(x, residual, tensors.floats([hidden], dtype), EPSILON);
        }));
        operations
    }

    fn attend(tensors: &Tensors, shape: AttentionShape) {
        let AttentionShape {
            rows,
            slots,
            kv_heads,
            max_len,
            head_dim,
            max_positions,
            rotary_dim,
            dtype,
            ..
        } = shape;
        let cache = || tensors.floats([slots, kv_heads, max_len, head_dim], dtype);
        let table = || tensors.floats([max_positions, rotary_dim / 2], ActivationDtype::F32);
        let norm = || {
            OptionalFloat::from(
                shape
                    .norm_epsilon
                    .map(|_| tensors.floats([head_dim], dtype)),
            )
        };
        let words = match shape.pass {
            AttentionPass::Step => [rows, shape.heads],
            AttentionPass::Prompt => [flash::most_tiles(rows, slots), TILE_WORDS],
        };
        let qkv = tensors.floats([rows, shape.qkv_columns()], dtype);
        let (keys, values, cos, sin) = (cache(), cache(), table(), table());
        CubeBackend::decode_attention(
            qkv,
            tensors.rows(rows),
            keys,
            values,
            cos,
            sin,
            norm(),
            norm(),
            tensors.words(words),
            shape,
        );
    }

    fn multiply(tensors: &Tensors, layer: &LinearShape, rows: usize, dtype: ActivationDtype) {
        let [k, n] = layer.weight.dims();
        let x = tensors.floats([rows, k], dtype);
        let descriptor = match layer.weight {
            LinearWeight::Quantized(descriptor) => descriptor,
            LinearWeight::Float(_) => {
                let mut out = CubeBackend::decode_linear(x, tensors.transposed([k, n], dtype));
                if layer.epilogue == Epilogue::SwiGlu {
                    out = CubeBackend::decode_silu_mul(out);
                }
                return drop(out);
            }
        };
        let weight = tensors.quantized(descriptor.tensors()).into();
        let bias = OptionalFloat::from(layer.bias.then(|| tensors.floats([n], dtype)));
        if layer.prologue == Prologue::AddRmsNorm {
            let (residual, norm) = (tensors.floats([rows, k], dtype), tensors.floats([k], dtype));
            CubeBackend::decode_norm_linear(
                x,
                residual,
                norm,
                EPSILON,
                weight,
                descriptor,
                bias,
                layer.epilogue,
            );
        } else {
            CubeBackend::quant_linear(x, weight, descriptor, bias);
        }
    }

    /// Tensors on a server.
    struct Tensors {
        client: Client,
        device: CubeDevice,
    }

    impl Tensors {
        /// Undefined values.
        fn floats<const D: usize>(&self, shape: [usize; D], dtype: ActivationDtype) -> CubeTensor {
            self.undefined(Shape::new(shape), float_dtype(dtype).into())
        }

        /// Undefined values [K, N], transposed.
        fn transposed(&self, [k, n]: [usize; 2], dtype: ActivationDtype) -> CubeTensor {
            let mut weight = self.floats([n, k], dtype);
            weight.meta.swap(0, 1);
            weight
        }

        /// Zeros.
        fn words<const D: usize>(&self, shape: [usize; D]) -> CubeTensor {
            self.of_words(vec![0; shape.iter().product()], shape)
        }

        /// Rows that no sequence uses, whose tokens are neither read nor written.
        fn rows(&self, rows: usize) -> CubeTensor {
            self.of_words(Row::IDLE.to_words().repeat(rows), [rows, Row::WORDS])
        }

        fn of_words<const D: usize>(&self, words: Vec<i32>, shape: [usize; D]) -> CubeTensor {
            let handle = self.client.create(Bytes::from_elems(words));
            CubeTensor::new_contiguous(
                self.client.clone(),
                self.device.clone(),
                Shape::new(shape),
                handle,
                DType::I32,
            )
        }

        /// The tensors of a quantised weight, of undefined values.
        fn quantized(&self, tensors: WeightTensors<TensorDescriptor>) -> WeightTensors<CubeTensor> {
            tensors.map(|role, tensor| {
                if role == WeightTensor::RowPermutation {
                    // Numbers of rows that there are.
                    return self.words(tensor.matrix_shape());
                }
                let dtype = match tensor.dtype {
                    TensorDtype::Words => DType::I32,
                    TensorDtype::Scale(scale) => float_dtype(scale.into()).into(),
                };
                self.undefined(Shape::from(tensor.shape().to_vec()), dtype)
            })
        }

        fn undefined(&self, shape: Shape, dtype: DType) -> CubeTensor {
            empty_device_contiguous_dtype(self.client.clone(), self.device.clone(), shape, dtype)
        }
    }
}
