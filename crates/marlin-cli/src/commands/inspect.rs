use crate::args::InspectArgs;
use crate::error::CliError;
use crate::experts::ExpertsRow;
use crate::progress::Progress;
use crate::{device, hub, output};
use burn::tensor::{Device, FloatDType};
use burn_marlin::device::target;
use burn_marlin::{ActivationDtype, GroupSize, ScaleDtype, WeightValue};
use marlin_format::PlainWeight;
use marlin_format::checkpoint::{
    Checkpoint, CheckpointEntry, CheckpointError, LayerFormat, Quantization, TensorView, entries,
    read_layer,
};
use marlin_kernels::{QuantProblem, device_layout, plan};
use marlin_lm::{ModelConfig, OpenOptions, check_folder};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// A tensor, or the tensors of a quantised layer.
#[derive(Serialize)]
struct TensorRow {
    name: String,
    /// The dtype of a tensor; for a quantised layer its checkpoint format and spec.
    format: String,
    /// The shape; [N, K] for a quantised layer.
    shape: Vec<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    quantized: Option<Quantized>,
    bytes: usize,
    bits_per_weight: f64,
}

/// The quantisation of a layer, as stored in its tensors, and the kernel that runs it.
#[derive(Serialize)]
struct Quantized {
    bits: WeightValue,
    /// Rows of K that share a scale, -1 for all of them.
    group: GroupSize,
    scales: ScaleDtype,
    zero_points: bool,
    act_order: bool,
    /// `dense` or `2:4`.
    sparsity: String,
    /// The kernel for one row of activations.
    kernel: String,
    reason: String,
}

#[derive(Serialize)]
struct Summary {
    tensors: Vec<TensorRow>,
    /// The experts of a mixture.
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<ExpertsRow>,
    weights: usize,
    bytes: usize,
    bits_per_weight: f64,
    /// The faults of the folder. If there are none, `generate` accepts the folder.
    faults: Vec<String>,
}

/// Opens every file of a folder that can be opened. Reads every quantised layer of the model, one
/// at a time, and a sample of every other tensor.
pub fn run(args: &InspectArgs) -> Result<(), CliError> {
    let device = device::open(args.device)?;
    let dir = hub::folder(&args.dir, &args.hub)?;
    let progress = Progress::of_bytes("read");
    // The layers of the model, added as they are read. The checkpoint may have other layers.
    let mut layers = BTreeMap::new();
    let faults = check_folder(
        &dir,
        &device,
        &OpenOptions::default(),
        |name, format, weight| {
            progress.set_message(name);
            layers.insert(
                name.to_owned(),
                quantized_row(name, format, weight, &device),
            );
        },
    );
    progress.finish();
    let mut faults: Vec<String> = faults.iter().map(|fault| output::message(fault)).collect();
    let mut keep = |error: &CheckpointError| {
        let fault = output::message(error);
        // A part that could not be opened above fails here with the same fault.
        if !faults.contains(&fault) {
            faults.push(fault);
        }
    };
    let rows = Checkpoint::open(&dir)
        .and_then(|checkpoint| rows(&dir, &checkpoint, &device, layers, &mut keep));
    let tensors = rows.unwrap_or_else(|error| {
        keep(&error);
        Vec::new()
    });
    let weights: usize = tensors
        .iter()
        .map(|row| row.shape.iter().product::<usize>())
        .sum();
    let bytes: usize = tensors.iter().map(|row| row.bytes).sum();
    let config = ModelConfig::read(&dir.join("config.json")).ok();
    let experts = config.and_then(|config| ExpertsRow::of(&config));
    let summary = Summary {
        tensors,
        experts,
        weights,
        bytes,
        bits_per_weight: bytes as f64 * 8.0 / weights.max(1) as f64,
        faults,
    };
    match (args.json, summary.tensors.is_empty()) {
        (true, _) => output::json(&summary)?,
        (false, true) => {}
        (false, false) => print(&summary, args.all)?,
    }
    for fault in &summary.faults {
        eprintln!("fault: {fault}");
    }
    match summary.faults.len() {
        0 => Ok(()),
        count => Err(CliError::Faults {
            dir: args.dir.clone(),
            count,
        }),
    }
}

/// Lists the contents of the checkpoint. `layers` are the layers that were already read; layers
/// that are not part of the model are read here.
fn rows(
    dir: &Path,
    checkpoint: &Checkpoint,
    device: &Device,
    mut layers: BTreeMap<String, TensorRow>,
    keep: &mut impl FnMut(&CheckpointError),
) -> Result<Vec<TensorRow>, CheckpointError> {
    // Faults of the configs are reported above. Without configs every tensor has a row of its own.
    let quantization = Quantization::read(dir).ok().flatten();
    let mut rows = Vec::new();
    for part in entries(checkpoint, quantization.as_ref())? {
        let row = match part {
            CheckpointEntry::Tensor { name } => tensor_row(checkpoint.tensor(&name)?),
            CheckpointEntry::Layer {
                name,
                format,
                tensors,
            } => {
                let bytes = tensors
                    .iter()
                    .map(|name| Ok(checkpoint.tensor(name)?.bytes().len()))
                    .sum::<Result<usize, CheckpointError>>()?;
                let unread = || TensorRow {
                    name: name.clone(),
                    format: format.to_string(),
                    shape: Vec::new(),
                    quantized: None,
                    bytes,
                    bits_per_weight: 0.0,
                };
                let row = layers.remove(&name).map_or_else(
                    || {
                        if checkpoint.is_sparse_file() {
                            return Ok(unread());
                        }
                        let weight = read_layer(checkpoint, &name, &format)?;
                        let row = quantized_row(&name, &format, &weight, device);
                        checkpoint.recycle(weight);
                        Ok(row)
                    },
                    Ok,
                );
                tensors.iter().for_each(|tensor| checkpoint.release(tensor));
                match row {
                    Ok(row) => TensorRow { bytes, ..row },
                    Err(error) => {
                        keep(&error);
                        unread()
                    }
                }
            }
        };
        rows.push(row);
    }
    Ok(rows)
}

fn tensor_row(tensor: TensorView<'_>) -> TensorRow {
    let (bytes, shape) = (tensor.bytes().len(), tensor.shape().to_vec());
    let sparsity = if tensor.looks_two_four() { " 2:4" } else { "" };
    let format = format!("{:?}{sparsity}", tensor.dtype()).to_lowercase();
    let bits_per_weight = bytes as f64 * 8.0 / shape.iter().product::<usize>().max(1) as f64;
    TensorRow {
        name: tensor.name().into(),
        format,
        shape,
        quantized: None,
        bytes,
        bits_per_weight,
    }
}

/// Returns the row of a layer that was read. The layer's bytes are not known here and stay 0.
fn quantized_row(
    layer: &str,
    format: &LayerFormat,
    weight: &PlainWeight,
    device: &Device,
) -> TensorRow {
    let (k, n, spec, permuted) = (
        weight.k(),
        weight.n(),
        weight.spec(),
        weight.row_permutation().is_some(),
    );
    let scales = ActivationDtype::from(spec.scales.dtype);
    let activations = match scales {
        ActivationDtype::F16 if device.supports_dtype(FloatDType::F16) => scales,
        ActivationDtype::BF16 if device.supports_dtype(FloatDType::BF16) => scales,
        _ => ActivationDtype::F32,
    };
    let (problem, target) = (
        QuantProblem::new(1, weight.descriptor(), activations),
        target(device),
    );
    let plan = plan(
        QuantProblem {
            weight: device_layout(&problem, &target),
            ..problem
        },
        &target,
    );
    TensorRow {
        name: layer.to_owned(),
        format: format!("{} {}", format.method(), weight.descriptor().format),
        shape: vec![n, k],
        quantized: Some(Quantized {
            bits: spec.value,
            group: spec.scales.group,
            scales: spec.scales.dtype,
            zero_points: spec.has_zero_points(),
            act_order: permuted,
            sparsity: weight.sparsity().to_string(),
            kernel: plan.kernel.to_string(),
            reason: plan.reason.to_string(),
        }),
        bytes: 0,
        bits_per_weight: weight.bits_per_weight(),
    }
}

fn print(summary: &Summary, all: bool) -> Result<(), CliError> {
    let cells = summary.tensors.iter().map(|row| {
        let shape = row
            .shape
            .iter()
            .map(usize::to_string)
            .collect::<Vec<_>>()
            .join(" x ");
        let (kernel, reason) = row.quantized.as_ref().map_or_else(Default::default, |row| {
            (row.kernel.clone(), row.reason.clone())
        });
        vec![
            row.name.clone(),
            row.format.clone(),
            shape,
            output::size(row.bytes),
            format!("{:.2}", row.bits_per_weight),
            kernel,
            reason,
        ]
    });
    let size = if all { "size" } else { "size each" };
    let header = [
        "tensor or layer",
        "format",
        "shape",
        size,
        "bits per weight",
        "kernel",
        "reason",
    ];
    output::layers(&header, cells.collect(), all)?;
    let (size, layers) = (
        output::size(summary.bytes),
        summary
            .tensors
            .iter()
            .filter(|row| row.quantized.is_some())
            .count(),
    );
    let Summary {
        weights,
        bits_per_weight,
        ..
    } = summary;
    output::line(&format!(
        "{weights} weights in {size}: {bits_per_weight:.2} bits per weight; {layers} quantised layers"
    ))?;
    match &summary.experts {
        Some(experts) => Ok(output::line(&experts.to_string())?),
        None => Ok(()),
    }
}
