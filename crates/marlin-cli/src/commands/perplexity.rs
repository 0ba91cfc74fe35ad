use super::{open, rate, text_tokens};
use crate::args::PerplexityArgs;
use crate::error::CliError;
use crate::output;
use crate::progress::Progress;
use marlin_lm::perplexity;
use serde_json::json;
use std::time::Instant;

pub fn run(args: &PerplexityArgs) -> Result<(), CliError> {
    let llama = open(&args.model, true)?;
    let tokens = text_tokens(&llama, &args.text, args.windows.max_tokens)?;
    let mut shown = Progress::of_windows();
    let start = Instant::now();
    let result = perplexity(&llama.model, &tokens, args.windows.window, |progress| {
        let so_far = format!("perplexity {:.3}", progress.so_far);
        shown.set(progress.windows, progress.total, &so_far);
    })?;
    shown.finish();
    let elapsed = start.elapsed();
    if args.json {
        return output::json(&json!({
            "perplexity": result.perplexity,
            "nll": result.nll,
            "tokens": result.tokens,
            "window": args.windows.window,
            "seconds": elapsed.as_secs_f64(),
        }));
    }
    let rate = rate(result.tokens, elapsed);
    Ok(output::line(&format!(
        "perplexity {:.4} over {} tokens, {rate:.0} tokens/s",
        result.perplexity, result.tokens
    ))?)
}
