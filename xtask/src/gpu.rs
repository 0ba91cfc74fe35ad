//! Packs the device tests, the benches and the program for a machine with a GPU and no Rust
//! toolchain, and records the results of the tests on that machine.
//!
//! The pack is built without optimisation, like the tests on this machine. Kernels are compiled on
//! the other machine, and the speed of replayed graphs does not depend on the host's code.

mod record;

pub use record::{print_last_runs, record};

use crate::llvm;
use crate::process::{Error, build, root, run, show};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// The files that the tests read, by their paths in the repository. The 2:4 model is left out,
/// because no test reads it; packed, it would take 7 MiB.
const FILES: [&str; 3] = [
    "tests/golden",
    "examples/train-tiny-llama/model",
    "examples/train-tiny-llama/heldout.txt",
];
/// The maximum size of the archive in MiB.
const MAX_MIB: f64 = 60.0;
const MIB: f64 = 1048576.0;
/// The options of xz. The filter for x86 code makes the archive smaller. So do the highest preset and
/// a dictionary of two thirds of the binary, by 0.8 % of what preset 6 and 64 MiB give.
const XZ: &str = "--threads=0 --x86 --lzma2=preset=9e,dict=192MiB";
/// The linker's options: identical functions are one, and relocations are stored as a bitmap, which
/// glibc reads since version 2.36. The archive is 20 % smaller by the first and 4 % by the second.
const LINK: [&str; 4] = [
    "-C",
    "link-arg=-Wl,--icf=all",
    "-C",
    "link-arg=-Wl,-z,pack-relative-relocs",
];
/// The part of CubeCL's configuration that names the folder for autotuning results. Parallel
/// processes share the folder, and `run.sh` empties it. Compiled kernels are not kept there: with
/// them, nine of 183 processes failed on an H200 (CubeCL 0.11.3, turso 0.8.3).
const ENVIRONMENT: &str = "\n[environment]\npath = { directory = \"cache\" }\n";
/// The name of the binary in the pack.
const BINARY: &str = "device";
/// The programs that the binary also contains: its first argument selects one of them.
const PROGRAMS: [&str; 2] = ["burn-marlin", "burn-marlin-bench"];

/// Builds one binary with the device tests, the benches and the program, without CubeCL's CPU
/// runtime. Writes the binary and all files that it needs to the folder `out`, and packs the folder
/// into `out`.tar.xz.
///
/// On the other machine, `run.sh` in the folder runs the tests, `run.sh --help` lists its options,
/// and `burn-marlin` and `burn-marlin-bench` are the programs.
pub fn pack(out: &Path) -> Result<(), Error> {
    llvm::set_up()?;
    let commit = commit_of_tree()?;
    let device = [
        "rustc",
        "--package",
        "marlin-tests",
        "--no-default-features",
        "--test",
        "device",
    ];
    let binary = build(&device, &LINK)?;
    if out.exists() {
        // Only a folder that this command has created may be removed.
        if !out.join("run.sh").exists() {
            return Err(Error::Needs(format!(
                "{}: exists, and is no folder that pack-gpu has made; name another",
                out.display()
            )));
        }
        fs::remove_dir_all(out).map_err(Error::file(out))?;
    }
    fs::create_dir_all(out).map_err(Error::file(out))?;
    run(Command::new("strip")
        .arg("-o")
        .arg(out.join(BINARY))
        .arg(binary))?;
    for file in FILES {
        let to = out.join(file);
        let parent = to.parent().unwrap_or(out);
        fs::create_dir_all(parent).map_err(Error::file(parent))?;
        run(Command::new("cp")
            .arg("-r")
            .arg(root().join(file))
            .arg(parent))?;
    }
    let script = root().join("tests/device/run.sh");
    fs::copy(&script, out.join("run.sh")).map_err(Error::file(&script))?;
    let config = root().join("tests/cubecl.toml");
    let config = fs::read_to_string(&config).map_err(Error::file(&config))? + ENVIRONMENT;
    fs::write(out.join("cubecl.toml"), config).map_err(Error::file(out))?;
    for program in PROGRAMS {
        let script = format!("#!/bin/sh\nexec \"$(dirname \"$0\")/{BINARY}\" {program} \"$@\"\n");
        write_script(&out.join(program), &script)?;
    }
    fs::write(out.join("commit"), commit).map_err(Error::file(out))?;

    let mut packed = out.as_os_str().to_owned();
    packed.push(".tar.xz");
    let name = out
        .file_name()
        .ok_or_else(|| Error::Needs(format!("{}: is no name of a folder", out.display())))?;
    let parent = out
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    run(Command::new("tar")
        .env("XZ_OPT", XZ)
        .arg("-cJf")
        .arg(&packed)
        .arg("-C")
        .arg(parent)
        .arg(name))?;
    let bytes = fs::metadata(&packed).map_err(Error::file(&packed))?.len();
    println!(
        "xtask: {}, {:.1} MiB: unpack it on the other machine with tar, then {}/run.sh",
        packed.display(),
        bytes as f64 / MIB,
        name.display()
    );
    if bytes as f64 > MAX_MIB * MIB {
        return Err(Error::Needs(format!(
            "{}: larger than the {MAX_MIB} MiB that a pack may have",
            packed.display()
        )));
    }
    Ok(())
}

fn write_script(path: &Path, text: &str) -> Result<(), Error> {
    fs::write(path, text).map_err(Error::file(path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).map_err(Error::file(path))
}

/// Returns the commit that is checked out, followed by `with uncommitted changes` if the files
/// differ from it.
fn commit_of_tree() -> Result<String, Error> {
    let commit = git(&["rev-parse", "HEAD"])?;
    let changes = git(&["status", "--porcelain"])?;
    Ok(if changes.is_empty() {
        format!("{commit}\n")
    } else {
        format!("{commit} with uncommitted changes\n")
    })
}

/// Returns the output of a git command.
fn git(args: &[&str]) -> Result<String, Error> {
    let mut command = Command::new("git");
    command.args(args).current_dir(root());
    let output = command
        .stderr(Stdio::null())
        .output()
        .map_err(|source| Error::Start {
            command: show(&command),
            source,
        })?;
    if !output.status.success() {
        return Err(Error::Failed {
            command: show(&command),
            status: output.status,
        });
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests;
