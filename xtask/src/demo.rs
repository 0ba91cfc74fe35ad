//! The demo: commands of `burn-marlin` on the shipped model.

use crate::llvm;
use crate::process::{Error, cargo, root, run, show, target};
use std::fs;
use std::path::Path;
use std::process::Command;

const PROMPT: &str = "impl<T> Iterator for";

/// Quantises the two shipped models, the dense one and the 2:4 one, to W4A16. Compares the
/// perplexities with that of the dense f16 model, lists the kernels, and generates text.
pub fn run_all() -> Result<(), Error> {
    llvm::set_up()?;
    // The build has the features of the workspace, so that the tests do not build anything again.
    run(&mut cargo(["build", "--workspace", "--bin", "burn-marlin"]))?;
    let example = root().join("examples/train-tiny-llama");
    let [float, float_24] = ["model", "model-24"].map(|model| example.join(model));
    let text = example.join("heldout.txt");
    let [int4, sparse] =
        ["demo/tiny-llama-int4", "demo/tiny-llama-int4-24"].map(|folder| target().join(folder));
    for folder in [&int4, &sparse] {
        if folder.exists() {
            fs::remove_dir_all(folder).map_err(Error::file(folder))?;
        }
    }
    let parent = target().join("demo");
    fs::create_dir_all(&parent).map_err(Error::file(&parent))?;

    let (float, float_24, int4, sparse, text) = (
        arg(&float),
        arg(&float_24),
        arg(&int4),
        arg(&sparse),
        arg(&text),
    );
    burn_marlin(&["quantize", &float, &int4, "--group", "g128"])?;
    burn_marlin(&[
        "quantize",
        &float_24,
        &sparse,
        "--group",
        "g128",
        "--sparse24",
    ])?;
    burn_marlin(&["inspect", &int4])?;
    burn_marlin(&["inspect", &sparse])?;
    burn_marlin(&[
        "perplexity",
        &float,
        "--text",
        &text,
        "--max-tokens",
        "16384",
    ])?;
    burn_marlin(&[
        "perplexity",
        &int4,
        "--text",
        &text,
        "--max-tokens",
        "16384",
    ])?;
    burn_marlin(&[
        "perplexity",
        &sparse,
        "--text",
        &text,
        "--max-tokens",
        "16384",
    ])?;
    burn_marlin(&["kernels", &int4, "--rows", "1"])?;
    burn_marlin(&["kernels", &sparse, "--rows", "1"])?;
    burn_marlin(&[
        "generate",
        &int4,
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "120",
        "--temperature",
        "0.6",
        "--seed",
        "1",
    ])
}

fn arg(path: &Path) -> String {
    path.display().to_string()
}

/// Prints the command as a user would type it, then runs it.
fn burn_marlin(args: &[&str]) -> Result<(), Error> {
    let shown =
        show(Command::new("burn-marlin").args(args)).replace(&format!("{}/", root().display()), "");
    println!("\n$ {shown}");
    run(Command::new(target().join("debug/burn-marlin")).args(args))
}
