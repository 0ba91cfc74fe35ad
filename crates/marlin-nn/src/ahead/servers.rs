//! The operations of passes, each on one of several servers of a card.

use super::{CompiledAhead, ExpertsShape, LinearShape, LinearWeight, PassShape};
use crate::cache::{CacheFormat, CacheShape};
use crate::kernels::attention::{AttentionPass, AttentionPlan, AttentionShape, AttentionTarget};
use crate::kernels::flash::TILE_WORDS;
use crate::kernels::sample::TokenTable;
use crate::kernels::{SequenceState, flash};
use crate::ops::DecodeBackend;
use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros_client};
use burn_cubecl::ops::reshape;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_marlin::backend::experts::ExpertsBackend;
use burn_marlin::backend::{OptionalFloat, QuantBackend, float_dtype};
use cubecl::bytes::Bytes;
use cubecl::client::Client;
use marlin_format::{TensorDescriptor, TensorDtype, WeightTensor, WeightTensors};
use marlin_kernels::experts::{LayerPlan, RouteKernels};
use marlin_kernels::matmul::gemv::experts::has_short_steps;
use marlin_kernels::{
    ActivationDtype, FloatProblem, Kernel, Prologue, QuantProblem, Target, additional_server,
    elementwise, experts, plan, vector_size,
};
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// The epsilon of norms. Any value is valid, because the epsilon is an argument of a kernel and
/// not part of its source.
const EPSILON: f64 = 1e-5;

pub(super) fn compile(device: &CubeDevice, passes: &[PassShape]) -> CompiledAhead {
    let client = device.client();
    if additional_server(&client, 0).is_none() {
        return CompiledAhead::default();
    }
    let operations = all_operations(passes, &client);
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let take = |number: usize| {
        let Some(client) = additional_server(&client, number) else {
            return;
        };
        let tensors = Tensors {
            client,
            device: device.clone(),
        };
        while let Some(operation) = operations.get(next.fetch_add(1, Ordering::Relaxed)) {
            (operation.run)(&tensors);
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
        // A launch that is refused panics and ends its thread; the other threads continue.
        threads.into_iter().for_each(|thread| _ = thread.join());
    });
    CompiledAhead {
        operations: operations.len(),
        failed: operations.len() - done.into_inner(),
    }
}

/// An operation of a pass.
struct Operation {
    /// The parameters that determine the kernels. Operations of one key have the same kernels.
    key: String,
    time: CompileTime,
    run: Box<dyn Fn(&Tensors) + Send + Sync>,
}

/// The order of the times that kernels take to compile.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum CompileTime {
    Longest,
    Long,
    Short,
}

/// Returns the operations of passes, one for each key. Those whose kernels take longest to
/// compile come first.
fn all_operations(passes: &[PassShape], client: &Client) -> Vec<Operation> {
    let mut keys = HashSet::new();
    let mut operations: Vec<Operation> = passes
        .iter()
        .flat_map(|pass| operations(pass, client))
        .filter(|operation| keys.insert(operation.key.clone()))
        .collect();
    operations.sort_by_key(|operation| operation.time);
    operations
}

/// Returns the operations of a pass.
fn operations(pass: &PassShape, client: &Client) -> Vec<Operation> {
    let (last_rows, head) = (pass.last_rows, pass.head.clone());
    let Some(first) = pass.attention.first().copied() else {
        return Vec::new();
    };
    let ([hidden, vocab], rows, dtype) = (head.weight.dims(), first.rows, first.dtype);
    let mut operations: Vec<Operation> = Vec::new();
    let mut push = |key: String, time, run: Box<dyn Fn(&Tensors) + Send + Sync>| {
        operations.push(Operation { key, time, run });
    };
    for &shape in &pass.attention {
        let run = Box::new(move |tensors: &Tensors| attend(tensors, shape));
        push(attention_key(&shape, client), CompileTime::Longest, run);
    }
    if last_rows > 0 {
        let run = Box::new(move |tensors: &Tensors| {
            let (rows, table) = (
                tensors.rows(last_rows),
                tensors.words([
                    TokenTable::row(first.cache.slots, 0),
                    TokenTable::words(vocab),
                ]),
            );
            CubeBackend::decode_sample(
                tensors.floats([last_rows, vocab], dtype),
                rows,
                table,
                first.cache.max_len,
            );
        });
        push("sample".into(), CompileTime::Long, run);
    }
    let of_layers = pass.layers.iter().map(|layer| (layer, rows));
    let of_head = (last_rows > 0).then_some((&head, last_rows));
    for (layer, rows) in of_head.into_iter().chain(of_layers) {
        let key = linear_key(layer, rows, dtype, client);
        let layer = layer.clone();
        let run = Box::new(move |tensors: &Tensors| multiply(tensors, &layer, rows, dtype));
        push(key, CompileTime::Long, run);
    }
    for &experts in &pass.experts {
        let key = experts_key(&experts, rows, dtype, client);
        let run = Box::new(move |tensors: &Tensors| mix(tensors, experts, rows, dtype));
        push(key, CompileTime::Longest, run);
    }
    // The kernel of an embedding is the same for a vocabulary of one token.
    let embed = Box::new(move |tensors: &Tensors| {
        CubeBackend::decode_embed(tensors.floats([1, hidden], dtype), tensors.rows(rows));
    });
    // The size of its cubes depends on the number of elements, if there are few.
    let elements = rows * hidden / vector_size(client, hidden, dtype);
    let (_, cubes) = elementwise(client, elements);
    push(format!("embed {cubes:?}"), CompileTime::Short, embed);
    let norm = Box::new(move |tensors: &Tensors| {
        CubeBackend::decode_rms_norm(
            tensors.floats([rows, hidden], dtype),
            tensors.floats([hidden], dtype),
            EPSILON,
        );
    });
    push("norm".into(), CompileTime::Short, norm);
    let add_norm = Box::new(move |tensors: &Tensors| {
        let [x, residual] = [(); 2].map(|()| tensors.floats([last_rows.max(1), hidden], dtype));
        CubeBackend::decode_add_rms_norm(x, residual, tensors.floats([hidden], dtype), EPSILON);
    });
    push("add and norm".into(), CompileTime::Short, add_norm);
    operations
}

/// Returns the parameters of an attention that its kernels depend on: all but the number of
/// rows, and for a step the configuration that is planned for them.
fn attention_key(shape: &AttentionShape, client: &Client) -> String {
    let plan = AttentionPlan::new(shape, &AttentionTarget::of(client));
    let config = plan.ok().map(|plan| plan.config);
    format!("{:?} {config:?}", AttentionShape { rows: 0, ..*shape })
}

/// Returns the parameters of a linear layer that its kernels depend on: all but the number of
/// rows, and the plan for them without the size of the grid.
fn linear_key(layer: &LinearShape, rows: usize, dtype: ActivationDtype, client: &Client) -> String {
    let target = Target::of(client);
    let mut plan = match layer.weight {
        LinearWeight::Quantized(descriptor) => {
            let problem = QuantProblem::new(rows, descriptor, dtype)
                .with_prologue(layer.prologue)
                .with_epilogue(layer.epilogue);
            plan(problem, &target)
        }
        LinearWeight::Float([k, n]) => {
            let m = rows;
            plan(FloatProblem { m, k, n, dtype }, &target)
        }
    };
    // Burn's matmuls choose a kernel by the number of rows.
    let of_burn = matches!(
        plan.kernel,
        Kernel::FloatMatmul | Kernel::DequantizeThenMatmul
    );
    if let Kernel::Marlin(launch) = &mut plan.kernel {
        launch.blocks = 0;
    }
    format!("{layer:?} {plan:?} {:?}", of_burn.then_some(rows))
}

/// Returns the parameters of a layer of experts that its kernels depend on: all but the number of
/// rows, and the plan for them without the size of the grid.
fn experts_key(
    experts: &ExpertsShape,
    rows: usize,
    dtype: ActivationDtype,
    client: &Client,
) -> String {
    let [gate_up, down] = experts
        .weights
        .map(|weight| QuantProblem::new(rows * experts.router.top_k, weight, dtype));
    let gate_up = gate_up.with_epilogue(experts.epilogue);
    let card = Target::of(client).card;
    let plan = card.and_then(|card| experts::plan(&gate_up, &down, rows, &card));
    let kernels = match plan {
        Some(LayerPlan::Rows(plan)) => {
            let has_short_steps = [gate_up, down].map(|problem| has_short_steps(&problem));
            format!("{plan:?} {has_short_steps:?}")
        }
        Some(LayerPlan::Tiles(plan)) => {
            let route = RouteKernels::of(&experts.router, rows);
            format!("{:?} {:?} {route:?}", plan.gate_up.tile, plan.down.tile)
        }
        None => String::new(),
    };
    format!("{experts:?} {kernels}")
}

/// Runs a layer of experts.
fn mix(tensors: &Tensors, experts: ExpertsShape, rows: usize, dtype: ActivationDtype) {
    let ExpertsShape {
        router,
        weights: [gate_up, down],
        has_biases,
        epilogue,
    } = experts;
    let bias = |n| {
        let biases = has_biases.then(|| tensors.floats([router.experts, n], dtype));
        OptionalFloat::from(biases)
    };
    CubeBackend::quant_experts(
        tensors.floats([rows, gate_up.k], dtype),
        tensors.floats([rows, router.experts], dtype),
        OptionalFloat::Absent,
        tensors.quantized(gate_up.tensors()).into(),
        gate_up,
        bias(gate_up.n),
        tensors.quantized(down.tensors()).into(),
        down,
        bias(down.n),
        router,
        1.0,
        epilogue,
    );
}

fn attend(tensors: &Tensors, shape: AttentionShape) {
    let AttentionShape {
        rows,
        cache: cache_shape,
        max_positions,
        rotary_dim,
        dtype,
        ..
    } = shape;
    let CacheShape {
        slots, head_dim, ..
    } = cache_shape;
    let cache = || tensors.floats(cache_shape.dims(), dtype);
    let pages = cache_shape.table_dims().map(|dims| tensors.words(dims));
    let table = || tensors.floats([max_positions, rotary_dim / 2], ActivationDtype::F32);
    let norm = || {
        OptionalFloat::from(
            shape
                .norm_epsilon
                .map(|_| tensors.floats([head_dim], dtype)),
        )
    };
    let words = match shape.pass {
        AttentionPass::Step => tensors.zeros([rows, shape.heads]),
        AttentionPass::Prompt => tensors.words([flash::most_tiles(rows, slots), TILE_WORDS]),
    };
    let qkv = tensors.floats([rows, shape.qkv_columns()], dtype);
    let (keys, values, cos, sin) = (cache(), cache(), table(), table());
    let wide = || {
        let dims = cache_shape.in_activations().dims();
        let is_wide = cache_shape.format != CacheFormat::Activations;
        OptionalFloat::from(is_wide.then(|| tensors.floats(dims, dtype)))
    };
    CubeBackend::decode_attention(
        qkv,
        tensors.rows(rows),
        keys,
        values,
        wide(),
        wide(),
        pages.into(),
        cos,
        sin,
        norm(),
        norm(),
        OptionalFloat::from(
            shape
                .has_sinks
                .then(|| tensors.floats([shape.heads], dtype)),
        ),
        words,
        shape,
    );
}

fn multiply(tensors: &Tensors, layer: &LinearShape, rows: usize, dtype: ActivationDtype) {
    let [k, n] = layer.weight.dims();
    let x = tensors.floats([rows, k], dtype);
    let bias = OptionalFloat::from(layer.bias.then(|| tensors.floats([n], dtype)));
    let normed = || (tensors.floats([rows, k], dtype), tensors.floats([k], dtype));
    let descriptor = match layer.weight {
        LinearWeight::Quantized(descriptor) => descriptor,
        LinearWeight::Float(_) => {
            let weight = tensors.transposed([k, n], dtype);
            let mut out = if layer.prologue == Prologue::AddRmsNorm {
                let (residual, norm) = normed();
                CubeBackend::decode_norm_float_linear(x, residual, norm, EPSILON, weight, bias).0
            } else {
                CubeBackend::decode_linear(x, weight, bias)
            };
            if layer.epilogue.is_gated() {
                out = CubeBackend::decode_gated(out, layer.epilogue);
            }
            return drop(out);
        }
    };
    let weight = tensors.quantized(descriptor.tensors()).into();
    if layer.prologue == Prologue::AddRmsNorm {
        let (residual, norm) = normed();
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

/// A server on which operands are allocated.
struct Tensors {
    client: Client,
    device: CubeDevice,
}

impl Tensors {
    /// Allocates a tensor of undefined values.
    fn floats<const D: usize>(&self, shape: [usize; D], dtype: ActivationDtype) -> CubeTensor {
        self.undefined(Shape::new(shape), float_dtype(dtype).into())
    }

    /// Allocates a tensor [K, N] of undefined values, the transpose of a contiguous [N, K].
    fn transposed(&self, [k, n]: [usize; 2], dtype: ActivationDtype) -> CubeTensor {
        let mut weight = self.floats([n, k], dtype);
        weight.meta.swap(0, 1);
        weight
    }

    /// Creates zeros [rows, words], with the kernel that [`words`](crate::words) launches.
    fn zeros(&self, shape: [usize; 2]) -> CubeTensor {
        let (client, device) = (self.client.clone(), self.device.clone());
        let count = shape.iter().product();
        let zeros = zeros_client(client, device, Shape::new([count]), DType::I32);
        reshape(zeros, Shape::new(shape))
    }

    /// Allocates an i32 tensor of zeros.
    fn words<const D: usize>(&self, shape: [usize; D]) -> CubeTensor {
        self.of_words(vec![0; shape.iter().product()], shape)
    }

    /// Allocates idle rows, whose tokens kernels neither read nor write.
    fn rows(&self, rows: usize) -> CubeTensor {
        self.of_words(
            SequenceState::IDLE.to_words().repeat(rows),
            [rows, SequenceState::WORDS],
        )
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

    /// Allocates the tensors of a quantised weight, with undefined values.
    fn quantized(&self, tensors: WeightTensors<TensorDescriptor>) -> WeightTensors<CubeTensor> {
        tensors.map(|role, tensor| {
            if role == WeightTensor::RowPermutation {
                // Kernels use the permutation as row indices, so its values must be valid:
                // zeros.
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
