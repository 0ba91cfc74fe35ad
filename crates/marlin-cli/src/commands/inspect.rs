use crate::args::InspectArgs;
use crate::error::CliError;
use crate::output;
use marlin_format::checkpoint::{Checkpoint, compressed_tensors};
use serde::Serialize;

#[derive(Serialize)]
struct Row {
    name: String,
    format: String,
    shape: Vec<usize>,
    bytes: usize,
    bits_per_weight: f64,
}

#[derive(Serialize)]
struct Summary {
    tensors: Vec<Row>,
    weights: usize,
    bytes: usize,
    bits_per_weight: f64,
}

pub fn run(args: &InspectArgs) -> Result<(), CliError> {
    let checkpoint = Checkpoint::open(&args.dir)?;
    let mut rows: Vec<Row> = Vec::new();
    let names: Vec<&str> = checkpoint.names().collect();
    for name in &names {
        let bytes = checkpoint.tensor(name)?.bytes().len();
        let part =
            name.rsplit_once('.').filter(|(layer, part)| part.starts_with("weight_") && compressed_tensors::contains(&checkpoint, layer));
        if let Some((layer, part)) = part {
            // The parts of one weight come together, and count once.
            if rows.last().is_none_or(|row| row.name != layer) {
                rows.push(quantized(&checkpoint, layer)?);
            }
            if let Some(row) = rows.last_mut() {
                row.bytes += bytes;
                // The shape is about the weight, not of it.
                row.bits_per_weight += if part == "weight_shape" { 0.0 } else { bits(bytes, &row.shape) };
            }
            continue;
        }
        let tensor = checkpoint.tensor(name)?;
        let (format, shape) = (format!("{:?}", tensor.dtype()).to_lowercase(), tensor.shape().to_vec());
        let bits_per_weight = bits(bytes, &shape);
        rows.push(Row { name: (*name).to_owned(), format, shape, bytes, bits_per_weight });
    }
    let weights: usize = rows.iter().map(|row| row.shape.iter().product::<usize>()).sum();
    let bytes: usize = rows.iter().map(|row| row.bytes).sum();
    let summary = Summary { tensors: rows, weights, bytes, bits_per_weight: bytes as f64 * 8.0 / weights.max(1) as f64 };
    if args.json {
        return output::json(&summary);
    }
    let cells = summary.tensors.iter().map(|row| {
        let shape = row.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
        vec![row.name.clone(), row.format.clone(), shape, output::size(row.bytes), format!("{:.2}", row.bits_per_weight)]
    });
    output::table(&["tensor", "format", "shape", "size", "bits per weight"], &cells.collect::<Vec<_>>())?;
    let size = output::size(summary.bytes);
    Ok(output::line(&format!("{} weights in {size}: {:.2} bits per weight", summary.weights, summary.bits_per_weight))?)
}

/// Bits for each element of a shape.
fn bits(bytes: usize, shape: &[usize]) -> f64 {
    bytes as f64 * 8.0 / shape.iter().product::<usize>().max(1) as f64
}

/// The row of a 4-bit layer [N, K], without bytes.
fn quantized(checkpoint: &Checkpoint, layer: &str) -> Result<Row, CliError> {
    let tensor = |part: &str| checkpoint.tensor(&format!("{layer}.{part}"));
    let sizes = tensor("weight_shape")?.expect_shape(&[2])?.to_i64()?;
    let shape: Vec<usize> = sizes.iter().map(|&size| usize::try_from(size).unwrap_or(0)).collect();
    let (n, k) = (shape[0], shape[1]);
    tensor("weight_packed")?.expect_shape(&[n, k.div_ceil(8)])?;
    let scales = tensor("weight_scale")?;
    let groups = scales.shape().get(1).copied().unwrap_or(1);
    let group = if groups <= 1 { "channel".to_owned() } else { format!("g{}", k / groups) };
    let dtype = format!("{:?}", scales.dtype()).to_lowercase();
    let zero_points = if checkpoint.contains(&format!("{layer}.weight_zero_point")) { " zero-points" } else { "" };
    let format = format!("int4 {group}{zero_points} {dtype}");
    Ok(Row { name: layer.to_owned(), format, shape, bytes: 0, bits_per_weight: 0.0 })
}
