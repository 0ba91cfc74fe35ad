use super::{open, open_dir, text_tokens};
use crate::args::EvaluateArgs;
use crate::error::CliError;
use crate::output;
use marlin_format::checkpoint::Checkpoint;
use marlin_llama::{Evaluation, Mean, evaluate};
use serde_json::json;
use std::path::Path;

pub fn run(args: &EvaluateArgs) -> Result<(), CliError> {
    let reference = open(&args.model, true)?;
    let tokens = text_tokens(&reference, &args.text)?;
    let others = args.with.iter().map(|dir| open_dir(dir, &args.model, false)).collect::<Result<Vec<_>, _>>()?;
    let models: Vec<_> = [&reference].into_iter().chain(&others).map(|llama| &*llama.model).collect();
    let bar = output::progress(0);
    let found = evaluate(&models, &tokens, args.text.window, |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    let dirs: Vec<&Path> = [args.model.dir.as_path()].into_iter().chain(args.with.iter().map(|dir| dir.as_path())).collect();
    let sizes = dirs.iter().map(|dir| Ok(Checkpoint::open(dir)?.size_bytes())).collect::<Result<Vec<_>, CliError>>()?;
    if args.json {
        let models: Vec<_> = dirs.iter().zip(&sizes).zip(&found).map(|((dir, bytes), found)| as_json(dir, *bytes, found)).collect();
        return output::json(&json!({ "tokens": found[0].tokens, "window": args.text.window, "models": models }));
    }
    let header = ["model", "size", "perplexity", "change", "divergence", "agreement", "differ"];
    let rows: Vec<Vec<String>> = dirs.iter().zip(&sizes).zip(&found).map(|((dir, bytes), found)| row(dir, *bytes, found)).collect();
    output::table(&header, &rows)?;
    Ok(output::line(&format!("over {} tokens in windows of {}; standard errors by window", found[0].tokens, args.text.window))?)
}

fn row(dir: &Path, bytes: usize, found: &Evaluation) -> Vec<String> {
    let perplexity = found.perplexity();
    let name = dir.display().to_string();
    let mut row = vec![name, output::size(bytes), format!("{perplexity:.4} ± {:.4}", perplexity * found.nll.error)];
    row.extend(match &found.against {
        None => vec![String::new(); 4],
        Some(against) => {
            let change = against.nll_change.mean.exp();
            vec![
                format!("{:+.2} ± {:.2} %", 100.0 * (change - 1.0), 100.0 * change * against.nll_change.error),
                format!("{:.5} ± {:.5}", against.divergence.mean, against.divergence.error),
                format!("{:.2} ± {:.2} %", 100.0 * against.agreement.mean, 100.0 * against.agreement.error),
                against.differ.to_string(),
            ]
        }
    });
    row
}

fn as_json(dir: &Path, bytes: usize, found: &Evaluation) -> serde_json::Value {
    let mean = |mean: &Mean| json!({ "mean": mean.mean, "standard_error": mean.error });
    json!({
        "dir": dir,
        "bytes": bytes,
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
