//! The record file with the figures of a run.

use ladder::LadderError;
use serde::Serialize;
use std::path::Path;
use std::process::Command;
use time::OffsetDateTime;

/// The time and error of a step for one problem.
#[derive(Debug, Serialize)]
pub struct StepFigure {
    /// Always "ladder".
    pub routine: &'static str,
    /// The digest of the kernel's CUDA text; `None` in a build without the feature `cuda`, and on
    /// other devices.
    pub text: Option<String>,
    pub step: usize,
    pub name: &'static str,
    pub m: usize,
    pub k: usize,
    pub n: usize,
    /// The time of a call in microseconds.
    pub us: f64,
    /// The time to read and write the operands once, in microseconds; `None` if the memory's rate
    /// is not known.
    pub floor_us: Option<f64>,
    /// The relative error compared with the product in f64.
    pub relative_error: f64,
}

/// The record of a run on one device.
#[derive(Debug, Serialize)]
struct Record<'a> {
    card: &'a str,
    driver: String,
    date: String,
    rows: &'a [StepFigure],
}

/// Writes the rows of a run to a record file.
pub fn write(path: &Path, card: &str, rows: &[StepFigure]) -> Result<(), LadderError> {
    let record = Record {
        card,
        driver: driver(),
        date: OffsetDateTime::now_utc().date().to_string(),
        rows,
    };
    let text = serde_json::to_string_pretty(&record)? + "\n";
    std::fs::write(path, text).map_err(|source| LadderError::File {
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
