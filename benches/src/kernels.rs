//! Times W4A16 matmuls.

use crate::operands::{Weights, activations, buffer, row_permutation};
use crate::record::{self, KernelFigure};
use crate::shapes::{Shape, named};
use crate::timing::time;
use crate::{BenchError, KernelArgs};
use cubecl::client::Client;
use cubecl::cuda::CudaDevice;
use marlin_format::{
    QuantSpec, ScaleDtype, Sparsity, WeightDescriptor, WeightFormat, WeightLayout,
};
use marlin_kernels::inspect::source_of;
use marlin_kernels::{
    ActivationDtype, Kernel, Operands, Plan, QuantProblem, Reason, Target, launch, plan, tile,
};

/// The measured rates of a card, from which the lower bound of a time is computed.
#[derive(Debug, Clone, Copy)]
pub struct Rates {
    /// Bytes read per second.
    pub read: f64,
    /// Floating-point operations per second of products in 16 bits.
    pub flops: f64,
}

/// Returns the measured rates of a card: those of a plain read of 4 GiB, and of a dense 8192 x 8192
/// x 8192 product in bf16. Returns `None` for cards that were not measured.
pub fn rates(card: &str) -> Option<Rates> {
    let (read, flops) = if card.contains("H200") {
        (4.37e12, 790e12)
    } else if card.contains("H100") {
        (3.10e12, 724e12)
    } else {
        return None;
    };
    Some(Rates { read, flops })
}

/// The approximate duration of a graph, in microseconds.
const GRAPH_MICROSECONDS: f64 = 4000.0;

/// Times the kernels in the arguments, prints a line for each, and writes the record.
pub fn run(args: &KernelArgs) -> Result<(), BenchError> {
    let client = cubecl::Device::from(CudaDevice::new(0)).client();
    let card = Target::of(&client).card.ok_or(BenchError::Card)?;
    let dtype = if args.bf16 {
        ActivationDtype::BF16
    } else {
        ActivationDtype::F16
    };
    let scales = if args.bf16 {
        ScaleDtype::BF16
    } else {
        ScaleDtype::F16
    };
    let spec = QuantSpec::new(args.bits, args.group)
        .with_zero_point(args.zero_points.into())
        .with_scale_dtype(scales)
        .with_fp8_activations(args.w8a8);
    let sparsity = if args.sparse {
        Sparsity::TwoFour
    } else {
        Sparsity::Dense
    };
    let format = WeightFormat::dense(spec)
        .with_permutation(args.act_order)
        .with_sparsity(sparsity);

    let name = client.properties().identity.name.clone();
    println!("{name}: {format} {dtype}");
    println!(
        "{:12} {:>6} {:>6} {:>5}  {:28} {:>9} {:>9} {:>6} {:>8}",
        "shape", "K", "N", "M", "kernel", "us", "floor us", "floor", "TFLOP/s"
    );
    let mut rows = Vec::new();
    for shape in named(&args.shapes)? {
        let weights = Weights::random(&client, &shape, format, dtype);
        for &m in &args.m {
            let weight =
                WeightDescriptor::plain(format, shape.k, shape.n).in_layout(WeightLayout::Tile);
            let problem = QuantProblem::new(m, weight, dtype);
            let plans: Vec<Plan> = if args.every_tile {
                let reason = Reason::TensorCores {
                    capability: card.capability,
                };
                tile::launches(&problem, &card)
                    .into_iter()
                    .map(|launch| Plan::product(Kernel::Marlin(launch), reason))
                    .collect()
            } else {
                let planned = plan(problem, &Target::of(&client));
                Some(planned)
                    .into_iter()
                    .filter(|plan| matches!(plan.kernel, Kernel::Marlin(_) | Kernel::Gemv { .. }))
                    .collect()
            };
            if plans.is_empty() {
                return Err(BenchError::NoTile);
            }
            for plan in plans {
                let floor = floor(&problem, rates(&name));
                let us = time_plan(&client, &problem, &plan, &weights, floor)?;
                rows.push(report(&shape, &problem, &plan, card.capability, us, floor));
            }
        }
    }
    match &args.record {
        Some(path) => record::write(path, &name, &rows),
        None => Ok(()),
    }
}

/// Times a plan. With act-order, a call includes the launch that permutes the activations.
fn time_plan(
    client: &Client,
    problem: &QuantProblem,
    plan: &Plan,
    weights: &Weights,
    floor: Option<f64>,
) -> Result<f64, BenchError> {
    let (m, n, k) = (problem.m, problem.n(), problem.k());
    let x = activations(client, m, k, problem.activations);
    let rows = problem
        .weight
        .format
        .permuted
        .then(|| row_permutation(client, k));
    let out = client.empty(m * n * 2);
    // The number of calls is a multiple of the copies, so that every copy of the weight is read
    // equally often.
    let calls = (GRAPH_MICROSECONDS / floor.unwrap_or_default().max(4.0)) as usize;
    let calls = calls.clamp(1, 1000).next_multiple_of(weights.copies());
    time(client, calls, |call| {
        let weight = weights.of_call(call, rows.as_ref().map(|rows| buffer(rows, k)));
        let operands = Operands {
            x: buffer(&x, m * k),
            norm: None,
            weight,
            bias: None,
            out: buffer(&out, m * n),
        };
        Ok(launch(client, problem, plan, operands)?)
    })
}

/// Returns the lower bound of the time in microseconds: the time to read the bytes or to compute
/// the products, whichever is longer.
fn floor(problem: &QuantProblem, rates: Option<Rates>) -> Option<f64> {
    let (m, n, k) = (problem.m as f64, problem.n() as f64, problem.k() as f64);
    // A weight counts with its bits (with 2:4, half of them and 1 bit of metadata), and with a
    // scale of 2 bytes for each 128 weights, as in the figures published for other kernels. Sparse
    // tensor cores take half the time for the same number of products.
    let spec = problem.spec();
    let bytes_each = spec.value.bits() as f64 / 8.0;
    // Floats count with the scales of their files.
    let scale_bytes = match spec.float_format() {
        Some("mxfp4") => 1.0 / 32.0,
        Some("nvfp4") => 1.0 / 16.0,
        Some(_) => 4.0 / k,
        None => 2.0 / 128.0,
    };
    let (weight, flops) = match problem.weight.format.sparsity {
        Sparsity::Dense => (bytes_each, 1.0),
        Sparsity::TwoFour => (bytes_each / 2.0 + 0.125, 2.0),
    };
    let bytes = k * n * (weight + scale_bytes) + 2.0 * m * (k + n);
    rates.map(|rates| (bytes / rates.read).max(2.0 * m * k * n / (flops * rates.flops)) * 1e6)
}

fn report(
    shape: &Shape,
    problem: &QuantProblem,
    plan: &Plan,
    capability: u32,
    us: f64,
    floor_us: Option<f64>,
) -> KernelFigure {
    let (m, n, k, spec) = (problem.m, problem.n(), problem.k(), problem.spec());
    let kernel = plan.kernel.to_string();
    let routine = match plan.kernel {
        Kernel::Gemv { .. } => "gemv",
        Kernel::Marlin(launch) if launch.tile.is_wgmma() => "wgmma",
        _ => "mma_sync",
    };
    let rate = 2.0 * (m * n * k) as f64 / us / 1e6;
    let (floor, share) = floor_us.map_or(("-".into(), "-".into()), |floor| {
        (format!("{floor:.2}"), format!("{:.1}%", floor / us * 100.0))
    });
    println!(
        "{:12} {k:>6} {n:>6} {m:>5}  {kernel:28} {us:>9.2} {floor:>9} {share:>6} {rate:>8.1}",
        shape.name
    );
    KernelFigure {
        routine,
        text: source_of(problem, &plan.kernel, capability)
            .ok()
            .flatten()
            .map(|source| source.digest()),
        kernel,
        shape: shape.name,
        k,
        n,
        m,
        bits: spec.value.bits(),
        value: spec.value.is_float().then(|| spec.value.to_string()),
        group: spec.scales.group.as_i64(),
        zero_points: spec.has_zero_points(),
        act_order: problem.weight.format.permuted,
        sparsity: problem.weight.format.sparsity.to_string(),
        dtype: problem.activations.name(),
        us,
        floor_us,
    }
}
