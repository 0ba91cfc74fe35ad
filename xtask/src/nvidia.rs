//! Installs NVIDIA's compiler without the CUDA toolkit: the wheels that NVIDIA publishes for
//! Python, in a virtual environment in the build folder.
//!
//! `tests/sass` compiles the kernels with this compiler for every card, which needs no GPU and no
//! driver.

use crate::llvm;
use crate::process::{Error, cargo, install_packages, run, step, target};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The environment variable with the compiler's folder, which `tests/sass` reads.
pub const VARIABLE: &str = "BURN_MARLIN_NVIDIA";
/// The wheels of NVRTC, ptxas (in `nvcc`), nvdisasm, and the headers that CubeCL's CUDA source
/// includes. The wheels and their dependencies are pinned, because the number of registers depends
/// on the version.
const WHEELS: [&str; 7] = [
    "nvidia-cuda-nvrtc==13.5.37",
    "nvidia-cuda-nvcc==13.5.37",
    "nvidia-cuda-nvdisasm==13.5.37",
    "nvidia-cuda-runtime==13.5.37",
    "nvidia-cuda-crt==13.5.37",
    "nvidia-cuda-cccl==13.3.5.0.6",
    "nvidia-nvvm==13.5.37",
];
/// The folder of the wheels with the files of CUDA 13.
const CUDA: &str = "cu13";

/// The environment variable with the mode of the proof, which `tests/sass` reads.
const MODE: &str = "BURN_MARLIN_PROOF";

/// The mode of the proof: the kernels that it compiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// Every kernel of the ledger.
    Everything,
    /// Every kernel of the ledger, and every configuration that it leaves out.
    All,
    /// Kernels that are not in the ledger, which is then rewritten.
    Bless,
}

impl Proof {
    const fn name(self) -> &'static str {
        match self {
            Self::Everything => "everything",
            Self::All => "all",
            Self::Bless => "bless",
        }
    }
}

/// Compiles kernels for every card and checks their machine code against the rules and the ledger.
pub fn prove(proof: Proof) -> Result<(), Error> {
    let compiler = step("set-up", || {
        llvm::set_up()?;
        set_up()
    })?;
    let folder = compiler.ok_or_else(|| {
        Error::Needs("NVIDIA's compiler is installed on Linux only; run this there".into())
    })?;
    step("proof", || {
        run(cargo(["test", "--workspace", "--test", "sass"])
            .env(VARIABLE, folder)
            .env(MODE, proof.name()))
    })
}

/// Returns the folder of the compiler, after installing it if needed; `None` on systems without
/// such wheels.
pub fn set_up() -> Result<Option<PathBuf>, Error> {
    if !cfg!(target_os = "linux") {
        return Ok(None);
    }
    let environment = target().join("nvidia");
    // The stamp is written last: a folder with it has a complete installation of these versions.
    let stamp = environment.join("installed");
    let wanted = WHEELS.join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return compiler(&environment).map(Some);
    }
    println!(
        "xtask: installing NVIDIA's compiler into {}, to compile the kernels for every card without a GPU",
        environment.display()
    );
    if !has_venv() {
        install_packages(
            &["python3-venv"],
            "NVIDIA's compiler is installed with Python's venv and pip, which are missing here",
        )?;
    }
    run(Command::new("python3")
        .args(["-m", "venv", "--clear"])
        .arg(&environment))?;
    let mut install = Command::new(environment.join("bin/python"));
    install
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary",
            ":all:",
        ])
        .args(WHEELS);
    run(&mut install)?;
    let folder = compiler(&environment)?;
    fs::write(&stamp, wanted).map_err(Error::file(&stamp))?;
    Ok(Some(folder))
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

/// Returns the folder of the compiler in the environment:
/// `lib/python3.*/site-packages/nvidia/cu13`.
fn compiler(environment: &Path) -> Result<PathBuf, Error> {
    let lib = environment.join("lib");
    let entries = fs::read_dir(&lib).map_err(Error::file(&lib))?;
    let mut folders = entries.filter_map(|entry| {
        entry
            .ok()
            .map(|entry| entry.path().join("site-packages/nvidia").join(CUDA))
    });
    folders.find(|folder| folder.join("bin/ptxas").exists()).ok_or_else(|| {
        let shown = environment.display();
        Error::Needs(format!(
            "the wheels are installed in {shown}, without `nvidia/{CUDA}/bin/ptxas`; remove that folder and repeat the command"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wheel_is_pinned() {
        assert!(WHEELS.iter().all(|wheel| {
            wheel
                .split_once("==")
                .is_some_and(|(_, version)| !version.is_empty())
        }));
    }

    #[test]
    fn the_compiler_is_found_whatever_the_python() -> Result<(), Error> {
        let environment = target().join("tmp/nvidia-test");
        let bin = environment
            .join("lib/python3.99/site-packages/nvidia")
            .join(CUDA)
            .join("bin");
        fs::create_dir_all(&bin).map_err(Error::file(&bin))?;
        assert!(matches!(compiler(&environment), Err(Error::Needs(_))));
        fs::write(bin.join("ptxas"), "").map_err(Error::file(&bin))?;
        assert_eq!(
            compiler(&environment)?,
            bin.parent().map(Path::to_path_buf).unwrap_or_default()
        );
        fs::remove_dir_all(&environment).map_err(Error::file(&environment))
    }
}
