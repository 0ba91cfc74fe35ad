//! Sets up an LLVM for CubeCL's build if CubeCL's own bundle cannot be downloaded.
//!
//! `cubecl-cuda` and `cubecl-cpu` link LLVM statically. The build script of `tracel-llvm-bundler`
//! downloads a prebuilt bundle into the user's data folder, unless there is a marker file of an
//! earlier download. If the download fails, Debian's LLVM packages replace the bundle: this module
//! writes the marker, and an `llvm-config` that returns Debian's libraries.

use crate::process::{Error, cargo, install_packages, root};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

const BUNDLER: &str = "tracel-llvm-bundler";
/// The crate that has the bundler as a build dependency.
const DEPENDENT: &str = "cubecl-llvm";
const MARKER: &str = ".tracel-llvm-installed";
/// The packages that replace the bundle: LLVM 22, and the libraries that its static archives need.
const PACKAGES: [&str; 6] = [
    "llvm-22-dev",
    "libpolly-22-dev",
    "libzstd-dev",
    "libxml2-dev",
    "zlib1g-dev",
    "libz3-dev",
];
const LLVM_CONFIG: &str = "/usr/bin/llvm-config-22";

/// Sets this machine up so that `cargo build` builds the workspace.
pub fn set_up() -> Result<(), Error> {
    let Some(bundle) = bundle_folder()? else {
        return Ok(());
    };
    if bundle.join(MARKER).exists() {
        return Ok(());
    }
    println!("xtask: building {DEPENDENT}, whose build downloads an LLVM");
    // A build is the only reliable test of the download, and later builds use its results.
    let Some(log) = failed_build()? else {
        return Ok(());
    };
    let Some(reason) = download_failure(&log) else {
        return Err(Error::Needs(format!(
            "{DEPENDENT} does not build, and not for want of LLVM's download; the output above says why"
        )));
    };
    println!("xtask: the download failed ({reason}); Debian's LLVM 22 takes its place");
    if !Path::new(LLVM_CONFIG).exists() {
        let why = format!(
            "CubeCL's LLVM cannot be downloaded, and what takes its place, LLVM 22 with static libraries and {LLVM_CONFIG}, is missing"
        );
        install_packages(&PACKAGES, &why)?;
    }
    stand_in(&bundle)?;
    println!(
        "xtask: {} now answers with {LLVM_CONFIG}; a plain `cargo build` works from here on",
        bundle.display()
    );
    Ok(())
}

/// Returns the folder where the locked version of the bundler expects its bundle; `None` if the
/// system has no replacement for the bundle, or the lock file has no bundler.
fn bundle_folder() -> Result<Option<PathBuf>, Error> {
    if !cfg!(target_os = "linux") {
        return Ok(None);
    }
    let lock = root().join("Cargo.lock");
    let text = fs::read_to_string(&lock).map_err(Error::file(&lock))?;
    let Some(version) = locked_version(&text, BUNDLER) else {
        return Ok(None);
    };
    let data = match std::env::var_os("XDG_DATA_HOME").map(PathBuf::from) {
        Some(path) if path.is_absolute() => path,
        _ => {
            let home =
                std::env::var_os("HOME").ok_or_else(|| Error::Needs("HOME is not set".into()))?;
            Path::new(&home).join(".local/share")
        }
    };
    Ok(Some(
        data.join("tracel").join(format!("tracel-llvm-{version}")),
    ))
}

/// Returns the version of a package in the text of a Cargo.lock.
fn locked_version(lock: &str, package: &str) -> Option<String> {
    let start = lock.find(&format!("name = \"{package}\"\n"))?;
    let version = lock[start..].lines().nth(1)?.strip_prefix("version = \"")?;
    Some(version.trim_end_matches('"').to_owned())
}

/// Builds the crate that needs LLVM, passing its output through, and returns the output if the
/// build failed.
fn failed_build() -> Result<Option<String>, Error> {
    let mut command = cargo(["build", "--package", DEPENDENT]);
    let start = |source| Error::Start {
        command: format!("cargo build --package {DEPENDENT}"),
        source,
    };
    let mut child = command.stderr(Stdio::piped()).spawn().map_err(start)?;
    let mut log = String::new();
    for line in child
        .stderr
        .take()
        .into_iter()
        .flat_map(|pipe| BufReader::new(pipe).lines())
    {
        let line = line.map_err(start)?;
        eprintln!("{line}");
        log.push_str(&line);
        log.push('\n');
    }
    let status = child.wait().map_err(start)?;
    Ok((!status.success()).then_some(log))
}

/// Returns the bundler's message about a failed download; `None` if the build failed for another
/// reason.
fn download_failure(log: &str) -> Option<&str> {
    let (_, bundler) = log.split_once(&format!(
        "failed to run custom build command for `{BUNDLER}"
    ))?;
    bundler
        .lines()
        .map(str::trim)
        .find(|line| line.contains("on an `Err` value"))
}

/// Writes the marker, and the `llvm-config` that build scripts run.
fn stand_in(bundle: &Path) -> Result<(), Error> {
    let bin = bundle.join("bin");
    fs::create_dir_all(&bin).map_err(Error::file(&bin))?;
    let config = bin.join("llvm-config");
    // Debian's llvm-config prints some system libraries as absolute paths; the build script accepts
    // only `-lNAME`.
    let script = format!(
        "#!/bin/sh\nset -e\nanswer=$({LLVM_CONFIG} \"$@\")\nprintf '%s\\n' \"$answer\" | sed -E 's#/[^ ]*/lib([a-z0-9]+)\\.so#-l\\1#g'\n"
    );
    fs::write(&config, script).map_err(Error::file(&config))?;
    fs::set_permissions(&config, fs::Permissions::from_mode(0o755))
        .map_err(Error::file(&config))?;
    let marker = bundle.join(MARKER);
    fs::write(&marker, "").map_err(Error::file(&marker))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_locked_version_is_that_of_the_named_package() {
        let lock = "[[package]]\nname = \"other\"\nversion = \"1.0.0\"\n\n[[package]]\nname = \"tracel-llvm-bundler\"\nversion = \"23.1.0-4\"\n";
        assert_eq!(locked_version(lock, BUNDLER).as_deref(), Some("23.1.0-4"));
        assert_eq!(locked_version(lock, "absent"), None);
    }

    #[test]
    fn only_a_failed_download_brings_the_stand_in() {
        let download = "error: failed to run custom build command for `tracel-llvm-bundler v23.1.0-4`\n  called `Result::unwrap()` on an `Err` value: Io(Custom)";
        let compiler = "error: failed to run custom build command for `lzma-sys v0.1`\n  called `Result::unwrap()` on an `Err` value: Io(Custom)";
        assert!(download_failure(download).is_some());
        assert!(download_failure(compiler).is_none());
    }
}
