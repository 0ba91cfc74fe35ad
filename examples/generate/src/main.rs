//! Continues a text with a Llama, token by token: marlin-llama's interface from top to bottom.

mod args;

use std::error::Error;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use marlin_llama::{ChatTemplate, Decoded, Decoder, Llama, LlamaError, Message, OpenOptions, SequenceOptions, TextStream};

use crate::args::{Args, GenerateError};

fn main() -> ExitCode {
    // Tokenizers and chat templates run in a process of their own, made from this program: it has to know of that before anything else.
    marlin_llama::init();
    let error = match run(&Args::parse()) {
        Ok(()) => return ExitCode::SUCCESS,
        // Whoever reads has seen enough, as in `generate-text | head`.
        Err(GenerateError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => return ExitCode::SUCCESS,
        Err(error) => error,
    };
    eprint!("error: {error}");
    let mut source = error.source();
    while let Some(cause) = source {
        eprint!(": {cause}");
        source = cause.source();
    }
    eprintln!();
    ExitCode::FAILURE
}

fn run(args: &Args) -> Result<(), GenerateError> {
    // Before the first tensor, so that Burn's fusion knows of packed weights.
    burn_marlin::install()?;
    let device = args.device.open()?;

    // A Hugging Face folder: model, tokenizer, and how the model's makers generate with it. Quantised weights stay so.
    let llama = Llama::open(&args.model, &device, &OpenOptions::default())?;
    let tokenizer = llama.tokenizer()?;
    let mut sampling = llama.generation.sampling;
    sampling.temperature = args.temperature.unwrap_or(sampling.temperature);
    let mut stop_tokens = llama.generation.eos_token_ids.clone();

    // The tokens to go on from: those of a text, or of a conversation as the model knows it.
    let prompt = if args.chat {
        let template = ChatTemplate::open(&args.model)?.ok_or_else(|| GenerateError::NoTemplate { dir: args.model.clone() })?;
        stop_tokens.extend(template.stop_tokens(tokenizer));
        tokenizer.encode_rendered(&template.render(&[Message::user(&args.prompt)], true)?)?
    } else {
        tokenizer.encode(&args.prompt)?
    };

    // Room for one sequence; up to 128 could join and leave. On CUDA the warm-up records the graph of a step.
    let mut decoder = Decoder::new(llama.model.clone(), 1)?;
    decoder.warm_up(prompt.len());
    let start = Instant::now();
    decoder.join(&prompt, &SequenceOptions { sampling, seed: args.seed, stop_tokens, max_new_tokens: args.max_new_tokens.get() })?;

    // Tokens are not characters: the stream gives text as soon as it is whole. An answer begins a text of its own.
    let mut stream = TextStream::after(tokenizer, if args.chat { &[] } else { &prompt })?;
    let mut out = std::io::stdout().lock();
    if !args.chat {
        write!(out, "{}", args.prompt)?;
    }
    let (mut tokens, mut first) = (0_usize, None);
    while decoder.sequences() > 0 {
        // The first step reads the prompt; each gives one token for each sequence.
        for Decoded { token, end, .. } in decoder.step()? {
            first.get_or_insert_with(|| start.elapsed());
            if let Some(token) = token {
                tokens += 1;
                write!(out, "{}", stream.push(token)?.unwrap_or_default())?;
                out.flush()?;
            }
            end.transpose().map_err(LlamaError::from)?;
        }
    }
    writeln!(out, "{}", stream.finish()?.unwrap_or_default())?;

    let first = first.unwrap_or_default();
    let rate = tokens.saturating_sub(1) as f64 / (start.elapsed() - first).as_secs_f64().max(1e-9);
    eprintln!("{} prompt tokens, first token after {:.0} ms; {tokens} tokens, {rate:.1} tokens/s", prompt.len(), 1e3 * first.as_secs_f64());
    Ok(())
}
