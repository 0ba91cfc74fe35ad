//! Times the copy of the weights of Llama 2 70B to the device, and their repacking there from the
//! plain to the tile layout.

use crate::BenchError;
use crate::operands::{buffer, random_bytes};
use crate::shapes::{Shape, named};
use cubecl::MemoryScope;
use cubecl::client::Client;
use cubecl::cuda::CudaDevice;
use cubecl::server::Handle;
use marlin_format::{
    GroupSize, QuantSpec, TensorDescriptor, WeightDescriptor, WeightLayout, WeightTensor,
    WeightTensors,
};
use marlin_kernels::{ActivationDtype, QuantProblem, repack};
use std::time::{Duration, Instant};

/// The number of layers of Llama 2 70B.
const LAYERS: usize = 80;
/// The linear layers of one block. As in inference engines, q, k and v are one layer, and gate and
/// up are one layer.
const LAYER: [&str; 4] = ["70b.qkv", "70b.o", "70b.gate_up", "70b.down"];

/// Copies all layers to the device and repacks them there, and prints the times and the peak
/// memory.
pub fn run() -> Result<(), BenchError> {
    let client = cubecl::Device::from(CudaDevice::new(0)).client();
    let shapes = named(&LAYER.map(String::from))?;
    let random = |shape| {
        weight(shape)
            .tensors()
            .map(|role, tensor| random_bytes(bytes(role, &tensor)))
    };
    let hosts: Vec<WeightTensors<Vec<u8>>> = shapes.iter().map(random).collect();
    let mut held = Vec::new();
    let (mut uploading, mut repacking) = (Duration::ZERO, Duration::ZERO);
    let (mut packed, mut peak) = (0, 0);
    for _ in 0..LAYERS {
        for (shape, host) in shapes.iter().zip(&hosts) {
            let start = Instant::now();
            let plain = host
                .as_ref()
                .map(|_, bytes| client.create_from_slice(bytes));
            wait(&client)?;
            uploading += start.elapsed();

            let start = Instant::now();
            let tile = repacked(&client, shape, &plain)?;
            wait(&client)?;
            repacking += start.elapsed();
            packed += tile.iter().map(|(_, handle)| handle.size()).sum::<u64>();
            peak = peak.max(
                client
                    .memory_report(MemoryScope::Device)
                    .usage()
                    .bytes_reserved,
            );
            held.push(tile);
        }
    }
    let (gigabytes, seconds) = (
        |bytes: u64| bytes as f64 / 1e9,
        |time: Duration| time.as_secs_f64(),
    );
    println!(
        "{}: {} weights, {:.2} GB",
        client.properties().identity.name,
        held.len(),
        gigabytes(packed)
    );
    println!(
        "{:.2} s to the device, {:.2} s repacking there",
        seconds(uploading),
        seconds(repacking)
    );
    println!(
        "{:.2} GB reserved at most, {:.3} times the weights",
        gigabytes(peak),
        peak as f64 / packed as f64
    );
    Ok(())
}

/// Returns the descriptor of a shape's weight in the plain layout.
fn weight(shape: &Shape) -> WeightDescriptor {
    WeightDescriptor::plain(QuantSpec::int4(GroupSize::G128), shape.k, shape.n)
}

/// Returns the number of bytes of a tensor.
fn bytes(role: WeightTensor, tensor: &TensorDescriptor) -> usize {
    tensor.elements() * if role == WeightTensor::Scales { 2 } else { 4 }
}

/// Repacks the tensors of a weight to the tile layout.
fn repacked(
    client: &Client,
    shape: &Shape,
    plain: &WeightTensors<Handle>,
) -> Result<WeightTensors<Handle>, BenchError> {
    let problem = QuantProblem::new(0, weight(shape), ActivationDtype::F16);
    let (from, to) = (
        problem.weight.tensors(),
        problem.weight.in_layout(WeightLayout::Tile).tensors(),
    );
    to.try_map(|role, tensor| {
        let out = client.empty(bytes(role, &tensor));
        if let (Some(source), Some(from)) = (plain.get(role), from.get(role)) {
            let source = buffer(source, from.elements());
            repack::tensor(
                client,
                &problem,
                role,
                WeightLayout::Tile,
                source,
                buffer(&out, tensor.elements()),
            )?;
        }
        Ok(out)
    })
}

fn wait(client: &Client) -> Result<(), BenchError> {
    cubecl::future::block_on(client.sync())
        .map_err(|error| BenchError::Device(format!("{error:?}")))
}
