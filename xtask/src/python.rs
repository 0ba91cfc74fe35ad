//! Python packages in virtual environments of the build folder.

use crate::process::{Error, install_packages, run};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Installs packages into a new virtual environment, unless it has exactly these. The versions are
/// pinned, and those of dependencies are in the list. `what` names the packages in messages.
pub fn install(environment: &Path, packages: &[&str], what: &str) -> Result<(), Error> {
    // The stamp is written last: a folder with it has a complete installation of these versions.
    let stamp = environment.join("installed");
    let wanted = packages.join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    println!("xtask: installing {what} into {}", environment.display());
    if !has_venv() {
        let why = format!("{what} is installed with Python's venv and pip, which are missing here");
        install_packages(&["python3-venv"], &why)?;
    }
    run(Command::new("python3")
        .args(["-m", "venv", "--clear"])
        .arg(environment))?;
    let mut pip = Command::new(environment.join("bin/python"));
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]);
    run(pip.args(packages))?;
    fs::write(&stamp, wanted).map_err(Error::file(&stamp))
}

/// Returns true if `python3` can create virtual environments. Debian's Python lacks `ensurepip`
/// without the package `python3-venv`.
fn has_venv() -> bool {
    let probe = Command::new("python3")
        .args(["-c", "import ensurepip, venv"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    probe.is_ok_and(|status| status.success())
}
