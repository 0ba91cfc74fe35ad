//! Continues a text with a Llama, token by token. The program shows every part of marlin-lm that
//! text generation needs.

mod args;

use std::error::Error;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use marlin_lm::harmony::{MARKERS, Transcript};
use marlin_lm::{
    ChatTemplate, Engine, LanguageModel, Message, ModelError, OpenOptions, RequestParams,
    StepOutput, TextStream,
};

use crate::args::{Args, GenerateError, open_device};

fn main() -> ExitCode {
    let error = match run(&Args::parse()) {
        Ok(()) => return ExitCode::SUCCESS,
        // The reader has closed the pipe, as in `generate-text | head`.
        Err(GenerateError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => {
            return ExitCode::SUCCESS;
        }
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
    // This call must precede the first tensor; after the call, Burn's fusion supports packed
    // weights.
    burn_marlin::install()?;
    let device = open_device(&args.device).ok_or_else(|| GenerateError::NoDevice {
        name: args.device.clone(),
    })?;

    // A Hugging Face folder has the model, its tokenizer and its generation_config. Quantised
    // weights stay quantised.
    let llama = LanguageModel::open(&args.model, &device, &OpenOptions::default())?;
    let mut tokenizer = llama.tokenizer()?.clone();
    let mut sampling = llama.generation.sampling;
    sampling.temperature = args.temperature.unwrap_or(sampling.temperature);
    let suppression = llama.generation.suppression.clone();
    let mut stop_tokens = llama.generation.eos_token_ids.clone();

    // The prompt is a text, or a conversation in the model's chat template.
    let mut transcript = None;
    let prompt = if args.chat {
        let template =
            ChatTemplate::open(&args.model)?.ok_or_else(|| GenerateError::NoTemplate {
                dir: args.model.clone(),
            })?;
        stop_tokens.extend(template.stop_tokens(&tokenizer));
        let text = template.render(&[Message::user(&args.prompt)], true)?;
        if template.is_harmony() {
            // Special tokens, which decoding skips, divide the answers of gpt-oss models into
            // reasoning and content.
            tokenizer = tokenizer.showing(&MARKERS)?;
            transcript = Some(Transcript::new(&text));
        }
        tokenizer.encode_rendered(&text)?
    } else {
        tokenizer.encode(&args.prompt)?
    };

    // The engine has one slot; an engine can have up to 128. On CUDA, the warm-up records the graph
    // of a step.
    let mut engine = Engine::new(llama.model.clone(), 1)?;
    engine.warm_up(prompt.len());
    let start = Instant::now();
    engine.add_request(
        &prompt,
        &RequestParams {
            sampling,
            suppression,
            seed: args.seed,
            stop_tokens,
            max_new_tokens: args.max_new_tokens.get(),
            ..RequestParams::default()
        },
    )?;

    // A token may be a part of a character, so the stream returns text once its characters are
    // complete. The answer of a chat does not continue the prompt's text.
    let mut stream = TextStream::after(&tokenizer, if args.chat { &[] } else { &prompt })?;
    let mut out = std::io::stdout().lock();
    if !args.chat {
        write!(out, "{}", args.prompt)?;
    }
    let (mut tokens, mut first) = (0_usize, None);
    while engine.sequences() > 0 {
        // The first step is the prefill of the prompt; every step gives one token for each
        // sequence.
        for StepOutput { token, end, .. } in engine.step()? {
            first.get_or_insert_with(|| start.elapsed());
            if let Some(token) = token {
                tokens += 1;
                let mut piece = stream.push(token)?.unwrap_or_default();
                if let Some(transcript) = &mut transcript {
                    piece = transcript.push(&piece);
                }
                write!(out, "{piece}")?;
                out.flush()?;
            }
            end.transpose().map_err(ModelError::from)?;
        }
    }
    let mut rest = stream.finish()?.unwrap_or_default();
    if let Some(mut transcript) = transcript {
        rest = transcript.push(&rest) + &transcript.finish().rest;
    }
    writeln!(out, "{rest}")?;

    let first = first.unwrap_or_default();
    let rate = tokens.saturating_sub(1) as f64 / (start.elapsed() - first).as_secs_f64().max(1e-9);
    eprintln!(
        "{} prompt tokens, first token after {:.0} ms; {tokens} tokens, {rate:.1} tokens/s",
        prompt.len(),
        1e3 * first.as_secs_f64()
    );
    Ok(())
}
