use super::{open, rate, text_tokens};
use crate::args::PerplexityArgs;
use crate::error::CliError;
use crate::output;
use marlin_lm::perplexity;
use serde_json::json;
use std::time::Instant;

pub fn run(args: &PerplexityArgs) -> Result<(), CliError> {
    let llama = open(&args.model, true)?;
    let tokens = text_tokens(&llama, &args.text, args.windows.max_tokens)?;
    let bar = output::progress(0);
    let start = Instant::now();
    let result = perplexity(&llama.model, &tokens, args.windows.window, |progress| {
        bar.set_length(progress.total as u64);
        bar.set_position(progress.windows as u64);
        bar.set_message(format!("perplexity {:.3}", progress.so_far));
    })?;
    bar.finish_and_clear();
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
