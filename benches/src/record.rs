//! The record file with the figures of a run.

use crate::BenchError;
use serde::Serialize;
use std::path::Path;
use std::process::Command;
use time::OffsetDateTime;

/// The digest of the sources of a decode step, for rows of whole models; `build.rs` computes it.
pub const STEP_DIGEST: &str = env!("STEP_DIGEST");

/// The time of a kernel for one problem.
#[derive(Debug, Serialize)]
pub struct KernelFigure {
    /// The routine that was timed.
    pub routine: &'static str,
    /// The digest of the kernel's CUDA text:
    /// [`digest`](marlin_kernels::inspect::KernelSource::digest).
    pub text: Option<String>,
    pub kernel: String,
    pub shape: &'static str,
    pub k: usize,
    pub n: usize,
    pub m: usize,
    /// The number of bits of a weight.
    pub bits: usize,
    /// The kind of the values, if they are floats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The number of rows of K that share a scale; -1 for all.
    pub group: i64,
    pub zero_points: bool,
    /// True if the weight has act-order.
    pub act_order: bool,
    /// The sparsity of the weight, `dense` or `2:4`.
    pub sparsity: String,
    pub dtype: &'static str,
    /// The time of a call in microseconds.
    pub us: f64,
    /// The lower bound of the time from the rates of the card's memory and tensor cores, in
    /// microseconds; `None` if the rates were not measured.
    pub floor_us: Option<f64>,
}

/// The record of a run on one card.
#[derive(Debug, Serialize)]
struct Record<'a, R> {
    card: &'a str,
    driver: String,
    date: String,
    rows: &'a [R],
}

/// Writes the rows of a run to a record file.
pub fn write<R: Serialize>(path: &Path, card: &str, rows: &[R]) -> Result<(), BenchError> {
    let date = OffsetDateTime::now_utc().date().to_string();
    let record = Record {
        card,
        driver: driver(),
        date,
        rows,
    };
    let text = serde_json::to_string_pretty(&record)? + "\n";
    std::fs::write(path, text).map_err(|source| BenchError::File {
        path: path.into(),
        source,
    })
}

/// Returns the version of the driver, from `nvidia-smi`.
fn driver() -> String {
    let output = Command::new("nvidia-smi")
        .args([
            "--query-gpu=driver_version",
            "--format=csv,noheader",
            "--id=0",
        ])
        .output();
    let found = output
        .ok()
        .filter(|output| output.status.success())
        .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    found.unwrap_or_else(|| "unknown".into())
}
