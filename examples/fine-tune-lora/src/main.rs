//! Fine-tunes the shipped Llama in 4 bits with LoRA adapters.

use std::error::Error;
use std::path::PathBuf;

use burn::tensor::Device;
use clap::Parser;
use fine_tune_lora::{Options, load_adapters, measure, prepare, save_adapters, train};

/// Fine-tunes a Llama folder in 4 bits.
#[derive(Debug, Parser)]
struct Args {
    /// Hugging Face folder of a float Llama.
    #[arg(default_value = "examples/train-tiny-llama/model")]
    model: PathBuf,
    /// Text to learn.
    #[arg(long, default_value = "LICENSE-APACHE")]
    text: PathBuf,
    /// Steps of AdamW.
    #[arg(long, default_value_t = Options::default().steps)]
    steps: usize,
    /// Rank of the adapters.
    #[arg(long, default_value_t = Options::default().rank)]
    rank: usize,
    /// File for the adapters.
    #[arg(long, default_value = "target/adapters.bpk")]
    out: PathBuf,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    burn_marlin::install()?;
    let device = Device::default();
    let options = Options {
        steps: args.steps,
        rank: args.rank,
        ..Options::default()
    };
    let text = std::fs::read_to_string(&args.text)?;

    let prepared = prepare(&args.model, &text, &options, &device)?;
    println!("{}", prepared.report);
    let before = measure(&prepared.model, &prepared.tokens, options.seq)?;
    let (model, losses) = train(prepared.model, &prepared.tokens, &options)?;
    for (step, loss) in losses.iter().enumerate().step_by(10) {
        println!("step {step}: loss {loss:.3}");
    }
    let after = measure(&model, &prepared.tokens, options.seq)?;
    println!(
        "perplexity of {}: {before:.2} before, {after:.2} after",
        args.text.display()
    );

    save_adapters(model, &args.out)?;
    let again = load_adapters(
        prepare(&args.model, &text, &options, &device)?.model,
        &args.out,
    )?;
    let size = std::fs::metadata(&args.out)?.len();
    println!(
        "{size} bytes of adapters in {}, loaded again: {:.2}",
        args.out.display(),
        measure(&again, &prepared.tokens, options.seq)?
    );
    Ok(())
}
