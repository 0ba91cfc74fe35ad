//! Computes the digest of the sources of a decode step, which records of whole models contain. The
//! digest is computed at build time because the benches also run on machines without the sources.

use std::env;
use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    // The folder of this run: a build script that was compiled for another clone may be kept.
    let root = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("..");
    for folder in [
        "crates/marlin-nn/src",
        "crates/marlin-format/src",
        "crates/marlin-kernels/src",
        "examples/ladder/src",
    ] {
        println!("cargo::rerun-if-changed={}", root.join(folder).display());
    }
    let sources = source_digest::workspace(&root)?;
    println!(
        "cargo::rustc-env=STEP_DIGEST={}",
        source_digest::step_digest(&sources)?
    );
    Ok(())
}
