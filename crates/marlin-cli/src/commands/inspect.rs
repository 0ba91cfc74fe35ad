use crate::args::InspectArgs;
use crate::error::CliError;
use crate::{device, output};
use burn::tensor::{Device, FloatDType};
use burn_marlin::{ActivationDtype, Bits, GroupSize, Problem, ScaleDtype, target};
use marlin_format::PlainWeight;
use marlin_format::checkpoint::{Checkpoint, LayerFormat, Part, Quantization, parts, read_layer};
use marlin_kernels::{layout_for, select};
use serde::Serialize;

/// A tensor, or the tensors of a quantised layer.
#[derive(Serialize)]
struct Row {
    name: String,
    /// The dtype of a tensor; of a quantised layer what wrote it and how.
    format: String,
    /// Of a quantised layer [N, K].
    shape: Vec<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    quantized: Option<Quantized>,
    bytes: usize,
    bits_per_weight: f64,
}

/// How a layer is quantised, as its tensors hold it, and what runs it.
#[derive(Serialize)]
struct Quantized {
    bits: Bits,
    /// Rows of K that share a scale, -1 for all of them.
    group: GroupSize,
    scales: ScaleDtype,
    zero_points: bool,
    act_order: bool,
    /// With one row of activations.
    kernel: String,
    reason: String,
}

#[derive(Serialize)]
struct Summary {
    tensors: Vec<Row>,
    weights: usize,
    bytes: usize,
    bits_per_weight: f64,
}

/// Reads and checks every quantised layer as a model's loader does, one at a time.
pub fn run(args: &InspectArgs) -> Result<(), CliError> {
    let device = device::open(args.device)?;
    let checkpoint = Checkpoint::open(&args.dir)?;
    let quantization = Quantization::read(&args.dir)?;
    let size = |name: &str| checkpoint.tensor(name).map(|tensor| tensor.bytes().len());
    let progress = output::progress_of_bytes(checkpoint.size_bytes());
    let mut rows = Vec::<Row>::new();
    for part in parts(&checkpoint, quantization.as_ref())? {
        let row = match part {
            Part::Layer { name, format, tensors } => {
                let weight = read_layer(&checkpoint, &name, &format)?;
                let bytes = tensors.iter().map(|tensor| size(tensor)).sum::<Result<usize, _>>()?;
                tensors.iter().for_each(|tensor| checkpoint.release(tensor));
                let row = quantized_row(&name, &format, &weight, bytes, &device);
                checkpoint.recycle(weight);
                row
            }
            Part::Tensor { name } => {
                let tensor = checkpoint.tensor(&name)?;
                let (bytes, shape) = (tensor.bytes().len(), tensor.shape().to_vec());
                let format = format!("{:?}", tensor.dtype()).to_lowercase();
                let bits_per_weight = bytes as f64 * 8.0 / shape.iter().product::<usize>().max(1) as f64;
                Row { name, format, shape, quantized: None, bytes, bits_per_weight }
            }
        };
        progress.inc(row.bytes as u64);
        rows.push(row);
    }
    progress.finish_and_clear();

    let weights: usize = rows.iter().map(|row| row.shape.iter().product::<usize>()).sum();
    let bytes: usize = rows.iter().map(|row| row.bytes).sum();
    let summary = Summary { tensors: rows, weights, bytes, bits_per_weight: bytes as f64 * 8.0 / weights.max(1) as f64 };
    if args.json {
        return output::json(&summary);
    }
    print(&summary, args.all)
}

fn quantized_row(layer: &str, format: &LayerFormat, weight: &PlainWeight, bytes: usize, device: &Device) -> Row {
    let (k, n, spec, permuted) = (weight.k(), weight.n(), weight.spec(), weight.row_permutation().is_some());
    let scales = ActivationDtype::from(spec.scale_dtype);
    let float = if scales == ActivationDtype::BF16 { FloatDType::BF16 } else { FloatDType::F16 };
    let activations = if device.supports_dtype(float) { scales } else { ActivationDtype::F32 };
    let problem = Problem { m: 1, n, k, spec, activations, scales, permuted };
    let target = target(device);
    let plan = select(&problem, layout_for(&problem, &target), &target);
    Row {
        name: layer.to_owned(),
        format: format!("{} {spec}{}", format.method(), if permuted { " act-order" } else { "" }),
        shape: vec![n, k],
        quantized: Some(Quantized {
            bits: spec.bits,
            group: spec.group,
            scales: spec.scale_dtype,
            zero_points: spec.zero_points,
            act_order: permuted,
            kernel: plan.kernel.to_string(),
            reason: plan.reason.to_string(),
        }),
        bytes,
        bits_per_weight: weight.bits_per_weight(),
    }
}

fn print(summary: &Summary, all: bool) -> Result<(), CliError> {
    let cells = summary.tensors.iter().map(|row| {
        let shape = row.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
        let (kernel, reason) = row.quantized.as_ref().map_or_else(Default::default, |row| (row.kernel.clone(), row.reason.clone()));
        vec![row.name.clone(), row.format.clone(), shape, output::size(row.bytes), format!("{:.2}", row.bits_per_weight), kernel, reason]
    });
    let size = if all { "size" } else { "size each" };
    let header = ["tensor or layer", "format", "shape", size, "bits per weight", "kernel", "reason"];
    output::layers(&header, cells.collect(), all)?;
    let (size, layers) = (output::size(summary.bytes), summary.tensors.iter().filter(|row| row.quantized.is_some()).count());
    let Summary { weights, bits_per_weight, .. } = summary;
    Ok(output::line(&format!("{weights} weights in {size}: {bits_per_weight:.2} bits per weight; {layers} quantised layers"))?)
}
