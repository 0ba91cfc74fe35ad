//! Measures a server under load.

use crate::args::{BenchServeArgs, EndpointName};
use crate::error::CliError;
use crate::output;
use crate::progress::Progress;
use marlin_load::{
    Amount, Endpoint, LoadError, LoadOptions, LoadReport, RatePoint, RateSeries, rates_svg,
    run_with,
};
use serde::Deserialize;
use serde_json::Value;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// Measures the server at each rate, prints the figures, and writes the files.
pub fn run(args: &BenchServeArgs) -> Result<(), CliError> {
    let runs = runs(args)?;
    let compared: Vec<_> = args
        .compare
        .iter()
        .map(|file| read_series(file))
        .collect::<Result<_, _>>()?;
    for file in args.json.iter().chain(&args.svg) {
        check_folder(file)?;
    }
    let mut reports = Vec::new();
    let measured = runs.iter().try_for_each(|options| {
        reports.push(measure(options).map_err(|error| refused(args, error))?);
        Ok(())
    });
    // What was measured before a run that could not start is shown.
    if !reports.is_empty() {
        show(args, &reports, compared)?;
    }
    measured
}

/// Returns the options of the run at each rate.
fn runs(args: &BenchServeArgs) -> Result<Vec<LoadOptions>, CliError> {
    if args.rate.len() > 1 && args.rate.iter().any(|rate| rate.is_infinite()) {
        return Err(CliError::LoadOption {
            option: "rate".into(),
            reason: "`inf` cannot be one of several rates".into(),
        });
    }
    let mut options = LoadOptions::new(&args.url);
    options.allow_remote = args.allow_remote;
    options.api_key.clone_from(&args.api_key);
    options.model.clone_from(&args.model);
    options.endpoint = match args.endpoint {
        EndpointName::Completions => Endpoint::Completions,
        EndpointName::Chat => Endpoint::Chat,
    };
    options.load.burstiness = args.burstiness;
    options.load.concurrency = args.concurrency;
    options.amount = match args.duration {
        Some(seconds) => Amount::Duration(positive("duration", seconds, 1.0)?),
        None => Amount::Requests(args.requests),
    };
    options.input_len = args.input_len;
    options.output_len = args.output_len;
    options.prefix_len = args.prefix_len;
    options.ignore_eos = args.ignore_eos;
    options.extra_body = args.extra_body.clone().unwrap_or_default();
    options.warmups = args.warmups;
    options.cancel_fraction = args.cancel;
    let bound = |option, milliseconds: Option<f64>| {
        let bound = milliseconds.map(|milliseconds| positive(option, milliseconds, 1e3));
        bound.transpose()
    };
    options.slo.ttft = bound("slo-ttft", args.slo_ttft)?;
    options.slo.tpot = bound("slo-tpot", args.slo_tpot)?;
    options.slo.e2el = bound("slo-e2el", args.slo_e2el)?;
    let runs = args.rate.iter().zip(0..).map(|(&rate, number)| {
        let mut options = options.clone();
        options.load.rate = Some(rate).filter(|&rate| rate != f64::INFINITY);
        // The server still has the prompts of the run before in its prefix cache.
        options.seed = args.seed.wrapping_add(number);
        options.check().map_err(|error| refused(args, error))?;
        Ok(options)
    });
    runs.collect()
}

/// Returns a time that must be more than 0. `unit` is the number of units in a second.
fn positive(option: &str, value: f64, unit: f64) -> Result<Duration, CliError> {
    let time = Duration::try_from_secs_f64(value / unit).ok();
    let time = time.filter(|time| !time.is_zero());
    time.ok_or_else(|| CliError::LoadOption {
        option: option.into(),
        reason: format!("{value} is not a time above 0"),
    })
}

/// Returns the error of the program for one of the library, which has other names for options.
fn refused(args: &BenchServeArgs, error: LoadError) -> CliError {
    match error {
        LoadError::Option { option, reason } => CliError::LoadOption {
            option: match option {
                "amount" if args.duration.is_some() => "duration".into(),
                "amount" => "requests".into(),
                "cancel_fraction" => "cancel".into(),
                option => option.replace('_', "-"),
            },
            reason,
        },
        LoadError::Remote { host, address } => CliError::RemoteLoad { host, address },
        error => CliError::Load(error),
    }
}

/// Checks that the folder of a file exists, before the file takes a long time.
fn check_folder(file: &Path) -> Result<(), CliError> {
    let folder = file.parent().filter(|folder| *folder != Path::new(""));
    match folder.map(Path::metadata) {
        None => Ok(()),
        Some(Ok(folder)) if folder.is_dir() => Ok(()),
        Some(found) => Err(CliError::Write {
            path: file.into(),
            source: found.err().unwrap_or(io::ErrorKind::NotADirectory.into()),
        }),
    }
}

/// Runs a load test, and shows its progress.
fn measure(options: &LoadOptions) -> Result<LoadReport, LoadError> {
    let mut shown = match options.amount {
        Amount::Requests(_) => Progress::of_requests(),
        Amount::Duration(_) => Progress::of_seconds(),
    };
    let mut start = None;
    let report = run_with(options, |now| {
        let start = *start.get_or_insert_with(Instant::now);
        let rate = options.load.rate.map(|rate| format!("at {rate}/s, "));
        let running = now.sent - now.ended;
        let message = format!(
            "{}{running} running, {} failed",
            rate.unwrap_or_default(),
            now.failed
        );
        let (done, total) = match options.amount {
            Amount::Requests(total) => (now.ended, total),
            Amount::Duration(total) => {
                let total = total.as_secs_f64().ceil() as usize;
                (total.min(start.elapsed().as_secs() as usize), total)
            }
        };
        shown.set(done, total, &message);
    });
    shown.finish();
    report
}

/// Prints the figures, and writes the files. The plot has the lines `compared`, too.
fn show(
    args: &BenchServeArgs,
    reports: &[LoadReport],
    compared: Vec<RateSeries>,
) -> Result<(), CliError> {
    match reports {
        [report] if args.rate.len() == 1 => output::line(&report.to_string())?,
        reports => print_rates(reports)?,
    }
    if let Some(path) = &args.json {
        let json = match reports {
            [report] if args.rate.len() == 1 => report.to_json(),
            reports => Value::Array(reports.iter().map(LoadReport::to_json).collect()),
        };
        write(path, &format!("{json}\n"))?;
    }
    if let Some(path) = &args.svg {
        let svg = match reports {
            [report] if args.rate.len() == 1 && compared.is_empty() => report.to_svg(),
            reports => rates_svg(&[vec![series(reports)], compared].concat()),
        };
        write(path, &svg.map_err(CliError::Load)?)?;
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), CliError> {
    std::fs::write(path, text).map_err(|source| CliError::Write {
        path: path.into(),
        source,
    })
}

/// Reads the line of a plot from the figures of earlier runs.
fn read_series(path: &Path) -> Result<RateSeries, CliError> {
    /// The figures of a run.
    #[derive(Deserialize)]
    struct Run {
        model_id: String,
        #[serde(flatten)]
        point: RatePoint,
    }

    let wrong = |reason| CliError::LoadOption {
        option: "compare".into(),
        reason: format!("{}: {reason}", path.display()),
    };
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let runs: Vec<Run> = serde_json::from_str(&text)
        .map_err(|error| wrong(format!("no figures of several rates: {error}")))?;
    let name = runs.first().map_or("", |run| &run.model_id);
    Ok(line(name, runs.iter().map(|run| run.point)))
}

/// Prints a row for each rate.
fn print_rates(reports: &[LoadReport]) -> io::Result<()> {
    let mut header = vec![
        "rate",
        "completed",
        "failed",
        "req/s",
        "output tok/s",
        "mean TTFT",
        "p99 TTFT",
        "mean TPOT",
        "p99 TPOT",
        "mean E2EL",
    ];
    let has_bounds = |report: &LoadReport| report.metrics.request_goodput.is_some();
    header.extend(reports.iter().any(has_bounds).then_some("goodput"));
    let row = |report: &LoadReport| {
        let metrics = &report.metrics;
        let times = [
            metrics.ttft.mean,
            metrics.ttft.p99,
            metrics.tpot.mean,
            metrics.tpot.p99,
            metrics.e2el.mean,
        ];
        let mut row = vec![
            report.load.rate.unwrap_or(f64::INFINITY).to_string(),
            metrics.completed.to_string(),
            metrics.failed.to_string(),
            format!("{:.2}", metrics.request_throughput),
            format!("{:.2}", metrics.output_throughput),
        ];
        row.extend(times.map(|seconds| format!("{:.2} ms", 1e3 * seconds)));
        row.extend(metrics.request_goodput.map(|rate| format!("{rate:.2}")));
        row
    };
    output::table(&header, &reports.iter().map(row).collect::<Vec<_>>())
}

/// Returns the line of the measured runs.
fn series(reports: &[LoadReport]) -> RateSeries {
    let points = reports.iter().filter_map(|report| {
        let metrics = &report.metrics;
        Some(RatePoint {
            request_rate: report.load.rate?,
            mean_tpot_ms: 1e3 * metrics.tpot.mean,
            mean_ttft_ms: 1e3 * metrics.ttft.mean,
            p99_ttft_ms: 1e3 * metrics.ttft.p99,
        })
    });
    line(reports.first().map_or("", |report| &report.model), points)
}

/// Returns a line of the plot, in the order of the rates.
fn line(name: &str, points: impl Iterator<Item = RatePoint>) -> RateSeries {
    let mut points: Vec<_> = points.collect();
    points.sort_by(|one, other| one.request_rate.total_cmp(&other.request_rate));
    RateSeries {
        name: name.into(),
        points,
    }
}
