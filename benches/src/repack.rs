//! The weights of Llama 2 70B, from the plain layout in host memory to the tile layout on the device.

use crate::BenchError;
use crate::operands::{buffer, random_bytes};
use crate::shapes::{Shape, named};
use cubecl::MemoryScope;
use cubecl::client::Client;
use cubecl::cuda::CudaDevice;
use cubecl::server::Handle;
use marlin_format::{Bits, GroupSize, QuantSpec};
use marlin_kernels::{ActivationDtype, Problem, WeightLayout, repack};
use std::time::{Duration, Instant};

/// Layers of Llama 2 70B.
const LAYERS: usize = 80;
/// Its linear layers, joined as engines join them.
const LAYER: [&str; 4] = ["70b.qkv", "70b.o", "70b.gate_up", "70b.down"];

/// Puts all layers on the device and repacks them there; prints seconds and the peak of memory.
pub fn run() -> Result<(), BenchError> {
    let client = cubecl::Device::from(CudaDevice::new(0)).client();
    let shapes = named(&LAYER.map(String::from))?;
    let hosts: Vec<[Vec<u8>; 2]> = shapes.iter().map(|shape| tensors(shape).map(random_bytes)).collect();
    let mut held = Vec::new();
    let (mut uploading, mut repacking) = (Duration::ZERO, Duration::ZERO);
    let (mut packed, mut peak) = (0, 0);
    for _ in 0..LAYERS {
        for (shape, host) in shapes.iter().zip(&hosts) {
            let start = Instant::now();
            let plain = host.each_ref().map(|bytes| client.create_from_slice(bytes));
            wait(&client)?;
            uploading += start.elapsed();

            let start = Instant::now();
            let tile = repacked(&client, shape, &plain)?;
            wait(&client)?;
            repacking += start.elapsed();
            packed += tile.iter().map(Handle::size).sum::<u64>();
            peak = peak.max(client.memory_report(MemoryScope::Device).usage().bytes_reserved);
            held.push(tile);
        }
    }
    let (gigabytes, seconds) = (|bytes: u64| bytes as f64 / 1e9, |time: Duration| time.as_secs_f64());
    println!("{}: {} weights, {:.2} GB", client.properties().identity.name, held.len(), gigabytes(packed));
    println!("{:.2} s to the device, {:.2} s repacking there", seconds(uploading), seconds(repacking));
    println!("{:.2} GB reserved at most, {:.3} times the weights", gigabytes(peak), peak as f64 / packed as f64);
    Ok(())
}

/// Bytes of a shape's words and scales in the plain layout.
fn tensors(shape: &Shape) -> [usize; 2] {
    let [words, scales] = lengths(shape, WeightLayout::Plain);
    [4 * words, 2 * scales]
}

/// Elements of a shape's words and scales.
fn lengths(shape: &Shape, layout: WeightLayout) -> [usize; 2] {
    [layout.words(shape.k, shape.n, Bits::Four), layout.scales(shape.k, shape.n, GroupSize::G128)].map(|[rows, columns]| rows * columns)
}

/// Words and scales in the tile layout.
fn repacked(client: &Client, shape: &Shape, [words, scales]: &[Handle; 2]) -> Result<[Handle; 2], BenchError> {
    let (spec, dtype) = (QuantSpec::int4(GroupSize::G128), ActivationDtype::F16);
    let problem = Problem { m: 0, n: shape.n, k: shape.k, spec, activations: dtype, scales: dtype, permuted: false };
    let (plain, tile) = (lengths(shape, WeightLayout::Plain), lengths(shape, WeightLayout::Tile));
    let out = [client.empty(4 * tile[0]), client.empty(2 * tile[1])];
    repack::words(client, &problem, WeightLayout::Tile, buffer(words, plain[0]), buffer(&out[0], tile[0]))?;
    repack::scales(client, &problem, WeightLayout::Tile, buffer(scales, plain[1]), buffer(&out[1], tile[1]))?;
    Ok(out)
}

fn wait(client: &Client) -> Result<(), BenchError> {
    cubecl::future::block_on(client.sync()).map_err(|error| BenchError::Device(format!("{error:?}")))
}
