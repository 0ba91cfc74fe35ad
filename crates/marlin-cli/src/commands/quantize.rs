use super::dtype;
use crate::args::{DtypeName, FormatName, MethodName, QuantizeArgs};
use crate::device;
use crate::error::CliError;
use crate::hub;
use crate::output;
use crate::progress::Progress;
use marlin_format::{GroupSize, QuantSpec, ScaleDtype, Sparsity, WeightFormat};
use marlin_lm::{
    Calibration, ChatTemplate, FileFormat, Method, ModelConfig, QuantizeOptions, QuantizeReport,
    QuantizedLayer, RowOrder, SampleOptions, Tokenizer, calibration_samples, quantize_folder,
};
use serde_json::json;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

pub fn run(args: &QuantizeArgs) -> Result<(), CliError> {
    let scale_dtype = match args.scales {
        DtypeName::F16 => ScaleDtype::F16,
        DtypeName::Bf16 => ScaleDtype::BF16,
        DtypeName::F32 => ScaleDtype::F32,
    };
    let floats = args.format_values.as_deref();
    let spec = match floats.and_then(QuantSpec::of_float_format) {
        Some(spec) => spec,
        None => QuantSpec::new(args.bits, args.group)
            .with_zero_point(args.zero_points.into())
            .with_scale_dtype(scale_dtype),
    };
    let start = Instant::now();
    let is_sparse = args.sparse24 || args.method == MethodName::Sparsegpt;
    let format = match args.format {
        FormatName::CompressedTensors => FileFormat::CompressedTensors,
        FormatName::Gptq => FileFormat::Gptq,
        FormatName::Marlin24 => FileFormat::Marlin24,
    };
    let sparsity = if is_sparse {
        Sparsity::TwoFour
    } else {
        Sparsity::Dense
    };
    check_method(args)?;
    let dir = hub::folder(&args.dir, &args.hub)?;
    let (exclude, overrides) = (args.exclude.clone(), args.overrides.clone());
    let head = args
        .head
        .map(|value| QuantSpec::new(value, GroupSize::G128).with_scale_dtype(scale_dtype));
    let options = QuantizeOptions {
        format,
        sparsity,
        exclude,
        overrides,
        head,
        method: method(args, &dir)?,
    };

    let stopped = Arc::new(AtomicBool::new(false));
    if !matches!(options.method, Method::Round { .. }) {
        let stopped = stopped.clone();
        // Without a handler, Ctrl-C ends the program at once; the next run still resumes.
        if let Err(error) = ctrlc::set_handler(move || stopped.store(true, Ordering::Relaxed)) {
            tracing::debug!(%error, "no handler of Ctrl-C");
        }
    }
    let mut shown = Progress::of_blocks();
    let report = quantize_folder(&dir, &args.out, &spec, &options, |progress| {
        shown.set_bar(progress.done, progress.total, progress.tensor);
        shown.set_line(progress.blocks_done, progress.blocks);
        if stopped.load(Ordering::Relaxed) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    shown.finish();
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        let layers: Vec<_> = report
            .quantized
            .iter()
            .map(|layer| {
                json!({
                    "name": layer.name, "k": layer.k, "n": layer.n, "format": layer.spec.to_string(), "sparsity": layer.sparsity.to_string(),
                    "bits_per_weight": layer.bits_per_weight, "underflows": layer.underflows, "calibration": layer.loss,
                })
            })
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
    losses(&report)?;
    let weights: usize = report.quantized.iter().map(|layer| layer.k * layer.n).sum();
    let bits: f64 = report
        .quantized
        .iter()
        .map(|layer| layer.bits_per_weight * (layer.k * layer.n) as f64)
        .sum();
    let (layers, bits, skipped) = (
        report.quantized.len(),
        bits / weights.max(1) as f64,
        report.excluded.len(),
    );
    let sparse = report
        .quantized
        .iter()
        .filter(|layer| layer.sparsity == Sparsity::TwoFour)
        .count();
    let sparse = if sparse > 0 {
        format!(", {sparse} of them 2:4")
    } else {
        String::new()
    };
    let others = others(&report, &spec);
    output::line(&format!(
        "{layers} layers to {spec}{others}{sparse}, {bits:.2} bits per weight, {skipped} skipped"
    ))?;
    let small = report
        .quantized
        .iter()
        .filter(|layer| layer.underflows > 0)
        .count();
    if small > 0 {
        output::line(&format!(
            "{small} layers have weights too small for {scale_dtype} scales: --scales bf16 or f32 holds them"
        ))?;
    }
    let (source, target) = (
        output::size(report.source_bytes),
        output::size(report.target_bytes),
    );
    Ok(output::line(&format!(
        "{source} to {target} in {seconds:.1} s: {}",
        args.out.display()
    ))?)
}

/// Checks that the arguments fit the quantisation method.
fn check_method(args: &QuantizeArgs) -> Result<(), CliError> {
    let has_text = !args.calibration.is_empty();
    match (args.method, has_text) {
        (MethodName::Rtn, _) if args.awq => Err(CliError::AwqOfRtn),
        (MethodName::Rtn, true) => Err(CliError::CalibrationOfRtn),
        (MethodName::Awq | MethodName::Gptq | MethodName::Sparsegpt, false) => {
            Err(CliError::NoCalibration)
        }
        _ => Ok(()),
    }
}

/// Returns the quantisation method, with its calibration samples, for the model in a folder.
fn method(args: &QuantizeArgs, dir: &Path) -> Result<Method, CliError> {
    if args.method == MethodName::Rtn {
        return Ok(Method::Round {
            clipping: args.clip,
        });
    }
    let config = ModelConfig::read(&dir.join("config.json"))?;
    let max_len = args
        .max_len
        .unwrap_or(SampleOptions::default().max_len.min(config.positions()));
    let tokenizer = Tokenizer::open(&dir.join("tokenizer.json"))?.for_model(config.vocab_size);
    let template = ChatTemplate::open(dir)?;
    let options = SampleOptions {
        samples: args.samples,
        max_len,
        seed: args.seed,
    };
    let samples = calibration_samples(&args.calibration, &tokenizer, template.as_ref(), &options)?;
    let calibration = Calibration {
        samples,
        device: device::open(args.device)?,
        dtype: args.dtype.map(dtype),
        route_all: args.route_all,
    };
    if args.method == MethodName::Awq {
        return Ok(Method::Awq { calibration });
    }
    let order = if args.act_order {
        RowOrder::ActOrder
    } else {
        RowOrder::default()
    };
    Ok(Method::Gptq {
        order,
        damping: args.damping,
        awq: args.awq,
        calibration,
    })
}

/// Describes the layers that are quantised with another spec than `spec`: their number and their
/// spec.
fn others(report: &QuantizeReport, spec: &QuantSpec) -> String {
    let mut counts: Vec<(QuantSpec, usize)> = Vec::new();
    for layer in report.quantized.iter().filter(|layer| layer.spec != *spec) {
        match counts.iter_mut().find(|(of, _)| *of == layer.spec) {
            Some((_, count)) => *count += 1,
            None => counts.push((layer.spec, 1)),
        }
    }
    counts
        .iter()
        .map(|(spec, count)| format!(", {count} of them to {spec}"))
        .collect()
}

/// Prints a line for each layer whose loss is known, or that needs a note.
fn losses(report: &QuantizeReport) -> Result<(), CliError> {
    let row = |layer: &QuantizedLayer| {
        let found = layer.loss.as_ref()?;
        let notes: Vec<String> = [
            found
                .fell_back
                .then(|| "rounded: too few tokens".to_owned()),
            (found.dead > 0).then(|| format!("{} dead inputs", found.dead)),
            found
                .damping
                .filter(|damping| *damping > 0.01)
                .map(|damping| format!("damping {damping:e}")),
        ]
        .into_iter()
        .flatten()
        .collect();
        let loss = found
            .loss
            .map_or_else(String::new, |loss| format!("{loss:.4e}"));
        (found.loss.is_some() || !notes.is_empty()).then(|| {
            vec![
                layer.name.clone(),
                found.tokens.to_string(),
                loss,
                notes.join(", "),
            ]
        })
    };
    let rows: Vec<Vec<String>> = report.quantized.iter().filter_map(row).collect();
    if rows.is_empty() {
        return Ok(());
    }
    Ok(output::table(&["layer", "tokens", "loss", ""], &rows)?)
}
