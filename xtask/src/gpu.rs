//! Test and bench binaries for a machine with a GPU and no Rust toolchain.

use crate::process::{Error, cargo, root, run, show, target};
use crate::{bench, llvm};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Builds the device tests and the benches, strips and packs them with xz into `out`.
///
/// There, from a checkout of this repository: `unxz *.xz && chmod +x device bench`, then `./device --device cuda` and `./bench kernels`.
pub fn pack(out: &Path) -> Result<(), Error> {
    llvm::set_up()?;
    fs::create_dir_all(out).map_err(Error::file(out))?;
    pack_one(&build_tests()?, "device", out)?;
    pack_one(&bench::build()?, "bench", out)
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

/// Builds the device tests with the workspace's features; the path of the binary.
fn build_tests() -> Result<PathBuf, Error> {
    let mut build = cargo(["test", "--workspace", "--test", "device", "--no-run", "--message-format", "json"]);
    let output = build.stderr(Stdio::inherit()).output().map_err(|source| Error::Start { command: show(&build), source })?;
    if !output.status.success() {
        return Err(Error::Failed { command: show(&build), status: output.status });
    }
    executable(&String::from_utf8_lossy(&output.stdout)).map(|path| root().join(path)).ok_or_else(|| {
        Error::Needs(
            "cargo built the device tests and named no binary; run `cargo test --workspace --test device --no-run` to see why".into(),
        )
    })
}

/// The last executable that cargo's messages name.
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
