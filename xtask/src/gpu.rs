//! Packs test and bench binaries for a machine with a GPU and no Rust toolchain.
//!
//! They are built in the dev profile, like the tests: kernels are compiled on the other machine, and the speed of replayed graphs does not depend on the
//! host's code.

use crate::llvm;
use crate::process::{Error, cargo, root, run, show, target};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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

/// Builds a binary with the features of the workspace, and returns its path.
fn build(command: &[&str]) -> Result<PathBuf, Error> {
    let mut build = cargo(command.iter().chain(&["--message-format", "json"]));
    let output = build.stderr(Stdio::inherit()).output().map_err(|source| Error::Start { command: show(&build), source })?;
    if !output.status.success() {
        return Err(Error::Failed { command: show(&build), status: output.status });
    }
    executable(&String::from_utf8_lossy(&output.stdout))
        .map(|path| root().join(path))
        .ok_or_else(|| Error::Needs(format!("cargo built a binary and did not name it; run `cargo {}` to see why", command.join(" "))))
}

/// Returns the last executable in cargo's messages.
fn executable(messages: &str) -> Option<&str> {
    let (_, after) = messages.rsplit_once("\"executable\":\"")?;
    after.split_once('"').map(|(path, _)| path)
}

#[cfg(test)]
mod tests {
    use super::executable;

    #[test]
    fn the_executable_is_the_last_one_named() {
        let messages =
            "{\"executable\":null}\n{\"target\":{},\"executable\":\"/a/device-1\",\"fresh\":true}\n{\"reason\":\"build-finished\"}";
        assert_eq!(executable(messages), Some("/a/device-1"));
        assert_eq!(executable("{}"), None);
    }
}
