//! Runs other programs, with errors that name the command.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The error of a task.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The program is not installed, or the user may not run it.
    #[error("`{command}` could not be started: {source}")]
    Start {
        command: String,
        source: std::io::Error,
    },
    /// The program ran and failed.
    #[error("`{command}` failed ({status})")]
    Failed {
        command: String,
        status: std::process::ExitStatus,
    },
    /// A file or folder could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    /// A condition that the user must resolve first.
    #[error("{0}")]
    Needs(String),
}

impl Error {
    /// Attaches the path to an input or output error.
    pub fn file(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::File { path, source }
    }
}

/// Returns the root folder of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
        .to_path_buf()
}

/// Returns the folder of build outputs: `CARGO_TARGET_DIR` if set, otherwise `target`.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// Returns a command of the `cargo` that runs this task, in the root folder of the workspace.
pub fn cargo<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(args: I) -> Command {
    let mut command = in_workspace(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args);
    command
}

/// Returns a command that runs in the root folder of the workspace.
///
/// The command does not inherit the variables that describe xtask's own package: build scripts of
/// dependencies (ring's) rerun if these variables change, so alternating between `cargo test` and
/// `cargo xtask test` would recompile Burn every time.
pub fn in_workspace(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if ["CARGO_PKG_", "CARGO_MANIFEST_"]
            .iter()
            .any(|prefix| name.to_string_lossy().starts_with(prefix))
        {
            command.env_remove(name);
        }
    }
    command.current_dir(root());
    command
}

/// Runs a command and waits for it, passing its output through.
pub fn run(command: &mut Command) -> Result<(), Error> {
    let status = command.status().map_err(|source| Error::Start {
        command: show(command),
        source,
    })?;
    if status.success() {
        Ok(())
    } else {
        Err(Error::Failed {
            command: show(command),
            status,
        })
    }
}

/// Runs a command and returns its output.
pub fn output(command: &mut Command) -> Result<String, Error> {
    let output = command.output().map_err(|source| Error::Start {
        command: show(command),
        source,
    })?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(Error::Failed {
            command: show(command),
            status: output.status,
        })
    }
}

/// Builds with a cargo command, prints its diagnostics, and returns cargo's messages, one line of
/// JSON each. `rustc` is what the command passes on to the compiler.
pub fn build_messages(command: &[&str], rustc: &[&str]) -> Result<String, Error> {
    let mut build = cargo(command);
    build.args(["--message-format", "json-render-diagnostics"]);
    if !rustc.is_empty() {
        build.arg("--").args(rustc);
    }
    output(build.stderr(Stdio::inherit()))
}

/// Builds a binary with a cargo command, as [`build_messages`] does, and returns its path.
pub fn build(command: &[&str], rustc: &[&str]) -> Result<PathBuf, Error> {
    executable(&build_messages(command, rustc)?)
        .map(|path| root().join(path))
        .ok_or_else(|| {
            Error::Needs(format!(
                "cargo built a binary and did not name it; run `cargo {}` to see why",
                command.join(" ")
            ))
        })
}

/// Returns the last executable in cargo's messages.
fn executable(messages: &str) -> Option<&str> {
    let (_, after) = messages.rsplit_once("\"executable\":\"")?;
    after.split_once('"').map(|(path, _)| path)
}

/// Runs one named step, printing its name before and its duration after.
pub fn step<T>(name: &str, body: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    println!("=== {name}");
    let start = Instant::now();
    let value = body()?;
    println!("=== {name}: ok in {:.1} s", start.elapsed().as_secs_f64());
    Ok(value)
}

/// Installs Debian packages, as root or with a `sudo` that needs no password. `why` is a sentence
/// that states the purpose of the packages, without its full stop.
pub fn install_packages(packages: &[&str], why: &str) -> Result<(), Error> {
    let names = packages.join(" ");
    if !Path::new("/usr/bin/apt-get").exists() {
        return Err(Error::Needs(format!(
            "{why}. This is no Debian system: install what Debian has as {names}, then repeat the command"
        )));
    }
    let install = format!("apt-get install --yes --no-install-recommends {names}");
    let by_hand = || {
        let lines = format!("sudo apt-get update && sudo {install}");
        Error::Needs(format!(
            "{why}. This user may not install packages. Run\n\n    {lines}\n\nthen repeat the command"
        ))
    };
    let mut prefix: Vec<&str> = Vec::new();
    if !is_root() {
        let sudo = Command::new("sudo")
            .args(["-n", "true"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if !sudo.is_ok_and(|status| status.success()) {
            return Err(by_hand());
        }
        prefix.extend(["sudo", "-n"]);
    }
    prefix.extend(["env", "DEBIAN_FRONTEND=noninteractive"]);
    println!("xtask: {install}");
    for line in ["apt-get update", install.as_str()] {
        let mut words = prefix.iter().copied().chain(line.split(' '));
        let mut command = Command::new(words.next().unwrap_or("env"));
        run(command.args(words).stdout(Stdio::null()))
            .map_err(|error| Error::Needs(format!("{error}\n{}", by_hand())))?;
    }
    Ok(())
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// Returns the command line as a user would type it.
pub fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::executable;

    #[test]
    fn the_executable_is_the_last_one_named() {
        let messages = "{\"executable\":null}\n{\"target\":{},\"executable\":\"/a/device-1\",\"fresh\":true}\n{\"reason\":\"build-finished\"}";
        assert_eq!(executable(messages), Some("/a/device-1"));
        assert_eq!(executable("{}"), None);
    }
}
