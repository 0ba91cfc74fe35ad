use super::{open_model, text_tokens};
use crate::args::EvaluateArgs;
use crate::error::CliError;
use crate::output;
use crate::plot::{Plot, Point};
use crate::progress::Progress;
use marlin_format::checkpoint::Checkpoint;
use marlin_lm::{Evaluation, Evaluations, Mean, evaluate};
use serde_json::{Value, json};
use std::path::Path;

pub fn run(args: &EvaluateArgs) -> Result<(), CliError> {
    let hub = &args.model.hub;
    let (reference_dir, reference) = open_model(&args.model.dir, hub, &args.model, true)?;
    let tokens = |path| text_tokens(&reference, path, args.windows.max_tokens);
    let texts = args
        .text
        .iter()
        .map(|path| tokens(path))
        .collect::<Result<Vec<_>, _>>()?;
    let others_hub = hub.without_revision();
    let open_other = |model| open_model(model, &others_hub, &args.model, false);
    let others = args
        .with
        .iter()
        .map(|model| open_other(model))
        .collect::<Result<Vec<_>, _>>()?;
    let models: Vec<_> = [&reference]
        .into_iter()
        .chain(others.iter().map(|(_, llama)| llama))
        .map(|llama| &*llama.model)
        .collect();
    let mut progress = Progress::of_windows();
    let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    let found = evaluate(&models, &texts, args.windows.window, |done, total| {
        progress.set(done, total, "");
    })?;
    progress.finish();
    let named = [&args.model.dir].into_iter().chain(&args.with);
    let models = named
        .zip(
            [&reference_dir]
                .into_iter()
                .chain(others.iter().map(|(dir, _)| dir)),
        )
        .map(|(named, dir)| {
            Ok(Model {
                dir: named,
                bytes: Checkpoint::open(dir)?.size_bytes(),
            })
        })
        .collect::<Result<Vec<_>, CliError>>()?;
    if args.json {
        print_json(args, &models, &found)
    } else {
        print_table(args, &models, &found)
    }?;
    let plot = plot(args, &models, &found);
    args.plot.iter().try_for_each(|file| plot.write(file))
}

/// A model that is evaluated.
struct Model<'a> {
    /// The folder or the name that was given.
    dir: &'a Path,
    bytes: usize,
}

fn print_table(
    args: &EvaluateArgs,
    models: &[Model<'_>],
    found: &Evaluations,
) -> Result<(), CliError> {
    let header = [
        "model",
        "size",
        "perplexity",
        "change",
        "divergence",
        "agreement",
        "differ",
    ];
    let rows = |found: &[Evaluation]| {
        models
            .iter()
            .zip(found)
            .map(|(model, found)| row(model, found))
            .collect::<Vec<_>>()
    };
    if args.text.len() > 1 {
        let texts = args
            .text
            .iter()
            .map(|path| path.display().to_string())
            .zip(&found.texts);
        let all = ("all together".to_owned(), &found.all);
        let rows: Vec<_> = texts
            .chain([all])
            .flat_map(|(text, found)| {
                rows(found)
                    .into_iter()
                    .map(move |row| [vec![text.clone()], row].concat())
            })
            .collect();
        output::table(&[&["text"][..], &header].concat(), &rows)?;
    } else {
        output::table(&header, &rows(&found.all))?;
    }
    let has_errors = found.all.iter().all(|found| found.nll.error.is_finite());
    let errors = if has_errors {
        "standard errors by window"
    } else {
        "one window has no standard error"
    };
    Ok(output::line(&format!(
        "over {}; {errors}",
        measured(args, found)
    ))?)
}

/// Describes the tokens that the models were measured on.
fn measured(args: &EvaluateArgs, found: &Evaluations) -> String {
    let tokens = found.all.first().map_or(0, |found| found.tokens);
    let texts = if args.text.len() > 1 {
        format!(" of {} texts", args.text.len())
    } else {
        String::new()
    };
    format!(
        "{tokens} tokens{texts} in windows of {}",
        args.windows.window
    )
}

fn row(model: &Model<'_>, found: &Evaluation) -> Vec<String> {
    // The standard error of the perplexity follows from that of its logarithm.
    let (perplexity, error) = (found.perplexity(), found.perplexity() * found.nll.error);
    let name = model.dir.display().to_string();
    let mut row = vec![
        name,
        output::size(model.bytes),
        with_error(format!("{perplexity:.4}"), error, 4),
    ];
    row.extend(match &found.against {
        None => vec![String::new(); 4],
        Some(against) => {
            let change = against.nll_change.mean.exp();
            vec![
                with_error(
                    format!("{:+.2}", 100.0 * (change - 1.0)),
                    100.0 * change * against.nll_change.error,
                    2,
                ) + " %",
                with_error(
                    format!("{:.5}", against.divergence.mean),
                    against.divergence.error,
                    5,
                ),
                with_error(
                    format!("{:.2}", 100.0 * against.agreement.mean),
                    100.0 * against.agreement.error,
                    2,
                ) + " %",
                against.differ.to_string(),
            ]
        }
    });
    row
}

/// Adds the standard error to a value. The error of a single window is not finite, and left out.
fn with_error(value: String, error: f64, digits: usize) -> String {
    if error.is_finite() {
        format!("{value} ± {error:.digits$}")
    } else {
        value
    }
}

fn print_json(
    args: &EvaluateArgs,
    models: &[Model<'_>],
    found: &Evaluations,
) -> Result<(), CliError> {
    let of_models = |found: &[Evaluation]| -> Vec<Value> {
        models
            .iter()
            .zip(found)
            .map(|(model, found)| as_json(model, found))
            .collect()
    };
    let tokens = |found: &[Evaluation]| found.first().map_or(0, |found| found.tokens);
    let texts = args.text.iter().zip(&found.texts);
    let texts: Vec<_> = texts.map(|(path, found)| json!({ "text": path, "tokens": tokens(found), "models": of_models(found) })).collect();
    output::json(&json!({
        "tokens": tokens(&found.all),
        "window": args.windows.window,
        "models": of_models(&found.all),
        "texts": texts,
    }))
}

fn as_json(model: &Model<'_>, found: &Evaluation) -> Value {
    let mean = |mean: &Mean| json!({ "mean": mean.mean, "standard_error": mean.error });
    json!({
        "dir": model.dir,
        "bytes": model.bytes,
        "perplexity": found.perplexity(),
        "nll": mean(&found.nll),
        "against": found.against.as_ref().map(|against| json!({
            "nll_change": mean(&against.nll_change),
            "divergence": mean(&against.divergence),
            "agreement": mean(&against.agreement),
            "differ": against.differ,
        })),
    })
}

/// Returns the plot of the models' results over all texts. Labels are the names of the models'
/// folders, or the paths if several folders have the same name.
fn plot(args: &EvaluateArgs, models: &[Model<'_>], found: &Evaluations) -> Plot {
    let name = |dir: &Path| {
        let whole = dir.canonicalize();
        whole
            .as_deref()
            .unwrap_or(dir)
            .file_name()
            .unwrap_or(dir.as_os_str())
            .to_string_lossy()
            .into_owned()
    };
    let names: Vec<String> = models.iter().map(|model| name(model.dir)).collect();
    let is_unique = |name: &String| names.iter().filter(|other| *other == name).count() == 1;
    let labels = names.iter().zip(models).map(|(name, model)| {
        if is_unique(name) {
            name.clone()
        } else {
            model.dir.display().to_string()
        }
    });
    let points = labels
        .zip(models)
        .zip(&found.all)
        .map(|((label, model), found)| Point {
            label,
            bytes: model.bytes,
            perplexity: found.perplexity(),
            // The same windows are hard for every model: the difference from the reference has a
            // much smaller standard error than each perplexity.
            error: found.against.as_ref().map_or(f64::NAN, |against| {
                found.perplexity() * against.nll_change.error
            }),
        });
    Plot {
        caption: format!(
            "perplexity over {}, ± one standard error of the change",
            measured(args, found)
        ),
        points: points.collect(),
    }
}
