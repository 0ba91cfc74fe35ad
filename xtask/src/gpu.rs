//! Packs test and bench binaries for a machine with a GPU and no Rust toolchain.
//!
//! They are built in the dev profile, like the tests: kernels are compiled on the other machine, and the speed of replayed graphs does not depend on the
//! host's code.

use crate::llvm;
use crate::process::{Error, build, run, target};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Builds the device tests and the benches, strips them, and packs them with xz into the folder `out`.
///
/// To run them on the other machine, from a checkout of this repository: `unxz *.xz && chmod +x device bench`, then `./device --device cuda` and `./bench kernels`.
pub fn pack(out: &Path) -> Result<(), Error> {
    llvm::set_up()?;
    fs::create_dir_all(out).map_err(Error::file(out))?;
    pack_one(&build(&["test", "--workspace", "--test", "device", "--no-run"])?, "device", out)?;
    pack_one(&build(&["build", "--workspace", "--bin", "burn-marlin-bench"])?, "bench", out)
}

fn pack_one(binary: &Path, name: &str, out: &Path) -> Result<(), Error> {
    let stripped = target().join(name);
    run(Command::new("strip").arg("-o").arg(&stripped).arg(binary))?;
    let packed = out.join(format!("{name}.xz"));
    let file = fs::File::create(&packed).map_err(Error::file(&packed))?;
    run(Command::new("xz").args(["-T0", "-c"]).arg(&stripped).stdout(file))?;
    fs::remove_file(&stripped).map_err(Error::file(&stripped))?;
    println!("xtask: {}", packed.display());
    Ok(())
}
