use super::{generate_options, open, rate, read_text, read_text_from};
use crate::args::GenerateArgs;
use crate::error::CliError;
use crate::output;
use marlin_lm::{Generation, StopReason};
use serde_json::json;
use std::io;
use std::ops::ControlFlow;
use std::path::Path;

pub fn run(args: &GenerateArgs) -> Result<(), CliError> {
    let prompt = prompt(args)?;
    let llama = open(&args.model, true)?;
    let mut options = generate_options(&llama, &args.sampling);
    options.warm_up = true;
    #[cfg(feature = "cubecl-runtime")]
    {
        options.compile_ahead = crate::kernel_cache::is_empty();
    }
    if args.json {
        let generation = llama.generate(&prompt, &options, |_| ControlFlow::Continue(()))?;
        return output::json(&json!({
            "prompt": prompt,
            "text": generation.text,
            "tokens": generation.tokens,
            "prompt_tokens": generation.prompt_tokens,
            "warm_up_seconds": generation.warm_up.as_secs_f64(),
            "prefill_seconds": generation.prefill.as_secs_f64(),
            "decode_seconds": generation.decode.as_secs_f64(),
            "stop_reason": stop_reason(&generation),
        }));
    }
    // The prompt is printed with the first new text, when the model has accepted the prompt.
    let (mut before, mut result) = (prompt.as_str(), Ok(()));
    let generation = llama.generate(&prompt, &options, |text| {
        result = output::text(&format!("{}{text}", std::mem::take(&mut before)));
        // The reader has closed the output.
        if result.is_err() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    result?;
    output::line(before)?;
    if !generation.warm_up.is_zero() {
        eprintln!("warm-up: {:.1} s", generation.warm_up.as_secs_f64());
    }
    // The first new token belongs to the prefill.
    let decoded = generation.tokens.len().saturating_sub(1);
    eprintln!(
        "prefill: {} tokens, {:.1} tokens/s; decode: {decoded} tokens, {:.1} tokens/s; {}",
        generation.prompt_tokens,
        rate(generation.prompt_tokens, generation.prefill),
        rate(decoded, generation.decode),
        stop_reason(&generation),
    );
    Ok(())
}

/// Returns the text to continue.
fn prompt(args: &GenerateArgs) -> Result<String, CliError> {
    match &args.prompt_file {
        None => Ok(args.prompt.clone().unwrap_or_default()),
        Some(path) if path == Path::new("-") => {
            read_text_from(io::stdin().lock(), Path::new("standard input"))
        }
        Some(path) => read_text(path),
    }
}

fn stop_reason(generation: &Generation) -> String {
    match generation.stop_reason {
        StopReason::StopToken(token) => format!("stopped at token {token}"),
        StopReason::MaxNewTokens => "as many tokens as asked for".into(),
        StopReason::CacheFull => "the cache is full".into(),
        StopReason::Stopped => "the output was closed".into(),
    }
}
