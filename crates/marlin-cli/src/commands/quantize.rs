use crate::args::{FormatName, QuantizeArgs};
use crate::error::CliError;
use crate::output;
use marlin_format::{QuantSpec, Sparsity, WeightFormat};
use marlin_llama::{FileFormat, QuantizeOptions, quantize_folder};
use serde_json::json;
use std::time::Instant;

pub fn run(args: &QuantizeArgs) -> Result<(), CliError> {
    let mut spec = QuantSpec { bits: args.bits, ..QuantSpec::int4(args.group) };
    if args.zero_points {
        spec = spec.with_zero_points();
    }
    let start = Instant::now();
    let bar = output::progress(0);
    let format = match args.format {
        Some(FormatName::CompressedTensors) => FileFormat::CompressedTensors,
        Some(FormatName::Gptq) => FileFormat::Gptq,
        Some(FormatName::Marlin24) => FileFormat::Marlin24,
        None if args.sparse24 => FileFormat::Marlin24,
        None => FileFormat::default(),
    };
    let sparsity = if args.sparse24 { Sparsity::TwoFour } else { Sparsity::Dense };
    let options = QuantizeOptions { format, sparsity, exclude: args.exclude.clone() };
    let report = quantize_folder(&args.dir, &args.out, &spec, &options, |progress| {
        bar.set_length(progress.total as u64);
        bar.set_position(progress.done as u64);
        bar.set_message(progress.tensor.to_owned());
    })?;
    bar.finish_and_clear();
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        let layers: Vec<_> = report
            .quantized
            .iter()
            .map(|layer| json!({"name": layer.name, "k": layer.k, "n": layer.n, "sparsity": layer.sparsity.to_string(), "bits_per_weight": layer.bits_per_weight}))
            .collect();
        return output::json(&json!({
            "format": WeightFormat::dense(spec).with_sparsity(sparsity).to_string(),
            "quantized": layers,
            "excluded": report.excluded,
            "source_bytes": report.source_bytes,
            "target_bytes": report.target_bytes,
            "seconds": seconds,
        }));
    }
    let weights: usize = report.quantized.iter().map(|layer| layer.k * layer.n).sum();
    let bits: f64 = report.quantized.iter().map(|layer| layer.bits_per_weight * (layer.k * layer.n) as f64).sum();
    let (layers, bits, left) = (report.quantized.len(), bits / weights.max(1) as f64, report.excluded.len());
    let sparse = report.quantized.iter().filter(|layer| layer.sparsity == Sparsity::TwoFour).count();
    let sparse = if sparse > 0 { format!(", {sparse} of them 2:4") } else { String::new() };
    output::line(&format!("{layers} layers to {spec}{sparse}, {bits:.2} bits per weight, {left} left"))?;
    let (source, target) = (output::size(report.source_bytes), output::size(report.target_bytes));
    Ok(output::line(&format!("{source} to {target} in {seconds:.1} s: {}", args.out.display()))?)
}
