use super::open;
use crate::args::KernelsArgs;
use crate::error::CliError;
use crate::experts::ExpertsRow;
use crate::output;
use marlin_kernels::{EpilogueStage, Problem, PrologueStage};
use marlin_lm::model::LayerPlan;
use serde::Serialize;

#[derive(Serialize)]
struct PlanRow {
    layer: String,
    k: usize,
    n: usize,
    rows: usize,
    /// The matrices of a weight: of experts, of which each row has one.
    matrices: usize,
    format: String,
    prologue: &'static str,
    epilogue: &'static str,
    kernel: String,
    reason: String,
}

impl PlanRow {
    fn new(
        LayerPlan {
            layer,
            problem,
            plan,
        }: &LayerPlan,
    ) -> Self {
        let ([rows, k, n], matrices, format) = match problem {
            Problem::Quant(problem) => (
                [problem.m, problem.k(), problem.n()],
                problem.weight.experts,
                problem.weight.format.to_string(),
            ),
            Problem::Float(problem) => (
                [problem.m, problem.k, problem.n],
                1,
                problem.dtype.to_string(),
            ),
        };
        let prologue = match plan.prologue {
            PrologueStage::None => "none",
            PrologueStage::InKernel => "norm in the kernel",
            PrologueStage::Before => "norm before",
        };
        let epilogue = match plan.epilogue {
            EpilogueStage::None => "none",
            EpilogueStage::InKernel => "SwiGLU in the kernel",
            EpilogueStage::After => "SwiGLU after",
        };
        let (kernel, reason) = (plan.kernel.to_string(), plan.reason.to_string());
        Self {
            layer: layer.clone(),
            k,
            n,
            rows,
            matrices,
            format,
            prologue,
            epilogue,
            kernel,
            reason,
        }
    }
}

pub fn run(args: &KernelsArgs) -> Result<(), CliError> {
    let llama = open(&args.model, false)?;
    let plans: Vec<Vec<LayerPlan>> = args
        .rows
        .iter()
        .map(|&rows| llama.model.plans(rows))
        .collect();
    // The rows of one layer are consecutive.
    let layers = plans.first().map_or(0, Vec::len);
    let rows: Vec<PlanRow> = (0..layers)
        .flat_map(|layer| plans.iter().map(move |plans| PlanRow::new(&plans[layer])))
        .collect();
    if args.json {
        return output::json(&rows);
    }
    let cells = rows.into_iter().map(|row| {
        let [k, n, rows] = [row.k, row.n, row.rows].map(|length| length.to_string());
        vec![
            row.layer,
            k,
            n,
            rows,
            row.format,
            row.prologue.into(),
            row.epilogue.into(),
            row.kernel,
            row.reason,
        ]
    });
    output::layers(
        &[
            "layer", "K", "N", "M", "format", "prologue", "epilogue", "kernel", "reason",
        ],
        cells.collect(),
        args.all,
    )?;
    match ExpertsRow::of(llama.model.config()) {
        Some(experts) => Ok(output::line(&format!(
            "{experts}: M of their layers is the number of rows, each once for each of its experts"
        ))?),
        None => Ok(()),
    }
}
