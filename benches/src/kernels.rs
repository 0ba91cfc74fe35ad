//! W4A16 matmuls.

use crate::operands::{Weights, activations, buffer, row_permutation};
use crate::record::{self, Row};
use crate::shapes::{Shape, named};
use crate::timing::time;
use crate::{BenchError, KernelArgs};
use cubecl::client::Client;
use cubecl::cuda::CudaDevice;
use marlin_format::{QuantSpec, ScaleDtype};
use marlin_kernels::marlin::{self, Card, Launch, MatmulArgs, Workspace};
use marlin_kernels::{ActivationDtype, Problem, repack};

/// Bytes in a second and floating-point operations in a second that an H200 reaches: a plain read of 4 GiB, and a dense product of 8192 cubed
/// in bf16.
pub const READ_RATE: f64 = 4.37e12;
const FLOP_RATE: f64 = 790e12;
/// A graph holds about this many microseconds of calls.
const GRAPH_MICROSECONDS: f64 = 4000.0;

/// Times what the arguments name, prints a line each, and writes the record.
pub fn run(args: &KernelArgs) -> Result<(), BenchError> {
    let client = cubecl::Device::from(CudaDevice::new(0)).client();
    let card = Card::of(&client).ok_or(BenchError::Card)?;
    let workspace = Workspace::new(&client, &card);
    let dtype = if args.bf16 { ActivationDtype::BF16 } else { ActivationDtype::F16 };
    let mut spec = QuantSpec::int4(args.group).with_scale_dtype(if args.bf16 { ScaleDtype::BF16 } else { ScaleDtype::F16 });
    spec.zero_points = args.zero_points;

    let name = client.properties().identity.name.clone();
    println!("{name}: {spec} {dtype}{}", if args.act_order { " act-order" } else { "" });
    println!(
        "{:12} {:>6} {:>6} {:>5}  {:28} {:>9} {:>9} {:>6} {:>8}",
        "shape", "K", "N", "M", "kernel", "us", "floor us", "floor", "TFLOP/s"
    );
    let mut rows = Vec::new();
    for shape in named(&args.shapes)? {
        let weights = Weights::random(&client, &shape, spec, dtype);
        for &m in &args.m {
            let problem = Problem { m, n: shape.n, k: shape.k, spec, activations: dtype, scales: dtype, permuted: args.act_order };
            let launches =
                if args.every_tile { marlin::launches(&problem, &card) } else { marlin::plan(&problem, &card).into_iter().collect() };
            if launches.is_empty() {
                return Err(BenchError::NoTile);
            }
            for launch in launches {
                let us = time_launch(&client, &problem, launch, &weights, &workspace)?;
                rows.push(report(&shape, &problem, launch, us));
            }
        }
    }
    match &args.record {
        Some(path) => record::write(path, &name, &rows),
        None => Ok(()),
    }
}

fn time_launch(client: &Client, problem: &Problem, launch: Launch, weights: &Weights, workspace: &Workspace) -> Result<f64, BenchError> {
    let Problem { m, n, k, .. } = *problem;
    let x = activations(client, m, k, problem.activations);
    // Act-order takes a launch of its own, which is part of the call.
    let arranged = problem.permuted.then(|| (row_permutation(client, k), client.empty(2 * m * k)));
    let out = client.empty(m * n * 2);
    // Every copy of the weight is read equally often.
    let calls = (GRAPH_MICROSECONDS / floor(problem).max(4.0)) as usize;
    let calls = calls.clamp(1, 1000).next_multiple_of(weights.copies());
    time(client, calls, |call| {
        let (weight, workspace) = (weights.of_call(call), workspace.clone());
        let x = match &arranged {
            Some((rows, arranged)) => {
                repack::arrange(client, problem, buffer(&x, m * k), Some(buffer(rows, k)), buffer(arranged, m * k))?;
                arranged
            }
            None => &x,
        };
        let args = MatmulArgs { x: buffer(x, m * k), weight, bias: None, out: buffer(&out, m * n), workspace };
        Ok(marlin::matmul(client, problem, launch, args)?)
    })
}

/// The least time in microseconds: what must be read and written at the card's rate, or the products at the tensor cores' rate.
fn floor(problem: &Problem) -> f64 {
    let Problem { m, n, k, .. } = *problem;
    let (m, n, k) = (m as f64, n as f64, k as f64);
    // As the peers' figures count it: 4 bits, and a scale of 2 bytes for each 128 weights.
    let bytes = k * n * (0.5 + 2.0 / 128.0) + 2.0 * m * (k + n);
    (bytes / READ_RATE).max(2.0 * m * k * n / FLOP_RATE) * 1e6
}

fn report(shape: &Shape, problem: &Problem, launch: Launch, us: f64) -> Row {
    let Problem { m, n, k, spec, permuted: act_order, .. } = *problem;
    let floor_us = floor(problem);
    let kernel = format!("marlin ({})", launch.tile);
    let rate = 2.0 * (m * n * k) as f64 / us / 1e6;
    println!("{:12} {k:>6} {n:>6} {m:>5}  {kernel:28} {us:>9.2} {floor_us:>9.2} {:>5.1}% {rate:>8.1}", shape.name, floor_us / us * 100.0);
    let (group, zero_points, dtype) = (spec.group.as_i64(), spec.zero_points, problem.activations.name());
    Row { kernel, shape: shape.name, k, n, m, group, zero_points, act_order, dtype, us, floor_us }
}
