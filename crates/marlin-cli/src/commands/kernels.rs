use super::open;
use crate::args::KernelsArgs;
use crate::error::CliError;
use crate::output;
use burn::tensor::FloatDType;
use burn_marlin::ActivationDtype;
use marlin_llama::Projection;
use serde::Serialize;

#[derive(Serialize)]
struct Row {
    layer: String,
    k: usize,
    n: usize,
    rows: usize,
    format: String,
    kernel: String,
    reason: String,
}

pub fn run(args: &KernelsArgs) -> Result<(), CliError> {
    let llama = open(&args.model, false)?;
    let activations = match llama.model.dtype() {
        FloatDType::F16 => ActivationDtype::F16,
        FloatDType::BF16 => ActivationDtype::BF16,
        _ => ActivationDtype::F32,
    };
    let mut rows = Vec::new();
    for (layer, projection) in llama.model.projections() {
        let [k, n] = projection.dims();
        for &m in &args.rows {
            let (format, kernel, reason) = match projection {
                Projection::Quant(linear) => {
                    let plan = linear.weight().plan(m, activations, marlin_kernels::Prologue::None);
                    (linear.weight().spec().to_string(), plan.kernel.to_string(), plan.reason.to_string())
                }
                Projection::Dense(_) => {
                    (activations.to_string(), "Burn's matmul".into(), "the checkpoint holds this layer in float".into())
                }
            };
            rows.push(Row { layer: layer.clone(), k, n, rows: m, format, kernel, reason });
        }
    }
    if args.json {
        return output::json(&rows);
    }
    let cells = rows
        .into_iter()
        .map(|row| vec![row.layer, row.k.to_string(), row.n.to_string(), row.rows.to_string(), row.format, row.kernel, row.reason]);
    Ok(output::layers(&["layer", "K", "N", "M", "format", "kernel", "reason"], cells.collect(), args.all)?)
}
