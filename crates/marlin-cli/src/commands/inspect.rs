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
        let layer = name.rsplit_once('.').map_or("", |(layer, _)| layer);
        if compressed_tensors::contains(&checkpoint, layer) {
            // The parts of one weight come together, and count once.
            match rows.last_mut().filter(|row| row.name == layer) {
                Some(row) => row.bytes += checkpoint.tensor(name)?.bytes().len(),
                None => rows.push(quantized(&checkpoint, layer, name)?),
            }
            continue;
        }
        let tensor = checkpoint.tensor(name)?;
        let weights: usize = tensor.shape().iter().product();
        let bits = tensor.bytes().len() as f64 * 8.0 / weights.max(1) as f64;
        let format = format!("{:?}", tensor.dtype()).to_lowercase();
        rows.push(Row { name: (*name).to_owned(), format, shape: tensor.shape().to_vec(), bytes: tensor.bytes().len(), bits_per_weight: bits });
    }
    for row in rows.iter_mut().filter(|row| row.format.starts_with("int4")) {
        row.bits_per_weight = row.bytes as f64 * 8.0 / row.shape.iter().product::<usize>().max(1) as f64;
    }
    let weights: usize = rows.iter().map(|row| row.shape.iter().product::<usize>()).sum();
    let bytes: usize = rows.iter().map(|row| row.bytes).sum();
    let summary = Summary { tensors: rows, weights, bytes, bits_per_weight: bytes as f64 * 8.0 / weights.max(1) as f64 };
    if args.json {
        return Ok(output::json(&summary)?);
    }
    let cells = summary.tensors.iter().map(|row| {
        let shape = row.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
        vec![row.name.clone(), row.format.clone(), shape, output::size(row.bytes), format!("{:.2}", row.bits_per_weight)]
    });
    output::table(&["tensor", "format", "shape", "size", "bits per weight"], &cells.collect::<Vec<_>>());
    println!("{} weights in {}: {:.2} bits per weight", summary.weights, output::size(summary.bytes), summary.bits_per_weight);
    Ok(())
}

/// A row for a 4-bit layer [N, K], with the bytes of its first part.
fn quantized(checkpoint: &Checkpoint, layer: &str, part: &str) -> Result<Row, CliError> {
    let shape: Vec<usize> = checkpoint.tensor(&format!("{layer}.weight_shape"))?.to_i64()?.iter().map(|&size| usize::try_from(size).unwrap_or(0)).collect();
    let scales = checkpoint.tensor(&format!("{layer}.weight_scale"))?;
    let (k, groups) = (shape.get(1).copied().unwrap_or(0), scales.shape().get(1).copied().unwrap_or(1));
    let group = if groups <= 1 { "channel".to_owned() } else { format!("g{}", k / groups) };
    let dtype = format!("{:?}", scales.dtype()).to_lowercase();
    let zero_points = if checkpoint.contains(&format!("{layer}.weight_zero_point")) { " zero-points" } else { "" };
    let format = format!("int4 {group}{zero_points} {dtype}");
    Ok(Row { name: layer.to_owned(), format, shape, bytes: checkpoint.tensor(part)?.bytes().len(), bits_per_weight: 0.0 })
}
