//! Passes the versions of Burn and CubeCL and, in release builds, the commit to the program.

use std::fs;
use std::path::Path;
use std::process::Command;

fn main() {
    // A package has a lock file of its own; in the repository it is the workspace's.
    let lock = ["Cargo.lock", "../../Cargo.lock"].map(Path::new);
    let lock = lock.into_iter().find(|path| path.exists());
    let text = lock.map_or_else(String::new, |path| {
        println!("cargo:rerun-if-changed={}", path.display());
        fs::read_to_string(path).unwrap_or_default()
    });
    for (variable, package) in [("BURN_VERSION", "burn"), ("CUBECL_VERSION", "cubecl")] {
        if let Some(version) = locked_version(&text, package) {
            println!("cargo:rustc-env={variable}={version}");
        }
    }
    let variable = |name| std::env::var(name).unwrap_or_default();
    let (profile, level) = (variable("PROFILE"), variable("OPT_LEVEL"));
    println!("cargo:rustc-env=BUILD_PROFILE={profile}, opt-level {level}");
    // Other builds would be linked again after every commit.
    // A package has no repository, although its folder may be in one.
    if profile == "release" && Path::new("../../.git").exists() {
        if let Some(log) =
            git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists())
        {
            println!("cargo:rerun-if-changed={log}");
        }
        if let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) {
            println!("cargo:rustc-env=BUILD_COMMIT={commit}");
        }
    }
}

/// Returns the version of a package in the text of a Cargo.lock.
fn locked_version<'a>(lock: &'a str, package: &str) -> Option<&'a str> {
    let (_, rest) = lock.split_once(&format!("name = \"{package}\"\nversion = \""))?;
    rest.split('"').next()
}

/// Returns the output of git, if there is a repository.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| output.status.success() && !text.is_empty())
}
